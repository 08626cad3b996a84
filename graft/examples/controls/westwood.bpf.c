// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Westwood+ (Grieco and Mascolo, 2004): after a loss the window becomes bandwidth times least round trip,
 * if that is more than a configured part of the old window. Otherwise it behaves as Reno.
 */
#include "graft.h"

struct westwood_config {
	__u32 keep_percent;  /* least part of the window that remains after a loss, in percent */
	__u32 sample_min_us; /* least duration of a bandwidth sample, us */
	__u32 pace;	     /* 1: packets are paced */
};

SEC(".rodata.config")
const volatile struct westwood_config config = {
	.keep_percent = 70,
	.sample_min_us = 50000,
	.pace = 1,
};

struct westwood {
	__u64 since_us;
	__u64 bandwidth;    /* bandwidth after both low-pass filters, packets/s in 256ths */
	__u64 first_filter; /* bandwidth after the first low-pass filter, packets/s in 256ths */
	__u32 delivered;    /* value of `delivered` when the bandwidth sample began */
	__u32 rtt_min_us;
};

static __always_inline __u64 now_us(void)
{
	return bpf_ktime_get_ns() / 1000;
}

SEC("struct_ops")
void BPF_PROG(westwood_init, struct sock *sk)
{
	struct westwood *westwood = graft_state(sk);

	westwood->since_us = now_us();
	westwood->bandwidth = 0;
	westwood->first_filter = 0;
	westwood->delivered = graft_tcp(sk)->delivered;
	westwood->rtt_min_us = graft_rtt_min_us(graft_tcp(sk));
	if (config.pace)
		graft_pace(sk);
}

static __always_inline __u64 filtered(__u64 old, __u64 sample)
{
	/* Updates a moving average, whose first value is the first sample. */
	return old ? (7 * old + sample) / 8 : sample;
}

/* Takes a bandwidth sample of all packets delivered in a round trip. Shorter samples would mistake a burst of
 * ACKs for a high bandwidth.
 */
SEC("struct_ops")
void BPF_PROG(westwood_pkts_acked, struct sock *sk, const struct ack_sample *sample)
{
	struct westwood *westwood = graft_state(sk);
	struct tcp_sock *tp = graft_tcp(sk);
	__u64 now = now_us(), spent = now - westwood->since_us;
	__s32 rtt_us = sample->rtt_us;
	__u64 rate;

	if (rtt_us > 0 && (!westwood->rtt_min_us || rtt_us < westwood->rtt_min_us))
		westwood->rtt_min_us = rtt_us;
	if (spent < graft_max(config.sample_min_us, 1U) || spent < tp->srtt_us >> 3)
		return;
	rate = (__u64)(tp->delivered - westwood->delivered) * 256 * 1000000 / spent;
	westwood->first_filter = filtered(westwood->first_filter, rate);
	westwood->bandwidth = filtered(westwood->bandwidth, westwood->first_filter);
	westwood->delivered = tp->delivered;
	westwood->since_us = now;
}

/* Returns how many packets fit the path without a queue; `otherwise` if the bandwidth or the round trip is
 * unknown.
 */
static __always_inline __u32 path_window(const struct westwood *westwood, __u32 otherwise)
{
	__u64 window = westwood->bandwidth * westwood->rtt_min_us / (256 * 1000000ULL);

	if (!westwood->bandwidth || !westwood->rtt_min_us)
		return otherwise;
	return graft_min(graft_max(window, (__u64)GRAFT_CWND_MIN), (__u64)GRAFT_SSTHRESH_NONE);
}

/* Returns the window after a loss. If the queue is long, the window without a queue is only a small part of the current
 * one. Other connections whose congestion control keeps the queue long would then starve this one, so at least
 * `keep_percent` of the window remains.
 */
SEC("struct_ops")
__u32 BPF_PROG(westwood_ssthresh, struct sock *sk)
{
	__u64 part = (__u64)graft_tcp(sk)->snd_cwnd * config.keep_percent / 100;
	__u32 least = graft_max(part, (__u64)GRAFT_CWND_MIN);

	return graft_max(path_window(graft_state(sk), least), least);
}

SEC("struct_ops")
void BPF_PROG(westwood_cwnd_event, struct sock *sk, int event)
{
	struct tcp_sock *tp = graft_tcp(sk);

	/* The loss recovery is complete: continue with the window that ssthresh() computed. */
	if (event == GRAFT_COMPLETE_CWR)
		tp->snd_cwnd = tp->snd_ssthresh;
	else if (event == GRAFT_LOSS)
		tp->snd_ssthresh = path_window(graft_state(sk), tp->snd_ssthresh);
}

SEC("struct_ops")
void BPF_PROG(westwood_cong_avoid, struct sock *sk, __u32 ack, __u32 acked)
{
	tcp_reno_cong_avoid(sk, ack, acked);
}

SEC("struct_ops")
__u32 BPF_PROG(westwood_undo_cwnd, struct sock *sk)
{
	return tcp_reno_undo_cwnd(sk);
}

SEC(".struct_ops")
struct tcp_congestion_ops mr_westwood = {
	.init = (void *)westwood_init,
	.pkts_acked = (void *)westwood_pkts_acked,
	.ssthresh = (void *)westwood_ssthresh,
	.cwnd_event = (void *)westwood_cwnd_event,
	.cong_avoid = (void *)westwood_cong_avoid,
	.undo_cwnd = (void *)westwood_undo_cwnd,
	.name = "mr_westwood",
};

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
