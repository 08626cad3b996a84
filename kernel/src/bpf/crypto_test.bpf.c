// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* A program that runs the functions of the crypto headers, for BPF_PROG_TEST_RUN. It is never attached. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "crypto_test.h"

BPF_MAP_FLAGS(ARRAY, cases, __u32, struct crypto_case, 1, BPF_F_MMAPABLE);

SEC("tc")
int crypto_run(struct __sk_buff *skb)
{
	__u32 first = 0;
	struct crypto_case *c = bpf_map_lookup_elem(&cases, &first);

	if (c)
		c->result = crypto_case_run(c);
	return 0;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
