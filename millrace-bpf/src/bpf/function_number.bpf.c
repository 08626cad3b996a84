// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Numbers packets, and drops those that come twice. */
#include "graft_packet.h"

#define BEGINNING 64 /* numbers below it are those of a session that begins */

SEC("tcx/egress")
int number_tx(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_TX);
	struct graft_shared *shared;

	if (!work)
		return GRAFT_PASS_tx;
	shared = graft_shared(work);
	if (shared) {
		/* `window` has drawn it where it is in the list. */
		if (!work->is_numbered)
			work->number = __sync_fetch_and_add(&shared->next, 1);
		work->is_numbered = 1;
		shared->sent_ns = work->now_ns;
	}
	return graft_next(skb, tx, work);
}

/* Of several CPUs that have a newer one at the same time, one may have to try again. */
static __always_inline void advance(struct graft_shared *shared, __u32 number)
{
	for (int i = 0; i < 4; i++) {
		__u32 newest = shared->newest;

		if (!graft_not_before(number, newest) ||
		    __sync_val_compare_and_swap(&shared->newest, newest, number + 1) == newest)
			return;
	}
}

static __always_inline int has_come(struct graft_shared *shared, struct graft_work *work)
{
	__u64 *seen = &shared->seen[work->number % GRAFT_WINDOW], mark = GRAFT_SEEN | work->number;
	__u64 before = work->is_marked_later ? *seen : __sync_lock_test_and_set(seen, mark);

	work->was_given_up = before == (GRAFT_GIVEN_UP | work->number);
	return before == mark;
}

SEC("xdp.frags")
int number_rx(struct xdp_md *ctx)
{
	struct graft_work *work = graft_work(GRAFT_RX);
	struct graft_shared *shared;
	__u32 newest, number;

	if (!work)
		return GRAFT_PASS_rx;
	shared = graft_shared(work);
	if (!shared)
		return graft_next(ctx, rx, work);
	number = work->number;
	if (work->kind == GRAFT_LAST && graft_not_before(number, shared->newest))
		graft_turn(shared, number, work->epoch);
	if (work->kind != GRAFT_DATA)
		return graft_next(ctx, rx, work);
	/* This end was started later than the other one, which it does not ask for what was before. */
	if (!shared->begun && number >= BEGINNING)
		shared->complete = number;
	shared->begun = 1;
	newest = shared->newest;
	if (!graft_not_before(number, newest - GRAFT_WINDOW))
		return graft_done(ctx, rx, work, GRAFT_OLD);
	if (has_come(shared, work))
		return graft_done(ctx, rx, work, GRAFT_DUPLICATE);
	work->is_late = !graft_not_before(number, newest);
	if (!work->is_late)
		graft_turn(shared, number, work->epoch);
	advance(shared, number);
	return graft_next(ctx, rx, work);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
