/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Packets that the gate sends back: Retry (RFC 9000, section 17.2.5; RFC 9001, section 5.8) and Version
 * Negotiation (RFC 9000, section 17.2.1). Both are shorter than the packet that they answer. Version Negotiation
 * also refuses a connection: it then lists only a reserved version, which nothing implements (section 15), so that
 * the client gives up at once (section 6.2).
 */
#ifndef MILLRACE_GATE_ANSWER_H
#define MILLRACE_GATE_ANSWER_H

#include "gate_maps.h"
#include "gate_token.h"
#include "ghash.h"

#define RETRY_ID_BYTES sizeof(((struct gate_token *)0)->retry_id)
/* A reserved version has the form 0x?a?a?a?a (RFC 9000, section 15). The half bytes "?" are random. */
#define RESERVED 0x0a0a0a0a

/* Returns a pointer to the byte at offset `at` of the answer. The mask bounds the offset for the verifier. No write
 * that begins here is longer than HEAD_SLACK, so all writes stay inside the buffer.
 */
static __always_inline __u8 *answer_at(struct gate_answer *answer, __u32 at)
{
	return answer->bytes + (at & 255);
}

/* Writes a connection ID and its length in front. All 20 bytes are always copied, because that needs no loop. The next
 * write overwrites the bytes after the ID. Returns the offset of that next write.
 */
static __always_inline __u32 put_id(struct gate_answer *answer, __u32 at, const __u8 *id, __u32 len)
{
	*answer_at(answer, at) = len;
	store128(answer_at(answer, at + 1), load128(id));
	store32(answer_at(answer, at + 17), load32(id + 16));
	return at + 1 + len;
}

static __always_inline __u64 random64(void)
{
	return (__u64)bpf_get_prandom_u32() << 32 | bpf_get_prandom_u32();
}

/* Makes a token for the packet in work->token. Returns not 0 if there is no valid key. */
static __always_inline int make_token(struct gate_work *work, const struct gate_policy *policy)
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
	store64(token->retry_id, random64());
	token->address = packet->source;
	for (int i = 0; i < GATE_ID_MAX; i++)
		token->id[i] = i < packet->id_len ? id[i] : 0;
	store128(token->tag, gate_token_tag(&key->key, token, policy->token_scope));
	return 0;
}

/* Computes the Retry integrity tag of the bytes in [from, to) and writes it after them (RFC 9001, section 5.8). It is
 * AES-128-GCM with an empty plaintext and a constant key and nonce: GHASH of the bytes, XORed with one constant AES
 * block.
 */
static __always_inline void put_integrity_tag(struct gate_answer *answer, const struct gate_retry_key *key,
					      __u32 from, __u32 to)
{
	struct gf128 sum = {};
	struct bytes16 lengths = {.low = __builtin_bswap64((to - from) * 8)};

	for (int i = 0; i < (ANSWER_AT + ANSWER_MAX) / 16; i++) {
		__u32 at = from + 16 * i;

		OPAQUE(at); /* keeps clang from dropping the next check, which the verifier needs as a bound */
		if (at >= to)
			break;
		sum = ghash_block(&key->ghash, sum, load128(answer_at(answer, at)));
	}
	sum = ghash_block(&key->ghash, sum, lengths);
	store128(answer_at(answer, to), xor128(gf128_bytes(sum), load128(key->mask)));
}

/* Writes a Retry packet to work->answer. The original destination connection ID stands in front of the packet: the
 * integrity tag covers it (pseudo-packet of RFC 9001, section 5.8), but it is not sent.
 */
static __noinline int make_retry(struct gate_work *work, const struct gate_policy *policy)
{
	struct gate_retry_key *key;
	struct gate_packet *packet;
	struct gate_answer *answer;
	__u32 from, at, second;

	packet = &work->packet;
	answer = &work->answer;
	second = packet->version == bpf_htonl(QUIC_VERSION_2);
	key = bpf_map_lookup_elem(&retry_keys, &second);
	if (!key || make_token(work, policy))
		return -1;
	from = ANSWER_AT - 1 - packet->id_len;
	put_id(answer, from, head_at(&work->head, packet->id_at), packet->id_len);
	at = ANSWER_AT;
	/* Type Retry is 3 in QUIC version 1 and 0 in version 2 (RFC 9369, section 3.2). The lowest four bits are
	 * unused.
	 */
	*answer_at(answer, at) = 0xc0 | (second ? 0 : 3 << 4) | (bpf_get_prandom_u32() & 15);
	store32(answer_at(answer, at + 1), packet->version);
	at = put_id(answer, at + 5, head_at(&work->head, packet->source_id_at), packet->source_id_len);
	*answer_at(answer, at) = RETRY_ID_BYTES;
	store64(answer_at(answer, at + 1), load64(work->token.retry_id));
	at += 1 + RETRY_ID_BYTES;
	for (int i = 0; i < sizeof(work->token); i += 8)
		store64(answer_at(answer, at + i), load64((__u8 *)&work->token + i));
	at += sizeof(work->token);
	/* GHASH pads the last block with zeroes. */
	store128(answer_at(answer, at), (struct bytes16){});
	put_integrity_tag(answer, key, from, at);
	answer->quic_bytes = at + 16 - ANSWER_AT;
	return 0;
}

