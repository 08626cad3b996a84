/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Poly1305 (RFC 8439, section 2.5) over whole 16-byte blocks, which is all that the AEAD needs.
 *
 * Numbers modulo 2^130 - 5 are five limbs of 26 bits, since BPF multiplies to 64 bits only.
 * Limbs may be a little wider between blocks: five products of 28 by 29 bits still fit.
 */
#ifndef MILLRACE_POLY1305_H
#define MILLRACE_POLY1305_H

#include "bytes.h"

#define LIMB_BITS 26
#define LIMB	  ((1U << LIMB_BITS) - 1)

struct poly1305 {
	__u64 h[5];
	__u64 r[5];
	__u64 r5[5]; /* r * 5, for products that wrap around: 2^130 = 5 */
	struct bytes16 s;
};

static __always_inline void poly1305_start(struct poly1305 *poly, const __u8 key[32])
{
	/* Clamped as section 2.5 says. */
	__u64 low = load64(key) & 0x0ffffffc0fffffff, high = load64(key + 8) & 0x0ffffffc0ffffffc;

	poly->r[0] = low & LIMB;
	poly->r[1] = low >> 26 & LIMB;
	poly->r[2] = (low >> 52 | high << 12) & LIMB;
	poly->r[3] = high >> 14 & LIMB;
	poly->r[4] = high >> 40;
	for (int i = 0; i < 5; i++) {
		poly->r5[i] = poly->r[i] * 5;
		poly->h[i] = 0;
	}
	poly->s = load16(key + 16);
}

static __always_inline void poly1305_block(struct poly1305 *poly, struct bytes16 block)
{
	const __u64 *r = poly->r, *r5 = poly->r5;
	__u64 *h = poly->h;
	__u64 h0 = h[0] + (block.low & LIMB);
	__u64 h1 = h[1] + (block.low >> 26 & LIMB);
	__u64 h2 = h[2] + ((block.low >> 52 | block.high << 12) & LIMB);
	__u64 h3 = h[3] + (block.high >> 14 & LIMB);
	__u64 h4 = h[4] + (block.high >> 40 | 1 << 24);
	__u64 d;

	d = h0 * r[0] + h1 * r5[4] + h2 * r5[3] + h3 * r5[2] + h4 * r5[1];
	h[0] = d & LIMB;
	d = (d >> LIMB_BITS) + h0 * r[1] + h1 * r[0] + h2 * r5[4] + h3 * r5[3] + h4 * r5[2];
	h[1] = d & LIMB;
	d = (d >> LIMB_BITS) + h0 * r[2] + h1 * r[1] + h2 * r[0] + h3 * r5[4] + h4 * r5[3];
	h[2] = d & LIMB;
	d = (d >> LIMB_BITS) + h0 * r[3] + h1 * r[2] + h2 * r[1] + h3 * r[0] + h4 * r5[4];
	h[3] = d & LIMB;
	d = (d >> LIMB_BITS) + h0 * r[4] + h1 * r[3] + h2 * r[2] + h3 * r[1] + h4 * r[0];
	h[4] = d & LIMB;
	d = (d >> LIMB_BITS) * 5 + h[0];
	h[0] = d & LIMB;
	h[1] += d >> LIMB_BITS;
}

/* Until every limb has 26 bits, which h[0] has after each block. Should it wrap around so that h[0] carries,
 * h[1] has just been carried out of and is far from full.
 */
static __always_inline void poly1305_carry(__u64 h[5])
{
	for (int i = 1; i < 4; i++) {
		h[i + 1] += h[i] >> LIMB_BITS;
		h[i] &= LIMB;
	}
	h[0] += (h[4] >> LIMB_BITS) * 5;
	h[4] &= LIMB;
	h[1] += h[0] >> LIMB_BITS;
	h[0] &= LIMB;
}

static __always_inline struct bytes16 poly1305_finish(struct poly1305 *poly)
{
	__u64 *h = poly->h;
	__u64 g[5], carry = 5, wrapped;
	struct bytes16 tag;

	poly1305_carry(h);
	/* g = h - (2^130 - 5), which is right where it is not negative: where h + 5 reaches 2^130. */
	for (int i = 0; i < 5; i++) {
		carry += h[i];
		g[i] = carry & LIMB;
		carry >>= LIMB_BITS;
	}
	wrapped = -carry;
	for (int i = 0; i < 5; i++)
		h[i] = (h[i] & ~wrapped) | (g[i] & wrapped);
	tag.low = h[0] | h[1] << 26 | h[2] << 52;
	tag.high = h[2] >> 12 | h[3] << 14 | h[4] << 40;
	tag.low += poly->s.low;
	tag.high += poly->s.high + (tag.low < poly->s.low);
	return tag;
}

#undef LIMB
#undef LIMB_BITS

#endif
