/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Forwards super-packets: several packets of one sender in one skb, merged by GRO, or not segmented yet because the
 * sender is on the same machine (GSO). Each segment is a QUIC packet, and is forwarded like one.
 *
 * The super-packet has to be passed to userspace unchanged, but a program cannot shorten one without making it an
 * ordinary packet for good. So the copies are made of a clone, which is redirected to the loopback interface. There
 * `clone_egress` gets it at once, within the run for the super-packet: it forwards segment after segment, and drops the
 * clone. The payload was copied from the super-packet before.
 *
 * Once a run has made `max_copies_per_run` copies, it begins no further segment. The packet is then queued for another
 * run, as in relay_runs.h.
 */
#ifndef MILLRACE_RELAY_SUPER_H
#define MILLRACE_RELAY_SUPER_H

#include "relay_defer.h"
#include "relay_egress.h"
#include "relay_runs.h"

#define CLONE_MARK 0x4d530000U

/* Counts the result of a program run for a packet in the map `outcomes`. Runs after the packet's first one are counted
 * by enum relay_further_run.
 */
static __always_inline void count(const struct work *work, enum relay_outcome outcome)
{
	__u32 index =
		work->cursor.id ? RELAY_OUTCOMES + RELAY_EGRESS_OUTCOMES + further_run(outcome) : outcome;

	add_to(&outcomes, index, 1);
}

static __always_inline struct super_bytes *super_bytes(void)
{
	__u32 cpu = bpf_get_smp_processor_id();

	return bpf_map_lookup_elem(&supers, &cpu);
}

/* Copies the payload of a super-packet to memory. Returns an error (not 0) if the payload is too long, or too short for
 * a packet.
 */
static __noinline int load_super(struct __sk_buff *skb, const struct fan_frame *frame)
{
	struct super_bytes *to = super_bytes();
	__u32 bytes = frame->packet_bytes;

	if (!to || bytes < SHORTEST)
		return -1;
	OPAQUE(bytes);
	if (bytes >= SUPER_BYTES)
		return -1;
	return bpf_skb_load_bytes(skb, frame->packet_at, to->bytes, bytes);
}

/* Copies the current segment of the super-packet to the buffer in which it is decrypted. */
static __noinline enum relay_outcome load_segment(struct work *work)
{
	__u32 at = work->super.segment * work->arrival.frame.segment_bytes & (SUPER_BYTES - 1);
	__u32 bytes = work->arrival.frame.packet_bytes;
	struct super_bytes *from = super_bytes();
	enum relay_outcome outcome;

	if (!from)
		return RELAY_MALFORMED;
	outcome = check_size(from->bytes[at], bytes);
	if (outcome)
		return outcome;
	OPAQUE(bytes);
	if (bytes < SHORTEST || bytes > QUIC_TEXT_MAX ||
	    bpf_probe_read_kernel(work->in.bytes + QUIC_AT, bytes, from->bytes + at))
		return RELAY_MALFORMED;
	return RELAY_FORWARDED;
}

/* Decrypts the packet or the segment, and makes as many of its copies as this run may. Returns RELAY_CONTINUED if
 * copies are left for another run.
 */
enum relay_outcome forward_packet(struct __sk_buff *skb, struct work *work)
{
	struct egress_loop loop = {.skb = skb, .work = work};
	enum relay_outcome outcome;

	if (!work)
		return RELAY_MALFORMED;
	outcome = work->super.segments ? load_segment(work) : load_packet(skb, work);
	if (outcome)
		return outcome;
	outcome = find_connection(work);
	if (outcome)
		return outcome;
	outcome = walk_frames(work);
	if (outcome)
		return outcome;
	work->arrival.frame.summed = IP_SUMMED(skb);
	work->copies += bpf_loop(config.max_copies_per_run - work->copies, next_egress, &loop, 0);
	if (work->fan.chunk < work->fan.chunks)
		return RELAY_CONTINUED;
	return work->fan.left_over ? RELAY_OVER_BUDGET : RELAY_FORWARDED;
}

/* Counts a segment and moves to the next one, after all of its copies were tried or none can be made. */
static __noinline int end_segment(struct __sk_buff *skb, struct work *work, enum relay_outcome outcome)
{
	work->super.received |= is_received(outcome);
	work->super.wakes |= outcome != RELAY_FORWARDED || work->fan.wakes || work->cursor.id;
	if (outcome == RELAY_FROM_SUBSCRIBER)
		defer_short(skb, &work->arrival);
	count(work, outcome);
	if (work->arrival.traced_ns)
		trace_packet(work, outcome);
	/* Each segment counts as one copy against `max_copies_per_run`, so that segments without copies are bounded,
	 * too.
	 */
	work->copies++;
	work->super.segment++;
	work->cursor.id = 0;
	return 0;
}

