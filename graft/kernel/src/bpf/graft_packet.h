/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The interface that packet functions are written against: ABI 3 of grafts. It needs bpf_map.h, UAPI headers of
 * the kernel and libbpf's headers. (Congestion controls are written against graft.h.)
 *
 * A function is an object file with up to three programs, one for each hook that it runs at:
 *
 *   SEC("tcx/egress")  NAME_tx      outgoing packets of an application
 *   SEC("xdp.frags")   NAME_rx      incoming packets, before the kernel has a socket buffer
 *   SEC("tcx/ingress") NAME_repair  incoming packets, where functions may change and send packets
 *
 * If its state differs from the previous version's, it also has SEC("syscall") NAME_migrate, which converts
 * a session's state from the map `old_state` to the map `state`. It runs twice: before the first incoming
 * packet of the new version for the state of incoming packets, and before the first outgoing one for
 * theirs.
 *
 * A graft is a list of such functions. Each ends with graft_next(ctx, HOOK), which runs the next function, or with
 * graft_done(ctx, HOOK, reason), which ends the list. Either way the hook's verdict runs last: it counts the reason,
 * and adds or removes the datagram's graft frame (struct graft_frame). The dispatcher (packet.bpf.c) has found the
 * session and authenticated the frame before the first function runs.
 */
#ifndef MILLRACE_GRAFT_PACKET_H
#define MILLRACE_GRAFT_PACKET_H

#include "bpf_map.h"

#define GRAFT_PACKET_ABI 3

/* Sizes at compile time. When objects are loaded, arrays and hashes whose number of entries is a multiple of
 * GRAFT_SESSIONS are resized to the configured number of sessions. Maps named `kept_...` are resized to the
 * number of sessions that may store packets.
 */
#define GRAFT_SESSIONS	       64
#define GRAFT_STORING_SESSIONS 16
#define GRAFT_FUNCTIONS	       64 /* size of a hook's program array, including the verdict at index 0 */
#define GRAFT_LIST_MAX	       8  /* largest number of functions in a graft's list */
/* number of the latest packets whose state (received, or no longer expected) is remembered */
#define GRAFT_WINDOW 1024

enum graft_hook {
	GRAFT_TX,
	GRAFT_RX,
	GRAFT_REPAIR,
	GRAFT_HOOKS,
};

/* Reason why a packet was passed or dropped. Packets with a reason from GRAFT_OTHER to GRAFT_NO_FUNCTION are passed. */
enum graft_reason {
	GRAFT_OTHER, /* the packet belongs to no session */
	GRAFT_SENT, /* the application's packet was sent, with a graft frame (struct graft_frame) at its end */
	/* the packet was sent by a packet function: a request for a missing packet, or a retransmission */
	GRAFT_SENT_BY_US,
	GRAFT_LET_IN,	 /* the packet functions at XDP accepted the incoming packet */
	GRAFT_DELIVERED, /* delivered to the application without its frame */
	GRAFT_RECOVERED, /* a packet was reconstructed from parity packets, and delivered to the application */
	GRAFT_PROTECTED, /* a parity packet, sent behind the packets that it protects */
	/* passed, but a function of the graft's list is not loaded, so only the frame was added or removed */
	GRAFT_NO_FUNCTION,
	GRAFT_RESENT, /* a request was turned into the requested packet, which was sent */
	/* a request for a packet that is no longer stored, or a protocol message between both hosts */
	GRAFT_ANSWERED,
	GRAFT_MALFORMED, /* the packet has no frame of this version */
	GRAFT_FORGED,	 /* the frame's authentication tag was not computed with this session's key */
	/* the packet was made with a list of functions that is no longer in use, or that differs from this host's */
	GRAFT_STALE,
	GRAFT_DUPLICATE,
	GRAFT_OLD,	/* the packet is too old to tell whether it is a duplicate */
	GRAFT_LATE,	/* the packet arrived after one that was sent later */
	GRAFT_TOO_LONG, /* with its frame, the packet would be too long for the interface */
	GRAFT_MERGED,	/* one socket buffer contains several datagrams (UDP_SEGMENT or UDP_GRO) */
	GRAFT_NO_ROOM,	/* the kernel had no memory */
	GRAFT_NO_KEYS,	/* the session is encrypted (sealed), but its hosts have not agreed on keys yet */
	GRAFT_UNOPENED, /* the datagram was encrypted with another key, or changed on the way */
	GRAFT_REPLAYED, /* a sealed (encrypted) datagram was received before, or is too old to tell whether it was */
	/* a fragment, or a packet with unknown headers, that may belong to an encrypted session */
	GRAFT_FRAGMENT,
	GRAFT_WINDOW_FULL, /* not sent: the window of packets in flight is full */
	/* dropped by a function that delivers packets in order, since an earlier packet is missing */
	GRAFT_OUT_OF_TURN,
	GRAFT_PAUSED,	/* not sent: the session is about to restart */
	GRAFT_TOO_FAST, /* not sent: too many packets wait for their departure time */
	/* the receiving socket is full: the packet counts as not received, and is requested again */
	GRAFT_SOCKET_FULL,
	GRAFT_NO_PATH, /* not sent: the packet mark selects a path of the session that does not exist */
	GRAFT_REASONS,
};

