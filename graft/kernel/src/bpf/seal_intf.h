/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Types that the sealing programs (seal.bpf.c) share with graft/kernel/src/packet/seal.rs, and the format of
 * a sealed datagram.
 */
#ifndef MILLRACE_SEAL_INTF_H
#define MILLRACE_SEAL_INTF_H

#include "crypto_intf.h"
#include "graft_packet.h"

/* The last bytes of every sealed datagram, behind the ciphertext (payload and frame) and the AEAD's tag.
 * These bytes are the AEAD's associated data.
 */
struct seal_tail {
	__u8 magic;
	__u8 bits;	/* version in the high four bits, key phase in the low ones */
	__u8 number[6]; /* number of the datagram, big-endian; part of the AEAD's nonce */
};

#define SEAL_MAGIC   0x73
#define SEAL_VERSION 1
#define SEAL_PHASE   1 /* the bit of `bits` in struct seal_tail that is the key phase */
#define SEAL_TAG     16
#define SEAL_BYTES   GRAFT_SEAL_BYTES

/* size of the replay window: how far behind the newest number a datagram is still accepted */
#define SEAL_WINDOW 1024

/* Number of datagrams that fail authentication after which a key is no longer used to open (RFC 9001, section
 * 6.6).
 */
#define SEAL_FAILURES_MAX (1ULL << 36)

/* A key with its counters and its replay window. The map entry is only replaced as a whole, so no datagram
 * number is used twice with a key.
 */
struct seal_key {
	__u64 next; /* datagram number that the next outgoing datagram gets */
	__u64 limit;
	__u64 failures; /* number of received datagrams that failed authentication with this key */
	__u32 phase;
	__u32 pad;
	struct quic_keys seals;
	struct quic_keys opens;
	/* replay window, by number modulo SEAL_WINDOW: one more than the newest number received */
	__u64 seen[SEAL_WINDOW];
};

/* Position of each of a session's keys in the map: the decryption keys of key phases 0 and 1, and the encryption key.
 */
enum seal_place {
	SEAL_OPENS_0,
	SEAL_OPENS_1,
	SEAL_SEALS,
	SEAL_PLACES,
};

#endif
