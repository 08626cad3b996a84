/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What programs with token buckets share with userspace. */
#ifndef MILLRACE_BUCKET_INTF_H
#define MILLRACE_BUCKET_INTF_H

#include <linux/types.h>

#define BUCKET_TICKS 64 /* per nanosecond: unit of rates, fine enough for bytes at 10 Gbit/s */

/* A token bucket: every unit costs `cost`, and as much as `burst` may be taken at once. */
struct bucket_rate {
	__u64 cost;  /* ticks */
	__u64 burst; /* ticks */
};

#endif
