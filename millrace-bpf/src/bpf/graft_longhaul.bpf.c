// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* For lossy long paths: sends at the rate at which the path delivers, as BBR does (draft-ietf-ccwg-bbr), and takes losses
 * for a sign of congestion only where more than `loss_permille` of a round are lost.
 *
 * The model is the greatest delivery rate of some rounds and the least round trip of some seconds. The pacing rate probes
 * for more by a quarter in one of eight rounds, and gives back in the next what that queued.
 */
#include "graft.h"

struct longhaul_config {
	__u32 loss_permille;	/* of a round, tolerated */
	__u32 cwnd_percent;	/* of the product of bandwidth and round trip */
	__u32 back_off_percent; /* of the bandwidth that is left after a round that lost more */
	__u32 rtt_window_ms;	/* for which a least round trip holds */
};

SEC(".rodata.config")
const volatile struct longhaul_config config = {
	.loss_permille = 150,
	.cwnd_percent = 185,
	.back_off_percent = 85,
	.rtt_window_ms = 10000,
};

enum phase {
	STARTUP,
	DRAIN,
	PROBE,
	PROBE_RTT,
};

struct longhaul {
	__u64 bandwidth[2]; /* greatest of this epoch and the one before, bytes/s */
	__u64 bound;	    /* bytes/s, after too much loss; 0: none */
	__u64 full;	    /* of start-up: the greatest that was not outgrown, bytes/s */
	__u64 rtt_since_us;
	__u64 phase_until_us; /* of PROBE_RTT */
	__u32 rtt_min_us;
	__u32 round_end;       /* in delivered packets */
	__u32 round_delivered; /* when the round began */
	__u32 round_lost;      /* likewise */
	__u32 delivered;       /* at the acknowledgement before */
	__u32 cwnd_before;     /* PROBE_RTT */
	__u8 phase;
	__u8 step; /* of the cycle of PROBE */
	__u8 flat_rounds;
	__u8 rounds; /* of the epoch */
};

_Static_assert(sizeof(struct longhaul) <= GRAFT_STATE_BYTES, "room in the socket");

#define CYCLE		8
#define EPOCH_ROUNDS	8
#define CWND_LEAST	4
#define PROBE_RTT_US	200000
#define STARTUP_PERCENT 289
#define DRAIN_PERCENT	35
#define PACING_MARGIN	99 /* percent: what is queued elsewhere drains */
#define INITIAL_RTT_US	100000
#define IS_AFTER(a, b)	((__s32)((a) - (b)) >= 0)

static __always_inline __u64 now_us(void)
{
	return bpf_ktime_get_ns() / 1000;
}

static __always_inline __u64 bandwidth_of(const struct longhaul *haul)
{
	__u64 greatest = graft_max(haul->bandwidth[0], haul->bandwidth[1]);

	return haul->bound && haul->bound < greatest ? haul->bound : greatest;
}

/* Before there is a rate to go by. */
static __always_inline __u64 initial_rate(const struct tcp_sock *tp)
{
	__u32 rtt_us = tp->srtt_us ? graft_max(tp->srtt_us >> 3, 1U) : INITIAL_RTT_US;

	return (__u64)tp->snd_cwnd * tp->mss_cache * 1000000 / rtt_us * STARTUP_PERCENT / 100;
}

SEC("struct_ops")
void BPF_PROG(longhaul_init, struct sock *sk)
{
	struct longhaul *haul = graft_state(sk);
	struct tcp_sock *tp = graft_tcp(sk);

	haul->bandwidth[0] = 0;
	haul->bandwidth[1] = 0;
	haul->bound = 0;
	haul->full = 0;
	haul->rtt_since_us = now_us();
	haul->phase_until_us = 0;
	haul->rtt_min_us = graft_rtt_min_us(tp);
	haul->round_end = tp->delivered + graft_in_flight(tp);
	haul->round_delivered = tp->delivered;
	haul->round_lost = tp->lost;
	haul->delivered = tp->delivered;
	haul->cwnd_before = 0;
	haul->phase = STARTUP;
	haul->step = 0;
	haul->flat_rounds = 0;
	haul->rounds = 0;
	tp->snd_ssthresh = GRAFT_SSTHRESH_NONE;
	graft_pace(sk);
	sk->sk_pacing_rate = initial_rate(tp);
}

