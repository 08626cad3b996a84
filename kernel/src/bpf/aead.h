/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Packet protection of QUIC (RFC 9001, section 5.3): AEAD_CHACHA20_POLY1305 (RFC 8439, section 2.8) and
 * AEAD_AES_128_GCM and AEAD_AES_256_GCM (NIST SP 800-38D). The header is the associated data.
 *
 * There are two steps. The first computes a keystream, which depends only on key and packet number. The second is one
 * pass over the text that XORs and authenticates it. A caller that already has the keystream uses the `_with`
 * functions.
 *
 * Functions without `static` are global functions in BPF: the verifier checks each once, instead of once per call.
 * Their arguments point to map values or the stack. They check for NULL because the verifier assumes that any pointer
 * may be NULL.
 */
#ifndef MILLRACE_AEAD_H
#define MILLRACE_AEAD_H

#include "aes.h"
#include "bytes.h"
#include "chacha20.h"
#include "crypto_intf.h"
#include "ghash.h"
#include "poly1305.h"

#define QUIC_TAG 16
/* Largest offset of a header or text in a quic_buf: QUIC_TEXT_MAX bytes fit behind it. Also the mask for offsets. */
#define QUIC_AT_MAX	2047
#define QUIC_HEADER_MAX 528 /* longest header of a packet, in bytes: QUIC needs 25, test vectors need more */

/* Scratch memory for one packet. It is too large for the BPF stack, so keep it in a per-CPU map. */
struct quic_buf {
	__u8 bytes[4096];
	/* Keystream of the present packet, unless the caller has another buffer for it. */
	struct quic_keystream keystream;
	/* Intermediate results of the functions in this header. They cannot be arguments: BPF functions have at most
	 * five arguments, and all five are used.
	 */
	union {
		struct poly1305 poly;
		struct gf128 ghash;
	} mac;
	struct bytes16 tag;
	__u64 sealing; /* mask for selecting the ciphertext: all ones for sealing, zero for opening */
	struct chacha20_block mask; /* the mask of header protection */
};

/* The position of a packet in its buffer: header, text and tag follow each other without gaps. */
struct quic_extent {
	__u32 header_at;    /* offset of the header in the packet's buffer, at most QUIC_AT_MAX */
	__u32 header_bytes; /* length of the header, at most QUIC_HEADER_MAX */
	__u32 plain_at;	    /* for sealing: offset of the plaintext in its buffer, at most QUIC_AT_MAX */
	__u32 text_bytes;   /* length of the text without the tag, at most QUIC_TEXT_MAX */
};

static __always_inline int quic_extent_valid(const struct quic_extent *extent)
{
	return extent->header_at <= QUIC_AT_MAX && extent->header_bytes <= QUIC_HEADER_MAX &&
	       extent->header_at + extent->header_bytes <= QUIC_AT_MAX && extent->plain_at <= QUIC_AT_MAX &&
	       extent->text_bytes <= QUIC_TEXT_MAX;
}

/* Computes the nonce: the big-endian packet number is XORed into the end of the IV (RFC 9001, section 5.3). */
static __always_inline void quic_nonce(const struct quic_keys *keys, __u64 number, __u8 nonce[12])
{
	store32(nonce, load32(keys->iv));
	store32(nonce + 4, load32(keys->iv + 4) ^ __builtin_bswap32(number >> 32));
	store32(nonce + 8, load32(keys->iv + 8) ^ __builtin_bswap32(number));
}

static __always_inline void chacha20_keystream(const struct quic_keys *keys, __u64 number, __u32 text_bytes,
					       struct quic_keystream *out)
{
	const __u32 size = sizeof(struct chacha20_block);
	/* The verifier allows unaligned access to map values, but not to the stack, where this variable is. */
	struct chacha20_input input __attribute__((aligned(8)));

	quic_nonce(keys, number, input.bytes + 4);
	for (__u32 at = 0; at < sizeof(*out); at += size) {
		OPAQUE(at);
		if (at >= sizeof(out->once) + text_bytes)
			break;
		store32(input.bytes, at / size);
		chacha20_block(&keys->chacha20.packet, &input, (struct chacha20_block *)(out->once + at));
	}
}

static __always_inline void aes_keystream(const struct quic_keys *keys, __u64 number, __u32 text_bytes,
					  struct quic_keystream *out)
{
	const __u32 size = sizeof(struct aes_block);
	struct aes_block counter __attribute__((aligned(8)));

	quic_nonce(keys, number, counter.bytes);
	/* Counter 1 masks the tag, and the text begins with counter 2 (NIST SP 800-38D, section 7.1). */
	store32(counter.bytes + 12, __builtin_bswap32(1));
	aes_block(&keys->aes.packet, &counter, (struct aes_block *)out->once);
	for (__u32 at = 0; at < sizeof(out->text); at += size) {
		OPAQUE(at);
		if (at >= text_bytes)
			break;
		store32(counter.bytes + 12, __builtin_bswap32(2 + at / size));
		aes_block(&keys->aes.packet, &counter, (struct aes_block *)(out->text + at));
	}
}

