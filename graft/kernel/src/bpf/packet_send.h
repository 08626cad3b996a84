/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Lets functions send packets by changing the packet that they process, since a BPF program cannot allocate
 * an skb. At TC ingress the packet is first turned around (addresses and ports are swapped). It is restored
 * afterwards if it is still needed.
 */
#ifndef MILLRACE_PACKET_SEND_H
#define MILLRACE_PACKET_SEND_H

#include "packet_frame.h"
#include "packet_kept.h"

/* --- Swapping source and destination of a packet --- */

static __always_inline int swap(struct __sk_buff *skb, __u32 at, const __u32 bytes)
{
	__u64 both[4];
	__u8 *other = (__u8 *)both + bytes;

	if (bpf_skb_load_bytes(skb, at, both, 2 * bytes) || bpf_skb_store_bytes(skb, at, other, bytes, 0))
		return -1;
	return bpf_skb_store_bytes(skb, at + bytes, both, bytes, 0);
}

/* Swaps the addresses of Ethernet and IP, and the ports. Checksums stay valid, since a sum does not depend on
 * the order of its terms.
 */
static __noinline int turn(struct __sk_buff *skb, struct graft_work *work)
{
	__u8 macs[12];

	if (bpf_skb_load_bytes(skb, 0, macs, 12) || bpf_skb_store_bytes(skb, 0, macs + 6, 6, 0) ||
	    bpf_skb_store_bytes(skb, 6, macs, 6, 0))
		return -1;
	/* Source and destination are adjacent: 4 bytes each at offset 12 in IPv4, 16 bytes each at 8 in
	 * IPv6.
	 */
	if (work->family == 4 ? swap(skb, work->ip_at + 12, 4) : swap(skb, work->ip_at + 8, 16))
		return -1;
	return swap(skb, work->udp_at, 2);
}

/* --- Headers of a changed packet --- */

/* Writes lengths and checksum for a payload of `bytes` bytes, which is already in the skb. `payload_sum` is
 * the payload's checksum.
 */
static __noinline int put_datagram(struct __sk_buff *skb, struct graft_work *work, __u32 bytes,
				   __u32 payload_sum)
{
	__u32 udp_bytes = UDP_BYTES + bytes;
	struct udphdr udp = {};
	__u8 addresses[32] = {};
	__u32 ip_change;
	__be16 length;
	__u64 sum;

	if (work->family == 4) {
		if (bpf_skb_load_bytes(skb, work->ip_at + 12, addresses, 4) ||
		    bpf_skb_load_bytes(skb, work->ip_at + 16, addresses + 16, 4) ||
		    bpf_skb_load_bytes(skb, work->ip_at + 2, &length, sizeof(length)))
			return -1;
		ip_change = work->udp_at - work->ip_at + udp_bytes - bpf_ntohs(length);
	} else {
		if (bpf_skb_load_bytes(skb, work->ip_at + 8, addresses, 32) ||
		    bpf_skb_load_bytes(skb, work->ip_at + 4, &length, sizeof(length)))
			return -1;
		ip_change = work->udp_at - work->ip_at - IPV6_BYTES + udp_bytes - bpf_ntohs(length);
	}
	if (bpf_skb_load_bytes(skb, work->udp_at, &udp, 4))
		return -1;
	udp.len = bpf_htons(udp_bytes);
	sum = csum_pseudo(addresses, sizeof(addresses), udp_bytes);
	/* The interface will complete the checksum, so only the pseudo header's sum is stored. */
	if (work->is_partial) {
		udp.check = csum_fold(sum);
	} else {
		sum = bpf_csum_diff(NULL, 0, (__be32 *)&udp, sizeof(udp), csum_fold(sum));
		put_udp_checksum(&udp, (__u64)csum_fold(sum) + payload_sum);
	}
	if (bpf_skb_store_bytes(skb, work->udp_at, &udp, sizeof(udp), 0))
		return -1;
	return change_ip_length(skb, work, ip_change);
}

/* Frame type, packet number and payload length of a packet that a function sends; the payload itself is in the socket
 * buffer.
 */
struct letter {
	__u32 kind;
	__u32 number;
	__u32 bytes;		  /* length in bytes of the payload, which is already in the skb */
	__u32 sum;		  /* checksum of the payload */
	struct graft_frame frame; /* the frame, as make_frame() filled it in */
};

