/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Processes a received packet: finds its connection, decrypts it, walks its frames, and decides which of them may be
 * forwarded.
 *
 * Functions without `static`, here and in the other headers of the relay, are global functions. The verifier checks
 * each of them once rather than at each call, which keeps the program within the verifier's limits. In return, they
 * have to check their pointers for NULL.
 */
#ifndef MILLRACE_RELAY_INGRESS_H
#define MILLRACE_RELAY_INGRESS_H

#include "frames.h"
#include "quic.h"
#include "relay_frame.h"
#include "relay_judge.h"
#include "relay_keystream.h"
#include "relay_open.h"
#include "relay_trace.h"
#include "skb_udp.h"

/* quinn treats a packet number as a duplicate if it is further than this below the next expected number. */
#define NUMBERS_BEHIND 128
/* fewest packet bytes that `load` copies; every Ethernet frame and 1-RTT packet has more */
#define SHORTEST 14

enum relay_outcome find_packet(struct __sk_buff *skb, struct arrival *arrival)
{
	struct udp_packet packet = {};
	int bare;

	if (!arrival)
		return RELAY_MALFORMED;
	bare = is_bare(skb);
	switch (parse_udp_on(skb, bare, &packet)) {
	case PARSE_OK:
		break;
	case PARSE_NOT_UDP:
		return RELAY_NOT_UDP;
	case PARSE_FRAGMENT:
		return RELAY_FRAGMENT;
	default:
		return RELAY_MALFORMED;
	}
	if (!packet.destination_port ||
	    (packet.destination_port != config.ports[0] && packet.destination_port != config.ports[1] &&
	     packet.destination_port != config.ports[2] && packet.destination_port != config.ports[3]))
		return RELAY_OTHER_PORT;
	/* The interface has no link headers: a header is added for the copies, and removed before the packet is passed
	 * to userspace.
	 */
	if (bare) {
		if (bpf_skb_change_head(skb, ETHERNET_BYTES, 0))
			return RELAY_BUSY;
		packet.payload_offset += ETHERNET_BYTES;
	}
	switch (fan_find(skb, &packet, &arrival->frame)) {
	case FAN_FOUND:
		break;
	case FAN_SUPER_PACKET:
		return RELAY_SUPER_PACKET;
	case FAN_ODD_HEADERS:
		return RELAY_ODD_HEADERS;
	default:
		return RELAY_MALFORMED;
	}
	return RELAY_FORWARDED;
}

/* Copies bytes of the packet to memory. Not inlined, so that the compiler passes the bounds-checked register to the
 * helper.
 */
static __noinline int load(struct __sk_buff *skb, __u32 at, __u8 *to, __u32 bytes)
{
	if (bytes < SHORTEST)
		return -1;
	OPAQUE(bytes);
	if (bytes > FRAME_BYTES)
		return -1;
	return bpf_skb_load_bytes(skb, at, to, bytes);
}

/* Decides by first byte and size whether a QUIC packet can be decrypted here. */
static __always_inline enum relay_outcome check_size(__u8 first, __u32 packet_bytes)
{
	/* The fixed bit is ignored, because peers may grease it (RFC 9287). */
	if (first & QUIC_LONG_HEADER)
		return RELAY_LONG_HEADER;
	if (packet_bytes < SHORTEST)
		return RELAY_BAD_SIZE;
	return packet_bytes > QUIC_TEXT_MAX ? RELAY_TOO_LONG : RELAY_FORWARDED;
}

/* Copies the whole Ethernet frame, which `restore` needs, and the QUIC packet, which is decrypted in place. Not
 * inlined: Linux 6.1 allows 512 bytes of stack for a whole call chain, and this function's stack must not add to that
 * of the copies.
 */