/* The delivery rate that TCP has measured; what the application limited raises it only (tcp_rate.c). */
static __always_inline void take_rate(struct longhaul *haul, const struct tcp_sock *tp)
{
	__u64 rate;

	if (!tp->rate_interval_us)
		return;
	rate = (__u64)tp->rate_delivered * tp->mss_cache * 1000000 / tp->rate_interval_us;
	if (rate > haul->bandwidth[0])
		haul->bandwidth[0] = rate;
}

static __always_inline void end_startup(struct longhaul *haul)
{
	if (haul->phase == STARTUP)
		haul->phase = DRAIN;
}

/* Start-up is over when three rounds brought less than a quarter more. */
static __always_inline void judge_growth(struct longhaul *haul)
{
	__u64 bandwidth = bandwidth_of(haul);

	if (haul->phase != STARTUP)
		return;
	if (bandwidth >= haul->full + haul->full / 4) {
		haul->full = bandwidth;
		haul->flat_rounds = 0;
	} else if (++haul->flat_rounds >= 3) {
		end_startup(haul);
	}
}

/* Than chance explains: the deviation of a count is its root, and rounds are short at first. */
static __always_inline bool is_more(__u64 lost, __u64 tolerated)
{
	__u64 excess = lost > tolerated ? lost - tolerated : 0;

	return excess > 2 && excess * excess > 4 * tolerated;
}

static __always_inline void judge_loss(struct longhaul *haul, const struct tcp_sock *tp)
{
	__u64 lost = tp->lost - haul->round_lost;
	__u64 sent = tp->delivered - haul->round_delivered + lost;
	__u64 tolerated = sent * config.loss_permille / 1000;

	if (haul->phase == DRAIN)
		return;
	if (is_more(lost, tolerated)) {
		/* Start-up loses what it sent too much of, at a rate that nobody keeps. */
		if (haul->phase != STARTUP)
			haul->bound = bandwidth_of(haul) * config.back_off_percent / 100;
		end_startup(haul);
	} else if (haul->bound && haul->step == 0) {
		/* Probing upwards did no harm. */
		haul->bound += haul->bound / 4;
		if (haul->bound >= graft_max(haul->bandwidth[0], haul->bandwidth[1]))
			haul->bound = 0;
	}
}

static __always_inline void begin_round(struct longhaul *haul, const struct tcp_sock *tp)
{
	haul->round_delivered = tp->delivered;
	haul->round_lost = tp->lost;
	haul->round_end = tp->delivered + graft_max(graft_in_flight(tp), 1U);
}

static __always_inline void end_round(struct longhaul *haul, const struct tcp_sock *tp)
{
	judge_growth(haul);
	judge_loss(haul, tp);
	if (haul->phase == PROBE)
		haul->step = (haul->step + 1) % CYCLE;
	if (++haul->rounds >= EPOCH_ROUNDS) {
		haul->bandwidth[1] = haul->bandwidth[0];
		haul->bandwidth[0] = 0;
		haul->rounds = 0;
		take_rate(haul, tp);
	}
	begin_round(haul, tp);
}

/* Once in a while the queue is drained, so that the least round trip can be seen. */
static __always_inline void check_rtt(struct longhaul *haul, struct tcp_sock *tp, __u64 now)
{
	if (haul->phase == PROBE_RTT) {
		if (now < haul->phase_until_us)
			return;
		haul->phase = PROBE;
		haul->step = 2;
		tp->snd_cwnd = graft_max(tp->snd_cwnd, haul->cwnd_before);
	} else if (haul->phase == PROBE && now - haul->rtt_since_us > (__u64)config.rtt_window_ms * 1000) {
		haul->phase = PROBE_RTT;
		haul->cwnd_before = tp->snd_cwnd;
		haul->phase_until_us = now + PROBE_RTT_US + (tp->srtt_us >> 3);
		haul->rtt_min_us = 0;
		haul->rtt_since_us = now;
	}
}

SEC("struct_ops")
void BPF_PROG(longhaul_pkts_acked, struct sock *sk, const struct ack_sample *sample)
{
	struct longhaul *haul = graft_state(sk);
	__s32 rtt_us = sample->rtt_us;

	if (rtt_us > 0 && (!haul->rtt_min_us || rtt_us <= haul->rtt_min_us)) {
		haul->rtt_min_us = rtt_us;
		haul->rtt_since_us = now_us();
	}
}

