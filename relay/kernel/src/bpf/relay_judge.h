/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Decides which bytes of a stream may be forwarded: only those that userspace would forward, too. The offset `next` is
 * the one up to which the stream was checked. A frame is good if it begins there, its bytes are well-formed, and it is
 * within the stream's final size.
 *
 * If bytes arrive twice, userspace keeps the first version, and removes the second from the packet before quinn sees it
 * (millrace-quic's module `received`). A frame is therefore good only if none of its bytes may have arrived before:
 * neither before `next` nor in the range from `apart` to `apart_end`.
 *
 * A frame that begins later is left to userspace, and so are the frames after it until the hole is filled: by the
 * missing frame, or by userspace, which then sets `next` and `state`. Frames that arrive meanwhile are stored if they
 * have no gaps between them; the stored bytes are called a run. When `next` reaches the run, `next` moves to the run's
 * end at once. Without runs, a fast stream would always be ahead of the position that userspace reports.
 */
#ifndef MILLRACE_RELAY_JUDGE_H
#define MILLRACE_RELAY_JUDGE_H

#include "relay_maps.h"
#include "subgroup.h"
#include "util.h"

#define JUDGE_STEPS 256 /* the most fields of a subgroup stream that are parsed in one frame */

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

static __always_inline int judge(struct judge_loop *loop)
{
	__u32 bytes = loop->walk.end - loop->walk.at;

	/* The whole frame lies inside an object's payload, so nothing has to be parsed. Most frames take this path. */
	if (subgroup_is_inside(loop->state, bytes)) {
		subgroup_skip(loop->state, bytes);
		return SUBGROUP_DONE;
	}
	bpf_loop(JUDGE_STEPS, judge_step, loop, 0);
	return loop->step;
}

/* Parses bytes of a packet. Returns SUBGROUP_MORE if the bytes have more fields than the program parses for one frame;
 * `state` is undefined then.
 */
int judge_bytes(struct subgroup_state *state, const struct quic_buf *in, __u32 at, __u32 end)
{
	struct judge_loop loop = {.state = state, .walk = {.at = at, .end = end}};

	if (!state || !in)
		return SUBGROUP_BAD;
	loop.text = in->bytes;
	return judge(&loop);
}

/* --- Runs of bytes after a hole in the stream --- */

#define RUN_PIECE (FRAMES_MAX / 2)
/* the most pieces (of RUN_PIECE bytes) of a run, the stored bytes after a hole, that are parsed for one frame */
#define RUN_PIECES 16

/* Parses some of the stored bytes (the run) that arrived after a hole in the stream. */
int judge_run(struct subgroup_state *state, const struct run_bytes *run, __u32 at, __u32 bytes)
{
	struct judge_loop loop = {.state = state, .walk = {.end = bytes}};

	if (!state || !run)
		return SUBGROUP_BAD;
	loop.text = run->bytes + (at & (RUN_BYTES - 1));
	return judge(&loop);
}

/* Reports whether the ingress has a run (gapless stream bytes after a hole) that ends after `next`, the offset up to
 * which the stream was checked.
 */
static __always_inline int is_ahead(const struct relay_ingress *ingress)
{
	return ingress->run_end > ingress->next;
}

/* Makes this stream (ingress) the owner of its buffer for bytes after a hole, which several streams share. If another
 * stream owns the buffer and has bytes in it, nothing changes. The check holds the lock of the present owner.
 */
static __always_inline void take_run(__u32 index)
{
	__u32 key = index & (RUNS - 1), owner;
	struct run_bytes *run = bpf_map_lookup_elem(&runs, &key);
	struct relay_ingress *other;

	if (!run)
		return;
	owner = READ_ONCE(run->owner);
	key = owner - 1;
	if (owner == index + 1)
		return;
	other = bpf_map_lookup_elem(&ingresses, &key);
	if (!other) {
		__sync_val_compare_and_swap(&run->owner, owner, index + 1);
		return;
	}
	/* The lock of the stream that owns the buffer is tried once, without waiting. If it is taken, the bytes after
	 * the hole are not stored.
	 */
	if (__sync_lock_test_and_set(&other->lock, 1))
		return;
	if (!is_ahead(other))
		__sync_val_compare_and_swap(&run->owner, owner, index + 1);
	__sync_lock_test_and_set(&other->lock, 0);
}

/* Returns the buffer with the bytes that arrived after a hole in this ingress's stream. Returns NULL if another ingress
 * owns the buffer.
 */
static __always_inline struct run_bytes *find_run(__u32 index)
{
	__u32 key = index & (RUNS - 1);
	struct run_bytes *run = bpf_map_lookup_elem(&runs, &key);

	return run && READ_ONCE(run->owner) == index + 1 ? run : NULL;
}

struct copy_loop {
	const __u8 *from;
	__u8 *to;
	__u32 words;
	__u32 pad;
};

static long copy_step(__u32 index, struct copy_loop *loop)
{
	if (index >= loop->words || index >= FRAMES_MAX / 8)
		return 1;
	store64(loop->to + 8 * index, load64(loop->from + 8 * index));
	return 0;
}

/* Appends a frame's bytes to the buffer for stream bytes that arrived after a hole. Up to 7 further bytes are copied,
 * which the next frame overwrites.
 */
int keep_frame(struct run_bytes *run, const struct quic_buf *in, const struct frame_stream *frame, __u32 at)
{
	struct copy_loop loop = {};

	if (!run || !in || !frame)
		return 0;
	loop.from = in->bytes + (frame->at & FRAMES_MASK);
	loop.to = run->bytes + (at & (RUN_BYTES - 1));
	loop.words = (frame->len + 7) / 8;
	bpf_loop(FRAMES_MAX / 8, copy_step, &loop, 0);
	return 0;
}

/* Reports whether stream bytes have arrived after a hole that begins at `next`, the offset up to which the stream was
 * checked.
 */
static __always_inline int has_apart(const struct relay_ingress *ingress)
{
	return ingress->apart_end > ingress->next;
}

/* Records that a frame has reached userspace with the stream bytes from `offset` to `end`. The frame begins after
 * `next`, the offset up to which the stream was checked.
 */
static __always_inline void note_apart(struct relay_ingress *ingress, __u64 offset, __u64 end)
{
	if (!has_apart(ingress) || offset < ingress->apart)
		ingress->apart = offset;
	if (end > ingress->apart_end)
		ingress->apart_end = end;
}

/* Records a frame after a hole. If the frame overlaps with bytes that have arrived before, its bytes are not stored. */
static __always_inline void note_ahead(struct relay_ingress *ingress, __u32 index, const struct quic_buf *in,
				       const struct frame_stream *frame)
{
	__u64 end = frame->offset + frame->len;
	struct run_bytes *run;

	if (!frame->len)
		return;
	if (has_apart(ingress) && frame->offset < ingress->apart_end) {
		note_apart(ingress, frame->offset, end);
		return;
	}
	note_apart(ingress, frame->offset, end);
	/* A frame that does not continue the run (the stored bytes after a hole in the stream) starts a new run. */
	if (!is_ahead(ingress) || frame->offset != ingress->run_end || end - ingress->run > RUN_BYTES) {
		ingress->run = frame->offset;
		take_run(index);
	}
	ingress->run_end = end;
	run = find_run(index);
	if (run)
		keep_frame(run, in, frame, frame->offset - ingress->run);
}

/* If `next`, the offset up to which the stream was checked, has reached the run (bytes stored after a hole), parses the
 * run's rest. Moves `next` as far as possible.
 */
static __always_inline void join_run(struct relay_ingress *ingress, __u32 index)
{
	struct run_bytes *run;

	if (ingress->next < ingress->run || !is_ahead(ingress))
		return;
	/* A run of bytes after a hole that lies inside one object's payload can be skipped, even if its bytes were not
	 * stored.
	 */
	if (subgroup_is_inside(&ingress->state, ingress->run_end - ingress->next)) {
		subgroup_skip(&ingress->state, ingress->run_end - ingress->next);
		ingress->next = ingress->run_end;
		return;
	}
	run = find_run(index);
	for (int i = 0; i < RUN_PIECES; i++) {
		__u64 left = ingress->run_end - ingress->next;
		__u32 bytes = left < RUN_PIECE ? left : RUN_PIECE;
		int step;

		if (!run || !left)
			return;
		ingress->scratch = ingress->state;
		step = judge_run(&ingress->scratch, run, ingress->next - ingress->run, bytes);
		if (step == SUBGROUP_BAD)
			ingress->scratch = (struct subgroup_state){.field = SUBGROUP_BROKEN};
		/* The rest of the run has more fields than the program parses for one frame. `state` and `next` stay at
		 * the end of the last piece that was parsed whole. Userspace or a later frame continues there.
		 */
		if (step == SUBGROUP_MORE)
			return;
		ingress->state = ingress->scratch;
		if (step == SUBGROUP_BAD)
			return;
		ingress->next += bytes;
	}
}

/* --- Frames --- */

/* Reports whether the frame agrees with the final size, if that is known. Sets the final size if the frame has FIN (RFC
 * 9000, section 4.5).
 */
static __always_inline int fits_final(struct relay_ingress *ingress, const struct frame_stream *frame,
				      __u64 end)
{
	if (end > ingress->final_size)
		return 0;
	if (!frame->fin)
		return 1;
	if ((ingress->final_size != RELAY_UNKNOWN && ingress->final_size != end) || end < ingress->next ||
	    end < ingress->apart_end)
		return 0;
	ingress->final_size = end;
	return 1;
}

/* Parses the frame's bytes from `next` on, up to bytes that have arrived before the frame. */
static __always_inline enum relay_frame_outcome take_frame(struct relay_ingress *ingress, __u32 index,
							   const struct quic_buf *in,
							   const struct frame_stream *frame, __u64 end)
{
	struct subgroup_state *next = &ingress->scratch;
	__u64 known = ingress->next - frame->offset;
	int meets = has_apart(ingress) && end > ingress->apart;
	__u64 to = meets ? ingress->apart : end;
	int step;

	if (meets)
		note_apart(ingress, to, end);
	if (to <= ingress->next && to < end)
		return RELAY_FRAME_REPEATED;
	*next = ingress->state;
	step = judge_bytes(next, in, frame->at + known, frame->at + (__u32)(to - frame->offset));
	if (step == SUBGROUP_MORE) {
		note_apart(ingress, ingress->next, end);
		return RELAY_FRAME_LONG;
	}
	if (step == SUBGROUP_BAD || (to == ingress->final_size && !subgroup_may_end(next)))
		return RELAY_FRAME_MALFORMED;
	ingress->state = *next;
	ingress->next = to;
	if (frame->fin && !meets)
		ingress->state = (struct subgroup_state){.field = SUBGROUP_OVER};
	join_run(ingress, index);
	/* The frame repeats bytes of the stream that arrived in an earlier packet, perhaps with other values. Userspace
	 * keeps the earlier values.
	 */
	return known || meets ? RELAY_FRAME_REPEATED : RELAY_FRAME_GOOD;
}

static __always_inline enum relay_frame_outcome judge_locked(struct relay_ingress *ingress, __u32 index,
							     const struct quic_buf *in,
							     const struct frame_stream *frame)
{
	__u64 end = frame->offset + frame->len;
	enum relay_frame_outcome outcome;

	join_run(ingress, index);
	if (ingress->state.field == SUBGROUP_BROKEN || !fits_final(ingress, frame, end)) {
		outcome = RELAY_FRAME_MALFORMED;
	} else {
		if (frame->offset > ingress->next) {
			note_ahead(ingress, index, in, frame);
			return RELAY_FRAME_AHEAD;
		}
		if (end < ingress->next ||
		    (end == ingress->next && (!frame->fin || ingress->state.field == SUBGROUP_OVER)))
			return RELAY_FRAME_REPEATED;
		outcome = take_frame(ingress, index, in, frame, end);
	}
	if (outcome == RELAY_FRAME_MALFORMED)
		ingress->state = (struct subgroup_state){.field = SUBGROUP_BROKEN};
	return outcome;
}

/* Records the stream offsets of a frame that the program does not parse. Userspace gets the frame's bytes. */
int leave_frame(struct relay_ingress *ingress, const struct frame_stream *frame)
{
	__u64 end;

	if (!ingress || !frame || __sync_lock_test_and_set(&ingress->lock, 1))
		return -1;
	end = frame->offset + frame->len;
	if (ingress->id != frame->id)
		end = 0; /* userspace has deleted this stream's entry since the program looked it up */
	else if (!fits_final(ingress, frame, end))
		ingress->state = (struct subgroup_state){.field = SUBGROUP_BROKEN};
	if (end > ingress->next)
		note_apart(ingress, frame->offset > ingress->next ? frame->offset : ingress->next, end);
	__sync_lock_test_and_set(&ingress->lock, 0);
	return 0;
}

/* number of objects before the newest one for which the program knows whether they have arrived */
#define DATAGRAM_WINDOW 64

/* Reports whether this is the first datagram with this object. Userspace keeps only the first datagram of an object,
 * too.
 */
static __always_inline int is_first(struct subgroup_state *last, __u64 group, __u64 object)
{
	/* `behind` is the distance of an object before the newest one, `ahead` that of an object after the newest one.
	 * At most one of the two values is used. The other one may have wrapped around.
	 */
	__u64 behind = last->previous - 1 - object, ahead = object + 1 - last->previous;

	if (group < last->value || object == RELAY_UNKNOWN)
		return 0;
	if (group > last->value || object >= last->previous) {
		last->left = group > last->value || !last->previous || ahead > DATAGRAM_WINDOW ? 0
			     : ahead == DATAGRAM_WINDOW ? 1ULL << (DATAGRAM_WINDOW - 1)
							: last->left << ahead | 1ULL << (ahead - 1);
		last->value = group;
		last->previous = object + 1;
		return 1;
	}
	if (!behind || behind > DATAGRAM_WINDOW || last->left >> (behind - 1) & 1)
		return 0;
	last->left |= 1ULL << (behind - 1);
	return 1;
}

/* Decides whether an object that arrived as a datagram may be forwarded. */
enum relay_frame_outcome judge_datagram(struct relay_ingress *ingress, __u64 alias, __u64 group, __u64 object)
{
	int first;

	if (!ingress)
		return RELAY_FRAME_MALFORMED;
	if (__sync_lock_test_and_set(&ingress->lock, 1))
		return RELAY_FRAME_BUSY;
	first = ingress->id == alias && is_first(&ingress->state, group, object);
	__sync_lock_test_and_set(&ingress->lock, 0);
	return first ? RELAY_FRAME_GOOD : RELAY_FRAME_REPEATED;
}

/* Decides whether a frame of a stream may be forwarded. If so, `next` moves to the frame's end. */
enum relay_frame_outcome judge_frame(struct relay_ingress *ingress, __u32 index, const struct quic_buf *in,
				     const struct frame_stream *frame)
{
	enum relay_frame_outcome outcome;

	if (!ingress || !in || !frame)
		return RELAY_FRAME_MALFORMED;
	if (__sync_lock_test_and_set(&ingress->lock, 1))
		return RELAY_FRAME_BUSY;
	outcome = judge_locked(ingress, index, in, frame);
	__sync_lock_test_and_set(&ingress->lock, 0);
	return outcome;
}

#endif
