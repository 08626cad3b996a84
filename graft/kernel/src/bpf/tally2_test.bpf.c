// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Version 2 of a test function. It converts the state of version 1. */
#include "tally.h"

TALLY_STATE(tally_v2);
GRAFT_OLD_STATE(tally_v1);

SEC("xdp.frags")
int tally_rx(struct xdp_md *ctx)
{
	struct graft_work *work = graft_work(GRAFT_RX);
	struct tally_v2 *tally;
	__u32 session;

	if (!work)
		return GRAFT_PASS_rx;
	session = work->session;
	tally = bpf_map_lookup_elem(&state, &session);
	if (tally && work->kind == GRAFT_DATA) {
		tally->packets++;
		tally->bytes += work->payload_bytes;
	}
	return graft_next(ctx, rx, work);
}

SEC("syscall")
int tally_migrate(struct graft_migrate_call *call)
{
	__u32 session = call->session, zero = 0;
	struct tally_v1 *old = bpf_map_lookup_elem(&old_state, &zero);
	struct tally_v2 *new = bpf_map_lookup_elem(&state, &session);

	if (old && new && call->hooks & 1 << GRAFT_RX)
		new->packets = new->moved = old->packets;
	call->error = !old || !new;
	return 0;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
