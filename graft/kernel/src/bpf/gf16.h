/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The field of 65536 elements, without tables: four of its elements are in each word, and what is done is done to all four. It is
 * larger than bytes need, since in this one the code of parity.h, which has to double only, is good for 63 packets; among bytes,
 * for some 20. Elements are little endian, as loads are. It also compiles natively.
 */
#ifndef MILLRACE_GF16_H
#define MILLRACE_GF16_H

#include "util.h"

#define GF16_POLYNOMIAL 0x100bULL /* x^16 + x^12 + x^3 + x + 1, of which x is a primitive element */
#define GF16_BITS	16

/* Each element times x. */
static __always_inline __u64 gf16_twice(__u64 four)
{
	return (four & 0x7fff7fff7fff7fffULL) << 1 ^ (four >> 15 & 0x0001000100010001ULL) * GF16_POLYNOMIAL;
}

/* Each of four elements by another one. Global, so that the verifier looks at it once. */
__noinline __u64 gf16_times(__u64 four, __u32 factor)
{
	__u64 product = 0;

	for (int i = 0; i < GF16_BITS && factor; i++) {
		product ^= four & -(__u64)(factor & 1);
		four = gf16_twice(four);
		factor >>= 1;
	}
	return product;
}

/* The one that gives 1: element^(2^16 - 2), the product of its powers by 2, 4, 8, ... */
__noinline __u32 gf16_inverse(__u32 element)
{
	__u64 square = element, product = 1;

	for (int i = 1; i < GF16_BITS; i++) {
		square = gf16_times(square, square);
		product = gf16_times(product, square);
	}
	return product;
}

#endif