/* One step of the loop over the segments of a super-packet. */
static long next_segment(__u32 index, struct egress_loop *loop)
{
	struct work *work = loop->work;
	__u32 most = work->arrival.frame.segment_bytes, at = work->super.segment * most;
	enum relay_outcome outcome;

	if (work->super.segment >= work->super.segments || work->copies >= config.max_copies_per_run)
		return 1;
	work->arrival.frame.packet_bytes = work->super.bytes - at < most ? work->super.bytes - at : most;
	work->arrival.traced_ns = 0;
	outcome = forward_packet(loop->skb, work);
	if (outcome == RELAY_CONTINUED) {
		work->super.goes_on = 1;
		return 1;
	}
	end_segment(loop->skb, work, outcome);
	return 0;
}

/* Reports whether this skb is the clone that the current run on this CPU has redirected. With PREEMPT_RT another packet
 * may be sent in between, but only privileged programs can set its firewall mark to CLONE_MARK.
 */
static __always_inline int is_clone(const struct __sk_buff *skb, const struct work *work)
{
	return skb->mark == CLONE_MARK && READ_ONCE(work->super.comes);
}

/* Prepares the clone of the super-packet for sending copies of its segments: restores its firewall mark, and shortens
 * it. Returns an error (not 0) if the clone cannot be shortened.
 */
static __noinline int begin_clone(struct __sk_buff *skb, struct work *work)
{
	struct fan_frame *frame = &work->arrival.frame;

	skb->mark = work->super.mark;
	frame->frame_bytes = frame->packet_at + SHORTEST;
	if (bpf_skb_change_tail(skb, frame->frame_bytes, 0))
		return -1;
	WRITE_ONCE(work->super.comes, 0);
	return 0;
}

static __always_inline void forward_clone(struct __sk_buff *skb, struct work *work)
{
	struct egress_loop loop = {.skb = skb, .work = work};

	bpf_loop(SEGMENTS, next_segment, &loop, 0);
}

/* Redirects a clone of the super-packet to the loopback interface, where it is forwarded. Returns RELAY_SUPER_PACKET if
 * that failed.
 */
static __noinline enum relay_outcome send_clone(struct __sk_buff *skb, struct work *work)
{
	struct super_packet *super = &work->super;
	__u32 bytes = work->arrival.frame.packet_bytes, most = work->arrival.frame.segment_bytes;
	__u32 segments = most ? (bytes + most - 1) / most : 0, id = work->cursor.id;
	__u32 mark = skb->mark;

	if (!segments || segments > SEGMENTS || load_super(skb, &work->arrival.frame))
		return RELAY_SUPER_PACKET;
	*super = (struct super_packet){
		.segment = work->cursor.kept.segment,
		.first = work->cursor.kept.segment,
		.segments = segments,
		.bytes = bytes,
		.mark = mark,
		.wakes = !!id,
		.cursor_id = id,
	};
	if (!work->cursor.kept.begun)
		work->cursor.id = 0;
	/* `begin_clone` clears the flag `comes` when the clone arrives at the loopback interface. If the flag is still
	 * set after the redirect, the clone was not processed.
	 */
	WRITE_ONCE(super->comes, 1);
	skb->mark = CLONE_MARK;
	bpf_clone_redirect(skb, LOOPBACK, 0);
	skb->mark = mark;
	if (!READ_ONCE(super->comes))
		return RELAY_SEGMENTED;
	super->comes = 0;
	super->segments = 0;
	work->cursor.id = id;
	return RELAY_SUPER_PACKET;
}

/* Queues the super-packet for another run, unless it has had `max_runs` runs. The runs of each segment are counted
 * separately.
 */
static __always_inline int put_back_super(struct __sk_buff *skb, struct work *work)
{
	__u32 further = work->cursor.id, failed;

	if (work->super.segment != work->super.first || !work->super.goes_on)
		work->cursor.runs = 0;
	work->cursor.id = work->super.cursor_id;
	failed = put_back(skb, work);
	work->cursor.id = further;
	return failed;
}

/* Ends a run for the super-packet. All finished segments have been counted, but not a segment that another run will
 * continue.
 */
static __noinline enum relay_outcome end_super(struct __sk_buff *skb, struct work *work,
					       enum relay_outcome outcome)
{
	struct super_packet *super = &work->super;
	__u32 left = super->segments - super->segment;

	if (!super->cursor_id || outcome == RELAY_SUPER_PACKET)
		add_to(&outcomes, outcome, 1);
	if (outcome == RELAY_SUPER_PACKET)
		return outcome;
	if (left && !put_back_super(skb, work)) {
		if (super->goes_on)
			count(work, RELAY_CONTINUED);
		return RELAY_CONTINUED;
	}
	if (left && super->goes_on)
		count(work, RELAY_OVER_BUDGET);
	if (left)
		add_to(&outcomes, RELAY_OVER_BUDGET, left - super->goes_on);
	work->fan.wakes = super->wakes || left;
	work->cursor.id = 0;
	if (super->received)
		defer(skb, work, RELAY_FORWARDED);
	return outcome;
}

#endif
