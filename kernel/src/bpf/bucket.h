/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Token buckets. A bucket is stored as the time when it will be full again, in ticks modulo 2^64. Ticks wrap around
 * after 9 years, and a host may run for longer, so times are only compared by differences. This file is plain C, so
 * that it also runs natively, with any time.
 */
#ifndef MILLRACE_BUCKET_H
#define MILLRACE_BUCKET_H

#include "bucket_intf.h"
#include "util.h"

#define CONTENDED_ATTEMPTS 8 /* attempts to change a bucket; one fails if another CPU changes it first */

/* Largest difference between the clocks of two CPUs, in ticks. If a bucket's time is ahead of the present time by
 * more than the bucket's burst and this value together, the time lies in the past instead: the difference has
 * wrapped around. The bucket is then full.
 */
#define BUCKET_SLACK (1000000000ULL * BUCKET_TICKS)

/* Returns the price in ticks of `units` in the bucket of a network whose rate is `times` the rate of one client. The
 * bucket has the same burst in ticks as a client's, so it fills in the same time.
 */
static __always_inline __u64 price_of(const struct bucket_rate *rate, __u64 units, __u64 times)
{
	return units * rate->cost / times;
}

/* Returns the time when a bucket will be full after `price` is taken from it. Before that, it would be full at
 * `full_at`. Sets `over` to 1 if the bucket contains less than the price, else to 0.
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

/* Returns the time when a new bucket will be full. The bucket begins with a content of twice `price`, or is full from
 * the beginning if its burst is smaller.
 */
static __always_inline __u64 bucket_with_two(__u64 burst, __u64 price, __u64 now_ns)
{
	return now_ns * BUCKET_TICKS + (burst > 2 * price ? burst - 2 * price : 0);
}

/* Takes `price` from a token bucket. Returns not 0 if the bucket has too little; then nothing is taken. An empty bucket
 * is only read, so that CPUs do not contend for its cache line in a flood.
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
	return 0; /* other CPUs changed the bucket at every attempt: the packet passes without a charge */
}

/* Takes `units` from a client's bucket. Returns not 0 if the bucket has too little. */
static __always_inline int is_over_at(__u64 *full_at, const struct bucket_rate *rate, __u64 units,
				      __u64 now_ns)
{
	return takes_too_much(full_at, rate->burst, price_of(rate, units, 1), now_ns);
}

#endif
