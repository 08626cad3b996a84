/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The networks that an address is in: the client, and wider ones, each of which has a limit of its own. Their twin in Rust is
 * base/src/networks.rs. Plain C, so that it also runs natively; testkit/parsers/tests/parsers.rs compares the two.
 */
#ifndef MILLRACE_GATE_NETWORKS_H
#define MILLRACE_GATE_NETWORKS_H

#include "bytes.h"
#include "gate_intf.h"

static __always_inline int is_ipv4(struct bytes16 address)
{
	return !address.low && (__u32)address.high == 0xffff0000;
}

/* Leaves the network of a level that an address is in at `to`. Returns how many times as much as one client it may have; 0: there is no
 * such level.
 */
static __always_inline __u32 take_network(const volatile struct gate_levels *levels, const __u8 *from,
					  __u32 level, __u8 *to)
{
	struct bytes16 address = load128(from);
	const volatile struct gate_level *at = is_ipv4(address) ? &levels->v4[level] : &levels->v6[level];
	const volatile __u64 *mask = (const volatile __u64 *)&at->mask;

	address.low &= mask[0];
	address.high &= mask[1];
	store128(to, address);
	return at->times;
}

/* What a network may have where one client may have `of_client`: `times` as much, and no more than half of `all`. */
static __always_inline __u64 network_most(__u64 of_client, __u32 times, __u64 all)
{
	__u64 most = of_client * times, half = (all + 1) / 2;

	return most < half ? most : half;
}

#endif
