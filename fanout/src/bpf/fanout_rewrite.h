/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Writes the headers of one receiver's copy. The payload is neither changed nor read: the checksum
 * is derived from the received one, so a packet that was damaged on the way stays damaged.
 */
#ifndef MILLRACE_FANOUT_REWRITE_H
#define MILLRACE_FANOUT_REWRITE_H

#include "fanout_maps.h"
#include "bucket.h"

#define ADDRESSES_BYTES 32
#define TUPLE_BYTES	36 /* bytes of addresses and ports, the first fields of struct net_path */

/* Returns the UDP checksum for the copy's addresses and ports, computed from the received checksum. With
 * CHECKSUM_PARTIAL the field holds the sum of the pseudo header, and the interface adds the rest, ports
 * included.
 */
static __always_inline __u16 checksum(struct fanout_work *work)
{
	__u32 is_partial = work->frame.summed == CHECKSUM_PARTIAL;
	__u64 sum = is_partial ? work->check : (__u16)~work->check;
	__u16 check;

	if (is_partial)
		return csum_fold((__u32)bpf_csum_diff((__be32 *)&work->came, ADDRESSES_BYTES,
						      (__be32 *)&work->path, ADDRESSES_BYTES, sum));
	check = ~csum_fold((__u32)bpf_csum_diff((__be32 *)&work->came, TUPLE_BYTES, (__be32 *)&work->path,
						TUPLE_BYTES, sum));
	return check ? check : 0xffff; /* 0 stands for no checksum (RFC 768) */
}

/* Writes all headers of the copy. */
static __always_inline void put_head(struct fanout_work *work)
{
	__u32 udp_bytes = UDP_BYTES + work->frame.packet_bytes;
	struct udphdr *udp = (struct udphdr *)(work->out + UDP_AT);
	const struct net_path *path = &work->path;
	__u8 *ether;

	put_udp(udp, path->local_port, path->remote_port, udp_bytes);
	if (work->check)
		udp->check = checksum(work);
	if (path->family == 4) {
		put_ipv4((struct iphdr *)(work->out + UDP_AT - IPV4_BYTES), load32(path->local),
			 load32(path->remote), work->traffic_class, udp_bytes);
		ether = work->out + UDP_AT - IPV4_BYTES - ETHERNET_BYTES;
		store16(put_macs(ether, work->route.dmac, work->route.smac), bpf_htons(ETH_P_IP));
	} else {
		put_ipv6((struct ipv6hdr *)(work->out + UDP_AT - IPV6_BYTES), path->local, path->remote,
			 work->traffic_class, path->flow_label, udp_bytes);
		ether = work->out;
		store16(put_macs(ether, work->route.dmac, work->route.smac), bpf_htons(ETH_P_IPV6));
	}
}

static __always_inline int store_head(struct __sk_buff *skb, const __u8 *from, __u8 family)
{
	return family == 4 ? bpf_skb_store_bytes(skb, 0, from, ETHERNET_BYTES + IPV4_BYTES + UDP_BYTES, 0)
			   : bpf_skb_store_bytes(skb, 0, from, ETHERNET_BYTES + IPV6_BYTES + UDP_BYTES, 0);
}

/* Global functions, so that the verifier checks each once and not for each copy. */

int send_copy(struct __sk_buff *skb, struct fanout_work *work)
{
	__u32 headers;

	if (!work)
		return -1;
	headers = ETHERNET_BYTES + UDP_BYTES + (work->path.family == 4 ? IPV4_BYTES : IPV6_BYTES);
	put_head(work);
	if (fan_begin(skb, &work->frame) ||
	    fan_reshape(skb, &work->frame, work->path.family, headers + work->frame.packet_bytes) ||
	    store_head(skb,
		       work->path.family == 4 ? work->out + UDP_AT - IPV4_BYTES - ETHERNET_BYTES : work->out,
		       work->path.family))
		return -1;
	return bpf_clone_redirect(skb, work->route.ifindex, 0);
}

/* Restores the received headers of the packet. */
int restore(struct __sk_buff *skb, struct fanout_work *work)
{
	if (!work)
		return -1;
	if (!work->frame.changed)
		return 0;
	if (fan_reshape(skb, &work->frame, work->frame.family, work->frame.frame_bytes) ||
	    store_head(skb, work->head, work->frame.family))
		return -1;
	return fan_tag_again(skb, &work->frame);
}

/* Reads the epoch of a receiver's entry in the map `receivers`, with a full barrier: loads before the call and loads
 * after it are not reordered across it.
 */
static __always_inline __u32 epoch_of(struct fanout_receiver *receiver)
{
	return __sync_fetch_and_add(&receiver->epoch, 0);
}

static __always_inline enum fanout_copy_outcome route_outcome(enum fan_way way)
{
	switch (way) {
	case FAN_WAY:
		return FANOUT_COPY_SENT;
	case FAN_NO_NEIGHBOUR:
		return FANOUT_COPY_NO_NEIGHBOUR;
	case FAN_TOO_LARGE:
		return FANOUT_COPY_TOO_LARGE;
	default:
		return FANOUT_COPY_NO_ROUTE;
	}
}

static __noinline enum fanout_copy_outcome copy_to(struct __sk_buff *skb, struct fanout_work *work,
						   struct fanout_receiver *receiver, __u32 epoch)
{
	enum fanout_copy_outcome outcome;
	struct bucket_rate rate;
	__u64 until_ns;
	__u32 size;

	/* Userspace gives the entry a new epoch when it replaces the receiver. If the epoch is the same before and
	 * after these loads, the loaded fields belong to one receiver. */
	work->path = receiver->path;
	until_ns = READ_ONCE(receiver->until_ns);
	rate = receiver->rate;
	if (epoch_of(receiver) != epoch)
		return FANOUT_COPY_CHANGED;
	if (work->now_ns >= until_ns)
		return FANOUT_COPY_ENDED;
	outcome = route_outcome(fan_route(skb, &work->route, &work->path, work->frame.packet_bytes));
	if (outcome)
		return outcome;
	size = work->frame.packet_bytes + UDP_BYTES + (work->path.family == 4 ? IPV4_BYTES : IPV6_BYTES);
	if (is_over_at(&receiver->full_at, &rate, size, work->now_ns))
		return FANOUT_COPY_RATE;
	if (send_copy(skb, work))
		return FANOUT_COPY_LOST;
	__sync_fetch_and_add(&receiver->packets, 1);
	__sync_fetch_and_add(&receiver->bytes, work->frame.packet_bytes);
	return FANOUT_COPY_SENT;
}

#endif
