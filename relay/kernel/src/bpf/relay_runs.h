/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A fan-out that takes several runs of the program: fan_runs.h, and what the relay adds to it.
 *
 * The packet goes up to userspace from its last run. So whoever sees it there finds registered what it became.
 */
#ifndef MILLRACE_RELAY_RUNS_H
#define MILLRACE_RELAY_RUNS_H

#include "relay_maps.h"

/* Queues the packet for another run. Not 0: it has none, and is as it was. */
static __noinline int put_back(struct __sk_buff *skb, struct work *work)
{
	struct cursor_kept kept = {
		.number = work->cursor.kept.number,
		.traced_ns = work->arrival.traced_ns,
		.good = work->fan.good,
		.chunk = work->fan.chunk,
		.opens = work->fan.opens,
	};

	return queue_again(skb, &work->cursor, work->fan.egress, &kept, config.max_runs);
}

/* What a run after the first one is counted as. */
static __noinline enum relay_further_run further_run(enum relay_outcome outcome)
{
	return outcome == RELAY_FORWARDED   ? RELAY_RUN_LAST
	       : outcome == RELAY_CONTINUED ? RELAY_RUN_CONTINUED
					    : RELAY_RUN_LEFT;
}

#endif
