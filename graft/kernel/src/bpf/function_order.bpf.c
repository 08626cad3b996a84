// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Drops packets that arrive after a newer one, for applications to which outdated data is useless. In a list
 * of functions it follows `number`.
 */
#include "graft_packet.h"

SEC("xdp.frags")
int order_rx(struct xdp_md *ctx)
{
	struct graft_work *work = graft_work(GRAFT_RX);

	if (!work)
		return GRAFT_PASS_rx;
	if (work->is_late)
		return graft_done(ctx, rx, work, GRAFT_LATE);
	return graft_next(ctx, rx, work);
}

/* Drops a packet that an earlier function has recovered at TC ingress, if a newer packet arrived before it.
 */
SEC("tcx/ingress")
int order_repair(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_REPAIR);

	if (!work)
		return GRAFT_PASS_repair;
	if (work->is_late)
		return graft_done(skb, repair, work, GRAFT_LATE);
	return graft_next(skb, repair, work);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
