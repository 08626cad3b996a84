// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Redirects TCP connections of this host's applications to the tunnel broker, which tunnels them, and shows the
 * applications of client and server the true addresses.
 *
 * A connection is redirected only while a carrier to its peer is connected. If brokers or the path between
 * them fail, connections go directly to their server. The state of a redirected socket is in the socket's
 * storage and ends with the socket. Every program passes all other connections unchanged, so other programs
 * of the cgroup decide about them as before.
 */
#include "graft_choice.h"
#include "hook_rules.h"
#include "socket_owner.h"

#define SOCK_STREAM   1
#define IPPROTO_TCP   6
#define IPPROTO_MPTCP 262
#define PASS	      1

const volatile struct hook_config config SEC(".rodata.config");

/* Hosts that run a tunnel broker. Userspace writes the entries. The key is the host's IPv6 or IPv4-mapped address, as
 * in `struct hook_end`.
 */
BPF_MAP_FLAGS(HASH, peers, __u32[4], struct hook_peer, HOOK_PEERS, BPF_F_NO_PREALLOC);

/* Marks the tunnel broker's own sockets, whose connections are not redirected to the broker. */
BPF_MAP_FLAGS(SK_STORAGE, own, int, __u32, 0, BPF_F_NO_PREALLOC);

BPF_MAP_FLAGS(SK_STORAGE, redirected, int, struct hook_redirected, 0, BPF_F_NO_PREALLOC);

/* The true destination of each redirected connection, by the application's address and port as the tunnel broker
 * sees them. The broker removes an entry when it accepts the connection.
 */
BPF_MAP(LRU_HASH, arrivals, struct hook_end, struct hook_redirected, HOOK_ARRIVALS);

/* The client address that a server's application sees as its peer. The tunnel broker adds an entry before it
 * connects to the server.
 */
BPF_MAP_FLAGS(HASH, guests, struct hook_guest, struct hook_end, HOOK_GUESTS, BPF_F_NO_PREALLOC);

/* Number of connections, by enum hook_verdict. */
BPF_MAP(PERCPU_ARRAY, verdicts, __u32, __u64, HOOK_VERDICTS);

static __always_inline __u16 port_of(struct bpf_sock_addr *ctx)
{
	return bpf_ntohs((__u16)ctx->user_port);
}

static __always_inline void read4(struct bpf_sock_addr *ctx, struct hook_end *end)
{
	set_v4(end, ctx->user_ip4);
	end->port = port_of(ctx);
}

static __always_inline void read6(struct bpf_sock_addr *ctx, struct hook_end *end)
{
	end->address[0] = ctx->user_ip6[0];
	end->address[1] = ctx->user_ip6[1];
	end->address[2] = ctx->user_ip6[2];
	end->address[3] = ctx->user_ip6[3];
	end->port = port_of(ctx);
}

static __always_inline void write6(struct bpf_sock_addr *ctx, const struct hook_end *end)
{
	ctx->user_ip6[0] = end->address[0];
	ctx->user_ip6[1] = end->address[1];
	ctx->user_ip6[2] = end->address[2];
	ctx->user_ip6[3] = end->address[3];
}

/* Decides about a connection that a rule matches. Returns HOOK_REDIRECTED, or the reason not to redirect the
 * connection.
 */
static __always_inline enum hook_verdict judge(struct bpf_sock_addr *ctx, const struct hook_end *to,
					       const struct hook_peer *peer)
{
	struct bpf_sock *sk = ctx->sk;

	if (ctx->protocol != IPPROTO_TCP)
		return HOOK_NOT_TCP;
	if (!sk)
		return HOOK_NO_MEMORY;
	if (bpf_sk_storage_get(&own, sk, 0, 0))
		return HOOK_OWN;
	if (bpf_get_netns_cookie(ctx) != config.namespace_cookie)
		return HOOK_ELSEWHERE;
	if (sk->bound_dev_if)
		return HOOK_BOUND_DEVICE;
	if (!(is_v4(to) ? config.port4[0] : config.port6[0]))
		return HOOK_NO_FAMILY;
	if (!peer->warm)
		return HOOK_COLD;
	return is_avoided(to) ? HOOK_REFUSED : HOOK_REDIRECTED;
}

/* Applies the choice that userspace's learned model has made for connections with this peer: redirect the connection to
 * the tunnel broker, or let it go directly to its server.
 */
