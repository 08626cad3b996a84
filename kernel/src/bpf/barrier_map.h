/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The map with which userspace waits for runs of BPF programs: an update of a map of maps returns only after every run
 * that had begun has ended (`maybe_wait_bpf_programs`). Userspace may then reuse a map entry that it unlinked before.
 */
#ifndef MILLRACE_BARRIER_MAP_H
#define MILLRACE_BARRIER_MAP_H

#include "util.h"

/* The only inner map of the map of maps `barrier`. No program uses its content. */
struct nothing {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, 1);
} nothing SEC(".maps");

/* Index 0 -> the inner map `nothing`. To wait, userspace writes this same entry again: the kernel waits for runs. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__type(key, __u32);
	__uint(max_entries, 1);
	__array(values, struct nothing);
} barrier SEC(".maps")
= {.values = {&nothing}};

#endif
