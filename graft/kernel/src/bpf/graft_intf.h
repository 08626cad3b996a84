/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What graft's programs share with graft/kernel/src/intf.rs. */
#ifndef MILLRACE_GRAFT_INTF_H
#define MILLRACE_GRAFT_INTF_H

#include <linux/types.h>
#include "address_intf.h"
#include "caller_intf.h"
#include "graft_option.h"

#define GRAFT_RULES	 64
#define GRAFT_PEERS	 4096
#define GRAFT_NAME_BYTES 16 /* TCP_CA_NAME_MAX */
#define GRAFT_BOUND	 1024
#define GRAFT_CHOICES	 4096
#define GRAFT_TOLD_BYTES (1 << 20) /* some 6000 that nobody has read yet */

enum graft_side {
	GRAFT_CLIENT = 1, /* the rule's ports are the peer's */
	GRAFT_SERVER = 2, /* they are this host's */
};

/* Whom a rule asks. */
enum graft_agree {
	GRAFT_ASK_NOBODY,
	GRAFT_ASK,
	GRAFT_ASK_BOUND, /* the peer, if it is bound by an agreement that has this rule */
};

/* Bits of `set`. */
enum graft_setting {
	GRAFT_SET_CONGESTION = 1,
	GRAFT_SET_PACING = 2,
	GRAFT_SET_SEND_BUFFER = 4,
	GRAFT_SET_RECEIVE_BUFFER = 8,
	GRAFT_SET_WINDOW = 16,
};

/* Connections, and what their sockets get. The first rule that fits counts; the first of no side ends the list. */
struct graft_rule {
	address_words peer; /* network order; IPv4 as ::ffff:a.b.c.d */
	address_words mask;
	__u16 first_port; /* host order, both inclusive */
	__u16 last_port;
	__u8 side;
	__u8 agree; /* enum graft_agree */
	__u16 set;
	__be32 graft;		    /* that this side would use, as the option names it */
	__u32 pacing_bytes_s;	    /* SO_MAX_PACING_RATE */
	__s32 send_buffer_bytes;    /* SO_SNDBUF, which the kernel doubles */
	__s32 receive_buffer_bytes; /* SO_RCVBUF, likewise */
	__s32 window_packets;	    /* the first congestion window */
	__u32 generation;	    /* of the list: agreements are on the rules of one */
	__u32 choice;		    /* by which its paths are found in `choices`; 0: nothing is chosen */
	__u32 pad;
	char congestion[GRAFT_NAME_BYTES];
	struct caller_wanted caller; /* of a client; a server does not know who is at the other end */
};

/* What became of a connection that a rule fits, or of one of its packets. */
enum graft_outcome {
	GRAFT_AGREED,
	GRAFT_ONE_SIDED,     /* the rule asks nobody */
	GRAFT_ABSENT,	     /* no answer: not there, or the option was taken off */
	GRAFT_STRIPPED,	     /* no answer from a peer that has agreed before */
	GRAFT_REFUSED,	     /* the peer says no, or speaks another version */
	GRAFT_MALFORMED,     /* an option that is not as it should be */
	GRAFT_UNCONFIRMED,   /* of a server: the client offered nothing, or did not get the answer */
	GRAFT_NO_ROOM,	     /* the kernel had no room for the option */
	GRAFT_COOKIES,	     /* SYN cookies: nothing is answered */
	GRAFT_ANSWERED,	     /* SYN-ACKs that carried an answer */
	GRAFT_NO_CONGESTION, /* the congestion control is not there */
	GRAFT_NOT_SET,	     /* another setting was refused by the kernel */
	GRAFT_RESENT,	     /* the SYN was answered only without the option, or was lost by chance */
	GRAFT_WITHHELD,	     /* not offered: that happened with this peer not long ago */
	GRAFT_NO_MEMORY,     /* for a socket's state */
	GRAFT_UNBOUND,	     /* not asked: the rule wants an agreement, and there is none */
	GRAFT_UNTOLD, /* of a rule that has arms chosen: what came of it is lost, nobody has read fast enough */
	GRAFT_OUTCOMES,
};

