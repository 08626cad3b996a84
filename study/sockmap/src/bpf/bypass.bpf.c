// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Passes bytes between applications and a broker on the same host, from one socket's send to the other socket's
 * receive queue. They bypass TCP and the loopback interface.
 *
 * A receiver reads passed bytes before bytes that arrived by TCP. So nothing is passed while bytes sent by TCP are
 * on their way or unread. Sending by TCP always keeps the order. TCP does not know of passed bytes, so its windows
 * do not limit them. Bytes to the broker are limited by the window here: the broker reports how many it has read.
 * The broker itself limits bytes to an application. */
#include "bypass.h"
#include <stdbool.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define AF_INET	  2
#define AF_INET6  10
#define LOOPBACK4 0x7f000001

/* Hides a number from clang, which would otherwise merge two checks that the verifier needs separately. */
#define OPAQUE(number) asm volatile("" : "+r"(number))

#define LET_BE 1

struct tcp_sock {
	__u32 write_seq;
} __attribute__((preserve_access_index));

const volatile struct bypass_config config SEC(".rodata.config");

/* The sockets that this program may bypass TCP for. The kernel removes a socket when it is closed. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKHASH);
	__type(key, struct bypass_key);
	__type(value, __u64);
	__uint(max_entries, BYPASS_SOCKETS);
} sockets SEC(".maps");

/* Socket -> counts of its sent bytes. A socket whose entry is evicted sends by TCP from then on. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct bypass_key);
	__type(value, struct bypass_sent);
	__uint(max_entries, BYPASS_SOCKETS);
} sent SEC(".maps");

/* Sending socket -> number of bytes that the broker has read from it. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct bypass_key);
	__type(value, __u64);
	__uint(max_entries, BYPASS_SOCKETS);
} taken SEC(".maps");

/* enum bypass_verdict -> number of send calls or sockets with this verdict. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, BYPASS_VERDICTS);
} verdicts SEC(".maps");

static __always_inline void set_v4(struct bypass_end *end, __be32 address)
{
	end->address[0] = 0;
	end->address[1] = 0;
	end->address[2] = bpf_htonl(0xffff);
	end->address[3] = address;
}

static __always_inline bool is_v4(const struct bypass_end *end)
{
	return !end->address[0] && !end->address[1] && end->address[2] == bpf_htonl(0xffff);
}

static __always_inline bool is_broker(const struct bypass_end *end)
{
	if (is_v4(end))
		return end->address[3] == bpf_htonl(LOOPBACK4) && end->port == config.port;
	return !end->address[0] && !end->address[1] && !end->address[2] && end->address[3] == bpf_htonl(1) &&
	       end->port == config.port;
}

/* Fills in a socket's key. It is a macro, since two types of contexts have the same fields. */
#define READ_ENDS(ctx, key)                                      \
	({                                                       \
		if ((ctx)->family == AF_INET) {                  \
			__u32 near_ = (ctx)->local_ip4;          \
			__u32 far_ = (ctx)->remote_ip4;          \
                                                                 \
			OPAQUE(near_);                           \
			OPAQUE(far_);                            \
			set_v4(&(key)->near, near_);             \
			set_v4(&(key)->far, far_);               \
		} else {                                         \
			__u32 *near_ = (key)->near.address;      \
			__u32 *far_ = (key)->far.address;        \
                                                                 \
			near_[0] = (ctx)->local_ip6[0];          \
			near_[1] = (ctx)->local_ip6[1];          \
			near_[2] = (ctx)->local_ip6[2];          \
			near_[3] = (ctx)->local_ip6[3];          \
			far_[0] = (ctx)->remote_ip6[0];          \
			far_[1] = (ctx)->remote_ip6[1];          \
			far_[2] = (ctx)->remote_ip6[2];          \
			far_[3] = (ctx)->remote_ip6[3];          \
		}                                                \
		(key)->near.port = (ctx)->local_port;            \
		(key)->far.port = bpf_ntohl((ctx)->remote_port); \
	})

enum part { NO_PART, APPLICATION, BROKER };

