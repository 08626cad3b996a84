/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Parses a subgroup stream of MoQ Transport (draft-18, section 11.4), from its SUBGROUP_HEADER or from any later
 * position. It rejects what millrace-moq's StreamHeader and ObjectParser reject, at the same byte, wherever packets
 * divide the stream. No bytes of the stream are kept, only the parser's state.
 *
 * Parsing is done in steps of bounded work, so that BPF can loop over them. Each step consumes at least one byte.
 */
#ifndef MILLRACE_SUBGROUP_H
#define MILLRACE_SUBGROUP_H

#include "object.h"
#include "subgroup_intf.h"

/* the longest payload of an object: no QUIC stream has more bytes */
#define SUBGROUP_PAYLOAD_MAX ((1ULL << 62) - 1)

enum subgroup_bits {
	SUBGROUP_PROPERTIES = 0x01,
	SUBGROUP_ID_MODE = 0x06,
	SUBGROUP_ID_FIRST = 0x02, /* the subgroup ID is the ID of the first object */
	SUBGROUP_ID_EXPLICIT = 0x04,
	SUBGROUP_ALWAYS = 0x10,
	SUBGROUP_DEFAULT_PRIORITY = 0x20,
	SUBGROUP_TYPE_MAX = 0x7f,
};

enum subgroup_step {
	SUBGROUP_MORE = 0,
	SUBGROUP_DONE, /* all bytes of the packet were parsed without an error */
	SUBGROUP_BAD,
};

/* The fields at the beginning of a subgroup stream. */
struct subgroup_head {
	__u64 alias;
	__u64 group;
	__u64 subgroup;
	__u64 object;	   /* ID of the subgroup's first object; 0 if it has not arrived */
	__s32 priority;	   /* publisher priority; negative: the default of the track */
	__u32 alias_bytes; /* length in bytes of the track alias, which follows the stream's type byte */
	__u32 is_read;
	__u32 type;
};

/* Reads a vi64 in its shortest form. Returns an error (not 0) if it is longer than needed, or incomplete. */
static __always_inline int subgroup_take_short(struct frame_walk *walk, const __u8 *text, __u64 *value)
{
	__u32 at = walk->at;

	return vi64_take(walk, text, value) || walk->at - at != vi64_len(*value);
}

/* Parses the SUBGROUP_HEADER in the `len` bytes at position `at`. Returns an error (not 0) if the header is incomplete,
 * has an integer that is not in its shortest encoding, or lacks the object whose ID is the subgroup ID. The alias may
 * have any length.
 */
static __always_inline int subgroup_read_head(const __u8 *text, __u32 at, __u32 len,
					      struct subgroup_head *head)
{
	struct frame_walk walk = {.at = at, .end = at + len};
	__u64 type;
	__u32 mode;

	if (subgroup_take_short(&walk, text, &type) || type > SUBGROUP_TYPE_MAX || !(type & SUBGROUP_ALWAYS))
		return -1;
	head->type = type;
	mode = type & SUBGROUP_ID_MODE;
	if (mode == SUBGROUP_ID_MODE || vi64_take(&walk, text, &head->alias))
		return -1;
	head->alias_bytes = walk.at - at - 1;
	if (subgroup_take_short(&walk, text, &head->group))
		return -1;
	head->subgroup = 0;
	if (mode == SUBGROUP_ID_EXPLICIT && subgroup_take_short(&walk, text, &head->subgroup))
		return -1;
	head->priority = -1;
	if (!(type & SUBGROUP_DEFAULT_PRIORITY)) {
		head->priority = text[walk.at & FRAMES_MASK];
		if (frame_skip(&walk, 1))
			return -1;
	}
	if (vi64_take(&walk, text, &head->object)) {
		head->object = 0;
		return mode == SUBGROUP_ID_FIRST ? -1 : 0;
	}
	if (mode == SUBGROUP_ID_FIRST)
		head->subgroup = head->object;
	return 0;
}

/* Reports whether the stream may end here, because the last object is complete. */
static __always_inline int subgroup_may_end(const struct subgroup_state *state)
{
	return (state->field == SUBGROUP_OBJECT && !state->missing) || state->field == SUBGROUP_OPAQUE;
}

/* Reports whether the next `bytes` bytes lie inside a payload or an unframed stream, and so need no parsing. */
static __always_inline int subgroup_is_inside(const struct subgroup_state *state, __u64 bytes)
{
	return (state->field == SUBGROUP_IN_PAYLOAD && state->left >= bytes) ||
	       state->field == SUBGROUP_OPAQUE;
}

/* Skips `bytes` bytes of payload. The caller has checked with `subgroup_is_inside` that they need no parsing. */
static __always_inline void subgroup_skip(struct subgroup_state *state, __u64 bytes)
{
	if (state->field == SUBGROUP_OPAQUE)
		return;
	state->left -= bytes;
	if (!state->left)
		state->field = state->field == SUBGROUP_IN_PAYLOAD ? SUBGROUP_OBJECT : SUBGROUP_LENGTH;
}

static __always_inline enum subgroup_step subgroup_skip_run(struct subgroup_state *state,
							    struct frame_walk *walk)
{
	__u64 bytes = walk->end - walk->at;

	if (state->field != SUBGROUP_OPAQUE && bytes > state->left)
		bytes = state->left;
	subgroup_skip(state, bytes);
	walk->at += bytes;
	return SUBGROUP_MORE;
}

