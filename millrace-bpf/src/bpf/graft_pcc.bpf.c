// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* PCC, after Vivace (Dong et al., NSDI 2018): tries a rate somewhat above its own and one somewhat below, each for a round trip,
 * sees what became of the packets of either, and goes where the utility grows:
 *
 *   u(x) = x^0.9 - b x d(RTT)/dt - c x loss        x in Mbit/s
 *
 * There is no timer. A trial is a range of packets in the order in which they were sent; it is judged when all of them are delivered
 * or lost. Two things differ from the paper, both against noise: growth of the round trip counts as far as it differs
 * between the two trials, since what both saw others have caused; and so does loss, if chance does not explain the difference.
 */
#include "graft.h"

struct pcc_config {
	__u32 trial_permille;	/* of the rate, that a trial is above or below it */
	__u32 latency_permille; /* b */
	__u32 loss_permille;	/* c */
	__u32 step_permille;	/* of the rate, for a gradient of 1 */
};

SEC(".rodata.config")
const volatile struct pcc_config config = {
	.trial_permille = 80,
	.latency_permille = 1400,
	.loss_permille = 11350,
	.step_permille = 50,
};

enum phase {
	STARTUP,
	DRAIN,
	FIRST,
	SECOND,
	WAIT, /* until both trials are judged */
};

/* What became of the packets of a trial, or of a round of start-up. */
struct outcome {
	__u32 sent;
	__u32 lost;
	__s32 growth_ppm; /* of the round trip, us per s */
};

struct pcc {
	__u64 rate;	/* bytes/s */
	__u64 since_us; /* the phase */
	__u64 judged_since_us;
	__s64 best; /* utility of a round of start-up */
	/* What is being judged: its packets, and the round trips of either half of them. */
	__u32 from;
	__u32 until;
	__u32 delivered; /* when that began */
	__u32 lost;	 /* likewise */
	__u64 rtt_sum_us[2];
	__u16 rtts[2];
	__u32 bound[3]; /* where the first trial, the second, and what follows begin, in packets sent */
	struct outcome first;
	__u8 phase;
	__u8 trial;	/* that is being judged; 0: none yet */
	__u8 is_lower;	/* the first one is below the rate, the second above */
	__u8 is_usable; /* both were sent at their rates */
	__u8 worse;	/* rounds of start-up in a row */
	__s8 steps;	/* in a row, up or down */
};

_Static_assert(sizeof(struct pcc) <= GRAFT_STATE_BYTES, "room in the socket");

#define ONE		  1024
#define STEPS_MAX	  6
#define STEPS_ASTRAY	  4 /* up, and still no queue: the rate is far off */
#define USUAL_LOSS_PART	  20
#define TRIAL_PACKETS_MIN 8
#define WINDOW_MIN	  10
#define INITIAL_RTT_US	  100000
#define RATE_MAX	  (1ULL << 40)
#define PPM		  1000000
#define GROWTH_MAX_PPM	  (10 * PPM)
#define IS_AFTER(a, b)	  ((__s32)((a) - (b)) >= 0)

static __always_inline __u64 now_us(void)
{
	return bpf_ktime_get_ns() / 1000;
}

static __always_inline __u32 rtt_us(const struct tcp_sock *tp)
{
	return tp->srtt_us ? graft_max(tp->srtt_us >> 3, 1U) : INITIAL_RTT_US;
}

/* Packets of which is known what became of them; one that is sent again counts again. */
static __always_inline __u32 judged(const struct tcp_sock *tp)
{
	return tp->delivered + tp->lost;
}

static __always_inline __u32 sent(const struct tcp_sock *tp)
{
	return judged(tp) + graft_in_flight(tp);
}

static __always_inline __u64 bytes_in(const struct pcc *pcc, __u64 us)
{
	return pcc->rate * us / PPM;
}

static __always_inline void judge_until(struct pcc *pcc, const struct tcp_sock *tp, __u32 until)
{
	pcc->judged_since_us = now_us();
	pcc->from = judged(tp);
	pcc->until = until;
	pcc->delivered = tp->delivered;
	pcc->lost = tp->lost;
	pcc->rtt_sum_us[0] = 0;
	pcc->rtt_sum_us[1] = 0;
	pcc->rtts[0] = 0;
	pcc->rtts[1] = 0;
}

static __always_inline void set_rate(struct pcc *pcc, const struct tcp_sock *tp, __u64 rate)
{
	__u64 least = (__u64)GRAFT_CWND_MIN * tp->mss_cache * PPM / rtt_us(tp);

	pcc->rate = graft_min(graft_max(rate, graft_max(least, 1ULL)), RATE_MAX);
}

