/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The gate's rules, in the order of enum gate_rule. judge() returns the reason why a packet is refused or passes. */
#ifndef MILLRACE_GATE_RULES_H
#define MILLRACE_GATE_RULES_H

#include "bucket.h"
#include "gate_head.h"
#include "gate_token.h"
#include "gate_track.h"
#include <bpf/bpf_endian.h>

/* Largest number of Initials after the first that count as the same connection: further parts of a ClientHello, and
 * retransmissions.
 * Without a bound, a client could repeat one connection ID for ever and never get a Retry.
 */
#define REPEATS_MAX 32

/* --- Rates --- */

/* Returns the time in ns at which a packet is charged to a token bucket. The coarse clock advances by at most ROUGH_NS
 * at a time, and the bucket then gains the tokens of that time at once. A bucket that is too small for these tokens and
 * the packet's price would overflow and lose some. Such a bucket needs the exact clock.
 */
static __always_inline __u64 now_for(struct gate_work *work, const struct bucket_rate *rate, __u64 price)
{
	return rate->burst < price + ROUGH_NS * BUCKET_TICKS ? exact_now(work) : work->now_ns;
}

static __always_inline int is_over(struct gate_work *work, __u64 *full_at, const struct bucket_rate *rate,
				   __u64 units)
{
	__u64 price = price_of(rate, units, 1);

	return takes_too_much(full_at, rate->burst, price, now_for(work, rate, price));
}

static __always_inline __u32 quic_bytes(const struct gate_work *work)
{
	return work->packet.end - work->packet.quic_at;
}

/* Charges a packet to two token buckets, one for packets and one for bytes. Returns the rule that refuses the packet,
 * or GATE_RULES if none does. In enum gate_rule, each rule that limits bytes directly follows the rule that limits
 * packets of the same kind.
 */
static __always_inline enum gate_rule check_rates(struct gate_work *work, const struct gate_policy *policy,
						  struct gate_buckets *taken, const struct bucket_rate *rates,
						  enum gate_rule packets)
{
	__u32 bytes = quic_bytes(work);

	if (mode_of(policy, packets) &&
	    is_over(work, &taken->full_at[GATE_RATE_PACKETS], &rates[GATE_RATE_PACKETS], 1) &&
	    refuses(work, policy, packets))
		return packets;
	if (mode_of(policy, packets + 1) &&
	    is_over(work, &taken->full_at[GATE_RATE_BYTES], &rates[GATE_RATE_BYTES], bytes) &&
	    refuses(work, policy, packets + 1))
		return packets + 1;
	return GATE_RULES;
}

/* Reports whether a connection begins with this packet. One connection may take several Initials: a ClientHello with a
 * post-quantum key share fills two, and each may be retransmitted. Only the first one counts as a new connection.
 */
static __always_inline int begins_connection(const struct gate_work *work)
{
	return work->is_new && !work->is_repeated;
}

static __always_inline int check_initials(struct gate_work *work, const struct gate_policy *policy,
					  struct gate_buckets *taken, const struct bucket_rate *rates,
					  enum gate_rule initials)
{
	return begins_connection(work) && mode_of(policy, initials) &&
	       is_over(work, &taken->full_at[GATE_RATE_INITIALS], &rates[GATE_RATE_INITIALS], 1) &&
	       refuses(work, policy, initials);
}

/* Returns the token buckets of this key, or new ones, which are full. Returns NULL if the map `buckets` has no room. */
static __always_inline struct gate_buckets *find_buckets(const struct gate_bucket_key *key)
{
	struct gate_buckets *found = bpf_map_lookup_elem(&buckets, key);
	struct gate_buckets full = {};

	if (found)
		return found;
	/* If another CPU has added an entry with this key first, both CPUs use that entry. */
	bpf_map_update_elem(&buckets, key, &full, BPF_NOEXIST);
	return bpf_map_lookup_elem(&buckets, key);
}

/* --- Live connections --- */

/* Finds the token buckets for a packet of a live connection. They belong to the client that opened the connection, not
 * to the packet's source address: a client can send the ID of its connection from a forged address.
 */
