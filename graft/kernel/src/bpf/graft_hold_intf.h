/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What graft_hold.bpf.c shares with graft/kernel/src/hold.rs. */
#ifndef MILLRACE_GRAFT_HOLD_INTF_H
#define MILLRACE_GRAFT_HOLD_INTF_H

#include "graft_hook_intf.h"

#define HOLD_WAITING 1 /* the broker was asked */
#define HOLD_OPEN    2

/* A SYN, for the broker. */
struct hold_ask {
	struct hook_end from;
	__u32 bytes;
	__u8 syn[64]; /* the TCP header, with its options: 20 to 60 bytes */
};

/* What became of a packet that came to a listening socket, or to one that it has made and that still has the filter. */
enum hold_verdict {
	HOLD_OTHER,	/* no SYN: passed */
	HOLD_ASKED,	/* held back, and the broker was told */
	HOLD_HELD,	/* held back, and the broker knows */
	HOLD_LET_IN,	/* the broker has said so */
	HOLD_NO_ROOM,	/* held back, as the broker has not taken those before: it comes again */
	HOLD_MALFORMED, /* no TCP header */
	HOLD_VERDICTS,
};

#endif
