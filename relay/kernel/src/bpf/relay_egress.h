/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Sends copies of the frames of forwarded streams and datagrams. Each copy is admitted, numbered, encrypted and sent
 * for one egress (a subscriber of the stream or track).
 */
#ifndef MILLRACE_RELAY_EGRESS_H
#define MILLRACE_RELAY_EGRESS_H

#include "relay_frame.h"
#include "relay_ingress.h"
#include "relay_trace.h"

#define MOST_CREDIT 0xffffffffU /* the most MAX_DATA credit that one copy may take, in bytes */
/* Returns the MAX_DATA credit that a copy takes. The peer counts the largest offset of each stream (RFC 9000, section
 * 4.1), so bytes before the copy count, too, even if they were left to userspace. Bytes that userspace has sent by now
 * are counted twice.
 */
static __always_inline __u32 credit_of(const struct relay_egress *egress, const struct egress_packet *packet)
{
	__u64 end = packet->offset + packet->len, counted = READ_ONCE(egress->counted);
	__u64 credit = end > counted ? end - counted : 0;

	return credit > MOST_CREDIT ? MOST_CREDIT : credit;
}

/* Reports whether the egress (one subscriber's copy) has no stream yet. Must not be called for the egress of a track's
 * datagrams, whose `id` is a track alias.
 */
static __always_inline int is_unopened(__u64 id)
{
	return id >= RELAY_CLOSED;
}

/* Finds the stream that a copy is sent on. If the copy has to open the stream, its ID is that of the downstream
 * connection's next stream.
 */
static __always_inline enum relay_egress_outcome
find_stream(const struct relay_downstream *downstream, const struct relay_egress *egress,
	    const struct chunk *chunk, const struct subgroup_head *head, struct egress_packet *packet)
{
	packet->id = READ_ONCE(egress->id);
	packet->opens = chunk->kind == RELAY_STREAM && is_unopened(packet->id);
	if (!packet->opens)
		return RELAY_EGRESS_SENT;
	if (packet->id != RELAY_UNOPENED || !chunk->begins || !head->is_read)
		return RELAY_EGRESS_UNOPENED;
	packet->streams = READ_ONCE(downstream->streams);
	if ((__u32)packet->streams >= packet->streams >> 32)
		return RELAY_EGRESS_STREAM_LIMIT;
	packet->id = (packet->streams & 0xffffffff) << 2 | downstream->stream_bits;
	return RELAY_EGRESS_SENT;
}

/* Computes the sizes of a copy that opens a stream. The stream begins with the header of the subscriber's WebTransport
 * session, if it has one. The subscriber's track alias replaces the publisher's, padded to the same length if it is
 * shorter, as millrace-moq's SubgroupHeader::encode_padded does.
 */
static __always_inline void measure_front(struct egress_packet *packet, const struct relay_egress *egress,
					  const struct subgroup_head *head)
{
	__u32 shortest = vi64_len(egress->alias), skipped = 1 + head->alias_bytes;

	packet->alias_bytes = shortest > head->alias_bytes ? shortest : head->alias_bytes;
	packet->data_at += skipped;
	packet->data_bytes -= skipped;
	packet->len = web_stream_len(packet->web) + 1 + packet->alias_bytes + packet->data_bytes;
	packet->offset = 0;
	if (head->priority >= 0)
		packet->level = (egress->level & 0xff00) | (head->priority & 0xff);
}

/* Computes offset, credit and sizes of a STREAM frame. The offset on the subscriber's stream is the offset on the
 * publisher's stream plus `shift`.
 */
static __always_inline void measure_stream(struct egress_packet *packet, const struct relay_egress *egress,
					   const struct frame_stream *frame, const struct subgroup_head *head)
{
	packet->offset = frame->offset + egress->shift;
	packet->len = frame->len;
	if (packet->opens)
		measure_front(packet, egress, head);
	packet->credit = credit_of(egress, packet);
	packet->fin = frame->fin;
	packet->size = 1 + varint_len(packet->id) + (packet->offset ? varint_len(packet->offset) : 0) +
		       varint_len(packet->len) + packet->len;
}