static __noinline struct gate_buckets *find_live_buckets(const struct gate_work *work, int live)
{
	struct gate_bucket_key key = {.client = work->client.address, .scope = work->scope};
	const struct gate_connection *connection;

	key.kind = live == GATE_LIVE_PATH ? GATE_BUCKET_PATH : GATE_BUCKET_LIVE;
	connection = live == GATE_LIVE_PATH ? NULL : bpf_map_lookup_elem(&connections, &work->id);
	if (connection && connection->phase != GATE_PUBLISHED) {
		key.client = connection->client.address;
	} else if (connection) {
		/* The gate does not know which client uses an ID that the application has published. So each such ID
		 * has token buckets of its own. */
		key.kind = GATE_BUCKET_ID;
		store128(key.client.bytes, (struct bytes16){.low = HASH_OF(MARK_SERVER_ID, &work->id)});
	}
	return find_buckets(&key);
}

static __always_inline int check_live(struct gate_work *work, const struct gate_policy *policy, int live)
{
	enum gate_rule rule;
	struct gate_buckets *found;

	if (!mode_of(policy, GATE_LIVE_PACKETS) && !mode_of(policy, GATE_LIVE_BYTES))
		return live;
	found = find_live_buckets(work, live);
	if (!found)
		return live;
	rule = check_rates(work, policy, found, policy->live, GATE_LIVE_PACKETS);
	return rule == GATE_RULES ? live : rule;
}

/* --- New connections --- */

static __always_inline int has_valid_token(struct gate_work *work, const struct gate_policy *policy)
{
	const struct gate_packet *packet = &work->packet;
	const __u8 *from = head_at(&work->head, packet->token_at);
	struct gate_token_key *key;
	__u32 index;

	if (packet->token_len != sizeof(work->token) ||
	    !head_has(&work->head, packet->token_at, sizeof(work->token)))
		return 0;
	for (int i = 0; i < sizeof(work->token); i += 8)
		store64((__u8 *)&work->token + i, load64(from + i));
	if (!gate_token_is_ours(&work->token))
		return 0;
	index = work->token.key;
	key = bpf_map_lookup_elem(&token_keys, &index);
	/* The client continues with the Retry's source connection ID, so a token is valid for one connection only. */
	if (key && key->valid && packet->id_len == sizeof(work->token.retry_id) &&
	    load64(head_at(&work->head, packet->id_at)) == load64(work->token.retry_id) &&
	    gate_token_is_valid(&key->key, &work->token, policy->token_scope, &packet->source,
				packet->source_port, unix_seconds(work), policy->token_seconds))
		return 1;
	count_event(GATE_TOKEN_INVALID);
	return 0;
}

/* Reports whether a rule is enabled that needs to know which Initials were admitted before. */
static __always_inline int has_openings(const struct gate_work *work, const struct gate_policy *policy)
{
	return work->id.len &&
	       (mode_of(policy, GATE_QUOTA) || mode_of(policy, GATE_RETRY) ||
		mode_of(policy, GATE_UNKNOWN_INITIALS) || mode_of(policy, GATE_CLIENT_INITIALS));
}

/* Returns the entry in `openings` of an earlier Initial with the packet's connection ID, address and port, or NULL. */
static __always_inline struct gate_opening *find_opening(const struct gate_work *work,
							 const struct gate_policy *policy)
{
	struct gate_opening *opening;

	if (!has_openings(work, policy) || !IS_MARKED(MARK_OPENING, &work->id))
		return NULL;
	opening = bpf_map_lookup_elem(&openings, &work->id);
	return opening && opening->port == work->path.port &&
			       same_address(&opening->address, &work->path.address)
		       ? opening
		       : NULL;
}

/* Finds out whether an Initial begins a connection, and whether it has a valid token. A retransmission, or the second
 * half of a long ClientHello, must not count as another connection.
 */
static __always_inline int look_at_initial(struct gate_work *work, const struct gate_policy *policy)
{
	struct gate_opening *opening = find_opening(work, policy);

	work->is_new = 1;
	work->is_repeated = opening && opening->repeated < REPEATS_MAX;
	if (work->is_repeated)
		opening->repeated++;
	work->is_proved = has_valid_token(work, policy);
	return 0;
}

/* Reports whether the gate knows all live handshakes. Shortly after it was attached, handshakes that began before may
 * still be in progress.
 */
static __always_inline int knows_handshakes(const struct gate_work *work, const struct gate_policy *policy)
{
	return (policy->id_bytes || policy->flags & GATE_TRACK) &&
	       work->now_ns - work->active.since_ns >= policy->unsure_ns;
}

/* Finds out whether a packet of an unknown connection counts as a new connection. Not only Initials count, but also
 * 0-RTT packets without an Initial from the same address, and Handshake packets with an ID that no server chose. Such
 * packets cost the server a look-up, as an Initial does, and they validate no address.
 */
