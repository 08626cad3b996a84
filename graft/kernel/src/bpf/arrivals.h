/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Between XDP, which notes that a packet has come, and TC, which passes it on, there may be a batch of packets, or a queue: they are
 * not acknowledged yet, and what is lost there has not come after all. Those of one interface come to TC in the turn in which XDP let
 * them in; those of another, by which the session may have another path, come when they come.
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
	__u16 places[GRAFT_WINDOW];  /* the interface; 0: TC has seen it, or it is lost */
	__u16 times[GRAFT_WINDOW];   /* when, in ARRIVALS_TICK */
};

#define ARRIVALS_TICK_SHIFT 24 /* of ns: 17 ms */
#define ARRIVALS_TICKS_MOST 60 /* a second: nothing is between XDP and TC for so long */

static __always_inline __u16 arrivals_place(__u32 ifindex)
{
	return ifindex | 0x8000;
}

static __always_inline __u16 arrivals_time(__u64 now_ns)
{
	return now_ns >> ARRIVALS_TICK_SHIFT;
}

static __always_inline void arrivals_let_in(struct arrivals *arrivals, const struct graft_work *work,
					    __u32 ifindex)
{
	__u32 at = __sync_fetch_and_add(&arrivals->let_in, 1) % GRAFT_WINDOW;

	arrivals->numbers[at] = work->number;
	arrivals->times[at] = arrivals_time(work->now_ns);
	arrivals->places[at] = arrivals_place(ifindex);
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

/* A look at those that wait, from the first one on. Meanwhile another CPU may have its own, for another interface. */
struct arrival {
	struct arrivals *arrivals;
	struct graft_shared *shared;
	__u32 first;
	__u32 number;
	__u16 place;
	__u16 now;
	__u32 turn;
	__u32 is_found;
};

static long arrivals_look(__u32 index, struct arrival *arrival)
{
	const struct arrivals *arrivals = arrival->arrivals;
	__u32 turn = arrival->first + index, at = turn % GRAFT_WINDOW;

	if (turn == arrivals->let_in)
		return 1;
	arrival->turn = turn;
	arrival->is_found =
		arrivals->numbers[at] == arrival->number && arrivals->places[at] == arrival->place;
	return arrival->is_found;
}

/* Those of the same interface are lost, up to the one that was found. */
static long arrivals_lose(__u32 index, struct arrival *arrival)
{
	struct arrivals *arrivals = arrival->arrivals;
	__u32 turn = arrival->first + index, at = turn % GRAFT_WINDOW;

	if (arrivals->places[at] == arrival->place) {
		arrivals->places[at] = 0;
		if (turn != arrival->turn)
			take_back(arrival->shared, arrivals->numbers[at]);
	}
	return turn == arrival->turn;
}

/* Of which nothing is to be said any more; and what has waited for too long is lost, too. */
static long arrivals_forget(__u32 index, struct arrival *arrival)
{
	struct arrivals *arrivals = arrival->arrivals;
	__u32 turn = arrival->first + index, at = turn % GRAFT_WINDOW;
	__u16 waits = arrival->now - arrivals->times[at];

	if (turn == arrivals->let_in)
		return 1;
	if (arrivals->places[at]) {
		if (waits < ARRIVALS_TICKS_MOST)
			return 1;
		arrivals->places[at] = 0;
		take_back(arrival->shared, arrivals->numbers[at]);
	}
	__sync_val_compare_and_swap(&arrivals->passed, turn, turn + 1);
	return 0;
}

/* At TC. Those whose turn was before, at the same interface, have been lost on the way. */
static __always_inline void arrivals_pass(struct arrivals *arrivals, struct graft_shared *shared,
					  const struct graft_work *work, __u32 ifindex)
{
	__u32 number = work->number;
	struct arrival arrival = {.arrivals = arrivals,
				  .shared = shared,
				  .number = number,
				  .place = arrivals_place(ifindex),
				  .now = arrivals_time(work->now_ns)};

	if (arrivals->let_in - arrivals->passed > GRAFT_WINDOW)
		arrivals->passed = arrivals->let_in - GRAFT_WINDOW;
	arrival.first = arrivals->passed;
	if (work->kind == GRAFT_DATA)
		bpf_loop(GRAFT_WINDOW, arrivals_look, &arrival, 0);
	if (arrival.is_found)
		bpf_loop(GRAFT_WINDOW, arrivals_lose, &arrival, 0);
	bpf_loop(GRAFT_WINDOW, arrivals_forget, &arrival, 0);
	if (work->kind != GRAFT_DATA)
		return;
	/* It was believed to be lost, or XDP's program was not there. */
	if (!arrival.is_found && graft_is_missing(shared, number) &&
	    graft_not_before(number, shared->newest - GRAFT_WINDOW))
		shared->seen[number % GRAFT_WINDOW] = GRAFT_SEEN | number;
	if (graft_not_before(number, arrivals->newest))
		arrivals->newest = number + 1;
}

#endif