static __always_inline void measure_datagram(struct egress_packet *packet, const struct relay_egress *egress,
					     const struct chunk *chunk)
{
	packet->offset = chunk->frame.offset;
	packet->len = web_datagram_len(packet->web) + 1 + vi64_len(egress->id) + chunk->frame.len;
	packet->credit = 0;
	packet->fin = 0;
	packet->size = 1 + varint_len(packet->len) + packet->len;
	if (chunk->priority >= 0)
		packet->level = (egress->level & 0xff00) | (chunk->priority & 0xff);
}

int measure(struct egress_packet *packet, const struct relay_egress *egress, const struct relay_path *path,
	    const struct chunk *chunk, const struct subgroup_head *head)
{
	if (!packet || !egress || !path || !chunk || !head)
		return -1;
	packet->data_at = chunk->frame.at;
	packet->data_bytes = chunk->frame.len;
	packet->level = egress->level;
	if (chunk->kind == RELAY_STREAM)
		measure_stream(packet, egress, &chunk->frame, head);
	else
		measure_datagram(packet, egress, chunk);
	packet->frame_bytes = packet->size;
	/* Short header: first byte, connection ID, and a packet number of 4 bytes (RFC 9000, section 17.3.1) */
	packet->header_bytes = 1 + path->id_bytes + 4;
	packet->size += packet->header_bytes + QUIC_TAG;
	return 0;
}

enum relay_egress_outcome find_route(struct __sk_buff *skb, struct bpf_fib_lookup *route,
				     const struct net_path *path, __u32 size)
{
	if (!route || !path)
		return RELAY_EGRESS_NO_ROUTE;
	switch (fan_route(skb, route, path, size)) {
	case FAN_WAY:
		return RELAY_EGRESS_SENT;
	case FAN_NO_NEIGHBOUR:
		return RELAY_EGRESS_NO_NEIGHBOUR;
	case FAN_TOO_LARGE:
		return RELAY_EGRESS_TOO_LARGE;
	default:
		return RELAY_EGRESS_NO_ROUTE;
	}
}

/* Adds `amount` to the total of sent bytes, then compares the total with its limit. Userspace lowers a limit first and
 * reads the total afterwards. Either the program sees the lower limit, or userspace sees the larger total.
 */
static __always_inline int take_credit(__u64 *total, const __u64 *limit, __u64 amount)
{
	if (__sync_fetch_and_add(total, amount) + amount <= READ_ONCE(*limit))
		return 0;
	__sync_fetch_and_add(total, -amount);
	return -1;
}

/* Checks priority, stream credit, congestion window and connection credit of a copy. The last two checks reserve bytes,
 * which have to be released if a later step fails.
 */
static __always_inline enum relay_egress_outcome admit(struct relay_downstream *downstream,
						       const struct relay_egress *egress,
						       const struct egress_packet *packet)
{
	if (packet->level >= READ_ONCE(downstream->waiting))
		return RELAY_EGRESS_BEHIND;
	if (egress->kind == RELAY_STREAM && packet->offset + packet->len > READ_ONCE(egress->max_offset))
		return RELAY_EGRESS_STREAM_CREDIT;
	if (take_credit(&downstream->bytes, &downstream->max_bytes, packet->size))
		return RELAY_EGRESS_WINDOW;
	if (!packet->credit || !take_credit(&downstream->data, &downstream->max_data, packet->credit))
		return RELAY_EGRESS_SENT;
	__sync_fetch_and_add(&downstream->bytes, -(__u64)packet->size);
	return RELAY_EGRESS_DATA_CREDIT;
}

static __always_inline void give_back(struct relay_downstream *downstream, const struct egress_packet *packet)
{
	__sync_fetch_and_add(&downstream->bytes, -(__u64)packet->size);
	__sync_fetch_and_add(&downstream->data, -(__u64)packet->credit);
}

/* Reports whether the send keys of the generation are installed. `generations` has an entry for each key phase: the
 * generation of its keys plus one.
 */
static __always_inline int has_keys(const struct relay_downstream *downstream, __u32 generation)
{
	return READ_ONCE(downstream->generations[generation & 1]) == generation + 1;
}

