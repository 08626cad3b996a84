/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Tokens of Retry packets (RFC 9000, section 8.1). Their twin in Rust is gate/token.rs. */
#ifndef MILLRACE_GATE_TOKEN_H
#define MILLRACE_GATE_TOKEN_H

#include "gate_intf.h"
#include "siphash.h"

#define GATE_TOKEN_MAGIC 0x3167726d /* "mrg1" */
#define GATE_TOKEN_WORDS 7	    /* that the tag covers */

static __always_inline struct bytes16 gate_token_tag(const struct siphash_key *key,
						     const struct gate_token *token)
{
	return siphash128(key->words, (const __u8 *)token, GATE_TOKEN_WORDS);
}

static __always_inline int gate_token_is_ours(const struct gate_token *token)
{
	return load32(token->magic) == GATE_TOKEN_MAGIC;
}

/* Whether it was made with the key, for this address, less than `seconds` ago. */
static __always_inline int gate_token_is_valid(const struct siphash_key *key, const struct gate_token *token,
					       const struct gate_address *address, __be16 port, __u64 now,
					       __u32 seconds)
{
	__u64 issued = __builtin_bswap32(token->issued);

	return !differ128(gate_token_tag(key, token), load128(token->tag)) &&
	       !differ128(load128(token->address.bytes), load128(address->bytes)) && token->port == port &&
	       token->id_len <= GATE_ID_MAX && issued <= now + 1 && now <= issued + seconds;
}

#endif
