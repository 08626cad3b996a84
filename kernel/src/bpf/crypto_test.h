/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* One crypto operation on memory, for the tests in tests/crypto. crypto_test.bpf.c runs it in the kernel, and
 * crypto_test.native.c in the test's process.
 */
#ifndef MILLRACE_CRYPTO_TEST_H
#define MILLRACE_CRYPTO_TEST_H

#include "quic_packet.h"

enum crypto_operation {
	CRYPTO_SEAL = 0,
	CRYPTO_SEAL_IN_PLACE,
	CRYPTO_SEAL_WITH,
	CRYPTO_OPEN,
	CRYPTO_OPEN_WITH,
	CRYPTO_KEYSTREAM,
	CRYPTO_PROTECT,
	CRYPTO_UNPROTECT,
	CRYPTO_NUMBER,
};

/* Arguments and results of one operation. */
struct crypto_case {
	__u32 operation;
	__s32 result;
	__u64 number; /* packet number; CRYPTO_NUMBER reads the expected number and writes the decoded one */
	struct quic_extent extent;
	__u32 id_bytes;
	struct quic_short header;
	__u32 pad;
	struct quic_keys keys;
	/* the packet; its keystream is the input of CRYPTO_SEAL_WITH and CRYPTO_OPEN_WITH */
	struct quic_buf packet;
	struct quic_buf plain;
};

static __always_inline int crypto_case_run(struct crypto_case *c)
{
	struct quic_extent extent = c->extent;
	struct quic_short header = c->header;
	int result;

	switch (c->operation) {
	case CRYPTO_SEAL:
		return quic_seal(&c->keys, c->number, &c->packet, &c->plain, &extent);
	case CRYPTO_SEAL_IN_PLACE:
		extent.plain_at = extent.header_at + extent.header_bytes;
		return quic_seal(&c->keys, c->number, &c->packet, &c->packet, &extent);
	case CRYPTO_SEAL_WITH:
		return quic_seal_with(&c->keys, &c->packet.keystream, &c->packet, &c->plain, &extent);
	case CRYPTO_OPEN:
		return quic_open(&c->keys, c->number, &c->packet, &extent);
	case CRYPTO_OPEN_WITH:
		return quic_open_with(&c->keys, &c->packet.keystream, &c->packet, &extent);
	case CRYPTO_KEYSTREAM:
		return quic_keystream(&c->keys, c->number, extent.text_bytes, &c->packet.keystream);
	case CRYPTO_PROTECT:
		return quic_protect(&c->keys, &c->packet, extent.header_at, c->id_bytes);
	case CRYPTO_UNPROTECT:
		result = quic_unprotect(&c->keys, &c->packet, extent.header_at, c->id_bytes,
					extent.text_bytes, &header);
		c->header = header;
		return result;
	case CRYPTO_NUMBER:
		c->number = quic_number(c->number, &header);
		return 0;
	}
	return -1;
}

#endif
