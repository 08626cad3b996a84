/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Rings: what comes for a session whose application has one goes there from XDP, and not on to its UDP socket. A ring is an AF_XDP
 * socket, and so of one queue of one interface; what comes by another, or still has a function before it at TC ingress, goes the
 * socket's way. The application has the descriptors, and what it does with them is its own: nothing here waits for it.
 */
#ifndef MILLRACE_JOINT_RING_H
#define MILLRACE_JOINT_RING_H

#include "graft_packet.h"
#include "joint_intf.h"
#include "net.h"

/* By session. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, GRAFT_SESSIONS);
	__type(key, __u32);
	__type(value, struct joint_ring);
} ring_places SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, GRAFT_SESSIONS);
	__type(key, __u32);
	__type(value, __u32);
} rings SEC(".maps");

static __always_inline int is_same_place(const struct joint_place *one, const struct joint_place *other)
{
	return one->ifindex == other->ifindex && one->queue == other->queue;
}

/* Whether the kernel will take it: a packet in one buffer, of the ring's own queue. Of what is authentic it is noted where it has come, unless by another path than
 * the session's own: a ring does not follow each packet.
 */
static __always_inline int ring_fits(struct xdp_md *ctx, const struct graft_work *work)
{
	__u32 session = work->session, bytes = work->payload_bytes + GRAFT_FRAME_BYTES;
	struct joint_ring *ring = bpf_map_lookup_elem(&ring_places, &session);
	struct joint_place here = {.ifindex = ctx->ingress_ifindex, .queue = ctx->rx_queue_index};

	if (!ring)
		return 0;
	if (!work->path && !is_same_place(&ring->seen, &here))
		ring->seen = here;
	return work->is_for_ring && is_same_place(&ring->place, &here) && bytes <= JOINT_RING_BYTES &&
	       (long)ctx->data_end - (long)ctx->data == bpf_xdp_get_buff_len(ctx) &&
	       bpf_map_lookup_elem(&rings, &session);
}

/* What stands before the payload and behind the frame goes. It cannot be put back: the packet is the ring's from here on. */
static __always_inline int ring_cut(struct xdp_md *ctx, const struct graft_work *work)
{
	__u32 bytes = work->payload_bytes + GRAFT_FRAME_BYTES;
	__s32 more;

	if (bpf_xdp_adjust_head(ctx, work->udp_at + UDP_BYTES))
		return -1;
	more = bpf_xdp_get_buff_len(ctx) - bytes;
	return more ? bpf_xdp_adjust_tail(ctx, -more) : 0;
}

/* XDP's verdict; `reason` says what became of it. Whether there is room the kernel finds out later, and counts: ring-full. */
static __always_inline int ring_give(struct xdp_md *ctx, const struct graft_work *work, __u32 *reason)
{
	int verdict = XDP_DROP;

	if (!ring_cut(ctx, work))
		verdict = bpf_redirect_map(&rings, work->session, XDP_DROP);
	*reason = verdict == XDP_REDIRECT ? GRAFT_IN_RING : GRAFT_NO_ROOM;
	return verdict;
}

#endif
