/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The structures of token buckets that programs share with userspace. */
#ifndef MILLRACE_BUCKET_INTF_H
#define MILLRACE_BUCKET_INTF_H

#include <linux/types.h>

#define BUCKET_TICKS 64 /* ticks per nanosecond; fine enough for the cost of a byte at 10 Gbit/s */

/* The rate of a token bucket: a unit (a packet or byte) costs `cost` ticks, and `burst` ticks may be taken at once. */
struct bucket_rate {
	__u64 cost;  /* price of one unit, in ticks */
	__u64 burst; /* content of a full bucket, in ticks */
};

#endif
