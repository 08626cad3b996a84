/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Token buckets. A bucket is stored as the time when it will be full again, in ticks modulo 2^64.
 * These take 9 years to wrap around, and a host may run for longer. Plain C, so that it also runs
 * natively, with any time.
 */
#ifndef MILLRACE_BUCKET_H
#define MILLRACE_BUCKET_H

#include "bucket_intf.h"
#include "util.h"

#define CONTENDED_ATTEMPTS 8 /* attempts to change a word or an entry that other CPUs change too */

/* Largest difference between CPUs' clocks: a bucket that is due to be full later than its burst
 * takes was in fact full long ago.
 */
#define BUCKET_SLACK (1000000000ULL * BUCKET_TICKS)

/* Returns the price of `units` in the bucket of a network that may have `times` as much as one
 * client. That bucket fills in the same time.
 */
static __always_inline __u64 price_of(const struct bucket_rate *rate, __u64 units, __u64 times)
{
	return units * rate->cost / times;
}

/* Returns when the bucket that was to be full at `full_at` will be full after paying `price`. Sets
 * `over` if it has too little.
 */
static __always_inline __u64 bucket_after(__u64 full_at, __u64 burst, __u64 price, __u64 now, int *over)
{
	__u64 ahead = full_at - now;

	if (ahead > burst + BUCKET_SLACK)
		ahead = 0;
	ahead += price;
	*over = ahead > burst;
	return now + ahead;
}

/* Returns when a new bucket will be full that begins with room for two of `price`, or full if that
 * is more.
 */
static __always_inline __u64 bucket_with_two(__u64 burst, __u64 price, __u64 now_ns)
{
	return now_ns * BUCKET_TICKS + (burst > 2 * price ? burst - 2 * price : 0);
}

/* Takes from a token bucket. Returns not 0 if it has too little, and takes nothing then. An empty
 * bucket is only read, so that CPUs do not contend for it in a flood.
 */
static __always_inline int takes_too_much(__u64 *full_at, __u64 burst, __u64 price, __u64 now_ns)
{
	__u64 now = now_ns * BUCKET_TICKS;

	for (int i = 0; i < CONTENDED_ATTEMPTS; i++) {
		__u64 old = READ_ONCE(*full_at);
		int over;
		__u64 next = bucket_after(old, burst, price, now, &over);

		if (over)
			return 1;
		if (__sync_val_compare_and_swap(full_at, old, next) == old)
			return 0;
	}
	return 0; /* so many others passed in the meantime that one more hardly matters */
}

static __always_inline int is_over_at(__u64 *full_at, const struct bucket_rate *rate, __u64 units,
				      __u64 now_ns)
{
	return takes_too_much(full_at, rate->burst, price_of(rate, units, 1), now_ns);
}

#endif
