/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Structures shared by bypass.bpf.c and lib.rs. */
#ifndef MILLRACE_BYPASS_H
#define MILLRACE_BYPASS_H

#include <linux/bpf.h>
#include <linux/types.h>

/* Largest number of sockets: two for each of a broker's connections. Further ones are not entered and use TCP. */
#define BYPASS_SOCKETS 131072

struct bypass_config {
	__u64 window_bytes; /* that an application may have given and the broker not taken */
	__u32 both_ways;    /* 1: what the broker sends is passed on, too */
	__u16 port;	    /* of the broker on 127.0.0.1 and ::1, host order */
	__u16 pad;
};

_Static_assert(sizeof(struct bypass_config) == 16, "as lib.rs writes it");

/* Address and port of one side of a connection. */
struct bypass_end {
	__u32 address[4]; /* network order; IPv4 as ::ffff:a.b.c.d */
	__u16 port;	  /* host order */
	__u16 pad;
};

/* A socket, by its own side and the opposite one. */
struct bypass_key {
	struct bypass_end near;
	struct bypass_end far;
};

_Static_assert(sizeof(struct bypass_key) == 40, "as lib.rs writes it");

/* Counts of the bytes that a socket has sent. Only the socket's own send calls change it, one at a time. */
struct bypass_sent {
	__u64 passed_on; /* bytes */
	__u64 by_tcp;
	__u64 mark;	 /* where in the stream the last byte by TCP ends; 0: there is none */
	__u32 last;	 /* TCP's sequence number of the next byte */
	__u32 is_broker; /* 1: the broker's end */
};

/* Outcome of each send call, and of each attempt to enter a socket. */
enum bypass_verdict {
	BYPASS_PASSED_ON, /* to the other end's queue */
	BYPASS_FULL,	  /* the broker has yet to take as much as it may: by TCP, which waits for it */
	BYPASS_BEHIND,	  /* what went by TCP before was not taken yet: it would overtake that */
	BYPASS_ALONE,	  /* the other end is not entered */
	BYPASS_ONE_WAY, /* from the broker, and this kernel does not count what an application has not read */
	BYPASS_UNKNOWN, /* nothing is known of the socket any more, or no TCP */
	BYPASS_ENTERED, /* sockets, when they were connected */
	BYPASS_NO_ROOM, /* sockets that there is no room for */
	BYPASS_EARLY,	/* sockets that had sent bytes with their SYN */
	BYPASS_VERDICTS,
};

#endif
