// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Admission for QUIC servers, before the stack. gate_xdp gives every packet to a scope one verdict, by the rules in
 * the order of enum gate_rule. gate_egress watches what servers answer, for scopes that track by themselves.
 * gate_count and gate_expire change, on behalf of userspace, what the other two change at the same time.
 */
#include "udp.h"
#include "gate_answer.h"

#define PASS_ON -1 /* "next program" for TCX, "next filter" for clsact */
#define REPEATS_MAX \
	32 /* packets of a ClientHello and their retransmissions; more would be a way around a Retry */
#define MAX_ATTEMPTS 8		    /* to change what other CPUs change too */
#define SEEN_NS	     (NS_PER_S / 4) /* how exact times of last use are */

#define READ_ONCE(x)	 (*(const volatile typeof(x) *)&(x))
#define WRITE_ONCE(x, y) (*(volatile typeof(x) *)&(x) = (y))

static __noinline int count_event(enum gate_event event)
{
	__u32 key = event;
	__u64 *counter = bpf_map_lookup_elem(&events, &key);

	if (counter)
		*counter += 1;
	return 0;
}

/* --- Rules --- */

static __always_inline __u32 mode_of(const struct gate_policy *policy, enum gate_rule rule)
{
	return policy->modes[rule];
}

/* A rule objects. Whether that decides is a question of its mode; if not, it is noted. */
static __always_inline int refuses(struct gate_work *work, const struct gate_policy *policy,
				   enum gate_rule rule)
{
	__u32 mode = mode_of(policy, rule);

	if (mode == GATE_MONITOR)
		work->monitored |= 1 << rule;
	return mode == GATE_ENFORCE;
}

/* Takes from a bucket. Not 0: there is not enough in it, and nothing was taken. A bucket that is empty is only read:
 * the CPUs do not fight for it in a flood.
 */
static __always_inline int is_over(__u64 *full_at, const struct gate_rate *rate, __u64 units, __u64 now_ns)
{
	__u64 now = now_ns * GATE_TICKS;

	for (int i = 0; i < MAX_ATTEMPTS; i++) {
		__u64 old = READ_ONCE(*full_at);
		__u64 next = ((__s64)(old - now) > 0 ? old : now) + units * rate->cost;

		if (next - now > rate->burst)
			return 1;
		if (__sync_val_compare_and_swap(full_at, old, next) == old)
			return 0;
	}
	return 0; /* as many others were let in meanwhile: one more hardly matters */
}

/* The rules for packets and bytes follow each other, in all three groups. */
static __always_inline enum gate_rule check_rates(struct gate_work *work, const struct gate_policy *policy,
						  struct gate_buckets *taken, const struct gate_rate *rates,
						  enum gate_rule packets)
{
	__u32 bytes = work->packet.end - work->packet.quic_at;

	if (mode_of(policy, packets) &&
	    is_over(&taken->full_at[GATE_RATE_PACKETS], &rates[GATE_RATE_PACKETS], 1, work->now_ns) &&
	    refuses(work, policy, packets))
		return packets;
	if (mode_of(policy, packets + 1) &&
	    is_over(&taken->full_at[GATE_RATE_BYTES], &rates[GATE_RATE_BYTES], bytes, work->now_ns) &&
	    refuses(work, policy, packets + 1))
		return packets + 1;
	return GATE_RULES;
}

static __always_inline int check_initials(struct gate_work *work, const struct gate_policy *policy,
					  struct gate_buckets *taken, const struct gate_rate *rates,
					  enum gate_rule initials)
{
	return work->is_new && mode_of(policy, initials) &&
	       is_over(&taken->full_at[GATE_RATE_INITIALS], &rates[GATE_RATE_INITIALS], 1, work->now_ns) &&
	       refuses(work, policy, initials);
}

static __always_inline struct gate_buckets *find_buckets(const struct gate_work *work, __u32 live)
{
	struct gate_bucket_key key = {.client = work->client.address, .scope = work->scope, .live = live};
	struct gate_buckets *found = bpf_map_lookup_elem(&buckets, &key);
	struct gate_buckets full = {};

	if (found)
		return found;
	bpf_map_update_elem(&buckets, &key, &full, BPF_NOEXIST);
	return bpf_map_lookup_elem(&buckets, &key);
}

