/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Functions that read and write the headers of Ethernet, VLAN, IPv4, IPv6 and UDP, and compute checksums.
 *
 * A cursor takes one header after another. It returns the header's fields, or reports that the header is malformed. It
 * reads from an skb, or from a copy of a frame's first bytes. Each program decides which headers it accepts: skb_udp.h
 * for programs at TC, gate_packet.h for the gate. testkit/parsers/tests/parsers.rs shows where the two differ.
 */
#ifndef MILLRACE_NET_H
#define MILLRACE_NET_H

#include "bytes.h"
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>

#define ETHERNET_BYTES ((__u32)sizeof(struct ethhdr))
#define IPV4_BYTES     ((__u32)sizeof(struct iphdr)) /* bytes of an IPv4 header without options */
#define IPV6_BYTES     ((__u32)sizeof(struct ipv6hdr))
#define UDP_BYTES      ((__u32)sizeof(struct udphdr))

#define VLAN_TAGS_MAX 2	     /* largest number of VLAN tags of a frame, as with IEEE 802.1ad (QinQ) */
#define VLAN_ID	      0x0fff /* bits of the VLAN ID in a tag */

/* Bits of the field `frag_off` of IPv4. */
#define IPV4_DONT_FRAGMENT   0x4000
#define IPV4_FRAGMENT	     0x3fff /* the bit "more fragments", and the bits of the offset */
#define IPV4_FRAGMENT_OFFSET 0x1fff

#define IPV6_FRAGMENT_OFFSET 0xfff8 /* bits of the offset in the field `frag_off` of a fragment header */

/* --- The cursor, which takes one header of a frame after another --- */

#define HEAD_BYTES 256 /* largest number of bytes at the start of a frame that are copied for parsing */
#define HEAD_SLACK 80  /* spare bytes of the buffer, since a read may begin at the last byte of the copy */

/* A copy of the first bytes of a frame. */
struct net_head {
	__u8 bytes[HEAD_BYTES + HEAD_SLACK];
	__u32 have; /* number of bytes that were copied; the bytes after them are undefined */
	__u32 frame_bytes;
	__u32 bare; /* not 0 if the frame begins with its IP header; only the gate uses it, see take_link() */
	__u32 pad;
};

enum net_source {
	NET_SKB,
	NET_HEAD,
};

/* A buffer for a copied header. It has room for the longest one that a cursor reads at once, the IPv6 header. */
struct net_scratch {
	__u8 bytes[sizeof(struct ipv6hdr)];
} __attribute__((aligned(8)));

struct net_cursor {
	/* where headers are read from, the skb or the copied head; a constant, so that clang drops the code for the
	 * other source
	 */
	enum net_source source;
	struct __sk_buff *skb;
	struct net_scratch *scratch; /* buffer for the header that was copied last from the skb */
	const struct net_head *head;
	__u32 at; /* offset of the next header in the frame */
};

enum net_step {
	NET_OK = 0,
	NET_CUT,     /* the frame, or the copy of it, ends before the end of the header */
	NET_INVALID, /* the header has an invalid version or length */
};

/* Returns a pointer to the byte at offset `at` of the copied frame. The mask shows the verifier that the pointer is
 * inside the buffer.
 */
static __always_inline const __u8 *head_at(const struct net_head *head, __u32 at)
{
	return head->bytes + (at & (HEAD_BYTES - 1));
}

/* Reports whether the `bytes` bytes at offset `at` of the frame were copied. */
static __always_inline int head_has(const struct net_head *head, __u32 at, __u32 bytes)
{
	return at + bytes <= head->have;
}

/* Takes the next `bytes` bytes of the frame, and moves the cursor past them. */
static __always_inline enum net_step net_take(struct net_cursor *cursor, __u32 bytes, const __u8 **header)
{
	__u32 at = cursor->at;

	cursor->at += bytes;
	if (cursor->source == NET_HEAD) {
		*header = head_at(cursor->head, at);
		return head_has(cursor->head, at, bytes) ? NET_OK : NET_CUT;
	}
	*header = cursor->scratch->bytes;
	return bpf_skb_load_bytes(cursor->skb, at, cursor->scratch->bytes, bytes) ? NET_CUT : NET_OK;
}

/* Returns a 16-bit field of a header, in network byte order. */
#define BE16(header, type, field) load16((header) + __builtin_offsetof(struct type, field))
/* Returns a 16-bit field of a header, in host byte order. */
#define U16(header, type, field) bpf_ntohs(BE16(header, type, field))

/* --- Headers --- */

struct vlan_tag {
	__be16 tci;
	__be16 protocol;
};

/* Takes the Ethernet header and its VLAN tags. If `vlan` is not NULL and is 0 before, it gets the first VLAN ID that is
 * not 0.
 */
