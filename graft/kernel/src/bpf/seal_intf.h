/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Types that sealing (seal.bpf.c) shares with graft/kernel/src/packet/seal.rs, and the format of a sealed
 * datagram.
 */
#ifndef MILLRACE_SEAL_INTF_H
#define MILLRACE_SEAL_INTF_H

#include "crypto_intf.h"
#include "graft_packet.h"

/* The last bytes of every sealed datagram. In front of them are the ciphertext (payload and frame) and the
 * AEAD's tag. They are the AEAD's associated data.
 */
struct seal_tail {
	__u8 magic;
	__u8 bits;	/* version << 4 | phase */
	__u8 number[6]; /* number of the datagram, big-endian */
};

#define SEAL_MAGIC   0x73
#define SEAL_VERSION 1
#define SEAL_PHASE   1 /* bit of the key phase */
#define SEAL_TAG     16
#define SEAL_BYTES   GRAFT_SEAL_BYTES

#define SEAL_WINDOW 1024 /* replay window: numbers behind the newest that are still accepted */

/* A key opens nothing more after this many datagrams that could not be opened (RFC 9001, section 6.6). */
#define SEAL_FAILURES_MAX (1ULL << 36)

/* A key with its counters and its replay window. The map entry is replaced as a whole, so no number is used
 * twice with a key.
 */
struct seal_key {
	__u64 next; /* number of the next outgoing datagram */
	__u64 limit;
	__u64 failures; /* datagrams that could not be opened */
	__u32 phase;
	__u32 pad;
	struct quic_keys seals;
	struct quic_keys opens;
	__u64 seen[SEAL_WINDOW]; /* by number modulo SEAL_WINDOW: one more than the newest number received */
};

/* Entries of each session in the map of keys: those that open, by phase, and the one that seals. */
enum seal_place {
	SEAL_OPENS_0,
	SEAL_OPENS_1,
	SEAL_SEALS,
	SEAL_PLACES,
};

#endif