enum graft_kind {
	GRAFT_DATA,
	GRAFT_REQUEST, /* requests the packet whose number is in the frame */
	GRAFT_LAST,    /* states the number of the sender's next packet, when the sender has been silent */
	GRAFT_ACK,     /* acknowledgement of received packets, with payload struct graft_ack */
	GRAFT_GONE,    /* answers a request: the packet whose number is in the frame is no longer stored */
	GRAFT_PARITY,  /* parity packet of a block; the frame has the number of the block's last packet */
	/* packet that this host has recovered and injected into its own receive path; never on the wire */
	GRAFT_RETURNED,
	GRAFT_SAYS = 8, /* frames with this kind or a higher one are messages between the daemons */
	GRAFT_KINDS = 16,
};

/* The frame, which follows the payload at the end of each datagram. */
struct graft_frame {
	__u8 magic;
	__u8 bits;   /* version (3 bits), kind (4), epoch of the list of functions (1) */
	__be16 list; /* identifier of the list of functions, equal at both hosts */
	__be32 number;
	__u64 tag; /* SipHash over the fields above, source address, ports and length, but not the payload */
};

#define GRAFT_MAGIC	  0x67
#define GRAFT_VERSION	  2
#define GRAFT_FRAME_BYTES 16
#define GRAFT_SEAL_BYTES  24 /* bytes that encryption (sealing) adds to a datagram */

/* A session's state that all functions share. It stays when the session changes its list of functions. Each change
 * inverts the epoch (0 or 1). Packet numbers start at 0 and wrap around.
 */
struct graft_shared {
	__u32 next;    /* packet number of the next outgoing packet */
	__u32 newest;  /* one more than the newest packet number received */
	__u64 sent_ns; /* time of the latest outgoing packet, ns */
	/* state of each of the latest packets: packet number plus GRAFT_SEEN or GRAFT_GIVEN_UP */
	__u64 seen[GRAFT_WINDOW];
	/* Incoming: all packets below this number were received, or are no longer expected. A function calls
	 * graft_advance() before it reads this.
	 */
	__u32 complete;
	__u32 begun;
	__u32 birth; /* number that changes whenever the session starts anew, with packet number 0 */
	/* Incoming: first packet number that the sender's current list of functions has sent; see
	 * graft_turn()
	 */
	__u32 turned;
	/* The fields below describe outgoing packets, as the peer's acknowledgements reported them. */
	__u32 acked; /* all packets below this number were received by the peer, or are no longer expected by it */
	__u32 delivered; /* number of packets that the peer has received or no longer expects, modulo 2^32 */
	__u32 losses;	 /* number of losses counted so far, at most one in a round trip */
	__u32 recover;	 /* number of the next packet when the latest loss was counted */
	__u32 room;	 /* the receiver has buffer space for packets below this number */
	__u32 srtt_us;	 /* smoothed round trip (RFC 6298); 0: unknown */
	__u32 rttvar_us;
	__u32 min_rtt_us;
	__u64 acked_ns; /* time at which an acknowledgement last reported new packets, ns */
	/* sending times by packet number, ns; 0: the packet was acknowledged or retransmitted, so it gives no round-trip
	 * sample
	 */
	__u64 went_ns[GRAFT_WINDOW];
	__u64 leaves_ns; /* earliest departure time of the next packet, ns, if a function paces */
	__u32 epoch_in;	 /* epoch (0 or 1) of the list of functions that sent the newest received packet */
	/* Limit of packets in flight, in packets, when the function `window` last refused a packet; 0: no application
	 * waits to be told that it can send again.
	 */
	__u32 refused;
};

#define GRAFT_SEEN     (1ULL << 32)
#define GRAFT_GIVEN_UP (2ULL << 32)

