/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Counts activity of sessions in shared memory. A daemon with thousands of sessions thus finds the active
 * ones without a system call.
 */
#ifndef MILLRACE_PACKET_ACTIVE_H
#define MILLRACE_PACKET_ACTIVE_H

#include "graft_packet.h"

/* Activity counter of each session. It grows with every packet whose processing time is measured, and with every
 * datagram that could not be decrypted. Two CPUs may write at the same time and lose a count, so only a change of the
 * value has a meaning.
 */
BPF_MAP_FLAGS(ARRAY, active, __u32, __u64, GRAFT_SESSIONS, BPF_F_MMAPABLE);

static __always_inline void mark_active(__u32 session)
{
	__u64 *of = bpf_map_lookup_elem(&active, &session);

	if (of)
		(*of)++;
}

#endif