static __always_inline void begin(struct pcc *pcc, __u8 phase)
{
	pcc->phase = phase;
	pcc->since_us = now_us();
}

static __always_inline void begin_startup(struct pcc *pcc, const struct tcp_sock *tp)
{
	pcc->best = 0;
	pcc->worse = 0;
	pcc->steps = 0;
	begin(pcc, STARTUP);
	judge_until(pcc, tp, sent(tp) + 1);
}

SEC("struct_ops")
void BPF_PROG(pcc_init, struct sock *sk)
{
	struct pcc *pcc = graft_state(sk);
	struct tcp_sock *tp = graft_tcp(sk);

	__builtin_memset(pcc, 0, sizeof(*pcc));
	/* The first window leaves within half a round trip. */
	set_rate(pcc, tp, 2ULL * tp->snd_cwnd * tp->mss_cache * PPM / rtt_us(tp));
	begin_startup(pcc, tp);
	tp->snd_ssthresh = GRAFT_SSTHRESH_NONE;
	graft_pace(sk);
	sk->sk_pacing_rate = pcc->rate;
}

SEC("struct_ops")
void BPF_PROG(pcc_pkts_acked, struct sock *sk, const struct ack_sample *sample)
{
	struct pcc *pcc = graft_state(sk);
	struct tcp_sock *tp = graft_tcp(sk);
	bool is_late = judged(tp) - pcc->from > (pcc->until - pcc->from) / 2;
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

/* From the middle of its first half to the middle of its second one. */
static __always_inline __s32 growth_ppm(const struct pcc *pcc, __u64 spent_us)
{
	__u64 early, late, grown;

	if (!pcc->rtts[0] || !pcc->rtts[1])
		return 0;
	early = pcc->rtt_sum_us[0] / pcc->rtts[0];
	late = pcc->rtt_sum_us[1] / pcc->rtts[1];
	grown = (late > early ? late - early : early - late) * 2 * PPM / graft_max(spent_us, 1ULL);
	grown = graft_min(grown, (__u64)GROWTH_MAX_PPM);
	return late > early ? (__s32)grown : -(__s32)grown;
}

static __always_inline void judge(const struct pcc *pcc, const struct tcp_sock *tp, struct outcome *outcome)
{
	outcome->lost = tp->lost - pcc->lost;
	outcome->sent = tp->delivered - pcc->delivered + outcome->lost;
	outcome->growth_ppm = growth_ppm(pcc, now_us() - pcc->judged_since_us);
}

/* Takes so many bits off `x` if it has more. Without a branch: the verifier would walk all combinations of them. */
static __always_inline __u32 shorten(__u64 *x, __u32 bits)
{
	__u32 off = (((1ULL << bits) - 1 - *x) >> 63) * bits;

	*x >>= off;
	return off;
}

/* In 1024ths, of less than 2^50; a line between powers of two. */
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

#define LOG2_OF_MBIT 10205 /* of 1000 kbit/s */
#define FINE_BITS    20

/* x^-0.1 in 1024ths, x in kbit/s: e^-y as (1 - y/64)^64, y = 0.1 ln x. */
static __always_inline __s64 damping(__u64 kbit)
{
	/* 0.1 ln 2 / 64 of FINE_BITS. */
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
	return graft_max(rate / 125, 1ULL);
}

/* In 1024ths: a coefficient in permille times a share in ppm. */
static __always_inline __s64 weighed(__u32 permille, __u64 ppm)
{
	return permille * ppm / 1000 * ONE / PPM;
}

/* Of a round of start-up, which is short at first: what chance explains of its loss is left out. */
static __always_inline __s64 utility(__u64 kbit, const struct outcome *it)
{
	__u32 usual = it->sent / USUAL_LOSS_PART, excess = it->lost > usual ? it->lost - usual : 0;
	__s64 worth = damping(kbit);

	if (excess > 2 && (__u64)excess * excess > 4 * usual)
		worth -= weighed(config.loss_permille, (__u64)it->lost * PPM / graft_max(it->sent, 1U));
	if (it->growth_ppm > 0)
		worth -= weighed(config.latency_permille, it->growth_ppm);
	return worth * (__s64)kbit;
}

/* In 1024ths, of a share of loss by which two trials differ, if chance does not explain it: the deviation of a count is its root. */
static __always_inline __s64 loss_difference(const struct outcome *higher, const struct outcome *lower)
{
	__u64 high = (__u64)higher->lost * lower->sent, low = (__u64)lower->lost * higher->sent;
	__u64 scale = graft_max((__u64)higher->sent * lower->sent, 1ULL);
	__u64 difference = high > low ? high - low : low - high;
	__u64 packets = difference / graft_max(lower->sent, 1U);
	__s64 cost;

	if (packets * packets <= 4ULL * (higher->lost + lower->lost))
		return 0;
	/* By the difference of the rates, which is twice that of one to the middle. */
	cost = weighed(config.loss_permille, difference * PPM / scale) * 500 /
	       graft_max(config.trial_permille, 1U);
	return high > low ? cost : -cost;
}

/* du/dx in 1024ths. */
static __always_inline __s64 gradient(const struct pcc *pcc, const struct outcome *higher,
				      const struct outcome *lower)
{
	__u32 all = graft_max(higher->sent + lower->sent, 1U);
	__s32 grown = higher->growth_ppm - lower->growth_ppm;
	__s64 cost, value = damping(kbit_of(pcc->rate)) * 922 >> 10;

	value -= weighed(config.loss_permille, (__u64)(higher->lost + lower->lost) * PPM / all);
	value -= loss_difference(higher, lower);
	cost = weighed(config.latency_permille, grown > 0 ? grown : -grown) * 500 /
	       graft_max(config.trial_permille, 1U);
	return grown > 0 ? value - cost : value + cost;
}

/* The more steps in the same direction, the longer. */
static __always_inline void step(struct pcc *pcc, const struct tcp_sock *tp, __s64 towards)
{
	__u64 length = towards < 0 ? -towards : towards;
	__u32 steps;

	if (towards >= 0)
		pcc->steps = pcc->steps < 0 ? 1 : graft_min(pcc->steps + 1, STEPS_MAX);
	else
		pcc->steps = pcc->steps > 0 ? -1 : graft_max(pcc->steps - 1, -STEPS_MAX);
	steps = pcc->steps < 0 ? -pcc->steps : pcc->steps;
	length = graft_min(length, (__u64)ONE) * config.step_permille * steps;
	length = graft_min(pcc->rate / 1000 * length / ONE, pcc->rate / 2);
	set_rate(pcc, tp, towards < 0 ? pcc->rate - length : pcc->rate + length);
}

static __always_inline void begin_trials(struct pcc *pcc, const struct tcp_sock *tp)
{
	pcc->is_lower = bpf_get_prandom_u32() & 1;
	pcc->is_usable = 1;
	pcc->trial = 0;
	pcc->bound[0] = sent(tp);
	begin(pcc, FIRST);
}

/* A round of start-up is what was sent in the round trip before. */
static __always_inline void end_round(struct pcc *pcc, const struct tcp_sock *tp)
{
	__u64 spent = graft_max(now_us() - pcc->judged_since_us, 1ULL);
	__u64 came = (__u64)(tp->delivered - pcc->delivered) * tp->mss_cache * PPM / spent;
	struct outcome it;
	__s64 worth;

	judge(pcc, tp, &it);
	worth = utility(kbit_of((__u64)it.sent * tp->mss_cache * PPM / spent), &it);
	judge_until(pcc, tp, judged(tp) + graft_max(graft_in_flight(tp), 1U));
	if (tp->app_limited)
		return;
	if (worth > pcc->best) {
		pcc->best = worth;
		pcc->worse = 0;
		set_rate(pcc, tp, pcc->rate * 2);
	} else if (++pcc->worse >= 2) {
		set_rate(pcc, tp, came);
		begin(pcc, DRAIN);
	}
}

/* Whether a trial was long enough; and if it was not sent at its rate, it says nothing. */
static __always_inline bool is_sent(struct pcc *pcc, const struct tcp_sock *tp, __u32 packets)
{
	__u64 spent = now_us() - pcc->since_us;

	if (spent < rtt_us(tp) || (packets < TRIAL_PACKETS_MIN && spent < 4ULL * rtt_us(tp)))
		return false;
	if (tp->app_limited || 2ULL * packets * tp->mss_cache < bytes_in(pcc, spent))
		pcc->is_usable = 0;
	return true;
}

static __always_inline void send_trials(struct pcc *pcc, const struct tcp_sock *tp)
{
	__u32 now = sent(tp);

	if (pcc->phase == FIRST && is_sent(pcc, tp, now - pcc->bound[0])) {
		pcc->bound[1] = now;
		begin(pcc, SECOND);
	} else if (pcc->phase == SECOND && is_sent(pcc, tp, now - pcc->bound[1])) {
		pcc->bound[2] = now;
		begin(pcc, WAIT);
	}
}

static __always_inline bool is_astray(const struct pcc *pcc, const struct tcp_sock *tp)
{
	__u32 least = graft_rtt_min_us(tp);

	return pcc->steps >= STEPS_ASTRAY && rtt_us(tp) <= least + least / 8;
}

static __always_inline void decide(struct pcc *pcc, const struct tcp_sock *tp)
{
	struct outcome second;

	judge(pcc, tp, &second);
	if (pcc->is_usable && pcc->is_lower)
		step(pcc, tp, gradient(pcc, &second, &pcc->first));
	else if (pcc->is_usable)
		step(pcc, tp, gradient(pcc, &pcc->first, &second));
	if (is_astray(pcc, tp))
		begin_startup(pcc, tp);
	else
		begin_trials(pcc, tp);
}

/* Packets are judged in about the order in which they were sent, a round trip later. */
static __always_inline void judge_trials(struct pcc *pcc, const struct tcp_sock *tp)
{
	__u32 now = judged(tp);

	if (pcc->trial == 0 && IS_AFTER(now, pcc->bound[0])) {
		pcc->trial = 1;
		judge_until(pcc, tp, pcc->phase == FIRST ? sent(tp) : pcc->bound[1]);
	} else if (pcc->trial == 1 && pcc->phase != FIRST && IS_AFTER(now, pcc->bound[1])) {
		judge(pcc, tp, &pcc->first);
		pcc->trial = 2;
		judge_until(pcc, tp, pcc->phase == SECOND ? sent(tp) : pcc->bound[2]);
	} else if (pcc->trial == 2 && pcc->phase == WAIT && IS_AFTER(now, pcc->bound[2])) {
		decide(pcc, tp);
	}
}

/* Of the connection's own packets, as many as fit the path without a queue. */
static __always_inline bool is_drained(const struct pcc *pcc, const struct tcp_sock *tp)
{
	__u64 fits = bytes_in(pcc, graft_rtt_min_us(tp)) / graft_max(tp->mss_cache, 1U);

	return graft_in_flight(tp) <= fits + WINDOW_MIN;
}

static __always_inline __u64 pacing_rate(const struct pcc *pcc)
{
	__u64 difference = pcc->rate * config.trial_permille / 1000;

	switch (pcc->phase) {
	case DRAIN:
		return pcc->rate / 2;
	case FIRST:
		return pcc->is_lower ? pcc->rate - difference : pcc->rate + difference;
	case SECOND:
		return pcc->is_lower ? pcc->rate + difference : pcc->rate - difference;
	default:
		return pcc->rate;
	}
}

SEC("struct_ops")
void BPF_PROG(pcc_cong_control, struct sock *sk)
{
	struct pcc *pcc = graft_state(sk);
	struct tcp_sock *tp = graft_tcp(sk);
	__u64 window;

	if (pcc->phase == STARTUP) {
		if (IS_AFTER(judged(tp), pcc->until))
			end_round(pcc, tp);
	} else if (pcc->phase == DRAIN) {
		if (is_drained(pcc, tp))
			begin_trials(pcc, tp);
	} else {
		send_trials(pcc, tp);
		judge_trials(pcc, tp);
	}
	/* The rate decides; the window bounds what a path that has fallen silent is sent. */
	window = 2 * bytes_in(pcc, rtt_us(tp)) / graft_max(tp->mss_cache, 1U) + WINDOW_MIN;
	tp->snd_cwnd = graft_min(window, (__u64)tp->snd_cwnd_clamp);
	sk->sk_pacing_rate = graft_max(pacing_rate(pcc), 1ULL);
}

/* What was lost counts in a trial, and nowhere else. */
SEC("struct_ops")
__u32 BPF_PROG(pcc_ssthresh, struct sock *sk)
{
	return graft_tcp(sk)->snd_ssthresh;
}

SEC("struct_ops")
__u32 BPF_PROG(pcc_undo_cwnd, struct sock *sk)
{
	return graft_tcp(sk)->snd_cwnd;
}

/* Room to fill the window while losses are repaired. */
SEC("struct_ops")
__u32 BPF_PROG(pcc_sndbuf_expand, struct sock *sk)
{
	return 3;
}

SEC(".struct_ops")
struct tcp_congestion_ops mr_pcc = {
	.init = (void *)pcc_init,
	.pkts_acked = (void *)pcc_pkts_acked,
	.cong_control = (void *)pcc_cong_control,
	.ssthresh = (void *)pcc_ssthresh,
	.undo_cwnd = (void *)pcc_undo_cwnd,
	.sndbuf_expand = (void *)pcc_sndbuf_expand,
	.name = "mr_pcc",
};

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