static __noinline int look_at_claim(struct gate_work *work, const struct gate_policy *policy)
{
	__u32 kind = work->packet.kind;

	if (kind == QUIC_INITIAL)
		return look_at_initial(work, policy);
	work->is_new = (kind == QUIC_ZERO_RTT && !find_opening(work, policy)) ||
		       (kind == QUIC_HANDSHAKE && knows_handshakes(work, policy));
	return 0;
}

static __always_inline void remember_opening(struct gate_work *work, const struct gate_policy *policy)
{
	struct gate_opening opening = {.address = work->path.address, .port = work->path.port};

	if (has_openings(work, policy) && !work->is_repeated &&
	    !bpf_map_update_elem(&openings, &work->id, &opening, BPF_ANY))
		MARK(MARK_OPENING, &work->id);
}

/* Checks the quota of the client and of its wider networks. Returns the rule that refuses the packet, or GATE_RULES.
 * The function is global, so that the verifier checks it once.
 */
__noinline int check_quota(struct gate_work *work, const struct gate_policy *policy)
{
	struct gate_client network __attribute__((aligned(8)));

	if (!work || !policy || !begins_connection(work) || !mode_of(policy, GATE_QUOTA))
		return GATE_RULES;
	for (__u32 level = 0; level < GATE_LEVELS; level++) {
		enum gate_rule rule = level ? GATE_NETWORK_QUOTA : GATE_QUOTA;
		__u64 times = name_network(&work->client, level, &network);

		if (times && connections_of(&network) >= policy->quota * times && refuses(work, policy, rule))
			return rule;
	}
	return GATE_RULES;
}

/* Reports whether the packet should be answered with Retry: it begins a connection without a valid token, and such
 * connections come faster than gate_policy.retry_above.
 */
static __always_inline int wants_retry(struct gate_work *work, const struct gate_policy *policy,
				       struct gate_state *state)
{
	return begins_connection(work) && !work->is_proved && mode_of(policy, GATE_RETRY) &&
	       is_over(work, &state->retry_above_at, &policy->retry_above, 1);
}

/* --- Packets of no live connection --- */

/* Reports whether a packet with a short header may belong to a connection that began before the gate was attached. A
 * NAT may have given such a connection any source port.
 */
static __always_inline int may_be_live(const struct gate_work *work, const struct gate_policy *policy)
{
	return work->packet.kind == QUIC_SHORT && work->now_ns - work->active.since_ns < policy->unsure_ns;
}

/* Reports whether the source port shows that a reflector sent the packet: port 0, or one of the policy's ports. */
static __always_inline int is_reflected(const struct gate_work *work, const struct gate_policy *policy)
{
	const struct gate_packet *packet = &work->packet;
	const __u64 ones = 0x0001000100010001;
	__u64 zeroes = 0;

	if (!packet->source_port)
		return 1;
	if (may_be_live(work, policy))
		return 0;
	/* Compares four ports at a time: an equal port leaves a field of 16 zero bits in `difference`. Subtracting one
	 * from each field sets the highest bit of a zero field.
	 */
	for (int i = 0; i < GATE_PORTS; i += 4) {
		__u64 difference = load64(&policy->ports[i]) ^ packet->source_port * ones;

		zeroes |= (difference - ones) & ~difference;
	}
	return !!(zeroes & ones << 15);
}

/* Checks the rates of clients without a known connection, which share one set of token buckets. This check comes before
 * check_client(), so that nothing is stored about a client that is refused here.
 */
static __noinline enum gate_rule check_unknown(struct gate_work *work, const struct gate_policy *policy)
{
	struct gate_state *state;

	if (!mode_of(policy, GATE_UNKNOWN_INITIALS) && !mode_of(policy, GATE_UNKNOWN_PACKETS) &&
	    !mode_of(policy, GATE_UNKNOWN_BYTES))
		return GATE_RULES;
	state = bpf_map_lookup_elem(&states, &work->scope);
	if (!state || work->is_proved || may_be_live(work, policy) || connections_of(&work->client))
		return GATE_RULES;
	if (check_initials(work, policy, &state->unknown, policy->unknown, GATE_UNKNOWN_INITIALS))
		return GATE_UNKNOWN_INITIALS;
	return check_rates(work, policy, &state->unknown, policy->unknown, GATE_UNKNOWN_PACKETS);
}

/* --- One client, and the networks that contain it --- */

/* Reports whether the policy limits this rate of a client and the packet counts for the rate. The rate of new
 * connections counts only packets that begin a connection.
 */