/* --- Connections of clients --- */

/* Counts one more or one less. Not 0: there is no room for another client. An entry is only removed long after it
 * became zero; who meets one that is just being removed tries again.
 */
static __always_inline int change_count(const struct gate_client *client, __s32 change, __u64 now_ns,
					__u32 *after)
{
	*after = 0;
	for (int i = 0; i < MAX_ATTEMPTS; i++) {
		struct gate_count *count = bpf_map_lookup_elem(&clients, client);
		struct gate_count first = {.connections = 1};
		__u32 old;

		if (!count) {
			if (change < 0)
				return 0;
			*after = 1;
			if (!bpf_map_update_elem(&clients, client, &first, BPF_NOEXIST))
				return 0;
			continue;
		}
		old = READ_ONCE(count->connections);
		if (old >= GATE_COUNT_GONE)
			continue;
		if (change < 0 && !old)
			return 0;
		*after = old + change;
		if (!*after)
			count->zero_ns = now_ns;
		if (__sync_val_compare_and_swap(&count->connections, old, *after) == old)
			return 0;
	}
	return -1;
}

static __always_inline __u32 connections_of(const struct gate_client *client)
{
	struct gate_count *count = bpf_map_lookup_elem(&clients, client);
	__u32 connections = count ? READ_ONCE(count->connections) : 0;

	return connections < GATE_COUNT_GONE ? connections : 0;
}

/* --- Live connections --- */

static __always_inline int same_address(const struct gate_address *a, const struct gate_address *b)
{
	return !differ16(load16(a->bytes), load16(b->bytes));
}

static __always_inline int same_path(const struct gate_path *a, const struct gate_path *b)
{
	return a->port == b->port && same_address(&a->address, &b->address);
}

static __always_inline void touch(__u64 *seen_ns, __u64 now_ns)
{
	if (now_ns - READ_ONCE(*seen_ns) > SEEN_NS)
		WRITE_ONCE(*seen_ns, now_ns);
}

/* Makes this the path of the connection. A connection has one, so that nobody fills the map who replays an ID. */
static __always_inline void put_path(struct gate_work *work)
{
	struct gate_path_state state = {.seen_ns = work->now_ns, .latest = work->id};

	bpf_map_update_elem(&paths, &work->path, &state, BPF_ANY);
}

static __noinline int use_connection(struct gate_work *work, struct gate_connection *connection)
{
	touch(&connection->seen_ns, work->now_ns);
	if (connection->tracked && !same_path(&connection->path, &work->path)) {
		bpf_map_delete_elem(&paths, &connection->path);
		connection->path = work->path;
		put_path(work);
	}
	return 0;
}

/* Another ID on the path of a live connection: it keeps both alive. */
static __always_inline int use_path(struct gate_work *work)
{
	struct gate_path_state *path = bpf_map_lookup_elem(&paths, &work->path);
	struct gate_connection *connection;

	if (!path)
		return 0;
	touch(&path->seen_ns, work->now_ns);
	connection = bpf_map_lookup_elem(&connections, &path->latest);
	if (connection)
		touch(&connection->seen_ns, work->now_ns);
	return 1;
}

/* The client has shown the ID that the server answered with. */
static __noinline int track(struct gate_work *work, const struct gate_policy *policy)
{
	struct gate_connection connection = {
		.seen_ns = work->now_ns,
		.path = work->path,
		.client = work->client,
		.tracked = 1,
		.counted = !!(policy->flags & GATE_COUNT),
	};
	__u32 after;

	if (bpf_map_update_elem(&connections, &work->id, &connection, BPF_NOEXIST))
		return -!bpf_map_lookup_elem(&connections, &work->id); /* another CPU may have been faster */
	if (connection.counted && change_count(&work->client, 1, work->now_ns, &after)) {
		bpf_map_delete_elem(&connections, &work->id);
		return -1;
	}
	put_path(work);
	count_event(GATE_CONNECTION_TRACKED);
	return 0;
}