static __noinline enum relay_outcome load_packet(struct __sk_buff *skb, struct work *work)
{
	__u32 packet_at = work->arrival.frame.packet_at;
	__u32 frame_bytes = work->arrival.frame.frame_bytes, packet_bytes = work->arrival.frame.packet_bytes;
	enum relay_outcome outcome;
	__u8 first;

	if (bpf_skb_load_bytes(skb, packet_at, &first, 1))
		return RELAY_BAD_SIZE;
	outcome = check_size(first, packet_bytes);
	if (outcome)
		return outcome;
	if (frame_bytes > FRAME_BYTES)
		return RELAY_TOO_LONG;
	if (load(skb, 0, work->frame, frame_bytes) ||
	    load(skb, packet_at, work->in.bytes + QUIC_AT, packet_bytes))
		return RELAY_MALFORMED;
	return RELAY_FORWARDED;
}

/* Finds the connection by the destination connection ID, which has a fixed length because this relay chose it. */
static __always_inline enum relay_outcome find_connection(struct work *work)
{
	struct relay_id id = {};
	__u32 *index;

	for (int i = 0; i < RELAY_ID_MAX; i++)
		id.bytes[i] = i < config.id_bytes ? work->in.bytes[QUIC_AT + 1 + i] : 0;
	index = bpf_map_lookup_elem(&ids, &id);
	if (!index)
		return RELAY_UNKNOWN_ID;
	if (*index & RELAY_SUBSCRIBER) {
		work->arrival.downstream = *index & ~RELAY_SUBSCRIBER;
		return RELAY_FROM_SUBSCRIBER;
	}
	work->arrival.upstream = *index;
	trace_arrival(work);
	return RELAY_FORWARDED;
}

/* Raises the next expected packet number, unless another CPU has raised it further. */
static __always_inline void raise_expected(struct relay_upstream *upstream, __u64 number)
{
	for (int i = 0; i < SEEN_ATTEMPTS; i++) {
		__u64 old = READ_ONCE(upstream->expected);

		if (old > number || __sync_val_compare_and_swap(&upstream->expected, old, number + 1) == old)
			return;
	}
}

/* Returns the keys of any installed generation, for removing header protection: that key is the same in all generations
 * (RFC 9001, section 6).
 */
static __always_inline struct quic_keys *any_open_keys(const struct relay_upstream *upstream, __u32 index)
{
	__u32 key = 2 * index + !READ_ONCE(upstream->generations[0]);

	return bpf_map_lookup_elem(&open_keys, &key);
}

/* Decrypts the packet, and sets `walk` to its frames. */
enum relay_outcome open_packet(struct work *work, struct frame_walk *walk)
{
	struct quic_extent extent = {.header_at = QUIC_AT};
	struct relay_upstream *upstream;
	struct quic_short header;
	struct quic_keys *keys;
	__u32 index, phase, generation;
	__u64 number;

