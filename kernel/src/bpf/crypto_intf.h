/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Keys and keystreams of 1-RTT packets, which userspace passes to BPF programs. The build generates Rust's types and
 * constants from this header, except for the union, which crypto.rs declares as words.
 */
#ifndef MILLRACE_CRYPTO_INTF_H
#define MILLRACE_CRYPTO_INTF_H

#include <linux/types.h>

enum quic_suite {
	QUIC_CHACHA20_POLY1305 = 0,
	QUIC_AES128_GCM = 1,
	QUIC_AES256_GCM = 2,
};

struct chacha20_key {
	__u32 words[8]; /* the key's bytes as little-endian words */
};

/* The expanded key (FIPS 197, section 5.2). Each word holds its first byte in the low bits. */
struct aes_key {
	__u32 rounds;	 /* 10 for AES-128, 14 for AES-256 */
	__u32 words[60]; /* four words more than four for each round are used */
};

/* An element of GF(2^128) in GCM's bit order: the coefficient of x^0 is the top bit of `high`. */
struct gf128 {
	__u64 high;
	__u64 low;
};

/* Multiples of the hash key H: rows[j][n] is n * x^(4j) * H. With this table, a multiplication by H takes 32 look-ups
 * and 3 shifts. As everywhere in GCM, the top bit of the nibble n is the lowest power of x.
 */
struct ghash_key {
	struct gf128 rows[8][16];
};

struct quic_chacha20_keys {
	struct chacha20_key packet;
	struct chacha20_key header;
};

struct quic_aes_keys {
	struct aes_key packet;
	struct aes_key header;
	struct ghash_key ghash;
};

/* The keys of one direction of a connection, in one key phase (RFC 9001, section 5.1). */
struct quic_keys {
	__u32 suite; /* enum quic_suite, which tells the member of the union that is set */
	__u8 iv[12];
	union {
		struct quic_chacha20_keys chacha20;
		struct quic_aes_keys aes;
	};
};
#define QUIC_KEYS_BYTES (16 + 488 + 2048)
_Static_assert(sizeof(struct quic_keys) == QUIC_KEYS_BYTES, "quic_keys has no hidden padding");

#define QUIC_TEXT_MAX 1536 /* largest number of bytes of frames in a packet, without the tag */

/* The keystream of one packet, which depends only on key and packet number. Use it for one packet only. */
struct quic_keystream {
	/* With ChaCha20-Poly1305: block 0, whose first half is the key of Poly1305. With AES-GCM: the first 16
	 * bytes are the encrypted counter block 1, which masks the tag; the rest is unused.
	 */
	__u8 once[64];
	/* Bytes to XOR with the text. Those after the text's length may be undefined. */
	__u8 text[QUIC_TEXT_MAX];
};
_Static_assert(sizeof(struct quic_keystream) == 1600, "quic_keystream has no hidden padding");

#endif
