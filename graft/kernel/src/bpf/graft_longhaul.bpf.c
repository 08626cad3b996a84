// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* A congestion control for long, lossy paths: it sends at the measured delivery rate, as BBR does
 * (draft-ietf-ccwg-bbr). A loss counts as congestion only if more than `loss_permille` of a round is lost.
 *
 * It models the path by the greatest delivery rate of the latest rounds and the least round trip of the
 * latest seconds. In one of eight rounds it paces a quarter faster to probe for bandwidth, and in the next
 * one a quarter slower to drain the queue.
 */
#include "graft.h"

struct longhaul_config {
	/* permille of a round's packets that may be lost without counting as congestion */
	__u32 loss_permille;
	__u32 cwnd_percent; /* congestion window, in percent of bandwidth times round trip */
	/* percent to which the model's bandwidth is reduced after a round trip in which too many packets were lost */
	__u32 back_off_percent;
	__u32 rtt_window_ms; /* time after which the least round trip is measured again */
};

SEC(".rodata.config")
const volatile struct longhaul_config config = {
	.loss_permille = 150,
	.cwnd_percent = 185,
	.back_off_percent = 85,
	.rtt_window_ms = 10000,
};

/* STARTUP raises the rate until it grows no more, and DRAIN empties the queue. PROBE then cycles around the
 * measured rate. PROBE_RTT reduces the window from time to time, to measure the least round trip.
 */
enum phase {
	STARTUP,
	DRAIN,
	PROBE,
	PROBE_RTT,
};

struct longhaul {
	/* greatest delivery rate, bytes/s: [0] in the present period of EPOCH_ROUNDS round trips, [1] in the previous
	 * period
	 */
	__u64 bandwidth[2];
	__u64 bound; /* upper limit of the estimated bandwidth, set when too many packets were lost, bytes/s */
	/* rate at the latest growth by a quarter, bytes/s; STARTUP ends after three rounds without such
	 * growth
	 */
	__u64 full;
	__u64 rtt_since_us;
	__u64 phase_until_us; /* end of PROBE_RTT, us */
	__u32 rtt_min_us;
	__u32 round_end;       /* value of `delivered` at which the round ends */
	__u32 round_delivered; /* value of `delivered` when the round began */
	__u32 round_lost;      /* value of `lost` when the round began */
	__u32 delivered;       /* value of `delivered` at the previous acknowledgement */
	__u32 cwnd_before;     /* congestion window before PROBE_RTT, packets */
	__u8 phase;
	__u8 step; /* index of the present round trip in the cycle of eight round trips of phase PROBE */
	__u8 flat_rounds;
	__u8 rounds; /* number of round trips since the present period of `bandwidth` began */
};

_Static_assert(sizeof(struct longhaul) <= GRAFT_STATE_BYTES, "room in the socket");

#define CYCLE		8
#define EPOCH_ROUNDS	8
#define CWND_LEAST	4
#define PROBE_RTT_US	200000
#define STARTUP_PERCENT 289
#define DRAIN_PERCENT	35
/* percent of the computed pacing rate that is used; below 100, so that queues in the network drain */
#define PACING_MARGIN  99
#define INITIAL_RTT_US 100000
#define IS_AFTER(a, b) ((__s32)((a) - (b)) >= 0)

#define NO_BOUND (1ULL << 62)

/* TCP's counters and measurements at an acknowledgement. */
struct moment {
	__u64 us;
	__u64 rate; /* delivery rate measured by TCP, bytes/s; 0: none yet */
	__u32 srtt_us;
	__u32 packet_bytes;
	__u32 delivered;
	__u32 lost;
	__u32 in_flight;
	__u32 cwnd;
	__u32 acked;
};

/* A copy of the connection's state on the stack. Functions that take it are not static, so the verifier
 * checks each of them once instead of for every path to it. Such functions have to check the pointer for
 * NULL.
 */
struct flow {
	struct longhaul haul;
	struct moment now;
};

static __always_inline __u64 now_us(void)
{
	return bpf_ktime_get_ns() / 1000;
}

static __always_inline __u64 greatest(const struct longhaul *haul)
{
	return graft_larger(haul->bandwidth[0], haul->bandwidth[1]);
}

static __always_inline __u64 bandwidth_of(const struct longhaul *haul)
{
	return graft_smaller(haul->bound, greatest(haul));
}

/* Returns the pacing rate in bytes/s while no delivery rate has been measured. */
static __always_inline __u64 initial_rate(__u32 srtt_us, __u32 cwnd, __u32 packet_bytes)
{
	__u64 rtt_us = srtt_us ? srtt_us : INITIAL_RTT_US;

	return (__u64)cwnd * packet_bytes * 1000000 / rtt_us * STARTUP_PERCENT / 100;
}

