/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What fan-outs have in common: a frame that arrives at TC, found, changed for each copy, and as it was again.
 *
 * A program fills in two joints. Its `map` says which copies a packet becomes (relay_ingress.h by frames of QUIC, fanout_map.h
 * by the sender of RTP), its `rewrite` what is in one (relay_egress.h seals anew, fanout_rewrite.h leaves the payload alone).
 * They are joints of the source and not of a PROG_ARRAY: a copy is made inside a loop, and a tail call does not come back.
 */
#ifndef MILLRACE_FAN_H
#define MILLRACE_FAN_H

#include "fan_intf.h"
#include "sk_buff.h"
#include "skb_udp.h"

#define LOOPBACK 1 /* interface index, in every network namespace */
#define AF_INET	 2
#define AF_INET6 10

/* The frame that arrived, and what has been done to it. */
struct fan_frame {
	__u32 frame_bytes;
	__u32 packet_at; /* the UDP payload's place in the frame */
	__u32 packet_bytes;
	__u16 vlan_tci;
	__be16 vlan_protocol; /* 0: untagged */
	__u8 family;	      /* 4 or 6 */
	__u8 family_now;
	__u8 summed; /* enum ip_summed */
	__u8 changed;
	__u8 untagged; /* the tag was taken off */
	__u8 pad[7];
};

/* Whether a packet can become copies. */
enum fan_found {
	FAN_FOUND = 0,
	FAN_SUPER_PACKET, /* merged by GRO or from a local sender with GSO */
	FAN_ODD_HEADERS,  /* IPv4 options, IPv6 extension headers, stacked VLAN tags */
	FAN_MALFORMED,
};

static __always_inline enum fan_found fan_find(struct __sk_buff *skb, const struct udp_packet *packet,
					       struct fan_frame *frame)
{
	__u32 headers = packet->family == 4 ? IPV4_BYTES : IPV6_BYTES;

	if (skb->gso_size || skb->gso_segs > 1)
		return FAN_SUPER_PACKET;
	if (packet->payload_offset != ETHERNET_BYTES + headers + UDP_BYTES)
		return FAN_ODD_HEADERS;
	if (packet->udp_bytes < UDP_BYTES || packet->udp_bytes - UDP_BYTES > packet->payload_bytes)
		return FAN_MALFORMED;
	*frame = (struct fan_frame){
		.frame_bytes = skb->len,
		.packet_at = packet->payload_offset,
		.packet_bytes = packet->udp_bytes - UDP_BYTES,
		.family = packet->family,
		.family_now = packet->family,
	};
	if (skb->vlan_present) {
		frame->vlan_tci = skb->vlan_tci;
		frame->vlan_protocol = skb->vlan_proto;
	}
	return FAN_FOUND;
}

enum fan_way {
	FAN_WAY = 0,
	FAN_NO_ROUTE,
	FAN_NO_NEIGHBOUR, /* the next hop's link address is not known */
	FAN_TOO_LARGE,	  /* for the route's MTU */
};

/* With loopback as its input interface, the look-up is that of the host's own output. `size`: of the UDP payload. */
static __always_inline enum fan_way fan_route(struct __sk_buff *skb, struct bpf_fib_lookup *route,
					      const struct net_path *path, __u32 size)
{
	__builtin_memset(route, 0, sizeof(*route));
	route->l4_protocol = IPPROTO_UDP;
	route->sport = path->local_port;
	route->dport = path->remote_port;
	route->ifindex = LOOPBACK;
	if (path->family == 4) {
		route->family = AF_INET;
		route->tot_len = IPV4_BYTES + UDP_BYTES + size;
		route->tos = path->traffic_class;
		__builtin_memcpy(&route->ipv4_src, path->local, 4);
		__builtin_memcpy(&route->ipv4_dst, path->remote, 4);
	} else {
		route->family = AF_INET6;
		route->tot_len = IPV6_BYTES + UDP_BYTES + size;
		route->flowinfo = path->flow_label;
		__builtin_memcpy(route->ipv6_src, path->local, 16);
		__builtin_memcpy(route->ipv6_dst, path->remote, 16);
	}
	switch (bpf_fib_lookup(skb, route, sizeof(*route), 0)) {
	case BPF_FIB_LKUP_RET_SUCCESS:
		return FAN_WAY;
	case BPF_FIB_LKUP_RET_NO_NEIGH:
		return FAN_NO_NEIGHBOUR;
	case BPF_FIB_LKUP_RET_FRAG_NEEDED:
		return FAN_TOO_LARGE;
	default:
		return FAN_NO_ROUTE;
	}
}

/* Gives the frame room for `bytes` and the right protocol. */
static __always_inline int fan_reshape(struct __sk_buff *skb, struct fan_frame *frame, __u8 family,
				       __u32 bytes)
{
	if (frame->family_now != family) {
		if (bpf_skb_change_proto(skb, family == 4 ? bpf_htons(ETH_P_IP) : bpf_htons(ETH_P_IPV6), 0))
			return -1;
		frame->family_now = family;
	}
	return skb->len == bytes ? 0 : bpf_skb_change_tail(skb, bytes, 0);
}

/* Before the first change. A checksum over the whole frame (CHECKSUM_COMPLETE) would have to follow every change; when
 * the frame grows, the kernel forgets it and sums up again what goes up. A VLAN tag would go along with the copies, to
 * whatever interface they leave by, and the flow's hash would put them all into one queue.
 */
static __always_inline int fan_begin(struct __sk_buff *skb, struct fan_frame *frame)
{
	if (!frame->changed) {
		frame->changed = 1;
		bpf_set_hash_invalid(skb);
		if (frame->summed == CHECKSUM_COMPLETE && bpf_skb_change_tail(skb, frame->frame_bytes + 4, 0))
			return -1;
	}
	if (frame->vlan_protocol && !frame->untagged) {
		if (bpf_skb_vlan_pop(skb))
			return -1;
		frame->untagged = 1;
	}
	return 0;
}

/* The last step of the way back, when the bytes are those that arrived. */
static __always_inline int fan_tag_again(struct __sk_buff *skb, const struct fan_frame *frame)
{
	return frame->untagged ? bpf_skb_vlan_push(skb, frame->vlan_protocol, frame->vlan_tci) : 0;
}

#endif