/* Returns which side of a connection between an application and the broker owns a socket. */
static __always_inline enum part part_of(const struct bypass_key *key)
{
	if (is_broker(&key->far))
		return APPLICATION;
	return is_broker(&key->near) ? BROKER : NO_PART;
}

static __noinline int count(enum bypass_verdict verdict)
{
	__u32 index = verdict;
	__u64 *counter = bpf_map_lookup_elem(&verdicts, &index);

	if (counter)
		*counter += 1;
	return 0;
}

/* Adds a socket to the map `sockets` when its connection is established, before it has sent any data. */
static __always_inline void enter(struct bpf_sock_ops *ctx)
{
	struct bypass_key key = {};
	struct bypass_sent state = {};
	enum part part;

	READ_ENDS(ctx, &key);
	part = part_of(&key);
	if (part == NO_PART)
		return;
	/* The SYN counts as one acknowledged byte. Data sent with the SYN could not be told from later data,
	 * so such a socket is not added to the map `sockets`.
	 */
	if (ctx->op == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB && ctx->bytes_acked > 1) {
		count(BYPASS_EARLY);
		return;
	}
	/* Remove the count of an earlier connection between the same addresses and ports. */
	bpf_map_delete_elem(&taken, &key);
	state.last = ctx->snd_nxt;
	state.is_broker = part == BROKER;
	if (bpf_map_update_elem(&sent, &key, &state, BPF_ANY) ||
	    bpf_sock_hash_update(ctx, &sockets, &key, BPF_ANY)) {
		count(BYPASS_NO_ROOM);
		return;
	}
	count(BYPASS_ENTERED);
}

SEC("sockops")
int bypass_enter(struct bpf_sock_ops *ctx)
{
	if (ctx->op != BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB && ctx->op != BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB)
		return LET_BE;
	if (ctx->family != AF_INET && ctx->family != AF_INET6)
		return LET_BE;
	enter(ctx);
	return LET_BE;
}

/* Adds the bytes that the socket has sent by TCP since the last call to the socket's counts. */
static __always_inline bool look(struct sk_msg_md *msg, struct bypass_sent *state)
{
	struct tcp_sock *tp = bpf_skc_to_tcp_sock(msg->sk);
	__u32 next;

	if (!tp)
		return false;
	next = tp->write_seq;
	if (next != state->last) {
		state->by_tcp += next - state->last;
		state->last = next;
		state->mark = state->by_tcp + state->passed_on;
	}
	return true;
}

static __always_inline enum bypass_verdict judge(struct sk_msg_md *msg, const struct bypass_key *key,
						 const struct bypass_sent *state)
{
	__u64 *told, gone;

	if (state->is_broker) {
		if (!config.both_ways)
			return BYPASS_ONE_WAY;
		return state->mark ? BYPASS_BEHIND : BYPASS_PASSED_ON;
	}
	told = bpf_map_lookup_elem(&taken, key);
	gone = told ? *told : 0;
	if (state->mark > gone)
		return BYPASS_BEHIND;
	if (state->by_tcp + state->passed_on + msg->size > gone + config.window_bytes)
		return BYPASS_FULL;
	return BYPASS_PASSED_ON;
}

/* Decides for each send whether its bytes are passed to the opposite socket directly or go by TCP. No other
 * function counts bytes.
 */
SEC("sk_msg")
int bypass_send(struct sk_msg_md *msg)
{
	struct bypass_key key = {}, other = {};
	enum bypass_verdict verdict = BYPASS_UNKNOWN;
	struct bypass_sent *state;

	READ_ENDS(msg, &key);
	state = bpf_map_lookup_elem(&sent, &key);
	if (state && look(msg, state))
		verdict = judge(msg, &key, state);
	if (state && verdict == BYPASS_PASSED_ON) {
		__u32 size = msg->size;

		other.near = key.far;
		other.far = key.near;
		if (bpf_msg_redirect_hash(msg, &sockets, &other, BPF_F_INGRESS) == SK_PASS)
			state->passed_on += size;
		else
			verdict = BYPASS_ALONE;
	}
	count(verdict);
	return SK_PASS;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
