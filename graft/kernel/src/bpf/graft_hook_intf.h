/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What graft_hook.bpf.c shares with graft/kernel/src/hook/intf.rs. */
#ifndef MILLRACE_GRAFT_HOOK_INTF_H
#define MILLRACE_GRAFT_HOOK_INTF_H

#include <linux/types.h>
#include "address_intf.h"
#include "caller_intf.h"

#define HOOK_RULES    64
#define HOOK_PEERS    1024
#define HOOK_ARRIVALS 16384
#define HOOK_GUESTS   65536
#define HOOK_AVOIDED  4096

struct hook_config {
	__u64 namespace_cookie; /* the broker's network namespace: whoever is elsewhere cannot reach it */
	__u16 port4[2]; /* where the broker listens on 127.0.0.1, and where it holds SYNs back; 0: nowhere */
	__u16 port6[2]; /* and on ::1 */
};

/* One end of a connection. */
struct hook_end {
	address_words address; /* network order; IPv4 as ::ffff:a.b.c.d */
	__u16 port;	       /* host order */
	__u16 pad;
};

/* Connections that may be led, or are not to be. The first that fits counts. One with last port 0 ends the list. */
struct hook_rule {
	address_words peer;
	address_words mask;
	__u16 first_port; /* host order, both inclusive */
	__u16 last_port;
	__u32 strict;	/* 1: it succeeds when the server was reached, and not before */
	__u32 choice;	/* by which its paths are found in `choices`; 0: all of them are led */
	__u32 in_place; /* 1: it is not led, and no rule behind this one counts */
	struct caller_wanted caller;
};

/* By its address: a host with a broker. */
struct hook_peer {
	address_words near; /* this host's address towards it */
	__u32 warm;	    /* whether a carrier to it is there */
	__u32 pad;
};

/* Of a connection that was led: what its application believes. */
struct hook_led {
	struct hook_end far;
	struct hook_end near;		 /* its port does not count: the socket's is true */
	char command[CALLER_NAME_BYTES]; /* of who has connected */
	__u64 cgroup;			 /* that the rule names, by id; 0: none */
	__u32 rule;			 /* its `choice` */
	__u32 serial;			 /* of what was chosen for its path; 0: nothing was */
	__u32 explored;
	__u32 uid; /* of who has made the socket, as netfilter's skuid has it */
	__u32 gid;
	__u32 mark;
};

/* By what a server's broker connects from and to: the socket that the server accepts. */
struct hook_guest {
	struct hook_end broker;
	__u16 server_port;
	__u16 pad;
};

/* What became of a connection to a host with a broker that a rule fits. */
enum hook_verdict {
	HOOK_LED,	   /* to the broker */
	HOOK_COLD,	   /* no carrier is warm: in place */
	HOOK_REFUSED,	   /* the server has refused the one before: in place, so that it says so itself */
	HOOK_OWN,	   /* the broker's own */
	HOOK_ELSEWHERE,	   /* of another network namespace */
	HOOK_BOUND_DEVICE, /* to an interface: loopback is another */
	HOOK_NOT_TCP,	   /* MPTCP, or another kind of stream */
	HOOK_NO_FAMILY,	   /* loopback has no address of its family */
	HOOK_NO_MEMORY,	   /* for the socket's state */
	HOOK_IN_PLACE,	   /* where that was chosen */
	HOOK_UNKNOWN,	   /* nothing was chosen yet: in place */
	HOOK_VERDICTS,
};

#endif
