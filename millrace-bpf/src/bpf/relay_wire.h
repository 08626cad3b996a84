/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Ethernet, IP and UDP headers in front of a QUIC packet, with their checksums. */
#ifndef MILLRACE_RELAY_WIRE_H
#define MILLRACE_RELAY_WIRE_H

#include "udp.h"
#include "aead.h"
#include "checksum.h"
#include "relay_intf.h"

#define QUIC_AT	      64 /* of a QUIC packet in its buffer: in front, the other headers or a longer STREAM header */
#define UDP_AT	      (QUIC_AT - (int)sizeof(struct udphdr))
#define IPV4_FRAME_AT (UDP_AT - (int)(sizeof(struct iphdr) + sizeof(struct ethhdr)))
#define IPV6_FRAME_AT (UDP_AT - (int)(sizeof(struct ipv6hdr) + sizeof(struct ethhdr)))
#define HOP_LIMIT     64
#define SUM_MAX	      2048 /* bytes of a datagram */

enum ip_summed {
	CHECKSUM_COMPLETE = 2,
	CHECKSUM_PARTIAL = 3,
};

/* Sum over UDP header and payload, which are `bytes` together, zeroes behind them. */
static __always_inline __u64 sum_udp(const __u8 *udp, __u32 bytes, __u64 sum)
{
	const __u32 step = 512; /* what bpf_csum_diff takes at a time before Linux 6.13 */

	for (__u32 at = 0; at < SUM_MAX; at += step) {
		__u32 part = bytes - at;

		if (at >= bytes)
			break;
		if (part > step)
			part = step;
		part = (part + 3) & ~3U;
		sum = bpf_csum_diff(NULL, 0, (__be32 *)(udp + at), part & 1023, sum);
	}
	return sum;
}

/* A packet that is to be checksummed on the way out (CHECKSUM_PARTIAL) holds the sum of the pseudo header. */
static __always_inline void put_udp(struct quic_buf *out, const struct relay_path *path, __u32 size,
				    __u32 summed)
{
	__u8 *at = out->bytes + UDP_AT;
	struct udphdr *udp = (struct udphdr *)at;
	__u32 bytes = sizeof(*udp) + size;
	__u64 sum = bpf_csum_diff(NULL, 0, (__be32 *)path->local, sizeof(path->local) + sizeof(path->remote),
				  bpf_htons(IPPROTO_UDP) + bpf_htons(bytes));

	udp->source = path->local_port;
	udp->dest = path->remote_port;
	udp->len = bpf_htons(bytes);
	udp->check = 0;
	if (summed == CHECKSUM_PARTIAL) {
		udp->check = fold(sum);
		return;
	}
	store32(at + (bytes & (SUM_MAX - 1)), 0);
	udp->check = ~fold(sum_udp(at, bytes, sum));
	if (!udp->check)
		udp->check = 0xffff;
}

static __always_inline void put_ipv4(struct quic_buf *out, const struct relay_path *path, __u32 size)
{
	struct iphdr *ip = (struct iphdr *)(out->bytes + UDP_AT - sizeof(*ip));

	__builtin_memset(ip, 0, sizeof(*ip));
	ip->version = 4;
	ip->ihl = 5;
	ip->tos = path->traffic_class;
	ip->tot_len = bpf_htons(sizeof(*ip) + sizeof(struct udphdr) + size);
	ip->frag_off = bpf_htons(0x4000); /* don't fragment */
	ip->ttl = HOP_LIMIT;
	ip->protocol = IPPROTO_UDP;
	__builtin_memcpy(&ip->saddr, path->local, 4);
	__builtin_memcpy(&ip->daddr, path->remote, 4);
	ip->check = ~fold(bpf_csum_diff(NULL, 0, (__be32 *)ip, sizeof(*ip), 0));
}

static __always_inline void put_ipv6(struct quic_buf *out, const struct relay_path *path, __u32 size)
{
	struct ipv6hdr *ip = (struct ipv6hdr *)(out->bytes + UDP_AT - sizeof(*ip));

	*(__be32 *)ip = bpf_htonl(6 << 28 | path->traffic_class << 20) | path->flow_label;
	ip->payload_len = bpf_htons(sizeof(struct udphdr) + size);
	ip->nexthdr = IPPROTO_UDP;
	ip->hop_limit = HOP_LIMIT;
	__builtin_memcpy(&ip->saddr, path->local, 16);
	__builtin_memcpy(&ip->daddr, path->remote, 16);
}

static __always_inline void put_ethernet(__u8 *at, __be16 protocol, const struct bpf_fib_lookup *route)
{
	struct ethhdr *eth = (struct ethhdr *)at;

	eth->h_proto = protocol;
	__builtin_memcpy(eth->h_dest, route->dmac, sizeof(eth->h_dest));
	__builtin_memcpy(eth->h_source, route->smac, sizeof(eth->h_source));
}

#endif
