/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The configuration and the maps of the relay program. Maps whose `max_entries` is 1 here get their size from userspace
 * before the program is loaded.
 */
#ifndef MILLRACE_RELAY_MAPS_H
#define MILLRACE_RELAY_MAPS_H

#include "barrier.h"
#include "relay_work.h"
#include <bpf/bpf_helpers.h>

/* one for each shard of each listen address; the relay works without, but every packet wakes it then */
#define RELAY_SOCKETS 256

SEC(".rodata.config")
const volatile struct relay_config config = {};

/* --- Connections --- */

/* Destination connection ID -> index of an upstream connection. For a connection that only subscribes: RELAY_SUBSCRIBER
 * plus the index of a downstream connection.
 */
BPF_MAP(HASH, ids, struct relay_id, __u32, 1);

/* Index of an upstream connection (on which media arrives) -> the connection's state. */
BPF_MAP_FLAGS(ARRAY, upstreams, __u32, struct relay_upstream, 1, BPF_F_MMAPABLE);

/* Twice the index of an upstream connection, plus the key phase -> keys that decrypt its packets. */
BPF_MAP(ARRAY, open_keys, __u32, struct quic_keys, 2);

/* Index of a downstream connection (on which media is sent) -> the connection's state. */
BPF_MAP_FLAGS(ARRAY, downstreams, __u32, struct relay_downstream, 1, BPF_F_MMAPABLE);

/* Twice the index of a downstream connection, plus the parity of the key generation -> keys that encrypt its packets.
 */
BPF_MAP(ARRAY, seal_keys, __u32, struct quic_keys, 2);

/* Index of an entry in the keystream rings (struct relay_ring) of all connections -> precomputed keystream of one
 * packet.
 */
BPF_MAP_FLAGS(ARRAY, keystreams, __u32, struct relay_keystream, 1, BPF_F_MMAPABLE);

/* --- Forwarded streams and datagrams, and the subscribers' copies of them --- */

/* A stream of an upstream, or a track's datagrams -> index in `ingresses`. For a key of kind RELAY_TRACK: a track of an
 * upstream -> index in `tracks`.
 */
BPF_MAP(HASH, slots, struct relay_slot, __u32, 1);

/* Index of a track -> a track for whose streams the program may open subscribers' streams. */
BPF_MAP_FLAGS(ARRAY, tracks, __u32, struct relay_track, 1, BPF_F_MMAPABLE);

/* Index of an ingress -> the state of a publisher's stream, or of a track's datagrams, that the program forwards. */
BPF_MAP_FLAGS(ARRAY, ingresses, __u32, struct relay_ingress, 1, BPF_F_MMAPABLE);

/* Index of an egress -> one subscriber's copy of a forwarded stream or of a track's datagrams. */
BPF_MAP_FLAGS(ARRAY, egresses, __u32, struct relay_egress, 1, BPF_F_MMAPABLE);

/* Reports about packets that the program has sent, one struct relay_forwarded each. Userspace reads them. */
BPF_RING(forwarded, 1 << 12);

/* --- Deferred packets, which do not wake userspace at once --- */

/* Index -> a socket of userspace for deferred packets, which need not wake userspace at once. */
BPF_MAP(SOCKMAP, sockets, __u32, __u64, RELAY_SOCKETS);

/* Index of a socket in `sockets` -> counters that the program and userspace share. */
BPF_MAP_FLAGS(ARRAY, deferrals, __u32, struct relay_deferral, RELAY_SOCKETS, BPF_F_MMAPABLE);

/* Low bits of the last 8 bytes of a deferred packet (one that need not wake userspace) -> the packet's arrival time. */
BPF_MAP_FLAGS(ARRAY, arrivals, __u32, struct relay_arrival, RELAY_ARRIVALS, BPF_F_MMAPABLE);

/* --- Counters and events --- */

/* Result of processing a packet, a copy or a frame -> how often it occurred. The keys are the values of enum
 * relay_outcome, then enum relay_egress_outcome, enum relay_further_run, enum relay_frame_outcome and enum
 * relay_opening.
 */
BPF_MAP(PERCPU_ARRAY, outcomes, __u32, __u64,
	RELAY_OUTCOMES + RELAY_EGRESS_OUTCOMES + RELAY_FURTHER_RUNS + RELAY_FRAME_OUTCOMES +
		RELAY_OPENING_OUTCOMES);

/* The trace settings are a variable and not a map, so that they cost each packet only a load and a branch while tracing
 * is off.
 */
SEC(".data.tracing")
volatile struct relay_tracing tracing = {};

/* Events of traced packets, struct relay_event. */
BPF_RING(events, 1 << 12);

/* --- Memory that only the program uses --- */

/* Key 0 -> the work area of the present CPU. */
BPF_MAP(PERCPU_ARRAY, works, __u32, struct work, 1);

/* CPU number -> payload of the super-packet that this CPU is forwarding. Not a per-CPU map, whose values are limited to
 * 32 KiB.
 */
BPF_MAP(ARRAY, supers, __u32, struct super_bytes, 1);

/* Low bits of the index of an ingress -> buffer for bytes that arrived after a hole in its stream. */
BPF_MAP(ARRAY, runs, __u32, struct run_bytes, RUNS);

#endif
