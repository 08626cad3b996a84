// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Runs the crypto headers for BPF_PROG_TEST_RUN: tests/crypto. Nothing attaches it. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "quic_packet.h"

enum crypto_operation {
	CRYPTO_SEAL = 0,
	CRYPTO_SEAL_WITH,
	CRYPTO_OPEN,
	CRYPTO_OPEN_WITH,
	CRYPTO_KEYSTREAM,
	CRYPTO_PROTECT,
	CRYPTO_UNPROTECT,
	CRYPTO_NUMBER,
};

/* Arguments and results of one operation, in the order of its parameters. */
struct crypto_case {
	__u32 operation;
	__s32 result;
	__u64 number; /* packet number; CRYPTO_NUMBER: the expected one, and the result */
	struct quic_extent extent;
	__u32 id_bytes;
	struct quic_short header;
	__u32 pad;
	struct quic_keys keys;
	struct quic_buf packet; /* with the keystream of the _with operations */
	struct quic_buf plain;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct crypto_case);
	__uint(max_entries, 1);
} cases SEC(".maps");

static __always_inline int run(struct crypto_case *c)
{
	struct quic_extent extent = c->extent;
	struct quic_short header = c->header;
	int result;

	switch (c->operation) {
	case CRYPTO_SEAL:
		return quic_seal(&c->keys, c->number, &c->packet, &c->plain, &extent);
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

SEC("tc")
int crypto_run(struct __sk_buff *skb)
{
	__u32 first = 0;
	struct crypto_case *c = bpf_map_lookup_elem(&cases, &first);

	if (c)
		c->result = run(c);
	return 0;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
