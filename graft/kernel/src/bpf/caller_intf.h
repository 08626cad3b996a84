/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Whose connections a rule is for. Part of graft_intf.h and graft_hook_intf.h. */
#ifndef MILLRACE_CALLER_INTF_H
#define MILLRACE_CALLER_INTF_H

#include <linux/types.h>

#define CALLER_NAME_BYTES 16 /* TASK_COMM_LEN */
#define CALLER_LEVELS	  16 /* of nested cgroups that are looked at, from the root */

/* Zeroes: whoever it is. */
struct caller_wanted {
	char command[CALLER_NAME_BYTES]; /* the kernel's name of the thread that connects, zeroes behind it */
	__u64 cgroup;			 /* the id of its cgroup (version 2), or of one above */
};

/* Who connects. */
struct caller {
	char command[CALLER_NAME_BYTES];
	__u64 cgroups[CALLER_LEVELS]; /* ids, the root's first; zeroes behind its own */
};

#endif
