/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* ChaCha20 (RFC 8439, section 2.3). */
#ifndef MILLRACE_CHACHA20_H
#define MILLRACE_CHACHA20_H

#include "bytes.h"
#include "crypto_intf.h"

struct chacha20_input {
	__u32 words[4]; /* block counter, nonce */
};

struct chacha20_block {
	__u32 words[16];
};

#define ROTATE(x, n) ((x) << (n) | (x) >> (32 - (n)))

#define QUARTER_ROUND(a, b, c, d)                  \
	do {                                       \
		a += b, d ^= a, d = ROTATE(d, 16); \
		c += d, b ^= c, b = ROTATE(b, 12); \
		a += b, d ^= a, d = ROTATE(d, 8);  \
		c += d, b ^= c, b = ROTATE(b, 7);  \
	} while (0)

/* A function of its own, global in BPF: the verifier walks it once, not once per block. */
__noinline int chacha20_block(const struct chacha20_key *key, const struct chacha20_input *input,
			      struct chacha20_block *out)
{
	if (!key || !input || !out)
		return -1;

	const __u32 *k = key->words, *n = input->words;
	const __u32 c0 = 0x61707865, c1 = 0x3320646e, c2 = 0x79622d32, c3 = 0x6b206574;
	__u32 x0 = c0, x1 = c1, x2 = c2, x3 = c3;
	__u32 x4 = k[0], x5 = k[1], x6 = k[2], x7 = k[3];
	__u32 x8 = k[4], x9 = k[5], x10 = k[6], x11 = k[7];
	__u32 x12 = n[0], x13 = n[1], x14 = n[2], x15 = n[3];

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
	*out = (struct chacha20_block){{
		x0 + c0, x1 + c1, x2 + c2, x3 + c3,		/* constants */
		x4 + k[0], x5 + k[1], x6 + k[2], x7 + k[3],	/* key */
		x8 + k[4], x9 + k[5], x10 + k[6], x11 + k[7],	/* key */
		x12 + n[0], x13 + n[1], x14 + n[2], x15 + n[3], /* counter, nonce */
	}};
	return 0;
}

#undef QUARTER_ROUND
#undef ROTATE

#endif
