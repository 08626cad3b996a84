/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Walks the frames of a decrypted 1-RTT payload (RFC 9000, section 19; RFC 9221; draft-ietf-quic-ack-frequency). It
 * accepts what millrace-quic's frame module accepts, but returns only STREAM and DATAGRAM frames.
 *
 * Parsing is done in steps of bounded work, so that BPF can loop over them. A step parses one frame, or one field of a
 * frame that has many fields. Each step consumes at least one byte.
 */
#ifndef MILLRACE_FRAMES_H
#define MILLRACE_FRAMES_H

#include "bytes.h"

/* Positions in the packet buffer are masked to satisfy the verifier. So the buffer must have FRAMES_MAX bytes, and 8
 * more for reads that begin within these bytes and extend beyond them.
 */
#define FRAMES_MAX  2048
#define FRAMES_MASK (FRAMES_MAX - 1)

#define VARINT_MAX ((1ULL << 62) - 1)

enum frame_type {
	FRAME_PADDING = 0x00,
	FRAME_PING = 0x01,
	FRAME_ACK = 0x02,
	FRAME_ACK_ECN = 0x03,
	FRAME_RESET_STREAM = 0x04,
	FRAME_STOP_SENDING = 0x05,
	FRAME_CRYPTO = 0x06,
	FRAME_NEW_TOKEN = 0x07,
	FRAME_STREAM = 0x08,
	FRAME_STREAM_LAST = 0x0f,
	FRAME_MAX_DATA = 0x10,
	FRAME_MAX_STREAM_DATA = 0x11,
	FRAME_MAX_STREAMS_BIDI = 0x12,
	FRAME_MAX_STREAMS_UNI = 0x13,
	FRAME_DATA_BLOCKED = 0x14,
	FRAME_STREAM_DATA_BLOCKED = 0x15,
	FRAME_STREAMS_BLOCKED_BIDI = 0x16,
	FRAME_STREAMS_BLOCKED_UNI = 0x17,
	FRAME_NEW_CONNECTION_ID = 0x18,
	FRAME_RETIRE_CONNECTION_ID = 0x19,
	FRAME_PATH_CHALLENGE = 0x1a,
	FRAME_PATH_RESPONSE = 0x1b,
	FRAME_CONNECTION_CLOSE = 0x1c,
	FRAME_APPLICATION_CLOSE = 0x1d,
	FRAME_HANDSHAKE_DONE = 0x1e,
	FRAME_IMMEDIATE_ACK = 0x1f,
	FRAME_DATAGRAM = 0x30,
	FRAME_DATAGRAM_LEN = 0x31,
	FRAME_ACK_FREQUENCY = 0xaf,
};

enum frame_stream_bits {
	FRAME_STREAM_FIN = 0x01,
	FRAME_STREAM_LEN = 0x02,
	FRAME_STREAM_OFF = 0x04,
};

enum frame_step {
	FRAME_MORE = 0,
	FRAME_IS_STREAM,
	FRAME_END,
	FRAME_BAD,
	FRAME_IS_DATAGRAM,
};

struct frame_walk {
	__u32 at;
	__u32 end;
	__u32 varints; /* number of variable-length integers of the current frame that are still to be skipped */
	__u32 prefixed; /* whether a length-prefixed field follows the integers that are to be skipped */
	__u64 smallest; /* in an ACK frame: the smallest packet number acknowledged so far */
	/* In an ACK frame: number of gaps and range lengths still to be read. After them, `varints` integers are
	 * skipped.
	 */
	__u32 blocks;
	__u32 pad;
};

/* The data of a STREAM frame. For a DATAGRAM frame only `at` and `len` are set. */
struct frame_stream {
	__u64 id;
	__u64 offset;
	__u32 at; /* position of the data in the packet buffer */
	__u32 len;
	__u32 fin;
	__u32 pad;
};

/* Moves over `bytes` bytes of the frame. Returns FRAME_BAD if the payload is shorter. */
static __always_inline enum frame_step frame_skip(struct frame_walk *walk, __u64 bytes)
{
	if (bytes > walk->end - walk->at)
		return FRAME_BAD;
	walk->at += bytes;
	return FRAME_MORE;
}

