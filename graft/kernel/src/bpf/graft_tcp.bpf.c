// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Applies rules to the sockets of unmodified TCP applications: agrees on a rule with the peer by TCP options in the
 * handshake, and changes settings of this host's socket.
 *
 * Connections that no rule matches are not affected. The program always returns 1, so it leaves every
 * decision to other programs of the cgroup. All state of a connection is in the socket's storage and ends
 * with the socket. An accepted socket has state only after its handshake.
 */
#include "barrier_map.h"
#include "caller.h"
#include "graft_event.h"
#include "rule_lists.h"

#define IPPROTO_TCP	   6
#define SOL_SOCKET	   1
#define SOL_TCP		   6
#define SO_SNDBUF	   7
#define SO_RCVBUF	   8
#define SO_MAX_PACING_RATE 47
#define TCP_CONGESTION	   13
#define TCP_FLAG_SYN	   0x02
#define TCP_FLAG_ACK	   0x10
#define ENOSPC		   28
#define STATE_CLOSE	   7
#define WITHHOLD_NS	   (600 * 1000000000ULL)
#define COOKIE_LIFE_NS	   (150 * 1000000000ULL)

RULE_LISTS(struct graft_rule, GRAFT_RULES);

/* A client's socket moves from OFFERING (its SYN has the TCP option of grafts) to CONFIRMING (the server answered; ACKs
 * repeat the option until the server sends a packet) to DONE. If the SYN-ACK has no answer, it moves to DONE at once. A
 * listening socket is always DONE.
 */
enum phase {
	OFFERING = 1,
	CONFIRMING,
	DONE,
};

struct socket_state {
	__u32 rule;
	__u32 phase;
	__be32 answer; /* identity (hash) of the server's graft, from the option in the SYN-ACK */
	/* 1: another BPF program had already set the callback flag (BPF_SOCK_OPS_...) of the socket, so this program
	 * does not clear that flag
	 */
	__u8 had_write_flag;
	__u8 had_parse_flag;
	__u8 no_room;
	__u8 sent; /* 1: a SYN with the TCP option was sent; retransmitted SYNs do not have the option */
	__u8 withheld;
	__u8 unbound;
	__u8 pad[2];
};

/* BPF_F_CLONE lets an accepted socket inherit its listener's state. */
BPF_MAP_FLAGS(SK_STORAGE, states, int, struct socket_state, 0, BPF_F_NO_PREALLOC | BPF_F_CLONE);

/* The process that called connect() for a socket. A socket has an entry only if a rule needed the process at that time.
 * Accepted sockets have no entry.
 */
BPF_MAP_FLAGS(SK_STORAGE, callers, int, struct caller, 0, BPF_F_NO_PREALLOC);

/* 1 if a rule has a condition on the process, or leaves the congestion control to userspace's model (`choice`). This
 * includes the rules of the list that will be in force next. Userspace writes this value.
 */
BPF_MAP(ARRAY, asks_who, __u32, __u32, 1);

/* Whether the latest handshake with each peer ended with an agreement on a rule, or the reason why not. The key is the
 * peer's address.
 */
BPF_MAP(LRU_HASH, peers, __u32[4], struct graft_peer, GRAFT_PEERS);

/* Agreements with peers over TLS (struct graft_bound), by the peer's address. Userspace writes them after TLS has
 * authenticated the peer.
 */
BPF_MAP_FLAGS(HASH, bound, __u32[4], struct graft_bound, GRAFT_BOUND, BPF_F_NO_PREALLOC);

/* Records of the latest handshakes: whether the hosts agreed on a rule, or the reason why not. */
BPF_MAP(LRU_HASH, connections, struct graft_connection_key, struct graft_connection, GRAFT_PEERS);

/* Time at which this host last did not answer an offer in a SYN, because of SYN cookies or missing header space; 0:
 * never.
 */
__u64 unanswered_ns;

