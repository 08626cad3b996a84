/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The configuration and the maps of the relay program. Maps whose `max_entries` is 1 here get their size from userspace
 * before the program is loaded.
 */
#ifndef MILLRACE_RELAY_MAPS_H
#define MILLRACE_RELAY_MAPS_H

#include "barrier.h"
#include "relay_work.h"
#include <bpf/bpf_helpers.h>

#define RELAY_SOCKETS 16

SEC(".rodata.config")
const volatile struct relay_config config = {};

/* --- Connections --- */

/* Destination connection ID -> index of an upstream connection. For a connection that only subscribes: RELAY_SUBSCRIBER
 * plus the index of a downstream connection.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct relay_id);
	__type(value, __u32);
	__uint(max_entries, 1);
} ids SEC(".maps");

/* Index of an upstream connection (on which media arrives) -> the connection's state. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_upstream);
	__uint(max_entries, 1);
} upstreams SEC(".maps");

/* Twice the index of an upstream connection, plus the key phase -> keys that decrypt its packets. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct quic_keys);
	__uint(max_entries, 2);
} open_keys SEC(".maps");

/* Index of a downstream connection (on which media is sent) -> the connection's state. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_downstream);
	__uint(max_entries, 1);
} downstreams SEC(".maps");

/* Twice the index of a downstream connection, plus the parity of the key generation -> keys that encrypt its packets.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct quic_keys);
	__uint(max_entries, 2);
} seal_keys SEC(".maps");

/* Index of an entry in the keystream rings (struct relay_ring) of all connections -> precomputed keystream of one
 * packet.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_keystream);
	__uint(max_entries, 1);
} keystreams SEC(".maps");

/* --- Forwarded streams and datagrams, and the subscribers' copies of them --- */

/* A stream of an upstream, or a track's datagrams -> index in `ingresses`. For a key of kind RELAY_TRACK: a track of an
 * upstream -> index in `tracks`.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct relay_slot);
	__type(value, __u32);
	__uint(max_entries, 1);
} slots SEC(".maps");

/* Index of a track -> a track for whose streams the program may open subscribers' streams. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_track);
	__uint(max_entries, 1);
} tracks SEC(".maps");

/* Index of an ingress -> the state of a publisher's stream, or of a track's datagrams, that the program forwards. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_ingress);
	__uint(max_entries, 1);
} ingresses SEC(".maps");

/* Index of an egress -> one subscriber's copy of a forwarded stream or of a track's datagrams. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_egress);
	__uint(max_entries, 1);
} egresses SEC(".maps");

/* Reports about packets that the program has sent, one struct relay_forwarded each. Userspace reads them. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 12);
} forwarded SEC(".maps");

/* --- Deferred packets, which do not wake userspace at once --- */

/* Index -> a socket of userspace for deferred packets, which need not wake userspace at once. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, RELAY_SOCKETS);
} sockets SEC(".maps");

/* Index of a socket in `sockets` -> counters that the program and userspace share. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_deferral);
	__uint(max_entries, RELAY_SOCKETS);
} deferrals SEC(".maps");

/* Low bits of the last 8 bytes of a deferred packet (one that need not wake userspace) -> the packet's arrival time. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_arrival);
	__uint(max_entries, RELAY_ARRIVALS);
} arrivals SEC(".maps");

/* --- Counters and events --- */

/* Result of processing a packet, a copy or a frame -> how often it occurred. The keys are the values of enum
 * relay_outcome, then enum relay_egress_outcome, enum relay_further_run, enum relay_frame_outcome and enum
 * relay_opening.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, RELAY_OUTCOMES + RELAY_EGRESS_OUTCOMES + RELAY_FURTHER_RUNS +
				    RELAY_FRAME_OUTCOMES + RELAY_OPENING_OUTCOMES);
} outcomes SEC(".maps");

/* The trace settings are a variable and not a map, so that they cost each packet only a load and a branch while tracing
 * is off.
 */
SEC(".data.tracing")
volatile struct relay_tracing tracing = {};

/* Events of traced packets, struct relay_event. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 12);
} events SEC(".maps");

/* --- Memory that only the program uses --- */

/* Key 0 -> the work area of the present CPU. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct work);
	__uint(max_entries, 1);
} works SEC(".maps");

/* CPU number -> payload of the super-packet that this CPU is forwarding. Not a per-CPU map, whose values are limited to
 * 32 KiB.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct super_bytes);
	__uint(max_entries, 1);
} supers SEC(".maps");

/* Low bits of the index of an ingress -> buffer for bytes that arrived after a hole in its stream. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct run_bytes);
	__uint(max_entries, RUNS);
} runs SEC(".maps");

#endif
