/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What a function on packets is written against: ABI 3 of grafts. It needs the kernel's UAPI headers and libbpf's, and nothing
 * else. (Congestion controls are written against graft.h.)
 *
 * A function is an object file with up to three programs, one for each joint that it has part in:
 *
 *   SEC("tcx/egress")  NAME_tx      what an application sends, before it leaves
 *   SEC("xdp.frags")   NAME_rx      what arrives, before there is a socket buffer
 *   SEC("tcx/ingress") NAME_repair  what arrives, where packets may be changed and sent
 *
 * and, where its state is another than that of the version before, SEC("syscall") NAME_migrate, which makes a session's state
 * in its map `state` out of that in `old_state`: once for what it knows of packets that come, before the first one comes to the
 * new version, and once for what it knows of those that leave.
 *
 * A graft is a list of such functions. Each ends with graft_next(ctx, JOINT), which goes on to the next one in the list, or
 * with graft_done(ctx, JOINT, reason), which ends the list. Either way the packet comes to the joint's verdict, which is
 * where its reason is counted and frames are written and taken off. The dispatcher (joint.bpf.c) has found the session and
 * proved the frame before the first function runs.
 */
#ifndef MILLRACE_GRAFT_PACKET_H
#define MILLRACE_GRAFT_PACKET_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

#define GRAFT_PACKET_ABI 3

#ifndef __always_inline
#define __always_inline inline __attribute__((always_inline))
#endif
#ifndef __noinline
#define __noinline __attribute__((noinline))
#endif

/* As compiled. Before they are loaded, arrays and hashes of so many entries, or of a multiple, are made as long as settings have sessions;
 * and maps that are called `kept_...` for as many of them as may keep packets.
 */
#define GRAFT_SESSIONS	64
#define GRAFT_KEEPERS	16
#define GRAFT_FUNCTIONS 64   /* programs of a joint, the verdict (0) included */
#define GRAFT_LIST_MAX	8    /* functions in a graft */
#define GRAFT_WINDOW	1024 /* numbers that are remembered */

enum graft_joint {
	GRAFT_TX,
	GRAFT_RX,
	GRAFT_REPAIR,
	GRAFT_JOINTS,
};

/* What became of a packet: of a session, or of none. Those up to GRAFT_NO_FUNCTION go on. */
enum graft_reason {
	GRAFT_OTHER,	   /* of no session: none of our business */
	GRAFT_SENT,	   /* framed */
	GRAFT_SENT_BY_US,  /* a request or a retransmission of a function */
	GRAFT_LET_IN,	   /* by XDP */
	GRAFT_DELIVERED,   /* its frame was taken off */
	GRAFT_RECOVERED,   /* the same, and it was made out of a parity packet */
	GRAFT_PROTECTED,   /* a parity packet, behind those that it protects */
	GRAFT_NO_FUNCTION, /* a function of the list was not there: went on with framing only */
	GRAFT_RESENT,	   /* a request became the packet that it asked for */
	GRAFT_ANSWERED,	   /* a request that nothing could be sent for, or a word between the two ends */
	GRAFT_MALFORMED,   /* no frame of this version */
	GRAFT_FORGED,	   /* not with this session's key */
	GRAFT_STALE,	   /* of an epoch that is over */
	GRAFT_DUPLICATE,
	GRAFT_OLD,	/* too old to know whether it is one */
	GRAFT_LATE,	/* behind one that was sent later */
	GRAFT_TOO_LONG, /* with its frame, for the interface */
	GRAFT_MERGED,	/* several datagrams in one buffer: UDP_SEGMENT or UDP_GRO */
	GRAFT_NO_ROOM,	/* the kernel had no memory */
	GRAFT_NO_KEYS,	/* of a sealed session whose ends have agreed on no keys yet */
	GRAFT_UNOPENED, /* sealed with another key, or changed on the way */
	GRAFT_REPLAYED, /* came sealed before, or is too old to tell */
	GRAFT_FRAGMENT, /* may be of a sealed session, but is in fragments or behind headers that are not followed */
	GRAFT_WINDOW_FULL,    /* not sent: as much is under way as may be */
	GRAFT_OUT_OF_TURN,    /* behind one that is missing, where order is full */
	GRAFT_PAUSED,	      /* not sent: the session was about to begin anew */
	GRAFT_TOO_FAST,	      /* not sent: as much waits for its turn as may */
	GRAFT_SOCKET_FULL,    /* its socket has no room: it has not come, and may come again */
	GRAFT_OTHER_PROTOCOL, /* came by UDP where the session has protocol 253, or by that where it has UDP */
	GRAFT_NO_PATH,	      /* not sent: of a session that has paths, and this one is not there */
	GRAFT_REASONS,
};