	/* The key phase can be read only after header protection is removed, so keys are looked up twice. */
	if (!work || !walk)
		return RELAY_MALFORMED;
	index = work->arrival.upstream;
	upstream = bpf_map_lookup_elem(&upstreams, &index);
	if (!upstream)
		return RELAY_UNKNOWN_ID;
	keys = any_open_keys(upstream, index);
	if (!keys)
		return RELAY_NO_KEYS;
	if (quic_unprotect(keys, &work->in, QUIC_AT, config.id_bytes, work->arrival.frame.packet_bytes,
			   &header))
		return RELAY_BAD_SIZE;
	phase = !!(header.first & QUIC_KEY_PHASE);
	generation = READ_ONCE(upstream->generations[phase]);
	if (!generation--)
		return RELAY_NO_KEYS;
	index = 2 * index + phase;
	keys = bpf_map_lookup_elem(&open_keys, &index);
	if (!keys)
		return RELAY_NO_KEYS;
	/* The program's first run for a packet stores the packet number in the cursor, the state that is kept between
	 * runs. Later runs for the same packet take the number from there, and skip the replay check, which would
	 * report the packet as a replay.
	 */
	number = work->cursor.id ? work->cursor.kept.number
				 : quic_number(READ_ONCE(upstream->expected), &header);
	trace_number(&work->arrival, number);
	extent.header_bytes = 1 + config.id_bytes + header.number_bytes;
	extent.text_bytes = work->arrival.frame.packet_bytes - extent.header_bytes - QUIC_TAG;
	if (open_text(upstream, keys, number | (__u64)generation << RELAY_NUMBER_BITS, work, &extent))
		return RELAY_NOT_AUTHENTIC;
	/* quinn drops packets whose number is more than NUMBERS_BEHIND below the expected one as duplicates, so their
	 * bytes must not be forwarded either.
	 */
	if (!work->cursor.id && (number + NUMBERS_BEHIND < READ_ONCE(upstream->expected) ||
				 mark_in(upstream->seen, RELAY_NUMBERS, number)))
		return RELAY_REPLAYED;
	work->cursor.kept.number = number;
	work->arrival.opens = READ_ONCE(upstream->tracks);
	work->arrival.web = READ_ONCE(upstream->web);
	raise_expected(upstream, number);
	/* RFC 9000, section 17.3.1: a packet with reserved bits set is an error, but only after its authentication. */
	if (header.first & QUIC_RESERVED)
		return RELAY_BAD_FRAMES;
	*walk = (struct frame_walk){.at = QUIC_AT + extent.header_bytes};
	walk->end = walk->at + extent.text_bytes;
	return RELAY_FORWARDED;
}

enum frame_step step_frame(const struct quic_buf *in, struct frame_walk *walk, struct frame_stream *stream)
{
	return in && walk && stream ? frame_next(walk, in->bytes, stream) : FRAME_BAD;
}

struct walk_loop {
	struct work *work;
	struct frame_walk walk;
	__u32 ended;
	__u32 pad;
};

/* Records the range of stream bytes in a frame that this program does not check, because only userspace forwards it. */
static __always_inline void leave_chunk(struct work *work, const __u32 *index,
					const struct frame_stream *frame)
{
	__u32 key = index ? *index : RELAY_END;

	if (index)
		leave_frame(bpf_map_lookup_elem(&ingresses, &key), frame);
	else
		note_late(work, frame->id);
}

/* Collects a frame for the fan-out if its stream or track is set up for forwarding (has a slot), or may be set up now.
 * Later runs of the same packet collect the frames that its first run found good.
 */
__noinline int take_chunk(struct work *work, const struct chunk *found)
{
	struct relay_slot slot = {};
	struct chunk *chunk;
	__u32 *ingress;
	__u32 ordinal;
	int good;

	if (!work || !found)
		return 0;
	slot.id = found->frame.id;
	slot.upstream = work->arrival.upstream;
	slot.kind = found->kind;
	ingress = bpf_map_lookup_elem(&slots, &slot);
	ordinal = work->fan.ordinal++;
	good = ordinal < 64 && work->cursor.kept.good >> (ordinal & 63) & 1;
	/* Userspace has to forward frames of streams and tracks that are not set up for forwarding here, so the packet
	 * wakes it.
	 */
	if (work->cursor.id ? !good : !ingress && !(work->arrival.opens && found->begins)) {
		work->fan.wakes = 1;
		if (!work->cursor.id && found->kind == RELAY_STREAM && !found->begins)
			note_late(work, found->frame.id);
		return 0;
	}
	/* The packet has more frames than one run handles, so the rest is left to userspace. */
	if (work->fan.chunks >= CHUNKS) {
		work->fan.left_over = 1;
		if (!work->cursor.id && found->kind == RELAY_STREAM)
			leave_chunk(work, ingress, &found->frame);
		return 0;
	}
	chunk = &work->chunks[work->fan.chunks & (CHUNKS - 1)];
	*chunk = *found;
	chunk->ingress = ingress ? *ingress : RELAY_END;
	chunk->ordinal = ordinal;
	work->fan.chunks++;
	return 0;
}