/* Leaves the destination connection ID in work->id, and returns its length, which is not in short headers. */
static __always_inline __u32 take_id(struct gate_work *work, const struct gate_policy *policy)
{
	const struct gate_packet *packet = &work->packet;
	const __u8 *from = head_at(&work->head, packet->id_at);
	__u32 len = packet->id_len;
	struct gate_state *state;

	if (packet->kind == QUIC_SHORT) {
		state = bpf_map_lookup_elem(&states, &work->scope);
		len = policy->id_bytes ? policy->id_bytes : state ? READ_ONCE(state->id_bytes) : 0;
	}
	if (len > GATE_ID_MAX || packet->id_at + len > packet->end)
		len = 0;
	work->id.scope = work->scope;
	work->id.len = len;
	for (int i = 0; i < GATE_ID_MAX; i++)
		work->id.bytes[i] = i < len ? from[i] : 0;
	return len;
}

/* Whether it belongs to a live connection, or to a handshake that the server has answered. */
static __noinline enum gate_pass find_connection(struct gate_work *work, const struct gate_policy *policy)
{
	struct gate_connection *connection;
	struct gate_opening *opening;
	int is_short, has_id;

	is_short = work->packet.kind == QUIC_SHORT;
	has_id = take_id(work, policy) != 0;
	if (has_id) {
		connection = bpf_map_lookup_elem(&connections, &work->id);
		if (connection) {
			use_connection(work, connection);
			return GATE_LIVE;
		}
	}
	if (!(policy->flags & GATE_TRACK))
		return 0;
	opening = has_id ? bpf_map_lookup_elem(&handshakes, &work->id) : NULL;
	if (!opening || !same_address(&opening->address, &work->path.address))
		return is_short && use_path(work) ? GATE_LIVE_PATH : 0;
	if (is_short && !track(work, policy))
		return GATE_LIVE;
	if (is_short)
		count_event(GATE_CONNECTIONS_FULL);
	return GATE_HANDSHAKE;
}

static __always_inline int check_live(struct gate_work *work, const struct gate_policy *policy, int live)
{
	enum gate_rule rule;
	struct gate_buckets *found;

	if (!mode_of(policy, GATE_LIVE_PACKETS) && !mode_of(policy, GATE_LIVE_BYTES))
		return live;
	found = find_buckets(work, 1);
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
	    !has(&work->head, packet->token_at, sizeof(work->token)))
		return 0;
	for (int i = 0; i < sizeof(work->token); i += 8)
		store64((__u8 *)&work->token + i, load64(from + i));
	if (!gate_token_is_ours(&work->token))
		return 0;
	index = work->token.key;
	key = bpf_map_lookup_elem(&token_keys, &index);
	if (key && key->valid &&
	    gate_token_is_valid(&key->key, &work->token, &packet->source, packet->source_port,
				unix_seconds(work), policy->token_seconds))
		return 1;
	count_event(GATE_TOKEN_INVALID);
	return 0;
}

/* Whether there is any use in remembering who was let in. */
static __always_inline int has_openings(const struct gate_work *work, const struct gate_policy *policy)
{
	return work->id.len && (mode_of(policy, GATE_QUOTA) || mode_of(policy, GATE_RETRY));
}

/* An Initial that is sent again, or the second half of a long one, must not count as another connection. */
static __noinline int look_at_initial(struct gate_work *work, const struct gate_policy *policy)
{
	struct gate_opening *opening;

	work->is_new = 1;
	if (has_openings(work, policy)) {
		opening = bpf_map_lookup_elem(&openings, &work->id);
		work->is_repeated = opening && opening->port == work->path.port &&
				    opening->repeated < REPEATS_MAX &&
				    same_address(&opening->address, &work->path.address);
		if (work->is_repeated)
			opening->repeated++;
	}
	work->is_proved = has_valid_token(work, policy);
	return 0;
}