/* The latest of a peer. */
struct graft_peer {
	__u64 time_ns;	 /* CLOCK_MONOTONIC */
	__u64 agreed;	 /* connections */
	__u64 resent_ns; /* when a SYN with the option was lost; 0: never */
	__u32 outcome;
	__u32 rule;
	__be32 graft; /* that the peer uses; 0: its kernel's own, or nothing is known */
	__u32 pad;
};

/* A peer that is bound by an agreement. */
struct graft_bound {
	__u64 until_ns; /* CLOCK_MONOTONIC */
	__u64 rules;	/* a bit for each of a list */
	__u32 generation;
	__u32 pad;
};

/* Both ends know a connection by the numbers of its first bytes of data, which are random. */
struct graft_connection_key {
	__u32 client_first;
	__u32 server_first;
	__u32 side; /* both may be on this host */
};

/* How a connection began, for a comparison with what the peer saw. */
struct graft_connection {
	address_words peer;
	__u64 time_ns;
	__u32 outcome;
	__be32 own; /* as the rule has it */
	__be32 heard;
	__u16 port; /* the server's */
	__u8 spoke; /* a client: has offered; a server: would have answered */
	__u8 pad;
};

/* What TCP knows of a path. */
struct graft_figures {
	__u32 rtt_min_us; /* 0: not known */
	__u32 srtt_us;
	__u32 rttvar_us;
	__u32 mss_bytes;
	__u32 cwnd_packets;
	__u32 delivered_packets;
	__u32 lost_packets;
	__u32 reordering_packets;
	__u32 rate_packets; /* delivered in rate_interval_us; 0: not known */
	__u32 rate_interval_us;
};

/* One socket as sockets_read writes it. */
struct graft_socket {
	address_words local; /* as in a rule */
	address_words remote;
	__u64 cookie;
	__u64 bytes_acked;
	__u16 local_port; /* host order */
	__u16 remote_port;
	__u32 state;
	struct graft_figures figures;
	char congestion[GRAFT_NAME_BYTES];
};

/* A path, for the connections of one rule. */
struct graft_choice_key {
	address_words peer; /* as in a rule */
	__u32 rule;	    /* its `choice` */
};

/* By what they go. */
struct graft_choice {
	__u32 serial;			   /* of what was chosen: another each time */
	__u32 lead;			   /* 1: to the broker, if it would have them */
	__u32 other_lead;		   /* of the other arm */
	__u32 grant;			   /* 1: one connection takes the other arm */
	char congestion[GRAFT_NAME_BYTES]; /* in place; empty: the socket's own */
	char other[GRAFT_NAME_BYTES];
};

enum graft_told_what {
	GRAFT_TOLD_BEGAN,
	GRAFT_TOLD_ENDED,
};

/* A connection of a rule with a `choice`, as userspace hears of it. */
struct graft_told {
	address_words local; /* as in a rule */
	address_words remote;
	__u64 cookie;
	__u64 time_ns;	   /* CLOCK_MONOTONIC */
	__u64 duration_ns; /* since its SYN */
	__u64 sent;	   /* bytes that were acknowledged */
	__u64 received;
	__u64 netns_cookie;
	__u64 jiffies;	     /* now, as the next two */
	__u32 busy_jiffies;  /* with bytes that were to be sent or acknowledged */
	__u32 heard_jiffies; /* since data came last */
	__u16 local_port;    /* host order */
	__u16 remote_port;
	__u8 side;
	__u8 what; /* enum graft_told_what */
	__u8 explored;
	__u8 pad;
	__u32 rule;
	__u32 serial; /* 0: nothing was chosen yet */
	struct graft_figures figures;
	char congestion[GRAFT_NAME_BYTES]; /* that was wanted; empty: the socket's own */
	char command[CALLER_NAME_BYTES];   /* that has connected; empty: not known */
};

/* What sockets_set changes. */
struct graft_change {
	struct graft_rule rule;
	char from[GRAFT_NAME_BYTES]; /* only sockets with this congestion control; empty: whichever */
};

/* A socket that it changed, or did not. */
struct graft_changed {
	__u64 cookie;
	__s32 error; /* negative errno; 0: changed */
	__u32 state;
};

#endif
