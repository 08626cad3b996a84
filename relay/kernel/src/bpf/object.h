/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Parses OBJECT_DATAGRAM of MoQ Transport (draft-18, section 11.3.1), as millrace-moq's data::datagram does. A datagram
 * that millrace-moq finds malformed must be refused here, too, or subscribers would close their sessions because of it.
 */
#ifndef MILLRACE_OBJECT_H
#define MILLRACE_OBJECT_H

#include "frames.h"

#define OBJECT_PROPERTIES_MAX (1 << 16)

enum object_bits {
	OBJECT_PROPERTIES = 0x01,
	OBJECT_END_OF_GROUP = 0x02,
	OBJECT_ZERO_ID = 0x04,
	OBJECT_DEFAULT_PRIORITY = 0x08,
	OBJECT_STATUS = 0x20,
	OBJECT_KNOWN = 0x2f,
};

enum object_status {
	OBJECT_NORMAL = 0,
	OBJECT_ENDS_GROUP = 3,
	OBJECT_ENDS_TRACK = 4,
};

struct object_datagram {
	__u64 alias;
	__u64 group;
	__u64 object;
	__u32 type;
	__s32 priority; /* publisher priority; negative: the default of the track */
	__u32 rest_at;	/* position of the first byte after the track alias */
	__u32 pad;
};

/* Returns the length of a vi64 in bytes: one more than the number of leading ones in its first byte. Each 16-bit part
 * of a 64-bit word holds one test: if that byte is at least 0x80, at least 0xc0, ... at least 0xff. Comparisons would
 * be branches, and the verifier would follow both sides of each at every integer.
 */
static __always_inline __u32 vi64_width(__u8 first)
{
	const __u64 ones = 0x0001000100010001;
	__u64 lanes = first * ones;
	/* four tests: first byte >= 0x80, 0xc0, 0xe0, 0xf0 */
	__u64 low = (lanes + 0x0080004000200010) >> 8 & ones;
	/* four tests: first byte >= 0xf8, 0xfc, 0xfe, 0xff */
	__u64 high = (lanes + 0x0008000400020001) >> 8 & ones;

	return 1 + ((low + high) * ones >> 48);
}

/* Reads a vi64. Returns an error (not 0) if it extends beyond the end of the datagram. */
static __always_inline int vi64_take(struct frame_walk *walk, const __u8 *text, __u64 *value)
{
	const __u8 *from = text + (walk->at & FRAMES_MASK);
	__u32 width = vi64_width(from[0]);

	if (width == 9)
		*value = __builtin_bswap64(load64(from + 1));
	else
		*value = __builtin_bswap64(load64(from)) << width >> (64 - 7 * width);
	return frame_skip(walk, width);
}

static __always_inline __u32 vi64_len(__u64 value)
{
	return value < 1ULL << 7    ? 1
	       : value < 1ULL << 14 ? 2
	       : value < 1ULL << 21 ? 3
	       : value < 1ULL << 28 ? 4
	       : value < 1ULL << 35 ? 5
	       : value < 1ULL << 42 ? 6
	       : value < 1ULL << 49 ? 7
	       : value < 1ULL << 56 ? 8
				    : 9;
}

/* Writes a vi64 of `len` bytes so that it ends before `end`. The value must fit in `len` bytes. At least the 8 bytes
 * before `end` are overwritten.
 */
static __always_inline void vi64_put_long_before(__u8 *end, __u64 value, __u32 len)
{
	__u64 prefix = 0xff00 >> (len - 1) & 0xff;

	if (len == 9)
		end[-9] = 0xff;
	else
		value |= prefix << (8 * (len - 1));
	store64(end - 8, __builtin_bswap64(value));
}

/* Writes a vi64 in its shortest form, so that it ends before `end`. Returns its length. */
static __always_inline __u32 vi64_put_before(__u8 *end, __u64 value)
{
	__u32 len = vi64_len(value);

	vi64_put_long_before(end, value, len);
	return len;
}

/* Checks the properties, the status and the payload of a datagram. Returns an error (not 0) if it is malformed. */
static __always_inline int object_check_rest(struct frame_walk *walk, const __u8 *text, __u32 type)
{
	__u64 len, status = OBJECT_NORMAL;

	if (type & OBJECT_PROPERTIES &&
	    (vi64_take(walk, text, &len) || !len || len > OBJECT_PROPERTIES_MAX || frame_skip(walk, len)))
		return -1;
	if (!(type & OBJECT_STATUS))
		return 0;
	if (vi64_take(walk, text, &status) || walk->at != walk->end)
		return -1;
	if (status == OBJECT_NORMAL)
		return 0;
	return type & OBJECT_PROPERTIES || (status != OBJECT_ENDS_GROUP && status != OBJECT_ENDS_TRACK);
}

/* Parses the datagram of `len` bytes at position `at`. Returns an error (not 0) if it is malformed, or is a padding
 * datagram without an object.
 */
static __always_inline int object_datagram(const __u8 *text, __u32 at, __u32 len, struct object_datagram *out)
{
	struct frame_walk walk = {.at = at, .end = at + len};
	__u64 type;

	if (vi64_take(&walk, text, &type) || type & ~(__u64)OBJECT_KNOWN ||
	    (type & OBJECT_STATUS && type & OBJECT_END_OF_GROUP))
		return -1;
	out->type = type;
	if (vi64_take(&walk, text, &out->alias))
		return -1;
	out->rest_at = walk.at;
	out->object = 0;
	out->priority = -1;
	if (vi64_take(&walk, text, &out->group) ||
	    (!(type & OBJECT_ZERO_ID) && vi64_take(&walk, text, &out->object)))
		return -1;
	if (!(type & OBJECT_DEFAULT_PRIORITY)) {
		out->priority = text[walk.at & FRAMES_MASK];
		if (frame_skip(&walk, 1))
			return -1;
	}
	return object_check_rest(&walk, text, type);
}

#endif
