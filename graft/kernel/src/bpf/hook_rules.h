/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Finds the rule that a connection matches. Also contains the map of servers that refused a connection recently, to
 * which connections are not redirected for a while.
 */
#ifndef MILLRACE_HOOK_RULES_H
#define MILLRACE_HOOK_RULES_H

#include "caller.h"
#include "hook_end.h"
#include "rule_lists.h"
#include "util.h"

RULE_LISTS(struct hook_rule, HOOK_RULES);

/* Time until which connections to a server are not redirected (CLOCK_MONOTONIC, ns), by the address and port of a
 * server that refused a connection.
 */
BPF_MAP(LRU_HASH, avoided, struct hook_end, __u64, HOOK_AVOIDED);

/* State of a search for the first rule that matches, and the found rule's fields. */
struct search {
	const struct hook_end *end;
	/* 0: the client is another host, so rules with a condition on the process do not match */
	const struct caller *caller;
	__u32 first;
	__u32 found;
	__u32 strict;
	__u32 choice;
	__u64 cgroup;
};

static long look_at(__u32 index, struct search *search)
{
	const struct hook_end *end = search->end;
	__u32 place = search->first + index;
	const struct hook_rule *rule = bpf_map_lookup_elem(&rules, &place);

	if (!rule || !rule->last_port)
		return 1;
	if (end->port < rule->first_port || end->port > rule->last_port)
		return 0;
	for (int i = 0; i < 4; i++)
		if ((end->address[i] & rule->mask[i]) != rule->peer[i])
			return 0;
	if (!is_wanted(&rule->caller, search->caller))
		return 0;
	search->found = !rule->in_place;
	search->strict = rule->strict & 1;
	search->choice = rule->choice;
	search->cgroup = rule->caller.cgroup;
	return 1;
}

/* Returns whether a rule matches that redirects the connection. The caller sets `end` and `caller` in `rule`,
 * and all other fields to zero.
 */
static __always_inline bool fits_a_rule(struct search *search)
{
	__u32 zero = 0, *first = bpf_map_lookup_elem(&in_force, &zero);

	search->first = first ? *first : 0;
	bpf_loop(HOOK_RULES, look_at, search, 0);
	return search->found;
}

static __always_inline bool is_avoided(const struct hook_end *end)
{
	__u64 *until = bpf_map_lookup_elem(&avoided, end);

	return until && bpf_ktime_get_ns() < *until;
}

#endif
