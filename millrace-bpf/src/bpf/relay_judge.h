/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Which bytes of a stream may be forwarded: those that userspace would forward, too. A frame is good if it begins where the
 * stream stands, its bytes are well-formed there, and it is within the stream's final size.
 *
 * What does not begin there is userspace's, and so is what follows it, until the stream stands behind the hole: because the
 * missing frame came, or because userspace has the bytes and says where they end (`next` and `state`). What passes
 * meanwhile is noted as `run`, and parsed as if it began with an object. If that turns out to be so, or if the run is
 * part of one payload, the stream stands at the end of the run at once: packets that follow each other fast do not keep
 * userspace's word from ever being in time.
 */
#ifndef MILLRACE_RELAY_JUDGE_H
#define MILLRACE_RELAY_JUDGE_H

#include "relay_intf.h"
#include "subgroup.h"
#include "util.h"

#define JUDGE_STEPS 256 /* fields that are looked at in one frame */

struct judge_loop {
	struct subgroup_state *state;
	const __u8 *text;
	struct frame_walk walk;
	enum subgroup_step step;
	__u32 pad;
};

static long judge_step(__u32 index, struct judge_loop *loop)
{
	loop->step = subgroup_next(loop->state, &loop->walk, loop->text);
	return loop->step != SUBGROUP_MORE;
}

/* Takes bytes of a packet. SUBGROUP_MORE: they are too many fields; the state is anywhere in them. */
int judge_bytes(struct subgroup_state *state, const struct quic_buf *in, __u32 at, __u32 end)
{
	struct judge_loop loop = {.state = state, .walk = {.at = at, .end = end}};

	if (!state || !in)
		return SUBGROUP_BAD;
	if (subgroup_is_inside(state, end - at)) {
		subgroup_skip(state, end - at);
		return SUBGROUP_DONE;
	}
	loop.text = in->bytes;
	bpf_loop(JUDGE_STEPS, judge_step, &loop, 0);
	return loop.step;
}

/* The run as if it began with an object: whether that is where the stream stands. */
static __always_inline int begins_the_run(const struct relay_ingress *ingress)
{
	return ingress->next == ingress->run && subgroup_may_end(&ingress->state) &&
	       !(ingress->state.flags & SUBGROUP_ENDED) && ingress->ahead.field != SUBGROUP_BROKEN &&
	       ingress->state.kind == ingress->ahead.kind;
}

/* The IDs of the run's objects were counted from 0. Not 0: the last one is too large. */
static __always_inline int take_run(struct relay_ingress *ingress)
{
	__u64 before = ingress->state.previous + 1, id = before + ingress->ahead.previous;

	if (!(ingress->state.flags & SUBGROUP_HAS_PREVIOUS)) {
		ingress->state = ingress->ahead;
		return 0;
	}
	if (!(ingress->ahead.flags & SUBGROUP_HAS_PREVIOUS))
		id = before - 1;
	else if (!before || id < before)
		return -1;
	ingress->state = ingress->ahead;
	ingress->state.previous = id;
	ingress->state.flags |= SUBGROUP_HAS_PREVIOUS;
	return 0;
}

/* Goes to the end of the run, if what is known of the stream allows it. */
static __always_inline void join_run(struct relay_ingress *ingress)
{
	__u64 behind = ingress->run_end - ingress->next;

	if (ingress->next < ingress->run || ingress->next >= ingress->run_end)
		return;
	if (subgroup_is_inside(&ingress->state, behind))
		subgroup_skip(&ingress->state, behind);
	else if (!begins_the_run(ingress) || take_run(ingress))
		return;
	ingress->next = ingress->run_end;
}

/* Notes a frame behind a hole. */
static __always_inline void note_ahead(struct relay_ingress *ingress, const struct quic_buf *in,
				       const struct frame_stream *frame)
{
	if (frame->offset < ingress->run_end && ingress->run_end > ingress->next)
		return;
	if (frame->offset != ingress->run_end || ingress->run_end <= ingress->next) {
		ingress->run = frame->offset;
		ingress->ahead =
			(struct subgroup_state){.field = SUBGROUP_OBJECT, .kind = ingress->state.kind};
	}
	ingress->run_end = frame->offset + frame->len;
	if (judge_bytes(&ingress->ahead, in, frame->at, frame->at + frame->len) != SUBGROUP_DONE)
		ingress->ahead.field = SUBGROUP_BROKEN;
}

/* Whether the frame agrees with the final size, if that is known; notes it. */
static __always_inline int fits_final(struct relay_ingress *ingress, const struct frame_stream *frame, __u64 end)
{
	if (end > ingress->final_size)
		return 0;
	if (!frame->fin)
		return 1;
	if ((ingress->final_size != RELAY_UNKNOWN && ingress->final_size != end) || end < ingress->next ||
	    end < ingress->run_end)
		return 0;
	ingress->final_size = end;
	return 1;
}

/* The frame's bytes from where the stream stands on. */
static __always_inline enum relay_frame_outcome take_frame(struct relay_ingress *ingress,
							   const struct quic_buf *in,
							   const struct frame_stream *frame, __u64 end)
{
	struct subgroup_state *next = &ingress->scratch;
	__u64 known = ingress->next - frame->offset;
	int step;

	*next = ingress->state;
	step = judge_bytes(next, in, frame->at + known, frame->at + frame->len);
	if (step == SUBGROUP_MORE)
		return RELAY_FRAME_LONG;
	if (step == SUBGROUP_BAD || (end == ingress->final_size && !subgroup_may_end(next)))
		return RELAY_FRAME_MALFORMED;
	ingress->state = *next;
	ingress->next = end;
	if (frame->fin)
		ingress->state = (struct subgroup_state){.field = SUBGROUP_OVER};
	join_run(ingress);
	/* Its front may be other bytes than those that came before. */
	return known ? RELAY_FRAME_REPEATED : RELAY_FRAME_GOOD;
}

static __always_inline enum relay_frame_outcome judge_locked(struct relay_ingress *ingress,
							     const struct quic_buf *in,
							     const struct frame_stream *frame)
{
	__u64 end = frame->offset + frame->len;
	enum relay_frame_outcome outcome;

	if (ingress->state.field == SUBGROUP_BROKEN || !fits_final(ingress, frame, end)) {
		outcome = RELAY_FRAME_MALFORMED;
	} else {
		join_run(ingress);
		if (frame->offset > ingress->next) {
			note_ahead(ingress, in, frame);
			return RELAY_FRAME_AHEAD;
		}
		if (end < ingress->next ||
		    (end == ingress->next && (!frame->fin || ingress->state.field == SUBGROUP_OVER)))
			return RELAY_FRAME_REPEATED;
		outcome = take_frame(ingress, in, frame, end);
	}
	if (outcome == RELAY_FRAME_MALFORMED)
		ingress->state = (struct subgroup_state){.field = SUBGROUP_BROKEN};
	return outcome;
}

/* Judges a frame of a stream, and has the stream stand behind it if it is good. */
enum relay_frame_outcome judge_frame(struct relay_ingress *ingress, const struct quic_buf *in,
				     const struct frame_stream *frame)
{
	enum relay_frame_outcome outcome;

	if (!ingress || !in || !frame)
		return RELAY_FRAME_MALFORMED;
	if (__sync_lock_test_and_set(&ingress->lock, 1))
		return RELAY_FRAME_BUSY;
	outcome = judge_locked(ingress, in, frame);
	__sync_lock_test_and_set(&ingress->lock, 0);
	return outcome;
}

#endif
