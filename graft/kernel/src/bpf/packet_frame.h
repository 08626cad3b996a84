/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Makes, authenticates, adds and removes the frame behind a payload. Functions that send packets use this
 * header, too.
 */
#ifndef MILLRACE_PACKET_FRAME_H
#define MILLRACE_PACKET_FRAME_H

#include "graft_packet.h"
#include "siphash.h"
#include "skb_udp.h"

#define CHECK_AT(work)	    ((work)->udp_at + __builtin_offsetof(struct udphdr, check))
#define UDP_LENGTH_AT(work) ((work)->udp_at + __builtin_offsetof(struct udphdr, len))

/* The fields that a frame's authentication tag covers in addition to the frame. The source address is included, so that
 * a packet which is reflected to its sender is not accepted there.
 */
struct frame_context {
	__u8 source[16]; /* an IPv4 address in the first 4 bytes, the rest zero */
	__be16 source_port;
	__be16 destination_port;
	__u32 payload_bytes;
};

static __always_inline __u64 frame_tag(const __u64 key[2], const struct graft_frame *frame,
				       const struct frame_context *context)
{
	__u64 message[4] = {
		*(const __u64 *)frame,
		*(const __u64 *)context->source,
		*(const __u64 *)(context->source + 8),
		*(const __u64 *)&context->source_port,
	};

	return siphash128(key, (const __u8 *)message, 4).low;
}

static __always_inline void frame_make(struct graft_frame *frame, const struct graft_work *work, __u8 kind,
				       __u32 number, const struct frame_context *context)
{
	frame->magic = GRAFT_MAGIC;
	frame->bits = GRAFT_VERSION << 5 | kind << 1 | (work->epoch & 1);
	frame->list = work->list_id;
	frame->number = bpf_htonl(number);
	frame->tag = frame_tag(work->key, frame, context);
}

/* --- Adding and removing the frame of a datagram --- */

static __always_inline int change_ip_length(struct __sk_buff *skb, const struct graft_work *work,
					    __s32 change)
{
	__u32 at = work->ip_at + (work->family == 4 ? __builtin_offsetof(struct iphdr, tot_len)
						    : __builtin_offsetof(struct ipv6hdr, payload_len));
	__be16 old, new;

	if (bpf_skb_load_bytes(skb, at, &old, sizeof(old)))
		return -1;
	new = bpf_htons(bpf_ntohs(old) + change);
	if (work->family == 4 &&
	    bpf_l3_csum_replace(skb, work->ip_at + __builtin_offsetof(struct iphdr, check), old, new,
				sizeof(new)))
		return -1;
	return bpf_skb_store_bytes(skb, at, &new, sizeof(new), 0);
}

/* Updates UDP's checksum after the graft frame was added (`more` is 1) or removed. If the frame begins at an odd
 * offset, the two bytes of the frame's sum are swapped. A checksum of 0 (none) is not changed.
 */
static __always_inline int change_checksum(struct __sk_buff *skb, const struct graft_work *work,
					   const struct graft_frame *frame, int more)
{
	__s64 sum = more ? bpf_csum_diff(NULL, 0, (__be32 *)frame, sizeof(*frame), 0)
			 : bpf_csum_diff((__be32 *)frame, sizeof(*frame), NULL, 0, 0);
	__u16 folded = csum_fold(sum);
	/* BPF_F_PSEUDO_HDR also updates the sum that the interface computed over the whole skb, which
	 * changes when bytes are cut off.
	 */
	__u64 flags = BPF_F_MARK_MANGLED_0 | (more || work->is_partial ? 0 : BPF_F_PSEUDO_HDR);

	if (work->payload_bytes & 1)
		folded = folded << 8 | folded >> 8;
	return bpf_l4_csum_replace(skb, CHECK_AT(work), 0, folded, flags);
}

static __always_inline int change_udp_length(struct __sk_buff *skb, const struct graft_work *work, __u32 from,
					     __u32 to)
{
	__be16 old = bpf_htons(from), new = bpf_htons(to);

	if (bpf_l4_csum_replace(skb, CHECK_AT(work), old, new, sizeof(new) | BPF_F_MARK_MANGLED_0) ||
	    bpf_l4_csum_replace(skb, CHECK_AT(work), old, new,
				sizeof(new) | BPF_F_MARK_MANGLED_0 | BPF_F_PSEUDO_HDR))
		return -1;
	return bpf_skb_store_bytes(skb, UDP_LENGTH_AT(work), &new, sizeof(new), 0);
}

static __always_inline int frame_put(struct __sk_buff *skb, const struct graft_work *work,
				     const struct graft_frame *frame)
{
	__u32 udp_bytes = UDP_BYTES + work->payload_bytes;
	__u32 at = work->udp_at + udp_bytes;

	if (bpf_skb_change_tail(skb, at + GRAFT_FRAME_BYTES, 0) ||
	    bpf_skb_store_bytes(skb, at, frame, sizeof(*frame), 0) || change_checksum(skb, work, frame, 1) ||
	    change_udp_length(skb, work, udp_bytes, udp_bytes + GRAFT_FRAME_BYTES))
		return -1;
	/* Only IPv4 has a header checksum, which change_ip_length() updates. */
	return change_ip_length(skb, work, GRAFT_FRAME_BYTES);
}

/* Removes the frame by reducing the lengths in the headers. The bytes stay in the skb, until IP trims it to
 * the shorter length.
 */
static __always_inline int frame_take(struct __sk_buff *skb, const struct graft_work *work)
{
	__u32 udp_bytes = UDP_BYTES + work->payload_bytes;
	struct graft_frame frame;

	if (bpf_skb_load_bytes(skb, work->udp_at + udp_bytes, &frame, sizeof(frame)) ||
	    change_checksum(skb, work, &frame, 0) ||
	    change_udp_length(skb, work, udp_bytes + GRAFT_FRAME_BYTES, udp_bytes))
		return -1;
	return change_ip_length(skb, work, -GRAFT_FRAME_BYTES);
}

#endif
