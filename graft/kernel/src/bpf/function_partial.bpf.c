// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Retransmits lost packets until their deadline. After it, lost packets are given up, but no more than a
 * bounded share of all packets. In a list of functions it follows `number`.
 */
#include "repair.h"

SEC(".rodata.config")
const volatile struct repair_config config = {
	.retry_us = 50000,
	.deadline_ms = 100,
	.give_up_permille = 20,
};

SEC("tcx/egress")
int partial_tx(struct __sk_buff *skb)
{
	return repair_at_tx(skb);
}

/* Drops packets that arrive after the receiver has given them up. */
SEC("xdp.frags")
int partial_rx(struct xdp_md *ctx)
{
	struct graft_work *work = graft_work(GRAFT_RX);

	if (!work)
		return GRAFT_PASS_rx;
	if (work->was_given_up)
		return graft_done(ctx, rx, work, GRAFT_LATE);
	return graft_next(ctx, rx, work);
}

SEC("tcx/ingress")
int partial_repair(struct __sk_buff *skb)
{
	return repair_at_repair(skb, &config);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