static __always_inline enum net_step take_ethernet(struct net_cursor *cursor, __be16 *protocol, __u16 *vlan)
{
	const __u8 *header;

	if (net_take(cursor, ETHERNET_BYTES, &header))
		return NET_CUT;
	*protocol = BE16(header, ethhdr, h_proto);
	for (int i = 0; i < VLAN_TAGS_MAX; i++) {
		if (*protocol != bpf_htons(ETH_P_8021Q) && *protocol != bpf_htons(ETH_P_8021AD))
			break;
		if (net_take(cursor, sizeof(struct vlan_tag), &header))
			return NET_CUT;
		*protocol = BE16(header, vlan_tag, protocol);
		if (vlan && !*vlan)
			*vlan = U16(header, vlan_tag, tci) & VLAN_ID;
	}
	return NET_OK;
}

/* Takes the headers before the IP header: Ethernet and VLAN tags. If `bare` is not 0, there are none, as on tun,
 * WireGuard and PPP devices. The version field of the IP header then gives the protocol, IPv4 or IPv6.
 */
static __always_inline enum net_step take_link(struct net_cursor *cursor, __u32 bare, __be16 *protocol,
					       __u16 *vlan)
{
	const __u8 *header;

	if (!bare)
		return take_ethernet(cursor, protocol, vlan);
	if (net_take(cursor, 1, &header))
		return NET_CUT;
	cursor->at -= 1;
	if (header[0] >> 4 == 4)
		*protocol = bpf_htons(ETH_P_IP);
	else
		*protocol = header[0] >> 4 == 6 ? bpf_htons(ETH_P_IPV6) : 0;
	return NET_OK;
}

struct net_ip {
	const __u8 *source; /* source address in the header, valid until the next header is taken */
	const __u8 *destination;
	__u32 header_bytes; /* length of the header: IPv4 with options, IPv6 without extension headers */
	__u32 bytes;	/* the header's length field, which includes the header for IPv4 and not for IPv6 */
	__u16 fragment; /* the field frag_off of IPv4 */
	__u8 next;	/* protocol of the next header */
};

static __always_inline enum net_step take_ipv4(struct net_cursor *cursor, struct net_ip *ip)
{
	const __u8 *header;

	if (net_take(cursor, IPV4_BYTES, &header))
		return NET_CUT;
	ip->header_bytes = (header[0] & 15) * 4;
	if (header[0] >> 4 != 4 || ip->header_bytes < IPV4_BYTES)
		return NET_INVALID;
	cursor->at += ip->header_bytes - IPV4_BYTES;
	ip->bytes = U16(header, iphdr, tot_len);
	ip->fragment = U16(header, iphdr, frag_off);
	ip->next = header[__builtin_offsetof(struct iphdr, protocol)];
	ip->source = header + __builtin_offsetof(struct iphdr, saddr);
	ip->destination = header + __builtin_offsetof(struct iphdr, daddr);
	return NET_OK;
}

static __always_inline enum net_step take_ipv6(struct net_cursor *cursor, struct net_ip *ip)
{
	const __u8 *header;

	if (net_take(cursor, IPV6_BYTES, &header))
		return NET_CUT;
	if (header[0] >> 4 != 6)
		return NET_INVALID;
	ip->header_bytes = IPV6_BYTES;
	ip->bytes = U16(header, ipv6hdr, payload_len);
	ip->fragment = 0;
	ip->next = header[__builtin_offsetof(struct ipv6hdr, nexthdr)];
	ip->source = header + __builtin_offsetof(struct ipv6hdr, saddr);
	ip->destination = header + __builtin_offsetof(struct ipv6hdr, daddr);
	return NET_OK;
}

/* Reports whether this is an extension header that hosts accept in front of UDP. Fragment headers are not included. */
static __always_inline int is_extension(__u8 next)
{
	return next == IPPROTO_HOPOPTS || next == IPPROTO_ROUTING || next == IPPROTO_DSTOPTS;
}

struct ipv6_extension {
	__u8 next;
	__u8 length; /* length after the first 8 bytes, in units of 8 bytes; reserved in a fragment header */
	__be16 frag_off; /* offset and the bit "more fragments"; only in a fragment header */
	__u8 rest[4];
};

/* Takes an IPv6 extension header that is_extension() accepts. Fails if the frame ends before its first `least` bytes,
 * which must be at least 2.
 */
static __always_inline enum net_step take_extension(struct net_cursor *cursor, __u32 least, __u8 *next)
{
	const __u8 *header;

	if (net_take(cursor, least, &header))
		return NET_CUT;
	*next = header[__builtin_offsetof(struct ipv6_extension, next)];
	cursor->at += sizeof(struct ipv6_extension) - least +
		      header[__builtin_offsetof(struct ipv6_extension, length)] *
			      (__u32)sizeof(struct ipv6_extension);
	return NET_OK;
}

/* Takes a fragment header. `offset` becomes 0 for the first fragment, and not 0 for others. */
static __always_inline enum net_step take_fragment(struct net_cursor *cursor, __u8 *next, __u16 *offset)
{
	const __u8 *header;

	if (net_take(cursor, sizeof(struct ipv6_extension), &header))
		return NET_CUT;
	*next = header[__builtin_offsetof(struct ipv6_extension, next)];
	*offset = U16(header, ipv6_extension, frag_off) & IPV6_FRAGMENT_OFFSET;
	return NET_OK;
}

