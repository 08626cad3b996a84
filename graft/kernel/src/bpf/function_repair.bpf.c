// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Retransmits every lost packet. In a list of functions it follows `number`. */
#include "repair.h"

SEC(".rodata.config")
const volatile struct repair_config config = {
	.retry_us = 50000,
	.tries = 10,
	.give_up_permille = 1000,
};

SEC("tcx/egress")
int repair_tx(struct __sk_buff *skb)
{
	return repair_at_tx(skb);
}

SEC("tcx/ingress")
int repair_repair(struct __sk_buff *skb)
{
	return repair_at_repair(skb, &config);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
