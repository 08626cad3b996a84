// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* PCC, after Vivace (Dong et al., NSDI 2018). It tries a rate above the current one and a rate below it, each
 * for a round trip. It measures loss and delay of both trials, and moves the rate in the direction in which
 * the utility grows:
 *
 *   u(x) = x^0.9 - b x d(RTT)/dt - c x loss        x in Mbit/s
 *
 * There is no timer. A trial is a range of packets in sending order; it is judged when all of them are
 * delivered or lost. Two things differ from the paper, to be less sensitive to noise. The growth of the
 * round trip counts only as far as it differs between the two trials, since other traffic affects both. The
 * same holds for loss, unless chance explains the difference.
 */
#include "graft.h"

struct pcc_config {
	/* permille by which the rate of each of the two trials is above or below the current rate */
	__u32 trial_permille;
	__u32 latency_permille; /* coefficient b (latency) of the utility */
	__u32 loss_permille;	/* coefficient c (loss) of the utility */
	__u32 step_permille;	/* permille by which the rate changes at a utility gradient of 1 */
};

SEC(".rodata.config")
const volatile struct pcc_config config = {
	.trial_permille = 80,
	.latency_permille = 1400,
	.loss_permille = 11350,
	.step_permille = 50,
};

#define TRIALS 2

/* STARTUP doubles the rate until the utility falls, and DRAIN empties the queue. FIRST and SECOND send the two trials,
 * and WAIT sends at the current rate until both trials are evaluated. After WAIT comes FIRST again, or STARTUP if the
 * rate is far too low.
 */
enum phase {
	STARTUP,
	DRAIN,
	FIRST,
	SECOND,
	WAIT, /* sends at the current rate until both trials are evaluated */
};

/* Measured loss and delay of a trial, or of one round trip of phase STARTUP. */
struct outcome {
	__u32 sent;
	__u32 lost;
	__s32 growth_ppm; /* growth of the round-trip time during the trial, us per second */
};

struct pcc {
	__u64 rate;	/* current rate, bytes/s */
	__u64 since_us; /* time at which the phase began, us */
	__u64 judged_since_us;
	__s64 best; /* highest utility of any round trip of phase STARTUP so far */
	/* The trial that is being evaluated: its range of packets, and the sum and number of round-trip samples in each
	 * half of the trial.
	 */
	__u32 from;
	__u32 until;
	__u32 delivered; /* value of `delivered` when the evaluated trial began */
	__u32 lost;	 /* value of `lost` when the evaluated trial began */
	__u64 rtt_sum_us[2];
	__u16 rtts[2];
	/* numbers of packets sent until the first trial began, until the second one began, and until the second one
	 * ended
	 */
	__u32 bound[TRIALS + 1];
	struct outcome first;
	__u8 phase;
	__u8 trial;	/* number of the trial that is being evaluated; 0: none yet */
	__u8 is_lower;	/* 1: the first trial has the lower rate, the second one the higher */
	__u8 is_usable; /* 1: both trials were really sent at their rates */
	__u8 worse;	/* number of consecutive round trips of STARTUP in which the utility did not grow */
	__s8 steps;	/* number of consecutive rate changes in one direction; negative: downwards */
};

_Static_assert(sizeof(struct pcc) <= GRAFT_STATE_BYTES, "room in the socket");

#define ONE	  1024
#define STEPS_MAX 6
/* number of consecutive increases of the rate, without a queue on the path, after which the rate counts as far too low
 */
#define STEPS_ASTRAY	  4
#define USUAL_LOSS_PART	  20
#define TRIAL_PACKETS_MIN 8
#define WINDOW_MIN	  10
#define INITIAL_RTT_US	  100000
#define RATE_MAX	  (1ULL << 40)
#define PPM		  1000000
#define GROWTH_MAX_PPM	  (10 * PPM)
#define IS_AFTER(a, b)	  ((__s32)((a) - (b)) >= 0)

/* TCP's counters and measurements at the begin of a callback. */
struct moment {
	__u64 us;
	__u32 rtt_us;
	__u32 rtt_min_us;
	__u32 packet_bytes;
	__u32 delivered;
	__u32 lost;
	__u32 judged; /* number of packets delivered or lost so far; a retransmission counts again */
	__u32 in_flight;
	__u32 sent;
	__u32 is_limited; /* 1: the application limits the rate, not the congestion control */
};

