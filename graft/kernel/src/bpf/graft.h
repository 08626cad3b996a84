/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The interface that congestion controls are written against: ABI 1. It needs only UAPI headers of the
 * kernel and libbpf's headers. It declares the members of kernel structures that it uses, whose offsets
 * CO-RE finds.
 *
 * A graft has one `struct tcp_congestion_ops` in section `.struct_ops`, whose name begins with "mr_". It
 * may have one `const volatile struct` named `config` in section `.rodata.config`; the structure's members
 * are the parameters in its manifest.
 */
#ifndef MILLRACE_GRAFT_H
#define MILLRACE_GRAFT_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

#define GRAFT_ABI 1

#ifndef __always_inline
#define __always_inline inline __attribute__((always_inline))
#endif

#define GRAFT_KERNEL __attribute__((preserve_access_index))

struct sock {
	unsigned long sk_pacing_rate; /* pacing rate, bytes/s */
	__u32 sk_pacing_status;
} GRAFT_KERNEL;

/* Size, in bytes, of the memory in each socket that the kernel reserves for the state of its congestion control. */
#define GRAFT_STATE_BYTES 104

struct inet_connection_sock {
	__u64 icsk_ca_priv[GRAFT_STATE_BYTES / sizeof(__u64)];
} GRAFT_KERNEL;

struct minmax_sample {
	__u32 t;
	__u32 v;
} GRAFT_KERNEL;

struct minmax {
	struct minmax_sample s[3];
} GRAFT_KERNEL;

/* Members of the kernel's structure, equal in Linux 6.1 to 6.18. Counts are in packets unless the name says
 * otherwise; `srtt_us` is in eighths of a microsecond.
 */
struct tcp_sock {
	__u32 snd_cwnd;
	__u32 snd_cwnd_cnt;
	__u32 snd_ssthresh;
	__u32 snd_cwnd_clamp;
	__u32 packets_out;
	__u32 retrans_out;
	__u32 sacked_out;
	__u32 lost_out;
	__u32 max_packets_out;
	__u32 srtt_us;
	__u32 mdev_us;
	__u32 mss_cache;
	__u32 delivered;
	__u32 lost;
	/* the rate is limited by the application until `delivered` reaches this value; 0: it is not */
	__u32 app_limited;
	__u32 reordering;
	__u32 rcv_nxt;
	__u32 rate_delivered;
	__u32 rate_interval_us;
	__u64 bytes_acked;
	__u8 is_cwnd_limited : 1;
	struct minmax rtt_min;
} GRAFT_KERNEL;

struct rate_sample;

struct ack_sample {
	__u32 pkts_acked;
	__s32 rtt_us;
	__u32 in_flight;
} GRAFT_KERNEL;

enum tcp_ca_event___graft {
	GRAFT_TX_START,
	GRAFT_CWND_RESTART,
	GRAFT_COMPLETE_CWR,
	GRAFT_LOSS,
};

/* The callbacks of a congestion control that a graft may implement; the kernel's structure has more callbacks. */
struct tcp_congestion_ops {
	char name[16];
	__u32 flags;
	void (*init)(struct sock *sk);
	void (*release)(struct sock *sk);
	__u32 (*ssthresh)(struct sock *sk);
	void (*cong_avoid)(struct sock *sk, __u32 ack, __u32 acked);
	void (*set_state)(struct sock *sk, __u8 new_state);
	void (*cwnd_event)(struct sock *sk, int event);
	void (*in_ack_event)(struct sock *sk, __u32 flags);
	void (*pkts_acked)(struct sock *sk, const struct ack_sample *sample);
	/* Since Linux 6.10, cong_control has more arguments. A graft may use only the first. */
	void (*cong_control)(struct sock *sk, const struct rate_sample *sample);
	__u32 (*undo_cwnd)(struct sock *sk);
	__u32 (*sndbuf_expand)(struct sock *sk);
};

/* Functions of the kernel that a graft may call. */
extern __u32 tcp_slow_start(struct tcp_sock *tp, __u32 acked) __ksym;
extern void tcp_cong_avoid_ai(struct tcp_sock *tp, __u32 w, __u32 acked) __ksym;
extern __u32 tcp_reno_ssthresh(struct sock *sk) __ksym;
extern void tcp_reno_cong_avoid(struct sock *sk, __u32 ack, __u32 acked) __ksym;
extern __u32 tcp_reno_undo_cwnd(struct sock *sk) __ksym;

#define GRAFT_PACING_NEEDED 1
#define GRAFT_SSTHRESH_NONE 0x7fffffff
#define GRAFT_CWND_MIN	    2

