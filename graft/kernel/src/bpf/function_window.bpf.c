// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Bounds the packets in flight: further packets are not sent, and the application's send call fails as with a
 * full queue. In a list of functions it precedes `number`, so that a refused packet has no packet number, and
 * functions that acknowledge.
 *
 * A packet that was received although an earlier one is missing no longer counts as in flight. Its number may be at
 * most SPAN above that of the missing packet, which is what an acknowledgement's bitmap covers.
 */
#include "graft_packet.h"

struct window_config {
	__u32 packets;
};

SEC(".rodata.config")
const volatile struct window_config config = {
	.packets = 128,
};

/* largest distance from the number of the first unacknowledged packet to the number of the next packet */
#define SPAN (GRAFT_WINDOW / 2)

static __always_inline __u32 bound(const struct graft_work *work)
{
	__u32 packets = config.packets;

	return work->limit && work->limit < packets ? work->limit : packets;
}

/* Assigns the next packet number. Returns not 0 if that would exceed the limit of packets in flight or the receiver's
 * buffer space.
 */
static __always_inline int draw(struct graft_shared *shared, struct graft_work *work)
{
	__u32 packets = bound(work);

	for (int i = 0; i < GRAFT_TRIES; i++) {
		__u32 number = *(volatile __u32 *)&shared->next;

		if (number - shared->delivered >= packets || number - shared->acked >= SPAN ||
		    (shared->room && graft_not_before(number, shared->room)))
			return -1;
		if (graft_number(shared, work, number))
			return 0;
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
		/* Setting `refused` requests a notification when the window has space again. If an acknowledgement made
		 * space just before that, no notification would follow, so draw() is tried once more.
		 */
		__sync_lock_test_and_set(&shared->refused, bound(work));
		if (draw(shared, work))
			return graft_done(skb, tx, work, GRAFT_WINDOW_FULL);
	}
	return graft_next(skb, tx, work);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
