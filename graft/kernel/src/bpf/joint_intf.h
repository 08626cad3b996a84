/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the dispatcher of packet grafts shares with graft/kernel/src/joint/intf.rs. */
#ifndef MILLRACE_JOINT_INTF_H
#define MILLRACE_JOINT_INTF_H

#include "graft_packet.h"

/* Load-time configuration. */
struct joint_config {
	__u32 mark; /* of packets that functions send, unlike any other on this host */
	/* Multiples of 8: the numbers behind them are those of paths. */
	__u32 clear_mark; /* of words about keys, which cannot be sealed */
	__u32 word_mark;  /* of other words of the daemon */
	__u32 path_mark;  /* of whole packets; JOINT_PATHS behind it: of what leaves */
};

/* Addresses are IPv4 in the first 4 bytes, the rest zero, or IPv6. */
struct joint_key {
	__u8 local[16];
	__u8 remote[16];
	__be16 local_port;
	__be16 remote_port;
};

struct joint_pair {
	__u8 local[16];
	__u8 remote[16];
};

struct joint_session {
	__u64 lists[2][GRAFT_JOINTS]; /* by epoch: functions, a byte each, the first one lowest */
	__u64 key[2];
	__u32 index;
	__u32 budget_ns;
	__be16 list_ids[2]; /* by epoch, in network order */
	__u8 epoch;	    /* of what goes out */
	__u8 live;	    /* bits: epochs of what may come in */
	__u8 is_sealed;	    /* nothing leaves or comes in but sealed */
	__u8 is_paused;	    /* nothing leaves */
	__u8 tells_room;    /* its daemon hears when there is room for who was refused */
	__u8 protocol;	    /* on the wire: UDP, or 253 */
	__u8 paths;	    /* how many; 0: its own addresses, as the host routes them */
	__u8 pad[5];
};

#define JOINT_PATHS 4

/* A pair of addresses that stands for the session's own, and the interface that it goes by. */
struct joint_path {
	__u8 local[16];
	__u8 remote[16];
	__u32 ifindex; /* 0: there is none */
	__u32 weight;  /* how much of the session it carries; 0: nothing */
};

struct joint_paths {
	struct joint_path each[JOINT_PATHS]; /* the first one has the session's own addresses */
	__u32 is_redundant;		     /* everything goes by all of them */
	__u32 pad;
};

struct joint_path_counts {
	__u64 sent[JOINT_PATHS];
	__u64 came[JOINT_PATHS];
	__u32 turn;
	__u32 pad;
};

/* What comes with a path's addresses. */
struct joint_path_in {
	struct joint_key session;
	__u32 ifindex;
	__u32 path;
};

/* How long sampled packets took, from the dispatcher to the verdict. */
struct joint_time {
	__u64 packets; /* all */
	__u64 samples;
	__u64 total_ns;
	__u64 most_ns;
	__u64 over; /* samples above the budget */
};

struct joint_times {
	struct joint_time joints[GRAFT_JOINTS];
};

#define JOINT_REASONS 32 /* a power of two, for the verifier */

_Static_assert(GRAFT_REASONS <= JOINT_REASONS, "a place for each reason");

/* Packets of a session, by what became of them. */
struct joint_counts {
	__u64 packets[JOINT_REASONS];
};

#define JOINT_SILENT_NS \
	2000000000ULL /* a session that has sent nothing for so long has a slow clock, or none */
#define JOINT_SLOW_NS 1000000000ULL

/* From a session's clock, when it has sent nothing for a period. */
struct joint_tick {
	__u64 time_ns; /* CLOCK_MONOTONIC */
	__u64 sent_ns; /* when the latest packet went out */
	__u32 session;
	__u32 next;   /* number of the next packet out */
	__u32 newest; /* one more than the newest number in */
	__u32 acked;  /* all below have come at the other end, where a function says so */
	__u32 srtt_us;
	__u32 pad;
};

#define JOINT_ROOM 255 /* kind of a word that this host says itself: there is room */

/* What the daemon at the other end says. */
struct joint_word {
	__u32 session;
	__u32 number;
	__u8 kind;
	__u8 epoch; /* that it was sent in */
	__u8 pad[6];
};

/* Starts a session's clock, or with period 0 stops it. */
struct joint_clock_call {
	__u64 period_ns;
	__u32 session;
	__s32 error;
};

#define JOINT_SAMPLE_EVERY 64 /* packets, a power of two */

#endif
