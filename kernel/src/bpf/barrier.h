/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Lets userspace wait for runs of BPF programs, by the map `barrier`. The kernel does not promise that an update waits,
 * so barrier_run tests it.
 */
#ifndef MILLRACE_BARRIER_H
#define MILLRACE_BARRIER_H

#include "barrier_map.h"
#include "util.h"

enum barrier_state {
	BARRIER_RUNS = 1,
	BARRIER_HAS_RUN,
};

/* Index 0 -> state of the run of barrier_run (enum barrier_state). */
BPF_MAP(ARRAY, barrier_states, __u32, __u32, 1);

#define BARRIER_STEPS (1 << 21) /* iterations of the loop with which barrier_run takes some milliseconds */

static long barrier_step(__u32 index, void *nobody)
{
	return 0;
}

/* Runs for some milliseconds, so that userspace can check whether an update waits for its end. */
SEC("tc")
int barrier_run(struct __sk_buff *skb)
{
	__u32 key = 0, *state = bpf_map_lookup_elem(&barrier_states, &key);

	if (!state)
		return 0;
	WRITE_ONCE(*state, BARRIER_RUNS);
	bpf_loop(BARRIER_STEPS, barrier_step, NULL, 0);
	WRITE_ONCE(*state, BARRIER_HAS_RUN);
	return 0;
}

#endif
