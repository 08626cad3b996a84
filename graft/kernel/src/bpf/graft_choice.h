/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Maps of choices, which a learned model in userspace makes for each peer: whether connections with the peer use a
 * certain congestion control, or are tunnelled by the broker. These are called candidates. graft_tcp.bpf.c and
 * graft_hook.bpf.c share the maps.
 *
 * To explore another candidate, userspace sets `grant`, and exactly one connection uses that candidate and clears
 * `grant`. Thus userspace bounds how many connections explore, however many begin at once.
 */
#ifndef MILLRACE_GRAFT_CHOICE_H
#define MILLRACE_GRAFT_CHOICE_H

#include "graft_intf.h"
#include "util.h"
#include <stdbool.h>

/* Current choices, which userspace writes. The key has the number in a rule's field `choice`, and the peer's address.
 */
BPF_MAP_FLAGS(HASH, choices, struct graft_choice_key, struct graft_choice, GRAFT_CHOICES, BPF_F_NO_PREALLOC);

enum graft_picked {
	GRAFT_PICKED_NOT,
	GRAFT_PICKED_IN_PLACE,
	GRAFT_PICKED_REDIRECTED, /* the connection is redirected: the application's socket connects to the broker */
};

/* State of a socket whose connection matches a rule that leaves the choice of the congestion control to the learned
 * model.
 */
struct graft_flow {
	__u64 began_ns; /* time of the connection's SYN */
	__u32 rule;
	__u32 serial;
	__u8 side;
	/* enum graft_picked: whether the connection uses a congestion control that was chosen, or the broker */
	__u8 picked;
	__u8 explored;
	__u8 counts; /* 1: the connection's start was reported, so its end has to be reported too */
	char congestion[GRAFT_NAME_BYTES];
	char command[CALLER_NAME_BYTES];
};

BPF_MAP_FLAGS(SK_STORAGE, flows, int, struct graft_flow, 0, BPF_F_NO_PREALLOC);

static __always_inline bool graft_take_grant(struct graft_choice *choice)
{
	/* Several connections may begin at the same time on different CPUs; the compare-and-swap gives the
	 * grant to one of them.
	 */
	return choice->grant && __sync_val_compare_and_swap(&choice->grant, 1, 0) == 1;
}

/* Picks the candidate (a congestion control or the broker) for a connection. `may_redirect` states whether the broker
 * can accept the connection. Returns whether the connection is redirected to the broker.
 */
static __always_inline bool graft_pick(struct graft_choice *choice, struct graft_flow *flow,
				       bool may_redirect)
{
	bool redirects;

	flow->serial = choice->serial;
	/* If the candidate to explore is the broker, a connection that the broker cannot accept does not clear `grant`.
	 */
	flow->explored = (may_redirect || !choice->other_redirect) && graft_take_grant(choice);
	redirects = flow->explored ? choice->other_redirect : choice->redirect;
	if (flow->explored && !redirects)
		__builtin_memcpy(flow->congestion, choice->other, sizeof(flow->congestion));
	else
		__builtin_memcpy(flow->congestion, choice->congestion, sizeof(flow->congestion));
	flow->congestion[GRAFT_NAME_BYTES - 1] = 0;
	redirects = redirects && may_redirect;
	flow->picked = redirects ? GRAFT_PICKED_REDIRECTED : GRAFT_PICKED_IN_PLACE;
	return redirects;
}

#endif