static __always_inline __u32 pacing_percent(const struct longhaul *haul)
{
	if (haul->phase == STARTUP)
		return STARTUP_PERCENT;
	if (haul->phase == DRAIN)
		return DRAIN_PERCENT;
	if (haul->phase == PROBE && haul->step == 0)
		return 125;
	if (haul->phase == PROBE && haul->step == 1)
		return 75;
	return 100;
}

static __always_inline __u32 window_of(const struct longhaul *haul, const struct tcp_sock *tp, __u32 percent)
{
	__u64 bdp = bandwidth_of(haul) * haul->rtt_min_us / 1000000;

	return bdp * percent / 100 / graft_max(tp->mss_cache, 1U) + CWND_LEAST;
}

static __always_inline void set_window(struct longhaul *haul, struct tcp_sock *tp, __u32 acked)
{
	__u32 target, cwnd = tp->snd_cwnd;

	if (!haul->rtt_min_us || !bandwidth_of(haul)) {
		cwnd += acked;
	} else if (haul->phase == PROBE_RTT) {
		cwnd = graft_min(cwnd, window_of(haul, tp, 50));
	} else {
		/* In start-up what is known of the bandwidth is what was sent: it bounds where growth ends, not its steps. */
		target = window_of(haul, tp, haul->phase == STARTUP ? STARTUP_PERCENT : config.cwnd_percent);
		if (haul->phase == STARTUP)
			cwnd += cwnd < target ? acked : 0;
		else
			cwnd = graft_min(cwnd + acked, target);
	}
	cwnd = graft_max(cwnd, (__u32)CWND_LEAST);
	tp->snd_cwnd = graft_min(cwnd, tp->snd_cwnd_clamp);
}

static __always_inline void set_rate(struct longhaul *haul, struct sock *sk)
{
	struct tcp_sock *tp = graft_tcp(sk);
	__u64 rate = bandwidth_of(haul) * pacing_percent(haul) / 100 * PACING_MARGIN / 100;

	if (!rate)
		rate = initial_rate(tp);
	/* Never more slowly than in start-up before there is a rate to go by. */
	if (haul->phase != STARTUP || rate > sk->sk_pacing_rate || !sk->sk_pacing_rate)
		sk->sk_pacing_rate = graft_max(rate, (__u64)tp->mss_cache);
}

SEC("struct_ops")
void BPF_PROG(longhaul_cong_control, struct sock *sk)
{
	struct longhaul *haul = graft_state(sk);
	struct tcp_sock *tp = graft_tcp(sk);
	__u32 acked = tp->delivered - haul->delivered;

	haul->delivered = tp->delivered;
	take_rate(haul, tp);
	if (IS_AFTER(tp->delivered, haul->round_end))
		end_round(haul, tp);
	if (haul->phase == DRAIN && graft_in_flight(tp) <= window_of(haul, tp, 100)) {
		haul->phase = PROBE;
		haul->step = 2;
		begin_round(haul, tp);
	}
	check_rtt(haul, tp, now_us());
	set_window(haul, tp, acked);
	set_rate(haul, sk);
}

/* Losses do not move the window; too many move `bound`. */
SEC("struct_ops")
__u32 BPF_PROG(longhaul_ssthresh, struct sock *sk)
{
	return graft_tcp(sk)->snd_ssthresh;
}

SEC("struct_ops")
__u32 BPF_PROG(longhaul_undo_cwnd, struct sock *sk)
{
	return graft_tcp(sk)->snd_cwnd;
}

/* Room to fill the window while losses are repaired. */
SEC("struct_ops")
__u32 BPF_PROG(longhaul_sndbuf_expand, struct sock *sk)
{
	return 3;
}

SEC(".struct_ops")
struct tcp_congestion_ops mr_longhaul = {
	.init = (void *)longhaul_init,
	.pkts_acked = (void *)longhaul_pkts_acked,
	.cong_control = (void *)longhaul_cong_control,
	.ssthresh = (void *)longhaul_ssthresh,
	.undo_cwnd = (void *)longhaul_undo_cwnd,
	.sndbuf_expand = (void *)longhaul_sndbuf_expand,
	.name = "mr_longhaul",
};

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