/* Computes the keystream of packet `number` for a text of `text_bytes` bytes. */
__noinline int quic_keystream(const struct quic_keys *keys, __u64 number, __u32 text_bytes,
			      struct quic_keystream *out)
{
	if (!keys || !out)
		return -1;
	if (keys->suite == QUIC_CHACHA20_POLY1305)
		chacha20_keystream(keys, number, text_bytes, out);
	else
		aes_keystream(keys, number, text_bytes, out);
	return 0;
}

#define HEADER_BLOCKS 0x3f0 /* mask that rounds a header's length down to whole blocks */

static __always_inline void poly1305_header(struct poly1305 *state, const struct quic_keystream *keystream,
					    const __u8 *header, __u32 bytes)
{
	struct poly1305 poly;

	poly1305_start(&poly, keystream->once);
	for (__u32 at = 0; at < QUIC_HEADER_MAX; at += 16) {
		OPAQUE(at);
		if (at + 16 > bytes)
			break;
		poly1305_block(&poly, load128(header + at));
	}
	if (bytes & 15)
		poly1305_block(&poly, first128(load128(header + (bytes & HEADER_BLOCKS)), bytes & 15));
	*state = poly;
}

static __always_inline void ghash_header(struct gf128 *state, const struct ghash_key *key, const __u8 *header,
					 __u32 bytes)
{
	struct gf128 sum = {};

	for (__u32 at = 0; at < QUIC_HEADER_MAX; at += 16) {
		OPAQUE(at);
		if (at + 16 > bytes)
			break;
		sum = ghash_block(key, sum, load128(header + at));
	}
	if (bytes & 15)
		sum = ghash_block(key, sum, first128(load128(header + (bytes & HEADER_BLOCKS)), bytes & 15));
	*state = sum;
}

/* Authenticates the header. This function and the functions below, up to quic_seal_with(), are global in BPF and pass
 * the authenticator's state in memory. The verifier therefore does not have to check every text length for every header
 * length.
 */
__noinline int aead_header(const struct quic_keys *keys, const struct quic_keystream *keystream,
			   struct quic_buf *packet, const struct quic_extent *extent)
{
	if (!keys || !keystream || !packet || !extent || !quic_extent_valid(extent))
		return -1;

	const __u8 *header = packet->bytes + (extent->header_at & QUIC_AT_MAX);

	if (keys->suite == QUIC_CHACHA20_POLY1305)
		poly1305_header(&packet->mac.poly, keystream, header, extent->header_bytes);
	else
		ghash_header(&packet->mac.ghash, &keys->aes.ghash, header, extent->header_bytes);
	return 0;
}

/* XORs the block at offset `at` of `from` with the keystream and writes it to `to`, which may be `from`. Returns the
 * block's ciphertext, which is the result when sealing and the input when opening. `sealing` selects it without a
 * branch.
 */
static __always_inline struct bytes16 aead_xor(const struct quic_keystream *keystream, __u64 sealing,
					       const __u8 *from, __u8 *to, __u32 at)
{
	struct bytes16 in = load128(from + at), pad = load128(keystream->text + at);

	store128(to + at, xor128(in, pad));
	return (struct bytes16){.low = in.low ^ (pad.low & sealing), .high = in.high ^ (pad.high & sealing)};
}

static __always_inline __u8 *aead_text(struct quic_buf *packet, const struct quic_extent *extent)
{
	return packet->bytes + ((extent->header_at + extent->header_bytes) & QUIC_AT_MAX);
}

static __always_inline const __u8 *aead_plain(const struct quic_buf *plain, const struct quic_extent *extent)
{
	return plain->bytes + (extent->plain_at & QUIC_AT_MAX);
}

#define TEXT_BLOCKS 0x7f0 /* mask that rounds a text's length down to whole blocks */

/* Copies, XORs and authenticates the text in one pass. The last block is written as a whole; the bytes after the text
 * are overwritten by the tag later. The loop has no branch except its exit, so that the verifier checks each block
 * once.
 */
__noinline int chacha20_poly1305_text(const struct quic_keystream *keystream, struct quic_buf *packet,
				      const struct quic_buf *plain, const struct quic_extent *extent)
{
	if (!keystream || !packet || !plain || !extent)
		return -1;

	const __u8 *from = aead_plain(plain, extent);
	__u8 *to = aead_text(packet, extent);
	struct poly1305 poly = packet->mac.poly;
	__u64 sealing = packet->sealing;
	__u32 bytes = extent->text_bytes, last = bytes & TEXT_BLOCKS;

	for (__u32 at = 0; at < QUIC_TEXT_MAX; at += 16) {
		OPAQUE(at);
		if (at + 16 > bytes)
			break;
		poly1305_block(&poly, aead_xor(keystream, sealing, from, to, at));
	}
	if (bytes & 15 && last <= QUIC_TEXT_MAX - 16)
		poly1305_block(&poly, first128(aead_xor(keystream, sealing, from, to, last), bytes & 15));
	packet->mac.poly = poly;
	return 0;
}