/* Parses the object in a DATAGRAM frame. `web` is the ID of the publisher's WebTransport session, or WEB_BARE without
 * one.
 */
int read_datagram(const struct quic_buf *in, const struct frame_stream *frame, __u64 web, struct chunk *chunk)
{
	struct object_datagram datagram = {};
	struct frame_stream object;

	if (!in || !frame || !chunk)
		return -1;
	object = *frame;
	if (web_enter_datagram(&object, in->bytes, web) ||
	    object_datagram(in->bytes, object.at, object.len, &datagram))
		return -1;
	*chunk = (struct chunk){
		.frame = {.id = datagram.alias, .offset = datagram.group, .at = datagram.rest_at},
		.object = datagram.object,
		.type = datagram.type,
		.priority = datagram.priority,
		.kind = RELAY_DATAGRAMS,
	};
	chunk->frame.len = frame->at + frame->len - datagram.rest_at;
	return 0;
}

/* Reports whether the next frame is one that only userspace handles: anything but STREAM, DATAGRAM and PADDING. */
static __always_inline int is_other(const struct frame_walk *walk, __u8 type)
{
	return walk->at < walk->end && type != FRAME_PADDING && type != FRAME_DATAGRAM &&
	       type != FRAME_DATAGRAM_LEN && (type < FRAME_STREAM || type > FRAME_STREAM_LAST);
}

/* One step of the loop over the frames of a packet. */
static long walk_step(__u32 index, struct walk_loop *loop)
{
	struct frame_stream frame = {};
	struct chunk chunk = {};
	enum frame_step step;

	if (is_other(&loop->walk, loop->work->in.bytes[loop->walk.at & FRAMES_MASK]))
		loop->work->fan.wakes = 1;
	step = step_frame(&loop->work->in, &loop->walk, &frame);
	if (step == FRAME_IS_STREAM && (frame.len || frame.fin)) {
		chunk.frame = frame;
		chunk.begins = find_beginning(loop->work, &chunk.frame);
		take_chunk(loop->work, &chunk);
	} else if (step == FRAME_IS_DATAGRAM &&
		   !read_datagram(&loop->work->in, &frame, loop->work->arrival.web, &chunk)) {
		take_chunk(loop->work, &chunk);
	} else if (step == FRAME_IS_STREAM || step == FRAME_IS_DATAGRAM) {
		loop->work->fan.wakes = 1;
	}
	loop->ended = step == FRAME_END;
	return step == FRAME_END || step == FRAME_BAD;
}

/* Result for a frame whose stream or track is not set up for forwarding (has no slot), so that the program does not
 * forward it. The map `outcomes` does not count such frames.
 */
#define NO_SLOT RELAY_FRAME_OUTCOMES

static __always_inline enum relay_frame_outcome count_frame(enum relay_frame_outcome outcome)
{
	OPAQUE(outcome);
	if (outcome < RELAY_FRAME_OUTCOMES)
		add_to(&outcomes, RELAY_OUTCOMES + RELAY_EGRESS_OUTCOMES + RELAY_FURTHER_RUNS + outcome, 1);
	return outcome;
}

/* Decides whether a collected frame may be forwarded, and finds the first subscriber to copy it to. */
static __always_inline enum relay_frame_outcome judge_chunk(struct work *work, struct chunk *chunk,
							    struct subgroup_head *head)
{
	struct relay_ingress *ingress;
	__u32 key;