static __always_inline int make_frame(struct __sk_buff *skb, struct graft_work *work, struct letter *letter)
{
	struct frame_context context = {.payload_bytes = letter->bytes};
	__u32 at = work->ip_at + (work->family == 4 ? __builtin_offsetof(struct iphdr, saddr)
						    : __builtin_offsetof(struct ipv6hdr, saddr));

	if (work->family == 4 ? bpf_skb_load_bytes(skb, at, context.source, 4)
			      : bpf_skb_load_bytes(skb, at, context.source, 16))
		return -1;
	if (bpf_skb_load_bytes(skb, work->udp_at, &context.source_port, 2 * sizeof(__be16)))
		return -1;
	frame_make(&letter->frame, work, letter->kind, letter->number, &context);
	return 0;
}

/* Completes a packet: writes the frame behind the payload, the lengths and the checksum. */
static __noinline int finish(struct __sk_buff *skb, struct graft_work *work, struct letter *letter)
{
	__u32 bytes = letter->bytes;
	__u16 of_frame;

	if (make_frame(skb, work, letter) || bpf_skb_store_bytes(skb, work->udp_at + UDP_BYTES + bytes,
								 &letter->frame, sizeof(letter->frame), 0))
		return -1;
	of_frame = csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)&letter->frame, sizeof(letter->frame), 0));
	/* If the frame begins at an odd offset, the two bytes of its sum are swapped before the sum is added. */
	if (bytes & 1)
		of_frame = of_frame << 8 | of_frame >> 8;
	return put_datagram(skb, work, bytes + GRAFT_FRAME_BYTES, of_frame + letter->sum);
}

/* --- Sending packets from the socket buffer of a received packet --- */

/* Holds the payload and graft frame of a received packet, while a function makes packets to send in that packet's
 * socket buffer.
 */
BPF_MAP(PERCPU_ARRAY, borrowed, __u32, struct kept, 1);

struct loan {
	struct kept *saved;
	__u32 total; /* length of the saved packet in bytes */
	__u32 mark;
	__u16 check;
};

/* Saves a received packet, swaps source and destination in its socket buffer, and makes space for `room` bytes of
 * payload. Returns not 0 if that failed and the packet is unchanged.
 */
static __always_inline int borrow(struct __sk_buff *skb, struct graft_work *work, struct loan *loan,
				  __u32 room)
{
	__u32 zero = 0, bytes = work->payload_bytes + GRAFT_FRAME_BYTES;
	struct kept *saved = bpf_map_lookup_elem(&borrowed, &zero);

	if (!saved)
		return -1;
	loan->saved = saved;
	loan->total = work->udp_at + UDP_BYTES + bytes;
	loan->mark = skb->mark;
	if (bytes < GRAFT_FRAME_BYTES || bytes >= KEPT_BYTES)
		return -1;
	bytes = KEPT_BOUNDED(bytes);
	if (bpf_skb_load_bytes(skb, work->udp_at + UDP_BYTES, saved->payload, bytes) ||
	    bpf_skb_load_bytes(skb, CHECK_AT(work), &loan->check, sizeof(loan->check)))
		return -1;
	if (bpf_skb_change_tail(skb, work->udp_at + UDP_BYTES + room + GRAFT_FRAME_BYTES, 0))
		return -1;
	skb->mark = work->mark;
	turn(skb, work);
	return 0;
}

/* Writes the packet that borrow() has saved back to its socket buffer. Returns not 0 if that failed and the packet is
 * lost.
 */
static __always_inline int give_back(struct __sk_buff *skb, struct graft_work *work, struct loan *loan)
{
	__u32 bytes = work->payload_bytes + GRAFT_FRAME_BYTES;
	struct kept *saved = loan->saved;

	skb->mark = loan->mark;
	if (bytes < GRAFT_FRAME_BYTES || bytes >= KEPT_BYTES || !saved)
		return -1;
	bytes = KEPT_BOUNDED(bytes);
	if (turn(skb, work) || bpf_skb_change_tail(skb, loan->total, 0) ||
	    bpf_skb_store_bytes(skb, work->udp_at + UDP_BYTES, saved->payload, bytes, 0) ||
	    put_datagram(skb, work, bytes, 0))
		return -1;
	/* The checksum that arrived is restored, not computed again. */
	return bpf_skb_store_bytes(skb, CHECK_AT(work), &loan->check, sizeof(loan->check), 0);
}

#endif