static __always_inline enum hook_verdict pick(struct bpf_sock *sk, const struct hook_end *to, __u32 rule)
{
	struct graft_choice_key key = {.rule = rule};
	struct graft_choice *choice;
	struct graft_flow *flow;

	__builtin_memcpy(key.peer, to->address, sizeof(key.peer));
	choice = bpf_map_lookup_elem(&choices, &key);
	if (!choice)
		return HOOK_UNKNOWN;
	flow = bpf_sk_storage_get(&flows, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!flow)
		return HOOK_NO_MEMORY;
	return graft_pick(choice, flow, true) ? HOOK_REDIRECTED : HOOK_IN_PLACE;
}

/* Stores the true server's address and the socket's owner in the socket's storage. */
static __always_inline enum hook_verdict remember(struct bpf_sock *sk, const struct hook_end *to,
						  const struct hook_peer *peer, const struct caller *caller,
						  const struct search *rule)
{
	const struct graft_flow *flow;
	struct hook_redirected *state = bpf_sk_storage_get(&redirected, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);

	if (!state)
		return HOOK_NO_MEMORY;
	state->server = *to;
	__builtin_memcpy(state->local.address, peer->near, sizeof(peer->near));
	state->local.port = 0;
	state->local.pad = 0;
	state->rule = rule->choice;
	flow = rule->choice ? bpf_sk_storage_get(&flows, sk, 0, 0) : 0;
	state->serial = flow ? flow->serial : 0;
	state->explored = flow ? flow->explored : 0;
	__builtin_memcpy(state->command, caller->command, sizeof(state->command));
	state->cgroup = rule->cgroup;
	read_owner(sk, &state->uid, &state->gid);
	state->mark = sk->mark;
	return HOOK_REDIRECTED;
}

static __noinline int count(enum hook_verdict verdict)
{
	add_to(&verdicts, verdict, 1);
	return 0;
}

/* Decides whether a connection goes to the tunnel broker, and to which of its ports. This is the only place that
 * counts verdicts.
 */
static __always_inline bool redirects(struct bpf_sock_addr *ctx, const struct hook_end *to, __u32 *strict)
{
	struct bpf_sock *sk = ctx->sk;
	const struct hook_peer *peer;
	enum hook_verdict verdict;
	struct caller caller = {};
	struct search rule = {.end = to, .caller = &caller};

	if (ctx->type != SOCK_STREAM)
		return false;
	/* Removes the choice that was stored for an earlier connection attempt of this socket. */
	if (sk)
		bpf_sk_storage_delete(&flows, sk);
	peer = bpf_map_lookup_elem(&peers, to->address);
	/* HOOK_VERDICTS stands for "no rule matches"; such connections are not counted. */
	verdict = HOOK_VERDICTS;
	if (peer)
		read_caller(&caller);
	if (peer && fits_a_rule(&rule)) {
		verdict = judge(ctx, to, peer);
		if (verdict == HOOK_REDIRECTED && sk && rule.choice)
			verdict = pick(sk, to, rule.choice);
		if (verdict == HOOK_REDIRECTED && sk)
			verdict = remember(sk, to, peer, &caller, &rule);
		count(verdict);
	}
	*strict = rule.strict;
	if (verdict == HOOK_REDIRECTED)
		return true;
	/* An earlier connection attempt of this socket may have been redirected, so its stored addresses are
	 * removed.
	 */
	if (sk)
		bpf_sk_storage_delete(&redirected, sk);
	return false;
}

SEC("cgroup/connect4")
int hook_connect4(struct bpf_sock_addr *ctx)
{
	struct hook_end to = {};
	__u32 strict = 0;

	read4(ctx, &to);
	if (redirects(ctx, &to, &strict)) {
		/* The connection's destination is rewritten here, so the kernel connects to the tunnel broker;
		 * getpeername() returns the server's address.
		 */
		ctx->user_ip4 = bpf_htonl(LOOPBACK4);
		ctx->user_port = bpf_htons(config.port4[strict & 1]);
	}
	return PASS;
}

