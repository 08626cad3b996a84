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
/* size of the ring buffer of struct graft_event, in bytes; some 6000 events fit */
#define GRAFT_EVENTS_BYTES (1 << 20)

enum graft_side {
	GRAFT_CLIENT = 1, /* for clients: the rule's ports are those of the peer */
	GRAFT_SERVER = 2, /* for servers: the rule's ports are those of this host */
};

/* Says whether a rule applies only after the peer has agreed to it. */
enum graft_agree {
	GRAFT_ASK_NOBODY,
	GRAFT_ASK,
	/* As GRAFT_ASK, but a client sends the TCP option with its offer only to peers with which userspace has agreed
	 * on this rule over TLS.
	 */
	GRAFT_ASK_BOUND,
};

/* Bits of graft_rule.set, one for each socket setting that a rule changes. */
enum graft_setting {
	GRAFT_SET_CONGESTION = 1,
	GRAFT_SET_PACING = 2,
	GRAFT_SET_SEND_BUFFER = 4,
	GRAFT_SET_RECEIVE_BUFFER = 8,
	GRAFT_SET_WINDOW = 16,
};

/* A rule: which connections it matches, and the settings for their sockets. The first rule that matches applies; a rule
 * whose `side` is 0 ends the list.
 */
struct graft_rule {
	address_words peer; /* address in network byte order; IPv4 as ::ffff:a.b.c.d */
	address_words mask;
	__u16 first_port; /* ports in host byte order; first and last port both belong to the range */
	__u16 last_port;
	__u8 side;
	__u8 agree; /* whether the rule applies only if the peer agrees to it, enum graft_agree */
	__u16 set;
	/* first bytes of the SHA-256 of this host's graft, as sent in struct graft_option */
	__be32 graft;
	__u32 pacing_bytes_s;	    /* bytes/s; greatest pacing rate (SO_MAX_PACING_RATE) */
	__s32 send_buffer_bytes;    /* bytes; send buffer (SO_SNDBUF), which the kernel doubles */
	__s32 receive_buffer_bytes; /* bytes; receive buffer (SO_RCVBUF), which the kernel doubles */
	__s32 window_packets;	    /* packets; initial congestion window */
	/* Identifies the list of rules that this rule is in. An agreement over TLS (struct graft_bound) is valid for
	 * the rules of one list only.
	 */
	__u32 generation;
	/* the rule's number in the keys of the map `choices`; 0: the rule leaves no choice to userspace's model */
	__u32 choice;
	__u32 pad;
	char congestion[GRAFT_NAME_BYTES];
	/* condition on the process that calls connect(); only in rules for clients, since servers do not know the
	 * peer's process
	 */
	struct caller_wanted caller;
};

/* The outcome of the agreement on a rule in a connection's handshake, or an error in applying the rule. */
enum graft_outcome {
	GRAFT_AGREED,
	GRAFT_ONE_SIDED, /* the rule applies without the peer's agreement */
	/* the SYN-ACK has no TCP option that answers the offer: the peer has no grafts, or a middlebox removed the
	 * option
	 */
	GRAFT_ABSENT,
	/* the SYN-ACK has no TCP option that answers the offer, although this peer has answered one on an earlier
	 * connection
	 */
	GRAFT_STRIPPED,
	GRAFT_REFUSED,	 /* the peer refuses, or uses another version of the TCP option */
	GRAFT_MALFORMED, /* the peer's TCP option is malformed */
	/* at a server: the client's ACK has no option that confirms the agreement, since the client offered nothing or
	 * our answer was lost
	 */
	GRAFT_UNCONFIRMED,
	GRAFT_NO_ROOM,	/* the TCP header had no space for the option that offers or answers an agreement */
	GRAFT_COOKIES,	/* the server uses SYN cookies, so it cannot answer an offer */
	GRAFT_ANSWERED, /* the server has sent a SYN-ACK with the option that answers the client's offer */
	GRAFT_NO_CONGESTION, /* the rule's congestion control does not exist in the kernel */
	GRAFT_NOT_SET,	     /* the kernel refused a setting other than congestion control */
	GRAFT_RESENT, /* the server answered only the retransmitted SYN, which has no TCP option with an offer */
	/* the client sent no offer, since a SYN with the TCP option for offers was lost in the last ten minutes */
	GRAFT_WITHHELD,
	GRAFT_NO_MEMORY, /* the kernel had no memory for the socket's state */
	/* the client sent no offer, since the rule is only for peers that have agreed to it over TLS, and this peer has
	 * not
	 */
	GRAFT_UNBOUND,
	GRAFT_EVENT_LOST, /* an event for userspace was lost, since the ring buffer was full */
	GRAFT_OUTCOMES,
};

