/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Between XDP, which notes that a packet has come, and TC, which passes it on, there may be a batch of packets, or a queue: they are
 * not acknowledged yet, and what is lost there has not come after all. They come to TC in the turn in which XDP let them in.
 */
#ifndef MILLRACE_ARRIVALS_H
#define MILLRACE_ARRIVALS_H

#include "graft_packet.h"

struct arrivals {
	__u32 let_in; /* turns that XDP has given */
	__u32 passed; /* the first turn that TC has not seen */
	__u32 newest; /* one more than the newest number that TC has seen */
	__u32 pad;
	__u32 numbers[GRAFT_WINDOW]; /* by turn */
};

static __always_inline void arrivals_let_in(struct arrivals *arrivals, __u32 number)
{
	__u32 turn = __sync_fetch_and_add(&arrivals->let_in, 1);

	arrivals->numbers[turn % GRAFT_WINDOW] = number;
}

static __always_inline __u32 arrivals_waiting(const struct arrivals *arrivals)
{
	__u32 waiting = arrivals->let_in - arrivals->passed;

	return waiting > GRAFT_WINDOW ? GRAFT_WINDOW : waiting;
}

/* It has not come: it is asked for, and may come again. */
static __always_inline void take_back(struct graft_shared *shared, __u32 number)
{
	__u64 *seen = &shared->seen[number % GRAFT_WINDOW], mark = GRAFT_SEEN | number;

	if (__sync_val_compare_and_swap(seen, mark, 0) == mark && !graft_not_before(number, shared->complete))
		shared->complete = number;
}

struct arrival {
	struct arrivals *arrivals;
	struct graft_shared *shared;
	__u32 number;
	__u32 turn;
	__u32 is_found;
};

static long arrivals_look(__u32 index, struct arrival *arrival)
{
	__u32 turn = arrival->arrivals->passed + index;

	if (turn == arrival->arrivals->let_in)
		return 1;
	arrival->turn = turn;
	arrival->is_found = arrival->arrivals->numbers[turn % GRAFT_WINDOW] == arrival->number;
	return arrival->is_found;
}

static long arrivals_lose(__u32 index, struct arrival *arrival)
{
	struct arrivals *arrivals = arrival->arrivals;

	if (arrivals->passed == arrival->turn)
		return 1;
	take_back(arrival->shared, arrivals->numbers[arrivals->passed % GRAFT_WINDOW]);
	arrivals->passed++;
	return 0;
}

/* At TC. Those whose turn was before have been lost on the way. */
static __always_inline void arrivals_pass(struct arrivals *arrivals, struct graft_shared *shared,
					  __u32 number)
{
	struct arrival arrival = {.arrivals = arrivals, .shared = shared, .number = number};

	if (arrivals->let_in - arrivals->passed > GRAFT_WINDOW)
		arrivals->passed = arrivals->let_in - GRAFT_WINDOW;
	bpf_loop(GRAFT_WINDOW, arrivals_look, &arrival, 0);
	if (arrival.is_found) {
		bpf_loop(GRAFT_WINDOW, arrivals_lose, &arrival, 0);
		arrivals->passed++;
	} else if (graft_is_missing(shared, number) &&
		   graft_not_before(number, shared->newest - GRAFT_WINDOW)) {
		/* It was believed to be lost, or XDP's program was not there. */
		shared->seen[number % GRAFT_WINDOW] = GRAFT_SEEN | number;
	}
	if (graft_not_before(number, arrivals->newest))
		arrivals->newest = number + 1;
}

#endif
