/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* GHASH (NIST SP 800-38D, section 6.4), with a table that userspace computes for each key. */
#ifndef MILLRACE_GHASH_H
#define MILLRACE_GHASH_H

#include "bytes.h"
#include "crypto_intf.h"

static __always_inline struct gf128 gf128_xor(struct gf128 a, struct gf128 b)
{
	return (struct gf128){.high = a.high ^ b.high, .low = a.low ^ b.low};
}

/* Multiplies by x^32 modulo x^128 + x^7 + x^2 + x + 1. Higher powers are in lower bits, so this shifts to the right. */
static __always_inline struct gf128 gf128_shift32(struct gf128 a)
{
	__u64 out = a.low << 32;

	return (struct gf128){
		.high = a.high >> 32 ^ out ^ out >> 1 ^ out >> 2 ^ out >> 7,
		.low = a.low >> 32 | a.high << 32,
	};
}

static __always_inline struct gf128 ghash_row(const struct ghash_key *key, int row, __u32 nibble)
{
	return key->rows[row][nibble & 15];
}

/* Multiplies H by `word`, a polynomial of degree 31 or less. */
static __always_inline struct gf128 ghash_word(const struct ghash_key *key, __u32 word)
{
	struct gf128 product = ghash_row(key, 0, word >> 28);

	for (int row = 1; row < 8; row++)
		product = gf128_xor(product, ghash_row(key, row, word >> (28 - 4 * row)));
	/* Keeps clang from looking up all words at once, which takes more stack than BPF has. */
	asm volatile("" : "+r"(product.high), "+r"(product.low));
	return product;
}

/* Multiplies by H, beginning with the highest powers (Horner's method). */
static __always_inline struct gf128 ghash_multiply(const struct ghash_key *key, struct gf128 a)
{
	struct gf128 product = ghash_word(key, a.low);

	product = gf128_xor(gf128_shift32(product), ghash_word(key, a.low >> 32));
	product = gf128_xor(gf128_shift32(product), ghash_word(key, a.high));
	return gf128_xor(gf128_shift32(product), ghash_word(key, a.high >> 32));
}

static __always_inline struct gf128 ghash_block(const struct ghash_key *key, struct gf128 sum,
						struct bytes16 block)
{
	struct gf128 b = {.high = __builtin_bswap64(block.low), .low = __builtin_bswap64(block.high)};

	return ghash_multiply(key, gf128_xor(sum, b));
}

static __always_inline struct bytes16 gf128_bytes(struct gf128 a)
{
	return (struct bytes16){.low = __builtin_bswap64(a.high), .high = __builtin_bswap64(a.low)};
}

#endif
