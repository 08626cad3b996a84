/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The state of connections: the number of connections of each client, live connections and their network paths (source
 * address and port), and handshakes that servers have answered. Several CPUs change this state at the same time.
 *
 * A tracked connection goes through these phases:
 *
 *   - gate_egress puts the ID of a server's Initial or Handshake packet into `handshakes`, with the client's address.
 *   - When that client sends this ID in a long header, track() counts the connection and adds it to `connections`
 *     as GATE_OPENING. A short header makes it GATE_ESTABLISHED: in track() if it is the first packet, else in
 *     establish().
 *   - When its ID has been idle but other IDs are used on its path, gate_expire makes it GATE_OUTLIVED (lingers()).
 *     The connection is kept, but no longer counts for its client. A short header with its ID makes it GATE_ESTABLISHED
 *     again.
 *   - When both ID and path have been idle, gate_expire makes it GATE_ENDED (end_connection()) and removes the
 *     connection and its path.
 *
 * A published connection stays GATE_PUBLISHED until the application retires it. add_connection(), establish() and
 * end_connection() change the phase atomically, so that only one CPU changes the client's counts.
 */
#ifndef MILLRACE_GATE_TRACK_H
#define MILLRACE_GATE_TRACK_H

#include "bucket.h"
#include "gate_marks.h"
#include "gate_networks.h"

/* resolution of a connection's `seen_ns`, coarse so that CPUs rarely write it */
#define SEEN_NS	     (NS_PER_S / 4)
#define HANDSHAKE_NS (10 * NS_PER_S) /* idle time after which a handshake is forgotten */

static __noinline int count_event(enum gate_event event)
{
	add_to(&events, event, 1);
	return 0;
}

/* --- Modes --- */

static __always_inline __u32 mode_of(const struct gate_policy *policy, enum gate_rule rule)
{
	return policy->modes[rule];
}

/* Reports whether the rule, which the packet violates, refuses the packet in its mode. In GATE_MONITOR the violation is
 * only recorded.
 */
static __always_inline int refuses(struct gate_work *work, const struct gate_policy *policy,
				   enum gate_rule rule)
{
	__u32 mode = mode_of(policy, rule);

	if (mode == GATE_MONITOR)
		work->monitored |= 1 << rule;
	return mode == GATE_ENFORCE;
}

/* --- Number of connections of each client --- */

enum count_error {
	COUNT_OVER = -1, /* the client is at its quota */
	COUNT_FULL = -2, /* the map `clients` is full, or the client has too many tracked connections */
	COUNT_NETWORK_OVER = -3, /* a wider network is at its quota */
};

/* Writes the key of the network that contains the client; `level` is the index of the network's prefix length. Returns
 * the network's limit as a multiple of one client's limit, or 0 if networks of this length have no limit.
 */
static __always_inline __u64 name_network(const struct gate_client *client, __u32 level,
					  struct gate_client *network)
{
	network->scope = client->scope;
	network->level = level;
	return take_network(&config.levels, client->address.bytes, level, network->address.bytes);
}

/* Returns 1 if `a` is more than `b`, else 0. Both must be below 2^63. The function has no branch, since the verifier
 * would check all code after a branch twice.
 */
static __always_inline __u64 is_more(__u64 a, __u64 b)
{
	return (b - a) >> 63;
}

/* Compares two values of gate_count.all. Returns not 0 if the field that begins at bit `from` is larger in `next` than
 * in `old`, and larger than in `most`.
 */
static __always_inline __u64 grows_beyond(__u64 old, __u64 next, __u64 most, __u64 bits, __u32 from)
{
	__u64 now = next >> from & bits;

	return is_more(now, old >> from & bits) & is_more(now, most >> from & bits);
}

/* The argument of try_count(), which change_count() fills in. */
struct count_change {
	struct gate_client client;
	__s32 connections; /* number of connections to add to the count for the quota; negative: to remove */
	__s64 kept;	   /* sum of GATE_TRACKED and GATE_LINGERING to add to gate_count.all, or negative */
	__u64 most;	   /* the largest value of each field of gate_count.all */
	__s64 result;	   /* the new number of connections, or enum count_error */
};

