/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Structures shared by bypass.bpf.c and lib.rs. */
#ifndef MILLRACE_BYPASS_H
#define MILLRACE_BYPASS_H

#include <linux/bpf.h>
#include <linux/types.h>

/* Largest number of sockets: two for each of a broker's connections. Further sockets use TCP. */
#define BYPASS_SOCKETS 131072

struct bypass_config {
	__u64 window_bytes; /* bytes from an application that may be passed before the broker has read them */
	__u32 both_ways;    /* 1: bytes from the broker to applications are passed as well */
	__u16 port;	    /* port of the broker on 127.0.0.1 and ::1, host byte order */
	__u16 pad;
};

_Static_assert(sizeof(struct bypass_config) == 16, "as lib.rs writes it");

/* Address and port of one side of a connection. */
struct bypass_end {
	__u32 address[4]; /* address in network byte order; IPv4 as ::ffff:a.b.c.d */
	__u16 port;	  /* port in host byte order */
	__u16 pad;
};

/* Identifies a socket: its own address and port, and those of the opposite socket. */
struct bypass_key {
	struct bypass_end near;
	struct bypass_end far;
};

_Static_assert(sizeof(struct bypass_key) == 40, "as lib.rs writes it");

/* Counts of the bytes that a socket has sent. Only the socket's own send calls change it, one at a time. */
struct bypass_sent {
	__u64 passed_on; /* bytes that were passed to the opposite socket */
	__u64 by_tcp;
	__u64 mark;	 /* stream offset after the last byte sent by TCP; 0: no byte was sent by TCP */
	__u32 last;	 /* TCP sequence number of the next byte to send */
	__u32 is_broker; /* 1: the socket is the broker's */
};

/* Outcome of each send call, and of each attempt to add a socket to the map `sockets`. */
enum bypass_verdict {
	BYPASS_PASSED_ON, /* bytes were passed to the opposite socket's queue */
	BYPASS_FULL,	  /* the bytes go by TCP: the window is full of bytes that the broker has not read */
	BYPASS_BEHIND, /* the bytes go by TCP: earlier bytes sent by TCP are unread, and passed bytes would overtake them */
	BYPASS_ALONE,	/* the bytes go by TCP: the opposite socket is not in the map */
	BYPASS_ONE_WAY, /* the bytes go by TCP: the broker is sending, and both_ways is 0 */
	BYPASS_UNKNOWN, /* the bytes go by TCP: the socket's state was evicted, or the socket is not TCP */
	BYPASS_ENTERED, /* number of sockets that were added to the map when they were connected */
	BYPASS_NO_ROOM, /* number of sockets that were not added to the map because a map was full */
	BYPASS_EARLY, /* number of sockets that were not added to the map because they sent bytes with their SYN */
	BYPASS_VERDICTS,
};

#endif