/* Writes the versions that the server supports. */
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
	/* The client's source ID becomes the destination, and vice versa (RFC 9000, section 17.2.1). */
	at = put_id(answer, at + 5, head_at(&work->head, packet->source_id_at), packet->source_id_len);
	at = put_id(answer, at, head_at(&work->head, packet->id_at), packet->id_len);
	at = rule == GATE_VERSION ? put_versions(answer, at, policy) : put_reserved(answer, at);
	answer->quic_bytes = at - ANSWER_AT;
	return 0;
}

/* Largest offset in struct gate_answer at which the frame begins: that of an IPv4 packet without a link layer. */
#define ANSWER_FROM_MAX (ANSWER_AT - UDP_BYTES - IPV4_BYTES)

/* Writes the Ethernet header: swaps the MAC addresses, and keeps the EtherType and VLAN tags. Always copies as much as
 * two tags take. The IP header is written later and covers the excess. On an interface without a link layer, the IP and
 * UDP headers cover everything that is written here.
 */
static __always_inline void answer_ethernet(struct gate_answer *answer, const struct net_head *head, __u32 at)
{
	const __u8 *tags = head->bytes + 2 * ETH_ALEN;
	__u8 *to = put_macs(answer_at(answer, at), head->bytes + ETH_ALEN, head->bytes);

	store64(to, load64(tags));
	store32(to + 8, load32(tags + 8));
}

static __always_inline void answer_ip(struct gate_answer *answer, const struct gate_packet *packet,
				      __u32 udp_bytes)
{
	const __u8 *source = packet->destination.bytes, *destination = packet->source.bytes;
	__u8 *end = answer->bytes + ANSWER_AT - UDP_BYTES;

	if (packet->family == 4)
		put_ipv4((struct iphdr *)(end - IPV4_BYTES), load32(source + 12), load32(destination + 12), 0,
			 udp_bytes);
	else
		put_ipv6((struct ipv6hdr *)(end - IPV6_BYTES), source, destination, 0, 0, udp_bytes);
}

static __always_inline void answer_udp(struct gate_answer *answer, const struct gate_packet *packet,
				       __u32 udp_bytes)
{
	__u8 *at = answer->bytes + ANSWER_AT - UDP_BYTES;
	__u64 sum = csum_pseudo(packet->source.bytes, 2 * sizeof(packet->source), udp_bytes);

	put_udp((struct udphdr *)at, packet->destination_port, packet->source_port, udp_bytes);
	/* csum_add() reads whole words of 4 bytes, so the bytes after the packet must be zero. */
	store32(answer_at(answer, ANSWER_AT - UDP_BYTES + udp_bytes), 0);
	put_udp_checksum((struct udphdr *)at, csum_add(at, udp_bytes, 256, sum));
}

/* Writes `bytes` of the answer from offset `from` over the frame. The checks only give the verifier its bounds. */
static __noinline int replace_frame(struct xdp_md *ctx, const struct gate_answer *answer, __u32 from,
				    __u32 bytes)
{
	if (bytes < ETHERNET_BYTES)
		return -1;
	OPAQUE(bytes);
	OPAQUE(from);
	if (bytes > ANSWER_AT + ANSWER_MAX || from > ANSWER_FROM_MAX)
		return -1;
	return bpf_xdp_store_bytes(ctx, 0, (void *)answer->bytes + from, bytes);
}

/* Replaces the packet with the answer, which XDP_TX then sends to the client. Returns not 0 if the frame is too short.
 */
static __always_inline int put_answer(struct xdp_md *ctx, struct gate_work *work)
{
	struct gate_answer *answer = &work->answer;
	const struct gate_packet *packet = &work->packet;
	__u32 udp_bytes = UDP_BYTES + answer->quic_bytes;
	__u32 ip_bytes = packet->family == 4 ? IPV4_BYTES : IPV6_BYTES;
	__u32 from = ANSWER_AT - UDP_BYTES - ip_bytes - packet->ip_at;
	__u32 bytes = ANSWER_AT + answer->quic_bytes - from;

	answer_ethernet(answer, &work->head, from);
	answer_ip(answer, packet, udp_bytes);
	answer_udp(answer, packet, udp_bytes);
	if (bytes > work->head.frame_bytes || bpf_xdp_adjust_tail(ctx, (int)(bytes - work->head.frame_bytes)))
		return -1;
	return replace_frame(ctx, answer, from, bytes);
}

#endif