static __always_inline int measures(const struct gate_work *work, const struct gate_policy *policy,
				    __u32 rate)
{
	return mode_of(policy, GATE_CLIENT_INITIALS + rate) &&
	       (rate != GATE_RATE_INITIALS || begins_connection(work));
}

static __always_inline __u64 level_price(const struct gate_work *work, const struct gate_policy *policy,
					 __u32 rate, __u64 times)
{
	return price_of(&policy->client[rate], rate == GATE_RATE_BYTES ? quic_bytes(work) : 1, times);
}

/* Returns the rule that refuses the packet because the token buckets of a client's network hold too little, or
 * GATE_RULES if none does. The network's rate limits are `times` those of one client. Charges the packet to the buckets
 * only if `takes` is not 0.
 */
__noinline int check_level(struct gate_work *work, const struct gate_policy *policy, struct gate_buckets *at,
			   __u64 times, int takes)
{
	if (!work || !policy || !at || !times)
		return GATE_RULES;
	for (__u32 rate = 0; rate < GATE_RATES; rate++) {
		enum gate_rule rule = (times > 1 ? GATE_NETWORK_INITIALS : GATE_CLIENT_INITIALS) + rate;
		__u64 burst = policy->client[rate].burst;
		__u64 price, now_ns;
		int over;

		if (!measures(work, policy, rate))
			continue;
		price = level_price(work, policy, rate, times);
		now_ns = now_for(work, &policy->client[rate], price);
		if (takes)
			over = takes_too_much(&at->full_at[rate], burst, price, now_ns);
		else
			bucket_after(READ_ONCE(at->full_at[rate]), burst, price, now_ns * BUCKET_TICKS,
				     &over);
		if (over && refuses(work, policy, rule))
			return rule;
	}
	return GATE_RULES;
}

/* Reports whether more new clients came than the map `buckets` holds, within the time in which a token bucket fills.
 * The map has then evicted clients whose buckets were not full; if they return, their new buckets must not begin full.
 */
static __always_inline int is_crowded(const struct gate_work *work)
{
	__u32 common = 0;
	struct gate_state *state = bpf_map_lookup_elem(&states, &common);
	__u64 fill = work->active.fill_ticks;

	/* `| 1` only keeps the divisor from being zero. */
	if (!state || !takes_too_much(&state->fresh_at, fill, fill / (config.fresh_rates | 1), work->now_ns))
		return 0;
	count_event(GATE_RATES_CROWDED);
	return 1;
}

/* Makes token buckets for a new client or network. The buckets begin full. If is_crowded(), each begins with only twice
 * the tokens that this packet takes from the bucket of a single client.
 */
static __noinline struct gate_buckets *make_buckets(struct gate_work *work, const struct gate_policy *policy,
						    const struct gate_bucket_key *key)
{
	struct gate_buckets first = {};

	if (key->kind == GATE_BUCKET_STRANGER && is_crowded(work))
		for (__u32 rate = 0; rate < GATE_RATES; rate++)
			first.full_at[rate] = bucket_with_two(
				policy->client[rate].burst, level_price(work, policy, rate, 1), work->now_ns);
	bpf_map_update_elem(&buckets, key, &first, BPF_NOEXIST);
	return bpf_map_lookup_elem(&buckets, key);
}

static __always_inline __u64 name_bucket(const struct gate_work *work, __u32 level,
					 struct gate_bucket_key *key)
{
	key->kind = work->is_proved ? GATE_BUCKET_PROVED : GATE_BUCKET_STRANGER;
	key->scope = work->scope;
	key->level = level;
	return take_network(&config.levels, work->client.address.bytes, level, key->client.bytes);
}

/* Checks the rates of a client and of its wider networks. The first loop only checks the token buckets. The second loop
 * charges the packet to them, and makes buckets for new clients and networks. With one loop, a client over its own
 * limit would use up its network's rates. A network over its limit would add its clients to the map `buckets`. The
 * function is global, so that the verifier checks it once.
 */
