/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Helpers for all programs. The header also compiles natively. */
#ifndef MILLRACE_UTIL_H
#define MILLRACE_UTIL_H

#include "bpf_map.h"

/* The verdict of a TC program that passes the packet on to the next program: TCX_NEXT for TCX, TC_ACT_UNSPEC for
 * clsact.
 */
#define PASS_ON -1

#define READ_ONCE(x)	 (*(const volatile typeof(x) *)&(x))
#define WRITE_ONCE(x, y) (*(volatile typeof(x) *)&(x) = (y))

/* Makes clang forget the value of a number. Otherwise clang may merge two bounds checks, or check a copy of the number
 * in another register. The verifier then lacks a bound that it needs.
 */
#define OPAQUE(number) asm volatile("" : "+r"(number))

/* Returns the same number, in a form that shows every kernel's verifier that it is from 1 to `most`. The caller must
 * have checked these bounds before. `most` must be a power of two.
 */
#define BOUNDED(bytes, most)                    \
	({                                      \
		__u32 less_one_ = (bytes) - 1;  \
                                                \
		OPAQUE(less_one_);              \
		(less_one_ & ((most) - 1)) + 1; \
	})

/* Adds to a counter of this CPU, in a per-CPU array of u64. */
static __always_inline void add_to(void *counters, __u32 index, __u64 amount)
{
	__u64 *counter = bpf_map_lookup_elem(counters, &index);

	if (counter)
		*counter += amount;
}

#endif
