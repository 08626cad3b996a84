/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What an acknowledgement says, and what its receiver learns from it. It also compiles natively. */
#ifndef MILLRACE_ACK_H
#define MILLRACE_ACK_H

#include "graft_packet.h"
#include <bpf/bpf_endian.h>

#define ACK_COME      (GRAFT_WINDOW / 2) /* numbers of which it says whether they have come */
#define ACK_REORDERED 3 /* packets that may be behind a gap before it counts as a loss (RFC 5681) */

/* Payload of a frame GRAFT_ACK, whose number says that all below it have come, or are given up. */
struct graft_ack {
	__be32 newest; /* one more than the newest that has come */
	__be32 echo;   /* the packet that it answers */
	__be32 room;   /* the receiver has room for packets below this number */
	__be32 pad;
	__u8 come[ACK_COME / 8]; /* of the numbers from the frame's on, the lowest bit first */
	__u64 tag;		 /* over the frame's and what is above: frames do not prove payloads */
};

_Static_assert(sizeof(struct graft_ack) == 88, "as it is on the wire");

static __always_inline __u32 ack_bits(__u64 word)
{
	word -= word >> 1 & 0x5555555555555555;
	word = (word & 0x3333333333333333) + (word >> 2 & 0x3333333333333333);
	word = (word + (word >> 4)) & 0x0f0f0f0f0f0f0f0f;
	return word * 0x0101010101010101 >> 56;
}

/* RFC 6298. */
static __always_inline void ack_round_trip(struct graft_shared *shared, __u64 ns)
{
	__u32 us = ns > 60000000000ULL ? 60000000 : ns / 1000, difference;

	if (!us)
		us = 1;
	if (!shared->min_rtt_us || us < shared->min_rtt_us)
		shared->min_rtt_us = us;
	if (!shared->srtt_us) {
		shared->srtt_us = us;
		shared->rttvar_us = us / 2;
		return;
	}
	difference = us > shared->srtt_us ? us - shared->srtt_us : shared->srtt_us - us;
	shared->rttvar_us += (difference >> 2) - (shared->rttvar_us >> 2);
	shared->srtt_us += (us >> 3) - (shared->srtt_us >> 3);
}

/* Only what goes beyond what is known changes anything: so what is sent again by somebody does not. Not 0: it is about what
 * was never sent.
 */
static __always_inline int ack_take(struct graft_shared *shared, __u32 number, const struct graft_ack *ack,
				    __u64 now_ns)
{
	__u32 acked = shared->acked, next = shared->next, newest = bpf_ntohl(ack->newest);
	__u32 echo = bpf_ntohl(ack->echo), room = bpf_ntohl(ack->room), delivered = number;
	__u64 went_ns;

	if (!graft_not_before(next, number) || !graft_not_before(next, newest) ||
	    !graft_not_before(newest, number))
		return -1;
	if (!graft_not_before(number, acked))
		return 0;
	if (graft_not_before(echo, next - GRAFT_WINDOW) && !graft_not_before(echo, next)) {
		went_ns = shared->went_ns[echo % GRAFT_WINDOW];
		shared->went_ns[echo % GRAFT_WINDOW] = 0;
		if (went_ns && now_ns > went_ns)
			ack_round_trip(shared, now_ns - went_ns);
	}
	shared->acked = number;
	if (!shared->room || graft_not_before(room, shared->room))
		shared->room = room;
	for (int i = 0; i < ACK_COME / 64; i++)
		delivered += ack_bits(((const __u64 *)ack->come)[i]);
	if (!graft_not_before(next, delivered))
		delivered = next;
	if (!graft_not_before(shared->delivered, delivered)) {
		shared->delivered = delivered;
		shared->acked_ns = now_ns;
	}
	/* What is missing was sent behind the latest loss: it is a new one. */
	if ((__s32)(newest - number) > ACK_REORDERED && graft_not_before(number, shared->recover)) {
		shared->losses++;
		shared->recover = next;
	}
	return 0;
}

#endif
