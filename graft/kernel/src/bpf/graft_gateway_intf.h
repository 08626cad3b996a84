/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Types that graft_gateway.bpf.c shares with graft/kernel/src/gateway/intf.rs. */
#ifndef MILLRACE_GRAFT_GATEWAY_INTF_H
#define MILLRACE_GRAFT_GATEWAY_INTF_H

#include "graft_hook_intf.h"

#define GATEWAY_PREFIXES 2048
#define GATEWAY_FLOWS	 65536

/* States of a connection that is not established yet, or that is forwarded. */
#define GATEWAY_WAITING 1 /* the tunnel broker was notified of the SYN and has not decided */
#define GATEWAY_OPEN	2 /* the tunnel broker accepts the connection's SYN */
#define GATEWAY_FORWARD 3 /* the connection is forwarded until `until_ns` */

struct gateway_config {
	/* packet mark (skb->mark) of packets for the tunnel broker's sockets; a routing rule delivers marked packets
	 * locally
	 */
	__u32 mark;
	__u32 mark_again; /* packet mark of SYNs that the tunnel broker sends again over loopback */
	__u16 port4;	  /* the tunnel broker's port on 127.0.0.1 */
	__u16 port6;	  /* the tunnel broker's port on ::1; 0: none */
};

/* Key of the LPM tries of address prefixes: the networks of peers, and the inside networks (behind this gateway). */
struct gateway_prefix {
	/* prefix length in bits; IPv4 addresses are IPv4-mapped IPv6 addresses here, so their length is 96 more */
	__u32 bits;
	address_words address; /* IPv6 or IPv4-mapped address, as in struct hook_end */
};

struct gateway_flow {
	struct hook_end client;
	struct hook_end server;
};

struct gateway_state {
	__u64 until_ns; /* time at which the state GATEWAY_FORWARD ends, ns (CLOCK_MONOTONIC) */
	__u32 state;
	__u32 pad;
};

/* An event for the tunnel broker: a SYN that was held back. */
struct gateway_ask {
	struct gateway_flow flow;
	__u32 bytes;
	__u32 old;    /* 1: the tunnel broker has a socket in TIME_WAIT with the same addresses and ports */
	__u8 syn[64]; /* the TCP header with its options, 20 to 60 bytes */
};

/* The verdict on a packet of a host in an inside network (behind this gateway). GATEWAY_PLAIN and all later verdicts
 * pass the packet on.
 */
enum gateway_verdict {
	GATEWAY_OTHER,	    /* passed on: not TCP to a peer's network */
	GATEWAY_TAKEN,	    /* a packet of a redirected connection: delivered to the tunnel broker's socket */
	GATEWAY_ICMP_ERROR, /* ICMP error about a redirected connection: delivered to its socket */
	GATEWAY_ASKED,	    /* a SYN, held back; the tunnel broker was notified */
	GATEWAY_HELD,	    /* a repeated SYN, held back while the tunnel broker has not decided */
	GATEWAY_LET_IN,	    /* a SYN that the tunnel broker accepted */
	GATEWAY_NO_ROOM,    /* dropped, since the ring buffer was full: the client repeats it */
	GATEWAY_NO_SOCKET, /* dropped: the tunnel broker's socket is missing or full; the client repeats it */
	GATEWAY_PLAIN,	   /* passed on: a packet of a connection that is not redirected */
	/* passed on: a SYN while the tunnel broker has a socket in TIME_WAIT with the same addresses */
	GATEWAY_OLD,
	GATEWAY_NO_RULE,   /* passed on: a SYN that no rule matches */
	GATEWAY_OUTSIDE,   /* passed on: a SYN of a client outside the inside networks */
	GATEWAY_WRONG_WAY, /* passed on: a SYN of a client whose route uses another interface */
	GATEWAY_NO_FAMILY, /* passed on: a SYN of an address family in which the tunnel broker does not listen */
	GATEWAY_COLD,	   /* passed on: no carrier to the peer is connected */
	GATEWAY_REFUSED, /* passed on: the peer's tunnel broker refused an earlier connection to the server */
	GATEWAY_ASLEEP,	 /* passed on: the tunnel broker's heartbeat is overdue */
	GATEWAY_FRAGMENT,  /* passed on: a fragment, whose connection is unknown */
	GATEWAY_MALFORMED, /* passed on: a header is malformed or cut off */
	GATEWAY_VERDICTS,
};

#endif
