/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Declarations of maps, and the headers of the kernel and libbpf that all programs need. It is installed with
 * graft_packet.h, which includes it.
 */
#ifndef MILLRACE_BPF_MAP_H
#define MILLRACE_BPF_MAP_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>

/* Declares a map: its type (BPF_MAP_TYPE_...), its name, the types of its keys and values, its number of entries, and its
 * flags (BPF_F_...).
 */
#define BPF_MAP_FLAGS(map_type, name, key_type, value_type, entries, flags) \
	struct {                                                            \
		__uint(type, BPF_MAP_TYPE_##map_type);                      \
		__uint(max_entries, entries);                               \
		__uint(map_flags, flags);                                   \
		__type(key, key_type);                                      \
		__type(value, value_type);                                  \
	} name SEC(".maps")

/* Declares a map without flags. */
#define BPF_MAP(map_type, name, key_type, value_type, entries) \
	BPF_MAP_FLAGS(map_type, name, key_type, value_type, entries, 0)

/* Declares a ring buffer of this size, a power of two. */
#define BPF_RING(name, bytes)                       \
	struct {                                    \
		__uint(type, BPF_MAP_TYPE_RINGBUF); \
		__uint(max_entries, bytes);         \
	} name SEC(".maps")

#endif
