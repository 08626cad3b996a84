/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Types that graft_opening.bpf.c shares with graft/kernel/src/opening.rs. */
#ifndef MILLRACE_GRAFT_OPENING_INTF_H
#define MILLRACE_GRAFT_OPENING_INTF_H

#include "graft_hook_intf.h"

#define OPENING_HEAD_BYTES 44 /* bytes of an IPv6 header without extensions, and the ports */
#define OPENING_DUE	   1024

/* The first packet that a watched socket sent, as it left OUTPUT and POSTROUTING. */
struct opening_sent {
	__u32 passed;
	__u8 head[OPENING_HEAD_BYTES];
};

/* Key of an expected first packet: its source and destination. */
struct opening_ends {
	struct hook_end from;
	struct hook_end to;
};

struct opening_due {
	__u32 ifindex; /* interface that the packet is expected at */
	__u32 passed;  /* 1: netfilter's INPUT has let the packet pass */
};

/* The verdict on a first packet behind the firewall. */
enum opening_verdict {
	OPENING_OUT,	   /* the first packet has passed OUTPUT, and ends there */
	OPENING_IN,	   /* the first packet has passed INPUT, and ends there */
	OPENING_ELSEWHERE, /* the packet came by another interface, so it is not the broker's */
	OPENING_NO_SOCKET, /* no socket takes the packet: dropped */
	OPENING_VERDICTS,
};

#endif
