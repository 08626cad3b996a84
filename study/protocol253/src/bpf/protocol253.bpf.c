// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Datagrams between two hosts over IP protocol 253 (RFC 3692). The UDP header is replaced at TC egress and restored at
 * TC ingress, so applications, firewalls and all other programs see UDP.
 *
 * Some interfaces complete checksums of UDP and TCP only, or wrongly claim to have completed others. Therefore the
 * checksum is completed in software, and stored where UDP has its length, which IP states as well. An interface may
 * overwrite the bytes where UDP has its checksum, which the receiver ignores.
 *
 * IPv4 options, IPv6 extension headers and fragments are not converted.
 */
#include "net.h"
#include "sk_buff.h"
#include <linux/pkt_cls.h>

#define IPPROTO_EXPERIMENT 253

/* The header on the wire, which is as long as UDP's. */
struct wire_header {
	__be16 source;
	__be16 destination;
	__be16 check; /* UDP checksum of the datagram; 0: none */
	__u16 spare;  /* bytes where UDP has its checksum; the receiver ignores them */
};

_Static_assert(sizeof(struct wire_header) == sizeof(struct udphdr), "nothing moves");

/* The addresses of this host and the other one; IPv4 addresses are in the first 4 bytes, and the rest is zero. */
struct wire_pair {
	__u8 local[16];
	__u8 remote[16];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 64);
	__type(key, struct wire_pair);
	__type(value, __u32);
} pairs SEC(".maps");

/* A packet between two addresses of `pairs`: offsets in the frame, and the length of the UDP header and its payload. */
struct wire_packet {
	__u32 header_at;
	__u32 protocol_at;
	__u32 check_at; /* offset of IPv4's header checksum; 0 for IPv6 */
	__u32 bytes;
};

static __always_inline int is_v4(struct __sk_buff *skb, __u8 protocol, int is_out, struct wire_packet *packet,
				 struct wire_pair *pair)
{
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.ihl != 5 || ip.protocol != protocol ||
	    ip.frag_off & bpf_htons(0x3fff) || bpf_ntohs(ip.tot_len) < sizeof(ip) + sizeof(struct udphdr))
		return 0;
	__builtin_memcpy(is_out ? pair->local : pair->remote, &ip.saddr, sizeof(ip.saddr));
	__builtin_memcpy(is_out ? pair->remote : pair->local, &ip.daddr, sizeof(ip.daddr));
	packet->header_at = ETH_HLEN + sizeof(ip);
	packet->protocol_at = ETH_HLEN + __builtin_offsetof(struct iphdr, protocol);
	packet->check_at = ETH_HLEN + __builtin_offsetof(struct iphdr, check);
	packet->bytes = bpf_ntohs(ip.tot_len) - sizeof(ip);
	return 1;
}

static __always_inline int is_v6(struct __sk_buff *skb, __u8 protocol, int is_out, struct wire_packet *packet,
				 struct wire_pair *pair)
{
	struct ipv6hdr ip;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.nexthdr != protocol ||
	    bpf_ntohs(ip.payload_len) < sizeof(struct udphdr))
		return 0;
	__builtin_memcpy(is_out ? pair->local : pair->remote, &ip.saddr, sizeof(ip.saddr));
	__builtin_memcpy(is_out ? pair->remote : pair->local, &ip.daddr, sizeof(ip.daddr));
	packet->header_at = ETH_HLEN + sizeof(ip);
	packet->protocol_at = ETH_HLEN + __builtin_offsetof(struct ipv6hdr, nexthdr);
	packet->check_at = 0;
	packet->bytes = bpf_ntohs(ip.payload_len);
	return 1;
}

/* Returns whether the frame is a packet of this protocol between two addresses of `pairs`. */
static __always_inline int find(struct __sk_buff *skb, __u8 protocol, int is_out, struct wire_packet *packet)
{
	struct wire_pair pair = {};

	if (skb->protocol == bpf_htons(ETH_P_IP) ? !is_v4(skb, protocol, is_out, packet, &pair)
						 : !is_v6(skb, protocol, is_out, packet, &pair))
		return 0;
	return bpf_map_lookup_elem(&pairs, &pair) != NULL;
}