/* Tries once to change the count of a client or network. Returns not 0 if the change is made or impossible, which ends
 * bpf_loop(). Returns 0 if another CPU changed the count first.
 */
static long try_count(__u32 attempt, struct count_change *change)
{
	struct gate_count *count = bpf_map_lookup_elem(&clients, &change->client);
	struct gate_count first = {};
	__u64 old, next;

	change->result = 0;
	/* The map has no entry for this client or network, so there is no connection to remove. */
	if (!count && change->connections <= 0 && change->kept <= 0)
		return 1;
	/* This result stays if each attempt fails because another CPU changes the count. */
	change->result = COUNT_FULL;
	old = count ? READ_ONCE(count->all) : 0;
	if (old == GATE_COUNT_GONE)
		return 0;
	next = old + change->kept;
	/* The number of connections must not overflow into the next field of gate_count.all, nor borrow from it. */
	if (change->connections > 0 ? (old & GATE_CONNECTIONS) < GATE_CONNECTIONS : old & GATE_CONNECTIONS)
		next += change->connections;
	if (grows_beyond(old, next, change->most, GATE_CONNECTIONS, 0)) {
		change->result = COUNT_OVER;
		return 1;
	}
	if (grows_beyond(old, next, change->most, GATE_KEPT, GATE_TRACKED_BIT) |
	    grows_beyond(old, next, change->most, GATE_KEPT, GATE_LINGERING_BIT))
		return 1;
	if (count) {
		/* The time is written before the count becomes zero, so that expire_client() never sees a
		 * zero with an old time.
		 */
		if (!next)
			count->zero_ns = bpf_ktime_get_ns();
		if (__sync_val_compare_and_swap(&count->all, old, next) != old)
			return 0;
	} else {
		first.all = next;
		if (bpf_map_update_elem(&clients, &change->client, &first, BPF_NOEXIST))
			return 0;
		MARK(MARK_CLIENT, &change->client);
	}
	change->result = next & GATE_CONNECTIONS;
	return 1;
}

/* Changes the number of connections of a client or a network. `kept` is a sum of GATE_TRACKED and GATE_LINGERING, which
 * changes the number of connections that the gate stores. No field grows beyond the same field of `most`. Returns the
 * new number of connections, or enum count_error.
 *
 * An entry of the map `clients` is removed a second or more after its counts became zero. A caller that finds an entry
 * being removed tries again. The function is global, so that the verifier checks it once instead of once for each path
 * that calls it. Linux 6.1 accepts no argument of a global function as a map's key, so `whose` is copied.
 */
__noinline __s64 change_count(const struct gate_client *whose, __s32 connections, __s64 kept, __u64 most)
{
	struct count_change change = {
		.connections = connections, .kept = kept, .most = most, .result = COUNT_FULL};

	if (whose) {
		change.client = *whose;
		bpf_loop(CONTENDED_ATTEMPTS, try_count, &change, 0);
	}
	return change.result;
}

/* Returns the limits of a network for the three fields of gate_count.all. `most` holds the limits of one client for
 * them.
 */
static __always_inline __u64 most_of_network(__u64 most, __u32 times)
{
	__u64 connections = most & GATE_CONNECTIONS, of_client = most / GATE_TRACKED & GATE_KEPT, kept;

	if (most == ~0ULL) /* ~0 means that neither the client nor its networks have a limit */
		return most;
	if (connections * times < GATE_CONNECTIONS)
		connections *= times;
	else
		connections = GATE_CONNECTIONS;
	kept = network_most(of_client, times, config.ids);
	if (kept < of_client)
		kept = of_client;
	if (kept > GATE_KEPT_MAX)
		kept = GATE_KEPT_MAX;
	return kept * (GATE_TRACKED + GATE_LINGERING) | connections;
}

/* Undoes the changes that change_counts() made to the counts of networks wider than that with index `level`. */
static __always_inline void undo_counts(const struct gate_client *client, __u32 level, __s32 connections,
					__s64 kept)
{
	struct gate_client network __attribute__((aligned(8)));

	for (__u32 wider = 1; wider < GATE_LEVELS; wider++)
		if (wider > level && name_network(client, wider, &network))
			change_count(&network, -connections, -kept, ~0ULL);
}

