/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the gate reads of a frame: Ethernet, VLAN tags, IPv4 with options or IPv6 with extension headers, UDP, and
 * the header of the first QUIC packet (RFC 8999, 9000, 9369). Plain C on a buffer, so that it also runs natively.
 *
 * Offsets are into the frame. Reads are masked: whatever an offset is, they stay inside the buffer, and the
 * verifier sees it.
 */
#ifndef MILLRACE_GATE_PACKET_H
#define MILLRACE_GATE_PACKET_H

#include "bytes.h"
#include "gate_intf.h"
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/in6.h>

#define HEAD_BYTES	    256 /* of a frame that are looked at */
#define NEAR_BYTES	    128 /* of them, with which a reader begins: see is_cut() */
#define HEAD_SLACK	    80	/* zeroes that the longest masked read may touch */
#define HEAD_TAGS_MAX	    2	/* QinQ */
#define HEAD_EXTENSIONS_MAX 8
#define UDP_AT_MAX	    160 /* so that all of a QUIC header but a long token is in there */
#define NEAR_UDP_AT_MAX	    62	/* the same: two tags and IPv6 without extension headers */
#define ETHERNET_BYTES	    14
#define VLAN_BYTES	    4
#define IPV4_BYTES	    20
#define IPV6_BYTES	    40
#define UDP_BYTES	    8
#define INITIAL_DATAGRAM    1200 /* RFC 9000, section 14.1 */
#define QUIC_LONG	    0x80
#define QUIC_VERSION_1	    0x00000001
#define QUIC_VERSION_2	    0x6b3343cf
#define QUIC_LONG_MIN	    7  /* first byte, version, two lengths (RFC 8999) */
#define QUIC_PROTECTED_MIN  20 /* packet number and sample (RFC 9001, section 5.4.2) */
/* With the first byte. What carries a connection ID has as many bytes more, but a stateless reset, which clients send
 * too, shows none and may be as short as this (RFC 9000, section 10.3).
 */
#define QUIC_SHORT_MIN 21

enum gate_find {
	FIND_OK = 0,
	FIND_OTHER,    /* not UDP over IP */
	FIND_NO_PORT,  /* a fragment after the first */
	FIND_TOO_MANY, /* headers; the port is not known */
};

enum quic_kind {
	QUIC_NOTHING = 0, /* too short to say */
	QUIC_SHORT,
	QUIC_INITIAL,
	QUIC_ZERO_RTT,
	QUIC_HANDSHAKE,
	QUIC_OTHER_VERSION, /* only what RFC 8999 says is known */
	QUIC_IMPOSSIBLE,
};

struct gate_head {
	__u8 bytes[HEAD_BYTES + HEAD_SLACK];
	__u32 have; /* bytes of the frame in there */
	__u32 frame_bytes;
};

struct gate_packet {
	struct gate_address source;
	struct gate_address destination;
	__be16 source_port;
	__be16 destination_port;
	__u8 family; /* 4 or 6 */
	__u8 fragment;
	__u8 options;	  /* IPv4 options, IPv6 extension headers */
	__u8 bad_lengths; /* that contradict each other */
	__u32 end;	  /* of the UDP payload */
	__u16 ip_at;
	__u16 udp_at;
	__u16 quic_at;
	__u8 kind; /* enum quic_kind */
	__u8 first;
	__u8 id_len; /* of destination and source; long headers only */
	__u8 source_id_len;
	__u8 long_ids; /* another version's, too long to be read */
	__u8 goes_on;  /* beyond what was copied */
	__be32 version;
	__u16 id_at;
	__u16 source_id_at;
	__u16 token_at;
	__u16 token_len;
};

static __always_inline const __u8 *head_at(const struct gate_head *head, __u32 at)
{
	return head->bytes + (at & (HEAD_BYTES - 1));
}

static __always_inline __u8 head_u8(const struct gate_head *head, __u32 at)
{
	return *head_at(head, at);
}

static __always_inline __u16 head_u16(const struct gate_head *head, __u32 at)
{
	const __u8 *from = head_at(head, at);

	return from[0] << 8 | from[1];
}

