/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Two lists of rules in one map: one is in force while userspace writes the next one to the other half. `in_force`
 * holds the index at which the list in force begins: 0, or `most`, the largest number of rules in a list. Userspace
 * switches lists with one write to `in_force`.
 */
#ifndef MILLRACE_RULE_LISTS_H
#define MILLRACE_RULE_LISTS_H

#define RULE_LISTS(rule, most)                    \
	struct {                                  \
		__uint(type, BPF_MAP_TYPE_ARRAY); \
		__type(key, __u32);               \
		__type(value, rule);              \
		__uint(max_entries, 2 * (most));  \
	} rules SEC(".maps");                     \
	struct {                                  \
		__uint(type, BPF_MAP_TYPE_ARRAY); \
		__type(key, __u32);               \
		__type(value, __u32);             \
		__uint(max_entries, 1);           \
	} in_force SEC(".maps")

#endif
