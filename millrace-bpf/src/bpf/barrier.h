/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* For userspace only: an update of a map of maps returns when every program run that had begun has ended. Then it may
 * reuse what it has unlinked before.
 */
#ifndef MILLRACE_BARRIER_H
#define MILLRACE_BARRIER_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* What `barrier` holds: a map of no use. */
struct nothing {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, 1);
} nothing SEC(".maps");

/* 0 -> `nothing`, again with each update. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__type(key, __u32);
	__uint(max_entries, 1);
	__array(values, struct nothing);
} barrier SEC(".maps")
= {.values = {&nothing}};

#endif
