/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What sealing (seal.bpf.c) shares with graft/kernel/src/joint/seal.rs, and what a sealed datagram looks like. */
#ifndef MILLRACE_SEAL_INTF_H
#define MILLRACE_SEAL_INTF_H

#include "crypto_intf.h"
#include "graft_packet.h"

/* The end of every datagram of a sealed session. In front of it: the text, which is payload and frame, and the AEAD's tag; or
 * a word about keys. It is the associated data.
 */
struct seal_tail {
	__u8 magic;
	__u8 bits;	/* version << 4 | SEAL_WORD | phase */
	__u8 number[6]; /* big endian; of a word 0 */
};

#define SEAL_MAGIC   0x73
#define SEAL_VERSION 1
#define SEAL_WORD    2 /* it is no text, but a word about keys */
#define SEAL_PHASE   1 /* which of two keys */
#define SEAL_TAG     16
#define SEAL_BYTES   GRAFT_SEAL_BYTES

/* What both ends say to each other about keys. The tag is SipHash-2-4 of 128 bits over the tail and what is above it. */
struct seal_word {
	__u8 kind;
	__u8 suite;
	__u8 phase;
	__u8 pad[5];
	__u8 first[16]; /* nonces, by the order of the ends' addresses */
	__u8 second[16];
	__u8 tag[16];
};

#define SEAL_SIGNED_WORDS 6 /* 64-bit words that a word's tag is over */

#define SEAL_WINDOW 1024 /* numbers behind the newest that may still come */

/* Beyond it, a key is worn out: no more is opened with it (RFC 9001, section 6.6). */
#define SEAL_FAILURES_MAX (1ULL << 36)

/* A key and its numbers are one object, which is replaced as a whole: so no number is used twice with a key. */
struct seal_key {
	__u64 next; /* number of the next datagram out */
	__u64 limit;
	__u64 failures; /* datagrams that did not open */
	__u32 phase;
	__u32 pad;
	struct quic_keys seals;
	struct quic_keys opens;
	__u64 seen[SEAL_WINDOW]; /* one more than the newest number of those that have their place there */
};

/* In the map of keys, each session has so many: by phase, what is opened with; and what is sealed with. */
enum seal_place {
	SEAL_OPENS_0,
	SEAL_OPENS_1,
	SEAL_SEALS,
	SEAL_PLACES,
};

struct seal_session {
	__u64 word_key[2];
};

/* A word about keys that was authentic, for the daemon. */
struct seal_heard {
	__u32 session;
	__u8 kind;
	__u8 suite;
	__u8 phase;
	__u8 pad;
	__u8 first[16];
	__u8 second[16];
};

#endif