/* A copy of the connection's state on the stack. Functions that take it are not static, so the verifier
 * checks each of them once instead of for thousands of paths to it. Such functions have to check the pointer
 * for NULL.
 */
struct flow {
	struct pcc pcc;
	struct moment now;
};

static __always_inline void look(struct moment *now, const struct tcp_sock *tp)
{
	__u32 srtt_us = tp->srtt_us;

	now->us = bpf_ktime_get_ns() / 1000;
	now->rtt_us = srtt_us ? graft_at_least_1(srtt_us >> 3) : INITIAL_RTT_US;
	now->rtt_min_us = graft_rtt_min_us(tp);
	now->packet_bytes = graft_at_least_1(tp->mss_cache);
	now->delivered = tp->delivered;
	now->lost = tp->lost;
	now->judged = now->delivered + now->lost;
	now->in_flight = graft_in_flight(tp);
	now->sent = now->judged + now->in_flight;
	now->is_limited = tp->app_limited;
}

static __always_inline __u64 bytes_in(const struct pcc *pcc, __u64 us)
{
	return pcc->rate * us / PPM;
}

static __always_inline void judge_until(struct pcc *pcc, const struct moment *now, __u32 until)
{
	pcc->judged_since_us = now->us;
	pcc->from = now->judged;
	pcc->until = until;
	pcc->delivered = now->delivered;
	pcc->lost = now->lost;
	pcc->rtt_sum_us[0] = 0;
	pcc->rtt_sum_us[1] = 0;
	pcc->rtts[0] = 0;
	pcc->rtts[1] = 0;
}

static __always_inline __u64 bounded(const struct moment *now, __u64 rate)
{
	__u64 least = (__u64)GRAFT_CWND_MIN * now->packet_bytes * PPM / now->rtt_us;

	return graft_smaller(graft_larger(rate, least), RATE_MAX);
}

static __always_inline void begin(struct pcc *pcc, const struct moment *now, __u8 phase)
{
	pcc->phase = phase;
	pcc->since_us = now->us;
}

static __always_inline void begin_startup(struct pcc *pcc, const struct moment *now)
{
	pcc->best = 0;
	pcc->worse = 0;
	pcc->steps = 0;
	begin(pcc, now, STARTUP);
	/* The first evaluation of STARTUP takes place when a packet that is sent from now on was delivered or lost. */
	judge_until(pcc, now, now->sent + 1);
}

SEC("struct_ops")
void BPF_PROG(pcc_init, struct sock *sk)
{
	struct pcc *pcc = graft_state(sk);
	struct tcp_sock *tp = graft_tcp(sk);
	struct moment now;

	__builtin_memset(pcc, 0, sizeof(*pcc));
	look(&now, tp);
	/* The initial window is paced over half a round trip. */
	pcc->rate = bounded(&now, 2ULL * tp->snd_cwnd * now.packet_bytes * PPM / now.rtt_us);
	begin_startup(pcc, &now);
	tp->snd_ssthresh = GRAFT_SSTHRESH_NONE;
	graft_pace(sk);
	sk->sk_pacing_rate = pcc->rate;
}

SEC("struct_ops")
void BPF_PROG(pcc_pkts_acked, struct sock *sk, const struct ack_sample *sample)
{
	struct pcc *pcc = graft_state(sk);
	struct tcp_sock *tp = graft_tcp(sk);
	bool is_late = tp->delivered + tp->lost - pcc->from > (pcc->until - pcc->from) / 2;
	__s32 rtt_us = sample->rtt_us;

	if (rtt_us <= 0)
		return;
	if (is_late && pcc->rtts[1] < 0xffff) {
		pcc->rtt_sum_us[1] += rtt_us;
		pcc->rtts[1]++;
	} else if (!is_late && pcc->rtts[0] < 0xffff) {
		pcc->rtt_sum_us[0] += rtt_us;
		pcc->rtts[0]++;
	}
}

/* Returns by how much the round trip grew during a trial, in us per second. The growth is measured from the middle of
 * the trial's first half to the middle of its second half.
 */
static __always_inline __s32 growth_ppm(const struct pcc *pcc, __u64 spent_us)
{
	__s64 grown;
	__u64 ppm;

	if (!pcc->rtts[0] || !pcc->rtts[1])
		return 0;
	grown = pcc->rtt_sum_us[1] / pcc->rtts[1] - pcc->rtt_sum_us[0] / pcc->rtts[0];
	ppm = graft_magnitude(grown) * 2 * PPM / graft_at_least_1(spent_us);
	return graft_sign(grown) * (__s32)graft_smaller(ppm, GROWTH_MAX_PPM);
}