enum graft_kind {
	GRAFT_DATA,
	GRAFT_REQUEST, /* for a packet by its number */
	GRAFT_LAST,    /* the number of the sender's next packet, when there was none for a while */
	GRAFT_ACK,     /* what has come: graft_ack */
	GRAFT_GONE,    /* a packet that was asked for, by its number, is not kept any more */
	GRAFT_PARITY,  /* of packets up to this number */
	GRAFT_RETURNED, /* data that a function has recovered: it arrives once more, and is nowhere on a wire */
	GRAFT_SAYS = 8, /* this one and those behind it: between the daemons at both ends */
	GRAFT_KINDS = 16,
};

/* Behind the payload, in the datagram. */
struct graft_frame {
	__u8 magic;
	__u8 bits;   /* version (3 bits), kind (4), epoch (1) */
	__be16 list; /* both ends must have agreed on the same one */
	__be32 number;
	__u64 tag; /* SipHash over what is above, and ports and length; not over the payload */
};

#define GRAFT_MAGIC	  0x67
#define GRAFT_VERSION	  2
#define GRAFT_FRAME_BYTES 16
#define GRAFT_SEAL_BYTES  24 /* that sealing adds to a datagram */

/* Of a session, all its functions', of either epoch. Numbers start from 0 and wrap around. */
struct graft_shared {
	__u32 next;   /* number of the next packet out */
	__u32 newest; /* one more than the newest number in */
	__u64 sent_ns;
	__u64 seen[GRAFT_WINDOW]; /* by number: GRAFT_SEEN or GRAFT_GIVEN_UP, and the number */
	/* In: all below have come, or are given up. Functions that need it call graft_advance(). */
	__u32 complete;
	__u32 begun;
	__u32 birth; /* another one each time that a session begins anew, with numbers from 0 */
	__u32 turned; /* In: the first number that is known to be of the list that the newest one came by; graft_turn(). */
	/* Out, as the other end's acknowledgements say: */
	__u32 acked;	 /* all below have come, or were given up there */
	__u32 delivered; /* packets that have come or were given up there, modulo 2^32 */
	__u32 losses;	 /* times that something was missing, at most one in a round trip */
	__u32 recover;	 /* the next number at the latest of these */
	__u32 room;	 /* the number up to which the receiver has room */
	__u32 srtt_us;	 /* round trip, smoothed as in RFC 6298; 0: not known */
	__u32 rttvar_us;
	__u32 min_rtt_us;
	__u64 acked_ns;		     /* of the latest that said something new */
	__u64 went_ns[GRAFT_WINDOW]; /* by number; 0: it was sent again, and its round trip cannot be told */
	__u64 leaves_ns;	     /* the next packet, CLOCK_MONOTONIC, where a function paces */
	__u32 epoch_in;		     /* of the newest one */
	__u32 refused; /* a packet was, as so many may be under way, and its sender was not told of room yet; 0: none */
};

#define GRAFT_SEEN     (1ULL << 32)
#define GRAFT_GIVEN_UP (2ULL << 32)

/* A packet on its way through a joint, in memory of the CPU. */
struct graft_work {
	__u64 list; /* functions that are still to run, a byte each, the next one lowest */
	__u64 now_ns;
	__u64 start_ns; /* 0: its time is not taken */
	__u64 key[2];
	__u32 session;
	enum graft_reason reason;
	__u32 number;
	__u32 budget_ns;
	__u16 list_id;
	__u8 kind;
	__u8 epoch;
	__u8 is_numbered;
	__u8 is_late;	 /* a newer one has come before */
	__u8 is_partial; /* the interface completes UDP's checksum */
	__u8 family;	 /* 4 or 6 */
	__u32 ip_at;	 /* in the frame of the link */
	__u32 udp_at;
	__u32 payload_bytes; /* the application's */
	__u32 mark;	     /* of what functions send themselves: it is not framed again */
	__u32 limit;	     /* packets that may be under way; 0: no function said so */
	__u8 is_sealed;	     /* the session: what leaves it is sealed behind the last function */
	__u8 current;	     /* the place of the function that runs, in its program array */
	__u8 again; /* at GRAFT_TX: one that wants to send a packet of its own behind this one; graft_follow() */
	__u8 behind;	      /* it does so now, in this packet's place: 1 for the first time, 2, ... */
	__u8 is_kept;	      /* at GRAFT_TX: a function has kept it */
	__u8 was_given_up;    /* at GRAFT_RX: nobody waits for it any more */
	__u8 is_marked_later; /* at GRAFT_RX: `number` leaves it to another function to say that it has come */
	__u8 is_returned; /* at GRAFT_REPAIR: this host has recovered it, and has it arrive behind another one */
	__u8 tells_room;   /* the session: its sender is told when there is room again */
	__u8 reserved;	   /* 0: what is behind it stays where it was */
	__u8 protocol;	   /* by which it came: UDP, or IP protocol 253 */
	__u8 wire;	   /* by which the session's packets leave */
	__u16 protocol_at; /* the byte of IP that says so, in the frame of the link */
	__u8 has_paths;	   /* the session */
	__u8 path;	   /* of these, by which it came */
	/* At GRAFT_TX, for the qdisc fq, which has a packet leave when it says. The verdict does it, as the packet may not leave at all. */
	__u32 takes_ns;	 /* until the next one may leave; 0: no function paces */
	__u32 spare_ns;	 /* of time in which nothing left, so much counts as if it were to come */
	__u64 leaves_ns; /* 0: at once */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, GRAFT_JOINTS);
	__type(key, __u32);
	__type(value, struct graft_work);
} works SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, GRAFT_SESSIONS);
	__type(key, __u32);
	__type(value, struct graft_shared);
} shared SEC(".maps");

