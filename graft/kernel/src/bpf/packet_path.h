/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The paths of a session: address pairs, each with an interface, that replace the session's own pair on the
 * wire. Addresses are replaced after everything else when a packet is sent, and restored first when it
 * arrives, so that all other code sees the session's own pair. Ports do not change. The daemon sets a weight
 * for each path. These programs count packets sent by each path, and authentic packets received by it.
 */
#ifndef MILLRACE_PACKET_PATH_H
#define MILLRACE_PACKET_PATH_H

#include "graft_packet.h"
#include "packet_frame.h"
#include "packet_intf.h"
#include "skb_udp.h"
#include <linux/pkt_cls.h>

/* largest number of sessions with several network paths; unlike maps with GRAFT_SESSIONS entries, the maps of this size
 * are not resized when the BPF objects are loaded
 */
#define PATH_SESSIONS 100

/* by the index of the session */
BPF_MAP(HASH, paths, __u32, struct packet_paths, PATH_SESSIONS);

/* by the index of the session */
BPF_MAP(HASH, path_counts, __u32, struct packet_path_counts, PATH_SESSIONS);

/* Finds the session and the path of a packet by the addresses that the path has on the wire. */
BPF_MAP(HASH, path_keys, struct packet_key, struct packet_path_in, PATH_SESSIONS *PACKET_PATHS);

struct path_addresses {
	__u8 bytes[32]; /* source and destination as in the IP header; 8 bytes for IPv4 */
};

static __always_inline __u32 path_addresses_at(const struct graft_work *work)
{
	return work->ip_at + (work->family == 4 ? __builtin_offsetof(struct iphdr, saddr)
						: __builtin_offsetof(struct ipv6hdr, saddr));
}

static __always_inline void path_put_addresses(struct path_addresses *addresses, __u8 family,
					       const __u8 source[16], const __u8 destination[16])
{
	__builtin_memset(addresses, 0, sizeof(*addresses));
	if (family == 4) {
		__builtin_memcpy(addresses->bytes, source, 4);
		__builtin_memcpy(addresses->bytes + 4, destination, 4);
	} else {
		__builtin_memcpy(addresses->bytes, source, 16);
		__builtin_memcpy(addresses->bytes + 16, destination, 16);
	}
}

/* Returns the value to add to a checksum when addresses are replaced by new ones. */
static __always_inline __u32 path_change(const struct path_addresses *old, const struct path_addresses *new)
{
	return bpf_csum_diff((__be32 *)old->bytes, sizeof(old->bytes), (__be32 *)new->bytes,
			     sizeof(new->bytes), 0);
}

static __always_inline struct packet_path_counts *path_counts_of(__u32 session)
{
	return bpf_map_lookup_elem(&path_counts, &session);
}

/* --- Outgoing packets --- */

/* Returns the number of the path for the next packet. Paths are used in turn, each as often as its weight. */
static __always_inline __u32 path_next(const struct packet_paths *of, struct packet_path_counts *counts)
{
	__u32 all = 0, turn;

	for (int i = 0; i < PACKET_PATHS; i++)
		all += of->each[i].weight;
	/* If no path has a weight, the first path gets all packets. */
	if (!all)
		return 0;
	/* All CPUs advance the same counter, so the weights apply to the packets of all CPUs together. */
	turn = __sync_fetch_and_add(&counts->turn, 1) % all;
	for (int i = 0; i < PACKET_PATHS; i++) {
		if (turn < of->each[i].weight)
			return i;
		turn -= of->each[i].weight;
	}
	return 0;
}

static __noinline int path_rewrite(struct __sk_buff *skb, const struct graft_work *work,
				   const struct packet_path *path)
{
	__u32 at = path_addresses_at(work), bytes = work->family == 4 ? 8 : 32, change;
	struct path_addresses old = {}, new;

	if (!path)
		return -1;
	path_put_addresses(&new, work->family, path->local, path->remote);
	if (bytes == 8 ? bpf_skb_load_bytes(skb, at, old.bytes, 8)
		       : bpf_skb_load_bytes(skb, at, old.bytes, 32))
		return -1;
	change = path_change(&old, &new);
	if (bytes == 8 ? bpf_skb_store_bytes(skb, at, new.bytes, 8, 0)
		       : bpf_skb_store_bytes(skb, at, new.bytes, 32, 0))
		return -1;
	if (bytes == 8 &&
	    bpf_l3_csum_replace(skb, work->ip_at + __builtin_offsetof(struct iphdr, check), 0, change, 0))
		return -1;
	return bpf_l4_csum_replace(skb, CHECK_AT(work), 0, change, BPF_F_PSEUDO_HDR | BPF_F_MARK_MANGLED_0);
}

/* Returns whether the packet plus `more` bytes exceeds the MTU of any of the session's paths. All paths are
 * checked, since the next packet may use any of them.
 */
static __noinline int path_is_too_narrow(struct __sk_buff *skb, __u32 session, __u32 more)
{
	struct packet_paths *of = bpf_map_lookup_elem(&paths, &session);
	__u32 mtu;

	if (!of)
		return 0;
	for (int i = 0; i < PACKET_PATHS; i++) {
		mtu = 0;
		if (of->each[i].ifindex && bpf_check_mtu(skb, of->each[i].ifindex, &mtu, more, 0) > 0)
			return 1;
	}
	return 0;
}

