// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Hybla (Caini and Firrincieli, 2004): a connection with a long round trip grows its window as fast as one
 * with the round trip RTT0. With rho = RTT / RTT0, an acknowledged packet adds 2^rho - 1 packets in slow
 * start, and rho^2 / cwnd after it.
 */
#include "graft.h"

struct hybla_config {
	__u32 rtt0_us;
	/* upper bound of rho in slow start, where 2^rho would otherwise grow too fast */
	__u32 slow_start_rho_max;
	__u32 rho_max;
	__u32 pace; /* 1: packets are paced */
};

SEC(".rodata.config")
const volatile struct hybla_config config = {
	.rtt0_us = 35000,
	.slow_start_rho_max = 4,
	.rho_max = 32,
	.pace = 1,
};

struct hybla {
	__u32 rtt_us; /* least round trip of the connection so far, us */
	__u32 rho;    /* the factor rho, in eighths */
	__u32 fraction; /* growth of the window that is less than a packet and not added yet, in 128ths of a packet */
};

#define RHO_ONE 8
#define ONE	128

/* Returns 128 * 2^(eighths/8), the power of two as a fixed-point number in 128ths. */
static __always_inline __u32 power_of_eighths(__u32 eighths)
{
	__u32 whole = eighths / 8;
	__u32 rest;

	switch (eighths % 8) {
	case 0:
		rest = 128;
		break;
	case 1:
		rest = 140;
		break;
	case 2:
		rest = 152;
		break;
	case 3:
		rest = 166;
		break;
	case 4:
		rest = 181;
		break;
	case 5:
		rest = 197;
		break;
	case 6:
		rest = 215;
		break;
	default:
		rest = 235;
	}
	return rest << (whole & 15);
}

static __always_inline void measure(struct hybla *hybla, __u32 rtt_us)
{
	__u64 rho;

	/* Only a shorter round trip changes rho. Queueing delay thus does not make the window grow faster. */
	if (!rtt_us || (hybla->rtt_us && hybla->rtt_us <= rtt_us))
		return;
	hybla->rtt_us = rtt_us;
	rho = (__u64)rtt_us * RHO_ONE / graft_max(config.rtt0_us, 1U);
	/* A round trip below RTT0 counts as RTT0, so growth is never slower than Reno's. */
	rho = graft_max(rho, (__u64)RHO_ONE);
	hybla->rho = graft_min(rho, (__u64)config.rho_max * RHO_ONE);
}

SEC("struct_ops")
void BPF_PROG(hybla_init, struct sock *sk)
{
	struct hybla *hybla = graft_state(sk);

	hybla->rtt_us = 0;
	hybla->fraction = 0;
	hybla->rho = RHO_ONE;
	measure(hybla, graft_tcp(sk)->srtt_us >> 3);
	if (config.pace)
		graft_pace(sk);
}

SEC("struct_ops")
void BPF_PROG(hybla_pkts_acked, struct sock *sk, const struct ack_sample *sample)
{
	__s32 rtt_us = sample->rtt_us;

	if (rtt_us > 0)
		measure(graft_state(sk), rtt_us);
}

/* Returns the number of whole packets by which the window grows, and stores the remaining fraction. */
static __always_inline __u32 earned(struct hybla *hybla, __u64 more)
{
	more += hybla->fraction;
	hybla->fraction = more % ONE;
	return more / ONE;
}

SEC("struct_ops")
void BPF_PROG(hybla_cong_avoid, struct sock *sk, __u32 ack, __u32 acked)
{
	struct tcp_sock *tp = graft_tcp(sk);
	struct hybla *hybla = graft_state(sk);
	__u32 cwnd = graft_max(tp->snd_cwnd, 1U);
	__u64 more;

	if (!graft_is_cwnd_limited(tp))
		return;
	if (graft_in_slow_start(tp)) {
		__u32 rho = graft_min(hybla->rho, config.slow_start_rho_max * RHO_ONE);

		more = (__u64)(power_of_eighths(rho) - ONE) * acked;
		/* Slow start stops exactly at ssthresh, since packets above it would be lost at once. */
		cwnd = graft_min(cwnd + earned(hybla, more), tp->snd_ssthresh);
	} else {
		more = (__u64)hybla->rho * hybla->rho * (ONE / RHO_ONE / RHO_ONE) * acked / cwnd;
		/* With rho = 1 this is Reno. Each acknowledgement adds at least 1/128 packet, so that
		 * rounding does not stop growth.
		 */
		cwnd += earned(hybla, graft_max(more, (__u64)1));
	}
	tp->snd_cwnd = graft_min(cwnd, tp->snd_cwnd_clamp);
}

SEC("struct_ops")
__u32 BPF_PROG(hybla_ssthresh, struct sock *sk)
{
	return tcp_reno_ssthresh(sk);
}

SEC("struct_ops")
__u32 BPF_PROG(hybla_undo_cwnd, struct sock *sk)
{
	return tcp_reno_undo_cwnd(sk);
}

SEC(".struct_ops")
struct tcp_congestion_ops mr_hybla = {
	.init = (void *)hybla_init,
	.pkts_acked = (void *)hybla_pkts_acked,
	.cong_avoid = (void *)hybla_cong_avoid,
	.ssthresh = (void *)hybla_ssthresh,
	.undo_cwnd = (void *)hybla_undo_cwnd,
	.name = "mr_hybla",
};

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