/* Changes the counts of a client and of all networks that contain it, or none of them. A network's limit is a multiple
 * of `most`. The widest network comes first, so that a network at its limit adds no entries for its clients.
 */
__noinline __s64 change_counts(const struct gate_client *whose, __s32 connections, __s64 kept, __u64 most)
{
	struct gate_client network __attribute__((aligned(8)));
	__s64 count = COUNT_FULL;

	if (!whose)
		return COUNT_FULL;
	for (__u32 i = 1; i <= GATE_LEVELS; i++) {
		__u32 level = GATE_LEVELS - i;
		__u64 times = name_network(whose, level, &network);

		if (!times)
			continue;
		count = change_count(&network, connections, kept,
				     level ? most_of_network(most, times) : most);
		/* If there is no limit, a network for which the map `clients` has no room is skipped. The change then
		 * fails only if the client itself has no room.
		 */
		if (count >= 0 || (level && most == ~0ULL))
			continue;
		undo_counts(whose, level, connections, kept);
		return count == COUNT_OVER && level ? COUNT_NETWORK_OVER : count;
	}
	return count;
}

/* Returns the number of connections of a client or a network that count for its quota. */
static __always_inline __u32 connections_of(const struct gate_client *client)
{
	struct gate_count *count;
	__u64 all;

	if (!IS_MARKED(MARK_CLIENT, client))
		return 0;
	count = bpf_map_lookup_elem(&clients, client);
	all = count ? READ_ONCE(count->all) : 0;
	return all != GATE_COUNT_GONE ? all & GATE_CONNECTIONS : 0;
}

/* Returns the largest number of one client's connections that the gate tracks: gate_config.client_ids, or the quota if
 * that is higher. The number is returned in both 20-bit fields of gate_count.all.
 */
static __always_inline __u64 most_kept(const struct gate_policy *policy)
{
	__u64 most = config.client_ids;

	if (mode_of(policy, GATE_QUOTA) && policy->quota > most)
		most = policy->quota;
	if (most > GATE_KEPT_MAX)
		most = GATE_KEPT_MAX;
	return most * (GATE_TRACKED + GATE_LINGERING);
}

/* Returns the rule that refuses a new connection because of `count`, the result of change_counts(), or GATE_RULES if
 * none does.
 */
static __always_inline enum gate_rule count_rule(__s64 count)
{
	return count == COUNT_OVER	     ? GATE_QUOTA
	       : count == COUNT_NETWORK_OVER ? GATE_NETWORK_QUOTA
					     : GATE_RULES;
}

/* --- Paths --- */

static __always_inline int same_address(const struct gate_address *a, const struct gate_address *b)
{
	return !differ128(load128(a->bytes), load128(b->bytes));
}

static __always_inline int same_path(const struct gate_path *a, const struct gate_path *b)
{
	return a->port == b->port && same_address(&a->address, &b->address);
}

static __always_inline int same_id(const struct gate_id *a, const struct gate_id *b)
{
	const __u32 *left = (const __u32 *)a, *right = (const __u32 *)b;
	__u32 difference = 0;

	for (int i = 0; i < sizeof(*a) / sizeof(__u32); i++)
		difference |= left[i] ^ right[i];
	return !difference;
}

/* Sets `seen_ns`, the time of the last packet, to `now_ns` if it is older than SEEN_NS. Returns not 0 if it was set. */
static __always_inline int touch(__u64 *seen_ns, __u64 now_ns)
{
	if (now_ns - READ_ONCE(*seen_ns) <= SEEN_NS)
		return 0;
	WRITE_ONCE(*seen_ns, now_ns);
	return 1;
}

/* Records that the packet's network path (source address and port) belongs to the connection whose ID the packet has.
 * Does nothing if the map `paths` names another connection with at least the same enum gate_claim. So an attacker
 * cannot take over a path with the ID of their own connection and a forged address.
 */
