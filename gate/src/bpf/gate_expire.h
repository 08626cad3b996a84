/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Callbacks for bpf_for_each_map_elem, with which userspace walks over the gate's maps about once a second. They end
 * connections that have been idle for too long and remove their entries. The keys of all other entries are added to the
 * newer set of the Bloom filter of gate_marks.h.
 */
#ifndef MILLRACE_GATE_EXPIRE_H
#define MILLRACE_GATE_EXPIRE_H

#include "gate_track.h"

static __always_inline struct gate_policy *active_policy(__u32 scope)
{
	__u32 zero = 0, key;
	struct gate_active *now = bpf_map_lookup_elem(&active, &zero);

	if (!now)
		return NULL;
	key = half_of(now) * GATE_SCOPES + scope;
	return bpf_map_lookup_elem(&policies, &key);
}

/* Compares signed times, since a packet may have been seen after `now_ns` was read. */
static __always_inline int is_idle(__u64 seen_ns, __u64 idle_ns, __u64 now_ns)
{
	return (__s64)(now_ns - seen_ns) > (__s64)idle_ns;
}

/* Returns not 0 if the connection should stay although its own ID is no longer seen, because packets with other IDs
 * arrive from its client's address and port. Such a connection no longer counts for its client's quota: anybody can
 * send these packets from a forged address, and could otherwise keep the client's quota full for ever.
 */
static __always_inline int lingers(struct gate_connection *connection, const struct gate_path_state *path,
				   const struct gate_id *id, const struct gate_policy *policy, __u64 now_ns)
{
	__u32 phase = READ_ONCE(connection->phase);
	struct gate_client client = connection->client;

	if (phase == GATE_OPENING || !path || !same_id(&path->owner, id) ||
	    is_idle(READ_ONCE(path->seen_ns), policy->idle_ns, now_ns))
		return 0;
	if (phase == GATE_OUTLIVED)
		return 1;
	if (change_counts(&client, -connection->counted, GATE_LINGERING - GATE_TRACKED,
			  most_kept(policy) | GATE_CONNECTIONS) < 0)
		return 0;
	WRITE_ONCE(connection->phase, GATE_OUTLIVED);
	return 1;
}

static __noinline int end_connection(struct gate_connection *connection, const struct gate_id *id)
{
	struct gate_client client = connection->client;
	struct gate_path path = connection->path;
	/* `phase` changes atomically, so a packet on another CPU cannot establish the connection again afterwards. */
	__u32 phase = __sync_lock_test_and_set(&connection->phase, GATE_ENDED);
	__s32 counted = phase == GATE_OUTLIVED ? 0 : connection->counted;

	bpf_map_delete_elem(&connections, id);
	leave_path(&path, id);
	change_counts(&client, -counted, phase == GATE_OUTLIVED ? -GATE_LINGERING : -GATE_TRACKED, ~0ULL);
	return count_event(GATE_CONNECTION_EXPIRED);
}

/* Counts an entry of the map that gate_expire walks over. A walk takes several calls of gate_expire. Returns not 0 if
 * an earlier call has handled the entry.
 */
static __always_inline int is_earlier(struct gate_expire_call *call)
{
	return call->at++ < call->from;
}

/* Reports whether this call has handled as many entries as it may. The callback then returns not 0, which ends
 * bpf_for_each_map_elem.
 */
static __always_inline int is_last(const struct gate_expire_call *call)
{
	return call->at >= call->to;
}

/* Reports whether the gate should forget the connection. Published connections stay until the application retires them.
 */
static __always_inline int is_over_with(struct gate_connection *connection, const struct gate_id *id,
					__u64 now_ns)
{
	__u32 phase = READ_ONCE(connection->phase);
	struct gate_policy *policy = active_policy(id->scope);
	struct gate_path path = connection->path;
	__u64 idle_ns;

	if (!policy || phase == GATE_PUBLISHED)
		return 0;
	idle_ns = policy->idle_ns;
	if (phase == GATE_OPENING && idle_ns > HANDSHAKE_NS)
		idle_ns = HANDSHAKE_NS;
	return is_idle(READ_ONCE(connection->seen_ns), idle_ns, now_ns) &&
	       !lingers(connection, bpf_map_lookup_elem(&paths, &path), id, policy, now_ns);
}

static long expire_connection(void *map, struct gate_id *key, struct gate_connection *connection,
			      struct gate_expire_call *call)
{
	struct gate_id id = *key;

	if (is_earlier(call))
		return 0;
	if (is_over_with(connection, &id, call->now_ns)) {
		end_connection(connection, &id);
		call->expired++;
		call->removed++;
	} else {
		MARK(MARK_SERVER_ID, &id);
	}
	return is_last(call);
}

/* Removes a client's address and port (a network path) from the map `paths`, unless the connection that the entry names
 * is still live and uses this path.
 */
static long expire_path(void *map, struct gate_path *key, struct gate_path_state *state,
			struct gate_expire_call *call)
{
	struct gate_connection *owner;
	struct gate_id id = state->owner;
	struct gate_path path = *key;

	if (is_earlier(call))
		return 0;
	owner = bpf_map_lookup_elem(&connections, &id);
	if (owner && same_path(&owner->path, &path)) {
		MARK(MARK_PATH, &path);
	} else {
		bpf_map_delete_elem(&paths, &path);
		call->removed++;
	}
	return is_last(call);
}

/* Removes a client that has had no connection for a second. The compare-and-exchange to GATE_COUNT_GONE keeps other
 * CPUs from counting in an entry that is about to be deleted.
 */
static long expire_client(void *map, struct gate_client *key, struct gate_count *count,
			  struct gate_expire_call *call)
{
	struct gate_client client = *key;

	if (is_earlier(call))
		return 0;
	if (!READ_ONCE(count->all) && is_idle(count->zero_ns, NS_PER_S, call->now_ns) &&
	    __sync_val_compare_and_swap(&count->all, 0, GATE_COUNT_GONE) == 0) {
		bpf_map_delete_elem(&clients, &client);
		call->removed++;
	} else {
		MARK(MARK_CLIENT, &client);
	}
	return is_last(call);
}

/* Adds the key of an entry of the map `handshakes` to the newer set of the Bloom filter (gate_marks.h), and keeps the
 * entry. The LRU map evicts old entries by itself. */
static long keep_handshake(void *map, struct gate_id *key, struct gate_opening *opening,
			   struct gate_expire_call *call)
{
	if (is_earlier(call))
		return 0;
	MARK(MARK_SERVER_ID, key);
	return is_last(call);
}

/* Adds the key of an entry of `openings`, the map of admitted Initials, to the newer set of the Bloom filter
 * (gate_marks.h), and keeps the entry. The LRU map evicts old entries by itself. */
static long keep_opening(void *map, struct gate_id *key, struct gate_opening *opening,
			 struct gate_expire_call *call)
{
	if (is_earlier(call))
		return 0;
	MARK(MARK_OPENING, key);
	return is_last(call);
}

#endif