/* The packet that a hook handles now, in per-CPU memory. Functions read and change it. */
struct graft_work {
	__u64 list; /* functions still to run: a byte for each, the next one in the lowest byte */
	__u64 now_ns;
	/* time at which the dispatcher began to handle the packet, to measure the CPU time of the functions, ns; 0: not
	 * measured
	 */
	__u64 start_ns;
	__u64 key[2];
	__u32 session;
	enum graft_reason reason;
	__u32 number;
	__u32 budget_ns;
	__u16 list_id;
	__u8 kind;
	__u8 epoch;
	__u8 is_numbered;
	__u8 is_late;	 /* 1: a newer packet arrived before this one */
	__u8 is_partial; /* 1: the interface will complete UDP's checksum (CHECKSUM_PARTIAL) */
	__u8 family;	 /* IP version, 4 or 6 */
	__u32 ip_at;	 /* offset of the IP header in the link-layer frame */
	__u32 udp_at;
	__u32 payload_bytes; /* bytes of the application's payload */
	/* packet mark (skb->mark) of packets that functions send, by which TC egress adds no graft frame to them again
	 */
	__u32 mark;
	__u32 limit;	/* number of packets that may be in flight; 0: no function set a limit */
	__u8 is_sealed; /* 1: the session is encrypted, so the packet is encrypted after the last function */
	__u8 current;	/* index of the running function in its program array */
	/* at GRAFT_TX: index of a function that will send a packet of its own after this packet; 0: none */
	__u8 again;
	/* number of the function's own packet that is made at present: 1, 2, ...; 0: the packet is the application's */
	__u8 behind;
	__u8 is_kept;	   /* at GRAFT_TX: 1 if the packet was stored for retransmission or parity */
	__u8 was_given_up; /* at GRAFT_RX: 1 if the packet arrived after the receiver had stopped expecting it */
	/* at GRAFT_RX: 1 if not the function `number` but a later one marks the packet as received */
	__u8 is_marked_later;
	/* at GRAFT_REPAIR: 1 if this host recovered the packet and injected it */
	__u8 is_returned;
	/* 1: after the function `window` has refused a packet, the daemon is notified when the application may send
	 * again
	 */
	__u8 tells_room;
	__u8 reserved[5]; /* always 0, so that later fields keep their offsets */
	__u8 has_paths;	  /* 1: the session uses several network paths */
	__u8 path;	  /* number of the session's network path by which the packet arrived */
	/* Used at GRAFT_TX for the qdisc fq, which sends a packet at its departure time. The verdict sets
	 * that time, since the packet may still be dropped before.
	 */
	__u32 takes_ns; /* ns from this packet's departure to the next one's; 0: no function paces */
	/* time by which the packet may depart earlier than its pacing interval requires, ns, so that a burst can follow
	 * a pause
	 */
	__u32 spare_ns;
	__u64 leaves_ns; /* departure time of this packet, ns; 0: at once */
};

BPF_MAP(PERCPU_ARRAY, works, __u32, struct graft_work, GRAFT_HOOKS);

BPF_MAP(ARRAY, shared, __u32, struct graft_shared, GRAFT_SESSIONS);

BPF_MAP(PROG_ARRAY, programs_tx, __u32, __u32, GRAFT_FUNCTIONS);
BPF_MAP(PROG_ARRAY, programs_rx, __u32, __u32, GRAFT_FUNCTIONS);
BPF_MAP(PROG_ARRAY, programs_repair, __u32, __u32, GRAFT_FUNCTIONS);

static __always_inline struct graft_work *graft_work(__u32 hook)
{
	return bpf_map_lookup_elem(&works, &hook);
}

static __always_inline struct graft_shared *graft_shared(const struct graft_work *work)
{
	__u32 session = work->session;

	return bpf_map_lookup_elem(&shared, &session);
}

/* Returns how many bytes are added to a packet after the last function: the frame, and what encryption adds if the
 * session is encrypted.
 */
static __always_inline __u32 graft_more_bytes(const struct graft_work *work)
{
	return GRAFT_FRAME_BYTES + (work->is_sealed ? GRAFT_SEAL_BYTES : 0);
}

/* Returns whether packet number `one` is equal to `other` or newer, taking wrap-around into account. */
static __always_inline int graft_not_before(__u32 one, __u32 other)
{
	return (__s32)(one - other) >= 0;
}

/* Returns whether the packet of this number is missing. The number has to be one of the latest GRAFT_WINDOW.
 */
static __always_inline int graft_is_missing(const struct graft_shared *shared, __u32 number)
{
	__u64 seen = shared->seen[number % GRAFT_WINDOW];

	return seen != (GRAFT_SEEN | number) && seen != (GRAFT_GIVEN_UP | number);
}