	chunk->egress = RELAY_END;
	head->is_read = 0;
	if (chunk->begins)
		read_head(&work->in, &chunk->frame, head);
	if (chunk->ingress == RELAY_END && !work->cursor.id && bind_stream(work, chunk, head))
		return NO_SLOT;
	key = chunk->ingress;
	ingress = bpf_map_lookup_elem(&ingresses, &key);
	if (!ingress)
		return RELAY_FRAME_GOOD;
	chunk->egress = READ_ONCE(ingress->first);
	/* The packet's first run has checked the datagram already. A second check would report it as repeated. */
	if (chunk->kind != RELAY_STREAM && work->cursor.id)
		return RELAY_FRAME_GOOD;
	if (chunk->kind != RELAY_STREAM)
		return count_frame(
			judge_datagram(ingress, chunk->frame.id, chunk->frame.offset, chunk->object));
	if (ingress->id != chunk->frame.id || ingress->upstream != work->arrival.upstream) {
		/* userspace has ended the forwarding of this stream since the lookup */
		chunk->egress = RELAY_END;
		return work->cursor.id ? RELAY_FRAME_GOOD : RELAY_FRAME_BUSY;
	}
	if (work->cursor.id)
		return RELAY_FRAME_GOOD;
	return count_frame(judge_frame(ingress, chunk->ingress, &work->in, &chunk->frame));
}

/* Decides whether the collected frame at index `i` may be forwarded. Good frames are moved to the front of `chunks`.
 */
__noinline enum relay_frame_outcome keep_chunk(struct work *work, __u32 i)
{
	enum relay_frame_outcome outcome;
	struct subgroup_head *head;
	struct chunk *chunk;
	__u32 kept;

	if (!work)
		return NO_SLOT;
	i &= CHUNKS - 1;
	chunk = &work->chunks[i];
	head = &work->heads[i];
	outcome = judge_chunk(work, chunk, head);
	if (work->cursor.id && !(work->cursor.kept.opens >> i & 1))
		head->is_read = 0;
	if (outcome || chunk->ordinal >= 64) {
		work->fan.wakes = 1;
		return outcome;
	}
	kept = work->fan.kept++ & (CHUNKS - 1);
	work->fan.good |= 1ULL << (chunk->ordinal & 63);
	work->fan.opens |= (head->is_read & 1) << kept;
	if (kept < i) {
		work->chunks[kept] = *chunk;
		work->heads[kept] = *head;
	}
	return outcome;
}

/* Keeps only the frames that may be forwarded. If one is malformed, none is kept, because userspace will close the
 * connection. The number of good frames is counted in memory, so that the verifier does not track a state for each
 * number.
 */
enum relay_outcome judge_frames(struct work *work)
{
	int has_slot = 0;

	if (!work)
		return RELAY_DECLINED;
	for (__u32 i = 0; i < CHUNKS; i++) {
		enum relay_frame_outcome outcome;

		if (i >= work->fan.chunks)
			break;
		outcome = keep_chunk(work, i);
		if (outcome == RELAY_FRAME_MALFORMED)
			return RELAY_BAD_STREAM;
		has_slot |= outcome != NO_SLOT;
	}
	work->fan.chunks = work->fan.kept;
	return work->fan.kept || !has_slot ? RELAY_FORWARDED : RELAY_DECLINED;
}

/* Decrypts the packet, collects its frames and checks them, and selects the first copy to make. */
static __always_inline enum relay_outcome walk_frames(struct work *work)
{
	struct walk_loop loop = {.work = work};
	enum relay_outcome outcome = open_packet(work, &loop.walk);

	if (outcome)
		return outcome;
	work->fan = (struct fan){};
	bpf_loop(FRAMES_MAX, walk_step, &loop, 0);
	if (!loop.ended)
		return RELAY_BAD_FRAMES;
	outcome = judge_frames(work);
	if (outcome)
		return outcome;
	if (work->cursor.id) {
		work->fan.chunk = work->cursor.kept.chunk;
		work->fan.egress = work->chunks[work->cursor.kept.chunk & (CHUNKS - 1)].egress;
		if (work->fan.egress != RELAY_END)
			work->fan.egress = work->cursor.at;
	} else {
		work->fan.egress = work->chunks[0].egress;
	}
	return work->fan.chunk < work->fan.chunks ? RELAY_FORWARDED : RELAY_NO_SLOT;
}

#endif