static __always_inline void remember_opening(struct gate_work *work, const struct gate_policy *policy)
{
	struct gate_opening opening = {.address = work->path.address, .port = work->path.port};

	if (has_openings(work, policy) && !work->is_repeated)
		bpf_map_update_elem(&openings, &work->id, &opening, BPF_ANY);
}

static __always_inline int is_over_quota(const struct gate_work *work, const struct gate_policy *policy)
{
	return work->is_new && !work->is_repeated && mode_of(policy, GATE_QUOTA) &&
	       connections_of(&work->client) >= policy->quota;
}

static __always_inline int wants_retry(const struct gate_work *work, const struct gate_policy *policy,
				       struct gate_state *state)
{
	return work->is_new && !work->is_repeated && !work->is_proved && mode_of(policy, GATE_RETRY) &&
	       is_over(&state->calm_at, &policy->calm, 1, work->now_ns);
}

/* --- What belongs to no live connection --- */

static __always_inline int is_reflected(const struct gate_packet *packet, const struct gate_policy *policy)
{
	if (!packet->source_port)
		return 1;
	for (int i = 0; i < GATE_PORTS; i++)
		if (policy->ports[i] == packet->source_port)
			return 1;
	return 0;
}

/* Unknown clients share buckets. That comes before anything is remembered of one. */
static __noinline enum gate_rule check_unknown(struct gate_work *work, const struct gate_policy *policy)
{
	struct gate_state *state;

	if (!mode_of(policy, GATE_UNKNOWN_INITIALS) && !mode_of(policy, GATE_UNKNOWN_PACKETS) &&
	    !mode_of(policy, GATE_UNKNOWN_BYTES))
		return GATE_RULES;
	state = bpf_map_lookup_elem(&states, &work->scope);
	if (!state || work->is_proved || connections_of(&work->client))
		return GATE_RULES;
	if (check_initials(work, policy, &state->unknown, policy->unknown, GATE_UNKNOWN_INITIALS))
		return GATE_UNKNOWN_INITIALS;
	return check_rates(work, policy, &state->unknown, policy->unknown, GATE_UNKNOWN_PACKETS);
}

static __noinline enum gate_rule check_client(struct gate_work *work, const struct gate_policy *policy)
{
	struct gate_buckets *found;

	if (!(work->is_new && mode_of(policy, GATE_CLIENT_INITIALS)) &&
	    !mode_of(policy, GATE_CLIENT_PACKETS) && !mode_of(policy, GATE_CLIENT_BYTES))
		return GATE_RULES;
	found = find_buckets(work, 0);
	if (!found)
		return GATE_RULES;
	if (check_initials(work, policy, found, policy->client, GATE_CLIENT_INITIALS))
		return GATE_CLIENT_INITIALS;
	return check_rates(work, policy, found, policy->client, GATE_CLIENT_PACKETS);
}

