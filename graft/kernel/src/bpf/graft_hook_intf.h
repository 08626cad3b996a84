/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Types that graft_hook.bpf.c shares with graft/kernel/src/hook/intf.rs. */
#ifndef MILLRACE_GRAFT_HOOK_INTF_H
#define MILLRACE_GRAFT_HOOK_INTF_H

#include <linux/types.h>
#include "address_intf.h"
#include "caller_intf.h"

#define HOOK_RULES    256
#define HOOK_PEERS    1024
#define HOOK_ARRIVALS 16384
#define HOOK_GUESTS   65536
#define HOOK_AVOIDED  4096

struct hook_config {
	/* cookie of the tunnel broker's network namespace; connections are redirected to loopback in that namespace
	 */
	__u64 namespace_cookie;
	__u16 port4[2]; /* broker's ports on 127.0.0.1: [0] accepts at once, [1] holds SYNs back; 0: none */
	__u16 port6[2]; /* broker's ports on ::1, in the order of those on 127.0.0.1 */
};

/* Address and port of one of the two sockets of a connection. */
struct hook_end {
	address_words address; /* address in network byte order; IPv4 as ::ffff:a.b.c.d */
	__u16 port;	       /* port in host byte order */
	__u16 pad;
};

/* A rule that redirects connections to the tunnel broker, or lets them go directly to their servers. The first rule
 * that matches applies; a rule with last port 0 ends the list.
 */
struct hook_rule {
	address_words peer;
	address_words mask;
	__u16 first_port; /* ports in host byte order; first and last port both belong to the range */
	__u16 last_port;
	__u32 strict; /* 1: connect() succeeds only after the server was reached */
	/* the rule's number in the keys of the map `choices`; 0: all connections that match the rule are redirected,
	 * without a choice of userspace's model
	 */
	__u32 choice;
	/* 1: connections that match the rule are not redirected; they go directly to their servers, whatever later
	 * rules state
	 */
	__u32 in_place;
	struct caller_wanted caller;
};

/* A host with a tunnel broker, stored by the host's address. */
struct hook_peer {
	address_words near; /* this host's address on the route to the peer */
	__u32 warm;	    /* 1 while a carrier to the peer is connected */
	__u32 pad;
};

/* State of a redirected connection: the addresses that its application sees, and the user and group of its
 * socket.
 */
struct hook_redirected {
	struct hook_end server;
	/* local address that the application sees; the port is the socket's own */
	struct hook_end local;
	char command[CALLER_NAME_BYTES]; /* name of the connecting thread */
	__u64 cgroup;			 /* ID of the cgroup that the rule names; 0: none */
	/* number, in the keys of the map `choices`, of the rule that matched; 0: the rule leaves no choice to
	 * userspace's model
	 */
	__u32 rule;
	/* serial number of the choice of userspace's model that decided about this connection; 0: none */
	__u32 serial;
	__u32 explored;
	__u32 uid; /* user that owns the socket, as netfilter's skuid matches it */
	__u32 gid;
	__u32 mark;
};

/* Key of a connection from a tunnel broker to a local server: the broker's address and port, and the server's port.
 * The key identifies the socket that the server accepts.
 */
struct hook_guest {
	struct hook_end broker;
	__u16 server_port;
	__u16 pad;
};

/* The verdict on a connection to a host with a tunnel broker, if a rule matches. With every verdict but HOOK_REDIRECTED
 * the connection goes directly to its server.
 */
enum hook_verdict {
	HOOK_REDIRECTED, /* the connection is redirected to the tunnel broker */
	HOOK_COLD,	 /* no carrier to the peer is connected */
	/* the server refused an earlier connection: the application gets the server's own error */
	HOOK_REFUSED,
	HOOK_OWN,	   /* the connection is one of the tunnel broker's own */
	HOOK_ELSEWHERE,	   /* the socket is in another network namespace than the tunnel broker */
	HOOK_BOUND_DEVICE, /* the socket is bound to an interface, so it cannot use loopback */
	HOOK_NOT_TCP,	   /* the socket is MPTCP, or another stream protocol */
	HOOK_NO_FAMILY,	   /* the tunnel broker does not listen in the connection's address family */
	HOOK_NO_MEMORY,	   /* no memory for the socket's state */
	/* the connection is not redirected, because userspace's learned model has decided against the tunnel broker for
	 * this peer
	 */
	HOOK_IN_PLACE,
	/* the connection is not redirected, because userspace's learned model has not decided about this peer yet */
	HOOK_UNKNOWN,
	HOOK_VERDICTS,
};

#endif
