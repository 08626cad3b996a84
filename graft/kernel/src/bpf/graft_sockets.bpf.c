// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* BPF iterators over the TCP sockets of a network namespace: sockets_read reports them, sockets_set changes
 * their settings.
 */
#include "graft.h"
#include "graft_intf.h"
#include "util.h"
#include <bpf/bpf_endian.h>

#define SOL_SOCKET	   1
#define SOL_TCP		   6
#define SO_SNDBUF	   7
#define SO_RCVBUF	   8
#define SO_MAX_PACING_RATE 47
#define TCP_CONGESTION	   13
#define AF_INET		   2
#define AF_INET6	   10
#define STATE_ESTABLISHED  1
#define STATE_TIME_WAIT	   6
#define STATE_CLOSE	   7
#define STATE_LISTEN	   10
#define STATE_NEW_SYN_RECV 12

struct in6_addr {
	union {
		__u32 u6_addr32[4];
	} in6_u;
} GRAFT_KERNEL;

struct sock_common {
	__be32 skc_daddr;
	__be32 skc_rcv_saddr;
	__be16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	volatile unsigned char skc_state;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
} GRAFT_KERNEL;

struct seq_file;

struct bpf_iter_meta {
	struct seq_file *seq;
} GRAFT_KERNEL;

struct bpf_iter__tcp {
	struct bpf_iter_meta *meta;
	struct sock_common *sk_common;
} GRAFT_KERNEL;

/* The argument of the iterator sockets_set: which sockets it changes, and their new settings. Userspace writes it
 * before it runs the iterator.
 */
BPF_MAP(ARRAY, change, __u32, struct graft_change, 1);

static __always_inline void copy_address(__u32 to[4], __be32 v4, const struct in6_addr *v6, __u16 family)
{
	if (family == AF_INET) {
		to[0] = 0;
		to[1] = 0;
		to[2] = bpf_htonl(0xffff);
		to[3] = v4;
		return;
	}
	for (int i = 0; i < 4; i++)
		to[i] = v6->in6_u.u6_addr32[i];
}

static __attribute__((noinline)) int copy_ends(struct graft_socket *out, struct sock_common *common)
{
	__u16 family = common->skc_family;

	copy_address(out->local, common->skc_rcv_saddr, &common->skc_v6_rcv_saddr, family);
	copy_address(out->remote, common->skc_daddr, &common->skc_v6_daddr, family);
	out->local_port = common->skc_num;
	out->remote_port = bpf_ntohs(common->skc_dport);
	out->state = common->skc_state;
	return 0;
}

/* Returns the tcp_sock of an IPv4 or IPv6 socket. Sockets in TIME_WAIT and half-open requests have no
 * tcp_sock.
 */
static __always_inline struct tcp_sock *tcp_of(struct sock_common *common)
{
	__u8 state;

	if (!common || (common->skc_family != AF_INET && common->skc_family != AF_INET6))
		return 0;
	state = common->skc_state;
	if (state == STATE_TIME_WAIT || state == STATE_NEW_SYN_RECV || state == STATE_CLOSE)
		return 0;
	return bpf_skc_to_tcp_sock(common);
}

SEC("iter/tcp")
int sockets_read(struct bpf_iter__tcp *ctx)
{
	struct sock_common *common = ctx->sk_common;
	struct graft_socket out = {};
	struct tcp_sock *tp;

	tp = tcp_of(common);
	if (!tp || common->skc_state == STATE_LISTEN)
		return 0;
	copy_ends(&out, common);
	out.cookie = bpf_get_socket_cookie(tp);
	out.bytes_acked = tp->bytes_acked;
	out.figures.rtt_min_us = graft_rtt_min_us(tp);
	/* The kernel keeps srtt_us times 8, and mdev_us times 4. */
	out.figures.srtt_us = tp->srtt_us >> 3;
	out.figures.rttvar_us = tp->mdev_us >> 2;
	out.figures.mss_bytes = tp->mss_cache;
	out.figures.cwnd_packets = tp->snd_cwnd;
	out.figures.delivered_packets = tp->delivered;
	out.figures.lost_packets = tp->lost;
	out.figures.reordering_packets = tp->reordering;
	out.figures.rate_packets = tp->rate_delivered;
	out.figures.rate_interval_us = tp->rate_interval_us;
	bpf_getsockopt(tp, SOL_TCP, TCP_CONGESTION, out.congestion, sizeof(out.congestion));
	bpf_seq_write(ctx->meta->seq, &out, sizeof(out));
	return 0;
}

