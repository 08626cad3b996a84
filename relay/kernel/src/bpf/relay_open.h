/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Streams that the program opens: the beginning of a publisher's stream is bound to an opening, an ingress with egresses that
 * userspace has prepared for whatever stream of the track comes next. Each egress opens its stream with the first copy.
 *
 * Whoever marks the publisher's stream in `streams` of the upstream first has it, the program or userspace, and for good:
 * nobody else opens streams for it.
 *
 * In a WebTransport session a stream begins with the session's preamble, which may come before anything else does: that it
 * has come is marked in `preambles`.
 */
#ifndef MILLRACE_RELAY_OPEN_H
#define MILLRACE_RELAY_OPEN_H

#include "relay_maps.h"
#include "subgroup.h"
#include "util.h"

#define UNIDIRECTIONAL 0x2 /* of a stream ID */
#define SEEN_BLOCK     5   /* log2 of the numbers in a word of a window */
#define SEEN_ATTEMPTS  4   /* to change a word of it that other CPUs change too */

/* Marks a number in a window of numbers seen, of so many words, a power of two. Not 0: it was marked before, or is too old to tell. */
static __always_inline int mark_in(__u64 *window, __u32 words, __u64 number)
{
	__u64 block = number >> SEEN_BLOCK, bit = 1ULL << (number & ((1 << SEEN_BLOCK) - 1));
	__u64 *word = &window[block & (words - 1)];

	for (int i = 0; i < SEEN_ATTEMPTS; i++) {
		__u64 old = READ_ONCE(*word);
		__s32 ahead = (__u32)(old >> 32) - (__u32)block;
		__u64 new = ahead ? block << 32 | bit : old | bit;

		if (ahead > 0 || new == old)
			return -1;
		if (__sync_val_compare_and_swap(word, old, new) == old)
			return 0;
	}
	return -1;
}

static __always_inline int mark_seen(__u64 *window, __u64 number)
{
	return mark_in(window, RELAY_SEEN, number);
}

/* Whether a number was marked, and not so long ago that others have its place. */
static __always_inline int is_seen(const __u64 *window, __u64 number)
{
	__u64 block = number >> SEEN_BLOCK, word = READ_ONCE(window[block & (RELAY_SEEN - 1)]);

	return word >> 32 == (__u32)block && word >> (number & ((1 << SEEN_BLOCK) - 1)) & 1;
}

/* Whether a number was marked, or may have been: others have its place. */
static __always_inline int may_be_seen(const __u64 *window, __u64 number)
{
	__u64 word = READ_ONCE(window[(number >> SEEN_BLOCK) & (RELAY_SEEN - 1)]);
	__s32 ahead = (__u32)(word >> 32) - (__u32)(number >> SEEN_BLOCK);

	return ahead > 0 || is_seen(window, number);
}

/* Notes that something of a stream without a slot has come. Userspace keeps those bytes, whatever comes with its beginning later,
 * so the stream is userspace's.
 */
int note_late(struct work *work, __u64 id)
{
	struct relay_upstream *upstream;
	__u32 key;

	if (!work || !(id & UNIDIRECTIONAL))
		return 0;
	key = work->arrival.upstream;
	upstream = bpf_map_lookup_elem(&upstreams, &key);
	if (upstream && !may_be_seen(upstream->late, id >> 2))
		mark_seen(upstream->late, id >> 2);
	return 0;
}

/* Whether a frame that was at the stream's beginning had the preamble and nothing else. */
static __always_inline int is_preamble(const struct frame_stream *frame)
{
	return frame->offset && !frame->len;
}

/* Whether the application's part of a stream of the peer begins with the frame, of which that part is left then. */
int find_beginning(const struct work *work, struct frame_stream *frame)
{
	struct relay_upstream *upstream;
	__u64 web;
	__u32 key;

	if (!work || !frame || !(frame->id & UNIDIRECTIONAL))
		return 0;
	web = work->arrival.web;
	if (frame->offset && frame->offset != web_stream_len(web))
		return 0;
	key = work->arrival.upstream;
	upstream = bpf_map_lookup_elem(&upstreams, &key);
	if (!upstream)
		return 0;
	if (frame->offset)
		return is_seen(upstream->preambles, frame->id >> 2);
	if (web_enter_stream(frame, work->in.bytes, web))
		return 0;
	if (is_preamble(frame))
		mark_seen(upstream->preambles, frame->id >> 2);
	return 1;
}

