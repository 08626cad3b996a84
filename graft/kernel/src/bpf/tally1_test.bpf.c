// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Version 1 of a test function, which tests replace by version 2 in a running session. */
#include "tally.h"

TALLY_STATE(tally_v1);

SEC("xdp.frags")
int tally_rx(struct xdp_md *ctx)
{
	struct graft_work *work = graft_work(GRAFT_RX);
	struct tally_v1 *tally;
	__u32 session;

	if (!work)
		return GRAFT_PASS_rx;
	session = work->session;
	tally = bpf_map_lookup_elem(&state, &session);
	if (tally && work->kind == GRAFT_DATA)
		tally->packets++;
	return graft_next(ctx, rx, work);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