__noinline int check_client(struct gate_work *work, const struct gate_policy *policy)
{
	struct gate_bucket_key key __attribute__((aligned(8))) = {};
	struct gate_buckets *found;
	__u64 times;
	int rule;

	if (!work || !policy ||
	    !(measures(work, policy, GATE_RATE_INITIALS) || measures(work, policy, GATE_RATE_PACKETS) ||
	      measures(work, policy, GATE_RATE_BYTES)))
		return GATE_RULES;
	for (__u32 level = 0; level < GATE_LEVELS; level++) {
		times = name_bucket(work, level, &key);
		found = times ? bpf_map_lookup_elem(&buckets, &key) : NULL;
		rule = found ? check_level(work, policy, found, times, 0) : GATE_RULES;
		if (rule != GATE_RULES)
			return rule;
	}
	for (__u32 level = 0; level < GATE_LEVELS; level++) {
		times = name_bucket(work, level, &key);
		if (!times)
			continue;
		found = bpf_map_lookup_elem(&buckets, &key);
		if (!found)
			found = make_buckets(work, policy, &key);
		rule = found ? check_level(work, policy, found, times, 1) : GATE_RULES;
		if (rule != GATE_RULES)
			return rule;
	}
	return GATE_RULES;
}

static __always_inline int judge_stranger(struct gate_work *work, const struct gate_policy *policy)
{
	const struct gate_packet *packet = &work->packet;
	struct gate_state *state = bpf_map_lookup_elem(&states, &work->scope);
	int rule;

	if (is_reflected(work, policy) && refuses(work, policy, GATE_SOURCE_PORT))
		return GATE_SOURCE_PORT;
	if ((packet->kind == QUIC_SHORT || packet->kind == QUIC_HANDSHAKE) && policy->id_bytes &&
	    refuses(work, policy, GATE_UNKNOWN_ID))
		return GATE_UNKNOWN_ID;
	look_at_claim(work, policy);
	rule = check_quota(work, policy);
	if (rule != GATE_RULES)
		return rule;
	if (state && wants_retry(work, policy, state) && refuses(work, policy, GATE_RETRY))
		return GATE_RETRY;
	rule = check_unknown(work, policy);
	if (rule != GATE_RULES)
		return rule;
	rule = check_client(work, policy);
	if (rule != GATE_RULES)
		return rule;
	if (packet->kind != QUIC_INITIAL)
		return GATE_UNKNOWN;
	remember_opening(work, policy);
	return work->is_proved ? GATE_PROVED : GATE_NEW;
}

/* --- All packets --- */

static __always_inline int speaks(const struct gate_policy *policy, __be32 version)
{
	for (int i = 0; i < GATE_VERSIONS; i++)
		if (policy->versions[i] == version)
			return 1;
	return 0;
}

/* Returns the rule that refuses the packet because of its size, its QUIC header or its QUIC version, or GATE_RULES if
 * none does.
 */
static __noinline enum gate_rule check_form(struct gate_work *work, const struct gate_policy *policy)
{
	const struct gate_packet *packet;
	__u32 bytes;

	packet = &work->packet;
	bytes = packet->end - packet->quic_at;
	if ((packet->kind == QUIC_NOTHING || (packet->kind == QUIC_SHORT && bytes < QUIC_SHORT_MIN)) &&
	    refuses(work, policy, GATE_SHORT))
		return GATE_SHORT;
	if (packet->kind == QUIC_IMPOSSIBLE && refuses(work, policy, GATE_MALFORMED))
		return GATE_MALFORMED;
	if (packet->kind >= QUIC_INITIAL && packet->kind <= QUIC_OTHER_VERSION &&
	    mode_of(policy, GATE_VERSION) && !speaks(policy, packet->version) &&
	    refuses(work, policy, GATE_VERSION))
		return GATE_VERSION;
	if (packet->kind == QUIC_INITIAL && bytes < INITIAL_DATAGRAM &&
	    refuses(work, policy, GATE_INITIAL_SIZE))
		return GATE_INITIAL_SIZE;
	return GATE_RULES;
}

static __always_inline int check_headers(struct gate_work *work, const struct gate_policy *policy,
					 enum gate_find found)
{
	const struct gate_packet *packet = &work->packet;

	if (packet->fragment && refuses(work, policy, GATE_FRAGMENT))
		return GATE_FRAGMENT;
	if ((found == FIND_TOO_MANY || packet->bad_lengths) && refuses(work, policy, GATE_HEADERS))
		return GATE_HEADERS;
	if (packet->options && refuses(work, policy, GATE_OPTIONS))
		return GATE_OPTIONS;
	return GATE_RULES;
}

static __always_inline __u32 look_up_prefix(const struct gate_prefix_key *key)
{
	__u32 *rank = bpf_map_lookup_elem(&prefixes, key);

	return rank ? *rank : 0;
}

/* Finds the entry of the block and allow lists that decides about the packet: the longest prefix that matches, in the
 * lists of the packet's application (scope) and in the lists for all applications. If a prefix is both blocked and
 * allowed, the block wins. Returns enum gate_entry, or 0 if no entry matches.
 */
