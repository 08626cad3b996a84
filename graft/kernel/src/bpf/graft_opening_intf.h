/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Types that graft_opening.bpf.c shares with graft/kernel/src/opening.rs. */
#ifndef MILLRACE_GRAFT_OPENING_INTF_H
#define MILLRACE_GRAFT_OPENING_INTF_H

#include "graft_hook_intf.h"

#define OPENING_HEAD_BYTES 44 /* number of bytes of an IPv6 header without extensions and both TCP ports */
#define OPENING_DUE	   1024

/* The test packet of a socket, as it left netfilter's chains OUTPUT and POSTROUTING. */
struct opening_sent {
	__u32 passed;
	__u8 head[OPENING_HEAD_BYTES];
};

/* Key of a test packet that is expected at INPUT: its source and destination. */
struct opening_ends {
	struct hook_end from;
	struct hook_end to;
};

struct opening_due {
	__u32 ifindex; /* interface at which the packet is expected */
	__u32 passed;  /* 1: netfilter's INPUT has let the packet pass */
};

/* The verdict on a test packet that netfilter has accepted. */
enum opening_verdict {
	OPENING_OUT, /* OUTPUT has accepted the test packet, which is then dropped */
	OPENING_IN,  /* INPUT has accepted the test packet, which is then dropped */
	/* a packet with the addresses and ports of a test packet arrived at another interface, so it is not the
	 * broker's
	 */
	OPENING_ELSEWHERE,
	OPENING_NO_SOCKET, /* no socket of the tunnel broker exists to assign the packet to, so it is dropped */
	OPENING_VERDICTS,
};

#endif