SEC("struct_ops")
void BPF_PROG(longhaul_init, struct sock *sk)
{
	struct longhaul *haul = graft_state(sk);
	struct tcp_sock *tp = graft_tcp(sk);

	haul->bandwidth[0] = 0;
	haul->bandwidth[1] = 0;
	haul->bound = NO_BOUND;
	haul->full = 0;
	haul->rtt_since_us = now_us();
	haul->phase_until_us = 0;
	haul->rtt_min_us = graft_rtt_min_us(tp);
	/* A round ends when all packets that are in flight now have been delivered. */
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
	sk->sk_pacing_rate = initial_rate(tp->srtt_us >> 3, tp->snd_cwnd, tp->mss_cache);
}

/* Ends STARTUP when the delivery rate has not grown by a quarter for three rounds. */
static __always_inline void judge_growth(struct longhaul *haul)
{
	__u64 bandwidth = bandwidth_of(haul);

	if (haul->phase != STARTUP)
		return;
	if (bandwidth >= haul->full + haul->full / 4) {
		haul->full = bandwidth;
		haul->flat_rounds = 0;
	} else if (++haul->flat_rounds >= 3) {
		haul->phase = DRAIN;
	}
}

/* Returns whether significantly more packets were lost than the tolerated number: by more than two standard deviations.
 * The standard deviation of a count is its square root, which matters in the short first rounds.
 */
static __always_inline bool is_more(__u64 lost, __u64 tolerated)
{
	__u64 excess = lost - graft_smaller(lost, tolerated);

	return excess > 2 && excess * excess > 4 * tolerated;
}

__noinline int longhaul_judge_loss(struct flow *flow)
{
	__u64 lost, sent, bound;
	struct longhaul *haul;

	if (!flow || flow->haul.phase == DRAIN)
		return 0;
	haul = &flow->haul;
	lost = flow->now.lost - haul->round_lost;
	sent = flow->now.delivered - haul->round_delivered + lost;
	if (is_more(lost, sent * config.loss_permille / 1000)) {
		/* STARTUP overshoots at its end. Losses therefore only end STARTUP, and do not reduce the
		 * bandwidth limit.
		 */
		if (haul->phase == STARTUP)
			haul->phase = DRAIN;
		else
			haul->bound = bandwidth_of(haul) * config.back_off_percent / 100;
	} else if (haul->step == 0) {
		/* The round trip of the cycle with the higher pacing rate lost no more packets than allowed, so the
		 * limit of the estimated bandwidth may rise.
		 */
		bound = haul->bound + haul->bound / 4;
		haul->bound = bound < greatest(haul) ? bound : NO_BOUND;
	}
	return 0;
}

static __always_inline void begin_round(struct flow *flow)
{
	flow->haul.round_delivered = flow->now.delivered;
	flow->haul.round_lost = flow->now.lost;
	flow->haul.round_end = flow->now.delivered + graft_at_least_1(flow->now.in_flight);
}

__noinline int longhaul_end_round(struct flow *flow)
{
	struct longhaul *haul;

	if (!flow)
		return 0;
	haul = &flow->haul;
	judge_growth(haul);
	longhaul_judge_loss(flow);
	if (haul->phase == PROBE)
		haul->step = (haul->step + 1) % CYCLE;
	if (++haul->rounds >= EPOCH_ROUNDS) {
		/* A new period of EPOCH_ROUNDS round trips begins; the greatest delivery rate of the previous period
		 * stays valid for one more period.
		 */
		haul->bandwidth[1] = haul->bandwidth[0];
		haul->bandwidth[0] = flow->now.rate;
		haul->rounds = 0;
	}
	begin_round(flow);
	return 0;
}

