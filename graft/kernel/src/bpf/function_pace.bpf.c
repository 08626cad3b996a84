// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Paces packets: each gets a departure time, which the interface's qdisc fq obeys. In a list of functions it
 * precedes `window` and `number`, so that a refused packet has no packet number. It follows `congestion`,
 * whose window gives the rate if none is configured (RFC 9002, section 7.7).
 */
#include "graft_packet.h"
#include "net.h"

struct pace_config {
	/* pacing rate in kbit/s including IP headers; 0: the rate is the congestion window divided by the round-trip
	 * time
	 */
	__u32 rate_kbit;
	__u32 burst;   /* number of packets that may be sent at once after a pause */
	__u32 packets; /* largest number of packets that may wait for their departure time */
};

SEC(".rodata.config")
const volatile struct pace_config config = {
	.rate_kbit = 0,
	.burst = 4,
	.packets = 64,
};

/* pacing rate in percent of the congestion window divided by the round-trip time; above 100, so that the window and not
 * the pacing limits the throughput
 */
#define GAIN_PERCENT 125
#define TAKES_MOST   1000000000ULL
#define SPARE_MOST   4000000000ULL

static __always_inline __u64 packet_bytes(const struct graft_work *work)
{
	__u32 ip_bytes = work->family == 4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr);

	return ip_bytes + UDP_BYTES + work->payload_bytes + graft_more_bytes(work);
}

/* Returns the interval to the next packet, ns; 0: no rate is configured, and the window or the round-trip time is
 * unknown.
 */
static __always_inline __u64 takes_ns(const struct graft_work *work, const struct graft_shared *shared)
{
	if (config.rate_kbit)
		return packet_bytes(work) * 8 * 1000000 / config.rate_kbit;
	if (!work->limit || !shared->srtt_us)
		return 0;
	return (__u64)shared->srtt_us * 1000 * 100 / GAIN_PERCENT / work->limit;
}

SEC("tcx/egress")
int pace_tx(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_TX);
	struct graft_shared *shared;
	__u64 takes, spare, ahead, now_ns;

	if (!work)
		return GRAFT_PASS_tx;
	shared = graft_shared(work);
	if (!shared)
		return graft_next(skb, tx, work);
	takes = takes_ns(work, shared);
	/* The interval is limited, so that its products with `packets` and `burst` fit into 64 bits. */
	takes = takes < TAKES_MOST ? takes : TAKES_MOST;
	now_ns = bpf_ktime_get_ns();
	ahead = shared->leaves_ns > now_ns ? shared->leaves_ns - now_ns : 0;
	/* A packet is refused if its departure time would be more than `packets` pacing intervals in the future. */
	if (takes && ahead >= config.packets * takes)
		return graft_done(skb, tx, work, GRAFT_TOO_FAST);
	spare = takes * (config.burst - 1);
	work->takes_ns = takes;
	work->spare_ns = spare < SPARE_MOST ? spare : SPARE_MOST;
	return graft_next(skb, tx, work);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