/* Reads what the front of a stream says. */
int read_head(const struct quic_buf *in, const struct frame_stream *frame, struct subgroup_head *head)
{
	if (!in || !frame || !head)
		return -1;
	head->is_read = !subgroup_read_head(in->bytes, frame->at, frame->len, head);
	return 0;
}

static __always_inline int is_behind(const struct subgroup_head *head, const struct relay_track *track)
{
	return head->group > track->group ||
	       (head->group == track->group && head->subgroup > track->subgroup);
}

/* The ingress has the stream's ID before the stream is marked: so userspace, which finds it marked, finds that too. */
static __always_inline enum relay_opening bind_locked(struct work *work, struct chunk *chunk,
						      const struct subgroup_head *head,
						      struct relay_track *track)
{
	struct relay_slot slot = {.id = chunk->frame.id, .upstream = work->arrival.upstream};
	struct relay_upstream *upstream = bpf_map_lookup_elem(&upstreams, &slot.upstream);
	struct relay_ingress *ingress;
	__u32 index, left;

	if (track->alias != head->alias || track->upstream != slot.upstream || !upstream)
		return RELAY_OPENING_NO_TRACK;
	if (may_be_seen(upstream->late, slot.id >> 2))
		return RELAY_OPENING_TAKEN;
	if (!is_behind(head, track))
		return RELAY_OPENING_ORDER;
	left = track->put - track->taken;
	index = track->openings[track->taken & (RELAY_OPENINGS - 1)];
	ingress = bpf_map_lookup_elem(&ingresses, &index);
	if (!left || !ingress) {
		track->missed++;
		return RELAY_OPENING_MISSED;
	}
	WRITE_ONCE(ingress->id, slot.id);
	ingress->next = chunk->frame.offset; /* behind the preamble */
	if (mark_seen(upstream->streams, slot.id >> 2)) {
		WRITE_ONCE(ingress->id, RELAY_UNBOUND);
		return RELAY_OPENING_TAKEN;
	}
	track->taken++;
	track->group = head->group;
	track->subgroup = head->subgroup;
	if (left - 1 <= track->low)
		work->fan.wakes = 1;
	if (bpf_map_update_elem(&slots, &slot, &index, BPF_NOEXIST))
		return RELAY_OPENING_FULL;
	chunk->ingress = index;
	return RELAY_OPENING_BOUND;
}

static __always_inline enum relay_opening find_opening(struct work *work, struct chunk *chunk,
						       const struct subgroup_head *head)
{
	struct relay_slot slot = {.id = head->alias, .upstream = work->arrival.upstream, .kind = RELAY_TRACK};
	enum relay_opening outcome;
	struct relay_track *track;
	__u32 *index, key;

	if (!head->is_read)
		return is_preamble(&chunk->frame) ? RELAY_OPENING_PREAMBLE : RELAY_OPENING_OTHER;
	index = bpf_map_lookup_elem(&slots, &slot);
	if (!index)
		return RELAY_OPENING_NO_TRACK;
	key = *index;
	track = bpf_map_lookup_elem(&tracks, &key);
	if (!track)
		return RELAY_OPENING_NO_TRACK;
	if (__sync_lock_test_and_set(&track->lock, 1))
		return RELAY_OPENING_BUSY;
	outcome = bind_locked(work, chunk, head, track);
	__sync_lock_test_and_set(&track->lock, 0);
	return outcome;
}

/* Finds an ingress for a stream that has none, if one was prepared. */
enum relay_opening bind_stream(struct work *work, struct chunk *chunk, const struct subgroup_head *head)
{
	enum relay_opening outcome;

	if (!work || !chunk || !head)
		return RELAY_OPENING_OTHER;
	outcome = find_opening(work, chunk, head);
	if (outcome != RELAY_OPENING_BOUND && outcome != RELAY_OPENING_PREAMBLE)
		note_late(work, chunk->frame.id);
	OPAQUE(outcome);
	if (outcome < RELAY_OPENING_OUTCOMES)
		add_to(&outcomes,
		       RELAY_OUTCOMES + RELAY_EGRESS_OUTCOMES + RELAY_FURTHER_RUNS + RELAY_FRAME_OUTCOMES +
			       outcome,
		       1);
	return outcome;
}

#endif