static __noinline int find_entry(const struct gate_work *work)
{
	struct gate_prefix_key key = {.prefix_bits = 32 + 128};
	__u32 own, common;

	if (!(work->active.lookups & GATE_LOOKUP_PREFIXES))
		return 0;
	key.table = bpf_htons(half_of(&work->active) | (work->packet.family == 6 ? GATE_TABLE_V6 : 0));
	key.scope = bpf_htons(work->scope);
	key.address = work->path.address;
	own = look_up_prefix(&key);
	key.scope = 0;
	common = look_up_prefix(&key);
	return (own > common ? own : common) & GATE_ENTRY;
}

static __always_inline __u32 *look_up_scope(const struct gate_work *work, __u32 lookup, int address, int port)
{
	const struct gate_packet *packet = &work->packet;
	struct gate_scope_key key = {.half = half_of(&work->active)};

	if (!(work->active.lookups & lookup))
		return NULL;
	if (address)
		key.address = packet->destination;
	if (port)
		key.port = packet->destination_port;
	return bpf_map_lookup_elem(&scopes, &key);
}

/* Finds the guarded application (scope) of a packet by its destination: address and port, then address, then port.
 * Returns not 0 if the packet is for no guarded application. A packet whose port is unknown and whose address is no
 * application's gets scope 0, so that the rules on headers still apply.
 */
static __noinline int find_scope(struct gate_work *work, __u32 found)
{
	const struct gate_packet *packet = &work->packet;
	struct gate_place *last = &work->place;
	__u32 *scope = NULL;

	/* Most packets have the same destination as the packet before, so its scope (application) is cached. A change
	 * of the rules makes the cached scope invalid.
	 */
	if (found == FIND_OK && last->turn == work->active.turn && last->port == packet->destination_port &&
	    same_address(&last->address, &packet->destination)) {
		work->scope = last->scope & (GATE_SCOPES - 1);
		return 0;
	}
	if (found == FIND_OK)
		scope = look_up_scope(work, GATE_LOOKUP_BOTH, 1, 1);
	if (!scope)
		scope = look_up_scope(work, GATE_LOOKUP_ADDRESS, 1, 0);
	if (!scope && found == FIND_OK)
		scope = look_up_scope(work, GATE_LOOKUP_PORT, 0, 1);
	work->scope = scope ? *scope & (GATE_SCOPES - 1) : 0;
	if (found != FIND_OK)
		return 0;
	if (!scope)
		return -1;
	*last = (struct gate_place){
		.address = packet->destination,
		.port = packet->destination_port,
		.turn = work->active.turn,
		.scope = work->scope,
	};
	return 0;
}

/* Sets the keys of the packet in the maps `clients` (its source network) and `paths` (its source address and port). */
static __always_inline void name_client(struct gate_work *work)
{
	const struct gate_packet *packet = &work->packet;
	const volatile __u64 *mask =
		(const volatile __u64 *)(packet->family == 4 ? &config.levels.v4[0].mask
							     : &config.levels.v6[0].mask);
	struct bytes16 address = load128(packet->source.bytes);

	address.low &= mask[0];
	address.high &= mask[1];
	store128(work->client.address.bytes, address);
	work->client.scope = work->scope;
	work->client.level = 0;
	work->path.address = packet->source;
	work->path.scope = work->scope;
	work->path.port = packet->source_port;
}

/* Returns the reason why the packet is refused (enum gate_rule) or passes (enum gate_pass). */
static __always_inline int judge(struct xdp_md *ctx, struct gate_work *work, enum gate_find found,
				 const struct gate_policy *policy)
{
	int reason, entry;

	name_client(work);
	reason = check_headers(work, policy, found);
	if (reason != GATE_RULES)
		return reason;
	entry = find_entry(work);
	if (entry == GATE_ENTRY_BLOCK && refuses(work, policy, GATE_BLOCK))
		return GATE_BLOCK;
	if (found != FIND_OK || work->packet.fragment || work->packet.bad_lengths)
		return GATE_UNKNOWN;
	take_quic(ctx, work);
	reason = check_form(work, policy);
	if (reason != GATE_RULES)
		return reason;
	reason = find_connection(work, policy);
	if (reason)
		return reason < GATE_RULES ? reason : check_live(work, policy, reason);
	return entry == GATE_ENTRY_ALLOW ? GATE_ALLOWED : judge_stranger(work, policy);
}

#endif