int fill_entry(struct relay_forwarded *entry, const struct relay_egress *egress,
	       const struct egress_packet *packet, const struct chunk *chunk, __u64 now)
{
	if (!entry || !egress || !packet || !chunk)
		return -1;
	*entry = (struct relay_forwarded){
		.time_ns = now,
		.number = packet->word & NUMBER_MASK,
		.tag = egress->tag,
		.id = packet->id,
		.offset = packet->offset,
		.object = chunk->kind == RELAY_STREAM ? packet->credit : chunk->object,
		.downstream = egress->downstream,
		.epoch = egress->epoch,
		.len = packet->len,
		.size = packet->size,
		.generation = packet->word >> RELAY_NUMBER_BITS,
		.fin = packet->fin,
		.kind = chunk->kind,
	};
	return 0;
}

/* Opens a subscriber's stream, with the stream ID that the packet was built for. Fails if userspace changes
 * `egress->id` or `downstream->streams` first.
 */
int open_stream(struct relay_downstream *downstream, struct relay_egress *egress, struct work *work)
{
	__u32 at;

	if (!downstream || !egress || !work ||
	    __sync_val_compare_and_swap(&egress->id, RELAY_UNOPENED, RELAY_OPENING) != RELAY_UNOPENED)
		return -1;
	/* If the stream ID was used for another stream meanwhile, this subscriber's stream is again marked as not open,
	 * so that a later run or userspace can open it.
	 */
	if (__sync_val_compare_and_swap(&downstream->streams, work->packet.streams,
					work->packet.streams + 1) != work->packet.streams) {
		__sync_val_compare_and_swap(&egress->id, RELAY_OPENING, RELAY_UNOPENED);
		return -1;
	}
	at = work->fan.chunk & (CHUNKS - 1);
	egress->upstream_id = work->chunks[at].frame.id;
	egress->shift = (__u64)web_stream_len(work->packet.web) + work->packet.alias_bytes -
			work->chunks[at].frame.offset - work->heads[at].alias_bytes;
	egress->group = work->heads[at].group;
	egress->level = work->packet.level;
	__sync_val_compare_and_swap(&egress->id, RELAY_OPENING, work->packet.id);
	return 0;
}

/* Draws a packet number, and registers the packet with userspace in a ring buffer. Registration precedes sending, so
 * that no acknowledgement can arrive for an unregistered packet. Space in the ring buffer is reserved first, because
 * userspace would never learn of a number without a registration. Until the registration is submitted, userspace cannot
 * read later ones of other CPUs, so little may happen in between.
 */
static __always_inline enum relay_egress_outcome draw_number(struct relay_downstream *downstream,
							     struct relay_egress *egress,
							     const struct chunk *chunk, struct work *work)
{
	struct egress_packet *packet = &work->packet;
	__u64 now = bpf_ktime_get_ns();
	struct relay_forwarded *entry;

	if (!has_keys(downstream, READ_ONCE(downstream->number) >> RELAY_NUMBER_BITS))
		return RELAY_EGRESS_NO_KEYS;
	entry = bpf_ringbuf_reserve(&forwarded, sizeof(*entry), 0);
	if (!entry)
		return RELAY_EGRESS_RING_FULL;
	packet->word = __sync_fetch_and_add(&downstream->number, 1);
	/* The key generation may have changed after the first check for keys and before the packet number was drawn. */
	if (!has_keys(downstream, packet->word >> RELAY_NUMBER_BITS)) {
		bpf_ringbuf_discard(entry, BPF_RB_NO_WAKEUP);
		return RELAY_EGRESS_NO_KEYS;
	}
	if (packet->opens && open_stream(downstream, egress, work)) {
		bpf_ringbuf_discard(entry, BPF_RB_NO_WAKEUP);
		return RELAY_EGRESS_UNOPENED;
	}
	fill_entry(entry, egress, packet, chunk, now);
	bpf_ringbuf_submit(entry, BPF_RB_NO_WAKEUP);
	return RELAY_EGRESS_SENT;
}

