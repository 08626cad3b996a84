/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The gate's maps, sizes of 1 of which are set by userspace before loading, and what a run works with. */
#ifndef MILLRACE_GATE_MAPS_H
#define MILLRACE_GATE_MAPS_H

#include "barrier.h"
#include "gate_packet.h"
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#define ANSWER_AT  96  /* of the QUIC packet in an answer: in front, the other headers or a pseudo header */
#define ANSWER_MAX 128 /* bytes of it */
#define NS_PER_S   1000000000ULL
#define ROUGH_NS   (NS_PER_S / 50) /* two ticks at CONFIG_HZ=100, the least there is */

/* A packet that goes back. */
struct gate_answer {
	__u8 bytes[ANSWER_AT + ANSWER_MAX + HEAD_SLACK];
	__u32 quic_bytes;
};

/* Where packets go, and the scope that is. */
struct gate_place {
	struct gate_address address;
	__be16 port;
	__u32 turn; /* when that was found out */
	__u32 scope;
};

/* What one run of gate_xdp works with; `place` is from the one before. */
struct gate_work {
	struct net_head head;
	struct gate_packet packet;
	struct gate_client client;
	struct gate_path path;
	struct gate_id id;
	struct gate_token token;
	struct gate_answer answer;
	struct gate_active active;
	struct gate_place place; /* of the last packet that was in a scope */
	__u64 now_ns;		 /* to the tick */
	__u64 exact_ns;		 /* if it was asked for */
	__u32 scope;
	__u32 monitored;  /* rules that would have refused the packet */
	__u8 is_new;	  /* an Initial that opens a connection */
	__u8 is_repeated; /* of which another was let in before */
	__u8 is_proved;	  /* it carries a valid token */
};

/* Reading the clock to the nanosecond takes as long as all else that a cheap verdict takes: only small buckets need it. */
static __always_inline __u64 exact_now(struct gate_work *work)
{
	if (!work->exact_ns)
		work->exact_ns = bpf_ktime_get_ns();
	return work->exact_ns;
}

static __always_inline __u32 half_of(const struct gate_active *active)
{
	return active->turn & 1;
}

static __always_inline __u64 unix_seconds(const struct gate_work *work)
{
	return work->now_ns / NS_PER_S + work->active.unix_seconds;
}

SEC(".rodata.config")
const volatile struct gate_config config = {};

#define MAP(name, map_type, key_type, value_type, entries) \
	struct {                                           \
		__uint(type, BPF_MAP_TYPE_##map_type);     \
		__type(key, key_type);                     \
		__type(value, value_type);                 \
		__uint(max_entries, entries);              \
	} name SEC(".maps")

MAP(works, PERCPU_ARRAY, __u32, struct gate_work, 1);
MAP(active, ARRAY, __u32, struct gate_active, 1);
MAP(scopes, HASH, struct gate_scope_key, __u32, 2 * 4 * GATE_SCOPES);
MAP(policies, ARRAY, __u32, struct gate_policy, 2 * GATE_SCOPES);
MAP(states, ARRAY, __u32, struct gate_state, GATE_SCOPES);
MAP(marks, ARRAY, __u32, struct gate_marks, 1 << GATE_MARKS_BITS);
MAP(counters, PERCPU_ARRAY, __u32, struct gate_counter, GATE_SCOPES *GATE_REASONS);
MAP(events, PERCPU_ARRAY, __u32, __u64, GATE_EVENTS);
MAP(token_keys, ARRAY, __u32, struct gate_token_key, GATE_TOKEN_KEYS);
MAP(retry_keys, ARRAY, __u32, struct gate_retry_key, 2);

/* Nothing is ever evicted from these three. */
MAP(connections, HASH, struct gate_id, struct gate_connection, 1);
MAP(paths, HASH, struct gate_path, struct gate_path_state, 1);
MAP(clients, HASH, struct gate_client, struct gate_count, 1);

/* What was only claimed. */
MAP(handshakes, LRU_HASH, struct gate_id, struct gate_opening, 1);
MAP(openings, LRU_HASH, struct gate_id, struct gate_opening, 1);
MAP(buckets, LRU_HASH, struct gate_bucket_key, struct gate_buckets, 1);

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__type(key, struct gate_prefix_key);
	__type(value, __u32);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_NO_PREALLOC);
} prefixes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} samples SEC(".maps");

#endif
