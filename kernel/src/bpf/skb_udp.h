/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Finds the UDP header in an skb, for programs at TC. All IP fragments are refused, because none contains a whole
 * datagram. IPv4 options, some IPv6 extension headers, two VLAN tags in the frame and one in the skb's metadata are
 * skipped.
 */
#ifndef MILLRACE_SKB_UDP_H
#define MILLRACE_SKB_UDP_H

#include "net.h"

#define SKB_EXTENSIONS_MAX 4 /* largest number of IPv6 extension headers that are followed */

enum parse {
	PARSE_OK = 0,
	PARSE_NOT_UDP,
	PARSE_FRAGMENT,
	PARSE_MALFORMED, /* a header is invalid, or there are more extension headers than the parser follows */
};

struct udp_packet {
	__u8 source[16]; /* IPv4 addresses are in the first 4 bytes, and the rest is zero */
	__u8 destination[16];
	__be16 source_port;
	__be16 destination_port;
	__u32 payload_offset; /* offset of the UDP payload in the frame */
	__u32 payload_bytes;  /* bytes from the UDP payload's offset to the end of the frame */
	__u16 udp_bytes;      /* the UDP header's length field, which includes the header */
	__u16 vlan;	      /* outermost VLAN ID; 0 if there is no tag */
	__u8 family;	      /* IP version: 4 or 6 */
};

static __always_inline enum parse parse_ipv4(struct net_cursor *cursor, struct udp_packet *packet)
{
	struct net_ip ip;

	if (take_ipv4(cursor, &ip))
		return PARSE_MALFORMED;
	if (ip.next != IPPROTO_UDP)
		return PARSE_NOT_UDP;
	packet->family = 4;
	__builtin_memcpy(packet->source, ip.source, sizeof(__be32));
	__builtin_memcpy(packet->destination, ip.destination, sizeof(__be32));
	return ip.fragment & IPV4_FRAGMENT ? PARSE_FRAGMENT : PARSE_OK;
}

static __always_inline enum parse parse_ipv6(struct net_cursor *cursor, struct udp_packet *packet)
{
	struct net_ip ip;
	__u8 next;

	if (take_ipv6(cursor, &ip))
		return PARSE_MALFORMED;
	packet->family = 6;
	__builtin_memcpy(packet->source, ip.source, sizeof(packet->source));
	__builtin_memcpy(packet->destination, ip.destination, sizeof(packet->destination));
	next = ip.next;
	for (int i = 0; i < SKB_EXTENSIONS_MAX; i++) {
		if (next == IPPROTO_UDP)
			return PARSE_OK;
		if (next == IPPROTO_FRAGMENT)
			return PARSE_FRAGMENT;
		if (!is_extension(next))
			return PARSE_NOT_UDP;
		/* Two bytes of the extension header suffice: if it is cut off, reading the next header fails. */
		if (take_extension(cursor, 2, &next))
			return PARSE_MALFORMED;
	}
	return next == IPPROTO_UDP ? PARSE_OK : PARSE_MALFORMED;
}

/* Reads the UDP header. `payload_bytes` comes from the frame, because after GRO the UDP header has the length of one
 * segment or of all, depending on where the packets were merged. The frame includes Ethernet's padding, so callers that
 * need the exact size of small packets use `udp_bytes`.
 */
static __always_inline enum parse parse_ports(struct net_cursor *cursor, struct udp_packet *packet)
{
	struct net_udp udp;

	if (take_udp(cursor, &udp) || cursor->at > cursor->skb->len)
		return PARSE_MALFORMED;
	packet->source_port = udp.source;
	packet->destination_port = udp.destination;
	packet->udp_bytes = udp.bytes;
	packet->payload_offset = cursor->at;
	packet->payload_bytes = cursor->skb->len - cursor->at;
	return PARSE_OK;
}

/* Finds UDP in a frame. If `bare` is not 0, the frame begins with its IP header. */
static __always_inline enum parse parse_udp_on(struct __sk_buff *skb, __u32 bare, struct udp_packet *packet)
{
	struct net_scratch scratch;
	struct net_cursor cursor = {.source = NET_SKB, .skb = skb, .scratch = &scratch};
	enum parse result;
	__be16 protocol;

	/* The outermost tag is usually in the skb's metadata. */
	packet->vlan = skb->vlan_present ? skb->vlan_tci & VLAN_ID : 0;
	if (take_link(&cursor, bare, &protocol, &packet->vlan))
		return PARSE_MALFORMED;
	if (protocol == bpf_htons(ETH_P_IP))
		result = parse_ipv4(&cursor, packet);
	else if (protocol == bpf_htons(ETH_P_IPV6))
		result = parse_ipv6(&cursor, packet);
	else
		result = PARSE_NOT_UDP;
	return result ? result : parse_ports(&cursor, packet);
}

static __always_inline enum parse parse_udp(struct __sk_buff *skb, struct udp_packet *packet)
{
	return parse_udp_on(skb, 0, packet);
}

#endif