#define GRAFT_PROGRAMS(name)                           \
	struct {                                       \
		__uint(type, BPF_MAP_TYPE_PROG_ARRAY); \
		__uint(max_entries, GRAFT_FUNCTIONS);  \
		__type(key, __u32);                    \
		__type(value, __u32);                  \
	} name SEC(".maps")

GRAFT_PROGRAMS(programs_tx);
GRAFT_PROGRAMS(programs_rx);
GRAFT_PROGRAMS(programs_repair);

static __always_inline struct graft_work *graft_work(__u32 joint)
{
	return bpf_map_lookup_elem(&works, &joint);
}

static __always_inline struct graft_shared *graft_shared(const struct graft_work *work)
{
	__u32 session = work->session;

	return bpf_map_lookup_elem(&shared, &session);
}

/* By which a packet grows behind the last function. */
static __always_inline __u32 graft_more_bytes(const struct graft_work *work)
{
	return GRAFT_FRAME_BYTES + (work->is_sealed ? GRAFT_SEAL_BYTES : 0);
}

/* The first of both numbers is newer, or the same. */
static __always_inline int graft_not_before(__u32 one, __u32 other)
{
	return (__s32)(one - other) >= 0;
}

/* Whether the packet of this number has not come, as far as is remembered. */
static __always_inline int graft_is_missing(const struct graft_shared *shared, __u32 number)
{
	__u64 seen = shared->seen[number % GRAFT_WINDOW];

	return seen != (GRAFT_SEEN | number) && seen != (GRAFT_GIVEN_UP | number);
}

/* What is newer than all before it has come, by the list of its epoch: so those from this number on were sent by that one. What is
 * missing below is owed as the list before has promised.
 */
static __always_inline void graft_turn(struct graft_shared *shared, __u32 number, __u32 epoch)
{
	if (shared->epoch_in == epoch)
		return;
	shared->turned = number;
	shared->epoch_in = epoch;
}

/* Whether a packet that is missing was sent by the list that this one came by. */
static __always_inline int graft_is_own(const struct graft_shared *shared, const struct graft_work *work,
					__u32 number)
{
	return shared->epoch_in == work->epoch && graft_not_before(number, shared->turned);
}

static long graft_advance_once(__u32 index, struct graft_shared **shared)
{
	__u32 number = (*shared)->complete;

	if (graft_not_before(number, (*shared)->newest) || graft_is_missing(*shared, number))
		return 1;
	(*shared)->complete = number + 1;
	return 0;
}

/* Brings `complete` up to the first packet that is missing. What is further behind than is remembered is given up. */
static __always_inline void graft_advance(struct graft_shared *shared)
{
	__u32 oldest = shared->newest - GRAFT_WINDOW;

	if (!graft_not_before(shared->complete, oldest))
		shared->complete = oldest;
	bpf_loop(GRAFT_WINDOW, graft_advance_once, &shared, 0);
}

/* A session's state, as the version before has it. */
#define GRAFT_OLD_STATE(version)                  \
	struct {                                  \
		__uint(type, BPF_MAP_TYPE_ARRAY); \
		__uint(max_entries, 1);           \
		__type(key, __u32);               \
		__type(value, struct version);    \
	} old_state SEC(".maps")

struct graft_migrate_call {
	__u32 session;
	__u32 joints; /* bits, 1 << enum graft_joint: what of the state is to be made */
	__u32 error;  /* not 0: it cannot be made */
};

#define GRAFT_PASS_tx	  -1 /* TCX_NEXT, TC_ACT_UNSPEC */
#define GRAFT_PASS_repair -1
#define GRAFT_PASS_rx	  2 /* XDP_PASS */

/* To the next function, or to the verdict behind the last. Where one is not there, to the verdict: framing only. */
#define graft_next(ctx, joint, work)                                  \
	({                                                            \
		__u32 next_ = (work)->list & 0xff;                    \
                                                                      \
		(work)->list >>= 8;                                   \
		(work)->current = next_;                              \
		if (next_) {                                          \
			bpf_tail_call(ctx, &programs_##joint, next_); \
			(work)->reason = GRAFT_NO_FUNCTION;           \
		}                                                     \
		bpf_tail_call(ctx, &programs_##joint, 0);             \
		GRAFT_PASS_##joint;                                   \
	})

/* To the verdict. */
#define graft_done(ctx, joint, work, why)                 \
	({                                                \
		(work)->reason = why;                     \
		bpf_tail_call(ctx, &programs_##joint, 0); \
		GRAFT_PASS_##joint;                       \
	})

#endif
