// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Sends QUIC Initials from forged addresses at the rate of a network card. The kernel runs flood_xdp on pages of its
 * own (BPF_F_TEST_XDP_LIVE_FRAMES, Linux 5.18), as a driver would. Each run rewrites its frame into a new client's
 * Initial and sends it. The kernel reuses frames, so the frame of a run holds what an earlier run wrote. */
#include "flood_intf.h"
#include "net.h"

#define PORT_MIN 1024

/* Layout of the frames that flood.rs builds: an IPv4 header without options, a connection ID of 8 bytes. */
struct frame {
	struct ethhdr eth;
	struct iphdr ip;
	struct udphdr udp;
	__u8 first;
	__be32 version;
	__u8 id_len;
	__u8 id[8];
} __attribute__((packed));

SEC(".rodata.config")
const volatile struct flood_config config = {};

/* State of the random number generator. It needs no lock, since only one thread floods. */
__u64 seed;

/* SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). */
static __always_inline __u64 next_random(void)
{
	__u64 z = seed += 0x9e3779b97f4a7c15;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
	z = (z ^ z >> 27) * 0x94d049bb133111eb;
	return z ^ z >> 31;
}

SEC("xdp")
int flood_xdp(struct xdp_md *ctx)
{
	struct frame *frame = (void *)(long)ctx->data;
	__u64 who = next_random();
	/* Source addresses are random addresses of one network: `hosts` is the mask of the bits that vary. */
	__be32 source = bpf_htonl(config.network | ((__u32)who & config.hosts));

	if ((void *)(frame + 1) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	frame->ip.saddr = source;
	frame->ip.check = ~csum_fold(config.header_sum + (source & 0xffff) + (source >> 16));
	frame->udp.source = bpf_htons(PORT_MIN | (who >> 32 & 0xffff));
	store64(frame->id, next_random());
	return config.ifindex ? bpf_redirect(config.ifindex, 0) : XDP_DROP;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
