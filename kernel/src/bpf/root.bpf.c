// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* What an interface runs at XDP: an interface has room for one program, and gate and graft take turns in it.
 *
 *   root_xdp -> root_slots[gate] = root_turn -> mine[0] = gate_xdp -> (what passes) root_rest
 *            -> root_slots[graft] = root_turn -> mine[0] = joint_rx
 *
 * Every process loads root_turn anew, with a map `mine` that only it has a descriptor of: the kernel empties it when the last
 * descriptor is closed, so also when the process is killed, and packets go on to whoever is next. `root_slots` and the link
 * that holds root_xdp are shared by descriptor: they last until the last process is gone.
 */
#include "util.h"
#include "root_intf.h"

SEC(".rodata.config")
const volatile struct root_config config;

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, ROOT_SLOTS);
	__type(key, enum root_slot);
	__type(value, __u32);
} root_slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} mine SEC(".maps");

SEC("xdp.frags")
int root_xdp(struct xdp_md *ctx)
{
	bpf_tail_call(ctx, &root_slots, ROOT_GATE);
	bpf_tail_call(ctx, &root_slots, ROOT_GRAFT);
	return XDP_PASS;
}

/* Everybody's turn after one's own. */
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

/* What passes goes on here. */
SEC("xdp.frags")
int root_rest(struct xdp_md *ctx)
{
	return rest(ctx);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
