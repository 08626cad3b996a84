/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The relay program's configuration and maps. Sizes of 1 are set by userspace before loading. */
#ifndef MILLRACE_RELAY_MAPS_H
#define MILLRACE_RELAY_MAPS_H

#include "barrier.h"
#include "relay_work.h"
#include <bpf/bpf_helpers.h>

#define RELAY_SOCKETS 16

SEC(".rodata.config")
const volatile struct relay_config config = {};

/* --- Connections --- */

/* Destination connection ID -> index of an upstream; or RELAY_SUBSCRIBER with the index of a downstream, if nothing is
 * forwarded from the connection.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct relay_id);
	__type(value, __u32);
	__uint(max_entries, 1);
} ids SEC(".maps");

/* Index of the upstream -> its state. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_upstream);
	__uint(max_entries, 1);
} upstreams SEC(".maps");

/* Twice the index of the upstream, plus the key phase -> receive keys. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct quic_keys);
	__uint(max_entries, 2);
} open_keys SEC(".maps");

/* Index of the downstream -> its state. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_downstream);
	__uint(max_entries, 1);
} downstreams SEC(".maps");

/* Twice the index of the downstream, plus the parity of the key generation -> send keys. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct quic_keys);
	__uint(max_entries, 2);
} seal_keys SEC(".maps");

/* Place in the rings of all connections, see struct relay_ring -> precomputed keystream of one packet. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_keystream);
	__uint(max_entries, 1);
} keystreams SEC(".maps");

/* --- What is forwarded --- */

/* Stream, or track of datagrams, of an upstream -> index of its ingress; its track -> index in `tracks`. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct relay_slot);
	__type(value, __u32);
	__uint(max_entries, 1);
} slots SEC(".maps");

/* Index -> a track whose streams the program may open. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_track);
	__uint(max_entries, 1);
} tracks SEC(".maps");

/* Index -> what is in a slot. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_ingress);
	__uint(max_entries, 1);
} ingresses SEC(".maps");

/* Index -> one subscriber's copy of what is in a slot. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_egress);
	__uint(max_entries, 1);
} egresses SEC(".maps");

/* Packets that were sent: struct relay_forwarded. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 12);
} forwarded SEC(".maps");

/* --- Deferred wake-ups --- */

/* Index -> socket of userspace that deferred packets are steered to. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, RELAY_SOCKETS);
} sockets SEC(".maps");

/* Index of the socket -> what both sides know of it. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_deferral);
	__uint(max_entries, RELAY_SOCKETS);
} deferrals SEC(".maps");

/* Low bits of a packet's last 8 bytes -> when it arrived. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_arrival);
	__uint(max_entries, RELAY_ARRIVALS);
} arrivals SEC(".maps");

/* --- What is told --- */

/* Outcome -> packets. First enum relay_outcome, then enum relay_egress_outcome, enum relay_further_run,
 * enum relay_frame_outcome, enum relay_opening.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, RELAY_OUTCOMES + RELAY_EGRESS_OUTCOMES + RELAY_FURTHER_RUNS +
				    RELAY_FRAME_OUTCOMES + RELAY_OPENING_OUTCOMES);
} outcomes SEC(".maps");

/* A variable, so that all it costs while nobody traces is a load and a branch. */
SEC(".data.tracing")
volatile struct relay_tracing tracing = {};

/* What became of traced packets: struct relay_event. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 12);
} events SEC(".maps");

/* --- The program's own --- */

/* 0 -> what this CPU's run works with. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct work);
	__uint(max_entries, 1);
} works SEC(".maps");

/* Low bits of an ingress' index -> bytes that came behind a hole. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct run_bytes);
	__uint(max_entries, RUNS);
} runs SEC(".maps");

#endif