SEC("cgroup/connect6")
int hook_connect6(struct bpf_sock_addr *ctx)
{
	struct hook_end to = {}, broker = {};
	__u32 strict = 0;

	read6(ctx, &to);
	if (!redirects(ctx, &to, &strict))
		return PASS;
	/* An IPv6 socket may connect to an IPv4 address in mapped form (::ffff:a.b.c.d). */
	if (is_v4(&to))
		set_v4(&broker, bpf_htonl(LOOPBACK4));
	else
		broker.address[3] = bpf_htonl(1);
	write6(ctx, &broker);
	strict &= 1;
	ctx->user_port = bpf_htons(is_v4(&to) ? config.port4[strict] : config.port6[strict]);
	return PASS;
}

/* Announces a redirected connection to the tunnel broker. The socket has its local port now and has not sent its
 * SYN, so the entry exists before the broker can accept.
 */
static __always_inline void announce(struct bpf_sock_ops *ctx, struct bpf_sock *sk)
{
	const struct hook_redirected *state = bpf_sk_storage_get(&redirected, sk, 0, 0);
	struct hook_end from = {};
	__u32 v4 = ctx->local_ip4;

	OPAQUE(v4);
	if (!state)
		return;
	if (is_v4(&state->server)) {
		set_v4(&from, v4);
	} else {
		from.address[0] = ctx->local_ip6[0];
		from.address[1] = ctx->local_ip6[1];
		from.address[2] = ctx->local_ip6[2];
		from.address[3] = ctx->local_ip6[3];
	}
	from.port = ctx->local_port;
	bpf_map_update_elem(&arrivals, &from, state, BPF_ANY);
}

SEC("sockops")
int hook_announce(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;

	if (ctx->op == BPF_SOCK_OPS_TCP_CONNECT_CB && sk)
		announce(ctx, sk);
	return 1;
}

/* Returns the address and port of the true client, which the server's application sees as its peer. NULL: the
 * connection does not come from the tunnel broker.
 */
static __always_inline const struct hook_end *guest(struct bpf_sock_addr *ctx, struct bpf_sock *sk,
						    const struct hook_end *seen)
{
	struct hook_guest key = {};

	if (bpf_get_netns_cookie(ctx) != config.namespace_cookie)
		return 0;
	key.broker = *seen;
	key.server_port = sk->src_port;
	return bpf_map_lookup_elem(&guests, &key);
}

/* Returns the peer's address that the application sees in getpeername() and accept(). NULL means the socket's
 * real peer.
 */
static __always_inline const struct hook_end *true_peer(struct bpf_sock_addr *ctx,
							const struct hook_end *seen)
{
	const struct hook_redirected *state;
	struct bpf_sock *sk = ctx->sk;

	if (!sk)
		return 0;
	state = bpf_sk_storage_get(&redirected, sk, 0, 0);
	return state ? &state->server : guest(ctx, sk, seen);
}

SEC("cgroup/getpeername4")
int hook_peer4(struct bpf_sock_addr *ctx)
{
	const struct hook_end *peer;
	struct hook_end seen = {};

	read4(ctx, &seen);
	peer = true_peer(ctx, &seen);
	if (peer && is_v4(peer)) {
		ctx->user_ip4 = peer->address[3];
		ctx->user_port = bpf_htons(peer->port);
	}
	return PASS;
}

SEC("cgroup/getpeername6")
int hook_peer6(struct bpf_sock_addr *ctx)
{
	const struct hook_end *peer;
	struct hook_end seen = {};

	read6(ctx, &seen);
	peer = true_peer(ctx, &seen);
	if (peer) {
		write6(ctx, peer);
		ctx->user_port = bpf_htons(peer->port);
	}
	return PASS;
}

/* Returns the state of a redirected socket, which contains the local address that a direct connection would
 * have.
 */
static __always_inline const struct hook_redirected *find_redirected(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *sk = ctx->sk;

	return sk ? bpf_sk_storage_get(&redirected, sk, 0, 0) : 0;
}

SEC("cgroup/getsockname4")
int hook_name4(struct bpf_sock_addr *ctx)
{
	const struct hook_redirected *state = find_redirected(ctx);

	if (state && is_v4(&state->local))
		ctx->user_ip4 = state->local.address[3];
	return PASS;
}

SEC("cgroup/getsockname6")
int hook_name6(struct bpf_sock_addr *ctx)
{
	const struct hook_redirected *state = find_redirected(ctx);

	if (state)
		write6(ctx, &state->local);
	return PASS;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
