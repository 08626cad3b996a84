/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the gate knows of connections: how many each client has, which are live and on what path, and what servers
 * answered to handshakes, from which live connections come. Several CPUs change all of it at the same time.
 */
#ifndef MILLRACE_GATE_TRACK_H
#define MILLRACE_GATE_TRACK_H

#include "gate_marks.h"

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
			if (bpf_map_update_elem(&clients, client, &first, BPF_NOEXIST))
				continue;
			MARK(MARK_CLIENT, client);
			return 0;
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
	struct gate_count *count;
	__u32 connections;

	if (!IS_MARKED(MARK_CLIENT, client))
		return 0;
	count = bpf_map_lookup_elem(&clients, client);
	connections = count ? READ_ONCE(count->connections) : 0;
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

	if (!bpf_map_update_elem(&paths, &work->path, &state, BPF_ANY))
		MARK(MARK_PATH, &work->path);
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
	struct gate_connection *connection;
	struct gate_path_state *path;

	if (!IS_MARKED(MARK_PATH, &work->path))
		return 0;
	path = bpf_map_lookup_elem(&paths, &work->path);
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
	MARK(MARK_SERVER_ID, &work->id);
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
	store16(work->id.bytes, len ? first16(load16(from), len) : (struct bytes16){});
	store32(work->id.bytes + 16, len > 16 ? load32(from + 16) & ~0U >> (GATE_ID_MAX - len) * 8 : 0);
	return len;
}

/* Whether it belongs to a live connection, or to a handshake that the server has answered. */
static __noinline enum gate_pass find_connection(struct gate_work *work, const struct gate_policy *policy)
{
	struct gate_connection *connection;
	struct gate_opening *opening;
	int is_short, has_id;

	is_short = work->packet.kind == QUIC_SHORT;
	has_id = take_id(work, policy) && IS_MARKED(MARK_SERVER_ID, &work->id);
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

/* --- The end of connections; what has not ended is marked again --- */

static __always_inline struct gate_policy *active_policy(__u32 scope)
{
	__u32 zero = 0, key;
	struct gate_active *now = bpf_map_lookup_elem(&active, &zero);

	if (!now)
		return NULL;
	key = half_of(now) * GATE_SCOPES + scope;
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

	if (!connection->tracked || !is_idle(READ_ONCE(connection->seen_ns), id.scope, call->now_ns)) {
		MARK(MARK_SERVER_ID, &id);
		return 0;
	}
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
	else
		MARK(MARK_PATH, &path);
	return 0;
}

static long expire_client(void *map, struct gate_client *key, struct gate_count *count,
			  struct gate_expire_call *call)
{
	struct gate_client client = *key;

	if (!READ_ONCE(count->connections) && call->now_ns - count->zero_ns > NS_PER_S &&
	    __sync_val_compare_and_swap(&count->connections, 0, GATE_COUNT_GONE) == 0)
		bpf_map_delete_elem(&clients, &client);
	else
		MARK(MARK_CLIENT, &client);
	return 0;
}

static long keep_handshake(void *map, struct gate_id *key, struct gate_opening *opening,
			   struct gate_expire_call *call)
{
	MARK(MARK_SERVER_ID, key);
	return 0;
}

static long keep_opening(void *map, struct gate_id *key, struct gate_opening *opening,
			 struct gate_expire_call *call)
{
	MARK(MARK_OPENING, key);
	return 0;
}

#endif