struct net_udp {
	__be16 source;
	__be16 destination;
	__u16 bytes; /* the length field: bytes of the UDP header and its payload */
};

static __always_inline enum net_step take_udp(struct net_cursor *cursor, struct net_udp *udp)
{
	const __u8 *header;

	if (net_take(cursor, UDP_BYTES, &header))
		return NET_CUT;
	udp->source = BE16(header, udphdr, source);
	udp->destination = BE16(header, udphdr, dest);
	udp->bytes = U16(header, udphdr, len);
	return NET_OK;
}

/* --- Checksums (RFC 1071) --- */

/* Folds a sum of 16-bit words to 16 bits. */
static __always_inline __u16 csum_fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum;
}

#ifdef __bpf__

#define CSUM_STEP 512 /* largest number of bytes that bpf_csum_diff takes in one call before Linux 6.13 */

/* Adds bytes to a checksum. `bytes` must be less than `most`, which must be a constant and a power of two. Zeroes must
 * follow the bytes, up to a multiple of 4.
 */
static __always_inline __u64 csum_add(const __u8 *from, __u32 bytes, const __u32 most, __u64 sum)
{
	if (most <= CSUM_STEP)
		return bpf_csum_diff(NULL, 0, (__be32 *)from, (bytes + 3) & (most - 4), sum);
	for (__u32 at = 0; at < most; at += CSUM_STEP) {
		__u32 part = bytes - at;

		if (at >= bytes)
			break;
		if (part > CSUM_STEP)
			part = CSUM_STEP;
		part = (part + 3) & ~3U;
		sum = bpf_csum_diff(NULL, 0, (__be32 *)(from + at), part & (2 * CSUM_STEP - 1), sum);
	}
	return sum;
}

/* Returns the checksum of the pseudo header of UDP. `udp_bytes` includes the UDP header. `addresses` has both
 * addresses, one after the other. IPv4 addresses may be followed by zeroes, or mapped to IPv6: neither zeroes nor
 * 0xffff change the sum.
 */
static __always_inline __u64 csum_pseudo(const __u8 *addresses, __u32 address_bytes, __u32 udp_bytes)
{
	return bpf_csum_diff(NULL, 0, (__be32 *)addresses, address_bytes,
			     bpf_htons(IPPROTO_UDP) + bpf_htons(udp_bytes));
}

/* --- Writing --- */

#define HOP_LIMIT 64

static __always_inline void put_mac(__u8 *to, const __u8 *from)
{
	store32(to, load32(from));
	store16(to + 4, load16(from + 4));
}

/* Writes the destination and source addresses of an Ethernet header. Returns a pointer to the EtherType or the first
 * VLAN tag.
 */
static __always_inline __u8 *put_macs(__u8 *to, const __u8 *destination, const __u8 *source)
{
	put_mac(to, destination);
	put_mac(to + ETH_ALEN, source);
	return to + 2 * ETH_ALEN;
}

static __always_inline void put_ipv4(struct iphdr *ip, __be32 source, __be32 destination, __u8 traffic_class,
				     __u32 udp_bytes)
{
	__builtin_memset(ip, 0, sizeof(*ip));
	ip->version = 4;
	ip->ihl = 5;
	ip->tos = traffic_class;
	ip->tot_len = bpf_htons(sizeof(*ip) + udp_bytes);
	ip->frag_off = bpf_htons(IPV4_DONT_FRAGMENT);
	ip->ttl = HOP_LIMIT;
	ip->protocol = IPPROTO_UDP;
	ip->saddr = source;
	ip->daddr = destination;
	ip->check = ~csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)ip, sizeof(*ip), 0));
}

static __always_inline void put_ipv6(struct ipv6hdr *ip, const __u8 *source, const __u8 *destination,
				     __u8 traffic_class, __be32 flow_label, __u32 udp_bytes)
{
	*(__be32 *)ip = bpf_htonl(6 << 28 | traffic_class << 20) | flow_label;
	ip->payload_len = bpf_htons(udp_bytes);
	ip->nexthdr = IPPROTO_UDP;
	ip->hop_limit = HOP_LIMIT;
	store128((__u8 *)&ip->saddr, load128(source));
	store128((__u8 *)&ip->daddr, load128(destination));
}

/* Writes a UDP header without its checksum. */
static __always_inline void put_udp(struct udphdr *udp, __be16 source, __be16 destination, __u32 udp_bytes)
{
	udp->source = source;
	udp->dest = destination;
	udp->len = bpf_htons(udp_bytes);
	udp->check = 0;
}

/* Writes the UDP checksum. `sum` must cover the pseudo header, the header and the payload. */
static __always_inline void put_udp_checksum(struct udphdr *udp, __u64 sum)
{
	udp->check = ~csum_fold(sum);
	if (!udp->check)
		udp->check = 0xffff; /* 0 stands for no checksum (RFC 768) */
}

#endif

#endif
