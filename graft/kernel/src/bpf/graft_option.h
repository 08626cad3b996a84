/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The TCP option by which two hosts agree on grafts: kind 253 with an experiment's ID of 32 bits (RFC 6994).
 * docs/guide/graft.md has the exchange. The header also compiles as native code, for tests.
 */
#ifndef MILLRACE_GRAFT_OPTION_H
#define MILLRACE_GRAFT_OPTION_H

#include <linux/types.h>

#define GRAFT_OPTION_KIND    253
#define GRAFT_OPTION_BYTES   12
#define GRAFT_OPTION_EXID    "\x4d\x52\x67\x31" /* the experiment's ID, "MRg1" in ASCII */
#define GRAFT_OPTION_VERSION 1

enum graft_message {
	GRAFT_OFFER = 1, /* the client's offer, in the SYN */
	GRAFT_ANSWER,	 /* the server's answer, in the SYN-ACK */
	GRAFT_CONFIRM,	 /* the client's confirmation, in ACKs until the server has sent a packet */
	GRAFT_REFUSE,	 /* the server's refusal, in the SYN-ACK */
};

/* The TCP option of grafts, as it is on the wire. */
struct graft_option {
	__u8 kind;
	__u8 bytes;
	__u8 exid[4];
	__u8 version;
	__u8 message;
	/* first bytes of the SHA-256 of the sender's graft; in a CONFIRM, of the server's graft */
	__be32 graft;
};

_Static_assert(sizeof(struct graft_option) == GRAFT_OPTION_BYTES, "no padding");

/* The result of reading the TCP option of grafts from a TCP header. */
enum graft_reading {
	GRAFT_READ_NONE,
	GRAFT_READ_BAD,	  /* the option is malformed: it has another length, or an unknown message */
	GRAFT_READ_OTHER, /* the option has another version, which may have another layout */
	GRAFT_READ_OK,
};

/* Checks an option that was copied from a TCP header. `bytes` is the option's length, which may exceed the
 * structure.
 */
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