/* --- Outgoing packets --- */

#define SUM_STEP  512 /* most bytes that one bpf_csum_diff sums before Linux 6.13 */
#define SUM_PARTS (65536 / SUM_STEP)

struct wire_part {
	__u8 bytes[SUM_STEP + 8];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct wire_part);
} parts SEC(".maps");

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
	struct wire_part *part = bpf_map_lookup_elem(&parts, &zero);

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

/* Completes a checksum that was left to the interface (CHECKSUM_PARTIAL). The header already contains the pseudo
 * header's sum.
 */
static __always_inline int complete_checksum(struct __sk_buff *skb, const struct wire_packet *packet,
					     struct udphdr *udp)
{
	struct wire_summing summing = {.skb = skb, .at = packet->header_at, .bytes = packet->bytes};

	bpf_loop(SUM_PARTS, sum_part, &summing, 0);
	put_udp_checksum(udp, summing.sum);
	return summing.failed;
}

static __always_inline int put_protocol(struct __sk_buff *skb, const struct wire_packet *packet, __u8 from,
					__u8 to, __u64 flags)
{
	if (bpf_skb_store_bytes(skb, packet->protocol_at, &to, sizeof(to), packet->check_at ? 0 : flags))
		return -1;
	return packet->check_at
		       ? bpf_l3_csum_replace(skb, packet->check_at, bpf_htons(from), bpf_htons(to), 2)
		       : 0;
}

SEC("tcx/egress")
int protocol253_out(struct __sk_buff *skb)
{
	struct wire_header wire = {};
	struct wire_packet packet;
	struct udphdr udp;

	if (!find(skb, IPPROTO_UDP, 1, &packet))
		return TC_ACT_UNSPEC;
	/* A buffer with several datagrams (GSO) would get only one header. */
	if (skb->gso_segs > 1 || bpf_skb_load_bytes(skb, packet.header_at, &udp, sizeof(udp)))
		return TC_ACT_SHOT;
	/* The interface must not complete a UDP checksum, since the header has another field there. */
	if (IP_SUMMED(skb) == CHECKSUM_PARTIAL && complete_checksum(skb, &packet, &udp))
		return TC_ACT_SHOT;
	wire = (struct wire_header){.source = udp.source, .destination = udp.dest, .check = udp.check};
	if (bpf_skb_store_bytes(skb, packet.header_at, &wire, sizeof(wire), 0) ||
	    put_protocol(skb, &packet, IPPROTO_UDP, IPPROTO_EXPERIMENT, 0))
		return TC_ACT_SHOT;
	return TC_ACT_UNSPEC;
}

/* --- Incoming packets --- */

/* Restores the UDP header. BPF_F_RECOMPUTE_CSUM also updates the sum that the interface may have computed over the whole
 * packet. Changing the protocol byte of IPv4 does not change that sum, since the header checksum compensates.
 */
SEC("tcx/ingress")
int protocol253_in(struct __sk_buff *skb)
{
	struct wire_packet packet;
	struct wire_header wire;
	struct udphdr udp;

	if (!find(skb, IPPROTO_EXPERIMENT, 0, &packet))
		return TC_ACT_UNSPEC;
	if (bpf_skb_load_bytes(skb, packet.header_at, &wire, sizeof(wire)))
		return TC_ACT_SHOT;
	udp = (struct udphdr){.source = wire.source,
			      .dest = wire.destination,
			      .len = bpf_htons(packet.bytes),
			      .check = wire.check};
	if (bpf_skb_store_bytes(skb, packet.header_at, &udp, sizeof(udp), BPF_F_RECOMPUTE_CSUM) ||
	    put_protocol(skb, &packet, IPPROTO_EXPERIMENT, IPPROTO_UDP, BPF_F_RECOMPUTE_CSUM))
		return TC_ACT_SHOT;
	return TC_ACT_UNSPEC;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
