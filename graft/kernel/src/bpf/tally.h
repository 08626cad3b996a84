/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A test function that counts received data, in two versions with different state layouts. tests/packets
 * converts the state of version 1 to version 2.
 */
#ifndef MILLRACE_TALLY_H
#define MILLRACE_TALLY_H

#include "graft_packet.h"

struct tally_v1 {
	__u32 packets;
};

struct tally_v2 {
	__u64 packets;
	__u64 bytes;
	__u64 moved; /* packets that the previous version of the function had counted */
};

#define TALLY_STATE(version) BPF_MAP(ARRAY, state, __u32, struct version, GRAFT_SESSIONS)

#endif
