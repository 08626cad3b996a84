// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The root program of an interface at XDP, which has room for one program: gate and graft take turns in it.
 *
 *   root_xdp -> root_slots[gate] = root_turn -> mine[0] = gate_xdp -> (what passes) root_rest
 *            -> root_slots[graft] = root_turn -> mine[0] = packet_rx
 *
 * Every process loads a root_turn of its own, with a map `mine` that only it has a descriptor of. The kernel
 * empties the map when the last descriptor is closed, also if the process is killed, and packets go on to the
 * next turn. `root_slots` and the link that holds root_xdp are shared by descriptor: they last until the last
 * process is gone.
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

/* Passes the packet to the programs whose turns come later. */
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

/* Continues with packets that the previous turn passed. */
SEC("xdp.frags")
int root_rest(struct xdp_md *ctx)
{
	return rest(ctx);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
