/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The condition of a rule on the process that calls connect(). Included by graft_intf.h and
 * graft_hook_intf.h.
 */
#ifndef MILLRACE_CALLER_INTF_H
#define MILLRACE_CALLER_INTF_H

#include <linux/types.h>

#define CALLER_NAME_BYTES 16 /* equal to the kernel's TASK_COMM_LEN */
#define CALLER_LEVELS	  16 /* most levels of nested cgroups that are compared, from the root */

/* The condition of a rule. All zero: every process matches. */
struct caller_wanted {
	char command[CALLER_NAME_BYTES]; /* name of the calling thread (`comm`), padded with zeroes */
	__u64 cgroup;			 /* ID of its cgroup (version 2), or of one above it */
};

/* The process that calls connect(). */
struct caller {
	char command[CALLER_NAME_BYTES];
	__u64 cgroups[CALLER_LEVELS]; /* IDs from the root on; zeroes after the process's own */
};

#endif
