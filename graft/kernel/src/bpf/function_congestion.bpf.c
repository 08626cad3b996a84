// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Limits the number of packets in flight by congestion control as in TCP: it halves the congestion window after a loss,
 * and adds a packet for each round trip without a loss. In a graft's list of functions it precedes the function
 * `window`, which enforces the limit. It has no program at the receiver, since acknowledgements contain all that the
 * sender needs.
 */
#include "congestion.h"

struct congestion_config {
	__u32 initial;
};

SEC(".rodata.config")
const volatile struct congestion_config config = {
	.initial = 10,
};

BPF_MAP(ARRAY, state, __u32, struct congestion, GRAFT_SESSIONS);

SEC("tcx/egress")
int congestion_tx(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_TX);
	struct graft_shared *shared;
	struct congestion *own;
	__u32 session;

	if (!work)
		return GRAFT_PASS_tx;
	session = work->session;
	shared = graft_shared(work);
	own = bpf_map_lookup_elem(&state, &session);
	if (shared && own)
		work->limit = congestion_look(own, shared, config.initial, bpf_ktime_get_ns());
	return graft_next(skb, tx, work);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
