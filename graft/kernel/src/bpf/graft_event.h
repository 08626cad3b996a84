/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Events for userspace about the establishment and the end of connections. Only connections that match a rule with a
 * `choice` (for userspace's model) are reported.
 */
#ifndef MILLRACE_GRAFT_EVENT_H
#define MILLRACE_GRAFT_EVENT_H

#include "graft_choice.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>

#define AF_INET 2

/* Number of times that each outcome of enum graft_outcome has occurred, on connections or packets. */
BPF_MAP(PERCPU_ARRAY, outcomes, __u32, __u64, GRAFT_OUTCOMES);

/* Ring buffer of struct graft_event. */
BPF_RING(events, GRAFT_EVENTS_BYTES);

static __noinline int count(enum graft_outcome outcome)
{
	add_to(&outcomes, outcome, 1);
	return 0;
}

/* The properties of a connection that rules match: the peer's address, the server's port, and whether this host is
 * client or server.
 */
struct ends {
	__u32 peer[4];
	__u16 port; /* the server's port */
	__u8 side;
	__u8 pad;
};

/* Functions with several callers are not static, so the verifier checks each of them once, independently of
 * the caller. The verifier needs long for each access to the context.
 */
__noinline int graft_read_ends(struct bpf_sock_ops *ctx, __u8 side, struct ends *ends)
{
	__u32 v4 = ctx->remote_ip4, v6 = ctx->remote_ip6[3];
	__u32 local = ctx->local_port, remote = ctx->remote_port;

	if (!ends)
		return 0;

	/* Without this barrier, clang adds an offset to the context's pointer before it loads, which the
	 * verifier refuses.
	 */
	OPAQUE(v4);
	OPAQUE(v6);
	OPAQUE(local);
	OPAQUE(remote);
	if (ctx->family == AF_INET) {
		ends->peer[0] = 0;
		ends->peer[1] = 0;
		ends->peer[2] = bpf_htonl(0xffff);
		ends->peer[3] = v4;
	} else {
		ends->peer[0] = ctx->remote_ip6[0];
		ends->peer[1] = ctx->remote_ip6[1];
		ends->peer[2] = ctx->remote_ip6[2];
		ends->peer[3] = v6;
	}
	ends->side = side;
	ends->pad = 0;
	ends->port = side == GRAFT_SERVER ? local : bpf_ntohl(remote);
	return 0;
}

#define KERNEL __attribute__((preserve_access_index))

struct inet_connection_sock {
	struct {
		__u32 lrcvtime;
	} icsk_ack;
} KERNEL;

/* TCP's `chrono` statistics: the time in which bytes waited to be sent or acknowledged, by the reason. */
struct tcp_sock {
	__u32 chrono_start;
	__u32 chrono_stat[3];
	__u8 chrono_type : 2;
	__u32 mdev_us;
	__u32 delivered;
	__u32 lost;
	__u32 reordering;
} KERNEL;

static __always_inline void set_figures(struct bpf_sock_ops *ctx, struct bpf_sock *sk, struct graft_event *it)
{
	const struct tcp_sock *tp = bpf_skc_to_tcp_sock(sk);
	__u32 now = it->jiffies;

	if (!tp)
		return;
	/* The counters contain finished periods only; the running period is added below. */
	it->busy_jiffies = tp->chrono_stat[0] + tp->chrono_stat[1] + tp->chrono_stat[2];
	if (BPF_CORE_READ_BITFIELD(tp, chrono_type))
		it->busy_jiffies += now - tp->chrono_start;
	it->figures.rttvar_us = tp->mdev_us >> 2;
	it->figures.lost_packets = tp->lost;
	it->figures.reordering_packets = tp->reordering;
	it->figures.rtt_min_us = ctx->rtt_min == ~0U ? 0 : ctx->rtt_min;
	/* The kernel keeps srtt_us times 8, and mdev_us times 4. */
	it->figures.srtt_us = ctx->srtt_us >> 3;
	it->figures.mss_bytes = ctx->mss_cache;
	it->figures.cwnd_packets = ctx->snd_cwnd;
	it->figures.delivered_packets = tp->delivered;
	it->figures.rate_packets = ctx->rate_delivered;
	it->figures.rate_interval_us = ctx->rate_interval_us;
	it->heard_jiffies = now - ((const struct inet_connection_sock *)tp)->icsk_ack.lrcvtime;
}

static __always_inline void set_ends(struct bpf_sock_ops *ctx, struct graft_event *it, __u8 side)
{
	__u32 v4 = ctx->local_ip4, local = ctx->local_port, remote = ctx->remote_port;
	struct ends ends = {};

	OPAQUE(v4);
	OPAQUE(local);
	OPAQUE(remote);
	graft_read_ends(ctx, side, &ends);
	__builtin_memcpy(it->remote, ends.peer, sizeof(it->remote));
	if (ctx->family == AF_INET) {
		it->local[2] = bpf_htonl(0xffff);
		it->local[3] = v4;
	} else {
		it->local[0] = ctx->local_ip6[0];
		it->local[1] = ctx->local_ip6[1];
		it->local[2] = ctx->local_ip6[2];
		it->local[3] = ctx->local_ip6[3];
	}
	it->local_port = local;
	it->remote_port = bpf_ntohl(remote);
}

/* Sends an event. bpf_ringbuf_output is used since the verifier of Linux 6.1 forgets that reserved memory is not NULL.
 * Readers poll the buffer, so no wake-up is sent. The function is not inlined, so that the type of the event is in the
 * object's BTF.
 */
static __noinline long send_event(const struct graft_event *it)
{
	return it ? bpf_ringbuf_output(&events, (void *)it, sizeof(*it), BPF_RB_NO_WAKEUP) : -1;
}

__noinline int graft_send_event(struct bpf_sock_ops *ctx, const struct graft_flow *flow, __u8 what)
{
	struct bpf_sock *sk = ctx->sk;
	struct graft_event it = {};

	if (!flow || !sk)
		return 0;
	set_ends(ctx, &it, flow->side);
	it.cookie = bpf_get_socket_cookie(ctx);
	it.netns_cookie = bpf_get_netns_cookie(ctx);
	it.time_ns = bpf_ktime_get_ns();
	it.duration_ns = it.time_ns - flow->began_ns;
	it.sent = ctx->bytes_acked;
	it.received = ctx->bytes_received;
	/* TCP counts time in kernel ticks, whose length only userspace can find out. */
	it.jiffies = bpf_jiffies64();
	set_figures(ctx, sk, &it);
	it.side = flow->side;
	it.what = what;
	it.explored = flow->explored;
	it.rule = flow->rule;
	it.serial = flow->serial;
	__builtin_memcpy(it.congestion, flow->congestion, sizeof(it.congestion));
	__builtin_memcpy(it.command, flow->command, sizeof(it.command));
	if (send_event(&it))
		count(GRAFT_EVENT_LOST);
	return 0;
}

#endif
