/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The networks that contain a client's address, from the client's own prefix to wider ones. Each network has rate
 * limits of its own. base/src/networks.rs has the same code in Rust. This file is plain C, so that it also runs
 * natively: testkit/parsers/tests/parsers.rs compares both.
 */
#ifndef MILLRACE_GATE_NETWORKS_H
#define MILLRACE_GATE_NETWORKS_H

#include "bytes.h"
#include "gate_intf.h"

/* Reports whether the address is IPv4-mapped (::ffff:a.b.c.d). The address consists of words as a little-endian machine
 * loads them.
 */
static __always_inline int is_ipv4(struct bytes16 address)
{
	return !address.low && (__u32)address.high == 0xffff0000;
}

/* Writes to `to` the network that contains the address; `level` is the index of the network's prefix length. Returns
 * the network's limit as a multiple of one client's limit, or 0 if networks of this length have no limit.
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

/* Returns the limit of a network: `times` the limit of one client, which is `of_client`, but at most half of `all`, the
 * limit of all clients together.
 */
static __always_inline __u64 network_most(__u64 of_client, __u32 times, __u64 all)
{
	__u64 most = of_client * times, half = (all + 1) / 2;

	return most < half ? most : half;
}

#endif