static __always_inline void put_stream_header(__u8 *end, const struct egress_packet *packet)
{
	__u32 type = FRAME_STREAM | FRAME_STREAM_LEN | (packet->fin ? FRAME_STREAM_FIN : 0) |
		     (packet->offset ? FRAME_STREAM_OFF : 0);
	__u32 bytes = varint_put_before(end, packet->len);

	if (packet->offset)
		bytes += varint_put_before(end - bytes, packet->offset);
	bytes += varint_put_before(end - bytes, packet->id);
	varint_put_before(end - bytes, type);
}

/* Writes the header of a STREAM frame, and the first bytes of the stream: WebTransport header, stream type and track
 * alias.
 */
static __always_inline void put_front(__u8 *end, const struct relay_egress *egress,
				      const struct egress_packet *packet, __u8 type)
{
	__u32 bytes = packet->alias_bytes;

	if (bytes < 1 || bytes > 9)
		return; /* never true; the verifier needs this bound */
	vi64_put_long_before(end, egress->alias, bytes);
	end -= 1 + bytes;
	*end = type;
	put_stream_header(end - web_put_stream_before(end, packet->web), packet);
}

/* Writes the header of a DATAGRAM frame, and the parts of the object datagram that differ for each subscriber:
 * WebTransport header, datagram type and track alias.
 */
static __always_inline void put_datagram_header(__u8 *end, const struct relay_egress *egress,
						const struct egress_packet *packet, __u32 type)
{
	__u32 bytes = vi64_put_before(end, egress->id);

	bytes += vi64_put_before(end - bytes, type & OBJECT_KNOWN);
	bytes += web_put_datagram_before(end - bytes, packet->web);
	bytes += varint_put_before(end - bytes, packet->len);
	varint_put_before(end - bytes, FRAME_DATAGRAM_LEN);
}

/* Writes the frame's header in front of the data, and returns the header's position in the packet buffer. The bytes
 * that it overwrites were parsed before. Returns 0 if the position is out of range, which never happens but which the
 * verifier cannot exclude.
 */
static __always_inline __u32 put_frame_header(struct quic_buf *in, const struct relay_egress *egress,
					      const struct egress_packet *packet, const struct chunk *chunk,
					      __u8 type)
{
	__u32 data_at = packet->data_at;

	/* OPAQUE keeps the compiler from removing the check, which the verifier needs. */
	OPAQUE(data_at);
	if (data_at < QUIC_AT || data_at > FRAMES_MASK)
		return 0;
	if (packet->opens)
		put_front(in->bytes + data_at, egress, packet, type);
	else if (chunk->kind == RELAY_STREAM)
		put_stream_header(in->bytes + data_at, packet);
	else
		put_datagram_header(in->bytes + data_at, egress, packet, chunk->type);
	return data_at + packet->data_bytes - packet->frame_bytes;
}

/* Writes the QUIC headers of the packet and of its frame. Sets `extent` to the part of the packet that is to be
 * encrypted.
 */
int put_packet(struct work *work, const struct relay_egress *egress, const struct relay_path *path,
	       struct quic_extent *extent)
{
	__u8 *header;
	__u32 id_bytes;

	if (!work || !egress || !path || !extent || path->id_bytes > RELAY_ID_MAX)
		return -1;
	id_bytes = path->id_bytes;
	header = work->out.bytes + QUIC_AT;
	header[0] = QUIC_FIXED_BIT | QUIC_NUMBER_BYTES |
		    (work->packet.word >> RELAY_NUMBER_BITS & 1 ? QUIC_KEY_PHASE : 0);
	__builtin_memcpy(header + 1, path->id, RELAY_ID_MAX);
	store32(header + 1 + id_bytes, __builtin_bswap32(work->packet.word));
	*extent = (struct quic_extent){
		.header_at = QUIC_AT,
		.header_bytes = work->packet.header_bytes,
		.plain_at = put_frame_header(&work->in, egress, &work->packet,
					     &work->chunks[work->fan.chunk & (CHUNKS - 1)],
					     work->heads[work->fan.chunk & (CHUNKS - 1)].type),
		.text_bytes = work->packet.size - work->packet.header_bytes - QUIC_TAG,
	};
	return extent->plain_at ? 0 : -1;
}

