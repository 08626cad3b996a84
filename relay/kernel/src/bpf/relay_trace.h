/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Sends events about single packets to userspace, while tracing is turned on. */
#ifndef MILLRACE_RELAY_TRACE_H
#define MILLRACE_RELAY_TRACE_H

#include "relay_maps.h"

/* Notes the arrival time of an upstream's packet that may be traced. Later runs of the program for the same packet keep
 * the arrival time of the first run.
 */
static __always_inline void trace_arrival(struct work *work)
{
	if (work->cursor.id)
		work->arrival.traced_ns = work->cursor.kept.traced_ns;
	else if (tracing.every)
		work->arrival.traced_ns = bpf_ktime_get_ns();
}

/* Stores the packet number, and stops tracing the packet if its number is not a multiple of the sampling interval
 * `every`.
 */
static __always_inline void trace_number(struct arrival *arrival, __u64 number)
{
	__u32 every = tracing.every;

	arrival->number = number;
	if (arrival->traced_ns && (!every || number % every))
		arrival->traced_ns = 0;
}

/* Sends an event. Not inlined, so that BTF contains its type. It copies with bpf_ringbuf_output, because the verifier
 * of Linux 6.1 forgets that reserved memory is not NULL when a function returns it.
 */
static __noinline int send_event(struct relay_event *event)
{
	if (!bpf_ringbuf_output(&events, event, sizeof(*event), BPF_RB_NO_WAKEUP))
		return 0;
	__sync_fetch_and_add(&tracing.lost, 1);
	return -1;
}

/* Sends an event for a copy of a traced packet, whether the copy was sent or not. */
int trace_copy(struct work *work, const struct relay_egress *egress,
	       const struct relay_downstream *downstream, __u32 outcome)
{
	__u32 track = tracing.track, session = tracing.session, index, publisher;
	const struct relay_upstream *upstream;
	const struct frame_stream *frame;
	const struct chunk *chunk;
	struct relay_event event;
	int drawn = outcome == RELAY_EGRESS_SENT || outcome == RELAY_EGRESS_LOST;

	if (!work || !egress || !downstream)
		return -1;
	index = work->arrival.upstream;
	upstream = bpf_map_lookup_elem(&upstreams, &index);
	publisher = upstream ? upstream->session : 0;
	if ((track && egress->track != track) ||
	    (session && downstream->session != session && publisher != session))
		return 0;
	chunk = &work->chunks[work->fan.chunk & (CHUNKS - 1)];
	frame = &chunk->frame;
	event = (struct relay_event){
		.arrived_ns = work->arrival.traced_ns,
		.time_ns = bpf_ktime_get_ns(),
		.received = work->arrival.number,
		.number = drawn ? work->packet.word & ((1ULL << RELAY_NUMBER_BITS) - 1) : 0,
		.group = chunk->kind == RELAY_STREAM ? egress->group : frame->offset,
		.stream_id = egress->id,
		.offset = chunk->kind == RELAY_STREAM ? frame->offset + egress->shift : chunk->object,
		.publisher = publisher,
		.subscriber = downstream->session,
		.track = egress->track,
		.len = frame->len,
		.size = drawn ? work->packet.size : 0,
		.is_copy = 1,
		.outcome = outcome,
		.fin = frame->fin,
	};
	return send_event(&event);
}

/* Sends an event for a traced packet that was handled. A packet that was forwarded gets no event of its own, because
 * each of its copies has one.
 */
int trace_packet(struct work *work, __u32 outcome)
{
	__u32 session = tracing.session, index, publisher;
	const struct relay_upstream *upstream;
	struct relay_event event;

	if (!work || outcome == RELAY_FORWARDED || outcome == RELAY_CONTINUED)
		return 0;
	index = work->arrival.upstream;
	upstream = bpf_map_lookup_elem(&upstreams, &index);
	publisher = upstream ? upstream->session : 0;
	if (tracing.track || (session && publisher != session))
		return 0;
	event = (struct relay_event){
		.arrived_ns = work->arrival.traced_ns,
		.time_ns = bpf_ktime_get_ns(),
		.received = work->arrival.number,
		.publisher = publisher,
		.size = work->arrival.frame.packet_bytes,
		.outcome = outcome,
	};
	return send_event(&event);
}

#endif
