/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The steps that are the same in all fan-out programs, which send copies of a packet to many receivers. They parse a
 * frame that arrives at TC, change it for each copy, and restore it.
 *
 * Each program adds two functions of its own. Its function `map` decides which copies are made of a packet:
 * relay_ingress.h by the QUIC frames, fanout_map.h by the sender of RTP. Its function `rewrite` writes a copy:
 * relay_egress.h seals it again, fanout_rewrite.h does not change the payload. The functions are included as source,
 * because copies are made in a loop and a tail call does not return.
 */
#ifndef MILLRACE_FAN_H
#define MILLRACE_FAN_H

#include "fan_intf.h"
#include "sk_buff.h"
#include "skb_udp.h"

#define LOOPBACK 1 /* interface index of lo, in every network namespace */
#define AF_INET	 2
#define AF_INET6 10

/* The frame that arrived, and the changes that were made to it so far. */
struct fan_frame {
	__u32 frame_bytes;
	__u32 packet_at;     /* offset of the UDP payload in the frame */
	__u32 packet_bytes;  /* bytes of UDP payload; of a super-packet: of all its segments */
	__u32 segment_bytes; /* bytes of each segment of a super-packet except the last; 0 for other packets */
	__u16 vlan_tci;	     /* VLAN tag of the frame that arrived */
	__be16 vlan_protocol; /* 0 if the frame arrived without a tag */
	__u8 family;	      /* IP version of the frame that arrived: 4 or 6 */
	__u8 family_now;      /* IP version of the frame at present */
	__u8 summed;	      /* enum ip_summed */
	__u8 changed;	      /* 1 after fan_begin() has prepared the frame for changes */
	__u8 untagged;	      /* 1 after the VLAN tag was removed */
	__u8 pad[3];
};

/* Reports whether a packet can be copied, or the reason why not. */
enum fan_found {
	FAN_FOUND = 0,
	FAN_SUPER_PACKET, /* several packets, merged by GRO or sent with GSO by a local process; fan_frame is valid */
	FAN_ODD_HEADERS, /* the packet has IPv4 options, IPv6 extension headers, or stacked VLAN tags */
	FAN_MALFORMED,	 /* the UDP length contradicts the IP length */
};

static __always_inline enum fan_found fan_find(struct __sk_buff *skb, const struct udp_packet *packet,
					       struct fan_frame *frame)
{
	__u32 headers = packet->family == 4 ? IPV4_BYTES : IPV6_BYTES;

	if (packet->payload_offset != ETHERNET_BYTES + headers + UDP_BYTES)
		return FAN_ODD_HEADERS;
	*frame = (struct fan_frame){
		.frame_bytes = skb->len,
		.packet_at = packet->payload_offset,
		.packet_bytes = packet->payload_bytes,
		.segment_bytes = skb->gso_size,
		.family = packet->family,
		.family_now = packet->family,
	};
	if (skb->vlan_present) {
		frame->vlan_tci = skb->vlan_tci;
		frame->vlan_protocol = skb->vlan_proto;
	}
	if (skb->gso_size || skb->gso_segs > 1)
		return FAN_SUPER_PACKET;
	if (packet->udp_bytes < UDP_BYTES || packet->udp_bytes - UDP_BYTES > packet->payload_bytes)
		return FAN_MALFORMED;
	frame->packet_bytes = packet->udp_bytes - UDP_BYTES;
	return FAN_FOUND;
}

/* The result of looking up the route of a copy. */
enum fan_way {
	FAN_WAY = 0,
	FAN_NO_ROUTE,
	FAN_NO_NEIGHBOUR, /* the link address of the next hop is not known */
	FAN_TOO_LARGE,	  /* the copy is larger than the route's MTU */
};

/* Looks up the route of a copy with `size` bytes of UDP payload. The input interface is loopback, so that the kernel
 * looks up the route as for the host's own packets.
 */
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

/* Changes the frame to this IP version and to a length of `bytes`. */
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

/* Prepares the frame for its first change. The flow's hash is removed, because it would put all copies into one queue.
 * A checksum over the whole frame (CHECKSUM_COMPLETE) would have to follow every change; the kernel drops it when the
 * frame grows, and computes it again for packets that go up the stack. The VLAN tag is removed, because copies would
 * keep it on every interface that they leave by.
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

/* Restores the VLAN tag. Call it as the last step, after the bytes of the frame are restored. */
static __always_inline int fan_tag_again(struct __sk_buff *skb, const struct fan_frame *frame)
{
	return frame->untagged ? bpf_skb_vlan_push(skb, frame->vlan_protocol, frame->vlan_tci) : 0;
}

#endif