static __noinline int hold_path(struct gate_work *work, __u32 claim)
{
	struct gate_path_state state = {.owner = work->id, .claim = claim};
	struct gate_path_state *path = bpf_map_lookup_elem(&paths, &work->path);

	if (path && (path->claim >= claim || same_id(&path->owner, &work->id)))
		return 0;
	if (!bpf_map_update_elem(&paths, &work->path, &state, path ? BPF_ANY : BPF_NOEXIST))
		MARK(MARK_PATH, &work->path);
	return 0;
}

/* Removes a network path (source address and port) from the map `paths` if it belongs to the connection with this ID.
 */
static __always_inline void leave_path(const struct gate_path *at, const struct gate_id *id)
{
	const struct gate_path_state *path = bpf_map_lookup_elem(&paths, at);

	if (path && same_id(&path->owner, id))
		bpf_map_delete_elem(&paths, at);
}

/* Replaces the network path (source address and port) of a connection by that of the packet. A connection has only one
 * path, so that nobody can fill the map `paths` by replaying an ID from many addresses.
 */
static __always_inline void move_path(struct gate_work *work, struct gate_connection *connection)
{
	leave_path(&connection->path, &work->id);
	connection->path = work->path;
	connection->claim = same_address(&connection->client.address, &work->client.address) ? GATE_CLAIM_NEAR
											     : GATE_CLAIM_FAR;
	hold_path(work, connection->claim);
}

/* Reports whether the packet's network path (source address and port) belongs to a live connection. If so, the packet
 * keeps this connection from expiring, although the packet has another ID.
 */
static __always_inline int use_path(struct gate_work *work)
{
	struct gate_path_state *path;

	if (!IS_MARKED(MARK_PATH, &work->path))
		return 0;
	path = bpf_map_lookup_elem(&paths, &work->path);
	if (path)
		touch(&path->seen_ns, work->now_ns);
	return !!path;
}

/* --- Live connections --- */

/* Records in `handshakes` that a connection was live. The quota never refuses such a connection again, even after the
 * gate has forgotten it.
 */
static __always_inline void remember_live(const struct gate_id *id)
{
	struct gate_opening *opening = bpf_map_lookup_elem(&handshakes, id);

	if (opening)
		opening->repeated = 1;
}

/* Moves a connection from `phase` to GATE_ESTABLISHED: the client has sent a short header, for the first time or after
 * a long pause. A connection that was GATE_OUTLIVED counts for its client again.
 */
static __noinline int establish(struct gate_work *work, const struct gate_policy *policy,
				struct gate_connection *connection, __u32 phase)
{
	if (__sync_val_compare_and_swap(&connection->phase, phase, GATE_ESTABLISHED) != phase)
		return 0;
	if (phase == GATE_OPENING) {
		remember_live(&work->id);
		return 0;
	}
	connection->counted = !!(policy->flags & GATE_COUNT);
	change_counts(&connection->client, connection->counted, GATE_TRACKED - GATE_LINGERING, ~0ULL);
	return 0;
}

/* Records a packet of a connection. Returns 0 if the connection has ended. */
static __noinline int use_connection(struct gate_work *work, const struct gate_policy *policy,
				     struct gate_connection *connection)
{
	__u32 phase = READ_ONCE(connection->phase);
	int due;

	if (phase == GATE_PUBLISHED)
		return GATE_LIVE;
	if (phase == GATE_ENDED)
		return 0;
	due = touch(&connection->seen_ns, work->now_ns);
	if (work->packet.kind != QUIC_SHORT)
		return phase == GATE_OPENING ? GATE_HANDSHAKE : GATE_LIVE;
	if (phase != GATE_ESTABLISHED)
		establish(work, policy, connection, phase);
	if (!same_path(&connection->path, &work->path))
		move_path(work, connection);
	else if (due)
		hold_path(work, connection->claim);
	return GATE_LIVE;
}

/* Counts a new tracked connection for its client. Returns the client's number of connections, or enum count_error. A
 * rule that only monitors records the violation, and the connection is counted all the same.
 */
