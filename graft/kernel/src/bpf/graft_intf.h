/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Types that the programs at TCP sockets share with graft/kernel/src/intf.rs. */
#ifndef MILLRACE_GRAFT_INTF_H
#define MILLRACE_GRAFT_INTF_H

#include <linux/types.h>
#include "address_intf.h"
#include "caller_intf.h"
#include "graft_option.h"

#define GRAFT_RULES	 64
#define GRAFT_PEERS	 4096
#define GRAFT_NAME_BYTES 16 /* equal to the kernel's TCP_CA_NAME_MAX */
#define GRAFT_BOUND	 1024
#define GRAFT_CHOICES	 4096
#define GRAFT_TOLD_BYTES (1 << 20) /* size of the ring buffer: some 6000 events */

enum graft_side {
	GRAFT_CLIENT = 1, /* the rule's ports are the peer's */
	GRAFT_SERVER = 2, /* the rule's ports are this host's */
};

/* Whether the rule needs an agreement with the peer. */
enum graft_agree {
	GRAFT_ASK_NOBODY,
	GRAFT_ASK,
	GRAFT_ASK_BOUND, /* asks the peer if userspace has bound it to this rule */
};

/* Bits of graft_rule.set: settings that the rule changes. */
enum graft_setting {
	GRAFT_SET_CONGESTION = 1,
	GRAFT_SET_PACING = 2,
	GRAFT_SET_SEND_BUFFER = 4,
	GRAFT_SET_RECEIVE_BUFFER = 8,
	GRAFT_SET_WINDOW = 16,
};

/* A rule: it matches connections, and has settings for their sockets. The first rule that matches applies;
 * the first one without a side ends the list.
 */
struct graft_rule {
	address_words peer; /* network byte order; IPv4 as ::ffff:a.b.c.d */
	address_words mask;
	__u16 first_port; /* host byte order; both ports belong to the range */
	__u16 last_port;
	__u8 side;
	__u8 agree; /* whether an agreement is needed, enum graft_agree */
	__u16 set;
	__be32 graft;		    /* graft that this side would use, as in graft_option */
	__u32 pacing_bytes_s;	    /* pacing rate (SO_MAX_PACING_RATE) */
	__s32 send_buffer_bytes;    /* send buffer (SO_SNDBUF); the kernel doubles it */
	__s32 receive_buffer_bytes; /* receive buffer (SO_RCVBUF); the kernel doubles it */
	__s32 window_packets;	    /* first congestion window */
	__u32 generation;	    /* number of the list of rules: a binding is valid for one list */
	__u32 choice;		    /* key of the rule in `choices`; 0: no choice is made */
	__u32 pad;
	char congestion[GRAFT_NAME_BYTES];
	struct caller_wanted caller; /* matched at clients only: servers do not know the peer's process */
};

/* The outcome of a connection that a rule matches, or of one of its packets. */
enum graft_outcome {
	GRAFT_AGREED,
	GRAFT_ONE_SIDED,     /* the rule needs no agreement */
	GRAFT_ABSENT,	     /* no answer: the peer has no grafts, or a middlebox removed the option */
	GRAFT_STRIPPED,	     /* no answer from a peer that agreed before */
	GRAFT_REFUSED,	     /* the peer uses another version */
	GRAFT_MALFORMED,     /* the option is malformed */
	GRAFT_UNCONFIRMED,   /* at a server: the client offered nothing, or did not get the answer */
	GRAFT_NO_ROOM,	     /* the TCP header had no space for the option */
	GRAFT_COOKIES,	     /* SYN cookies are in use, so an offer cannot be answered */
	GRAFT_ANSWERED,	     /* a SYN-ACK was sent with an answer */
	GRAFT_NO_CONGESTION, /* the congestion control of the rule does not exist */
	GRAFT_NOT_SET,	     /* the kernel refused a setting other than congestion control */
	GRAFT_RESENT,	     /* the SYN was answered only when it was repeated without the option */
	GRAFT_WITHHELD,	     /* no offer: SYNs with the option were lost in the last ten minutes */
	GRAFT_NO_MEMORY,     /* the kernel had no memory for the socket's state */
	GRAFT_UNBOUND,	     /* no offer: the rule needs a bound peer, and this one is not */
	GRAFT_UNTOLD,	     /* an event was lost, since the ring buffer was full */
	GRAFT_OUTCOMES,
};

