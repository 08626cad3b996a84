// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Bounds the packets that are under way: what is one too many is not sent, and its sender hears of it as of a full queue. In
 * front of `number`, so that what is not sent has no number, and of a function that acknowledges.
 *
 * What has come behind a gap is not under way any more. How far it may be behind a gap is bounded by what acknowledgements tell.
 */
#include "graft_packet.h"

struct window_config {
	__u32 packets;
};

SEC(".rodata.config")
const volatile struct window_config config = {
	.packets = 128,
};

#define TRIES 8			 /* of CPUs that send at the same time */
#define SPAN  (GRAFT_WINDOW / 2) /* from the first packet that has not come to the next one */

static __always_inline __u32 bound(const struct graft_work *work)
{
	__u32 packets = config.packets;

	return work->limit && work->limit < packets ? work->limit : packets;
}

/* Draws a number. Not 0: as much is under way as may be, here or by what the receiver has room for. */
static __always_inline int draw(struct graft_shared *shared, struct graft_work *work)
{
	__u32 packets = bound(work);

	for (int i = 0; i < TRIES; i++) {
		__u32 number = *(volatile __u32 *)&shared->next;

		if (number - shared->delivered >= packets || number - shared->acked >= SPAN ||
		    (shared->room && graft_not_before(number, shared->room)))
			return -1;
		if (__sync_val_compare_and_swap(&shared->next, number, number + 1) == number) {
			work->number = number;
			work->is_numbered = 1;
			return 0;
		}
	}
	return -1;
}

SEC("tcx/egress")
int window_tx(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_TX);
	struct graft_shared *shared;

	if (!work)
		return GRAFT_PASS_tx;
	shared = graft_shared(work);
	if (shared && draw(shared, work)) {
		/* Room that comes now is told of; what has come before that is seen here. */
		__sync_lock_test_and_set(&shared->refused, bound(work));
		if (draw(shared, work))
			return graft_done(skb, tx, work, GRAFT_WINDOW_FULL);
	}
	return graft_next(skb, tx, work);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
