/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The gate's configuration and maps, and what a run works with. Sizes of 1 are set by userspace before loading. */
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

/* The scope of a destination. */
struct gate_place {
	struct gate_address address;
	__be16 port;
	__u32 turn; /* gate_active.turn when it was looked up */
	__u32 scope;
};

/* What one run of gate_xdp works with. */
struct gate_work {
	__u64 busy; /* 0: no run has it; only where they nest, see struct gate_config */
	struct net_head head;
	struct gate_packet packet;
	struct gate_client client;
	struct gate_path path;
	struct gate_id id;
	struct gate_token token;
	struct gate_answer answer;
	struct gate_active active;
	struct gate_place place; /* of the last packet that was in a scope, which an earlier run saw */
	__u64 now_ns;		 /* to the tick */
	__u64 exact_ns;		 /* 0: not read yet */
	__u32 scope;
	__u32 monitored;  /* rules that would have refused the packet */
	__u32 takers;	  /* tracers who get it: one bit each */
	__u8 is_new;	  /* an Initial that opens a connection, or a packet of one that nobody has opened */
	__u8 is_repeated; /* of which another was let in before */
	__u8 is_proved;	  /* it carries a valid token */
};

/* To the nanosecond. Reading that clock takes as long as all the rest of a cheap verdict, and only small buckets need it. */
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

/* Userspace says all of it. There are levels before that, so that tests/load.rs has the verifier walk over what is done for each. */
SEC(".rodata.config")
const volatile struct gate_config config = {
	.levels = {.v4 = {{.times = 1}, {.times = 8}, {.times = 64}},
		   .v6 = {{.times = 1}, {.times = 8}, {.times = 64}}},
	.sample_ticks = 1,
};

/* --- The rules, which userspace writes --- */

/* 0 -> which half of the rules counts, and what else changes under load. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct gate_active);
	__uint(max_entries, 1);
} active SEC(".maps");

/* Address and port, either of which may be left out -> scope. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct gate_scope_key);
	__type(value, __u32);
	__uint(max_entries, 2 * 4 * GATE_SCOPES);
} scopes SEC(".maps");

/* Half and scope -> policy. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct gate_policy);
	__uint(max_entries, 2 * GATE_SCOPES);
} policies SEC(".maps");

/* Index of an interface whose driver takes VLAN tags off: an answer would leave without its tag. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, 1024);
} untagged SEC(".maps");

/* Index of an interface whose frames begin with the IP header: it has no link layer of its own. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, GATE_BARE);
} bare SEC(".maps");

/* Where packets go that pass: by interface, an index into `rests`. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, GATE_RESTS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32); /* ifindex */
	__type(value, __u32);
} rest_at SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, GATE_RESTS);
	__type(key, __u32);
	__type(value, __u32);
} rests SEC(".maps");

/* Prefix of a list -> rank of the entry. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct gate_prefix_key);
	__type(value, __u32);
	__uint(max_entries, 1);
} prefixes SEC(".maps");

/* Index -> key that tokens are made and checked with. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct gate_token_key);
	__uint(max_entries, GATE_TOKEN_KEYS);
} token_keys SEC(".maps");

/* 0 or 1, for QUIC version 1 or 2 -> key of Retry's integrity tag. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct gate_retry_key);
	__uint(max_entries, 2);
} retry_keys SEC(".maps");

/* Whether frames of an interface begin with the IP header. */
static __always_inline __u32 is_bare(const struct gate_active *now, __u32 ifindex)
{
	return now->bare && bpf_map_lookup_elem(&bare, &ifindex);
}

/* --- Connections: nothing is ever evicted from these three --- */

/* Connection ID -> live connection. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct gate_id);
	__type(value, struct gate_connection);
	__uint(max_entries, 1);
} connections SEC(".maps");

/* Address and port of a client -> connection that it belongs to. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct gate_path);
	__type(value, struct gate_path_state);
	__uint(max_entries, 1);
} paths SEC(".maps");

/* Client, or wider network -> how many connections it has. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct gate_client);
	__type(value, struct gate_count);
	__uint(max_entries, 1);
} clients SEC(".maps");

/* --- What was only claimed: old entries give way --- */

/* Connection ID that a server chose -> client that it answered. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct gate_id);
	__type(value, struct gate_opening);
	__uint(max_entries, 1);
} handshakes SEC(".maps");

/* Connection ID that a client chose for its first packets -> client that was let in with it. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct gate_id);
	__type(value, struct gate_opening);
	__uint(max_entries, 1);
} openings SEC(".maps");

/* Client, wider network or connection -> its rates. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct gate_bucket_key);
	__type(value, struct gate_buckets);
	__uint(max_entries, 1);
} buckets SEC(".maps");

/* --- State and figures --- */

/* Scope -> what its packets change. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct gate_state);
	__uint(max_entries, GATE_SCOPES);
} states SEC(".maps");

/* Low bits of a hash -> 64 marks; see gate_marks.h. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct gate_marks);
	__uint(max_entries, 1 << GATE_MARKS_BITS);
} marks SEC(".maps");

/* Scope times GATE_REASONS, plus the reason -> packets. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct gate_counter);
	__uint(max_entries, GATE_SCOPES *GATE_REASONS);
} counters SEC(".maps");

/* enum gate_event -> how often it happened. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, GATE_EVENTS);
} events SEC(".maps");

/* Packets that were refused, or would have been: struct gate_sample. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 18);
} samples SEC(".maps");

/* Index of a tracer -> what is followed. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct gate_tracer);
	__uint(max_entries, GATE_TRACERS);
} tracers SEC(".maps");

/* Index of a tracer -> what became of that. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct gate_traced);
	__uint(max_entries, GATE_TRACERS);
} traced SEC(".maps");

/* Packets that somebody follows: struct gate_sample. There is room for what all tracers may get at once,
 * and until userspace looks. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} traces SEC(".maps");

/* 0 -> what this CPU's run works with. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct gate_work);
	__uint(max_entries, 1);
} works SEC(".maps");

#endif