/* Starts and ends PROBE_RTT, which drains the queue so that the least round trip can be measured. */
__noinline int longhaul_check_rtt(struct flow *flow)
{
	struct longhaul *haul;
	__u64 us;

	if (!flow)
		return 0;
	haul = &flow->haul;
	us = flow->now.us;
	if (haul->phase == PROBE_RTT) {
		if (us < haul->phase_until_us)
			return 0;
		haul->phase = PROBE;
		haul->step = 2;
		/* The congestion window of before PROBE_RTT is restored at once. */
		flow->now.cwnd = graft_larger(flow->now.cwnd, haul->cwnd_before);
	} else if (haul->phase == PROBE && us - haul->rtt_since_us > (__u64)config.rtt_window_ms * 1000) {
		haul->phase = PROBE_RTT;
		haul->cwnd_before = flow->now.cwnd;
		haul->phase_until_us = us + PROBE_RTT_US + flow->now.srtt_us;
		haul->rtt_min_us = 0;
		haul->rtt_since_us = us;
	}
	return 0;
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

static __always_inline __u64 pacing_percent(const struct longhaul *haul)
{
	switch (haul->phase) {
	case STARTUP:
		return STARTUP_PERCENT;
	case DRAIN:
		return DRAIN_PERCENT;
	case PROBE:
		if (haul->step < 2)
			return haul->step ? 75 : 125;
	}
	return 100;
}

static __always_inline __u64 window_of(const struct flow *flow, __u64 percent)
{
	__u64 bdp = bandwidth_of(&flow->haul) * flow->haul.rtt_min_us / 1000000;

	return bdp * percent / 100 / flow->now.packet_bytes + CWND_LEAST;
}

/* Returns the congestion window in packets. */
__noinline __u64 longhaul_window(const struct flow *flow)
{
	__u64 cwnd, more, percent, target;
	__u32 phase;

	if (!flow)
		return CWND_LEAST;
	phase = flow->haul.phase;
	cwnd = flow->now.cwnd;
	more = cwnd + flow->now.acked;
	if (!flow->haul.rtt_min_us || !bandwidth_of(&flow->haul))
		return graft_larger(more, CWND_LEAST);
	percent = phase == STARTUP ? STARTUP_PERCENT : phase == PROBE_RTT ? 50 : config.cwnd_percent;
	target = window_of(flow, percent);
	/* In STARTUP the measured delivery rate is only the rate at which packets were sent. It bounds the window, but
	 * does not slow the window's growth.
	 */
	if (phase == STARTUP)
		return graft_larger(cwnd < target ? more : cwnd, CWND_LEAST);
	return graft_larger(graft_smaller(phase == PROBE_RTT ? cwnd : more, target), CWND_LEAST);
}

/* Returns the pacing rate in bytes/s. */
static __always_inline __u64 rate_of(const struct flow *flow, __u64 before)
{
	const struct longhaul *haul = &flow->haul;
	const struct moment *now = &flow->now;
	__u64 rate = bandwidth_of(haul) * pacing_percent(haul) / 100 * PACING_MARGIN / 100;

	if (!rate)
		rate = initial_rate(now->srtt_us, now->cwnd, now->packet_bytes);
	/* In STARTUP the pacing rate never falls, not even below the rate that was used before the first measurement.
	 */
	if (haul->phase == STARTUP && rate <= before)
		return before;
	return graft_larger(rate, now->packet_bytes);
}

static __always_inline void look(struct moment *now, const struct tcp_sock *tp)
{
	__u32 interval_us = tp->rate_interval_us;

	now->us = now_us();
	now->packet_bytes = graft_at_least_1(tp->mss_cache);
	/* Samples in which the application limited the rate are omitted by TCP unless they are higher
	 * (tcp_rate.c).
	 */
	now->rate = interval_us ? (__u64)tp->rate_delivered * now->packet_bytes * 1000000 / interval_us : 0;
	now->srtt_us = tp->srtt_us >> 3;
	now->delivered = tp->delivered;
	now->lost = tp->lost;
	now->in_flight = graft_in_flight(tp);
	now->cwnd = tp->snd_cwnd;
}

SEC("struct_ops")
void BPF_PROG(longhaul_cong_control, struct sock *sk)
{
	struct longhaul *kept = graft_state(sk);
	struct tcp_sock *tp = graft_tcp(sk);
	struct flow flow = {.haul = *kept};
	struct longhaul *haul = &flow.haul;

	look(&flow.now, tp);
	flow.now.acked = flow.now.delivered - haul->delivered;
	haul->delivered = flow.now.delivered;
	haul->bandwidth[0] = graft_larger(haul->bandwidth[0], flow.now.rate);
	if (IS_AFTER(flow.now.delivered, haul->round_end))
		longhaul_end_round(&flow);
	if (haul->phase == DRAIN && flow.now.in_flight <= window_of(&flow, 100)) {
		haul->phase = PROBE;
		haul->step = 2;
		begin_round(&flow);
	}
	longhaul_check_rtt(&flow);
	*kept = flow.haul;
	flow.now.cwnd = graft_smaller(longhaul_window(&flow), tp->snd_cwnd_clamp);
	tp->snd_cwnd = flow.now.cwnd;
	sk->sk_pacing_rate = rate_of(&flow, sk->sk_pacing_rate);
}

/* Only too many losses in a round trip lower the estimated bandwidth (`bound`). */
GRAFT_RATE_BASED(longhaul);

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
