// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The root program of an interface at XDP. The kernel allows only one XDP program for each interface, so the root calls
 * the gate and the graft one after the other:
 *
 *   root_xdp -> root_slots[gate] = root_turn -> mine[0] = gate_xdp -> (what passes) root_rest
 *            -> root_slots[graft] = root_turn -> mine[0] = packet_rx
 *
 * Every process loads its own root_turn, with a map `mine`. No other process has a descriptor of it. When the
 * process ends, also if it is killed, the kernel empties the map, and packets go on to the program of the
 * next slot. All processes have descriptors of `root_slots` and of the link of root_xdp, so these exist until
 * the last process ends.
 */
#include "util.h"
#include "root_intf.h"

SEC(".rodata.config")
const volatile struct root_config config;

BPF_MAP(PROG_ARRAY, root_slots, enum root_slot, __u32, ROOT_SLOTS);

BPF_MAP(PROG_ARRAY, mine, __u32, __u32, 1);

SEC("xdp.frags")
int root_xdp(struct xdp_md *ctx)
{
	/* A tail call returns only if this entry of the program array is empty. */
	bpf_tail_call(ctx, &root_slots, ROOT_GATE);
	bpf_tail_call(ctx, &root_slots, ROOT_GRAFT);
	return XDP_PASS;
}

/* Calls the program of the next slot, if there is one. */
static __always_inline int rest(struct xdp_md *ctx)
{
	if (config.slot < ROOT_GRAFT)
		bpf_tail_call(ctx, &root_slots, ROOT_GRAFT);
	return XDP_PASS;
}

SEC("xdp.frags")
int root_turn(struct xdp_md *ctx)
{
	bpf_tail_call(ctx, &mine, 0);
	return rest(ctx);
}

/* The gate's program ends with a tail call of this program, for packets that it lets pass. */
SEC("xdp.frags")
int root_rest(struct xdp_md *ctx)
{
	return rest(ctx);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
