/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Packets that the gate sends back: Retry (RFC 9000, section 17.2.5; RFC 9001, section 5.8) and Version
 * Negotiation (RFC 9000, section 17.2.1). Both are shorter than what they answer. Version Negotiation also refuses
 * a connection: it then lists nothing but a version that is reserved and that nobody speaks (section 15), so that the
 * client gives up at once (section 6.2).
 */
#ifndef MILLRACE_GATE_ANSWER_H
#define MILLRACE_GATE_ANSWER_H

#include "checksum.h"
#include "gate_maps.h"
#include "gate_token.h"
#include "ghash.h"
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>

#define RETRY_ID_BYTES 8
#define HOP_LIMIT      64
#define DONT_FRAGMENT  0x4000
#define RESERVED       0x0a0a0a0a /* a version: these half bytes, the others are random */

/* What is written is at most HEAD_SLACK bytes long, so it stays inside. */
static __always_inline __u8 *answer_at(struct gate_answer *answer, __u32 at)
{
	return answer->bytes + (at & 255);
}

/* A length and that many bytes, at most 20; whatever comes next goes over the rest. Returns where that is. */
static __always_inline __u32 put_id(struct gate_answer *answer, __u32 at, const __u8 *id, __u32 len)
{
	*answer_at(answer, at) = len;
	store16(answer_at(answer, at + 1), load16(id));
	store32(answer_at(answer, at + 17), load32(id + 16));
	return at + 1 + len;
}

static __always_inline __u64 random64(void)
{
	return (__u64)bpf_get_prandom_u32() << 32 | bpf_get_prandom_u32();
}

static __always_inline int make_token(struct gate_work *work)
{
	__u32 index = work->active.token_key;
	struct gate_token_key *key = bpf_map_lookup_elem(&token_keys, &index);
	const struct gate_packet *packet = &work->packet;
	const __u8 *id = head_at(&work->head, packet->id_at);
	struct gate_token *token = &work->token;

	if (!key || !key->valid)
		return -1;
	store32(token->magic, GATE_TOKEN_MAGIC);
	token->key = index;
	token->id_len = packet->id_len;
	token->port = packet->source_port;
	token->issued = bpf_htonl(unix_seconds(work));
	store64(token->nonce, random64());
	token->address = packet->source;
	for (int i = 0; i < GATE_ID_MAX; i++)
		token->id[i] = i < packet->id_len ? id[i] : 0;
	store16(token->tag, gate_token_tag(&key->key, token));
	return 0;
}

/* The tag authenticates, and encrypts nothing: GHASH, and one block of AES that is a constant. */
static __always_inline void put_integrity_tag(struct gate_answer *answer, const struct gate_retry_key *key,
					      __u32 from, __u32 to)
{
	struct gf128 sum = {};
	struct bytes16 lengths = {.low = __builtin_bswap64((to - from) * 8)};

	for (int i = 0; i < (ANSWER_AT + ANSWER_MAX) / 16; i++) {
		__u32 at = from + 16 * i;

		OPAQUE(at);
		if (at >= to)
			break;
		sum = ghash_block(&key->ghash, sum, load16(answer_at(answer, at)));
	}
	sum = ghash_block(&key->ghash, sum, lengths);
	store16(answer_at(answer, to), xor16(gf128_bytes(sum), load16(key->mask)));
}

/* The original destination ID goes in front, as the pseudo-packet has it, and is not sent. */
static __noinline int make_retry(struct gate_work *work)
{
	struct gate_retry_key *key;
	struct gate_packet *packet;
	struct gate_answer *answer;
	__u32 from, at, second;

	packet = &work->packet;
	answer = &work->answer;
	second = packet->version == bpf_htonl(QUIC_VERSION_2);
	key = bpf_map_lookup_elem(&retry_keys, &second);
	if (!key || make_token(work))
		return -1;
	from = ANSWER_AT - 1 - packet->id_len;
	put_id(answer, from, head_at(&work->head, packet->id_at), packet->id_len);
	at = ANSWER_AT;
	*answer_at(answer, at) = 0xc0 | (second ? 0 : 3 << 4) | (bpf_get_prandom_u32() & 15);
	store32(answer_at(answer, at + 1), packet->version);
	at = put_id(answer, at + 5, head_at(&work->head, packet->source_id_at), packet->source_id_len);
	*answer_at(answer, at) = RETRY_ID_BYTES;
	store64(answer_at(answer, at + 1), random64());
	at += 1 + RETRY_ID_BYTES;
	for (int i = 0; i < sizeof(work->token); i += 8)
		store64(answer_at(answer, at + i), load64((__u8 *)&work->token + i));
	at += sizeof(work->token);
	store16(answer_at(answer, at), (struct bytes16){});
	put_integrity_tag(answer, key, from, at);
	answer->quic_bytes = at + 16 - ANSWER_AT;
	return 0;
}

/* What the server speaks. */
static __always_inline __u32 put_versions(struct gate_answer *answer, __u32 at,
					  const struct gate_policy *policy)
{
	for (int i = 0; i < GATE_VERSIONS; i++) {
		if (!policy->versions[i])
			continue;
		store32(answer_at(answer, at), policy->versions[i]);
		at += sizeof(policy->versions[i]);
	}
	return at;
}

static __always_inline __u32 put_reserved(struct gate_answer *answer, __u32 at)
{
	store32(answer_at(answer, at), (bpf_get_prandom_u32() & ~0x0f0f0f0f) | RESERVED);
	return at + sizeof(__u32);
}

