/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What graft_gateway.bpf.c shares with graft/kernel/src/gateway/intf.rs. */
#ifndef MILLRACE_GRAFT_GATEWAY_INTF_H
#define MILLRACE_GRAFT_GATEWAY_INTF_H

#include "graft_hook_intf.h"

#define GATEWAY_PREFIXES 2048
#define GATEWAY_FLOWS	 65536

/* What is known of a connection that is not there yet, or of one that is not carried. */
#define GATEWAY_WAITING 1 /* the broker was asked */
#define GATEWAY_OPEN	2 /* its SYN may come in */
#define GATEWAY_FORWARD 3 /* it is forwarded, until a time */

struct gateway_config {
	__u32 mark;	  /* of packets that are for this host: a rule has them routed so */
	__u32 mark_again; /* of SYNs that the broker sends once more */
	__u16 port4;	  /* where the broker listens on 127.0.0.1 */
	__u16 port6;	  /* and on ::1; 0: nowhere */
};

/* A key of a trie of prefixes. */
struct gateway_prefix {
	__u32 bits;	       /* of the mapped address: 96 more for IPv4 */
	address_words address; /* as in an end */
};

struct gateway_flow {
	struct hook_end client;
	struct hook_end server;
};

struct gateway_state {
	__u64 until_ns; /* CLOCK_MONOTONIC, of what is plain */
	__u32 state;
	__u32 pad;
};

/* A SYN, for the broker. */
struct gateway_ask {
	struct gateway_flow flow;
	__u32 bytes;
	__u32 old;    /* the socket of a connection before, between the same ends, waits */
	__u8 syn[64]; /* the TCP header, with its options: 20 to 60 bytes */
};

/* What became of a packet. */
enum gateway_verdict {
	GATEWAY_OTHER,	   /* no TCP to a peer's network: passed on */
	GATEWAY_TAKEN,	   /* of a carried connection: to its socket */
	GATEWAY_TOLD,	   /* an ICMP error about a carried connection: to its socket */
	GATEWAY_ASKED,	   /* a SYN: held back, and the broker was told */
	GATEWAY_HELD,	   /* the same one once more, while the broker does not know yet */
	GATEWAY_LET_IN,	   /* a SYN that the broker has let in */
	GATEWAY_NO_ROOM,   /* held back, as the broker has not taken those before: it comes again */
	GATEWAY_NO_SOCKET, /* the broker's socket was not found, or did not take it: dropped, it comes again */
	GATEWAY_PLAIN,	   /* of a connection that is not carried: passed on, as are all below */
	GATEWAY_OLD, /* a SYN, while a socket of a connection before between the same ends waits: the kernel drops it */
	GATEWAY_NO_RULE,   /* a SYN that no rule fits */
	GATEWAY_OUTSIDE,   /* of a client that is not in this gateway's networks */
	GATEWAY_WRONG_WAY, /* of a client that is reached by another interface */
	GATEWAY_NO_FAMILY, /* the broker does not listen in its address family */
	GATEWAY_COLD,	   /* no carrier is warm */
	GATEWAY_REFUSED,   /* the peer's broker has refused the one before */
	GATEWAY_ASLEEP,	   /* the broker has not said for a while that it is there */
	GATEWAY_FRAGMENT,  /* of a larger packet: whose it is cannot be seen */
	GATEWAY_MALFORMED, /* no such header */
	GATEWAY_VERDICTS,
};

#endif
