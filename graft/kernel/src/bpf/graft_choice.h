/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Maps of the choices that userspace's learned model makes. A choice says which candidate the connections with a peer
 * use: a congestion control or the broker. graft_tcp.bpf.c and graft_hook.bpf.c share these maps.
 *
 * Another candidate is explored by grants: userspace sets `grant`, and exactly one connection uses it. Thus
 * userspace bounds how many connections explore, however many begin at once.
 */
#ifndef MILLRACE_GRAFT_CHOICE_H
#define MILLRACE_GRAFT_CHOICE_H

#include "graft_intf.h"
#include "util.h"
#include <stdbool.h>

/* Current choices, by the rule's `choice` and the peer's address. Userspace writes them. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct graft_choice_key);
	__type(value, struct graft_choice);
	__uint(max_entries, GRAFT_CHOICES);
} choices SEC(".maps");

enum graft_picked {
	GRAFT_PICKED_NOT,
	GRAFT_PICKED_IN_PLACE,
	GRAFT_PICKED_LED, /* the connection is redirected: the application's socket connects to the broker */
};

/* State of a socket whose connection matches a rule with a choice. */
struct graft_flow {
	__u64 began_ns; /* time of the connection's SYN */
	__u32 rule;
	__u32 serial;
	__u8 side;
	__u8 picked; /* enum graft_picked: candidate that the connection uses */
	__u8 explored;
	__u8 counts; /* 1: the connection's start was reported, so its end has to be reported too */
	char congestion[GRAFT_NAME_BYTES];
	char command[CALLER_NAME_BYTES];
};

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct graft_flow);
} flows SEC(".maps");

static __always_inline bool graft_take_grant(struct graft_choice *choice)
{
	/* Several connections may begin at the same time on different CPUs; the compare-and-swap gives the
	 * grant to one of them.
	 */
	return choice->grant && __sync_val_compare_and_swap(&choice->grant, 1, 0) == 1;
}

/* Picks the candidate for a connection. `may_lead` states whether the broker can accept the connection.
 * Returns whether the connection is redirected to the broker.
 */
static __always_inline bool graft_pick(struct graft_choice *choice, struct graft_flow *flow, bool may_lead)
{
	bool leads;

	flow->serial = choice->serial;
	/* If the granted candidate is the broker, a connection that the broker cannot accept does not use up
	 * the grant.
	 */
	flow->explored = (may_lead || !choice->other_lead) && graft_take_grant(choice);
	leads = flow->explored ? choice->other_lead : choice->lead;
	if (flow->explored && !leads)
		__builtin_memcpy(flow->congestion, choice->other, sizeof(flow->congestion));
	else
		__builtin_memcpy(flow->congestion, choice->congestion, sizeof(flow->congestion));
	flow->congestion[GRAFT_NAME_BYTES - 1] = 0;
	leads = leads && may_lead;
	flow->picked = leads ? GRAFT_PICKED_LED : GRAFT_PICKED_IN_PLACE;
	return leads;
}

#endif
