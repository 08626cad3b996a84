/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The condition of a rule on the process that calls connect(). Included by graft_intf.h and
 * graft_hook_intf.h.
 */
#ifndef MILLRACE_CALLER_INTF_H
#define MILLRACE_CALLER_INTF_H

#include <linux/types.h>

#define CALLER_NAME_BYTES 16 /* equal to the kernel's TASK_COMM_LEN */
/* number of cgroup levels, counted from the root, at which rules can match; deeper cgroups are ignored */
#define CALLER_LEVELS 16

/* A rule's condition on the calling process. If all fields are zero, every process matches. */
struct caller_wanted {
	char command[CALLER_NAME_BYTES]; /* name of the calling thread (`comm`), padded with zeroes */
	/* ID of the process's cgroup (version 2), or of an ancestor of that cgroup */
	__u64 cgroup;
};

/* The process that calls connect(). */
struct caller {
	char command[CALLER_NAME_BYTES];
	/* IDs of the process's cgroup and its ancestors, from the root on; unused entries are zero */
	__u64 cgroups[CALLER_LEVELS];
};

#endif