static __always_inline bool fits(const struct graft_rule *rule, const struct graft_socket *socket)
{
	__u16 port = rule->side == GRAFT_SERVER ? socket->local_port : socket->remote_port;
	bool is_listener = socket->state == STATE_LISTEN;

	if (port < rule->first_port || port > rule->last_port)
		return false;
	/* A listening socket has no peer address, so it matches any rule for servers whose port range includes its
	 * port.
	 */
	if (is_listener)
		return rule->side == GRAFT_SERVER;
	for (int i = 0; i < 4; i++)
		if ((socket->remote[i] & rule->mask[i]) != rule->peer[i])
			return false;
	return true;
}

static __always_inline bool has_congestion(struct tcp_sock *tp, const char *wanted)
{
	char name[GRAFT_NAME_BYTES] = {};

	if (!wanted[0])
		return true;
	if (bpf_getsockopt(tp, SOL_TCP, TCP_CONGESTION, name, sizeof(name)))
		return false;
	for (int i = 0; i < GRAFT_NAME_BYTES; i++) {
		if (name[i] != wanted[i])
			return false;
		if (!name[i])
			break;
	}
	return true;
}

static __attribute__((noinline)) int apply(struct tcp_sock *tp, const struct graft_rule *rule,
					   struct graft_changed *out)
{
	char congestion[GRAFT_NAME_BYTES];
	__u32 pacing = rule->pacing_bytes_s;
	long error = 0;
	int value;

	__builtin_memcpy(congestion, rule->congestion, sizeof(congestion));
	/* The kernel reads the congestion control's name up to a zero byte. */
	congestion[GRAFT_NAME_BYTES - 1] = 0;
	/* The settings are applied one after another; after the first error, this socket's further settings are not
	 * changed.
	 */
	if (rule->set & GRAFT_SET_CONGESTION)
		error = bpf_setsockopt(tp, SOL_TCP, TCP_CONGESTION, congestion, sizeof(congestion));
	if (!error && rule->set & GRAFT_SET_PACING)
		error = bpf_setsockopt(tp, SOL_SOCKET, SO_MAX_PACING_RATE, &pacing, sizeof(pacing));
	value = rule->send_buffer_bytes;
	if (!error && rule->set & GRAFT_SET_SEND_BUFFER)
		error = bpf_setsockopt(tp, SOL_SOCKET, SO_SNDBUF, &value, sizeof(value));
	value = rule->receive_buffer_bytes;
	if (!error && rule->set & GRAFT_SET_RECEIVE_BUFFER)
		error = bpf_setsockopt(tp, SOL_SOCKET, SO_RCVBUF, &value, sizeof(value));
	out->error = error;
	return 0;
}

SEC("iter/tcp")
int sockets_set(struct bpf_iter__tcp *ctx)
{
	struct sock_common *common = ctx->sk_common;
	struct graft_changed out = {};
	struct graft_socket socket = {};
	struct graft_change *wanted;
	struct tcp_sock *tp;
	__u32 zero = 0;

	tp = tcp_of(common);
	wanted = bpf_map_lookup_elem(&change, &zero);
	if (!tp || !wanted)
		return 0;
	copy_ends(&socket, common);
	if (!fits(&wanted->rule, &socket) || !has_congestion(tp, wanted->from))
		return 0;
	out.state = socket.state;
	apply(tp, &wanted->rule, &out);
	out.cookie = bpf_get_socket_cookie(tp);
	bpf_seq_write(ctx->meta->seq, &out, sizeof(out));
	return 0;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
