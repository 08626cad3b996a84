/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Copies the start of a frame to this CPU's scratch memory and parses the copy. The first attempt copies NEAR_BYTES,
 * which is enough for almost every packet. Otherwise up to HEAD_BYTES are copied, and parsed from the beginning.
 */
#ifndef MILLRACE_GATE_HEAD_H
#define MILLRACE_GATE_HEAD_H

#include "gate_maps.h"

static __noinline int copy_all(struct xdp_md *ctx, struct net_head *head)
{
	__u32 bytes = head->frame_bytes;

	if (bytes > HEAD_BYTES)
		bytes = HEAD_BYTES;
	head->have = bytes;
	OPAQUE(bytes); /* keeps clang from dropping the next check, which gives the verifier the bounds of `bytes` */
	if (bytes < ETHERNET_BYTES || bytes > HEAD_BYTES)
		return -1;
	return bpf_xdp_load_bytes(ctx, 0, head->bytes, bytes);
}

/* Copies NEAR_BYTES in a loop: bpf_xdp_load_bytes takes longer for so few bytes. */
static __noinline int copy_near(struct xdp_md *ctx, struct net_head *head)
{
	const __u8 *data = (void *)(long)ctx->data;
	const void *end = (void *)(long)ctx->data_end;

	head->frame_bytes = bpf_xdp_get_buff_len(ctx);
	/* The frame is short, or continues in another buffer: only bpf_xdp_load_bytes can read it. */
	if ((void *)(data + NEAR_BYTES) > end)
		return copy_all(ctx, head);
	for (int i = 0; i < NEAR_BYTES; i += 16)
		store128(head->bytes + i, load128(data + i));
	head->have = NEAR_BYTES;
	return 0;
}

static __noinline enum gate_find read_headers(struct gate_work *work)
{
	work->packet = (struct gate_packet){};
	return find_udp(&work->head, &work->packet);
}

static __always_inline enum gate_find take_headers(struct xdp_md *ctx, struct gate_work *work)
{
	enum gate_find found;

	if (copy_near(ctx, &work->head))
		return FIND_OTHER;
	found = read_headers(work);
	if (!is_cut(&work->head, &work->packet))
		return found;
	return copy_all(ctx, &work->head) ? FIND_OTHER : read_headers(work);
}

static __always_inline void take_quic(struct xdp_md *ctx, struct gate_work *work)
{
	read_quic(&work->head, &work->packet);
	if (is_cut(&work->head, &work->packet) && !copy_all(ctx, &work->head))
		read_quic(&work->head, &work->packet);
}

#endif
