/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Parses a frame: Ethernet and VLAN tags where there are any, IPv4 with options or IPv6 with extension headers, UDP,
 * and the header of the first QUIC packet (RFC 8999, 9000, 9369). The parser is plain C on a buffer, so that it also
 * runs natively. It only records fragments, options and contradictory lengths; the rules decide about them. Offsets
 * count from the beginning of the frame.
 */
#ifndef MILLRACE_GATE_PACKET_H
#define MILLRACE_GATE_PACKET_H

#include "gate_intf.h"
#include "net.h"
#include "quic.h"

#define GATE_EXTENSIONS_MAX 8	/* largest number of IPv6 extension headers that are followed */
#define NEAR_BYTES	    128 /* number of bytes of the frame that are parsed first; see is_cut() */
/* Largest offset of the UDP header in a frame whose first HEAD_BYTES bytes still hold a whole QUIC header, except a
 * long token.
 */
#define UDP_AT_MAX 160
/* Largest offset of the UDP header in a frame whose first NEAR_BYTES bytes still hold a QUIC header: two VLAN tags,
 * IPv6 without extensions.
 */
#define NEAR_UDP_AT_MAX 62
/* Least UDP payload, in bytes, of a datagram with an Initial (RFC 9000, section 14.1). */
#define INITIAL_DATAGRAM 1200
/* bytes of a long header's first byte, version and the lengths of both connection IDs (RFC 8999) */
#define QUIC_LONG_MIN	   7
#define QUIC_PROTECTED_MIN 20 /* bytes of packet number and header protection sample (RFC 9001, 5.4.2) */
/* Bytes of the shortest packet with a short header, including the first byte. A packet with a connection ID is longer
 * by that ID. A stateless reset, which clients send too, has no ID and may be as short as this (RFC 9000, section
 * 10.3).
 */
#define QUIC_SHORT_MIN 21

enum gate_find {
	FIND_OK = 0,
	FIND_OTHER,   /* the frame is not UDP over IP */
	FIND_NO_PORT, /* the frame is a fragment after the first, which has no UDP header */
	FIND_TOO_MANY, /* too many headers stand in front of UDP, or a header is cut off: the port is unknown */
};

enum quic_kind {
	QUIC_NOTHING = 0, /* the datagram is too short for a QUIC packet */
	QUIC_SHORT,
	QUIC_INITIAL,
	QUIC_ZERO_RTT,
	QUIC_HANDSHAKE,
	QUIC_OTHER_VERSION, /* an unknown version: only the fields of RFC 8999 are read */
	QUIC_IMPOSSIBLE,    /* a packet that no client sends, or whose lengths are invalid */
};

struct gate_packet {
	struct gate_address source;
	struct gate_address destination;
	__be16 source_port;
	__be16 destination_port;
	__u8 family;	  /* IP version: 4 or 6 */
	__u8 fragment;	  /* 1 if the packet is a fragment, including the first */
	__u8 options;	  /* 1 if there are IPv4 options or IPv6 extension headers */
	__u8 bad_lengths; /* 1 if the lengths of frame, IP and UDP contradict each other */
	__u32 end;	  /* offset of the end of the UDP payload */
	__u16 ip_at;
	__u16 udp_at;
	__u16 quic_at;
	__u8 kind;	    /* type of the QUIC packet, enum quic_kind */
	__u8 first;	    /* first byte of the QUIC packet */
	__u8 id_len;	    /* length of the destination connection ID; long headers only */
	__u8 source_id_len; /* length of the source connection ID; long headers only */
	__u8 long_ids;	    /* 1 if an ID is longer than GATE_ID_MAX, and was not read */
	__u8 goes_on;	    /* 1 if the QUIC header continues after the bytes that were copied for parsing */
	__be32 version;
	__u16 id_at;
	__u16 source_id_at;
	__u16 token_at;
	__u16 token_len;
};

static __always_inline __u8 head_u8(const struct net_head *head, __u32 at)
{
	return *head_at(head, at);
}

static __always_inline __be32 head_be32(const struct net_head *head, __u32 at)
{
	return load32(head_at(head, at));
}

static __always_inline void copy_address(struct gate_address *to, const __u8 *from)
{
	store128(to->bytes, load128(from));
}

static __always_inline void map_ipv4(struct gate_address *to, __be32 address)
{
	store128(to->bytes, (struct bytes16){.high = (__u64)address << 32 | 0xffff0000});
}