/* Sends a packet by the network path with this number, and returns the TC verdict. A packet whose addresses and
 * interface do not change is passed. Others are redirected with the packet mark `passing`, so that packet_tx passes
 * them.
 */
static __always_inline int path_leave(struct __sk_buff *skb, const struct graft_work *work, __u32 session,
				      __u32 number, __u32 passing)
{
	struct packet_paths *of = bpf_map_lookup_elem(&paths, &session);
	struct packet_path_counts *counts = path_counts_of(session);
	struct packet_path *path;

	if (!of || !counts || number >= PACKET_PATHS)
		return TC_ACT_SHOT;
	/* The path's number is bounded again, since the verifier of Linux 6.1 forgets the comparison above.
	 */
	OPAQUE(number);
	number &= PACKET_PATHS - 1;
	path = &of->each[number];
	if (!path->ifindex)
		return TC_ACT_SHOT;
	__sync_fetch_and_add(&counts->sent[number], 1);
	if (!number && path->ifindex == skb->ifindex)
		return PASS_ON;
	if (number && path_rewrite(skb, work, path))
		return TC_ACT_SHOT;
	skb->mark = passing;
	/* The kernel finds the next hop and its link address for the new destination. */
	return bpf_redirect_neigh(path->ifindex, NULL, 0, 0);
}

/* Sends copies of a packet by all network paths of the session except path `but`. */
static __always_inline void path_copy(struct __sk_buff *skb, const struct packet_paths *of, __u32 but,
				      __u32 mark)
{
	for (__u32 i = 0; i < PACKET_PATHS; i++) {
		if (i == but || !of->each[i].ifindex)
			continue;
		skb->mark = mark + i;
		bpf_clone_redirect(skb, skb->ifindex, 0);
	}
	skb->mark = 0;
}

/* Sends a packet by the next path according to the weights. If paths are redundant, copies are sent by all
 * other paths.
 */
static __always_inline int path_out(struct __sk_buff *skb, const struct graft_work *work, __u32 session,
				    __u32 mark)
{
	struct packet_paths *of = bpf_map_lookup_elem(&paths, &session);
	struct packet_path_counts *counts = path_counts_of(session);
	__u32 number;

	if (!of || !counts)
		return TC_ACT_SHOT;
	number = path_next(of, counts);
	if (of->is_redundant)
		path_copy(skb, of, number, mark);
	return path_leave(skb, work, session, number, mark + PACKET_PATHS);
}

/* --- Incoming packets --- */

static __noinline int path_restore(struct xdp_md *ctx, const struct graft_work *work,
				   const struct packet_path_in *in)
{
	__u32 at = path_addresses_at(work), change;
	struct path_addresses old = {}, new;
	__u16 check;

	if (!in)
		return -1;
	path_put_addresses(&new, work->family, in->session.remote, in->session.local);
	if (work->family == 4 ? bpf_xdp_load_bytes(ctx, at, old.bytes, 8)
			      : bpf_xdp_load_bytes(ctx, at, old.bytes, 32))
		return -1;
	change = path_change(&old, &new);
	if (work->family == 4 ? bpf_xdp_store_bytes(ctx, at, new.bytes, 8)
			      : bpf_xdp_store_bytes(ctx, at, new.bytes, 32))
		return -1;
	if (work->family == 4) {
		at = work->ip_at + __builtin_offsetof(struct iphdr, check);
		if (bpf_xdp_load_bytes(ctx, at, &check, sizeof(check)))
			return -1;
		check = ~csum_fold((__u64)(__u16)~check + change);
		if (bpf_xdp_store_bytes(ctx, at, &check, sizeof(check)))
			return -1;
	}
	/* The UDP checksum covers the addresses, so it is updated with them. */
	at = CHECK_AT(work);
	if (bpf_xdp_load_bytes(ctx, at, &check, sizeof(check)))
		return -1;
	if (!check)
		return 0;
	check = ~csum_fold((__u64)(__u16)~check + change);
	if (!check)
		check = 0xffff;
	return bpf_xdp_store_bytes(ctx, at, &check, sizeof(check));
}

/* Restores the session's own addresses in a packet that arrived by another path than path 0. The packet is not
 * authenticated yet. Returns 0 if no path of a session has the packet's addresses.
 */
static __always_inline int path_in(struct xdp_md *ctx, struct graft_work *work, struct udp_packet *packet)
{
	struct packet_key key = {.local_port = packet->destination_port, .remote_port = packet->source_port};
	struct packet_path_in *in;

	__builtin_memcpy(key.local, packet->destination, sizeof(key.local));
	__builtin_memcpy(key.remote, packet->source, sizeof(key.remote));
	in = bpf_map_lookup_elem(&path_keys, &key);
	if (!in || in->ifindex != ctx->ingress_ifindex || path_restore(ctx, work, in))
		return 0;
	work->path = in->path;
	__builtin_memcpy(packet->destination, in->session.local, sizeof(packet->destination));
	__builtin_memcpy(packet->source, in->session.remote, sizeof(packet->source));
	return 1;
}

static __always_inline void path_came(const struct graft_work *work)
{
	struct packet_path_counts *counts = path_counts_of(work->session);
	__u32 number = work->path;

	OPAQUE(number);
	number &= PACKET_PATHS - 1;
	if (counts)
		__sync_fetch_and_add(&counts->came[number], 1);
}

#endif