__noinline int pcc_judge(const struct flow *flow, struct outcome *outcome)
{
	if (!flow || !outcome)
		return 0;
	outcome->lost = flow->now.lost - flow->pcc.lost;
	outcome->sent = flow->now.delivered - flow->pcc.delivered + outcome->lost;
	outcome->growth_ppm = growth_ppm(&flow->pcc, flow->now.us - flow->pcc.judged_since_us);
	return 0;
}

/* Shifts `x` right by `bits` if it has more than `bits` bits. Returns by how many bits it was shifted. */
static __always_inline __u32 shorten(__u64 *x, __u32 bits)
{
	__u32 off = (((1ULL << bits) - 1 - *x) >> 63) * bits;

	*x >>= off;
	return off;
}

/* Returns the binary logarithm in 1024ths of a number below 2^50, interpolated linearly between powers of
 * two.
 */
static __always_inline __s64 log2_of(__u64 x)
{
	__u64 high = x;
	__u32 log = shorten(&high, 32);

	log += shorten(&high, 16);
	log += shorten(&high, 8);
	log += shorten(&high, 4);
	log += shorten(&high, 2);
	log += shorten(&high, 1);
	return (__s64)log * ONE + (x * ONE >> log) - ONE;
}

#define LOG2_OF_MBIT 10205 /* 1024 times the binary logarithm of 1000 kbit/s */
#define FINE_BITS    20

/* Returns x^-0.1 in 1024ths, for x in kbit/s relative to 1 Mbit/s: e^-y as (1 - y/64)^64, with y = 0.1 ln
 * x.
 */
__noinline __s64 pcc_damping(__u64 kbit)
{
	/* 1136 / 1024 is the factor 0.1 ln 2 / 64 / 1024, scaled by 2^FINE_BITS. */
	__s64 value = (1 << FINE_BITS) - ((log2_of(kbit) - LOG2_OF_MBIT) * 1136 >> 10);

	value = value * value >> FINE_BITS;
	value = value * value >> FINE_BITS;
	value = value * value >> FINE_BITS;
	value = value * value >> FINE_BITS;
	value = value * value >> FINE_BITS;
	value = value * value >> FINE_BITS;
	return value >> (FINE_BITS - 10);
}

static __always_inline __u64 kbit_of(__u64 rate)
{
	return graft_at_least_1(rate / 125);
}

/* Multiplies a coefficient in permille by a share in ppm. Returns the product in 1024ths. */
static __always_inline __s64 weighed(__u32 permille, __u64 ppm)
{
	return permille * ppm / 1000 * ONE / PPM;
}

/* Returns the utility of one round trip of phase STARTUP. The first round trips have few packets, so a loss rate that
 * random losses can explain is not counted.
 */
__noinline __s64 pcc_utility(__u64 kbit, const struct outcome *it)
{
	__u32 usual, excess;
	__s64 worth;

	if (!it)
		return 0;
	worth = pcc_damping(kbit);
	usual = it->sent / USUAL_LOSS_PART;
	excess = it->lost > usual ? it->lost - usual : 0;
	if (excess > 2 && (__u64)excess * excess > 4 * usual)
		worth -= weighed(config.loss_permille, (__u64)it->lost * PPM / graft_at_least_1(it->sent));
	if (it->growth_ppm > 0)
		worth -= weighed(config.latency_permille, it->growth_ppm);
	return worth * (__s64)kbit;
}

/* Divides a difference between the measurements of both trials by the relative difference of their rates, which is
 * twice `trial_permille`. Returns the quotient times a coefficient in permille.
 */
static __always_inline __s64 by_rate(__u32 permille, __s64 ppm)
{
	return graft_sign(ppm) * (weighed(permille, graft_magnitude(ppm)) * 500ULL / config.trial_permille);
}

/* Returns the difference between the loss rates of both trials in ppm; 0 if it is within two standard deviations. The
 * standard deviation of a count is its square root.
 */
static __always_inline __s64 loss_difference(const struct outcome *higher, const struct outcome *lower)
{
	__u64 sent = graft_at_least_1(lower->sent);
	__s64 difference = (__u64)higher->lost * lower->sent - (__u64)lower->lost * higher->sent;
	__u64 packets = graft_magnitude(difference) / sent;

	if (packets * packets <= 4ULL * (higher->lost + lower->lost))
		return 0;
	return graft_sign(difference) *
	       (graft_magnitude(difference) * PPM / graft_at_least_1(higher->sent * sent));
}