#define graft_min(a, b)                        \
	({                                     \
		typeof(a) one_ = (a);          \
		typeof(a) other_ = (b);        \
		one_ < other_ ? one_ : other_; \
	})

#define graft_max(a, b)                        \
	({                                     \
		typeof(a) one_ = (a);          \
		typeof(a) other_ = (b);        \
		one_ > other_ ? one_ : other_; \
	})

/* Arithmetic without branches, for numbers below 2^63. A branch would make the verifier check all following
 * code twice.
 */

static __always_inline __u64 graft_at_least_1(__u64 x)
{
	return x | (x - 1) >> 63;
}

static __always_inline __s64 graft_smaller(__s64 one, __s64 other)
{
	__s64 difference = one - other;

	return other + (difference & difference >> 63);
}

static __always_inline __s64 graft_larger(__s64 one, __s64 other)
{
	__s64 difference = one - other;

	return one - (difference & difference >> 63);
}

/* Returns the sign of a number, 1 or -1; 0 counts as positive. */
static __always_inline __s64 graft_sign(__s64 x)
{
	return x >> 63 | 1;
}

static __always_inline __u64 graft_magnitude(__s64 x)
{
	return graft_sign(x) * x;
}

static __always_inline struct tcp_sock *graft_tcp(const struct sock *sk)
{
	return (struct tcp_sock *)sk;
}

/* Returns the congestion control's state in a connection's socket, which is zero before `init`. */
static __always_inline void *graft_state(const struct sock *sk)
{
	return (void *)((struct inet_connection_sock *)sk)->icsk_ca_priv;
}

static __always_inline __u32 graft_in_flight(const struct tcp_sock *tp)
{
	return tp->packets_out - (tp->sacked_out + tp->lost_out) + tp->retrans_out;
}

static __always_inline bool graft_in_slow_start(const struct tcp_sock *tp)
{
	return tp->snd_cwnd < tp->snd_ssthresh;
}

/* Returns whether the congestion window limits sending. A window that the sender does not fill must not grow
 * (RFC 7661).
 */
static __always_inline bool graft_is_cwnd_limited(const struct tcp_sock *tp)
{
	if (graft_in_slow_start(tp))
		return tp->snd_cwnd < 2 * tp->max_packets_out;
	return !!BPF_CORE_READ_BITFIELD(tp, is_cwnd_limited);
}

/* Returns the least round trip of TCP's recent window, us; 0: there was no sample yet. */
static __always_inline __u32 graft_rtt_min_us(const struct tcp_sock *tp)
{
	__u32 least = tp->rtt_min.s[0].v;

	return least == ~0U ? 0 : least;
}

/* Makes TCP space packets out by `sk_pacing_rate`, with or without the qdisc fq. */
static __always_inline void graft_pace(struct sock *sk)
{
	if (!sk->sk_pacing_status)
		sk->sk_pacing_status = GRAFT_PACING_NEEDED;
}

/* Declares a congestion control `mr_NAME` that is driven by its own estimates of the rate. Its callbacks NAME_init,
 * NAME_pkts_acked and NAME_cong_control come before this macro. A single loss changes neither ssthresh nor the window.
 * The send buffer is three windows, so that the window stays full while losses are repaired.
 */
#define GRAFT_RATE_BASED(which)                                 \
	SEC("struct_ops")                                       \
	__u32 BPF_PROG(which##_ssthresh, struct sock *sk)       \
	{                                                       \
		return graft_tcp(sk)->snd_ssthresh;             \
	}                                                       \
	SEC("struct_ops")                                       \
	__u32 BPF_PROG(which##_undo_cwnd, struct sock *sk)      \
	{                                                       \
		return graft_tcp(sk)->snd_cwnd;                 \
	}                                                       \
	SEC("struct_ops")                                       \
	__u32 BPF_PROG(which##_sndbuf_expand, struct sock *sk)  \
	{                                                       \
		return 3;                                       \
	}                                                       \
	SEC(".struct_ops")                                      \
	struct tcp_congestion_ops mr_##which = {                \
		.init = (void *)which##_init,                   \
		.pkts_acked = (void *)which##_pkts_acked,       \
		.cong_control = (void *)which##_cong_control,   \
		.ssthresh = (void *)which##_ssthresh,           \
		.undo_cwnd = (void *)which##_undo_cwnd,         \
		.sndbuf_expand = (void *)which##_sndbuf_expand, \
		.name = "mr_" #which,                           \
	}

#endif