/* Reports whether parsing the frame's first HEAD_BYTES bytes may give another result than parsing the fewer bytes that
 * were copied. If UDP begins at NEAR_UDP_AT_MAX or before, both connection IDs and the length of a token are within
 * NEAR_BYTES.
 */
static __always_inline int is_cut(const struct net_head *head, const struct gate_packet *packet)
{
	return head->have < HEAD_BYTES && head->have < head->frame_bytes &&
	       (packet->goes_on || packet->udp_at > NEAR_UDP_AT_MAX);
}

/* --- Ethernet, IP and UDP headers --- */

static __always_inline enum gate_find find_ipv4(struct net_cursor *cursor, struct gate_packet *packet)
{
	struct net_ip ip;

	if (take_ipv4(cursor, &ip) || ip.next != IPPROTO_UDP)
		return FIND_OTHER;
	packet->family = 4;
	packet->options = ip.header_bytes != IPV4_BYTES;
	packet->fragment = !!(ip.fragment & IPV4_FRAGMENT);
	packet->end = packet->ip_at + ip.bytes;
	packet->bad_lengths =
		ip.bytes < ip.header_bytes + UDP_BYTES || packet->end > cursor->head->frame_bytes;
	map_ipv4(&packet->source, load32(ip.source));
	map_ipv4(&packet->destination, load32(ip.destination));
	return ip.fragment & IPV4_FRAGMENT_OFFSET ? FIND_NO_PORT : FIND_OK;
}

/* Follows the extension headers that a host accepts in front of UDP. */
static __always_inline enum gate_find find_extensions(struct net_cursor *cursor, struct gate_packet *packet,
						      __u8 next)
{
	__u16 offset;

	for (int i = 0; i < GATE_EXTENSIONS_MAX; i++) {
		packet->udp_at = cursor->at;
		if (next == IPPROTO_UDP)
			return FIND_OK;
		if (!is_extension(next) && next != IPPROTO_FRAGMENT)
			return FIND_OTHER;
		packet->options = 1;
		if (next != IPPROTO_FRAGMENT) {
			if (take_extension(cursor, sizeof(struct ipv6_extension), &next))
				return FIND_TOO_MANY;
			continue;
		}
		if (take_fragment(cursor, &next, &offset))
			return FIND_TOO_MANY;
		packet->fragment = 1;
		if (offset)
			return next == IPPROTO_UDP ? FIND_NO_PORT : FIND_OTHER;
	}
	packet->udp_at = cursor->at;
	return next == IPPROTO_UDP ? FIND_OK : FIND_TOO_MANY;
}

static __always_inline enum gate_find find_ipv6(struct net_cursor *cursor, struct gate_packet *packet)
{
	struct net_ip ip;

	if (take_ipv6(cursor, &ip))
		return FIND_OTHER;
	packet->family = 6;
	packet->end = cursor->at + ip.bytes;
	packet->bad_lengths = packet->end > cursor->head->frame_bytes;
	copy_address(&packet->source, ip.source);
	copy_address(&packet->destination, ip.destination);
	return find_extensions(cursor, packet, ip.next);
}

/* Reads the UDP header. As in the kernel, the UDP length may be shorter than the IP payload, but not longer. */
static __always_inline enum gate_find find_ports(struct net_cursor *cursor, struct gate_packet *packet)
{
	__u32 at = cursor->at;
	struct net_udp udp;

	packet->udp_at = at;
	if (at > UDP_AT_MAX || take_udp(cursor, &udp))
		return FIND_TOO_MANY;
	packet->source_port = udp.source;
	packet->destination_port = udp.destination;
	packet->quic_at = at + UDP_BYTES;
	if (udp.bytes < UDP_BYTES || (at + udp.bytes > packet->end && !packet->fragment))
		packet->bad_lengths = 1;
	if (!packet->bad_lengths && !packet->fragment)
		packet->end = at + udp.bytes;
	return FIND_OK;
}

static __always_inline enum gate_find find_udp(const struct net_head *head, struct gate_packet *packet)
{
	struct net_cursor cursor = {.source = NET_HEAD, .head = head};
	enum gate_find found;
	__be16 protocol;

	if (take_link(&cursor, head->bare, &protocol, NULL))
		return FIND_OTHER;
	packet->ip_at = cursor.at;
	if (protocol == bpf_htons(ETH_P_IP))
		found = find_ipv4(&cursor, packet);
	else if (protocol == bpf_htons(ETH_P_IPV6))
		found = find_ipv6(&cursor, packet);
	else
		found = FIND_OTHER;
	return found ? found : find_ports(&cursor, packet);
}

