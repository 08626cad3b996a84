/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The TCP option by which two hosts agree: kind 253 with an experiment's ID of 32 bits (RFC 6994). It also compiles
 * natively. docs/graft.md has the exchange.
 */
#ifndef MILLRACE_GRAFT_OPTION_H
#define MILLRACE_GRAFT_OPTION_H

#include <linux/types.h>

#define GRAFT_OPTION_KIND    253
#define GRAFT_OPTION_BYTES   12
#define GRAFT_OPTION_EXID    "\x4d\x52\x67\x31" /* "MRg1" */
#define GRAFT_OPTION_VERSION 1

enum graft_message {
	GRAFT_OFFER = 1, /* in the SYN */
	GRAFT_ANSWER,	 /* in the SYN-ACK */
	GRAFT_CONFIRM,	 /* from the ACK on, until the server has sent something */
	GRAFT_REFUSE,	 /* in the SYN-ACK */
};

/* As it is on the wire. */
struct graft_option {
	__u8 kind;
	__u8 bytes;
	__u8 exid[4];
	__u8 version;
	__u8 message;
	__be32 graft; /* first bytes of the SHA-256 of the sender's; in a CONFIRM, of the server's */
};

_Static_assert(sizeof(struct graft_option) == GRAFT_OPTION_BYTES, "no padding");

/* What was found where the option was looked for. */
enum graft_reading {
	GRAFT_READ_NONE,
	GRAFT_READ_BAD,	  /* of another length, or no message */
	GRAFT_READ_OTHER, /* of another version, which may be of another form behind that */
	GRAFT_READ_OK,
};

/* `option`: a whole option of ours as far as it was copied, `bytes` of it. */
static inline __attribute__((always_inline)) enum graft_reading graft_read(const struct graft_option *option,
									   __u32 bytes)
{
	if (!bytes)
		return GRAFT_READ_NONE;
	if (bytes < 8 || option->kind != GRAFT_OPTION_KIND || option->bytes < 8)
		return GRAFT_READ_BAD;
	if (__builtin_memcmp(option->exid, GRAFT_OPTION_EXID, sizeof(option->exid)))
		return GRAFT_READ_NONE;
	if (option->version != GRAFT_OPTION_VERSION)
		return GRAFT_READ_OTHER;
	if (bytes != GRAFT_OPTION_BYTES || option->bytes != GRAFT_OPTION_BYTES)
		return GRAFT_READ_BAD;
	if (option->message < GRAFT_OFFER || option->message > GRAFT_REFUSE)
		return GRAFT_READ_BAD;
	return GRAFT_READ_OK;
}

#endif
