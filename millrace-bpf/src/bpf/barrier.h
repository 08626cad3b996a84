/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Not for the program: an update of a map of maps returns when all program runs have ended that it might concern, which
 * tells userspace that it may reuse what it has unlinked.
 */
#ifndef MILLRACE_BARRIER_H
#define MILLRACE_BARRIER_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

struct nothing {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, 1);
} nothing SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__type(key, __u32);
	__uint(max_entries, 1);
	__array(values, struct nothing);
} barrier SEC(".maps")
= {.values = {&nothing}};

#endif