static __always_inline __be32 head_be32(const struct gate_head *head, __u32 at)
{
	return load32(head_at(head, at));
}

static __always_inline int has(const struct gate_head *head, __u32 at, __u32 bytes)
{
	return at + bytes <= head->have;
}

static __always_inline void copy_address(struct gate_address *to, const __u8 *from)
{
	store16(to->bytes, load16(from));
}

static __always_inline void map_ipv4(struct gate_address *to, __be32 address)
{
	store16(to->bytes, (struct bytes16){.high = (__u64)address << 32 | 0xffff0000});
}

/* Whether another reading, of all HEAD_BYTES, may come to something else. Where there are no more headers than
 * NEAR_UDP_AT_MAX allows, both connection IDs and what tells the length of a token are within NEAR_BYTES.
 */
static __always_inline int is_cut(const struct gate_head *head, const struct gate_packet *packet)
{
	return head->have < HEAD_BYTES && head->have < head->frame_bytes &&
	       (packet->goes_on || packet->udp_at > NEAR_UDP_AT_MAX);
}

/* --- Down to UDP --- */

static __always_inline enum gate_find find_ipv4(const struct gate_head *head, struct gate_packet *packet)
{
	__u32 at = packet->ip_at;
	__u32 header = (head_u8(head, at) & 15) * 4, total = head_u16(head, at + 2);
	__u32 fragment = head_u16(head, at + 6);

	if (!has(head, at, IPV4_BYTES) || head_u8(head, at) >> 4 != 4 || header < IPV4_BYTES ||
	    head_u8(head, at + 9) != IPPROTO_UDP)
		return FIND_OTHER;
	packet->family = 4;
	packet->options = header != IPV4_BYTES;
	packet->fragment = !!(fragment & 0x3fff); /* more fragments, or an offset */
	packet->udp_at = at + header;
	packet->end = at + total;
	packet->bad_lengths = total < header + UDP_BYTES || at + total > head->frame_bytes;
	map_ipv4(&packet->source, head_be32(head, at + 12));
	map_ipv4(&packet->destination, head_be32(head, at + 16));
	return fragment & 0x1fff ? FIND_NO_PORT : FIND_OK;
}

/* The transport protocol may be any of those that a host accepts before UDP; all others are not UDP. */
static __always_inline enum gate_find find_extensions(const struct gate_head *head,
						      struct gate_packet *packet)
{
	__u32 at = packet->ip_at + IPV6_BYTES;
	__u8 next = head_u8(head, packet->ip_at + 6);

	for (int i = 0; i < HEAD_EXTENSIONS_MAX; i++) {
		packet->udp_at = at;
		if (next == IPPROTO_UDP)
			return FIND_OK;
		if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING && next != IPPROTO_DSTOPTS &&
		    next != IPPROTO_FRAGMENT)
			return FIND_OTHER;
		packet->options = 1;
		if (!has(head, at, 8))
			return FIND_TOO_MANY;
		if (next == IPPROTO_FRAGMENT) {
			packet->fragment = 1;
			next = head_u8(head, at);
			if (head_u16(head, at + 2) & 0xfff8)
				return next == IPPROTO_UDP ? FIND_NO_PORT : FIND_OTHER;
			at += 8;
			continue;
		}
		next = head_u8(head, at);
		at += 8 + head_u8(head, at + 1) * 8;
	}
	packet->udp_at = at;
	return next == IPPROTO_UDP ? FIND_OK : FIND_TOO_MANY;
}

static __always_inline enum gate_find find_ipv6(const struct gate_head *head, struct gate_packet *packet)
{
	__u32 at = packet->ip_at, bytes = head_u16(head, at + 4);

	if (!has(head, at, IPV6_BYTES) || head_u8(head, at) >> 4 != 6)
		return FIND_OTHER;
	packet->family = 6;
	packet->end = at + IPV6_BYTES + bytes;
	packet->bad_lengths = at + IPV6_BYTES + bytes > head->frame_bytes;
	copy_address(&packet->source, head_at(head, at + 8));
	copy_address(&packet->destination, head_at(head, at + 24));
	return find_extensions(head, packet);
}

