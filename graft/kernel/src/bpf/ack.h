/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The format of an acknowledgement of packets, and how a sender updates its state from one. The header also compiles as
 * native code, for tests.
 */
#ifndef MILLRACE_ACK_H
#define MILLRACE_ACK_H

#include "graft_packet.h"
#include <bpf/bpf_endian.h>

/* Number of packets that the bitmap of an acknowledgement covers. The first one has the packet number in the frame of
 * the acknowledgement.
 */
#define ACK_COME (GRAFT_WINDOW / 2)
/* Number of packets that may arrive after a missing packet before that packet counts as lost (RFC 5681). */
#define ACK_REORDERED 3

/* Payload of a GRAFT_ACK frame. Packets with a lower number than the frame's packet number were received, or are no
 * longer expected.
 */
struct graft_ack {
	__be32 newest; /* one more than the newest packet number received */
	/* number of the packet that triggered this acknowledgement; the sender measures the round trip with
	 * it
	 */
	__be32 echo;
	__be32 room; /* the receiver has buffer space for packets below this number */
	__be32 pad;
	/* bitmap of received packets, from the frame's packet number on, lowest bit first */
	__u8 come[ACK_COME / 8];
	/* SipHash over the frame's authentication tag and the fields above; the frame's tag does not cover
	 * the payload
	 */
	__u64 tag;
};

_Static_assert(sizeof(struct graft_ack) == 88, "as it is on the wire");

static __always_inline __u32 ack_bits(__u64 word)
{
	word -= word >> 1 & 0x5555555555555555;
	word = (word & 0x3333333333333333) + (word >> 2 & 0x3333333333333333);
	word = (word + (word >> 4)) & 0x0f0f0f0f0f0f0f0f;
	return word * 0x0101010101010101 >> 56;
}

/* Updates the smoothed round trip and its variation with a sample (RFC 6298). */
static __always_inline void ack_round_trip(struct graft_shared *shared, __u64 ns)
{
	__u32 us = ns > 60000000000ULL ? 60000000 : ns / 1000, difference;

	if (!us)
		us = 1;
	if (!shared->min_rtt_us || us < shared->min_rtt_us)
		shared->min_rtt_us = us;
	if (!shared->srtt_us) {
		shared->srtt_us = us;
		/* The first round-trip sample sets the variation to half of itself (RFC 6298, section 2.2).
		 */
		shared->rttvar_us = us / 2;
		return;
	}
	/* Later samples are weighted with the gains 1/4 and 1/8 of RFC 6298, section 2.3. */
	difference = us > shared->srtt_us ? us - shared->srtt_us : shared->srtt_us - us;
	shared->rttvar_us += (difference >> 2) - (shared->rttvar_us >> 2);
	shared->srtt_us += (us >> 3) - (shared->srtt_us >> 3);
}

/* Applies an acknowledgement to the sender's state. Only newer information changes the state, so a replayed
 * acknowledgement has no effect. Returns not 0 if the acknowledgement names packets that were never sent.
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
	/* An acknowledgement that arrives after a newer one is ignored. */
	if (!graft_not_before(number, acked))
		return 0;
	if (graft_not_before(echo, next - GRAFT_WINDOW) && !graft_not_before(echo, next)) {
		/* Each packet gives one round-trip sample. A retransmitted packet has no sending time, since
		 * its sample would be ambiguous (Karn's algorithm).
		 */
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
	/* The acknowledgement's bitmap may have bits for packets that were never sent, which are not counted. */
	if (!graft_not_before(next, delivered))
		delivered = next;
	if (!graft_not_before(shared->delivered, delivered)) {
		shared->delivered = delivered;
		shared->acked_ns = now_ns;
	}
	/* Counts one loss per round trip: packets sent before the previous loss was counted do not count as
	 * another loss.
	 */
	if ((__s32)(newest - number) > ACK_REORDERED && graft_not_before(number, shared->recover)) {
		shared->losses++;
		shared->recover = next;
	}
	return 0;
}

#endif
