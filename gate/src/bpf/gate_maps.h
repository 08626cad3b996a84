/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The gate's configuration, its maps, and the scratch memory of a run. Before loading, userspace replaces max_entries
 * of 1 by sizes from the policy.
 */
#ifndef MILLRACE_GATE_MAPS_H
#define MILLRACE_GATE_MAPS_H

#include "barrier.h"
#include "gate_packet.h"
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* Offset of the QUIC packet in gate_answer. The other headers or a pseudo header are in front. */
#define ANSWER_AT  96
#define ANSWER_MAX 128 /* longest QUIC packet of an answer, in bytes */
#define NS_PER_S   1000000000ULL
/* Error of CLOCK_MONOTONIC_COARSE, at most: two ticks of the kernel with the lowest CONFIG_HZ (100). */
#define ROUGH_NS (NS_PER_S / 50)

/* A packet that the gate sends to a client in place of the refused packet. */
struct gate_answer {
	__u8 bytes[ANSWER_AT + ANSWER_MAX + HEAD_SLACK];
	__u32 quic_bytes;
};

/* The result of a look-up: the guarded application (scope) to which a destination address and port belong. */
struct gate_place {
	struct gate_address address;
	__be16 port;
	__u32 turn; /* gate_active.turn at the look-up; the result is out of date once gate_active.turn changes */
	__u32 scope;
};

/* The scratch memory of one run of gate_xdp. */
struct gate_work {
	__u64 busy; /* not 0 while a run uses this memory; only maintained if gate_config.nests */
	struct net_head head;
	struct gate_packet packet;
	struct gate_client client;
	struct gate_path path;
	struct gate_id id;
	struct gate_token token;
	struct gate_answer answer;
	struct gate_active active;
	/* Destination of the last packet that was for a guarded application; kept between runs as a cache. */
	struct gate_place place;
	__u64 now_ns;	/* CLOCK_MONOTONIC_COARSE, with the resolution of the kernel's tick */
	__u64 exact_ns; /* CLOCK_MONOTONIC, read at most once in a run; 0: not read yet */
	__u32 scope;
	__u32 monitored;  /* rules that would have refused the packet: one bit each */
	__u32 takers;	  /* traces that get the packet: one bit each */
	__u8 is_new;	  /* 1 if the packet counts as a new connection: mostly Initials, see gate_rules.h */
	__u8 is_repeated; /* 1 if an Initial with the same ID was admitted before */
	__u8 is_proved;	  /* 1 if the packet has a valid token */
};

/* Returns CLOCK_MONOTONIC in ns, read once per run. Reading this clock takes as long as everything else that the gate
 * does for a simple packet, and only small token buckets need a time this exact.
 */
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

/* Configuration of the BPF programs. Userspace sets every field before it loads them. The default values configure
 * every size of networks, so that in tests/load.rs the verifier checks the code for each size.
 */
SEC(".rodata.config")
const volatile struct gate_config config = {
	.levels = {.v4 = {{.times = 1}, {.times = 8}, {.times = 64}},
		   .v6 = {{.times = 1}, {.times = 8}, {.times = 64}}},
	.sample_ticks = 1,
};

/* --- The rules, which userspace writes --- */

/* Index 0 -> state that userspace changes while packets arrive, such as which half of the maps has the present policy.
 */
BPF_MAP(ARRAY, active, __u32, struct gate_active, 1);

/* Destination address, port or both -> index of the guarded application (scope). */
BPF_MAP(HASH, scopes, struct gate_scope_key, __u32, 2 * 4 * GATE_SCOPES);

/* Half of the map (0 or 1) and index of the guarded application (scope) -> its rules. */
BPF_MAP(ARRAY, policies, __u32, struct gate_policy, 2 * GATE_SCOPES);

/* Index of an interface whose driver strips VLAN tags, so that an answer would be sent without its tag -> unused. */
BPF_MAP(HASH, untagged, __u32, __u32, 1024);