/* Returns the gradient of the utility, du/dx, in 1024ths. */
__noinline __s64 pcc_gradient(__u64 rate, const struct outcome *higher, const struct outcome *lower)
{
	__s64 value;
	__u32 all;

	if (!higher || !lower)
		return 0;
	all = graft_at_least_1(higher->sent + lower->sent);
	value = pcc_damping(kbit_of(rate)) * 922 >> 10;
	value -= weighed(config.loss_permille, (__u64)(higher->lost + lower->lost) * PPM / all);
	value -= by_rate(config.latency_permille, (__s64)higher->growth_ppm - lower->growth_ppm);
	return value - by_rate(config.loss_permille, loss_difference(higher, lower));
}

__noinline int pcc_set_rate(struct flow *flow, __u64 rate)
{
	if (!flow)
		return 0;
	flow->pcc.rate = bounded(&flow->now, rate);
	return 0;
}

/* Changes the rate in the direction of the gradient. Consecutive changes in one direction become larger. */
__noinline int pcc_step(struct flow *flow, __s64 towards)
{
	__u64 length, rate;
	__s32 steps;

	if (!flow)
		return 0;
	rate = flow->pcc.rate;
	steps = flow->pcc.steps * graft_sign(towards);
	steps = steps < 0 ? 1 : graft_smaller(steps + 1, STEPS_MAX);
	flow->pcc.steps = steps * graft_sign(towards);
	length = graft_smaller(graft_magnitude(towards), ONE) * config.step_permille * steps;
	length = graft_smaller(rate / 1000 * length / ONE, rate / 2);
	return pcc_set_rate(flow, rate + graft_sign(towards) * length);
}

static __always_inline void begin_trials(struct pcc *pcc, const struct moment *now)
{
	/* The order of the two trials is random, so that a trend of the path does not favour one direction.
	 */
	pcc->is_lower = bpf_get_prandom_u32() & 1;
	pcc->is_usable = 1;
	pcc->trial = 0;
	pcc->bound[0] = now->sent;
	begin(pcc, now, FIRST);
}

/* Evaluates one round trip of phase STARTUP: the packets that were sent in the previous round trip. */
__noinline int pcc_end_round(struct flow *flow)
{
	struct outcome it = {};
	struct moment *now;
	__u64 spent, rate;
	struct pcc *pcc;
	__s64 worth;

	if (!flow)
		return 0;
	pcc = &flow->pcc;
	now = &flow->now;
	spent = graft_at_least_1(now->us - pcc->judged_since_us);
	/* `rate` is the delivery rate that was measured in the evaluated round trip, bytes/s. */
	rate = (__u64)(now->delivered - pcc->delivered) * now->packet_bytes * PPM / spent;
	pcc_judge(flow, &it);
	worth = pcc_utility(kbit_of((__u64)it.sent * now->packet_bytes * PPM / spent), &it);
	judge_until(pcc, now, now->judged + graft_at_least_1(now->in_flight));
	if (now->is_limited)
		return 0;
	if (worth > pcc->best) {
		pcc->best = worth;
		pcc->worse = 0;
		/* The utility still grows: double the rate. */
		rate = pcc->rate * 2;
	} else if (++pcc->worse < 2) {
		return 0;
	} else {
		begin(pcc, now, DRAIN);
	}
	return pcc_set_rate(flow, rate);
}

/* Returns whether a trial is long enough. If the trial was not sent at its rate, both trials are marked as
 * not usable.
 */
static __always_inline bool is_sent(struct pcc *pcc, const struct moment *now, __u32 packets)
{
	__u64 spent = now->us - pcc->since_us;

	if (spent < now->rtt_us || (packets < TRIAL_PACKETS_MIN && spent < 4ULL * now->rtt_us))
		return false;
	if (now->is_limited || 2ULL * packets * now->packet_bytes < bytes_in(pcc, spent))
		pcc->is_usable = 0;
	return true;
}

/* Returns how many trials have been sent completely, 0 to 2. */
static __always_inline __u64 trials_sent(const struct pcc *pcc)
{
	__u64 sent = pcc->phase - FIRST;

	/* Without this barrier, clang uses the phase itself as an array index, whose bounds the verifier does
	 * not know.
	 */
	barrier_var(sent);
	return sent;
}