static __always_inline int judge_stranger(struct gate_work *work, const struct gate_policy *policy)
{
	const struct gate_packet *packet = &work->packet;
	struct gate_state *state = bpf_map_lookup_elem(&states, &work->scope);
	int rule;

	if (is_reflected(packet, policy) && refuses(work, policy, GATE_SOURCE_PORT))
		return GATE_SOURCE_PORT;
	if (packet->kind == QUIC_SHORT && policy->id_bytes && refuses(work, policy, GATE_UNKNOWN_ID))
		return GATE_UNKNOWN_ID;
	if (packet->kind == QUIC_INITIAL)
		look_at_initial(work, policy);
	if (is_over_quota(work, policy) && refuses(work, policy, GATE_QUOTA))
		return GATE_QUOTA;
	if (state && wants_retry(work, policy, state) && refuses(work, policy, GATE_RETRY))
		return GATE_RETRY;
	rule = check_unknown(work, policy);
	if (rule != GATE_RULES)
		return rule;
	rule = check_client(work, policy);
	if (rule != GATE_RULES)
		return rule;
	if (!work->is_new)
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

/* What no server wants, whoever sends it. */
static __noinline enum gate_rule check_form(struct gate_work *work, const struct gate_policy *policy)
{
	const struct gate_packet *packet;
	__u32 bytes;

	packet = &work->packet;
	bytes = packet->end - packet->quic_at;
	if ((packet->kind == QUIC_NOTHING ||
	     (packet->kind == QUIC_SHORT && bytes < QUIC_SHORT_MIN + policy->id_bytes)) &&
	    refuses(work, policy, GATE_SHORT))
		return GATE_SHORT;
	if (packet->kind == QUIC_IMPOSSIBLE && refuses(work, policy, GATE_MALFORMED))
		return GATE_MALFORMED;
	if (packet->kind >= QUIC_INITIAL && packet->kind <= QUIC_OTHER_VERSION &&
	    !speaks(policy, packet->version) && refuses(work, policy, GATE_VERSION))
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

/* The longest prefix decides; the scope's own list goes before the one for all. 0: in no list. */
static __noinline int find_entry(const struct gate_work *work)
{
	struct gate_prefix_key key = {.prefix_bits = 32 + 128};
	__u32 *entry;

	if (!(work->active.lookups & GATE_LOOKUP_PREFIXES))
		return 0;
	key.table = bpf_htons(work->active.half | (work->packet.family == 6 ? GATE_TABLE_V6 : 0));
	key.scope = bpf_htons(work->scope);
	key.address = work->path.address;
	entry = bpf_map_lookup_elem(&prefixes, &key);
	if (entry)
		return *entry;
	key.scope = 0;
	entry = bpf_map_lookup_elem(&prefixes, &key);
	return entry ? *entry : 0;
}

static __always_inline __u32 *look_up_scope(const struct gate_work *work, __u32 lookup, int address, int port)
{
	const struct gate_packet *packet = &work->packet;
	struct gate_scope_key key = {.half = work->active.half};

	if (!(work->active.lookups & lookup))
		return NULL;
	if (address)
		key.address = packet->destination;
	if (port)
		key.port = packet->destination_port;
	return bpf_map_lookup_elem(&scopes, &key);
}

/* Not 0: it is nobody's. */
static __noinline int find_scope(struct gate_work *work, __u32 found)
{
	__u32 *scope = NULL;

	if (found == FIND_OK)
		scope = look_up_scope(work, GATE_LOOKUP_BOTH, 1, 1);
	if (!scope)
		scope = look_up_scope(work, GATE_LOOKUP_ADDRESS, 1, 0);
	if (!scope && found == FIND_OK)
		scope = look_up_scope(work, GATE_LOOKUP_PORT, 0, 1);
	work->scope = scope ? *scope & (GATE_SCOPES - 1) : 0;
	return !scope && found == FIND_OK ? -1 : 0;
}

static __always_inline void name_client(struct gate_work *work)
{
	const struct gate_packet *packet = &work->packet;
	const volatile struct gate_address *mask =
		packet->family == 4 ? &config.client_mask_v4 : &config.client_mask_v6;

	for (int i = 0; i < sizeof(mask->bytes); i++)
		work->client.address.bytes[i] = packet->source.bytes[i] & mask->bytes[i];
	work->client.scope = work->scope;
	work->path.address = packet->source;
	work->path.scope = work->scope;
	work->path.port = packet->source_port;
}

/* Why the packet is refused (enum gate_rule), or passes (enum gate_pass). */
static __always_inline int judge(struct gate_work *work, enum gate_find found,
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
	read_quic(&work->head, &work->packet);
	reason = check_form(work, policy);
	if (reason != GATE_RULES)
		return reason;
	reason = find_connection(work, policy);
	if (reason)
		return check_live(work, policy, reason);
	return entry == GATE_ENTRY_ALLOW ? GATE_ALLOWED : judge_stranger(work, policy);
}

/* --- Verdicts --- */

static __always_inline void count(const struct gate_work *work, __u32 reason, __u32 bytes)
{
	__u32 key = work->scope * GATE_REASONS + reason;
	struct gate_counter *counter = bpf_map_lookup_elem(&counters, &key);

	if (counter) {
		counter->packets += 1;
		counter->bytes += bytes;
	}
}

static __noinline int count_monitored(const struct gate_work *work)
{
	for (int rule = 0; rule < GATE_RULES; rule++) {
		__u32 key = work->scope * GATE_REASONS + rule;
		struct gate_counter *counter;

		if (!(work->monitored & 1 << rule))
			continue;
		counter = bpf_map_lookup_elem(&counters, &key);
		if (counter)
			counter->monitored += 1;
	}
	return 0;
}

static __noinline int fill_sample(struct gate_sample *to, const struct gate_work *work, __u32 reason,
				  __u32 bytes)
{
	const struct gate_packet *packet = &work->packet;

	*to = (struct gate_sample){
		.time_ns = work->now_ns,
		.scope = work->scope,
		.reason = reason,
		.first = packet->first,
		.monitored = work->monitored,
		.source = packet->source,
		.destination = packet->destination,
		.source_port = packet->source_port,
		.destination_port = packet->destination_port,
		.bytes = bytes,
		.version = packet->version,
		.id_len = packet->id_len,
	};
	for (int i = 0; i < GATE_ID_MAX; i++)
		to->id[i] = i < packet->id_len ? head_u8(&work->head, packet->id_at + i) : 0;
	return 0;
}

static __noinline int sample(const struct gate_work *work, __u32 reason, __u32 bytes)
{
	const struct gate_rate rate = {.cost = config.sample_ticks, .burst = config.sample_ticks};
	struct gate_state *state;
	struct gate_sample *to;

	if (!rate.cost)
		return 0;
	state = bpf_map_lookup_elem(&states, &work->scope);
	if (!state || is_over(&state->sample_at, &rate, 1, work->now_ns))
		return 0;
	to = bpf_ringbuf_reserve(&samples, sizeof(*to), 0);
	if (!to)
		return count_event(GATE_SAMPLES_LOST);
	fill_sample(to, work, reason, bytes);
	bpf_ringbuf_submit(to, 0);
	return 0;
}

/* No answer would be as large as half of this, and nothing has to be known of odd headers. */
static __always_inline int can_be_answered(const struct gate_packet *packet)
{
	return packet->end - packet->quic_at >= INITIAL_DATAGRAM && !packet->options && !packet->long_ids;
}

/* What is refused is dropped, unless it gets an answer. */
static __always_inline int refuse(struct xdp_md *ctx, struct gate_work *work,
				  const struct gate_policy *policy, __u32 rule)
{
	int answers = rule == GATE_RETRY || (rule == GATE_VERSION && policy->flags & GATE_ANSWER_VERSIONS);

	if (!answers)
		return XDP_DROP;
	if (can_be_answered(&work->packet) &&
	    !(rule == GATE_RETRY ? make_retry(work) : make_version_negotiation(work, policy)) &&
	    !put_answer(ctx, work))
		return XDP_TX;
	count_event(GATE_NOT_ANSWERED);
	return XDP_DROP;
}

/* Not ours, at a glance. */
static __always_inline int is_bystander(const struct xdp_md *ctx)
{
	const struct ethhdr *eth = (void *)(long)ctx->data;
	const struct iphdr *ip = (void *)(eth + 1);
	const void *end = (void *)(long)ctx->data_end;

	return (void *)(ip + 1) <= end && eth->h_proto == bpf_htons(ETH_P_IP) && ip->protocol != IPPROTO_UDP;
}

static __noinline int load_head(struct xdp_md *ctx, struct gate_head *head)
{
	__u32 bytes = bpf_xdp_get_buff_len(ctx);

	head->frame_bytes = bytes;
	if (bytes < ETHERNET_BYTES)
		return -1;
	if (bytes > HEAD_BYTES)
		bytes = HEAD_BYTES;
	head->have = bytes;
	OPAQUE(bytes);
	if (bytes < ETHERNET_BYTES || bytes > HEAD_BYTES)
		return -1;
	return bpf_xdp_load_bytes(ctx, 0, head->bytes, bytes);
}

static __noinline int parse(struct gate_work *work)
{
	work->packet = (struct gate_packet){};
	return find_udp(&work->head, &work->packet);
}

SEC("xdp.frags")
int gate_xdp(struct xdp_md *ctx)
{
	__u32 zero = 0, key, bytes;
	struct gate_work *work = bpf_map_lookup_elem(&works, &zero);
	struct gate_active *now = bpf_map_lookup_elem(&active, &zero);
	struct gate_policy *policy;
	int found, reason;

	if (!work || !now || is_bystander(ctx) || load_head(ctx, &work->head))
		return XDP_PASS;
	found = parse(work);
	if (found == FIND_OTHER)
		return XDP_PASS;
	work->active = *now;
	work->now_ns = bpf_ktime_get_ns();
	work->monitored = 0;
	work->is_new = work->is_repeated = work->is_proved = 0;
	bytes = found == FIND_OK && !work->packet.bad_lengths ? work->packet.end - work->packet.quic_at
							      : work->head.frame_bytes;
	if (find_scope(work, found)) {
		count(work, GATE_OTHER, bytes);
		return XDP_PASS;
	}
	key = work->active.half * GATE_SCOPES + work->scope;
	policy = bpf_map_lookup_elem(&policies, &key);
	if (!policy)
		return XDP_PASS;
	reason = judge(work, found, policy);
	count(work, reason, bytes);
	if (work->monitored)
		count_monitored(work);
	if (work->monitored || reason < GATE_RULES)
		sample(work, reason, bytes);
	return reason < GATE_RULES ? refuse(ctx, work, policy, reason) : XDP_PASS;
}

/* --- The server's answers --- */

struct long_header {
	__u8 first;
	__u8 version[4];
	__u8 id_len;
} __attribute__((packed));

static __always_inline void to_address(struct gate_address *to, const __u8 *from, __u32 family)
{
	if (family == 4)
		map_ipv4(to, load32(from));
	else
		copy_address(to, from);
}

/* The scope that the server is in, if that tracks. */
static __always_inline struct gate_policy *find_tracking(const struct gate_address *address, __be16 port,
							 __u32 *scope)
{
	__u32 zero = 0, key;
	struct gate_active *now = bpf_map_lookup_elem(&active, &zero);
	struct gate_scope_key scope_key = {.address = *address, .port = port};
	struct gate_policy *policy;
	__u32 *index;

	if (!now)
		return NULL;
	scope_key.half = now->half;
	index = bpf_map_lookup_elem(&scopes, &scope_key);
	if (!index) {
		scope_key.port = 0;
		index = bpf_map_lookup_elem(&scopes, &scope_key);
	}
	if (!index) {
		scope_key.port = port;
		scope_key.address = (struct gate_address){};
		index = bpf_map_lookup_elem(&scopes, &scope_key);
	}
	if (!index)
		return NULL;
	*scope = *index & (GATE_SCOPES - 1);
	key = (now->half & 1) * GATE_SCOPES + *scope;
	policy = bpf_map_lookup_elem(&policies, &key);
	return policy && policy->flags & GATE_TRACK ? policy : NULL;
}

static __always_inline int load_id(struct __sk_buff *skb, __u32 at, struct gate_id *id)
{
	__u32 last;

	if (bpf_skb_load_bytes(skb, at, &id->len, 1))
		return -1;
	last = (__u32)id->len - 1;
	OPAQUE(last); /* the check that "not zero" would be does not tell 6.1's verifier the least value */
	return last < GATE_ID_MAX ? bpf_skb_load_bytes(skb, at + 1, id->bytes, last + 1) : -1;
}

/* Takes the server's connection ID from an Initial or a Handshake packet. */
static __always_inline int take_source_id(struct __sk_buff *skb, __u32 at, struct gate_id *id)
{
	struct gate_packet packet = {};
	struct long_header header;
	enum quic_kind kind;

	if (bpf_skb_load_bytes(skb, at, &header, sizeof(header)) || !(header.first & QUIC_LONG))
		return -1;
	packet.first = header.first;
	__builtin_memcpy(&packet.version, header.version, sizeof(packet.version));
	kind = long_kind(&packet);
	if (kind != QUIC_INITIAL && kind != QUIC_HANDSHAKE)
		return -1;
	return load_id(skb, at + sizeof(header) + header.id_len, id);
}

SEC("tcx/egress")
int gate_egress(struct __sk_buff *skb)
{
	struct gate_address server;
	struct gate_opening opening = {};
	struct udp_packet packet = {};
	struct gate_policy *policy;
	struct gate_state *state;
	struct gate_id id = {};
	__u8 first;

	if (parse_udp(skb, &packet) || bpf_skb_load_bytes(skb, packet.payload_offset, &first, 1) ||
	    !(first & QUIC_LONG))
		return PASS_ON;
	to_address(&server, packet.source, packet.family);
	to_address(&opening.address, packet.destination, packet.family);
	opening.port = packet.destination_port;
	policy = find_tracking(&server, packet.source_port, &id.scope);
	if (!policy || take_source_id(skb, packet.payload_offset, &id))
		return PASS_ON;
	bpf_map_update_elem(&handshakes, &id, &opening, BPF_ANY);
	state = bpf_map_lookup_elem(&states, &id.scope);
	if (state && state->id_bytes != id.len)
		WRITE_ONCE(state->id_bytes, (__u32)id.len);
	return PASS_ON;
}

/* --- On behalf of userspace --- */

SEC("syscall")
int gate_count(struct gate_count_call *call)
{
	struct gate_client client = call->client;
	__u32 after;

	call->error = change_count(&client, call->change, bpf_ktime_get_ns(), &after);
	call->connections = after;
	return 0;
}

static __always_inline struct gate_policy *active_policy(__u32 scope)
{
	__u32 zero = 0, key;
	struct gate_active *now = bpf_map_lookup_elem(&active, &zero);

	if (!now)
		return NULL;
	key = now->half * GATE_SCOPES + scope;
	return bpf_map_lookup_elem(&policies, &key);
}

static __always_inline int is_idle(__u64 seen_ns, __u32 scope, __u64 now_ns)
{
	struct gate_policy *policy = active_policy(scope);

	return !policy || (__s64)(now_ns - seen_ns) > (__s64)policy->idle_ns;
}

static long expire_connection(void *map, struct gate_id *key, struct gate_connection *connection,
			      struct gate_expire_call *call)
{
	struct gate_client client = connection->client;
	struct gate_path path = connection->path;
	struct gate_id id = *key;
	__u8 counted = connection->counted;
	__u32 after;

	if (!connection->tracked || !is_idle(READ_ONCE(connection->seen_ns), id.scope, call->now_ns))
		return 0;
	if (bpf_map_delete_elem(&connections, &id))
		return 0;
	bpf_map_delete_elem(&paths, &path);
	if (counted)
		change_count(&client, -1, call->now_ns, &after);
	count_event(GATE_CONNECTION_EXPIRED);
	call->expired++;
	return 0;
}

static long expire_path(void *map, struct gate_path *key, struct gate_path_state *state,
			struct gate_expire_call *call)
{
	struct gate_path path = *key;

	if (is_idle(READ_ONCE(state->seen_ns), path.scope, call->now_ns))
		bpf_map_delete_elem(&paths, &path);
	return 0;
}

static long expire_client(void *map, struct gate_client *key, struct gate_count *count,
			  struct gate_expire_call *call)
{
	struct gate_client client = *key;

	if (!READ_ONCE(count->connections) && call->now_ns - count->zero_ns > NS_PER_S &&
	    __sync_val_compare_and_swap(&count->connections, 0, GATE_COUNT_GONE) == 0)
		bpf_map_delete_elem(&clients, &client);
	return 0;
}

SEC("syscall")
int gate_expire(struct gate_expire_call *call)
{
	struct gate_expire_call local = {.now_ns = call->now_ns};

	bpf_for_each_map_elem(&connections, expire_connection, &local, 0);
	bpf_for_each_map_elem(&paths, expire_path, &local, 0);
	bpf_for_each_map_elem(&clients, expire_client, &local, 0);
	call->expired = local.expired;
	return 0;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