static __always_inline bool fits(const struct graft_rule *rule, const struct ends *ends,
				 const struct caller *caller)
{
	if (rule->side != ends->side || ends->port < rule->first_port || ends->port > rule->last_port)
		return false;
	for (int i = 0; i < 4; i++)
		if ((ends->peer[i] & rule->mask[i]) != rule->peer[i])
			return false;
	return is_wanted(&rule->caller, caller);
}

static __always_inline __u32 first_rule(void)
{
	__u32 zero = 0, *first = bpf_map_lookup_elem(&in_force, &zero);

	return first ? *first : 0;
}

static __always_inline const struct graft_rule *rule_at(__u32 index)
{
	__u32 place = first_rule() + index;

	return bpf_map_lookup_elem(&rules, &place);
}

struct search {
	const struct ends *ends;
	const struct caller *caller;
	__u32 first;
	__u32 found; /* index of the first rule that matches; GRAFT_RULES: no rule matches */
};

static long look_at(__u32 index, struct search *search)
{
	__u32 place = search->first + index;
	const struct graft_rule *rule = bpf_map_lookup_elem(&rules, &place);

	if (!rule || !rule->side)
		return 1;
	if (!fits(rule, search->ends, search->caller))
		return 0;
	search->found = index;
	return 1;
}

static __always_inline const struct caller *caller_of(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;

	return sk ? bpf_sk_storage_get(&callers, sk, 0, 0) : 0;
}

/* Returns the index of the first rule that matches the connection, or GRAFT_RULES if none does. With bpf_loop the
 * verifier checks the loop's body only once.
 */
__noinline int graft_find_rule(struct bpf_sock_ops *ctx, const struct ends *ends)
{
	struct search search = {
		.ends = ends,
		.caller = caller_of(ctx),
		.first = first_rule(),
		.found = GRAFT_RULES,
	};

	if (!ends)
		return GRAFT_RULES;
	bpf_loop(GRAFT_RULES, look_at, &search, 0);
	return search.found;
}

static __always_inline const struct graft_rule *find_rule(struct bpf_sock_ops *ctx, const struct ends *ends,
							  __u32 *index)
{
	*index = graft_find_rule(ctx, ends);
	return *index < GRAFT_RULES ? rule_at(*index) : 0;
}

/* Reads the TCP option of grafts from the peer's packet that is handled at present. Returns enum graft_reading. */
__noinline int graft_read_option(struct bpf_sock_ops *ctx, struct graft_option *option, __u64 flags)
{
	__u8 *bytes = (__u8 *)option;
	long got;

	if (!option)
		return GRAFT_READ_NONE;
	/* bpf_load_hdr_opt reads the wanted kind and experiment ID from this buffer, and overwrites it with
	 * the option that it finds.
	 */
	bytes[0] = GRAFT_OPTION_KIND;
	bytes[1] = 6;
	__builtin_memcpy(bytes + 2, GRAFT_OPTION_EXID, 4);
	got = bpf_load_hdr_opt(ctx, option, sizeof(*option), flags);
	/* -ENOSPC means that the option is longer than the buffer, which then holds its first bytes. The
	 * length is set one too high, so that graft_read() refuses the option.
	 */
	if (got == -ENOSPC)
		got = sizeof(*option) + 1;
	return graft_read(option, got > 0 ? got : 0);
}

static __always_inline int store_option(struct bpf_sock_ops *ctx, __u8 message, __be32 graft)
{
	struct graft_option option = {
		.kind = GRAFT_OPTION_KIND,
		.bytes = GRAFT_OPTION_BYTES,
		.version = GRAFT_OPTION_VERSION,
		.message = message,
		.graft = graft,
	};

	__builtin_memcpy(option.exid, GRAFT_OPTION_EXID, sizeof(option.exid));
	return bpf_store_hdr_opt(ctx, &option, sizeof(option), 0);
}

static __always_inline struct socket_state *state_of(struct bpf_sock_ops *ctx, __u64 flags)
{
	struct bpf_sock *sk = ctx->sk;

	return sk ? bpf_sk_storage_get(&states, sk, 0, flags) : 0;
}