/* Reads a variable-length integer (RFC 9000, section 16). The two top bits of its first byte give its length. */
static __always_inline enum frame_step frame_varint(struct frame_walk *walk, const __u8 *text, __u64 *value)
{
	__u64 bytes = __builtin_bswap64(load64(text + (walk->at & FRAMES_MASK)));
	__u32 len = 1 << (bytes >> 62);

	*value = bytes << 2 >> (66 - 8 * len);
	return frame_skip(walk, len);
}

static __always_inline enum frame_step frame_prefixed(struct frame_walk *walk, const __u8 *text)
{
	__u64 len;

	if (frame_varint(walk, text, &len))
		return FRAME_BAD;
	return frame_skip(walk, len);
}

/* Sets what the next steps of the walk skip: `varints` integers, and then a length-prefixed field if `prefixed` is set.
 */
static __always_inline enum frame_step frame_fields(struct frame_walk *walk, __u32 varints, __u32 prefixed)
{
	walk->varints = varints;
	walk->prefixed = prefixed;
	return FRAME_MORE;
}

static __always_inline enum frame_step frame_stream(struct frame_walk *walk, const __u8 *text, __u64 type,
						    struct frame_stream *stream)
{
	__u64 len = 0;

	stream->offset = 0;
	if (frame_varint(walk, text, &stream->id))
		return FRAME_BAD;
	if (type & FRAME_STREAM_OFF && frame_varint(walk, text, &stream->offset))
		return FRAME_BAD;
	if (type & FRAME_STREAM_LEN && frame_varint(walk, text, &len))
		return FRAME_BAD;
	/* Without a length, a STREAM frame extends to the end of the packet (RFC 9000, section 19.8). */
	if (!(type & FRAME_STREAM_LEN))
		len = walk->end - walk->at;
	stream->at = walk->at;
	stream->len = len;
	stream->fin = type & FRAME_STREAM_FIN;
	if (frame_skip(walk, len) || stream->offset + len > VARINT_MAX)
		return FRAME_BAD;
	return FRAME_IS_STREAM;
}

static __always_inline enum frame_step frame_datagram(struct frame_walk *walk, const __u8 *text, __u64 type,
						      struct frame_stream *stream)
{
	__u64 len = walk->end - walk->at;

	if (type == FRAME_DATAGRAM_LEN && frame_varint(walk, text, &len))
		return FRAME_BAD;
	stream->at = walk->at;
	stream->len = len;
	return frame_skip(walk, len) ? FRAME_BAD : FRAME_IS_DATAGRAM;
}

static __always_inline enum frame_step frame_ack(struct frame_walk *walk, const __u8 *text, __u64 type)
{
	__u64 largest, delay, ranges;

	if (frame_varint(walk, text, &largest) || frame_varint(walk, text, &delay) ||
	    frame_varint(walk, text, &ranges) || ranges > FRAMES_MAX)
		return FRAME_BAD;
	walk->smallest = largest;
	walk->blocks = 1 + 2 * ranges;
	return frame_fields(walk, type == FRAME_ACK_ECN ? 3 : 0, 0);
}

/* Reads a gap or a range length of an ACK frame. Going below packet number 0 is an error (RFC 9000, section 19.3.1). */
static __always_inline enum frame_step frame_ack_block(struct frame_walk *walk, const __u8 *text)
{
	__u64 by;

	if (frame_varint(walk, text, &by))
		return FRAME_BAD;
	if (!(walk->blocks-- & 1))
		by += 2; /* gap between two ACK ranges */
	if (by > walk->smallest)
		return FRAME_BAD;
	walk->smallest -= by;
	return FRAME_MORE;
}