static __always_inline __s64 count_tracked(struct gate_work *work, const struct gate_policy *policy,
					   int was_live)
{
	__u32 counts = !!(policy->flags & GATE_COUNT);
	__u64 quota = counts && mode_of(policy, GATE_QUOTA) && !was_live ? policy->quota : GATE_CONNECTIONS;
	__u64 kept = most_kept(policy);
	enum gate_rule rule;
	__s64 count;

	if (quota > GATE_CONNECTIONS)
		quota = GATE_CONNECTIONS;
	count = change_counts(&work->client, counts, GATE_TRACKED, kept | quota);
	rule = count_rule(count);
	if (rule != GATE_RULES && !refuses(work, policy, rule))
		count = change_counts(&work->client, counts, GATE_TRACKED, kept | GATE_CONNECTIONS);
	return count;
}

/* Returns how well it is known that the packet's source address and port belong to the connection. The caller has
 * checked that the addresses are equal. If the ports are equal too, the server's packets were sent there, and the
 * client's use of the ID proves that they arrived.
 */
static __always_inline __u32 claim_of(const struct gate_work *work, const struct gate_opening *opening)
{
	return opening->port == work->path.port ? GATE_CLAIM_PROVED : GATE_CLAIM_NEAR;
}

/* Adds a connection. Returns not 0 if the map is full or already has the connection. This is a separate function to
 * keep the structure off the stack of track(): the whole call chain may use 512 bytes.
 */
static __noinline int add_connection(struct gate_work *work, const struct gate_policy *policy,
				     const struct gate_opening *opening)
{
	struct gate_connection connection = {
		.seen_ns = work->now_ns,
		.path = work->path,
		.client = work->client,
		.phase = work->packet.kind == QUIC_SHORT ? GATE_ESTABLISHED : GATE_OPENING,
		.counted = !!(policy->flags & GATE_COUNT),
		.claim = claim_of(work, opening),
	};

	return bpf_map_update_elem(&connections, &work->id, &connection, BPF_NOEXIST);
}

/* Starts to track a connection. The client has sent the ID from the server's packet, so its address is validated. The
 * connection counts from now on. The quota therefore also limits handshakes that run at the same time, and forged
 * Initials do not use it up.
 */
static __noinline int track(struct gate_work *work, const struct gate_policy *policy,
			    struct gate_opening *opening)
{
	int is_short = work->packet.kind == QUIC_SHORT;
	__s64 count;

	/* Only the CPU that adds the entry counts the connection. */
	if (!add_connection(work, policy, opening)) {
		count = count_tracked(work, policy, opening->repeated);
		if (count >= 0) {
			MARK(MARK_SERVER_ID, &work->id);
			hold_path(work, claim_of(work, opening));
			count_event(GATE_CONNECTION_TRACKED);
			if (is_short)
				opening->repeated = 1;
			return is_short ? GATE_LIVE : GATE_HANDSHAKE;
		}
		bpf_map_delete_elem(&connections, &work->id);
		if (count_rule(count) != GATE_RULES)
			return count_rule(count);
	} else if (bpf_map_lookup_elem(&connections, &work->id)) {
		return is_short ? GATE_LIVE : GATE_HANDSHAKE; /* another CPU has added the connection first */
	}
	if (is_short)
		count_event(GATE_CONNECTIONS_FULL);
	return GATE_HANDSHAKE;
}

/* Returns the possible lengths of the destination connection ID, a byte each. Short headers do not contain the length.
 */
static __always_inline __u64 id_lens(const struct gate_work *work, const struct gate_policy *policy)
{
	struct gate_state *state;

	if (work->packet.kind != QUIC_SHORT)
		return work->packet.id_len;
	if (policy->id_bytes)
		return policy->id_bytes;
	state = bpf_map_lookup_elem(&states, &work->scope);
	return state ? READ_ONCE(state->id_lens) : 0;
}

/* Copies `len` bytes of the destination connection ID to work->id, and pads them with zeroes. Returns the length, or 0
 * if the packet is too short for it.
 */
static __always_inline __u32 take_id(struct gate_work *work, __u32 len)
{
	const struct gate_packet *packet = &work->packet;
	const __u8 *from = head_at(&work->head, packet->id_at);

	if (len > GATE_ID_MAX || packet->id_at + len > packet->end)
		len = 0;
	work->id.scope = work->scope;
	work->id.len = len;
	store128(work->id.bytes, len ? first128(load128(from), len) : (struct bytes16){});
	store32(work->id.bytes + 16, len > 16 ? load32(from + 16) & ~0U >> (GATE_ID_MAX - len) * 8 : 0);
	return len;
}

