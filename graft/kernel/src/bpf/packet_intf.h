/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Types that the dispatcher of packet grafts shares with graft/kernel/src/packet/intf.rs. */
#ifndef MILLRACE_PACKET_INTF_H
#define MILLRACE_PACKET_INTF_H

#include "graft_packet.h"

/* Load-time configuration: packet marks (skb->mark) of packets that this host's functions and daemon send. */
struct packet_config {
	__u32 mark; /* packet mark of packets that functions send; no other program uses this mark */
	/* message_mark and path_mark are multiples of 8, since the number of a network path is added to them.
	 */
	__u32 message_mark; /* packet mark of the messages that this host's daemon sends to the peer's daemon */
	/* path_mark + i is the packet mark of a copy that is sent by network path i. path_mark + PACKET_PATHS is that
	 * of a packet which was redirected to the interface of its path.
	 */
	__u32 path_mark;
};

/* Key of a session. An IPv4 address is in the first 4 bytes, and the rest is zero. */
struct packet_key {
	__u8 local[16];
	__u8 remote[16];
	__be16 local_port;
	__be16 remote_port;
};

struct packet_pair {
	__u8 local[16];
	__u8 remote[16];
};

/* A session, as userspace writes it to the map. The entry is replaced as a whole, so programs see consistent
 * fields.
 *
 * Each of the two epochs has a list of functions. `epoch` is the epoch of outgoing packets; `live` has a bit
 * for each epoch whose packets are accepted. To replace the list, userspace writes the other list and its bit
 * (accept), changes `epoch` (switch), and clears the old bit when no packet of the old epoch is in flight
 * (retire). A session that is about to restart has `is_paused` set and no bit in `live`. A session that only
 * stops sending has `is_paused` set and keeps its bits.
 */
struct packet_session {
	/* lists of functions by epoch and hook: each byte is a function's index in the program array, the first
	 * function in the lowest byte
	 */
	__u64 lists[2][GRAFT_HOOKS];
	__u64 key[2];
	__u32 index;
	__u32 budget_ns;
	__be16 list_ids[2]; /* identifier of each epoch's function list, in network byte order */
	__u8 epoch;	    /* epoch of outgoing packets */
	__u8 live;	    /* bitmap of the epochs whose incoming packets are accepted */
	__u8 is_sealed;	    /* 1: only sealed (encrypted) datagrams are sent and accepted */
	__u8 is_paused;	    /* 1: outgoing packets are dropped */
	/* 1: the daemon is notified when the application may send again, after a packet was refused because too many
	 * were in flight
	 */
	__u8 tells_room;
	/* number of paths; 0: packets have the session's own addresses, and the host's routes apply */
	__u8 paths;
	__u8 pad[6];
};

#define PACKET_PATHS 4

/* A network path of a session: the addresses that replace the session's own on the wire, and the interface to send by.
 */
struct packet_path {
	__u8 local[16];
	__u8 remote[16];
	__u32 ifindex; /* interface to send by; 0: there is no such path */
	/* share of the packets that this path gets, relative to the weights of the other paths; 0: none */
	__u32 weight;
};

struct packet_paths {
	struct packet_path each[PACKET_PATHS]; /* the first path has the session's own addresses */
	__u32 is_redundant;		       /* 1: every packet is sent by all paths */
	__u32 pad;
};

struct packet_path_counts {
	__u64 sent[PACKET_PATHS];
	__u64 came[PACKET_PATHS];
	__u32 turn;
	__u32 pad;
};

/* The session and the network path of an incoming packet, which are found by the packet's addresses on the wire. */
struct packet_path_in {
	struct packet_key session;
	__u32 ifindex;
	__u32 path;
};

/* Processing time of sampled packets at a hook, from the dispatcher to the verdict program. */
struct packet_time {
	__u64 packets; /* number of all packets at the hook, including those whose time is not measured */
	__u64 samples;
	__u64 total_ns;
	__u64 most_ns;
	__u64 over; /* number of measured packets whose processing took longer than the session's time budget */
};

struct packet_times {
	struct packet_time hooks[GRAFT_HOOKS];
};

#define PACKET_REASONS 32 /* a power of two, so that the verifier sees the bound of an index */

_Static_assert(GRAFT_REASONS <= PACKET_REASONS, "a place for each reason");

/* Number of a session's packets, by enum graft_reason. */
struct packet_counts {
	__u64 packets[PACKET_REASONS];
};

/* time without a sent packet after which a session's timer is slowed down, or stopped */
#define PACKET_SILENT_NS 2000000000ULL
#define PACKET_SLOW_NS	 1000000000ULL

/* Event of a session's timer: the session has sent no packet for one period of the timer. */
struct packet_tick {
	__u64 time_ns; /* time of the event, CLOCK_MONOTONIC, ns */
	__u64 sent_ns; /* sending time of the latest outgoing packet, ns */
	__u32 session;
	__u32 next;   /* packet number of the next outgoing packet */
	__u32 newest; /* one more than the newest packet number received */
	/* the peer has acknowledged all packets below this number; unused if the graft has no function `acknowledge` */
	__u32 acked;
	__u32 srtt_us;
	__u32 pad;
};

/* value of `kind` in struct packet_message that stands for no message of the peer's daemon, but for a local event: the
 * application may send again, after a packet was refused because too many were in flight
 */
#define PACKET_ROOM 255

/* A message of the peer's daemon, or the local event that the application may send again (PACKET_ROOM). */
struct packet_message {
	__u32 session;
	__u32 number;
	__u8 kind;
	__u8 epoch; /* epoch (0 or 1) of the sender's list of functions when it sent the message */
	__u8 pad[6];
};

/* Argument of packet_clock, which starts a session's timer, or stops it if the period is 0. */
struct packet_clock_call {
	__u64 period_ns;
	__u32 session;
	__s32 error;
};

#define PACKET_SAMPLE_EVERY 64 /* the processing time of every 64th packet is measured; a power of two */

#endif
