/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Types that graft_gateway.bpf.c shares with graft/kernel/src/gateway/intf.rs. */
#ifndef MILLRACE_GRAFT_GATEWAY_INTF_H
#define MILLRACE_GRAFT_GATEWAY_INTF_H

#include "graft_hook_intf.h"

#define GATEWAY_PREFIXES 2048
#define GATEWAY_FLOWS	 65536

/* States of a connection that is not established yet, or that is forwarded. */
#define GATEWAY_WAITING 1 /* the broker was notified and has not decided */
#define GATEWAY_OPEN	2 /* the broker accepts its SYN */
#define GATEWAY_FORWARD 3 /* it is forwarded until `until_ns` */

struct gateway_config {
	__u32 mark;	  /* mark of packets for the broker's sockets: a rule delivers them locally */
	__u32 mark_again; /* mark of SYNs that the broker sends again over loopback */
	__u16 port4;	  /* the broker's port on 127.0.0.1 */
	__u16 port6;	  /* the same on ::1; 0: none */
};

/* A key of the prefix tries. */
struct gateway_prefix {
	__u32 bits;	       /* prefix length of the mapped address: 96 more for IPv4 */
	address_words address; /* address in the form of hook_end */
};

struct gateway_flow {
	struct hook_end client;
	struct hook_end server;
};

struct gateway_state {
	__u64 until_ns; /* end of the state GATEWAY_FORWARD, ns (CLOCK_MONOTONIC) */
	__u32 state;
	__u32 pad;
};

/* An event for the broker: a SYN that was held back. */
struct gateway_ask {
	struct gateway_flow flow;
	__u32 bytes;
	__u32 old;    /* 1: the broker has a socket in TIME_WAIT with the same addresses */
	__u8 syn[64]; /* the TCP header with its options, 20 to 60 bytes */
};

/* The verdict on a packet of an inside host. */
enum gateway_verdict {
	GATEWAY_OTHER,	   /* passed on: not TCP to a peer's network */
	GATEWAY_TAKEN,	   /* a packet of a redirected connection: delivered to the broker's socket */
	GATEWAY_TOLD,	   /* ICMP error about a redirected connection: delivered to its socket */
	GATEWAY_ASKED,	   /* a SYN, held back; the broker was notified */
	GATEWAY_HELD,	   /* a repeated SYN, held back while the broker has not decided */
	GATEWAY_LET_IN,	   /* a SYN that the broker accepted */
	GATEWAY_NO_ROOM,   /* dropped, since the ring buffer was full: the client repeats it */
	GATEWAY_NO_SOCKET, /* dropped: the broker's socket is missing or full; the client repeats it */
	GATEWAY_PLAIN,	   /* a packet of another connection: passed on, as all below */
	GATEWAY_OLD,	   /* a SYN while the broker has a socket in TIME_WAIT with the same addresses */
	GATEWAY_NO_RULE,   /* a SYN that no rule matches */
	GATEWAY_OUTSIDE,   /* a SYN of a client outside the inside networks */
	GATEWAY_WRONG_WAY, /* a SYN of a client whose route is by another interface */
	GATEWAY_NO_FAMILY, /* a SYN of an address family in which the broker does not listen */
	GATEWAY_COLD,	   /* no carrier to the peer is connected */
	GATEWAY_REFUSED,   /* the peer's broker refused an earlier connection */
	GATEWAY_ASLEEP,	   /* the broker has sent no heartbeat for a while */
	GATEWAY_FRAGMENT,  /* a fragment: its connection is unknown */
	GATEWAY_MALFORMED, /* a header is malformed or cut off */
	GATEWAY_VERDICTS,
};

#endif
