/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Sends packets that were refused, or would have been, to userspace: a few of each guarded application (scope) for the
 * log, and those that traces select. Submitting does not wake the reader, because userspace polls several times a
 * second.
 */
#ifndef MILLRACE_GATE_SAMPLE_H
#define MILLRACE_GATE_SAMPLE_H

#include "gate_rules.h"

static __noinline int fill_sample(struct gate_sample *to, const struct gate_work *work, __u32 reason,
				  __u32 bytes)
{
	const struct gate_packet *packet = &work->packet;

	*to = (struct gate_sample){
		.time_ns = work->now_ns,
		.scope = work->scope,
		.reason = reason,
		.first = packet->first,
		.monitored = work->monitored,
		.source = packet->source,
		.destination = packet->destination,
		.source_port = packet->source_port,
		.destination_port = packet->destination_port,
		.bytes = bytes,
		.version = packet->version,
		.id_len = packet->id_len,
		.kind = packet->kind,
	};
	for (int i = 0; i < GATE_ID_MAX; i++)
		to->id[i] = i < packet->id_len ? head_u8(&work->head, packet->id_at + i) : 0;
	return 0;
}

static __noinline int sample(const struct gate_work *work, __u32 reason, __u32 bytes)
{
	const struct bucket_rate rate = {.cost = config.sample_ticks, .burst = config.sample_ticks};
	struct gate_state *state;
	struct gate_sample *to;

	if (!rate.cost)
		return 0;
	state = bpf_map_lookup_elem(&states, &work->scope);
	if (!state || is_over_at(&state->sample_at, &rate, 1, work->now_ns))
		return 0;
	to = bpf_ringbuf_reserve(&samples, sizeof(*to), 0);
	if (!to)
		return count_event(GATE_SAMPLES_LOST);
	fill_sample(to, work, reason, bytes);
	bpf_ringbuf_submit(to, BPF_RB_NO_WAKEUP);
	return 0;
}

/* --- Traces --- */

enum traced {
	TRACED_MATCHED,
	TRACED_LEFT_OUT,
	TRACED_LOST,
};

static __always_inline void count_traced(__u32 index, enum traced what)
{
	struct gate_traced *count = bpf_map_lookup_elem(&traced, &index);

	if (!count)
		return;
	if (what == TRACED_MATCHED)
		count->matched += 1;
	else if (what == TRACED_LEFT_OUT)
		count->left_out += 1;
	else
		count->lost += 1;
}

static __always_inline int is_followed(const struct gate_tracer *tracer, const struct gate_work *work,
				       __u32 rules)
{
	const struct gate_packet *packet = &work->packet;
	struct bytes16 source = load128(packet->source.bytes), mask = load128(tracer->mask.bytes);

	source.low &= mask.low;
	source.high &= mask.high;
	return tracer->rules & rules && tracer->scopes & 1ULL << (work->scope & (GATE_SCOPES - 1)) &&
	       (!tracer->family || tracer->family == packet->family) &&
	       !differ128(source, load128(tracer->address.bytes));
}

/* Sets the trace's bit in work->takers if the packet matches and the trace is below its rate. `rules` are the rules
 * that refuse the packet, or would have. This function and trace() are global, so that the verifier checks them once
 * instead of once for each path that calls them.
 */
__noinline int offer(__u32 index, __u32 rules)
{
	__u32 zero = 0;
	struct gate_work *work = bpf_map_lookup_elem(&works, &zero);
	struct gate_tracer *tracer = bpf_map_lookup_elem(&tracers, &index);
	struct bucket_rate rate;

	if (!work || !tracer || !is_followed(tracer, work, rules))
		return 0;
	count_traced(index, TRACED_MATCHED);
	rate = tracer->rate;
	if (is_over_at(&tracer->full_at, &rate, 1, work->now_ns))
		count_traced(index, TRACED_LEFT_OUT);
	else
		work->takers |= 1 << (index & (GATE_TRACERS - 1));
	return 0;
}

static __noinline int count_lost(__u32 takers)
{
	for (__u32 i = 0; i < GATE_TRACERS; i++)
		if (takers & 1 << i)
			count_traced(i, TRACED_LOST);
	return 0;
}

/* Sends the packet in this CPU's scratch memory to the traces that it matches. */
__noinline int trace(__u32 reason, __u32 bytes)
{
	__u32 zero = 0, rules;
	struct gate_work *work = bpf_map_lookup_elem(&works, &zero);
	struct gate_sample *to;

	if (!work)
		return 0;
	rules = work->monitored;
	if (reason < GATE_RULES)
		rules |= 1 << reason;
	work->takers = 0;
	for (__u32 i = 0; i < GATE_TRACERS; i++)
		if (work->active.tracers & 1 << i)
			offer(i, rules);
	if (!work->takers)
		return 0;
	to = bpf_ringbuf_reserve(&traces, sizeof(*to), 0);
	if (!to)
		return count_lost(work->takers);
	fill_sample(to, work, reason, bytes);
	to->tracers = work->takers;
	bpf_ringbuf_submit(to, BPF_RB_NO_WAKEUP);
	return 0;
}

#endif
