/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The header of sessions over IP protocol 253 (RFC 3692) on the wire. All other code sees their packets as
 * UDP: the header is replaced after everything else when a packet is sent, and restored first when it
 * arrives.
 *
 * Some interfaces complete checksums of UDP and TCP only, or wrongly claim to have completed others.
 * Therefore the checksum is completed in software, and stored where UDP has its length, which IP states as
 * well. An interface may overwrite the bytes where UDP has its checksum, which the receiver ignores.
 */
#ifndef MILLRACE_PACKET_WIRE_H
#define MILLRACE_PACKET_WIRE_H

#include "skb_udp.h"

/* The header of protocol 253 on the wire, which is as long as UDP's. */
struct wire_header {
	__be16 source;
	__be16 destination;
	__be16 check; /* UDP checksum of the datagram; 0: none */
	__u16 spare;  /* bytes where UDP has its checksum; the receiver ignores them */
};

_Static_assert(sizeof(struct wire_header) == sizeof(struct udphdr), "nothing moves");

static __always_inline void wire_of_udp(struct wire_header *wire, const struct udphdr *udp)
{
	*wire = (struct wire_header){.source = udp->source, .destination = udp->dest, .check = udp->check};
}

static __always_inline void udp_of_wire(struct udphdr *udp, const struct wire_header *wire, __u32 udp_bytes)
{
	*udp = (struct udphdr){.source = wire->source,
			       .dest = wire->destination,
			       .len = bpf_htons(udp_bytes),
			       .check = wire->check};
}

/* Returns the checksum of an IPv4 header after its protocol field changed from `from` to `to` (RFC 1624). */
static __always_inline __u16 ip_check_after(__u16 check, __u8 from, __u8 to)
{
	return ~csum_fold((__u64)(__u16)~check + (__u16)~bpf_htons(from) + bpf_htons(to));
}

/* Reads the protocol 253 header at the cursor into the fields of a UDP header. Returns not 0 if the packet is too
 * short.
 */
static __always_inline int take_wire(struct net_cursor *cursor, const struct ip_carried *carried,
				     struct net_udp *udp)
{
	__u32 begin = cursor->at;

	if (take_udp(cursor, udp) || carried->end < begin + UDP_BYTES || carried->end - begin > 0xffff)
		return -1;
	/* The length comes from the IP header, since the header of protocol 253 has no length field. */
	udp->bytes = carried->end - begin;
	return 0;
}

#ifdef __bpf__

#include "graft_packet.h"
#include "sk_buff.h"

/* --- Outgoing packets --- */

#define SUM_STEP  512 /* most bytes that one bpf_csum_diff sums before Linux 6.13 */
#define SUM_PARTS (65536 / SUM_STEP)

struct wire_part {
	__u8 bytes[SUM_STEP + 8];
};

BPF_MAP(PERCPU_ARRAY, wire_parts, __u32, struct wire_part, 1);

struct wire_summing {
	struct __sk_buff *skb;
	__u32 at;
	__u32 bytes;
	__u32 sum;
	__u32 failed;
};

static long sum_part(__u32 index, struct wire_summing *summing)
{
	__u32 zero = 0, at = index * SUM_STEP, bytes = summing->bytes - at;
	struct wire_part *part = bpf_map_lookup_elem(&wire_parts, &zero);

	if (at >= summing->bytes || !part)
		return 1;
	if (bytes > SUM_STEP)
		bytes = SUM_STEP;
	bytes = BOUNDED(bytes, SUM_STEP);
	/* bpf_csum_diff sums multiples of 4 bytes, so the last word is padded with zeroes. */
	store32(part->bytes + bytes, 0);
	if (bpf_skb_load_bytes(summing->skb, summing->at + at, part->bytes, bytes)) {
		summing->failed = 1;
		return 1;
	}
	summing->sum =
		bpf_csum_diff(NULL, 0, (__be32 *)part->bytes, (bytes + 3) & (2 * SUM_STEP - 4), summing->sum);
	return 0;
}

/* Completes a checksum that was left to the interface (CHECKSUM_PARTIAL). The header already contains the
 * pseudo header's sum.
 */
static __always_inline int complete_checksum(struct __sk_buff *skb, const struct graft_work *work,
					     struct udphdr *udp)
{
	struct wire_summing summing = {.skb = skb, .at = work->udp_at, .bytes = bpf_ntohs(udp->len)};

