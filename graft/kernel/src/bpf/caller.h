/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Identifies the process that calls connect(), and matches it against a rule. */
#ifndef MILLRACE_CALLER_H
#define MILLRACE_CALLER_H

#include "caller_intf.h"
#include "util.h"
#include <stdbool.h>

/* Fills in name and cgroups of the calling process. Only cgroup/connect programs may call this, since they
 * run in that process. `caller` has to be zero before.
 */
static __always_inline void read_caller(struct caller *caller)
{
	/* The helper pads the name with zeroes, so names can be compared as two words. */
	bpf_get_current_comm(caller->command, sizeof(caller->command));
	for (int level = 0; level < CALLER_LEVELS; level++) {
		__u64 id = bpf_get_current_ancestor_cgroup_id(level);

		if (!id)
			break;
		caller->cgroups[level] = id;
	}
}

/* Returns whether a rule's condition matches the process. `caller` is NULL if the process is unknown. */
static __always_inline bool is_wanted(const struct caller_wanted *wanted, const struct caller *caller)
{
	const __u64 *command = (const __u64 *)wanted->command;

	if (!command[0] && !wanted->cgroup)
		return true;
	if (!caller)
		return false;
	if (command[0]) {
		const __u64 *its = (const __u64 *)caller->command;

		if (its[0] != command[0] || its[1] != command[1])
			return false;
	}
	if (!wanted->cgroup)
		return true;
	for (int level = 0; level < CALLER_LEVELS; level++)
		if (caller->cgroups[level] == wanted->cgroup)
			return true;
	return false;
}

#endif