/* As the kernel has it, the UDP length may be shorter than what IP carries, but not longer. */
static __always_inline enum gate_find find_ports(const struct gate_head *head, struct gate_packet *packet)
{
	__u32 at = packet->udp_at, bytes = head_u16(head, at + 4);

	if (at > UDP_AT_MAX || !has(head, at, UDP_BYTES))
		return FIND_TOO_MANY;
	packet->source_port = *(const __be16 *)head_at(head, at);
	packet->destination_port = *(const __be16 *)head_at(head, at + 2);
	packet->quic_at = at + UDP_BYTES;
	if (bytes < UDP_BYTES || (at + bytes > packet->end && !packet->fragment))
		packet->bad_lengths = 1;
	if (!packet->bad_lengths && !packet->fragment)
		packet->end = at + bytes;
	return FIND_OK;
}

static __always_inline enum gate_find find_udp(const struct gate_head *head, struct gate_packet *packet)
{
	__u32 at = ETHERNET_BYTES - 2, protocol = head_u16(head, at);
	enum gate_find found = FIND_OTHER;

	for (int i = 0; i < HEAD_TAGS_MAX; i++) {
		if (protocol != ETH_P_8021Q && protocol != ETH_P_8021AD)
			break;
		at += VLAN_BYTES;
		protocol = head_u16(head, at);
	}
	packet->ip_at = at + 2;
	if (protocol == ETH_P_IP)
		found = find_ipv4(head, packet);
	else if (protocol == ETH_P_IPV6)
		found = find_ipv6(head, packet);
	return found ? found : find_ports(head, packet);
}

/* --- The QUIC packet --- */

/* A variable-length integer (RFC 9000, section 16); moves `at` behind it. */
static __always_inline __u64 take_varint(const struct gate_head *head, __u32 *at)
{
	__u64 word = __builtin_bswap64(load64(head_at(head, *at)));
	__u32 bytes = 1 << (word >> 62);

	*at += bytes;
	return word << 2 >> (66 - 8 * bytes);
}

/* Versions 1 and 2 number their long header types differently. */
static __always_inline enum quic_kind long_kind(const struct gate_packet *packet)
{
	__u32 type = packet->first >> 4 & 3;

	if (packet->version == __builtin_bswap32(QUIC_VERSION_2))
		type = (type - 1) & 3;
	else if (packet->version != __builtin_bswap32(QUIC_VERSION_1))
		return packet->version ? QUIC_OTHER_VERSION : QUIC_IMPOSSIBLE; /* only clients get 0 */
	return type == 3 ? QUIC_IMPOSSIBLE : QUIC_INITIAL + type;	       /* only clients get a Retry */
}

/* What follows the IDs. What a token pushes beyond what was copied is left to the server. */
static __always_inline enum quic_kind read_rest(const struct gate_head *head, struct gate_packet *packet,
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
	packet->goes_on = !has(head, at, 8);
	if (packet->goes_on)
		return kind;
	bytes = take_varint(head, &at);
	return bytes < QUIC_PROTECTED_MIN || at + bytes > packet->end ? QUIC_IMPOSSIBLE : kind;
}

/* IDs of other versions may be longer than any that are read (RFC 8999, section 5.1). */
static __always_inline enum quic_kind read_long(const struct gate_head *head, struct gate_packet *packet)
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

static __always_inline void read_quic(const struct gate_head *head, struct gate_packet *packet)
{
	__u32 bytes = packet->end - packet->quic_at;

	packet->kind = QUIC_NOTHING;
	packet->id_at = packet->quic_at + 1;
	packet->first = head_u8(head, packet->quic_at);
	if (!bytes || !has(head, packet->quic_at, 1))
		return;
	if (!(packet->first & QUIC_LONG))
		packet->kind = QUIC_SHORT;
	else if (bytes >= QUIC_LONG_MIN && has(head, packet->quic_at, QUIC_LONG_MIN))
		packet->kind = read_long(head, packet);
}

#endif
