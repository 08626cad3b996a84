/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Types that graft_hook.bpf.c shares with graft/kernel/src/hook/intf.rs. */
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
	__u64 namespace_cookie; /* cookie of the broker's network namespace, whose loopback it uses */
	__u16 port4[2]; /* ports on 127.0.0.1: one that accepts at once, one that holds SYNs back; 0: none */
	__u16 port6[2]; /* the same on ::1 */
};

/* Address and port of one end of a connection. */
struct hook_end {
	address_words address; /* network byte order; IPv4 as ::ffff:a.b.c.d */
	__u16 port;	       /* in host byte order */
	__u16 pad;
};

/* A rule: connections that are redirected, or that go directly. The first rule that matches applies; one
 * with last port 0 ends the list.
 */
struct hook_rule {
	address_words peer;
	address_words mask;
	__u16 first_port; /* host byte order; both ports belong to the range */
	__u16 last_port;
	__u32 strict;	/* 1: connect() succeeds only after the server was reached */
	__u32 choice;	/* key of the rule in `choices`; 0: all its connections are redirected */
	__u32 in_place; /* 1: its connections go directly, whatever later rules say */
	struct caller_wanted caller;
};

/* A host with a broker. Its address is the key. */
struct hook_peer {
	address_words near; /* this host's address on the route to it */
	__u32 warm;	    /* 1 while a carrier to it is connected */
	__u32 pad;
};

/* The state of a redirected connection: the addresses that its application sees, and the application's
 * owner.
 */
struct hook_led {
	struct hook_end far;
	struct hook_end near;		 /* the address only; the port is the socket's own */
	char command[CALLER_NAME_BYTES]; /* name of the connecting thread */
	__u64 cgroup;			 /* ID of the cgroup that the rule names; 0: none */
	__u32 rule;			 /* the rule's `choice` */
	__u32 serial;			 /* serial number of the choice that it followed; 0: none */
	__u32 explored;
	__u32 uid; /* owner of the socket, as netfilter matches it (skuid) */
	__u32 gid;
	__u32 mark;
};

/* Key of a connection from a broker to a local server: the broker's end and the server's port. It
 * identifies the socket that the server accepts.
 */
struct hook_guest {
	struct hook_end broker;
	__u16 server_port;
	__u16 pad;
};

/* The verdict on a connection that a rule matches, to a host with a broker. All but HOOK_LED go directly. */
enum hook_verdict {
	HOOK_LED,  /* redirected to the broker */
	HOOK_COLD, /* no carrier to the peer is connected */
	/* the server refused an earlier connection: the application gets the server's own error */
	HOOK_REFUSED,
	HOOK_OWN,	   /* the broker itself connects */
	HOOK_ELSEWHERE,	   /* the socket is in another network namespace */
	HOOK_BOUND_DEVICE, /* the socket is bound to an interface, so not to loopback */
	HOOK_NOT_TCP,	   /* MPTCP, or another stream protocol */
	HOOK_NO_FAMILY,	   /* the broker does not listen in its address family */
	HOOK_NO_MEMORY,	   /* no memory for the socket's state */
	HOOK_IN_PLACE,	   /* the choice for its path is to go directly */
	HOOK_UNKNOWN,	   /* there is no choice for its path yet */
	HOOK_VERDICTS,
};

#endif
