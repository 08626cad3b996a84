/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What was chosen for the connections of a path, and what one of them has got: graft_tcp.bpf.c and graft_hook.bpf.c share the maps.
 *
 * A path tries another arm by grants: userspace gives one, and one connection takes it. So the bound on what is tried is
 * userspace's alone, however many connections begin at once.
 */
#ifndef MILLRACE_GRAFT_CHOICE_H
#define MILLRACE_GRAFT_CHOICE_H

#include "graft_intf.h"
#include "util.h"
#include <stdbool.h>

/* Of rules with a `choice`, by the peer's address. Userspace writes it. */
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
	GRAFT_PICKED_LED, /* what is seen of it is the way to the broker */
};

/* Of a socket that such a rule fits. */
struct graft_flow {
	__u64 began_ns; /* its SYN */
	__u32 rule;
	__u32 serial;
	__u8 side;
	__u8 picked; /* enum graft_picked */
	__u8 explored;
	__u8 counts; /* it was told of */
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
	return choice->grant && __sync_val_compare_and_swap(&choice->grant, 1, 0) == 1;
}

/* `may_lead`: whether the broker would have it. Returns whether it goes there. */
static __always_inline bool graft_pick(struct graft_choice *choice, struct graft_flow *flow, bool may_lead)
{
	bool leads;

	flow->serial = choice->serial;
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