static __noinline int make_version_negotiation(struct gate_work *work, const struct gate_policy *policy,
					       __u32 rule)
{
	struct gate_packet *packet;
	struct gate_answer *answer;
	__u32 at = ANSWER_AT;

	packet = &work->packet;
	answer = &work->answer;
	*answer_at(answer, at) = 0xc0 | (bpf_get_prandom_u32() & 0x3f);
	store32(answer_at(answer, at + 1), 0);
	at = put_id(answer, at + 5, head_at(&work->head, packet->source_id_at), packet->source_id_len);
	at = put_id(answer, at, head_at(&work->head, packet->id_at), packet->id_len);
	at = rule == GATE_VERSION ? put_versions(answer, at, policy) : put_reserved(answer, at);
	answer->quic_bytes = at - ANSWER_AT;
	return 0;
}

/* Swaps the addresses and keeps the tags; what this writes too much is where the IP header goes. */
static __always_inline void put_ethernet(struct gate_answer *answer, const struct gate_head *head, __u32 at)
{
	__u8 *to = answer_at(answer, at);

	for (int i = 0; i < ETH_ALEN; i++) {
		to[i] = head->bytes[ETH_ALEN + i];
		to[ETH_ALEN + i] = head->bytes[i];
	}
	store64(to + 2 * ETH_ALEN, load64(head->bytes + 2 * ETH_ALEN));
	store32(to + 2 * ETH_ALEN + 8, load32(head->bytes + 2 * ETH_ALEN + 8));
}

static __always_inline void put_ipv4(struct gate_answer *answer, const struct gate_packet *packet,
				     __u32 bytes)
{
	struct iphdr *ip = (struct iphdr *)(answer->bytes + ANSWER_AT - UDP_BYTES - IPV4_BYTES);

	__builtin_memset(ip, 0, sizeof(*ip));
	ip->version = 4;
	ip->ihl = 5;
	ip->tot_len = bpf_htons(sizeof(*ip) + bytes);
	ip->frag_off = bpf_htons(DONT_FRAGMENT);
	ip->ttl = HOP_LIMIT;
	ip->protocol = IPPROTO_UDP;
	ip->saddr = load32(packet->destination.bytes + 12);
	ip->daddr = load32(packet->source.bytes + 12);
	ip->check = ~fold(bpf_csum_diff(NULL, 0, (__be32 *)ip, sizeof(*ip), 0));
}

static __always_inline void put_ipv6(struct gate_answer *answer, const struct gate_packet *packet,
				     __u32 bytes)
{
	struct ipv6hdr *ip = (struct ipv6hdr *)(answer->bytes + ANSWER_AT - UDP_BYTES - IPV6_BYTES);

	*(__be32 *)ip = bpf_htonl(6 << 28);
	ip->payload_len = bpf_htons(bytes);
	ip->nexthdr = IPPROTO_UDP;
	ip->hop_limit = HOP_LIMIT;
	store16((__u8 *)&ip->saddr, load16(packet->destination.bytes));
	store16((__u8 *)&ip->daddr, load16(packet->source.bytes));
}

/* Mapped IPv4 addresses have the sum of bare ones: what is in front of them is 0xffff, which is 0 here. */
static __always_inline void put_udp(struct gate_answer *answer, const struct gate_packet *packet, __u32 bytes)
{
	struct udphdr *udp = (struct udphdr *)(answer->bytes + ANSWER_AT - UDP_BYTES);
	__u64 sum = bpf_csum_diff(NULL, 0, (__be32 *)&packet->source, 2 * sizeof(packet->source),
				  bpf_htons(IPPROTO_UDP) + bpf_htons(bytes));

	udp->source = packet->destination_port;
	udp->dest = packet->source_port;
	udp->len = bpf_htons(bytes);
	udp->check = 0;
	store32(answer_at(answer, ANSWER_AT - UDP_BYTES + bytes), 0);
	udp->check = ~fold(bpf_csum_diff(NULL, 0, (__be32 *)udp, (bytes + 3) & 0xfc, sum));
	if (!udp->check)
		udp->check = 0xffff;
}

static __noinline int replace_frame(struct xdp_md *ctx, const struct gate_answer *answer, __u32 from,
				    __u32 bytes)
{
	if (bytes < ETHERNET_BYTES)
		return -1;
	OPAQUE(bytes);
	if (bytes > 255)
		return -1;
	return bpf_xdp_store_bytes(ctx, 0, (void *)answer->bytes + (from & 63), bytes);
}

/* Puts the answer in place of the packet, to go back where that came from. */
static __always_inline int put_answer(struct xdp_md *ctx, struct gate_work *work)
{
	struct gate_answer *answer = &work->answer;
	const struct gate_packet *packet = &work->packet;
	__u32 udp_bytes = UDP_BYTES + answer->quic_bytes;
	__u32 ip_bytes = packet->family == 4 ? IPV4_BYTES : IPV6_BYTES;
	__u32 from = ANSWER_AT - UDP_BYTES - ip_bytes - packet->ip_at;
	__u32 bytes = ANSWER_AT + answer->quic_bytes - from;

	put_ethernet(answer, &work->head, from);
	if (packet->family == 4)
		put_ipv4(answer, packet, udp_bytes);
	else
		put_ipv6(answer, packet, udp_bytes);
	put_udp(answer, packet, udp_bytes);
	if (bytes > work->head.frame_bytes || bpf_xdp_adjust_tail(ctx, (int)(bytes - work->head.frame_bytes)))
		return -1;
	return replace_frame(ctx, answer, from, bytes);
}

#endif
