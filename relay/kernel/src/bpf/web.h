/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What streams and datagrams of a WebTransport session begin with (draft-ietf-webtrans-http3), in front of the
 * application's bytes: what millrace-quic's webtransport writes and accepts. A bare connection has nothing there.
 */
#ifndef MILLRACE_WEB_H
#define MILLRACE_WEB_H

#include "frames.h"

#define WEB_BARE   (~0ULL) /* in place of a session's ID: there is none */
#define WEB_STREAM 0x54	   /* what unidirectional streams begin with, in front of the session's ID */

/* Bytes that this end writes in front of a stream. */
static __always_inline __u32 web_stream_len(__u64 session)
{
	return session == WEB_BARE ? 0 : varint_len(WEB_STREAM) + varint_len(session);
}

/* The same of a datagram: a quarter of the session's ID. */
static __always_inline __u32 web_datagram_len(__u64 session)
{
	return session == WEB_BARE ? 0 : varint_len(session >> 2);
}

/* Writes what is in front of a stream, so that it ends before `end`, and returns its length; the 16 bytes before `end` may be
 * overwritten.
 */
static __always_inline __u32 web_put_stream_before(__u8 *end, __u64 session)
{
	__u32 bytes;

	if (session == WEB_BARE)
		return 0;
	bytes = varint_put_before(end, session);
	return bytes + varint_put_before(end - bytes, WEB_STREAM);
}

static __always_inline __u32 web_put_datagram_before(__u8 *end, __u64 session)
{
	return session == WEB_BARE ? 0 : varint_put_before(end, session >> 2);
}

/* What of the frame's data is behind the walk. */
static __always_inline int web_leave(struct frame_stream *frame, const struct frame_walk *walk)
{
	frame->offset += walk->at - frame->at;
	frame->at = walk->at;
	frame->len = walk->end - walk->at;
	return 0;
}

/* Of a frame at the beginning of a stream, leaves what is the application's. Not 0: what is in front of that is not all
 * there, or another's.
 */
static __always_inline int web_enter_stream(struct frame_stream *frame, const __u8 *text, __u64 session)
{
	struct frame_walk walk = {.at = frame->at, .end = frame->at + frame->len};
	__u64 value;

	if (session == WEB_BARE)
		return 0;
	if (frame_varint(&walk, text, &value) || value != WEB_STREAM)
		return -1;
	if (frame_varint(&walk, text, &value) || value != session)
		return -1;
	return web_leave(frame, &walk);
}

/* The same of a datagram. */
static __always_inline int web_enter_datagram(struct frame_stream *frame, const __u8 *text, __u64 session)
{
	struct frame_walk walk = {.at = frame->at, .end = frame->at + frame->len};
	__u64 value;

	if (session == WEB_BARE)
		return 0;
	if (frame_varint(&walk, text, &value) || value != session >> 2)
		return -1;
	return web_leave(frame, &walk);
}

#endif