/* Records that the sender has switched to another list of functions, which it uses from this packet number on. Missing
 * packets with lower numbers are still treated as the previous list requires.
 */
static __always_inline void graft_turn(struct graft_shared *shared, __u32 number, __u32 epoch)
{
	if (shared->epoch_in == epoch)
		return;
	shared->turned = number;
	shared->epoch_in = epoch;
}

/* Returns whether the sender used the same list of functions for the packet with this number as for the current packet.
 */
static __always_inline int graft_is_own(const struct graft_shared *shared, const struct graft_work *work,
					__u32 number)
{
	return shared->epoch_in == work->epoch && graft_not_before(number, shared->turned);
}

#define GRAFT_TRIES 8 /* number of attempts to change a packet number while other CPUs change it */

/* Raises a packet number to another one, or lowers it if `is_most`, unless it is beyond that already. */
static __always_inline void graft_move(__u32 *number, __u32 to, int is_most)
{
	for (int i = 0; i < GRAFT_TRIES; i++) {
		__u32 before = *(volatile __u32 *)number;

		if ((is_most ? graft_not_before(to, before) : graft_not_before(before, to)) ||
		    __sync_val_compare_and_swap(number, before, to) == before)
			return;
	}
}

/* Assigns a packet number to an outgoing packet. Returns 0 if another CPU has assigned this number to its packet. */
static __always_inline int graft_number(struct graft_shared *shared, struct graft_work *work, __u32 number)
{
	/* The time is set first, so that it is there when another CPU sees that the number is assigned. */
	shared->went_ns[number % GRAFT_WINDOW] = work->now_ns;
	if (__sync_val_compare_and_swap(&shared->next, number, number + 1) != number)
		return 0;
	work->number = number;
	work->is_numbered = 1;
	return 1;
}

static long graft_advance_once(__u32 index, struct graft_shared **shared)
{
	__u32 number = *(volatile __u32 *)&(*shared)->complete;

	if (graft_not_before(number, (*shared)->newest) || graft_is_missing(*shared, number))
		return 1;
	__sync_val_compare_and_swap(&(*shared)->complete, number, number + 1);
	/* Another CPU may have marked the packet as missing before it could see the new value. */
	if (graft_is_missing(*shared, number)) {
		graft_move(&(*shared)->complete, number, 1);
		return 1;
	}
	return 0;
}

/* Advances `complete` to the first missing packet. Packets older than the latest GRAFT_WINDOW are no longer expected.
 */
static __always_inline void graft_advance(struct graft_shared *shared)
{
	__u32 oldest = shared->newest - GRAFT_WINDOW;

	if (!graft_not_before(shared->complete, oldest))
		shared->complete = oldest;
	bpf_loop(GRAFT_WINDOW, graft_advance_once, &shared, 0);
}

/* Declares the map from which NAME_migrate reads the state of the previous version. */
#define GRAFT_OLD_STATE(version) BPF_MAP(ARRAY, old_state, __u32, struct version, 1)

struct graft_migrate_call {
	__u32 session;
	/* bitmap of the hooks (1 << enum graft_hook) for which the state that their programs use is converted */
	__u32 hooks;
	__u32 error; /* set to not 0 if the state cannot be converted */
};

#define GRAFT_PASS_tx	  -1 /* return value of TC programs that pass a packet: TCX_NEXT, TC_ACT_UNSPEC */
#define GRAFT_PASS_repair -1
#define GRAFT_PASS_rx	  2 /* return value of XDP programs that pass a packet: XDP_PASS */

/* Runs the next function of the list, or after the last one the hook's verdict program. If the next function is not
 * loaded, the verdict program runs at once.
 */
#define graft_next(ctx, hook, work)                                  \
	({                                                           \
		__u32 next_ = (work)->list & 0xff;                   \
                                                                     \
		(work)->list >>= 8;                                  \
		(work)->current = next_;                             \
		if (next_) {                                         \
			bpf_tail_call(ctx, &programs_##hook, next_); \
			(work)->reason = GRAFT_NO_FUNCTION;          \
		}                                                    \
		bpf_tail_call(ctx, &programs_##hook, 0);             \
		GRAFT_PASS_##hook;                                   \
	})

/* Skips the remaining functions of the list, and runs the hook's verdict program with this reason. */
#define graft_done(ctx, hook, work, why)                 \
	({                                               \
		(work)->reason = why;                    \
		bpf_tail_call(ctx, &programs_##hook, 0); \
		GRAFT_PASS_##hook;                       \
	})

#endif