__noinline int pcc_send_trials(struct flow *flow)
{
	__u64 at;

	if (!flow)
		return 0;
	at = trials_sent(&flow->pcc);
	if (at >= TRIALS || !is_sent(&flow->pcc, &flow->now, flow->now.sent - flow->pcc.bound[at]))
		return 0;
	flow->pcc.bound[at + 1] = flow->now.sent;
	begin(&flow->pcc, &flow->now, FIRST + at + 1);
	return 0;
}

static __always_inline bool is_astray(const struct pcc *pcc, const struct moment *now)
{
	__u32 least = now->rtt_min_us;

	return pcc->steps >= STEPS_ASTRAY && now->rtt_us <= least + least / 8;
}

__noinline int pcc_decide(struct flow *flow)
{
	struct outcome of[TRIALS] = {};
	__s64 towards;
	bool is_lower;

	if (!flow)
		return 0;
	is_lower = flow->pcc.is_lower;
	of[0] = flow->pcc.first;
	pcc_judge(flow, &of[1]);
	towards = is_lower ? pcc_gradient(flow->pcc.rate, &of[1], &of[0])
			   : pcc_gradient(flow->pcc.rate, &of[0], &of[1]);
	if (flow->pcc.is_usable)
		pcc_step(flow, towards);
	if (is_astray(&flow->pcc, &flow->now))
		begin_startup(&flow->pcc, &flow->now);
	else
		begin_trials(&flow->pcc, &flow->now);
	return 0;
}

/* Evaluates the trials whose packets are all delivered or lost, which is about a round trip after they were
 * sent.
 */
__noinline int pcc_judge_trials(struct flow *flow)
{
	struct pcc *pcc;
	__u64 at, sent;

	if (!flow)
		return 0;
	pcc = &flow->pcc;
	at = pcc->trial;
	barrier_var(at);
	sent = trials_sent(pcc);
	if (at > TRIALS || sent < at || !IS_AFTER(flow->now.judged, pcc->bound[at]))
		return 0;
	if (at == TRIALS)
		return pcc_decide(flow);
	if (at == 1)
		pcc_judge(flow, &pcc->first);
	pcc->trial = at + 1;
	judge_until(pcc, &flow->now, sent == at ? flow->now.sent : pcc->bound[at + 1]);
	return 0;
}

/* Returns whether the packets in flight fit the path without building a queue. */
static __always_inline bool is_drained(const struct pcc *pcc, const struct moment *now)
{
	return now->in_flight <= bytes_in(pcc, now->rtt_min_us) / now->packet_bytes + WINDOW_MIN;
}

static __always_inline void go_on(struct flow *flow)
{
	if (flow->pcc.phase == STARTUP) {
		if (IS_AFTER(flow->now.judged, flow->pcc.until))
			pcc_end_round(flow);
	} else if (flow->pcc.phase == DRAIN) {
		if (is_drained(&flow->pcc, &flow->now))
			begin_trials(&flow->pcc, &flow->now);
	} else {
		pcc_send_trials(flow);
		pcc_judge_trials(flow);
	}
}

static __always_inline __u64 pacing_rate(const struct pcc *pcc)
{
	__u64 difference = pcc->rate * config.trial_permille / 1000;

	if (pcc->phase == DRAIN)
		return pcc->rate / 2;
	if (pcc->phase != FIRST && pcc->phase != SECOND)
		return pcc->rate;
	return (pcc->phase == FIRST) == pcc->is_lower ? pcc->rate - difference : pcc->rate + difference;
}

SEC("struct_ops")
void BPF_PROG(pcc_cong_control, struct sock *sk)
{
	struct tcp_sock *tp = graft_tcp(sk);
	struct pcc *kept = graft_state(sk);
	struct flow flow = {.pcc = *kept};
	__u64 window;

	look(&flow.now, tp);
	go_on(&flow);
	*kept = flow.pcc;
	/* The pacing rate controls sending. The window only bounds how much is sent when no more
	 * acknowledgements arrive.
	 */
	window = 2 * bytes_in(&flow.pcc, flow.now.rtt_us) / flow.now.packet_bytes + WINDOW_MIN;
	tp->snd_cwnd = graft_smaller(window, tp->snd_cwnd_clamp);
	sk->sk_pacing_rate = graft_at_least_1(pacing_rate(&flow.pcc));
}

/* Losses enter only the trials' utility. */
GRAFT_RATE_BASED(pcc);

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
