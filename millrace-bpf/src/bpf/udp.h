/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A cursor that walks Ethernet, VLAN tags, IPv4 or IPv6 with extension headers, to a UDP header.
 * It reads with bpf_skb_load_bytes, so that headers outside the linear part are no special case.
 */
#ifndef MILLRACE_UDP_H
#define MILLRACE_UDP_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define VLAN_TAGS_MAX	   2 /* QinQ */
#define VLAN_ID		   0x0fff
#define EXTENSIONS_MAX	   4
#define IPV4_FRAGMENT_BITS 0x3fff /* more-fragments flag and offset */

enum parse {
	PARSE_OK = 0,
	PARSE_NOT_UDP,
	PARSE_FRAGMENT,
	PARSE_MALFORMED,
};

struct cursor {
	struct __sk_buff *skb;
	__u32 offset;
};

struct udp_packet {
	__u8 source[16];
	__u8 destination[16];
	__be16 source_port;
	__be16 destination_port;
	__u32 payload_offset; /* in the frame */
	__u32 payload_bytes;
	__u16 udp_bytes; /* as the UDP header says, itself included */
	__u16 vlan;
	__u8 family;
};

struct vlan_tag {
	__be16 tci;
	__be16 protocol;
};

struct ipv6_extension {
	__u8 next;
	__u8 length; /* in 8 bytes, beyond the first 8 */
};

static __always_inline int cursor_take(struct cursor *cursor, void *into, __u32 size)
{
	if (bpf_skb_load_bytes(cursor->skb, cursor->offset, into, size))
		return -1;
	cursor->offset += size;
	return 0;
}

/* The outermost tag usually travels beside the frame, in the skb. */
static __always_inline enum parse take_ethernet(struct cursor *cursor, __be16 *protocol, __u16 *vlan)
{
	struct ethhdr eth;

	if (cursor_take(cursor, &eth, sizeof(eth)))
		return PARSE_MALFORMED;
	*protocol = eth.h_proto;
	*vlan = cursor->skb->vlan_present ? cursor->skb->vlan_tci & VLAN_ID : 0;
	for (int i = 0; i < VLAN_TAGS_MAX; i++) {
		struct vlan_tag tag;

		if (*protocol != bpf_htons(ETH_P_8021Q) && *protocol != bpf_htons(ETH_P_8021AD))
			return PARSE_OK;
		if (cursor_take(cursor, &tag, sizeof(tag)))
			return PARSE_MALFORMED;
		*protocol = tag.protocol;
		if (!*vlan)
			*vlan = bpf_ntohs(tag.tci) & VLAN_ID;
	}
	return PARSE_OK;
}

static __always_inline enum parse take_ipv4(struct cursor *cursor, struct udp_packet *packet)
{
	__u32 start = cursor->offset;
	struct iphdr ip;

	if (cursor_take(cursor, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl < 5)
		return PARSE_MALFORMED;
	if (ip.protocol != IPPROTO_UDP)
		return PARSE_NOT_UDP;
	if (ip.frag_off & bpf_htons(IPV4_FRAGMENT_BITS))
		return PARSE_FRAGMENT;
	cursor->offset = start + ip.ihl * 4;
	packet->family = 4;
	__builtin_memcpy(packet->source, &ip.saddr, sizeof(ip.saddr));
	__builtin_memcpy(packet->destination, &ip.daddr, sizeof(ip.daddr));
	return PARSE_OK;
}

static __always_inline enum parse take_ipv6(struct cursor *cursor, struct udp_packet *packet)
{
	struct ipv6hdr ip;
	__u8 next;

	if (cursor_take(cursor, &ip, sizeof(ip)) || ip.version != 6)
		return PARSE_MALFORMED;
	packet->family = 6;
	__builtin_memcpy(packet->source, &ip.saddr, sizeof(ip.saddr));
	__builtin_memcpy(packet->destination, &ip.daddr, sizeof(ip.daddr));
	next = ip.nexthdr;
	for (int i = 0; i < EXTENSIONS_MAX; i++) {
		struct ipv6_extension extension;

		if (next == IPPROTO_UDP)
			return PARSE_OK;
		if (next == IPPROTO_FRAGMENT)
			return PARSE_FRAGMENT;
		if (next != IPPROTO_HOPOPTS && next != IPPROTO_DSTOPTS && next != IPPROTO_ROUTING)
			return PARSE_NOT_UDP;
		if (cursor_take(cursor, &extension, sizeof(extension)))
			return PARSE_MALFORMED;
		cursor->offset += 6 + extension.length * 8;
		next = extension.next;
	}
	return next == IPPROTO_UDP ? PARSE_OK : PARSE_MALFORMED;
}

/* The size comes from the frame, not from the UDP length field: GRO leaves there the length of one
 * segment or of all, depending on where the packets were merged. Ethernet padding is no concern, since
 * it only occurs below any size worth sampling.
 */
static __always_inline enum parse take_udp(struct cursor *cursor, struct udp_packet *packet)
{
	struct udphdr udp;

	if (cursor_take(cursor, &udp, sizeof(udp)) || cursor->offset > cursor->skb->len)
		return PARSE_MALFORMED;
	packet->source_port = udp.source;
	packet->destination_port = udp.dest;
	packet->udp_bytes = bpf_ntohs(udp.len);
	packet->payload_offset = cursor->offset;
	packet->payload_bytes = cursor->skb->len - cursor->offset;
	return PARSE_OK;
}

static __always_inline enum parse parse_udp(struct __sk_buff *skb, struct udp_packet *packet)
{
	struct cursor cursor = {.skb = skb};
	enum parse result;
	__be16 protocol;

	result = take_ethernet(&cursor, &protocol, &packet->vlan);
	if (result)
		return result;
	if (protocol == bpf_htons(ETH_P_IP))
		result = take_ipv4(&cursor, packet);
	else if (protocol == bpf_htons(ETH_P_IPV6))
		result = take_ipv6(&cursor, packet);
	else
		result = PARSE_NOT_UDP;
	return result ? result : take_udp(&cursor, packet);
}

#endif