int seal_packet(struct work *work, const struct relay_egress *egress, const struct relay_path *path,
		struct relay_downstream *downstream)
{
	struct quic_extent extent = {};
	struct quic_keys *keys;
	__u32 key;

	if (!work || !egress || !path || !downstream || put_packet(work, egress, path, &extent))
		return -1;
	key = 2 * egress->downstream + (work->packet.word >> RELAY_NUMBER_BITS & 1);
	keys = bpf_map_lookup_elem(&seal_keys, &key);
	if (!keys || seal_text(downstream, keys, work, &extent))
		return -1;
	return quic_protect(keys, &work->out, QUIC_AT, path->id_bytes);
}

/* Writes the Ethernet, IP and UDP headers in front of the QUIC packet. */
int put_headers(struct work *work, const struct net_path *path)
{
	if (!work || !path)
		return -1;
	frame_packet(&work->out, path, &work->route, work->packet.size, work->arrival.frame.summed);
	return 0;
}

/* The bounds are checked directly before the helper call, for the verifier. OPAQUE keeps the compiler from merging the
 * checks.
 */
static __noinline int store(struct __sk_buff *skb, const __u8 *from, __u32 bytes)
{
	if (bytes < SHORTEST)
		return -1;
	OPAQUE(bytes);
	if (bytes > FRAME_BYTES)
		return -1;
	return bpf_skb_store_bytes(skb, 0, from, bytes, 0);
}

/* Sends a copy: overwrites the received skb with the copy's bytes, and redirects a clone of the skb. */
int send(struct __sk_buff *skb, struct work *work, const struct net_path *path)
{
	__u32 at, bytes;

	if (!work || !path || put_headers(work, path))
		return -1;
	at = path->family == 4 ? IPV4_FRAME_AT : IPV6_FRAME_AT;
	bytes = QUIC_AT - at + work->packet.size;
	if (fan_begin(skb, &work->arrival.frame) ||
	    fan_reshape(skb, &work->arrival.frame, path->family, bytes) ||
	    store(skb, work->out.bytes + at, bytes))
		return -1;
	return bpf_clone_redirect(skb, work->route.ifindex, 0);
}

/* Undoes the changes of `send`, so that the received packet is passed to userspace unchanged. */
int restore(struct __sk_buff *skb, struct work *work)
{
	struct fan_frame *frame;

	if (!work)
		return -1;
	frame = &work->arrival.frame;
	if (!frame->changed)
		return 0;
	if (fan_reshape(skb, frame, frame->family, frame->frame_bytes) ||
	    store(skb, work->frame, frame->frame_bytes))
		return -1;
	return fan_tag_again(skb, frame);
}

/* Reports whether the table entry of a subscriber's copy (egress) was removed, or now belongs to another stream or
 * track. Userspace may reuse the entry between two runs of the program. It writes `epoch` last, so `epoch` is read
 * first, with a full barrier.
 */
static __always_inline int is_gone(struct relay_egress *egress, const struct relay_downstream *downstream,
				   const struct work *work, const struct chunk *chunk)
{
	__u32 epoch = __sync_fetch_and_add(&egress->epoch, 0);

	if (!epoch || epoch != READ_ONCE(downstream->epoch) || egress->upstream != work->arrival.upstream ||
	    egress->kind != chunk->kind)
		return 1;
	if (chunk->kind == RELAY_STREAM && is_unopened(READ_ONCE(egress->id)))
		return egress->ingress != chunk->ingress;
	return egress->upstream_id != chunk->frame.id;
}

/* Reports whether the frame is in the range that the subscriber has requested and that the kernel, not userspace,
 * sends.
 */
static __always_inline int is_inside(const struct relay_egress *egress, const struct chunk *chunk,
				     const struct subgroup_head *head, __u32 opens)
{
	__u64 at = chunk->frame.offset;

	if (opens)
		return (head->group > egress->first_group ||
			(head->group == egress->first_group && head->object >= egress->first_object)) &&
		       head->group <= egress->last_group;
	if (chunk->kind == RELAY_STREAM)
		return at >= egress->from;
	return (at > egress->from || (at == egress->from && chunk->object >= egress->shift)) &&
	       at <= egress->max_offset;
}

