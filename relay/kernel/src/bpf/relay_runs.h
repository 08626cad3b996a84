/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Spreads a fan-out over several runs of the program, with fan_runs.h.
 *
 * The packet is passed to userspace in its last run. The program has reported all copies that it has sent by then, so
 * userspace knows what not to send.
 */
#ifndef MILLRACE_RELAY_RUNS_H
#define MILLRACE_RELAY_RUNS_H

#include "relay_maps.h"

/* Queues the packet for another run of the program. Returns an error (not 0) if that fails; the packet is then
 * unchanged.
 */
static __noinline int put_back(struct __sk_buff *skb, struct work *work)
{
	struct cursor_kept kept = {
		.number = work->cursor.kept.number,
		.traced_ns = work->arrival.traced_ns,
		.good = work->fan.good,
		.chunk = work->fan.chunk,
		.opens = work->fan.opens,
		.segment = work->super.segment,
		.begun = !work->super.segments || work->super.goes_on,
	};

	return queue_again(skb, &work->cursor, work->fan.egress, &kept, config.max_runs);
}

/* Returns the counter for the result of a program run that is not the first one for its packet.
 */
static __noinline enum relay_further_run further_run(enum relay_outcome outcome)
{
	return outcome == RELAY_FORWARDED   ? RELAY_RUN_LAST
	       : outcome == RELAY_CONTINUED ? RELAY_RUN_CONTINUED
					    : RELAY_RUN_LEFT;
}

#endif
