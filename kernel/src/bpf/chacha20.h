/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* ChaCha20 (RFC 8439, section 2.3). */
#ifndef MILLRACE_CHACHA20_H
#define MILLRACE_CHACHA20_H

#include "bytes.h"
#include "crypto_intf.h"

struct chacha20_input {
	__u8 bytes[16]; /* the block counter (4 bytes), then the nonce (12 bytes) */
};

struct chacha20_block {
	__u8 bytes[64];
};

#define ROTATE(x, n) ((x) << (n) | (x) >> (32 - (n)))

#define QUARTER_ROUND(a, b, c, d)                  \
	do {                                       \
		a += b, d ^= a, d = ROTATE(d, 16); \
		c += d, b ^= c, b = ROTATE(b, 12); \
		a += b, d ^= a, d = ROTATE(d, 8);  \
		c += d, b ^= c, b = ROTATE(b, 7);  \
	} while (0)

/* Computes a block of the keystream. Neither `key` nor `input` may overlap `out`. The function is global in BPF, so
 * that the verifier checks it once instead of once per block.
 */
__noinline int chacha20_block(const struct chacha20_key *key, const struct chacha20_input *input,
			      struct chacha20_block *out)
{
	if (!key || !input || !out)
		return -1;

	const __u8 *n = input->bytes;
	const __u32 *k = key->words;
	/* The constants are the text "expand 32-byte k". */
	__u32 x0 = 0x61707865, x1 = 0x3320646e, x2 = 0x79622d32, x3 = 0x6b206574;
	__u32 x4 = k[0], x5 = k[1], x6 = k[2], x7 = k[3];
	__u32 x8 = k[4], x9 = k[5], x10 = k[6], x11 = k[7];
	__u32 x12 = load32(n), x13 = load32(n + 4), x14 = load32(n + 8), x15 = load32(n + 12);

	for (int i = 0; i < 10; i++) {
		QUARTER_ROUND(x0, x4, x8, x12);
		QUARTER_ROUND(x1, x5, x9, x13);
		QUARTER_ROUND(x2, x6, x10, x14);
		QUARTER_ROUND(x3, x7, x11, x15);
		QUARTER_ROUND(x0, x5, x10, x15);
		QUARTER_ROUND(x1, x6, x11, x12);
		QUARTER_ROUND(x2, x7, x8, x13);
		QUARTER_ROUND(x3, x4, x9, x14);
	}
	store32(out->bytes, x0 + 0x61707865);
	store32(out->bytes + 4, x1 + 0x3320646e);
	store32(out->bytes + 8, x2 + 0x79622d32);
	store32(out->bytes + 12, x3 + 0x6b206574);
	store32(out->bytes + 16, x4 + k[0]);
	store32(out->bytes + 20, x5 + k[1]);
	store32(out->bytes + 24, x6 + k[2]);
	store32(out->bytes + 28, x7 + k[3]);
	store32(out->bytes + 32, x8 + k[4]);
	store32(out->bytes + 36, x9 + k[5]);
	store32(out->bytes + 40, x10 + k[6]);
	store32(out->bytes + 44, x11 + k[7]);
	store32(out->bytes + 48, x12 + load32(n));
	store32(out->bytes + 52, x13 + load32(n + 4));
	store32(out->bytes + 56, x14 + load32(n + 8));
	store32(out->bytes + 60, x15 + load32(n + 12));
	return 0;
}

#undef QUARTER_ROUND
#undef ROTATE

#endif