/* Sends one copy of a frame to one subscriber. If a check fails, userspace has to send the copy. */
static __always_inline enum relay_egress_outcome forward(struct __sk_buff *skb, struct work *work,
							 struct relay_egress *egress,
							 struct relay_downstream *downstream)
{
	const struct chunk *chunk = &work->chunks[work->fan.chunk & (CHUNKS - 1)];
	const struct subgroup_head *head = &work->heads[work->fan.chunk & (CHUNKS - 1)];
	const struct relay_path *path = &downstream->paths[READ_ONCE(downstream->path) & 1];
	struct egress_packet *packet = &work->packet;
	enum relay_egress_outcome outcome;

	if (is_gone(egress, downstream, work, chunk))
		return RELAY_EGRESS_GONE;
	packet->web = READ_ONCE(downstream->web);
	outcome = find_stream(downstream, egress, chunk, head, packet);
	if (outcome)
		return outcome;
	if (!is_inside(egress, chunk, head, packet->opens))
		return RELAY_EGRESS_BEFORE;
	measure(packet, egress, path, chunk, head);
	if (packet->size > READ_ONCE(downstream->mtu) || packet->size > QUIC_TEXT_MAX)
		return RELAY_EGRESS_TOO_LARGE;
	if (chunk->kind == RELAY_DATAGRAMS && packet->frame_bytes > READ_ONCE(downstream->max_datagram))
		return RELAY_EGRESS_TOO_LARGE;
	outcome = find_route(skb, &work->route, &path->way, packet->size);
	if (outcome)
		return outcome;
	outcome = admit(downstream, egress, packet);
	if (outcome)
		return outcome;
	outcome = draw_number(downstream, egress, chunk, work);
	if (outcome) {
		give_back(downstream, packet);
		return outcome;
	}
	/* Bytes up to the end of this copy are counted against MAX_DATA now. So later copies of the stream count only
	 * bytes that follow.
	 */
	if (packet->credit)
		WRITE_ONCE(egress->counted, packet->offset + packet->len);
	if (seal_packet(work, egress, path, downstream) || send(skb, work, &path->way))
		return RELAY_EGRESS_LOST;
	return RELAY_EGRESS_SENT;
}

struct egress_loop {
	struct __sk_buff *skb;
	struct work *work;
};

/* One step of the fan-out loop: makes the copy for one subscriber. Then selects the next subscriber of the same frame,
 * or the first subscriber of the next frame.
 */
static long next_egress(__u32 index, struct egress_loop *loop)
{
	struct fan *fan = &loop->work->fan;
	struct relay_downstream *downstream;
	__u32 outcome = RELAY_EGRESS_GONE, next = RELAY_END, key = fan->egress;
	struct relay_egress *egress = bpf_map_lookup_elem(&egresses, &key);

	if (egress) {
		next = READ_ONCE(egress->next);
		key = egress->downstream;
		downstream = bpf_map_lookup_elem(&downstreams, &key);
		if (downstream) {
			outcome = forward(loop->skb, loop->work, egress, downstream);
			OPAQUE(outcome);
			if (outcome < RELAY_EGRESS_OUTCOMES)
				__sync_fetch_and_add(&downstream->outcomes[outcome], 1);
			if (loop->work->arrival.traced_ns)
				trace_copy(loop->work, egress, downstream, outcome);
		}
		/* The packet wakes userspace if userspace has to send this copy, or if further subscribers, which only
		 * userspace serves, need the stream.
		 */
		if (outcome != RELAY_EGRESS_SENT || !READ_ONCE(egress->exclusive))
			fan->wakes = 1;
		add_to(&outcomes, RELAY_OUTCOMES + outcome, 1);
	}
	if (next == RELAY_END) {
		fan->chunk++;
		if (fan->chunk >= fan->chunks)
			return 1;
		next = loop->work->chunks[fan->chunk & (CHUNKS - 1)].egress;
	}
	fan->egress = next;
	return 0;
}

#endif
