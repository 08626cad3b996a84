/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Events about single packets, for `millrace fanout trace`. */
#ifndef MILLRACE_FANOUT_TRACE_H
#define MILLRACE_FANOUT_TRACE_H

#include "fanout_maps.h"

/* Not inlined, so that BTF has struct fanout_event. The function uses bpf_ringbuf_output instead of
 * bpf_ringbuf_reserve. The verifier of Linux 6.1 forgets that reserved memory is not NULL when a function returns it.
 */
static __noinline int send_event(struct fanout_event *event)
{
	if (!bpf_ringbuf_output(&events, event, sizeof(*event), BPF_RB_NO_WAKEUP))
		return 0;
	__sync_fetch_and_add(&tracing.lost, 1);
	return -1;
}

/* Writes an event about a traced packet. `receiver` 0: the event is about the packet itself. */
int trace(struct fanout_work *work, __u32 receiver, __u32 outcome)
{
	__u32 wanted = tracing.receiver, key;
	struct fanout_stream *stream;
	struct fanout_event event;

	if (!work || (wanted && receiver && wanted != receiver))
		return 0;
	key = work->stream;
	stream = bpf_map_lookup_elem(&streams, &key);
	if (!stream)
		return 0;
	event = (struct fanout_event){
		.arrived_ns = work->traced_ns,
		.time_ns = bpf_ktime_get_ns(),
		.stream = stream->number,
		.receiver = receiver,
		.ssrc = work->rtp.ssrc,
		.timestamp = work->rtp.kind == RTP_MEDIA ? work->rtp.timestamp : 0,
		.sequence = work->rtp.sequence,
		.size = work->frame.packet_bytes,
		.outcome = outcome,
		.kind = work->rtp.second,
	};
	return send_event(&event);
}

#endif
