/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Two lists of rules in one map: one is in force while userspace writes the next one to the other half. `in_force`
 * holds the index at which the list in force begins: 0, or `most`, the largest number of rules in a list. Userspace
 * switches lists with one write to `in_force`.
 */
#ifndef MILLRACE_RULE_LISTS_H
#define MILLRACE_RULE_LISTS_H

#include "util.h"

#define RULE_LISTS(rule, most)                          \
	BPF_MAP(ARRAY, rules, __u32, rule, 2 * (most)); \
	BPF_MAP(ARRAY, in_force, __u32, __u32, 1)

#endif
