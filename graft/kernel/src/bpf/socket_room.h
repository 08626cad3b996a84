/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* At TC ingress: what the socket of a datagram has room for, and what the datagram takes there. The kernel drops what is too much
 * behind all functions (__udp_enqueue_schedule_skb), and nobody hears of it.
 */
#ifndef MILLRACE_SOCKET_ROOM_H
#define MILLRACE_SOCKET_ROOM_H

#include "graft_packet.h"
#include "skb_udp.h"
#include <bpf/bpf_core_read.h>

/* Fields that are needed; libbpf finds their places in the running kernel. */
struct sock {
	int sk_rcvbuf;
	struct {
		struct {
			int counter;
		} rmem_alloc;
	} sk_backlog;
} __attribute__((preserve_access_index));

struct sk_buff {
	unsigned int truesize;
} __attribute__((preserve_access_index));

struct socket_room {
	__u32 have; /* bytes; 0: nobody listens, or it cannot be found */
	__u32 used;
};

static __noinline int find_room(struct __sk_buff *skb, struct graft_work *work, struct socket_room *room)
{
	struct bpf_sock_tuple tuple = {};
	const struct sock *kernels = NULL;
	struct bpf_sock *found;
	__s32 have, used;

	*room = (struct socket_room){};
	if (work->family == 4) {
		if (bpf_skb_load_bytes(skb, work->ip_at + __builtin_offsetof(struct iphdr, saddr), &tuple,
				       8) ||
		    bpf_skb_load_bytes(skb, work->udp_at, &tuple.ipv4.sport, 4))
			return 0;
	} else {
		if (bpf_skb_load_bytes(skb, work->ip_at + __builtin_offsetof(struct ipv6hdr, saddr), &tuple,
				       32) ||
		    bpf_skb_load_bytes(skb, work->udp_at, &tuple.ipv6.sport, 4))
			return 0;
	}
	found = work->family == 4
			? bpf_sk_lookup_udp(skb, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS, 0)
			: bpf_sk_lookup_udp(skb, &tuple, sizeof(tuple.ipv6), BPF_F_CURRENT_NETNS, 0);
	if (!found)
		return 0;
	/* Its address as a number: the verifier lets nobody look into sockets otherwise. */
	bpf_probe_read_kernel(&kernels, sizeof(kernels), &found);
	have = BPF_CORE_READ(kernels, sk_rcvbuf);
	used = BPF_CORE_READ(kernels, sk_backlog.rmem_alloc.counter);
	bpf_sk_release(found);
	room->have = have > 0 ? have : 0;
	room->used = used > 0 ? used : 0;
	return 0;
}

#define SKB_BYTES 320 /* that the kernel keeps about a packet, at most: struct sk_buff and its alignment */

/* A packet out of which another one was made has a head of its own in the end, as long as the allocator's next size. */
static __always_inline __u32 bytes_in_socket(struct __sk_buff *skb)
{
	__u32 bytes = 0;

	bpf_probe_read_kernel(&bytes, sizeof(bytes), &((struct sk_buff *)skb)->truesize);
	bytes = bytes > SKB_BYTES ? bytes - SKB_BYTES - 1 : 0;
	for (int shift = 1; shift < 32; shift *= 2)
		bytes |= bytes >> shift;
	return bytes + 1 + SKB_BYTES;
}

#endif
