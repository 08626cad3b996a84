/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Retransmits packets that a session has stored. */
#ifndef MILLRACE_PACKET_RETRANSMIT_H
#define MILLRACE_PACKET_RETRANSMIT_H

#include "packet_send.h"

/* Replaces a request, in its socket buffer, by the stored packet with this packet number, and adds a frame. The
 * addresses and ports were swapped before.
 */
static __noinline int become(struct __sk_buff *skb, struct graft_work *work, __u32 number)
{
	struct letter letter = {.kind = GRAFT_DATA, .number = number};
	struct kept *kept = kept_find(work, number);
	__u32 bytes;

	if (!kept)
		return -1;
	bytes = kept->bytes;
	if (!bytes || bytes >= KEPT_BYTES)
		return -1;
	bytes = KEPT_BOUNDED(bytes);
	if (bpf_skb_change_tail(skb, work->udp_at + UDP_BYTES + bytes + GRAFT_FRAME_BYTES, 0) ||
	    bpf_skb_store_bytes(skb, work->udp_at + UDP_BYTES, kept->payload, bytes, 0))
		return -1;
	bytes &= KEPT_BYTES - 1;
	OPAQUE(bytes);
	store32(kept->payload + bytes, 0);
	letter.bytes = bytes;
	letter.sum = csum_fold(csum_add(kept->payload, bytes, KEPT_BYTES, 0));
	return finish(skb, work, &letter);
}

/* Replaces a request, in its socket buffer, by the answer GRAFT_GONE: the requested packet is no longer stored. */
static __noinline int say_gone(struct __sk_buff *skb, struct graft_work *work, __u32 number)
{
	struct letter letter = {.kind = GRAFT_GONE, .number = number};

	if (bpf_skb_change_tail(skb, work->udp_at + UDP_BYTES + GRAFT_FRAME_BYTES, 0))
		return -1;
	return finish(skb, work, &letter);
}

#endif
