/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Opens subscribers' streams for a publisher's stream that begins. The publisher's stream is bound to an opening: an
 * ingress with egresses, which userspace has prepared for the next stream of the track. Each egress opens its
 * subscriber's stream with the first copy.
 *
 * The program and userspace compete for the publisher's stream. The first one to mark it in `streams` of the upstream
 * owns it for good, and the other one opens no streams for it.
 *
 * In a WebTransport session a stream begins with the session's preamble, which may arrive in a packet of its own. The
 * program then marks the stream in `preambles`.
 */
#ifndef MILLRACE_RELAY_OPEN_H
#define MILLRACE_RELAY_OPEN_H

#include "relay_maps.h"
#include "subgroup.h"
#include "util.h"

#define UNIDIRECTIONAL 0x2 /* bit that is set in IDs of unidirectional streams, RFC 9000, section 2.1 */
/* log2 of how many stream or packet numbers one word of a sliding bitmap (window) covers */
#define SEEN_BLOCK    5
#define SEEN_ATTEMPTS 4 /* the most compare-and-exchange attempts to change a word of a sliding bitmap */

/* Marks a stream or packet number as seen, in a sliding bitmap (window) of `words` words (a power of two). Returns an
 * error (not 0) if the number was marked before, or is older than the window.
 */
static __always_inline int mark_in(__u64 *window, __u32 words, __u64 number)
{
	__u64 block = number >> SEEN_BLOCK, bit = 1ULL << (number & ((1 << SEEN_BLOCK) - 1));
	__u64 *word = &window[block & (words - 1)];

	for (int i = 0; i < SEEN_ATTEMPTS; i++) {
		__u64 old = READ_ONCE(*word);
		/* The high half of a word is its block number: which 32 numbers it covers. Newer blocks replace older
		 * ones, never the reverse.
		 */
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

/* Reports whether a stream number is marked in a sliding bitmap (window). Returns false if newer numbers have replaced
 * the word that covered it.
 */
static __always_inline int is_seen(const __u64 *window, __u64 number)
{
	__u64 block = number >> SEEN_BLOCK, word = READ_ONCE(window[block & (RELAY_SEEN - 1)]);

	return word >> 32 == (__u32)block && word >> (number & ((1 << SEEN_BLOCK) - 1)) & 1;
}

/* Reports whether a stream number is marked in a sliding bitmap (window), or may have been marked before newer numbers
 * replaced its word.
 */
static __always_inline int may_be_seen(const __u64 *window, __u64 number)
{
	__u64 word = READ_ONCE(window[(number >> SEEN_BLOCK) & (RELAY_SEEN - 1)]);
	__s32 ahead = (__u32)(word >> 32) - (__u32)(number >> SEEN_BLOCK);

	return ahead > 0 || is_seen(window, number);
}

/* Records that bytes have arrived of a stream that the program does not forward. Userspace keeps these bytes, even if a
 * different version arrives later, so only userspace may forward the stream.
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

/* Reports whether a frame at the beginning of a stream has only the WebTransport preamble. Call after
 * `web_enter_stream`, which moves the offset past the preamble.
 */
static __always_inline int is_preamble(const struct frame_stream *frame)
{
	return frame->offset && !frame->len;
}

/* Reports whether the application's bytes of a peer's stream begin in this frame. If so, removes the WebTransport
 * preamble from the frame.
 */
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

/* Parses the SUBGROUP_HEADER at the beginning of a stream. */
int read_head(const struct quic_buf *in, const struct frame_stream *frame, struct subgroup_head *head)
{
	if (!in || !frame || !head)
		return -1;
	head->is_read = !subgroup_read_head(in->bytes, frame->at, frame->len, head);
	return 0;
}

/* Reports whether a subgroup is later than the newest subgroup of its track. */
static __always_inline int is_behind(const struct subgroup_head *head, const struct relay_track *track)
{
	return head->group > track->group ||
	       (head->group == track->group && head->subgroup > track->subgroup);
}

/* Binds a stream to the track's next opening: an entry (ingress) that userspace has prepared. The caller holds the
 * track's lock. The stream's ID is written to the ingress before the stream's bit in `streams` is set, so that
 * userspace finds the ID whenever it finds the bit set.
 */
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
	/* the program counts this stream's offsets from the end of the WebTransport preamble */
	ingress->next = chunk->frame.offset;
	if (mark_seen(upstream->streams, slot.id >> 2)) {
		WRITE_ONCE(ingress->id, RELAY_UNBOUND);
		return RELAY_OPENING_TAKEN;
	}
	track->taken++;
	track->group = head->group;
	track->subgroup = head->subgroup;
	if (left - 1 <= track->low)
		work->fan.wakes = 1;
	/* The entry (ingress) that userspace has prepared for a new stream is used up even if the map `slots` is full.
	 * Userspace then forwards the stream.
	 */
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

/* Binds a stream that has no entry for forwarding (ingress) to an opening: an ingress that userspace has prepared for
 * the track's next stream.
 */
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