/* Reads a vi64, or its next byte if it is incomplete. Returns 0 if further bytes of the integer have not arrived. */
static __always_inline int subgroup_vi64(struct subgroup_state *state, struct frame_walk *walk,
					 const __u8 *text, __u64 *value)
{
	__u8 byte = text[walk->at & FRAMES_MASK];
	__u32 width;

	if (state->missing) {
		state->missing--;
		*value = state->value << 8 | byte;
		state->value = state->missing ? *value : 0;
		walk->at++;
		return !state->missing;
	}
	width = vi64_width(byte);
	if (width <= walk->end - walk->at)
		return !vi64_take(walk, text, value);
	state->missing = width - 1;
	state->value = byte & (0xff >> width);
	walk->at++;
	return 0;
}

/* Checks the stream's type. Bit SUBGROUP_ALWAYS is set in every valid type. */
static __always_inline enum subgroup_step subgroup_type(struct subgroup_state *state, __u64 type)
{
	if (type > SUBGROUP_TYPE_MAX || !(type & SUBGROUP_ALWAYS) ||
	    (type & SUBGROUP_ID_MODE) == SUBGROUP_ID_MODE)
		return SUBGROUP_BAD;
	state->kind = type;
	state->field = SUBGROUP_ALIAS;
	return SUBGROUP_MORE;
}

/* Computes an object ID. The stream contains its difference to the previous object ID, minus 1. */
static __always_inline enum subgroup_step subgroup_object(struct subgroup_state *state, __u64 delta)
{
	__u64 id = delta;

	if (state->flags & SUBGROUP_HAS_PREVIOUS) {
		id = state->previous + delta;
		if (id < delta || id + 1 == 0)
			return SUBGROUP_BAD;
		id++;
	}
	state->previous = id;
	state->flags = SUBGROUP_HAS_PREVIOUS;
	state->field = state->kind & SUBGROUP_PROPERTIES ? SUBGROUP_PROPERTIES_LENGTH : SUBGROUP_LENGTH;
	return SUBGROUP_MORE;
}

static __always_inline enum subgroup_step subgroup_properties(struct subgroup_state *state, __u64 bytes)
{
	if (bytes > OBJECT_PROPERTIES_MAX)
		return SUBGROUP_BAD;
	state->left = bytes;
	state->field = bytes ? SUBGROUP_IN_PROPERTIES : SUBGROUP_LENGTH;
	if (bytes)
		state->flags |= SUBGROUP_WITH_PROPERTIES;
	return SUBGROUP_MORE;
}

/* A payload length of 0 is followed by a status. */
static __always_inline enum subgroup_step subgroup_length(struct subgroup_state *state, __u64 bytes)
{
	if (bytes > SUBGROUP_PAYLOAD_MAX)
		return SUBGROUP_BAD;
	if (!bytes) {
		state->field = SUBGROUP_STATUS;
		return SUBGROUP_MORE;
	}
	state->left = bytes;
	state->flags &= ~SUBGROUP_WITH_PROPERTIES;
	state->field = SUBGROUP_IN_PAYLOAD;
	return SUBGROUP_MORE;
}

/* Objects with properties may have only the normal status. */
static __always_inline enum subgroup_step subgroup_status(struct subgroup_state *state, __u64 status)
{
	__u8 flags = state->flags;

	state->flags = flags & ~SUBGROUP_WITH_PROPERTIES;
	state->field = SUBGROUP_OBJECT;
	if (status == OBJECT_NORMAL)
		return SUBGROUP_MORE;
	if ((status != OBJECT_ENDS_GROUP && status != OBJECT_ENDS_TRACK) || flags & SUBGROUP_WITH_PROPERTIES)
		return SUBGROUP_BAD;
	state->flags |= SUBGROUP_ENDED;
	return SUBGROUP_MORE;
}

/* Processes a complete integer according to its field, and selects the next field. */
static __always_inline enum subgroup_step subgroup_value(struct subgroup_state *state, __u64 value)
{
	switch (state->field) {
	case SUBGROUP_TYPE:
		return subgroup_type(state, value);
	case SUBGROUP_ALIAS:
		state->field = SUBGROUP_GROUP;
		return SUBGROUP_MORE;
	case SUBGROUP_GROUP:
		if ((state->kind & SUBGROUP_ID_MODE) == SUBGROUP_ID_EXPLICIT) {
			state->field = SUBGROUP_ID;
			return SUBGROUP_MORE;
		}
		/* fall through */
	case SUBGROUP_ID:
		state->field = state->kind & SUBGROUP_DEFAULT_PRIORITY ? SUBGROUP_OBJECT : SUBGROUP_PRIORITY;
		return SUBGROUP_MORE;
	case SUBGROUP_OBJECT:
		return subgroup_object(state, value);
	case SUBGROUP_PROPERTIES_LENGTH:
		return subgroup_properties(state, value);
	case SUBGROUP_LENGTH:
		return subgroup_length(state, value);
	case SUBGROUP_STATUS:
		return subgroup_status(state, value);
	default:
		return SUBGROUP_BAD;
	}
}

/* Parses one field of the subgroup stream, a part of a field, or as much of a payload as the packet has. */
static __always_inline enum subgroup_step subgroup_next(struct subgroup_state *state, struct frame_walk *walk,
							const __u8 *text)
{
	__u64 value;

	if (walk->at >= walk->end)
		return SUBGROUP_DONE;
	switch (state->field) {
	case SUBGROUP_IN_PAYLOAD:
	case SUBGROUP_IN_PROPERTIES:
	case SUBGROUP_OPAQUE:
		return subgroup_skip_run(state, walk);
	case SUBGROUP_PRIORITY:
		walk->at++;
		state->field = SUBGROUP_OBJECT;
		return SUBGROUP_MORE;
	case SUBGROUP_OBJECT:
		if (state->flags & SUBGROUP_ENDED)
			return SUBGROUP_BAD;
	}
	if (!subgroup_vi64(state, walk, text, &value))
		return SUBGROUP_MORE;
	return subgroup_value(state, value);
}

#endif