/* Returns the reason to pass or refuse the packet because of the ID in work->id, or 0 if the ID is unknown. */
static __always_inline int find_id(struct gate_work *work, const struct gate_policy *policy)
{
	struct gate_connection *connection = bpf_map_lookup_elem(&connections, &work->id);
	struct gate_opening *opening;
	int reason;

	if (connection) {
		reason = use_connection(work, policy, connection);
		if (reason)
			return reason;
	}
	if (!(policy->flags & GATE_TRACK))
		return 0;
	opening = bpf_map_lookup_elem(&handshakes, &work->id);
	return opening && same_address(&opening->address, &work->path.address) ? track(work, policy, opening)
									       : 0;
}

/* Finds the live connection of a packet, or the handshake that the server has answered. Returns enum gate_pass, or the
 * quota rule that refuses the new connection, or 0 if there is no connection.
 */
static __noinline enum gate_pass find_connection(struct gate_work *work, const struct gate_policy *policy)
{
	__u64 lens = id_lens(work, policy);
	int reason;

	work->id.len = 0;
	for (int i = 0; i < GATE_ID_LENS && lens; i++, lens >>= 8) {
		if (!take_id(work, lens & 0xff) || !IS_MARKED(MARK_SERVER_ID, &work->id))
			continue;
		reason = find_id(work, policy);
		if (reason)
			return reason;
	}
	return policy->flags & GATE_TRACK && work->packet.kind == QUIC_SHORT && use_path(work)
		       ? GATE_LIVE_PATH
		       : 0;
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

/* Returns the rules of the server's application (scope) if they track connections, else NULL. Looks for address and
 * port, then address, then port, as find_scope() does.
 */
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
	scope_key.half = half_of(now);
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
	key = half_of(now) * GATE_SCOPES + *scope;
	policy = bpf_map_lookup_elem(&policies, &key);
	return policy && policy->flags & GATE_TRACK ? policy : NULL;
}

static __always_inline int load_id(struct __sk_buff *skb, __u32 at, struct gate_id *id)
{
	__u32 last;
	__u8 len;

	if (bpf_skb_load_bytes(skb, at, &len, sizeof(len)))
		return -1;
	id->len = len;
	last = id->len - 1;
	OPAQUE(last); /* Linux 6.1's verifier cannot derive the least length from the compiler's check for "not zero" */
	return last < GATE_ID_MAX ? bpf_skb_load_bytes(skb, at + 1, id->bytes, last + 1) : -1;
}

/* Records the length of a server's connection ID. An application may have several lengths: from several servers, or
 * from one server before and after an upgrade.
 */
static __always_inline void note_id_len(struct gate_state *state, __u32 len)
{
	__u64 lens = READ_ONCE(state->id_lens);

	for (int i = 0; i < GATE_ID_LENS; i++) {
		__u32 known = lens >> 8 * i & 0xff;

		if (known == len)
			return;
		if (!known) {
			__sync_val_compare_and_swap(&state->id_lens, lens, lens | (__u64)len << 8 * i);
			return; /* if another CPU changed `id_lens` first, the next packet adds the length */
		}
	}
}

/* Reads the server's connection ID from an Initial or a Handshake packet. */
static __always_inline int take_source_id(struct __sk_buff *skb, __u32 at, struct gate_id *id)
{
	struct gate_packet packet = {};
	struct long_header header;
	enum quic_kind kind;

	if (bpf_skb_load_bytes(skb, at, &header, sizeof(header)) || !(header.first & QUIC_LONG_HEADER))
		return -1;
	packet.first = header.first;
	__builtin_memcpy(&packet.version, header.version, sizeof(packet.version));
	kind = long_kind(&packet);
	if (kind != QUIC_INITIAL && kind != QUIC_HANDSHAKE)
		return -1;
	return load_id(skb, at + sizeof(header) + header.id_len, id);
}

#endif
