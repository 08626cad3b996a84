/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Reads and writes the preamble that streams and datagrams of a WebTransport session begin with
 * (draft-ietf-webtrans-http3). millrace-quic's webtransport module reads and writes the same preamble. Connections
 * without WebTransport have no preamble.
 */
#ifndef MILLRACE_WEB_H
#define MILLRACE_WEB_H

#include "frames.h"

#define WEB_BARE   (~0ULL) /* value in place of a session ID if the connection has no WebTransport session */
#define WEB_STREAM 0x54	   /* type of a unidirectional WebTransport stream, followed by the session ID */

/* Returns the length of the WebTransport preamble that this relay writes at the beginning of a stream. */
static __always_inline __u32 web_stream_len(__u64 session)
{
	return session == WEB_BARE ? 0 : varint_len(WEB_STREAM) + varint_len(session);
}

/* Returns the length of a datagram's preamble: a quarter of the session ID (RFC 9297, section 2.1). */
static __always_inline __u32 web_datagram_len(__u64 session)
{
	return session == WEB_BARE ? 0 : varint_len(session >> 2);
}

/* Writes the WebTransport preamble of a stream so that it ends before `end`, and returns its length. The 16 bytes
 * before `end` may be overwritten.
 */
static __always_inline __u32 web_put_stream_before(__u8 *end, __u64 session)
{
	__u32 bytes;

	if (session == WEB_BARE)
		return 0;
	bytes = varint_put_before(end, session);
	return bytes + varint_put_before(end - bytes, WEB_STREAM);
}

/* Writes the WebTransport preamble of a datagram so that it ends before `end`, and returns its length. */
static __always_inline __u32 web_put_datagram_before(__u8 *end, __u64 session)
{
	return session == WEB_BARE ? 0 : varint_put_before(end, session >> 2);
}

/* Removes the WebTransport preamble that `walk` has read from the beginning of the frame's data. Always returns 0. */
static __always_inline int web_leave(struct frame_stream *frame, const struct frame_walk *walk)
{
	frame->offset += walk->at - frame->at;
	frame->at = walk->at;
	frame->len = walk->end - walk->at;
	return 0;
}

/* Removes the preamble from the first frame of a stream. Returns an error (not 0) if the preamble is incomplete or
 * names another session.
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

/* Removes the preamble from a datagram. Returns an error (not 0) if the preamble is incomplete or names another
 * session.
 */
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
