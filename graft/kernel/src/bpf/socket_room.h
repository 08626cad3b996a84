/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Computes at TC ingress how much buffer space the datagram's socket has, and how much the datagram takes.
 * The kernel silently drops datagrams that exceed it, after all functions have run
 * (__udp_enqueue_schedule_skb).
 */
#ifndef MILLRACE_SOCKET_ROOM_H
#define MILLRACE_SOCKET_ROOM_H

#include "graft_packet.h"
#include "skb_udp.h"
#include <bpf/bpf_core_read.h>

/* Members of kernel structures that this header reads; libbpf finds their offsets in the running kernel. */
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
	__u32 have; /* size of the socket's receive buffer in bytes; 0: no socket was found */
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
	/* The verifier allows no access to the buffer counters through a socket pointer. Copying the pointer
	 * makes it a plain number, which BPF_CORE_READ accepts.
	 */
	bpf_probe_read_kernel(&kernels, sizeof(kernels), &found);
	have = BPF_CORE_READ(kernels, sk_rcvbuf);
	used = BPF_CORE_READ(kernels, sk_backlog.rmem_alloc.counter);
	bpf_sk_release(found);
	room->have = have > 0 ? have : 0;
	room->used = used > 0 ? used : 0;
	return 0;
}

/* largest number of bytes that the kernel counts for a packet in addition to its data buffer: struct sk_buff and
 * alignment
 */
#define SKB_BYTES 320

/* Returns the bytes of buffer space that a datagram takes in its socket. Functions may enlarge the packet, and the
 * kernel then allocates a larger buffer. So the size is rounded up to a power of two, as the allocator does.
 */
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