/* The outcome of the agreement on a rule on the latest connection with a peer. */
struct graft_peer {
	__u64 time_ns;	 /* time of the latest connection, CLOCK_MONOTONIC, ns */
	__u64 agreed;	 /* number of connections on which this peer has agreed to a rule */
	__u64 resent_ns; /* time at which a SYN with the TCP option for offers was lost, ns; 0: never */
	__u32 outcome;
	__u32 rule;
	__be32 graft; /* first bytes of the SHA-256 of the peer's graft, as received in its TCP option; 0: none */
	__u32 pad;
};

/* An agreement on rules that userspace has reached with a peer over TLS. */
struct graft_bound {
	__u64 until_ns; /* time at which the agreement expires, CLOCK_MONOTONIC, ns */
	__u64 rules; /* bitmap of the rules that the agreement covers, by their position in the list of rules */
	__u32 generation;
	__u32 pad;
};

/* The key of a connection: the sequence numbers of the first data byte in each direction. They are random, and both
 * hosts know them.
 */
struct graft_connection_key {
	__u32 client_first;
	__u32 server_first;
	__u32 side; /* enum graft_side; distinguishes client and server of a connection if both are on this host */
};

/* What this host saw in the handshake of a connection. Userspace compares this record with the peer's record
 * of the same connection.
 */
struct graft_connection {
	address_words peer;
	__u64 time_ns;
	__u32 outcome;
	__be32 own; /* first bytes of the SHA-256 of the graft that this host would use */
	__be32 heard;
	__u16 port; /* the server's port */
	__u8 spoke; /* 1: this host, as the client, sent an offer, or, as the server, has a rule that answers offers */
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
	__u32 rate_packets; /* packets delivered within rate_interval_us; 0: unknown */
	__u32 rate_interval_us;
};

/* A socket's state, as sockets_read reports it. */
struct graft_socket {
	address_words local; /* IPv6 form of the address, as in struct graft_rule */
	address_words remote;
	__u64 cookie;
	__u64 bytes_acked;
	__u16 local_port; /* this and the next: ports of both ends, in host byte order */
	__u16 remote_port;
	__u32 state;
	struct graft_figures figures;
	char congestion[GRAFT_NAME_BYTES];
};

/* Key of the map `choices`. A choice of userspace's learned model is valid for all connections with one peer that match
 * one rule.
 */
struct graft_choice_key {
	address_words peer; /* IPv6 form of the address, as in struct graft_rule */
	__u32 rule;	    /* number that the rule has in its field `choice` */
};

/* The choice of userspace's learned model for connections with a peer: the candidate (a congestion control or the
 * broker) that they use, and another candidate that a single connection may try.
 */
struct graft_choice {
	/* serial number of this choice, which differs for each choice that userspace writes */
	__u32 serial;
	__u32 redirect; /* 1: connections go to the broker if it can accept them; 0: they use `congestion` */
	/* 1: the candidate to try is the broker, if it can accept the connection; 0: it is `other` */
	__u32 other_redirect;
	__u32 grant; /* 1: the next connection tries the other candidate, and sets this to 0 */
	/* congestion control of a connection that is not redirected; empty: the socket's own */
	char congestion[GRAFT_NAME_BYTES];
	char other[GRAFT_NAME_BYTES];
};

enum graft_event_kind {
	GRAFT_EVENT_BEGAN,
	GRAFT_EVENT_ENDED,
};

/* An event for userspace about a connection that matches a rule with a `choice`. */
struct graft_event {
	address_words local; /* IPv6 form of the address, as in struct graft_rule */
	address_words remote;
	__u64 cookie;
	__u64 time_ns;	   /* time of the event, CLOCK_MONOTONIC, ns */
	__u64 duration_ns; /* time since the connection's SYN, ns */
	__u64 sent;	   /* payload bytes that the peer acknowledged */
	__u64 received;
	__u64 netns_cookie;
	__u64 jiffies;	    /* time of the event in kernel ticks, the unit of the next two fields */
	__u32 busy_jiffies; /* number of kernel ticks during which there were bytes to be sent or acknowledged */
	__u32 heard_jiffies; /* kernel ticks since data was last received */
	__u16 local_port;    /* port in host byte order */
	__u16 remote_port;
	__u8 side;
	__u8 what; /* kind of event, enum graft_event_kind */
	__u8 explored;
	__u8 pad;
	__u32 rule;
	__u32 serial; /* serial number of the choice of userspace's model that decided about the connection; 0: none */
	struct graft_figures figures;
	/* congestion control that was chosen; empty: the socket kept its own */
	char congestion[GRAFT_NAME_BYTES];
	char command[CALLER_NAME_BYTES]; /* name of the connecting thread; empty: unknown */
};

/* The argument of sockets_set: the sockets to change, and their new settings. */
struct graft_change {
	struct graft_rule rule;
	char from[GRAFT_NAME_BYTES]; /* only sockets with this congestion control are changed; empty: all */
};

/* The result for a socket that sockets_set tried to change. */
struct graft_changed {
	__u64 cookie;
	__s32 error; /* 0: the socket was changed; otherwise a negative errno */
	__u32 state;
};

#endif
