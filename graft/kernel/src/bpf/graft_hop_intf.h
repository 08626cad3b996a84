/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What graft_hop.bpf.c shares with graft/kernel/src/hop.rs. */
#ifndef MILLRACE_GRAFT_HOP_INTF_H
#define MILLRACE_GRAFT_HOP_INTF_H

#include "graft_hook_intf.h"

/* Both ends of as many connections as a broker can have; more are not entered, and go by TCP. */
#define HOP_SOCKETS 131072

struct hop_config {
	__u64 namespace_cookie; /* the broker's network namespace */
	__u64 window_bytes;	/* that an application may have given and the broker not taken */
	__u16 port4[2];		/* of the broker on 127.0.0.1, as in hook_config */
	__u16 port6[2];		/* and on ::1 */
	__u32 both_ways;	/* 1: what the broker sends is passed on, too */
	__u32 pad;
};

/* A socket, by its own end and the other. */
struct hop_key {
	struct hook_end near;
	struct hook_end far;
};

/* Of what a socket has sent. Only its own system calls change this, one at a time. */
struct hop_sent {
	__u64 passed_on; /* bytes */
	__u64 by_tcp;
	__u64 mark;	 /* where in the stream the last byte by TCP ends; 0: there is none */
	__u32 last;	 /* TCP's sequence number of what comes next */
	__u32 is_broker; /* 1: the broker's end */
};

/* What became of what a socket sends, of each call; and of sockets that might be entered. */
enum hop_verdict {
	HOP_PASSED_ON, /* to the other end's queue */
	HOP_FULL,      /* the broker has yet to take as much as it may: by TCP, which waits for it */
	HOP_BEHIND,    /* what went by TCP before was not taken yet: it would overtake that */
	HOP_ALONE,     /* the other end is not entered */
	HOP_ONE_WAY,   /* from the broker, and this kernel does not count what an application has not read */
	HOP_UNKNOWN,   /* nothing is known of the socket any more, or no TCP */
	HOP_ENTERED,   /* sockets, when they were connected */
	HOP_NO_ROOM,   /* sockets that there is no room for */
	HOP_EARLY,     /* sockets that had sent bytes with their SYN */
	HOP_VERDICTS,
};

#endif