/* Applies a rule's settings to the socket of the connection on this host. */
__noinline int graft_apply(struct bpf_sock_ops *ctx, const struct graft_rule *rule)
{
	char congestion[GRAFT_NAME_BYTES];
	int value, refused = 0;
	__u32 pacing;

	if (!rule)
		return 0;
	pacing = rule->pacing_bytes_s;
	__builtin_memcpy(congestion, rule->congestion, sizeof(congestion));
	congestion[GRAFT_NAME_BYTES - 1] = 0;
	if (rule->set & GRAFT_SET_CONGESTION &&
	    bpf_setsockopt(ctx, SOL_TCP, TCP_CONGESTION, congestion, sizeof(congestion)))
		count(GRAFT_NO_CONGESTION);
	if (rule->set & GRAFT_SET_PACING)
		refused |= bpf_setsockopt(ctx, SOL_SOCKET, SO_MAX_PACING_RATE, &pacing, sizeof(pacing));
	value = rule->send_buffer_bytes;
	if (rule->set & GRAFT_SET_SEND_BUFFER)
		refused |= bpf_setsockopt(ctx, SOL_SOCKET, SO_SNDBUF, &value, sizeof(value));
	value = rule->receive_buffer_bytes;
	if (rule->set & GRAFT_SET_RECEIVE_BUFFER)
		refused |= bpf_setsockopt(ctx, SOL_SOCKET, SO_RCVBUF, &value, sizeof(value));
	value = rule->window_packets;
	if (rule->set & GRAFT_SET_WINDOW)
		refused |= bpf_setsockopt(ctx, SOL_TCP, TCP_BPF_IW, &value, sizeof(value));
	if (refused)
		count(GRAFT_NOT_SET);
	return 0;
}

/* Forward declaration, since graft_choose() is defined below its callers. */
int graft_choose(struct bpf_sock_ops *ctx, const struct ends *ends, __u32 rule);

static __always_inline void set_socket(struct bpf_sock_ops *ctx, const struct graft_rule *rule,
				       const struct ends *ends)
{
	graft_apply(ctx, rule);
	if (rule->choice)
		graft_choose(ctx, ends, rule->choice);
}

/* The result of a connection's handshake, as graft_conclude() records it. */
struct conclusion {
	struct ends ends;
	__u32 outcome; /* whether the hosts agreed on a rule, or the reason why not: enum graft_outcome */
	__u32 rule;
	__be32 own;
	__be32 heard;
	__u32 spoke;
};

static __always_inline void remember(const struct conclusion *it)
{
	struct graft_peer fresh = {}, *known;
	/* Before Linux 6.2 the verifier requires that a global function has map keys on the stack. */
	__u32 peer[4];

	__builtin_memcpy(peer, it->ends.peer, sizeof(peer));
	known = bpf_map_lookup_elem(&peers, peer);
	if (known) {
		fresh.agreed = known->agreed;
		fresh.resent_ns = known->resent_ns;
	}
	/* The entry is replaced as a whole, so readers see consistent fields. If two CPUs replace the entry at once,
	 * one connection may be missing in `agreed`, the number of agreements.
	 */
	fresh.agreed += it->outcome == GRAFT_AGREED;
	fresh.time_ns = bpf_ktime_get_ns();
	if (it->outcome == GRAFT_RESENT)
		fresh.resent_ns = fresh.time_ns;
	else if (it->outcome == GRAFT_AGREED)
		fresh.resent_ns = 0;
	fresh.outcome = it->outcome;
	fresh.rule = it->rule;
	fresh.graft = it->heard;
	bpf_map_update_elem(&peers, peer, &fresh, BPF_ANY);
}