static __always_inline enum frame_step frame_new_id(struct frame_walk *walk, const __u8 *text)
{
	__u64 sequence, retire;
	__u8 len;

	if (frame_varint(walk, text, &sequence) || frame_varint(walk, text, &retire) || walk->at >= walk->end)
		return FRAME_BAD;
	/* RFC 9000, section 19.15: a connection ID of 1 to 20 bytes, followed by a stateless reset token of 16 bytes.
	 */
	len = text[walk->at & FRAMES_MASK];
	if (retire > sequence || len < 1 || len > 20)
		return FRAME_BAD;
	return frame_skip(walk, 1 + len + 16);
}

/* Skips PADDING bytes, which usually come in long runs, by 8 at a time. */
static __always_inline enum frame_step frame_padding(struct frame_walk *walk, const __u8 *text)
{
	if (walk->end - walk->at >= 8 && !load64(text + (walk->at & FRAMES_MASK)))
		walk->at += 8;
	return FRAME_MORE;
}

static __always_inline enum frame_step frame_next(struct frame_walk *walk, const __u8 *text,
						  struct frame_stream *stream)
{
	__u64 type;

	/* If an earlier step of the parser has begun a frame, its remaining fields are parsed first. */
	if (walk->blocks)
		return frame_ack_block(walk, text);
	if (walk->varints) {
		walk->varints--;
		return frame_varint(walk, text, &type);
	}
	if (walk->prefixed) {
		walk->prefixed = 0;
		return frame_prefixed(walk, text);
	}
	if (walk->at >= walk->end)
		return FRAME_END;
	if (frame_varint(walk, text, &type))
		return FRAME_BAD;
	if (type >= FRAME_STREAM && type <= FRAME_STREAM_LAST)
		return frame_stream(walk, text, type, stream);
	switch (type) {
	case FRAME_PADDING:
		return frame_padding(walk, text);
	case FRAME_PING:
	case FRAME_HANDSHAKE_DONE:
	case FRAME_IMMEDIATE_ACK:
		return FRAME_MORE;
	case FRAME_ACK:
	case FRAME_ACK_ECN:
		return frame_ack(walk, text, type);
	case FRAME_MAX_DATA:
	case FRAME_MAX_STREAMS_BIDI:
	case FRAME_MAX_STREAMS_UNI:
	case FRAME_DATA_BLOCKED:
	case FRAME_STREAMS_BLOCKED_BIDI:
	case FRAME_STREAMS_BLOCKED_UNI:
	case FRAME_RETIRE_CONNECTION_ID:
		return frame_fields(walk, 1, 0);
	case FRAME_STOP_SENDING:
	case FRAME_MAX_STREAM_DATA:
	case FRAME_STREAM_DATA_BLOCKED:
		return frame_fields(walk, 2, 0);
	case FRAME_RESET_STREAM:
		return frame_fields(walk, 3, 0);
	case FRAME_ACK_FREQUENCY:
		return frame_fields(walk, 4, 0);
	case FRAME_NEW_TOKEN:
		return frame_fields(walk, 0, 1);
	case FRAME_CRYPTO:
	case FRAME_APPLICATION_CLOSE:
		return frame_fields(walk, 1, 1);
	case FRAME_CONNECTION_CLOSE:
		return frame_fields(walk, 2, 1);
	case FRAME_NEW_CONNECTION_ID:
		return frame_new_id(walk, text);
	case FRAME_PATH_CHALLENGE:
	case FRAME_PATH_RESPONSE:
		return frame_skip(walk, 8);
	case FRAME_DATAGRAM:
	case FRAME_DATAGRAM_LEN:
		return frame_datagram(walk, text, type, stream);
	default:
		return FRAME_BAD;
	}
}

static __always_inline __u32 varint_len(__u64 value)
{
	return value < 1 << 6 ? 1 : value < 1 << 14 ? 2 : value < 1 << 30 ? 4 : 8;
}

/* Writes a variable-length integer that ends before `end`, and returns its length. The 8 bytes before `end` are
 * overwritten.
 */
static __always_inline __u32 varint_put_before(__u8 *end, __u64 value)
{
	__u32 len = varint_len(value);
	__u64 prefix = len == 1 ? 0 : len == 2 ? 1 : len == 4 ? 2 : 3;

	store64(end - 8, __builtin_bswap64(value | prefix << (8 * len - 2)));
	return len;
}

#endif