/* Copies, XORs and authenticates the text like chacha20_poly1305_text(), with GHASH as the authenticator. */
__noinline int aes_gcm_text(const struct quic_keys *keys, const struct quic_keystream *keystream,
			    struct quic_buf *packet, const struct quic_buf *plain,
			    const struct quic_extent *extent)
{
	if (!keys || !keystream || !packet || !plain || !extent)
		return -1;

	const struct ghash_key *key = &keys->aes.ghash;
	const __u8 *from = aead_plain(plain, extent);
	__u8 *to = aead_text(packet, extent);
	struct gf128 sum = packet->mac.ghash;
	__u64 sealing = packet->sealing;
	__u32 bytes = extent->text_bytes, last = bytes & TEXT_BLOCKS;

	for (__u32 at = 0; at < QUIC_TEXT_MAX; at += 16) {
		OPAQUE(at);
		if (at + 16 > bytes)
			break;
		sum = ghash_block(key, sum, aead_xor(keystream, sealing, from, to, at));
	}
	if (bytes & 15 && last <= QUIC_TEXT_MAX - 16)
		sum = ghash_block(key, sum,
				  first128(aead_xor(keystream, sealing, from, to, last), bytes & 15));
	packet->mac.ghash = sum;
	return 0;
}

/* Authenticates the lengths of header and text, and writes the tag to packet->tag. */
__noinline int aead_finish(const struct quic_keys *keys, const struct quic_keystream *keystream,
			   struct quic_buf *packet, const struct quic_extent *extent)
{
	if (!keys || !keystream || !packet || !extent)
		return -1;

	struct bytes16 lengths = {.low = extent->header_bytes, .high = extent->text_bytes};

	if (keys->suite == QUIC_CHACHA20_POLY1305) {
		struct poly1305 poly = packet->mac.poly;

		poly1305_block(&poly, lengths);
		packet->tag = poly1305_finish(&poly);
		return 0;
	}
	lengths.low = __builtin_bswap64(lengths.low * 8);
	lengths.high = __builtin_bswap64(lengths.high * 8);
	packet->tag = xor128(gf128_bytes(ghash_block(&keys->aes.ghash, packet->mac.ghash, lengths)),
			     load128(keystream->once));
	return 0;
}

/* Processes header, text and lengths. The caller then stores or compares packet->tag. */
static __always_inline int aead_run(const struct quic_keys *keys, const struct quic_keystream *keystream,
				    struct quic_buf *packet, const struct quic_buf *plain,
				    const struct quic_extent *extent)
{
	if (aead_header(keys, keystream, packet, extent))
		return -1;
	if (keys->suite == QUIC_CHACHA20_POLY1305)
		chacha20_poly1305_text(keystream, packet, plain, extent);
	else
		aes_gcm_text(keys, keystream, packet, plain, extent);
	return aead_finish(keys, keystream, packet, extent);
}

/* Seals the text at extent->plain_at of `plain` into `packet`, after its header, and appends the tag. `plain` may be
 * `packet` if the text is in its final place. Returns -1 if the extent is out of bounds.
 */
__noinline int quic_seal_with(const struct quic_keys *keys, const struct quic_keystream *keystream,
			      struct quic_buf *packet, const struct quic_buf *plain,
			      const struct quic_extent *extent)
{
	if (!keys || !keystream || !packet || !plain || !extent || !quic_extent_valid(extent))
		return -1;

	__u8 *tag = aead_text(packet, extent) + extent->text_bytes;

	packet->sealing = ~0ULL;
	if (aead_run(keys, keystream, packet, plain, extent))
		return -1;
	store128(tag, packet->tag);
	return 0;
}

/* Opens `packet` in place. Returns -1 if the packet is not authentic or the extent is out of bounds; the text must then
 * not be used. The tag's bytes are undefined afterwards, also on success.
 */
__noinline int quic_open_with(const struct quic_keys *keys, const struct quic_keystream *keystream,
			      struct quic_buf *packet, const struct quic_extent *extent)
{
	if (!keys || !keystream || !packet || !extent || !quic_extent_valid(extent))
		return -1;

	struct quic_extent in_place = *extent;
	struct bytes16 tag = load128(aead_text(packet, extent) + extent->text_bytes);

	in_place.plain_at = extent->header_at + extent->header_bytes;
	packet->sealing = 0;
	if (aead_run(keys, keystream, packet, packet, &in_place))
		return -1;
	return -differ128(tag, packet->tag);
}

/* Computes the keystream and calls quic_seal_with(). A packet number may be used once per key. */
static __always_inline int quic_seal(const struct quic_keys *keys, __u64 number, struct quic_buf *packet,
				     const struct quic_buf *plain, const struct quic_extent *extent)
{
	quic_keystream(keys, number, extent->text_bytes, &packet->keystream);
	return quic_seal_with(keys, &packet->keystream, packet, plain, extent);
}

/* Computes the keystream and calls quic_open_with(). */
static __always_inline int quic_open(const struct quic_keys *keys, __u64 number, struct quic_buf *packet,
				     const struct quic_extent *extent)
{
	quic_keystream(keys, number, extent->text_bytes, &packet->keystream);
	return quic_open_with(keys, &packet->keystream, packet, extent);
}

#endif
