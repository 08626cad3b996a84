/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Arithmetic in the field of 65536 elements, without tables. Each 64-bit word has four little-endian elements, which
 * are computed at once. A field of 256 elements would suffice for bytes, but with it a block of the erasure code in
 * parity.h could have only some 20 packets, instead of 63. The header also compiles as native code, for tests.
 */
#ifndef MILLRACE_GF16_H
#define MILLRACE_GF16_H

#include "util.h"

#define GF16_POLYNOMIAL 0x100bULL /* the field's polynomial, x^16 + x^12 + x^3 + x + 1; x is primitive */
#define GF16_BITS	16

/* Multiplies each of four elements by x. */
static __always_inline __u64 gf16_twice(__u64 four)
{
	return (four & 0x7fff7fff7fff7fffULL) << 1 ^ (four >> 15 & 0x0001000100010001ULL) * GF16_POLYNOMIAL;
}

/* Multiplies each of four elements by `factor`. The function is global, so that the verifier checks it once
 * instead of at each call.
 */
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

/* Returns the inverse of an element: element^(2^16 - 2), as a product of squares. */
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
