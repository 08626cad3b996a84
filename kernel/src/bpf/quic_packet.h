/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Headers of 1-RTT packets (RFC 9000, section 17.3.1) and their protection (RFC 9001, section 5.4). */
#ifndef MILLRACE_QUIC_PACKET_H
#define MILLRACE_QUIC_PACKET_H

#include "aead.h"

#define QUIC_SHORT_PROTECTED 0x1f /* bits of the first byte that header protection covers */
#define QUIC_RESERVED	     0x18 /* reserved bits, which must be zero (RFC 9000, section 17.3.1) */
#define QUIC_KEY_PHASE	     0x04
#define QUIC_NUMBER_BYTES    0x03 /* length of the packet number, minus one */
/* Bytes of the ciphertext sample for header protection, which begins 4 bytes after the start of the packet number. */
#define QUIC_SAMPLE 16

/* The fields of a short header that header protection covers. */
struct quic_short {
	__u8 first;
	__u8 number_bytes; /* bytes of the packet number: 1 to 4 */
	__u16 pad;
	__u32 number; /* the low bits of the packet number, as they were sent */
};

/* Returns the header protection mask (RFC 9001, sections 5.4.3 and 5.4.4) for a packet whose number is at `number_at`.
 * The mask has 5 bytes, with the first in the low bits.
 */
__noinline __u64 quic_mask(const struct quic_keys *keys, struct quic_buf *packet, __u32 number_at)
{
	if (!keys || !packet)
		return 0; /* only the verifier needs this check; callers never pass NULL */

	const __u8 *sample = packet->bytes + (number_at & QUIC_AT_MAX) + 4;

	if (keys->suite == QUIC_CHACHA20_POLY1305)
		chacha20_block(&keys->chacha20.header, (const struct chacha20_input *)sample, &packet->mask);
	else
		aes_block(&keys->aes.header, (const struct aes_block *)sample,
			  (struct aes_block *)&packet->mask);
	return load64(packet->mask.bytes);
}

/* XORs the packet number in the packet with the mask. Returns the result in wire order, with the first byte in the low
 * bits.
 */
static __always_inline __u32 quic_mask_number(__u8 *at, __u32 bytes, __u32 mask)
{
	__u32 covered = ~0U >> (32 - 8 * bytes);
	__u32 number = load32(at) ^ (mask & covered);

	store32(at, number);
	return number & covered;
}

/* Removes header protection from the packet of `packet_bytes` bytes at offset `at`. The header is not authenticated
 * yet. Returns -1 if the packet is too short, or its offset is too large.
 */
static __always_inline int quic_unprotect(const struct quic_keys *keys, struct quic_buf *packet, __u32 at,
					  __u32 id_bytes, __u32 packet_bytes, struct quic_short *header)
{
	__u32 number_at = at + 1 + id_bytes;
	__u8 *first = packet->bytes + (at & QUIC_AT_MAX);
	__u64 mask;

	if (packet_bytes < 1 + id_bytes + 4 + QUIC_SAMPLE || number_at > QUIC_AT_MAX)
		return -1;
	mask = quic_mask(keys, packet, number_at);
	*first ^= mask & QUIC_SHORT_PROTECTED;
	header->first = *first;
	header->number_bytes = (header->first & QUIC_NUMBER_BYTES) + 1;
	header->pad = 0;
	header->number = __builtin_bswap32(quic_mask_number(packet->bytes + (number_at & QUIC_AT_MAX),
							    header->number_bytes, mask >> 8)) >>
			 (32 - 8 * header->number_bytes);
	return 0;
}

/* Applies header protection to a sealed packet. From the start of the packet number there must be at least 4 bytes and
 * a sample (RFC 9001, section 5.4.2). Returns -1 if the packet's offset is too large.
 */
static __always_inline int quic_protect(const struct quic_keys *keys, struct quic_buf *packet, __u32 at,
					__u32 id_bytes)
{
	__u32 number_at = at + 1 + id_bytes;
	__u8 *first = packet->bytes + (at & QUIC_AT_MAX);
	__u64 mask;

	if (number_at > QUIC_AT_MAX)
		return -1;
	mask = quic_mask(keys, packet, number_at);
	quic_mask_number(packet->bytes + (number_at & QUIC_AT_MAX), (*first & QUIC_NUMBER_BYTES) + 1,
			 mask >> 8);
	*first ^= mask & QUIC_SHORT_PROTECTED;
	return 0;
}

/* Returns the packet number closest to `expected` that has the low bits that were sent (RFC 9000, appendix A.3).
 * `expected` is the largest authenticated packet number plus one.
 */
static __always_inline __u64 quic_number(__u64 expected, const struct quic_short *header)
{
	__u64 window = 1ULL << 8 * header->number_bytes;
	__u64 candidate = (expected & ~(window - 1)) | header->number;

	if (candidate + window / 2 <= expected && candidate < (1ULL << 62) - window)
		return candidate + window;
	if (candidate > expected + window / 2 && candidate >= window)
		return candidate - window;
	return candidate;
}

#endif