	bpf_loop(SUM_PARTS, sum_part, &summing, 0);
	put_udp_checksum(udp, summing.sum);
	return summing.failed;
}

/* Replaces the UDP header of a framed packet by the protocol 253 header. Returns not 0 if the kernel had no
 * memory.
 */
static __noinline int wire_out(struct __sk_buff *skb, const struct graft_work *work)
{
	const __u8 protocol = IPPROTO_EXPERIMENT;
	struct wire_header wire;
	struct udphdr udp;

	if (bpf_skb_load_bytes(skb, work->udp_at, &udp, sizeof(udp)))
		return -1;
	/* The interface must not complete a UDP checksum, since the protocol 253 header has another field
	 * there.
	 */
	if (IP_SUMMED(skb) == CHECKSUM_PARTIAL && complete_checksum(skb, work, &udp))
		return -1;
	wire_of_udp(&wire, &udp);
	if (bpf_skb_store_bytes(skb, work->udp_at, &wire, sizeof(wire), 0) ||
	    bpf_skb_store_bytes(skb, work->protocol_at, &protocol, sizeof(protocol), 0))
		return -1;
	return work->family == 6
		       ? 0
		       : bpf_l3_csum_replace(skb, work->ip_at + __builtin_offsetof(struct iphdr, check),
					     bpf_htons(IPPROTO_UDP), bpf_htons(protocol), 2);
}

/* --- Incoming packets --- */

/* Returns the offset of the checksum, which depends on whether the packet arrived as UDP or as protocol 253.
 */
static __always_inline __u32 wire_check_at(const struct graft_work *work)
{
	return work->udp_at + (work->protocol == IPPROTO_UDP ? __builtin_offsetof(struct udphdr, check)
							     : __builtin_offsetof(struct wire_header, check));
}

static __noinline int wire_in_xdp(struct xdp_md *ctx, const struct graft_work *work, __u32 udp_bytes)
{
	__u32 check_at = work->ip_at + __builtin_offsetof(struct iphdr, check);
	const __u8 protocol = IPPROTO_UDP;
	struct wire_header wire;
	struct udphdr udp;
	__u16 check;

	if (bpf_xdp_load_bytes(ctx, work->udp_at, &wire, sizeof(wire)))
		return -1;
	udp_of_wire(&udp, &wire, udp_bytes);
	if (bpf_xdp_store_bytes(ctx, work->udp_at, &udp, sizeof(udp)) ||
	    bpf_xdp_store_bytes(ctx, work->protocol_at, (void *)&protocol, sizeof(protocol)))
		return -1;
	if (work->family == 6)
		return 0;
	if (bpf_xdp_load_bytes(ctx, check_at, &check, sizeof(check)))
		return -1;
	/* XDP has no bpf_l3_csum_replace, so the checksum is updated by hand. */
	check = ip_check_after(check, IPPROTO_EXPERIMENT, IPPROTO_UDP);
	return bpf_xdp_store_bytes(ctx, check_at, &check, sizeof(check));
}

/* Restores the UDP header at TC. BPF_F_RECOMPUTE_CSUM also updates the sum that the interface may have
 * computed over the whole packet. Changing the protocol byte of IPv4 does not change that sum, since the IPv4
 * header checksum compensates.
 */
static __noinline int wire_in_skb(struct __sk_buff *skb, const struct graft_work *work, __u32 udp_bytes)
{
	const __u8 protocol = IPPROTO_UDP;
	struct wire_header wire;
	struct udphdr udp;

	if (bpf_skb_load_bytes(skb, work->udp_at, &wire, sizeof(wire)))
		return -1;
	udp_of_wire(&udp, &wire, udp_bytes);
	if (bpf_skb_store_bytes(skb, work->udp_at, &udp, sizeof(udp), BPF_F_RECOMPUTE_CSUM))
		return -1;
	if (work->family == 6)
		return bpf_skb_store_bytes(skb, work->protocol_at, &protocol, sizeof(protocol),
					   BPF_F_RECOMPUTE_CSUM);
	if (bpf_skb_store_bytes(skb, work->protocol_at, &protocol, sizeof(protocol), 0))
		return -1;
	return bpf_l3_csum_replace(skb, work->ip_at + __builtin_offsetof(struct iphdr, check),
				   bpf_htons(IPPROTO_EXPERIMENT), bpf_htons(protocol), 2);
}

#endif

#endif
