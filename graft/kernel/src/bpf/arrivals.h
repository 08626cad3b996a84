/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Tracks packets between XDP, which marks them as received, and TC, which delivers them. The kernel may queue
 * packets between the two hooks. A queued packet is not acknowledged; if the kernel drops it, it counts as
 * not received. Packets of one interface reach TC in the order in which XDP accepted them. Packets of
 * different interfaces (paths) may overtake each other.
 */
#ifndef MILLRACE_ARRIVALS_H
#define MILLRACE_ARRIVALS_H

#include "graft_packet.h"

/* Ring of packets that XDP accepted and TC has not delivered yet. XDP takes the next index from `let_in` and
 * fills that entry. TC clears the entry in `places`, and moves `passed` beyond cleared entries. Several CPUs
 * do this at once, so `let_in` grows atomically and `passed` moves by compare-and-swap.
 */
struct arrivals {
	__u32 let_in; /* index of the next ring entry that XDP fills, before reduction to the ring's size */
	__u32 passed; /* index of the oldest ring entry that is still in use */
	__u32 newest; /* one more than the newest packet number that TC has seen */
	/* All packets below this number were acknowledged, so the sender does not send them again. */
	__u32 told;
	__u32 numbers[GRAFT_WINDOW]; /* packet number of each entry of the ring */
	/* interface at which the packet of each ring entry arrived; 0: the entry is cleared (delivered or lost) */
	__u16 places[GRAFT_WINDOW];
	/* time at which XDP accepted the packet of each ring entry, in units of 2^24 ns (17 ms) */
	__u16 times[GRAFT_WINDOW];
};

#define ARRIVALS_TICK_SHIFT 24 /* one tick is 2^24 ns, 17 ms */
/* one second after XDP accepted a packet, it counts as lost if TC has not seen it */
#define ARRIVALS_TICKS_MOST 60

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

	/* If XDP has accepted more packets than the ring holds before TC delivered any, the oldest entries were
	 * overwritten.
	 */
	return waiting > GRAFT_WINDOW ? GRAFT_WINDOW : waiting;
}

/* Marks a packet as not received, so that it is requested and may arrive again. If an acknowledgement has covered it, the
 * packet had been given up before it arrived. It is given up again, since the sender has no use for a request.
 */
static __always_inline void take_back(const struct arrivals *arrivals, struct graft_shared *shared,
				      __u32 number)
{
	__u64 *seen = &shared->seen[number % GRAFT_WINDOW], mark = GRAFT_SEEN | number;
	int may_return = graft_not_before(number, arrivals->told);

	if (__sync_val_compare_and_swap(seen, mark, may_return ? 0 : GRAFT_GIVEN_UP | number) == mark &&
	    may_return)
		graft_move(&shared->complete, number, 1);
}

/* State of a search through the ring for the packet that has just reached TC. Another CPU may search for a packet of
 * another interface at the same time.
 */
struct arrival {
	struct arrivals *arrivals;
	struct graft_shared *shared;
	__u32 first;
	__u32 number;
	__u16 place;
	__u16 now;
	__u32 turn;
	__u32 is_found;
	__u32 is_refused;
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

/* Marks earlier packets of the found packet's interface as not received: the kernel dropped them between XDP
 * and TC.
 */
static long arrivals_lose(__u32 index, struct arrival *arrival)
{
	struct arrivals *arrivals = arrival->arrivals;
	__u32 turn = arrival->first + index, at = turn % GRAFT_WINDOW;

	if (arrivals->places[at] == arrival->place) {
		/* The packet itself has reached TC; only the earlier packets of its interface are lost. They are taken
		 * back while the ring has them, so that no acknowledgement of another CPU covers them.
		 */
		if (turn != arrival->turn || arrival->is_refused)
			take_back(arrivals, arrival->shared, arrivals->numbers[at]);
		arrivals->places[at] = 0;
	}
	return turn == arrival->turn;
}

/* Removes cleared entries from the front of the ring. A packet that waited for a second counts as lost. */
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
		take_back(arrivals, arrival->shared, arrivals->numbers[at]);
		arrivals->places[at] = 0;
	}
	__sync_val_compare_and_swap(&arrivals->passed, turn, turn + 1);
	return 0;
}

/* Notes that a packet has reached TC. Earlier packets of the same interface that have not reached TC are
 * counted as lost. If the packet `is_refused`, it counts as not received, too, and may arrive again.
 */
static __always_inline void arrivals_pass(struct arrivals *arrivals, struct graft_shared *shared,
					  const struct graft_work *work, __u32 ifindex, int is_refused)
{
	__u32 number = work->number;
	struct arrival arrival = {.arrivals = arrivals,
				  .shared = shared,
				  .number = number,
				  .place = arrivals_place(ifindex),
				  .is_refused = is_refused,
				  .now = arrivals_time(work->now_ns)};

	/* XDP may have overwritten ring entries of packets that TC has not seen yet. The search begins after these
	 * entries.
	 */
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
	if (!arrival.is_found && is_refused)
		take_back(arrivals, shared, number);
	/* The packet was counted as lost too early, or the XDP program was not attached: mark it as received
	 * now.
	 */
	else if (!arrival.is_found && graft_is_missing(shared, number) &&
		 graft_not_before(number, shared->newest - GRAFT_WINDOW))
		shared->seen[number % GRAFT_WINDOW] = GRAFT_SEEN | number;
	if (graft_not_before(number, arrivals->newest))
		arrivals->newest = number + 1;
}

#endif
