/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Keys and keystreams of 1-RTT packets, which userspace hands to BPF programs. The build writes
 * Rust's types and constants from this header, except the union, which crypto.rs declares as words.
 */
#ifndef MILLRACE_CRYPTO_INTF_H
#define MILLRACE_CRYPTO_INTF_H

#include <linux/types.h>

enum quic_suite {
	QUIC_CHACHA20_POLY1305 = 0,
	QUIC_AES128_GCM = 1,
};

struct chacha20_key {
	__u32 words[8]; /* little endian on the wire */
};

/* The expanded key, FIPS 197 section 5.2; words hold the first byte in their low bits. */
struct aes128_key {
	__u32 words[44];
};

/* An element of GF(2^128) in GCM's bit order: the coefficient of x^0 is the top bit of `high`. */
struct gf128 {
	__u64 high;
	__u64 low;
};

/* rows[j][n] is n * x^(4j) * H: with these, a multiplication by H takes 32 look-ups and 3 shifts.
 * The nibble n has the lowest power of x in its top bit, as everything in GCM.
 */
struct ghash_key {
	struct gf128 rows[8][16];
};

struct quic_chacha20_keys {
	struct chacha20_key packet;
	struct chacha20_key header;
};

struct quic_aes128_keys {
	struct aes128_key packet;
	struct aes128_key header;
	struct ghash_key ghash;
};

/* One direction and key generation of a connection (RFC 9001, section 5.1). */
struct quic_keys {
	__u32 suite; /* enum quic_suite, which tells the member of the union that is set */
	__u8 iv[12];
	union {
		struct quic_chacha20_keys chacha20;
		struct quic_aes128_keys aes128;
	};
};
#define QUIC_KEYS_BYTES (16 + 352 + 2048)
_Static_assert(sizeof(struct quic_keys) == QUIC_KEYS_BYTES, "quic_keys has no hidden padding");

#define QUIC_TEXT_MAX 1536 /* bytes of frames in a packet, the tag not included */

/* The part of sealing that depends only on key and packet number. It may be used for one packet. */
struct quic_keystream {
	/* ChaCha20-Poly1305: block 0, whose first half keys Poly1305. AES-128-GCM: the first 16 bytes are the
	 * encrypted counter block 1, which masks the tag; the rest is unused.
	 */
	__u8 once[64];
	__u8 text[QUIC_TEXT_MAX]; /* XORed with the text; bytes beyond the text's length may be undefined */
};
_Static_assert(sizeof(struct quic_keystream) == 1600, "quic_keystream has no hidden padding");

#endif
