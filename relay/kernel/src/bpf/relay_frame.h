/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Writes the Ethernet, IP and UDP headers in front of a QUIC packet, with their checksums. */
#ifndef MILLRACE_RELAY_FRAME_H
#define MILLRACE_RELAY_FRAME_H

#include "aead.h"
#include "fan.h"
#include "relay_intf.h"

/* position of a QUIC packet in its buffer, after space for the outer headers or a longer STREAM header */
#define QUIC_AT	      64
#define UDP_AT	      (QUIC_AT - UDP_BYTES)
#define IPV4_FRAME_AT (UDP_AT - IPV4_BYTES - ETHERNET_BYTES)
#define IPV6_FRAME_AT (UDP_AT - IPV6_BYTES - ETHERNET_BYTES)
#define SUM_MAX	      2048 /* the longest datagram whose checksum is computed, bytes */

/* Writes the UDP header. With CHECKSUM_PARTIAL the network interface completes the checksum, and expects the sum of the
 * pseudo header in the checksum field.
 */
static __always_inline void frame_udp(struct quic_buf *out, const struct net_path *path, __u32 udp_bytes,
				      __u32 summed)
{
	__u8 *at = out->bytes + UDP_AT;
	struct udphdr *udp = (struct udphdr *)at;
	__u64 sum = csum_pseudo(path->local, sizeof(path->local) + sizeof(path->remote), udp_bytes);

	put_udp(udp, path->local_port, path->remote_port, udp_bytes);
	if (summed == CHECKSUM_PARTIAL) {
		udp->check = csum_fold(sum);
		return;
	}
	/* The 4 bytes after the datagram are zeroed, because the checksum is computed over whole words. */
	store32(at + (udp_bytes & (SUM_MAX - 1)), 0);
	put_udp_checksum(udp, csum_add(at, udp_bytes, SUM_MAX, sum));
}

/* Writes all headers in front of a QUIC packet of `size` bytes. */
static __always_inline void frame_packet(struct quic_buf *out, const struct net_path *path,
					 const struct bpf_fib_lookup *route, __u32 size, __u32 summed)
{
	__u32 udp_bytes = UDP_BYTES + size;
	__u8 *udp = out->bytes + UDP_AT;

	frame_udp(out, path, udp_bytes, summed);
	if (path->family == 4) {
		put_ipv4((struct iphdr *)(udp - IPV4_BYTES), load32(path->local), load32(path->remote),
			 path->traffic_class, udp_bytes);
		store16(put_macs(out->bytes + IPV4_FRAME_AT, route->dmac, route->smac), bpf_htons(ETH_P_IP));
	} else {
		put_ipv6((struct ipv6hdr *)(udp - IPV6_BYTES), path->local, path->remote, path->traffic_class,
			 path->flow_label, udp_bytes);
		store16(put_macs(out->bytes + IPV6_FRAME_AT, route->dmac, route->smac),
			bpf_htons(ETH_P_IPV6));
	}
}

#endif