/* --- The QUIC packet --- */

/* Reads a variable-length integer (RFC 9000, section 16) and moves `at` past it. */
static __always_inline __u64 take_varint(const struct net_head *head, __u32 *at)
{
	__u64 word = __builtin_bswap64(load64(head_at(head, *at)));
	__u32 bytes = 1 << (word >> 62);

	*at += bytes;
	/* Removes the two bits that encode the length, and the bytes after the integer. */
	return word << 2 >> (66 - 8 * bytes);
}

/* Returns the type of a packet with a long header. Versions 1 and 2 number their types differently (RFC 9369, section
 * 3.2).
 */
static __always_inline enum quic_kind long_kind(const struct gate_packet *packet)
{
	__u32 type = packet->first >> 4 & 3;

	if (packet->version == __builtin_bswap32(QUIC_VERSION_2))
		type = (type - 1) & 3;
	else if (packet->version != __builtin_bswap32(QUIC_VERSION_1))
		return packet->version ? QUIC_OTHER_VERSION
				       : QUIC_IMPOSSIBLE;	  /* only servers send version 0 */
	return type == 3 ? QUIC_IMPOSSIBLE : QUIC_INITIAL + type; /* only servers send a Retry */
}

/* Reads the fields after the connection IDs. If they lie after the copied bytes because of a long token, they remain
 * unchecked here, and the server has to check them.
 */
static __always_inline enum quic_kind read_rest(const struct net_head *head, struct gate_packet *packet,
						enum quic_kind kind, __u32 at)
{
	__u64 bytes;

	if (kind == QUIC_INITIAL) {
		bytes = take_varint(head, &at);
		if (at + bytes > packet->end)
			return QUIC_IMPOSSIBLE;
		packet->token_at = at;
		packet->token_len = bytes;
		at += bytes;
	}
	if (at + 1 + QUIC_PROTECTED_MIN > packet->end)
		return QUIC_IMPOSSIBLE;
	packet->goes_on = !head_has(head, at, 8);
	if (packet->goes_on)
		return kind;
	bytes = take_varint(head, &at);
	return bytes < QUIC_PROTECTED_MIN || at + bytes > packet->end ? QUIC_IMPOSSIBLE : kind;
}

/* Reads a long header. Connection IDs of other versions may be longer than GATE_ID_MAX (RFC 8999, section 5.1). */
static __always_inline enum quic_kind read_long(const struct net_head *head, struct gate_packet *packet)
{
	enum quic_kind kind, too_long;
	__u32 at = packet->quic_at + 5;

	packet->version = head_be32(head, packet->quic_at + 1);
	kind = long_kind(packet);
	too_long = kind == QUIC_OTHER_VERSION ? QUIC_OTHER_VERSION : QUIC_IMPOSSIBLE;
	packet->long_ids = 1;
	if (head_u8(head, at) > GATE_ID_MAX)
		return too_long;
	packet->id_len = head_u8(head, at);
	packet->id_at = at + 1;
	at += 1 + packet->id_len;
	if (at >= packet->end)
		return QUIC_IMPOSSIBLE;
	if (head_u8(head, at) > GATE_ID_MAX)
		return too_long;
	packet->long_ids = 0;
	packet->source_id_len = head_u8(head, at);
	packet->source_id_at = at + 1;
	at += 1 + packet->source_id_len;
	if (at > packet->end)
		return QUIC_IMPOSSIBLE;
	return kind == QUIC_OTHER_VERSION || kind == QUIC_IMPOSSIBLE ? kind
								     : read_rest(head, packet, kind, at);
}

static __always_inline void read_quic(const struct net_head *head, struct gate_packet *packet)
{
	__u32 bytes = packet->end - packet->quic_at;

	packet->kind = QUIC_NOTHING;
	packet->id_at = packet->quic_at + 1;
	packet->first = head_u8(head, packet->quic_at);
	if (!bytes || !head_has(head, packet->quic_at, 1))
		return;
	if (!(packet->first & QUIC_LONG_HEADER))
		packet->kind = QUIC_SHORT;
	else if (bytes >= QUIC_LONG_MIN && head_has(head, packet->quic_at, QUIC_LONG_MIN))
		packet->kind = read_long(head, packet);
}

#endif
