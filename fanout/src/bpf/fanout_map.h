/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Finds the stream that a packet belongs to, and checks that the stream's sender sent it. */
#ifndef MILLRACE_FANOUT_MAP_H
#define MILLRACE_FANOUT_MAP_H

#include "fanout_maps.h"

static __always_inline enum fanout_outcome outcome_of(enum fan_found found)
{
	switch (found) {
	case FAN_FOUND:
		return FANOUT_FORWARDED;
	case FAN_SUPER_PACKET:
		return FANOUT_SUPER_PACKET;
	case FAN_ODD_HEADERS:
		return FANOUT_ODD_HEADERS;
	default:
		return FANOUT_MALFORMED;
	}
}

static __always_inline int is_address(const __u8 *one, const __u8 *other)
{
	return load64(one) == load64(other) && load64(one + 8) == load64(other + 8);
}

static __always_inline int is_from_sender(const struct fanout_stream *stream, const struct udp_packet *packet)
{
	return is_address(packet->source, stream->sender) &&
	       (packet->source_port == stream->port ||
		(stream->rtcp_port && packet->source_port == stream->rtcp_port));
}

/* A global function, so that the verifier checks it only once. */
enum fanout_outcome find_stream(struct __sk_buff *skb, struct fanout_work *work)
{
	struct udp_packet packet = {};
	struct fanout_stream *stream;
	struct fanout_at at = {};
	__u32 *index, key;

	if (!work)
		return FANOUT_MALFORMED;
	switch (parse_udp(skb, &packet)) {
	case PARSE_OK:
		break;
	case PARSE_NOT_UDP:
		return FANOUT_NOT_UDP;
	case PARSE_FRAGMENT:
		return FANOUT_FRAGMENT;
	default:
		return FANOUT_MALFORMED;
	}
	__builtin_memcpy(at.address, packet.destination, sizeof(at.address));
	at.port = packet.destination_port;
	at.family = packet.family;
	index = bpf_map_lookup_elem(&places, &at);
	if (!index)
		return FANOUT_OTHER;
	work->stream = key = *index;
	stream = bpf_map_lookup_elem(&streams, &key);
	if (!stream)
		return FANOUT_OTHER;
	if (!is_from_sender(stream, &packet))
		return FANOUT_NOT_SENDER;
	__builtin_memcpy(work->came.local, packet.source, sizeof(work->came.local));
	__builtin_memcpy(work->came.remote, packet.destination, sizeof(work->came.remote));
	work->came.local_port = packet.source_port;
	work->came.remote_port = packet.destination_port;
	return outcome_of(fan_find(skb, &packet, &work->frame));
}

/* Loads the received headers, and the header fields that all copies are made from. */
static __always_inline int load_head(struct __sk_buff *skb, struct fanout_work *work)
{
	const __u8 *ip = work->head + ETHERNET_BYTES;

	if (work->frame.family == 4) {
		if (bpf_skb_load_bytes(skb, 0, work->head, ETHERNET_BYTES + IPV4_BYTES + UDP_BYTES))
			return -1;
		work->traffic_class = ip[1];
		work->check = load16(ip + IPV4_BYTES + __builtin_offsetof(struct udphdr, check));
	} else {
		if (bpf_skb_load_bytes(skb, 0, work->head, ETHERNET_BYTES + IPV6_BYTES + UDP_BYTES))
			return -1;
		work->traffic_class = ip[0] << 4 | ip[1] >> 4;
		work->check = load16(ip + IPV6_BYTES + __builtin_offsetof(struct udphdr, check));
	}
	return 0;
}

/* Loads as much of the payload as rtp_parse() may read. */
static __always_inline int load_payload(struct __sk_buff *skb, struct fanout_work *work)
{
	__u32 at = work->frame.packet_at, bytes = work->frame.packet_bytes;

	if (bytes >= RTCP_REPORT_BYTES)
		return bpf_skb_load_bytes(skb, at, work->payload, RTCP_REPORT_BYTES);
	if (bytes >= RTP_HEADER_BYTES)
		return bpf_skb_load_bytes(skb, at, work->payload, RTP_HEADER_BYTES);
	if (bytes >= RTCP_HEADER_BYTES)
		return bpf_skb_load_bytes(skb, at, work->payload, RTCP_HEADER_BYTES);
	return 0;
}

/* Returns whether packets of this SSRC are forwarded. If the stream forwards the first SSRC that arrives,
 * this packet may set the SSRC.
 */
static __always_inline int is_its_ssrc(struct fanout_stream *stream, __u32 ssrc)
{
	__u64 known = FANOUT_SSRC_KNOWN | ssrc, now;

	if (!stream->one_ssrc)
		return 1;
	now = READ_ONCE(stream->ssrc);
	/* If first packets arrive on several CPUs at once, exactly one sets the SSRC. */
	if (!now)
		now = __sync_val_compare_and_swap(&stream->ssrc, 0, known);
	return !now || now == known;
}

/* Records when a sender report passed this host. Userspace computes the receivers' round trips from this
 * time.
 */
static __always_inline void note_report(struct fanout_stream *stream, const struct rtp_packet *rtp,
					__u64 now_ns)
{
	__u64 at = __sync_fetch_and_add(&stream->sent, 1) & (FANOUT_REPORTS - 1);

	stream->reports[at] = (__u64)rtp->ntp_middle << 32 | (__u32)(now_ns / 1000);
}

static __always_inline void count_packet(struct fanout_stream *stream, const struct fanout_work *work)
{
	__sync_fetch_and_add(&stream->packets, 1);
	__sync_fetch_and_add(&stream->bytes, work->frame.packet_bytes);
	WRITE_ONCE(stream->last_ns, work->now_ns);
	if (work->rtp.ntp_middle)
		note_report(stream, &work->rtp, work->now_ns);
}

static __always_inline void trace_packet_of(struct fanout_work *work, const struct fanout_stream *stream)
{
	__u32 every = tracing.every, wanted = tracing.stream;

	work->traced_ns = 0;
	/* A further run of the program for the same packet, for its remaining receivers, continues the trace. */
	if (work->cursor.id)
		work->traced_ns = work->cursor.kept.traced_ns;
	else if (every && !(work->rtp.sequence % every) && (!wanted || wanted == stream->number))
		work->traced_ns = work->now_ns;
}

/* Classifies a packet of the sender, after find_stream() has found its stream. */
enum fanout_outcome find_media(struct __sk_buff *skb, struct fanout_work *work)
{
	struct fanout_stream *stream;
	__u32 key;

	if (!work)
		return FANOUT_MALFORMED;
	key = work->stream;
	stream = bpf_map_lookup_elem(&streams, &key);
	if (!stream || load_head(skb, work))
		return FANOUT_MALFORMED;
	if (load_payload(skb, work))
		return FANOUT_MALFORMED;
	rtp_parse(work->payload, work->frame.packet_bytes, &work->rtp);
	trace_packet_of(work, stream);
	if (work->rtp.kind == RTP_NOT)
		return FANOUT_NOT_RTP;
	if (!is_its_ssrc(stream, work->rtp.ssrc))
		return FANOUT_OTHER_SSRC;
	/* The first run of the program for this packet has counted it already. */
	if (!work->cursor.id)
		count_packet(stream, work);
	work->receivers = READ_ONCE(stream->receivers);
	work->receiver = work->cursor.id ? work->cursor.at : 0;
	return FANOUT_FORWARDED;
}

#endif
