// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Tests whether this host's firewall would let a connection's first packets pass, before the tunnel broker tunnels
 * the connection.
 *
 * The broker sends these packets as plain TCP would: with the true addresses, ports and socket owner. They
 * pass netfilter's chains, and these programs see the ones that netfilter accepted. The programs then drop
 * every such packet, so none reaches the wire or a server.
 */
#include "graft_opening_intf.h"
#include "hook_end.h"
#include "util.h"
#include <linux/in.h>

#define PASS 1
#define DROP 0

/* State of the tunnel broker's sockets that send a test packet: whether netfilter accepted the packet, and its
 * addresses after netfilter.
 */
BPF_MAP_FLAGS(SK_STORAGE, sent, int, struct opening_sent, 0, BPF_F_NO_PREALLOC);

BPF_MAP_FLAGS(HASH, due, struct opening_ends, struct opening_due, OPENING_DUE, BPF_F_NO_PREALLOC);

/* Listening sockets of the tunnel broker that drop all packets: one for IPv4, one for IPv6. */
BPF_MAP(SOCKMAP, ends, __u32, __u64, 2);

/* Number of packets, by enum opening_verdict. */
BPF_MAP(PERCPU_ARRAY, verdicts, __u32, __u64, OPENING_VERDICTS);

/* The function is not inlined, so that the enum is in the object's BTF, where userspace's build finds it. */
static __noinline int count(enum opening_verdict verdict)
{
	add_to(&verdicts, verdict, 1);
	return 0;
}

/* Runs after netfilter's OUTPUT and POSTROUTING, for packets of sockets that were created in the tunnel broker's
 * cgroup. It records and drops the packets of sockets in `sent`.
 */
SEC("cgroup_skb/egress")
int opening_out(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;
	struct opening_sent *one;

	if (!sk)
		return PASS;
	sk = bpf_sk_fullsock(sk);
	if (!sk)
		return PASS;
	one = bpf_sk_storage_get(&sent, sk, 0, 0);
	if (!one)
		return PASS;
	/* Userspace reads from this header the source address and port after NAT. */
	if (!bpf_skb_load_bytes(skb, 0, one->head, sizeof(one->head)))
		one->passed = 1;
	count(OPENING_OUT);
	return DROP;
}

static __always_inline int swallow(struct bpf_sk_lookup *ctx)
{
	__u32 family = ctx->family == AF_INET6;
	struct bpf_sock *sk = bpf_map_lookup_elem(&ends, &family);
	long failed;

	if (!sk)
		return SK_DROP;
	failed = bpf_sk_assign(ctx, sk, 0);
	bpf_sk_release(sk);
	return failed ? SK_DROP : SK_PASS;
}

/* Runs after netfilter's INPUT, for packets that belong to no connection. It assigns expected test packets to
 * a socket that drops them.
 */
SEC("sk_lookup")
int opening_in(struct bpf_sk_lookup *ctx)
{
	struct opening_ends key = {};
	struct opening_due *one;
	int verdict;

	if (ctx->protocol != IPPROTO_TCP)
		return SK_PASS;
	if (ctx->family == AF_INET) {
		set_v4(&key.from, ctx->remote_ip4);
		set_v4(&key.to, ctx->local_ip4);
	} else {
		for (int i = 0; i < 4; i++) {
			key.from.address[i] = ctx->remote_ip6[i];
			key.to.address[i] = ctx->local_ip6[i];
		}
	}
	key.from.port = bpf_ntohs(ctx->remote_port);
	key.to.port = ctx->local_port;
	one = bpf_map_lookup_elem(&due, &key);
	if (!one)
		return SK_PASS;
	/* A packet from another interface with the same addresses is not the tunnel broker's test packet. */
	if (one->ifindex != ctx->ingress_ifindex) {
		count(OPENING_ELSEWHERE);
		return SK_PASS;
	}
	one->passed = 1;
	verdict = swallow(ctx);
	count(verdict == SK_PASS ? OPENING_IN : OPENING_NO_SOCKET);
	return verdict;
}

/* Drops every packet. The listening sockets in the map `ends` have this socket filter. */
SEC("socket")
int opening_end(struct __sk_buff *skb)
{
	return DROP;
}

/* Injects a packet at an interface, as if it had come from the wire. The program is attached nowhere; the
 * broker runs it with BPF_PROG_TEST_RUN.
 */
SEC("tc")
int opening_inject(struct __sk_buff *skb)
{
	return bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