/* Records the result of the handshake, so that userspace can compare the record with the peer's. */
static __always_inline void record(struct bpf_sock_ops *ctx, const struct conclusion *it)
{
	bool is_client = it->ends.side == GRAFT_CLIENT;
	/* No data was sent yet, so the sockets' next sequence numbers are those of the first data bytes. */
	__u32 local = ctx->snd_una, remote = ctx->rcv_nxt;
	struct graft_connection_key key = {
		.client_first = is_client ? local : remote,
		.server_first = is_client ? remote : local,
		.side = it->ends.side,
	};
	struct graft_connection connection = {
		.time_ns = bpf_ktime_get_ns(),
		.outcome = it->outcome,
		.own = it->own,
		.heard = it->heard,
		.port = it->ends.port,
		.spoke = !!it->spoke,
	};

	__builtin_memcpy(connection.peer, it->ends.peer, sizeof(connection.peer));
	bpf_map_update_elem(&connections, &key, &connection, BPF_ANY);
}

__noinline int graft_conclude(struct bpf_sock_ops *ctx, const struct conclusion *it)
{
	if (!it)
		return 0;
	count(it->outcome);
	remember(it);
	record(ctx, it);
	return 0;
}

/* Returns whether this host may send the peer an offer to agree on this rule now. */
__noinline int graft_may_ask(const struct graft_rule *rule, __u32 index, const struct ends *ends)
{
	const struct graft_bound *peer;
	__u32 key[4]; /* The address is copied to the stack, as the verifier before Linux 6.2 requires. */

	if (!rule || !ends)
		return 0;
	if (rule->agree != GRAFT_ASK_BOUND)
		return rule->agree;
	__builtin_memcpy(key, ends->peer, sizeof(key));
	peer = bpf_map_lookup_elem(&bound, key);
	return peer && peer->generation == rule->generation && peer->rules >> (index & 63) & 1 &&
	       bpf_ktime_get_ns() < peer->until_ns;
}

static __always_inline void set_flags(struct bpf_sock_ops *ctx, int more, int less)
{
	bpf_sock_ops_cb_flags_set(ctx, (ctx->bpf_sock_ops_cb_flags & ~less) | more);
}

/* Clears the callback flags that this program set, so that TCP does not call it for every packet. */
__noinline int graft_let_go(struct bpf_sock_ops *ctx, const struct socket_state *state)
{
	int less = 0;

	if (!state)
		return 0;
	if (!state->had_write_flag)
		less |= BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG;
	if (!state->had_parse_flag)
		less |= BPF_SOCK_OPS_PARSE_ALL_HDR_OPT_CB_FLAG;
	set_flags(ctx, 0, less);
	return 0;
}

/* Returns whether a SYN with the option to this peer was lost in the last ten minutes: a middlebox may drop
 * such SYNs.
 */
static __always_inline bool was_resent(const struct ends *ends)
{
	const struct graft_peer *known = bpf_map_lookup_elem(&peers, ends->peer);

	return known && known->resent_ns && bpf_ktime_get_ns() - known->resent_ns < WITHHOLD_NS;
}

/* Stores the time of the SYN, which the reports of the connection's start and end to userspace contain. An older time
 * is replaced, since a socket may connect again after a failure.
 */
