/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Where in a subgroup stream a parser stands, as programs and userspace hand it to each other. The build writes
 * Rust's types from here; millrace-moq's data::Position has the same fields, and the same values after the same bytes.
 */
#ifndef MILLRACE_SUBGROUP_INTF_H
#define MILLRACE_SUBGROUP_INTF_H

#include <linux/types.h>

/* What the next byte is of. */
enum subgroup_field {
	SUBGROUP_TYPE = 0,
	SUBGROUP_ALIAS,
	SUBGROUP_GROUP,
	SUBGROUP_ID,
	SUBGROUP_PRIORITY,
	SUBGROUP_OBJECT, /* its ID, less the one before and 1 */
	SUBGROUP_PROPERTIES_LENGTH,
	SUBGROUP_IN_PROPERTIES,
	SUBGROUP_LENGTH, /* of the payload */
	SUBGROUP_STATUS,
	SUBGROUP_IN_PAYLOAD,
	SUBGROUP_OPAQUE, /* a stream without framing: anything goes */
	SUBGROUP_OVER,	 /* its end has come */
	SUBGROUP_BROKEN, /* nothing goes any more */
};

enum subgroup_flags {
	SUBGROUP_HAS_PREVIOUS = 0x01,
	SUBGROUP_WITH_PROPERTIES = 0x02, /* of the object whose header is being read; not empty ones */
	SUBGROUP_ENDED = 0x04,		 /* no object follows */
};

/* What does not matter at a field is 0. */
struct subgroup_state {
	__u64 value;	/* of the integer that is being read, as far as it is there */
	__u64 left;	/* bytes of properties or payload that are to come */
	__u64 previous; /* ID of the last object whose ID is there */
	__u8 field;	/* enum subgroup_field */
	__u8 missing;	/* bytes of the integer that is being read; 0: none of it is there */
	__u8 flags;	/* enum subgroup_flags */
	__u8 kind;	/* type of the stream */
	__u32 pad;
};
_Static_assert(sizeof(struct subgroup_state) == 32, "subgroup_state has no hidden padding");

#endif
