/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What graft_opening.bpf.c shares with graft/kernel/src/opening.rs. */
#ifndef MILLRACE_GRAFT_OPENING_INTF_H
#define MILLRACE_GRAFT_OPENING_INTF_H

#include "graft_hook_intf.h"

#define OPENING_HEAD_BYTES 44 /* the IP header with the ports, of IPv6 too */
#define OPENING_DUE	   1024

/* Of a socket that sends a first packet: what has come out of OUTPUT and POSTROUTING. */
struct opening_sent {
	__u32 passed;
	__u8 head[OPENING_HEAD_BYTES];
};

/* A first packet that is to come in. */
struct opening_ends {
	struct hook_end from;
	struct hook_end to;
};

struct opening_due {
	__u32 ifindex; /* by which it is to come */
	__u32 passed;  /* 1: INPUT has let it pass */
};

/* What became of a first packet. */
enum opening_verdict {
	OPENING_OUT,	   /* it has passed OUTPUT, and ends there */
	OPENING_IN,	   /* it has passed INPUT, and ends there */
	OPENING_ELSEWHERE, /* it came by another interface: somebody else's */
	OPENING_NO_SOCKET, /* there is no socket where it could end: dropped */
	OPENING_VERDICTS,
};

#endif