/* The latest outcome with a peer. */
struct graft_peer {
	__u64 time_ns;	 /* time of the latest connection, CLOCK_MONOTONIC */
	__u64 agreed;	 /* connections that agreed */
	__u64 resent_ns; /* time at which a SYN with the option was lost; 0: never */
	__u32 outcome;
	__u32 rule;
	__be32 graft; /* identity that the peer sent; 0: none */
	__u32 pad;
};

/* A binding: userspace has agreed with the peer on rules, after TLS authenticated it. */
struct graft_bound {
	__u64 until_ns; /* end of the binding, CLOCK_MONOTONIC */
	__u64 rules;	/* a bit for each rule of the list */
	__u32 generation;
	__u32 pad;
};

/* The key of a connection: the sequence numbers of the first data bytes. Both ends know them, and they are
 * random.
 */
struct graft_connection_key {
	__u32 client_first;
	__u32 server_first;
	__u32 side; /* distinguishes the ends if both are on this host */
};

/* How a connection began. Userspace compares it with the peer's record. */
struct graft_connection {
	address_words peer;
	__u64 time_ns;
	__u32 outcome;
	__be32 own; /* identity of the graft that this side would use */
	__be32 heard;
	__u16 port; /* the server's port */
	__u8 spoke; /* a client has offered, or a server would have answered */
	__u8 pad;
};

/* TCP's measurements of a connection. */
struct graft_figures {
	__u32 rtt_min_us; /* least round trip; 0: unknown */
	__u32 srtt_us;
	__u32 rttvar_us;
	__u32 mss_bytes;
	__u32 cwnd_packets;
	__u32 delivered_packets;
	__u32 lost_packets;
	__u32 reordering_packets;
	__u32 rate_packets; /* packets delivered in rate_interval_us; 0: unknown */
	__u32 rate_interval_us;
};

/* A socket's state, as sockets_read reports it. */
struct graft_socket {
	address_words local; /* in the form of a rule's addresses */
	address_words remote;
	__u64 cookie;
	__u64 bytes_acked;
	__u16 local_port; /* port in host byte order */
	__u16 remote_port;
	__u32 state;
	struct graft_figures figures;
	char congestion[GRAFT_NAME_BYTES];
};

/* Key of a choice: the connections with a peer that match one rule. */
struct graft_choice_key {
	address_words peer; /* in the form of a rule's addresses */
	__u32 rule;	    /* the rule's `choice` */
};

/* The choice for the connections of a path: its candidate, and perhaps another one that a single connection
 * tries.
 */
struct graft_choice {
	__u32 serial;			   /* serial number, which changes with each choice */
	__u32 lead;			   /* 1: redirected to the broker if the broker takes it */
	__u32 other_lead;		   /* the same, for the other candidate */
	__u32 grant;			   /* 1: one connection may use the other candidate */
	char congestion[GRAFT_NAME_BYTES]; /* control for a direct connection; empty: the socket's own */
	char other[GRAFT_NAME_BYTES];
};

enum graft_told_what {
	GRAFT_TOLD_BEGAN,
	GRAFT_TOLD_ENDED,
};

/* An event for userspace about a connection that matches a rule with a `choice`. */
struct graft_told {
	address_words local; /* in the form of a rule's addresses */
	address_words remote;
	__u64 cookie;
	__u64 time_ns;	   /* time of the event, CLOCK_MONOTONIC */
	__u64 duration_ns; /* time since the connection's SYN */
	__u64 sent;	   /* payload bytes that the peer acknowledged */
	__u64 received;
	__u64 netns_cookie;
	__u64 jiffies;	     /* time of the event; this and the next two are in kernel ticks */
	__u32 busy_jiffies;  /* time in which bytes waited to be sent or acknowledged */
	__u32 heard_jiffies; /* time since data was received */
	__u16 local_port;    /* port in host byte order */
	__u16 remote_port;
	__u8 side;
	__u8 what; /* kind of event, enum graft_told_what */
	__u8 explored;
	__u8 pad;
	__u32 rule;
	__u32 serial; /* serial number of the choice it followed; 0: none */
	struct graft_figures figures;
	char congestion[GRAFT_NAME_BYTES]; /* control that the choice wanted; empty: the socket's own */
	char command[CALLER_NAME_BYTES];   /* name of the connecting thread; empty: unknown */
};

/* The argument of sockets_set: which sockets to change, and how. */
struct graft_change {
	struct graft_rule rule;
	char from[GRAFT_NAME_BYTES]; /* changes only sockets with this control; empty: any */
};

/* A socket that sockets_set tried to change. */
struct graft_changed {
	__u64 cookie;
	__s32 error; /* 0: the socket was changed; otherwise a negative errno */
	__u32 state;
};

#endif
