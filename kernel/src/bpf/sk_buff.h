/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Fields of the kernel's struct sk_buff that programs at TC need, and that __sk_buff lacks. */
#ifndef MILLRACE_SK_BUFF_H
#define MILLRACE_SK_BUFF_H

#include "util.h"
#include <linux/if_ether.h>
#include <bpf/bpf_core_read.h>

enum ip_summed {
	CHECKSUM_COMPLETE = 2,
	CHECKSUM_PARTIAL = 3,
};

/* The fields that are read. libbpf relocates them to their offsets in the running kernel. */
struct sk_buff {
	__u8 ip_summed : 2;
	__u16 network_header;
	__u16 mac_header;
	unsigned char *head;
	unsigned char *data;
} __attribute__((preserve_access_index));

#define IP_SUMMED(skb) BPF_CORE_READ_BITFIELD_PROBED((struct sk_buff *)(skb), ip_summed)

/* Reports whether the packet's data begins after the link header instead of at it. XDP in generic mode copies packets
 * that have too little headroom, as most packets have. Since Linux 6.9 the copy's `mac_len` is 0. TC moves the start of
 * the data back from the IP header by `mac_len` bytes, so it stays at the IP header. If such a packet were redirected,
 * it would be sent without a link header.
 */
static __always_inline int link_is_lost(struct __sk_buff *skb)
{
	struct sk_buff *kernels = (struct sk_buff *)skb;

	__u32 begins = BPF_CORE_READ(kernels, data) - BPF_CORE_READ(kernels, head);

	return begins == BPF_CORE_READ(kernels, network_header) &&
	       begins == BPF_CORE_READ(kernels, mac_header) + ETH_HLEN;
}

/* Moves the start of the packet's data back to the link header. Returns not 0 if that fails. */
static __noinline int find_link(struct __sk_buff *skb)
{
	struct ethhdr link;

	if (bpf_skb_load_bytes_relative(skb, 0, &link, sizeof(link), BPF_HDR_START_MAC))
		return -1;
	/* bpf_skb_change_head() inserts zeroes in front of the data, and corrects `mac_len`. */
	if (bpf_skb_change_head(skb, sizeof(link), 0))
		return -1;
	return bpf_skb_store_bytes(skb, 0, &link, sizeof(link), 0);
}

/* Reports whether the packet begins with its IP header, as on tun devices. */
static __always_inline int is_bare(struct __sk_buff *skb)
{
	struct sk_buff *kernels = (struct sk_buff *)skb;
	__u16 network = BPF_CORE_READ(kernels, network_header);

	return network == BPF_CORE_READ(kernels, mac_header) &&
	       network == BPF_CORE_READ(kernels, data) - BPF_CORE_READ(kernels, head);
}

/* Makes the packet's data begin with the link header. Programs at TC ingress call this first. Returns not 0 if there is
 * no link header, so that the packet cannot be parsed.
 */
static __always_inline int have_link(struct __sk_buff *skb)
{
	return link_is_lost(skb) ? find_link(skb) : 0;
}

#endif
