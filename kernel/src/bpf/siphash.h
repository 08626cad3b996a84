/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* SipHash-2-4 with 128 bits of output (Aumasson, Bernstein: "SipHash: a fast short-input PRF") over whole words. */
#ifndef MILLRACE_SIPHASH_H
#define MILLRACE_SIPHASH_H

#include "bytes.h"

struct siphash_state {
	__u64 a, b, c, d;
};

static __always_inline __u64 rotate64(__u64 word, int bits)
{
	return word << bits | word >> (64 - bits);
}

static __always_inline void siphash_rounds(struct siphash_state *s, int rounds)
{
	for (int i = 0; i < rounds; i++) {
		s->a += s->b, s->b = rotate64(s->b, 13) ^ s->a, s->a = rotate64(s->a, 32);
		s->c += s->d, s->d = rotate64(s->d, 16) ^ s->c;
		s->a += s->d, s->d = rotate64(s->d, 21) ^ s->a;
		s->c += s->b, s->b = rotate64(s->b, 17) ^ s->c, s->c = rotate64(s->c, 32);
	}
}

static __always_inline void siphash_word(struct siphash_state *s, __u64 word)
{
	s->d ^= word;
	siphash_rounds(s, 2);
	s->a ^= word;
}

static __always_inline __u64 siphash_half(struct siphash_state *s)
{
	siphash_rounds(s, 4);
	return s->a ^ s->b ^ s->c ^ s->d;
}

/* Returns the hash of a message of `words` words of 8 bytes. */
static __always_inline struct bytes16 siphash128(const __u64 key[2], const __u8 *message, int words)
{
	struct siphash_state s = {
		.a = key[0] ^ 0x736f6d6570736575,
		.b = key[1] ^ 0x646f72616e646f6d ^ 0xee,
		.c = key[0] ^ 0x6c7967656e657261,
		.d = key[1] ^ 0x7465646279746573,
	};
	struct bytes16 tag;

	for (int i = 0; i < words; i++)
		siphash_word(&s, load64(message + 8 * i));
	/* The last word has only the length in bytes, modulo 256, in its top byte. */
	siphash_word(&s, (__u64)words << 59);
	s.c ^= 0xee;
	tag.low = siphash_half(&s);
	s.b ^= 0xdd;
	tag.high = siphash_half(&s);
	return tag;
}

#endif