/* Index of an interface whose frames begin with the IP header, without a link layer -> unused. */
BPF_MAP_FLAGS(HASH, bare, __u32, __u32, GATE_BARE, BPF_F_NO_PREALLOC);

/* Index of an interface that has further XDP programs -> index of the next program in the map `rests`. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, GATE_RESTS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32); /* index of an interface */
	__type(value, __u32);
} rest_at SEC(".maps");

/* Index -> the program to call with packets that pass the gate. */
BPF_MAP(PROG_ARRAY, rests, __u32, __u32, GATE_RESTS);

/* Address prefix in the block or allow list -> prefix length and list (enum gate_entry) of this entry. */
BPF_MAP_FLAGS(LPM_TRIE, prefixes, struct gate_prefix_key, __u32, 1, BPF_F_NO_PREALLOC);

/* Index -> key for making and checking tokens. */
BPF_MAP(ARRAY, token_keys, __u32, struct gate_token_key, GATE_TOKEN_KEYS);

/* 0 for QUIC version 1, or 1 for version 2 -> key of Retry's integrity tag. */
BPF_MAP(ARRAY, retry_keys, __u32, struct gate_retry_key, 2);

/* Reports whether frames of an interface begin with the IP header. */
static __always_inline __u32 is_bare(const struct gate_active *now, __u32 ifindex)
{
	return now->bare && bpf_map_lookup_elem(&bare, &ifindex);
}

/* --- Connections, their network paths and their counts: the kernel never evicts entries of these maps --- */

/* Connection ID -> live connection. */
BPF_MAP(HASH, connections, struct gate_id, struct gate_connection, 1);

/* Address and port of a client -> the connection to which this network path belongs. */
BPF_MAP(HASH, paths, struct gate_path, struct gate_path_state, 1);

/* Client, or wider network -> its number of connections. */
BPF_MAP(HASH, clients, struct gate_client, struct gate_count, 1);

/* --- State that anybody can cause: the kernel evicts old entries when a map is full --- */

/* Connection ID that a server chose -> client that the server answered. */
BPF_MAP(LRU_HASH, handshakes, struct gate_id, struct gate_opening, 1);

/* Connection ID that a client chose for its first packets -> client whose Initial was admitted. */
BPF_MAP(LRU_HASH, openings, struct gate_id, struct gate_opening, 1);

/* Client, wider network or connection -> its token buckets. */
BPF_MAP(LRU_HASH, buckets, struct gate_bucket_key, struct gate_buckets, 1);

/* --- State of guarded applications, counters, samples and traces --- */

/* Index of a guarded application (scope) -> state that its packets change, such as token buckets. */
BPF_MAP(ARRAY, states, __u32, struct gate_state, GATE_SCOPES);

/* Low bits of a hash -> 64 bits of each of the two bit sets of the Bloom filter in gate_marks.h. */
BPF_MAP(ARRAY, marks, __u32, struct gate_marks, 1 << GATE_MARKS_BITS);

/* Index of a guarded application (scope) times GATE_REASONS, plus enum gate_rule or enum gate_pass -> packet counter.
 */
BPF_MAP(PERCPU_ARRAY, counters, __u32, struct gate_counter, GATE_SCOPES *GATE_REASONS);

/* enum gate_event -> number of events. */
BPF_MAP(PERCPU_ARRAY, events, __u32, __u64, GATE_EVENTS);

/* Ring of struct gate_sample for the log: packets that were refused, or would have been. */
BPF_RING(samples, 1 << 18);

/* Index of a trace -> the packets that it follows. */
BPF_MAP(ARRAY, tracers, __u32, struct gate_tracer, GATE_TRACERS);

/* Index of a trace -> its counters. */
BPF_MAP(PERCPU_ARRAY, traced, __u32, struct gate_traced, GATE_TRACERS);

/* Ring of struct gate_sample for traces. It has room for the bursts of all traces, and for their packets until
 * userspace reads.
 */
BPF_RING(traces, 1 << 20);

/* Index 0 -> scratch memory of this CPU's run. */
BPF_MAP(PERCPU_ARRAY, works, __u32, struct gate_work, 1);

#endif
