/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The state of a parser of subgroup streams, which the program and userspace exchange. The build generates Rust types
 * from this file. millrace-moq's data::Position has the same fields, with the same values after the same bytes.
 */
#ifndef MILLRACE_SUBGROUP_INTF_H
#define MILLRACE_SUBGROUP_INTF_H

#include <linux/types.h>

/* The field of the stream that the next byte belongs to. */
enum subgroup_field {
	SUBGROUP_TYPE = 0,
	SUBGROUP_ALIAS,
	SUBGROUP_GROUP,
	SUBGROUP_ID,
	SUBGROUP_PRIORITY,
	SUBGROUP_OBJECT, /* the object ID, written as its difference to the previous object ID, minus 1 */
	SUBGROUP_PROPERTIES_LENGTH,
	SUBGROUP_IN_PROPERTIES,
	SUBGROUP_LENGTH, /* the length of an object's payload */
	SUBGROUP_STATUS,
	SUBGROUP_IN_PAYLOAD,
	SUBGROUP_OPAQUE, /* a stream without framing, whose bytes are not parsed */
	SUBGROUP_OVER,	 /* no field follows, because the stream has ended */
	SUBGROUP_BROKEN, /* no field follows, because the stream is malformed */
};

enum subgroup_flags {
	SUBGROUP_HAS_PREVIOUS = 0x01,
	SUBGROUP_WITH_PROPERTIES = 0x02, /* the object whose header is being read has properties */
	SUBGROUP_ENDED = 0x04,		 /* the last object's status says that no object follows */
};

/* The state of a parser after a part of a subgroup stream. Members that the current `field` does not use are 0. */
struct subgroup_state {
	__u64 value;	/* value of the bytes that were read of an incomplete integer */
	__u64 left;	/* bytes of properties or payload that are still to be read */
	__u64 previous; /* ID of the last object whose ID was read */
	__u8 field;	/* enum subgroup_field */
	__u8 missing; /* number of bytes that are missing from the integer being read; 0: none is being read */
	__u8 flags;   /* enum subgroup_flags */
	__u8 kind;    /* type of the subgroup stream, its first field */
	__u32 pad;
};
_Static_assert(sizeof(struct subgroup_state) == 32, "subgroup_state has no hidden padding");

#endif