static __always_inline void note_beginning(struct bpf_sock_ops *ctx, __u32 rule)
{
	struct bpf_sock *sk = ctx->sk;
	struct graft_flow *flow;

	if (!rule || !sk)
		return;
	flow = bpf_sk_storage_get(&flows, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (flow)
		flow->began_ns = bpf_ktime_get_ns();
}

/* Removes a socket's entry in `callers`. The connecting process is not needed after a rule was found for the
 * connection.
 */
static __always_inline void forget_caller(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;

	if (sk)
		bpf_sk_storage_delete(&callers, sk);
}

/* Runs before the SYN is built: finds the rule, and enables the option callbacks if the rule needs the peer's
 * agreement.
 */
static __always_inline void on_connect(struct bpf_sock_ops *ctx)
{
	int flags = ctx->bpf_sock_ops_cb_flags;
	struct socket_state *state;
	const struct graft_rule *rule;
	struct ends ends = {};
	__u32 index = 0;

	graft_read_ends(ctx, GRAFT_CLIENT, &ends);
	rule = find_rule(ctx, &ends, &index);
	if (!rule) {
		forget_caller(ctx);
		return;
	}
	note_beginning(ctx, rule->choice);
	state = state_of(ctx, BPF_SK_STORAGE_GET_F_CREATE);
	if (!state) {
		count(GRAFT_NO_MEMORY);
		return;
	}
	state->rule = index;
	state->phase = OFFERING;
	state->answer = 0;
	state->no_room = 0;
	state->sent = 0;
	state->unbound = rule->agree && !graft_may_ask(rule, index, &ends);
	state->withheld = rule->agree && !state->unbound && was_resent(&ends);
	state->had_write_flag = !!(flags & BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG);
	state->had_parse_flag = !!(flags & BPF_SOCK_OPS_PARSE_ALL_HDR_OPT_CB_FLAG);
	if (rule->agree && !state->withheld && !state->unbound)
		set_flags(ctx, BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG, 0);
}

/* A listener needs the option callbacks for all its SYN-ACKs, since any SYN may contain an offer. */
static __always_inline void on_listen(struct bpf_sock_ops *ctx)
{
	int flags = ctx->bpf_sock_ops_cb_flags;
	struct socket_state *state = state_of(ctx, BPF_SK_STORAGE_GET_F_CREATE);

	if (!state) {
		count(GRAFT_NO_MEMORY);
		return;
	}
	state->phase = DONE;
	state->had_write_flag = !!(flags & BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG);
	set_flags(ctx, BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG, 0);
}

static __always_inline bool is_syn_ack(struct bpf_sock_ops *ctx)
{
	return (ctx->skb_tcp_flags & (TCP_FLAG_SYN | TCP_FLAG_ACK)) == (TCP_FLAG_SYN | TCP_FLAG_ACK);
}

struct answer {
	__u32 message; /* enum graft_message; 0: send no option */
	__be32 graft;
};

/* Builds the option for a SYN-ACK. Nothing about the SYN is stored, since its source address may be forged.
 */
__noinline int graft_make_answer(struct bpf_sock_ops *ctx, struct answer *answer)
{
	struct graft_option option = {};
	const struct graft_rule *rule;
	struct ends ends = {};
	__u32 index = 0;

	if (!answer)
		return 0;
	answer->message = 0;
	graft_read_ends(ctx, GRAFT_SERVER, &ends);
	rule = find_rule(ctx, &ends, &index);
	if (!rule || !graft_may_ask(rule, index, &ends))
		return 0;
	answer->graft = rule->graft;
	switch (graft_read_option(ctx, &option, BPF_LOAD_HDR_OPT_TCP_SYN)) {
	case GRAFT_READ_OK:
		answer->message = option.message == GRAFT_OFFER ? GRAFT_ANSWER : 0;
		break;
	case GRAFT_READ_OTHER:
		answer->message = GRAFT_REFUSE;
		break;
	default:
		break;
	}
	return 0;
}

static __always_inline bool is_cookie(struct bpf_sock_ops *ctx)
{
	return ctx->args[0] == BPF_WRITE_HDR_TCP_SYNACK_COOKIE;
}

/* Reserves space in the TCP header for the option, before the packet is built. */
static __always_inline void on_length(struct bpf_sock_ops *ctx)
{
	struct socket_state *state;
	struct answer answer = {};

	if (is_syn_ack(ctx)) {
		graft_make_answer(ctx, &answer);
		if (!answer.message)
			return;
		if (is_cookie(ctx)) {
			count(GRAFT_COOKIES);
			unanswered_ns = bpf_ktime_get_ns();
		} else if (bpf_reserve_hdr_opt(ctx, GRAFT_OPTION_BYTES, 0)) {
			count(GRAFT_NO_ROOM);
			unanswered_ns = bpf_ktime_get_ns();
		}
		return;
	}
	state = state_of(ctx, 0);
	if (!state || state->phase == DONE || state->no_room)
		return;
	/* A repeated SYN is sent without the option, since a middlebox may have dropped the first one because of it. */
	if (state->phase == OFFERING && state->sent)
		return;
	if (bpf_reserve_hdr_opt(ctx, GRAFT_OPTION_BYTES, 0) && state->phase == OFFERING)
		state->no_room = 1;
}

static __always_inline void on_write(struct bpf_sock_ops *ctx)
{
	const struct graft_rule *rule;
	struct socket_state *state;
	struct answer answer = {};

	if (is_syn_ack(ctx)) {
		graft_make_answer(ctx, &answer);
		if (answer.message && !is_cookie(ctx) && !store_option(ctx, answer.message, answer.graft) &&
		    answer.message == GRAFT_ANSWER)
			count(GRAFT_ANSWERED);
		return;
	}
	state = state_of(ctx, 0);
	if (!state)
		return;
	rule = rule_at(state->rule);
	if (state->phase == OFFERING && rule && !state->sent)
		state->sent = !store_option(ctx, GRAFT_OFFER, rule->graft);
	else if (state->phase == CONFIRMING)
		store_option(ctx, GRAFT_CONFIRM, state->answer);
}

/* Evaluates the server's answer to this client's offer, from the TCP option in the SYN-ACK. Returns enum graft_outcome.
 */
__noinline int graft_judge_answer(struct bpf_sock_ops *ctx, struct graft_option *option,
				  const struct socket_state *state, const struct ends *ends)
{
	const struct graft_peer *known;
	__u32 key[4]; /* The address is copied to the stack, as the verifier before Linux 6.2 requires. */

	if (!option || !state || !ends)
		return GRAFT_ABSENT;
	if (state->unbound)
		return GRAFT_UNBOUND;
	if (state->withheld)
		return GRAFT_WITHHELD;
	if (state->no_room)
		return GRAFT_NO_ROOM;
	switch (graft_read_option(ctx, option, 0)) {
	case GRAFT_READ_NONE:
		if (ctx->total_retrans)
			return GRAFT_RESENT;
		__builtin_memcpy(key, ends->peer, sizeof(key));
		known = bpf_map_lookup_elem(&peers, key);
		return known && known->agreed ? GRAFT_STRIPPED : GRAFT_ABSENT;
	case GRAFT_READ_OTHER:
		return GRAFT_REFUSED;
	case GRAFT_READ_BAD:
		return GRAFT_MALFORMED;
	default:
		if (option->message == GRAFT_REFUSE)
			return GRAFT_REFUSED;
		return option->message == GRAFT_ANSWER ? GRAFT_AGREED : GRAFT_MALFORMED;
	}
}

/* Runs at the client when the SYN-ACK has arrived, before the ACK is sent. */
static __always_inline void on_connected(struct bpf_sock_ops *ctx)
{
	struct socket_state *state = state_of(ctx, 0);
	enum graft_outcome outcome = GRAFT_ONE_SIDED;
	struct graft_option option = {};
	const struct graft_rule *rule;
	struct conclusion end = {};

	if (!state || state->phase != OFFERING)
		return;
	rule = rule_at(state->rule);
	graft_read_ends(ctx, GRAFT_CLIENT, &end.ends);
	/* The list of rules may have been replaced since the SYN was sent, so the rule is checked again. */
	if (!rule || !fits(rule, &end.ends, caller_of(ctx))) {
		state->phase = DONE;
		graft_let_go(ctx, state);
		return;
	}
	if (rule->agree)
		outcome = graft_judge_answer(ctx, &option, state, &end.ends);
	state->phase = DONE;
	if (outcome == GRAFT_AGREED) {
		state->answer = option.graft;
		state->phase = CONFIRMING;
		set_flags(ctx, BPF_SOCK_OPS_PARSE_ALL_HDR_OPT_CB_FLAG, 0);
	} else if (rule->agree) {
		graft_let_go(ctx, state);
	}
	end.outcome = outcome;
	end.rule = state->rule;
	end.own = rule->graft;
	end.heard = outcome == GRAFT_AGREED ? option.graft : 0;
	end.spoke = state->sent;
	graft_conclude(ctx, &end);
	if (outcome == GRAFT_AGREED || outcome == GRAFT_ONE_SIDED)
		set_socket(ctx, rule, &end.ends);
}

/* Handles the server's first packet after the handshake. The server has received an ACK with the
 * confirmation, so the option is no longer sent.
 */
static __always_inline void on_packet(struct bpf_sock_ops *ctx)
{
	struct socket_state *state = state_of(ctx, 0);

	if (!state || state->phase != CONFIRMING)
		return;
	state->phase = DONE;
	graft_let_go(ctx, state);
}

/* Returns whether this server has answered every recent SYN that had the TCP option of grafts. The server stores no
 * state for a SYN. So after it has left one unanswered, it cannot know for some time which connections got an answer.
 */
static __always_inline bool answers(const struct socket_state *listener)
{
	return listener && (!unanswered_ns || bpf_ktime_get_ns() - unanswered_ns > COOKIE_LIFE_NS);
}

/* Evaluates the client's confirmation, from the TCP option in the ACK that completes the handshake at this server.
 * Returns enum graft_outcome.
 */
__noinline int graft_judge_confirmation(struct bpf_sock_ops *ctx, const struct graft_rule *rule)
{
	struct graft_option option = {};

	if (!rule)
		return GRAFT_UNCONFIRMED;
	switch (graft_read_option(ctx, &option, 0)) {
	case GRAFT_READ_OK:
		return option.message == GRAFT_CONFIRM && option.graft == rule->graft ? GRAFT_AGREED
										      : GRAFT_MALFORMED;
	case GRAFT_READ_BAD:
		return GRAFT_MALFORMED;
	default:
		return GRAFT_UNCONFIRMED;
	}
}

/* Runs at the server when the handshake is complete, which proves that the client's address is not forged. */
static __always_inline void on_accepted(struct bpf_sock_ops *ctx)
{
	enum graft_outcome outcome = GRAFT_ONE_SIDED;
	struct socket_state *state = state_of(ctx, 0);
	const struct graft_rule *rule;
	struct conclusion end = {};
	__u32 index = 0;

	/* The accepted socket inherited the callback flag from its listener. The flag is cleared, unless
	 * another program had set it on the listener before this program did.
	 */
	if (!state || !state->had_write_flag)
		set_flags(ctx, 0, BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG);
	graft_read_ends(ctx, GRAFT_SERVER, &end.ends);
	rule = find_rule(ctx, &end.ends, &index);
	if (!rule)
		return;
	if (rule->agree && !graft_may_ask(rule, index, &end.ends))
		outcome = GRAFT_UNBOUND;
	else if (rule->agree)
		outcome = graft_judge_confirmation(ctx, rule);
	end.outcome = outcome;
	end.rule = index;
	end.own = rule->graft;
	end.spoke = answers(state);
	graft_conclude(ctx, &end);
	if (outcome == GRAFT_AGREED || outcome == GRAFT_ONE_SIDED)
		set_socket(ctx, rule, &end.ends);
}

/* Applies the choice of userspace's model for the connection's peer and rule: sets the congestion control, reports the
 * connection's start, and arranges that its end is reported.
 */
__noinline int graft_choose(struct bpf_sock_ops *ctx, const struct ends *ends, __u32 rule)
{
	struct graft_choice_key key = {.rule = rule};
	struct bpf_sock *sk = ctx->sk;
	const struct caller *caller;
	struct graft_choice *choice;
	char congestion[GRAFT_NAME_BYTES];
	struct graft_flow *flow;

	if (!ends || !sk)
		return 0;
	flow = bpf_sk_storage_get(&flows, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!flow) {
		count(GRAFT_NO_MEMORY);
		return 0;
	}
	/* A redirected socket connects to the local proxy of the tunnel, which reports the connection to userspace's
	 * model itself.
	 */
	if (flow->picked == GRAFT_PICKED_REDIRECTED)
		return 0;
	/* The time of the SYN is unknown at servers, and at clients whose rule did not yet leave the congestion control
	 * to userspace's model when the SYN was sent. It is estimated as one round trip before now.
	 */
	if (ends->side == GRAFT_SERVER || !flow->began_ns)
		flow->began_ns = bpf_ktime_get_ns() - (ctx->srtt_us >> 3) * 1000ULL;
	flow->side = ends->side;
	flow->rule = rule;
	caller = caller_of(ctx);
	if (caller)
		__builtin_memcpy(flow->command, caller->command, sizeof(flow->command));
	__builtin_memcpy(key.peer, ends->peer, sizeof(key.peer));
	if (!flow->picked) {
		choice = bpf_map_lookup_elem(&choices, &key);
		if (choice)
			graft_pick(choice, flow, false);
	}
	__builtin_memcpy(congestion, flow->congestion, sizeof(congestion));
	if (congestion[0] && bpf_setsockopt(ctx, SOL_TCP, TCP_CONGESTION, congestion, sizeof(congestion)))
		count(GRAFT_NO_CONGESTION);
	flow->counts = 1;
	set_flags(ctx, BPF_SOCK_OPS_STATE_CB_FLAG, 0);
	graft_send_event(ctx, flow, GRAFT_EVENT_BEGAN);
	return 0;
}

static __always_inline void on_state(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	struct graft_flow *flow;

	/* args[1] of the state callback is the new TCP state. */
	if (ctx->args[1] != STATE_CLOSE || !sk)
		return;
	flow = bpf_sk_storage_get(&flows, sk, 0, 0);
	if (!flow || !flow->counts)
		return;
	graft_send_event(ctx, flow, GRAFT_EVENT_ENDED);
	bpf_sk_storage_delete(&flows, sk);
}

/* Removes the state that an accepted socket inherited from its listener. */
static __always_inline void forget(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;

	if (sk)
		bpf_sk_storage_delete(&states, sk);
}

/* Stores the connecting process, since connect() runs in that process, while the SYN may be sent in another
 * context.
 */
static __always_inline void note_caller(struct bpf_sock_addr *ctx)
{
	__u32 zero = 0, *asks = bpf_map_lookup_elem(&asks_who, &zero);
	struct bpf_sock *sk = ctx->sk;
	struct caller *caller;

	if (!asks || !*asks || ctx->protocol != IPPROTO_TCP || !sk)
		return;
	caller = bpf_sk_storage_get(&callers, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!caller) {
		count(GRAFT_NO_MEMORY);
		return;
	}
	/* The socket may have an older entry, if another process failed to connect it before. */
	__builtin_memset(caller, 0, sizeof(*caller));
	read_caller(caller);
}

SEC("cgroup/connect4")
int graft_connect4(struct bpf_sock_addr *ctx)
{
	note_caller(ctx);
	return 1;
}

SEC("cgroup/connect6")
int graft_connect6(struct bpf_sock_addr *ctx)
{
	note_caller(ctx);
	return 1;
}

SEC("sockops")
int graft_tcp(struct bpf_sock_ops *ctx)
{
	switch (ctx->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
		on_connect(ctx);
		break;
	case BPF_SOCK_OPS_TCP_LISTEN_CB:
		on_listen(ctx);
		break;
	case BPF_SOCK_OPS_HDR_OPT_LEN_CB:
		on_length(ctx);
		break;
	case BPF_SOCK_OPS_WRITE_HDR_OPT_CB:
		on_write(ctx);
		break;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		on_connected(ctx);
		forget_caller(ctx);
		break;
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		on_accepted(ctx);
		forget(ctx);
		break;
	case BPF_SOCK_OPS_PARSE_HDR_OPT_CB:
		on_packet(ctx);
		break;
	case BPF_SOCK_OPS_STATE_CB:
		on_state(ctx);
		break;
	}
	return 1;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
