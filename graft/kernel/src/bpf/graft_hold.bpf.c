// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Holds SYNs back from the tunnel broker's listening sockets, where the kernel would answer them at once. The broker
 * gets the TCP header of each SYN. When it has reached the server, it lets the client's SYNs pass and sends
 * the SYN again itself.
 */
#include "graft_hold_intf.h"
#include "util.h"
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <stddef.h>
#include <bpf/bpf_endian.h>

#define HEADER_LEAST 20
#define DROP	     0

/* State of each held SYN, HOLD_WAITING or HOLD_OPEN, by the client's address and port. */
BPF_MAP(LRU_HASH, known, struct hook_end, __u32, HOOK_ARRIVALS);

BPF_RING(asks, 1 << 20);

/* Number of packets, by enum hold_verdict. */
BPF_MAP(PERCPU_ARRAY, verdicts, __u32, __u64, HOLD_VERDICTS);

static __always_inline int read_from(struct __sk_buff *skb, const struct tcphdr *tcp, struct hook_end *from)
{
	from->port = bpf_ntohs(tcp->source);
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		from->address[2] = bpf_htonl(0xffff);
		return bpf_skb_load_bytes_relative(skb, offsetof(struct iphdr, saddr), &from->address[3],
						   sizeof(from->address[3]), BPF_HDR_START_NET);
	}
	return bpf_skb_load_bytes_relative(skb, offsetof(struct ipv6hdr, saddr), from->address,
					   sizeof(from->address), BPF_HDR_START_NET);
}

/* The function is not inlined, so that the type of the event is in the object's BTF, where userspace's build finds it.
 */
static __noinline long send_event(const struct hold_ask *one)
{
	return one ? bpf_ringbuf_output(&asks, (void *)one, sizeof(*one), 0) : -1;
}

/* Reports a SYN to the tunnel broker. A repeated SYN is not reported again, since the broker's decision about the
 * first one also applies to it.
 */
static __always_inline enum hold_verdict ask(struct __sk_buff *skb, const struct tcphdr *tcp,
					     const struct hook_end *from)
{
	__u32 bytes = tcp->doff * 4, waits = HOLD_WAITING;
	struct hold_ask one = {.from = *from, .bytes = bytes};

	if (bytes < HEADER_LEAST || bpf_skb_load_bytes(skb, 0, one.syn, BOUNDED(bytes, 64)))
		return HOLD_MALFORMED;
	/* With BPF_NOEXIST, only one CPU reports a SYN if two CPUs handle copies of it. */
	if (bpf_map_update_elem(&known, from, &waits, BPF_NOEXIST))
		return HOLD_HELD;
	if (!send_event(&one))
		return HOLD_ASKED;
	/* The ring buffer was full. The entry is removed, so that the client's next SYN is reported. */
	bpf_map_delete_elem(&known, from);
	return HOLD_NO_ROOM;
}

static __noinline enum hold_verdict judge(struct __sk_buff *skb, const struct tcphdr *tcp)
{
	struct hook_end from = {};
	__u32 *state;

	if (!tcp->syn || tcp->ack)
		return HOLD_OTHER;
	if (read_from(skb, tcp, &from))
		return HOLD_MALFORMED;
	state = bpf_map_lookup_elem(&known, &from);
	if (!state)
		return ask(skb, tcp, &from);
	return *state == HOLD_OPEN ? HOLD_LET_IN : HOLD_HELD;
}

/* Runs for each packet at the listening socket. A filter of a TCP socket sees the packet from the TCP
 * header on.
 */
SEC("socket")
int hold_syn(struct __sk_buff *skb)
{
	enum hold_verdict verdict = HOLD_MALFORMED;
	struct tcphdr tcp;

	if (!bpf_skb_load_bytes(skb, 0, &tcp, sizeof(tcp)))
		verdict = judge(skb, &tcp);
	add_to(&verdicts, verdict, 1);
	return verdict == HOLD_OTHER || verdict == HOLD_LET_IN ? skb->len : DROP;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
