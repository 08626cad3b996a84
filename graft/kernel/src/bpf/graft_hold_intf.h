/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Types that graft_hold.bpf.c shares with graft/kernel/src/hold.rs. */
#ifndef MILLRACE_GRAFT_HOLD_INTF_H
#define MILLRACE_GRAFT_HOLD_INTF_H

#include "graft_hook_intf.h"

#define HOLD_WAITING 1 /* the tunnel broker was notified of the SYN and has not decided */
#define HOLD_OPEN    2

/* An event for the tunnel broker: a SYN that was held back. */
struct hold_ask {
	struct hook_end from;
	__u32 bytes;
	__u8 syn[64]; /* the TCP header with its options, 20 to 60 bytes */
};

/* The verdict on a packet at a listening socket, or at an accepted socket that still has the filter. */
enum hold_verdict {
	HOLD_OTHER,  /* the packet is no SYN: passed */
	HOLD_ASKED,  /* the SYN is held back, and the tunnel broker was notified */
	HOLD_HELD,   /* the SYN is held back; the tunnel broker was notified of an earlier copy */
	HOLD_LET_IN, /* the SYN passes, since the tunnel broker has accepted it */
	/* the SYN is held back without notifying the tunnel broker, as the ring buffer is full; the client repeats
	 * it
	 */
	HOLD_NO_ROOM,
	HOLD_MALFORMED, /* the packet has no TCP header */
	HOLD_VERDICTS,
};

#endif
