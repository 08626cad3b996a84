/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Which sessions have had packets, so that a daemon with thousands of them looks at those only, without a system call. */
#ifndef MILLRACE_JOINT_ACTIVE_H
#define MILLRACE_JOINT_ACTIVE_H

#include "graft_packet.h"

/* By session: grows with every packet whose time is taken, and with every datagram that did not open. Only that it differs from
 * before means something: of two CPUs at the same time one may win. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, GRAFT_SESSIONS);
	__type(key, __u32);
	__type(value, __u64);
} active SEC(".maps");

static __always_inline void mark_active(__u32 session)
{
	__u64 *of = bpf_map_lookup_elem(&active, &session);

	if (of)
		(*of)++;
}

#endif
