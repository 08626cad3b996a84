/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Poly1305 (RFC 8439, section 2.5) over whole blocks of 16 bytes. The AEAD pads its input, so it needs no shorter
 * blocks.
 *
 * Numbers modulo 2^130 - 5 are three limbs of 32 bits and a last one of 34, since BPF multiplies to 64 bits only. Limbs
 * of 32 bits are enough because r is clamped: its words are below 2^28, and all but the first are multiples of 4. So
 * products that wrap around, r[i] * 2^128 with 2^130 = 5, are multiplied by the whole number r[i] / 4 * 5. The sum of a
 * column stays below 2^64, although the first limb keeps its carry until the next block:
 *
 * 	h[0] + block < 3.1 * 2^32, h[1] + block and h[2] + block < 2 * 2^32, h[3] + block < 6 * 2^32,
 * 	r[i] < 2^28, q[i] < 1.25 * 2^28,
 *
 * The first column is the largest: (3.1 + (2 + 2 + 6) * 1.25) * 2^60 < 15.7 * 2^60. The last column is below (3.1 + 2 +
 * 2 + 6) * 2^60 + 2^32. So the part that wraps around is below 5 * 13.2 * 2^26 < 1.1 * 2^32: hence the 3.1.
 */
#ifndef MILLRACE_POLY1305_H
#define MILLRACE_POLY1305_H

#include "bytes.h"

#define LIMB_BITS 32
#define TOP_BITS  34
#define LIMB	  0xffffffffULL
#define TOP_LIMB  ((1ULL << TOP_BITS) - 1)

/* The state of the authenticator, with the names of RFC 8439. */
struct poly1305 {
	__u64 h[4];	  /* the accumulator */
	__u64 r[4];	  /* the first half of the key, clamped */
	__u64 q[4];	  /* r / 4 * 5; the first limb is not used */
	struct bytes16 s; /* the second half of the key */
};

static __always_inline void poly1305_start(struct poly1305 *poly, const __u8 key[32])
{
	/* The key is clamped (section 2.5). */
	__u64 low = load64(key) & 0x0ffffffc0fffffff, high = load64(key + 8) & 0x0ffffffc0ffffffc;

	poly->r[0] = low & LIMB;
	poly->r[1] = low >> LIMB_BITS;
	poly->r[2] = high & LIMB;
	poly->r[3] = high >> LIMB_BITS;
	for (int i = 0; i < 4; i++) {
		poly->q[i] = poly->r[i] / 4 * 5;
		poly->h[i] = 0;
	}
	poly->s = load128(key + 16);
}

/* Adds a block and multiplies by r. In each sum the carry of the column before comes last, so that the CPU can compute
 * the products of a column while it waits for the carry.
 */
static __always_inline void poly1305_block(struct poly1305 *poly, struct bytes16 block)
{
	const __u64 *r = poly->r, *q = poly->q;
	__u64 *h = poly->h;
	__u64 h0 = h[0] + (block.low & LIMB);
	__u64 h1 = h[1] + (block.low >> LIMB_BITS);
	__u64 h2 = h[2] + (block.high & LIMB);
	__u64 h3 = h[3] + (block.high >> LIMB_BITS) + (1ULL << LIMB_BITS);
	__u64 d;

	d = h1 * q[3] + h2 * q[2] + h3 * q[1] + h0 * r[0];
	h[0] = d & LIMB;
	d = h1 * r[0] + h2 * q[3] + h3 * q[2] + h0 * r[1] + (d >> LIMB_BITS);
	h[1] = d & LIMB;
	d = h1 * r[1] + h2 * r[0] + h3 * q[3] + h0 * r[2] + (d >> LIMB_BITS);
	h[2] = d & LIMB;
	d = h1 * r[2] + h2 * r[1] + h3 * r[0] + h0 * r[3] + (d >> LIMB_BITS);
	h[3] = d & TOP_LIMB;
	h[0] += (d >> TOP_BITS) * 5;
}

/* Propagates carries until every limb has only its own bits. If the top limb wraps around, the number is small
 * afterwards, so h[1] does not carry.
 */
static __always_inline void poly1305_carry(__u64 h[4])
{
	for (int i = 0; i < 3; i++) {
		h[i + 1] += h[i] >> LIMB_BITS;
		h[i] &= LIMB;
	}
	h[0] += (h[3] >> TOP_BITS) * 5;
	h[3] &= TOP_LIMB;
	h[1] += h[0] >> LIMB_BITS;
	h[0] &= LIMB;
}

static __always_inline struct bytes16 poly1305_finish(struct poly1305 *poly)
{
	__u64 *h = poly->h;
	__u64 g[4], carry = 5, wrapped;
	struct bytes16 tag;

	poly1305_carry(h);
	/* g = h - (2^130 - 5). It is the result if it is not negative, that is, if h + 5 reaches 2^130. A mask selects
	 * it without a branch, so that the time does not depend on the key.
	 */
	for (int i = 0; i < 3; i++) {
		carry += h[i];
		g[i] = carry & LIMB;
		carry >>= LIMB_BITS;
	}
	g[3] = carry + h[3];
	wrapped = -(g[3] >> TOP_BITS);
	for (int i = 0; i < 4; i++)
		h[i] = (h[i] & ~wrapped) | (g[i] & wrapped);
	tag.low = h[0] | h[1] << LIMB_BITS;
	tag.high = h[2] | h[3] << LIMB_BITS;
	tag.low += poly->s.low;
	tag.high += poly->s.high + (tag.low < poly->s.low);
	return tag;
}

#undef TOP_LIMB
#undef LIMB
#undef TOP_BITS
#undef LIMB_BITS

#endif
