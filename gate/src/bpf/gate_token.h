/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Tokens of Retry packets (RFC 9000, section 8.1). The same code in Rust is gate/src/kernel/token.rs. */
#ifndef MILLRACE_GATE_TOKEN_H
#define MILLRACE_GATE_TOKEN_H

#include "gate_intf.h"
#include "siphash.h"

#define GATE_TOKEN_MAGIC 0x3267726d /* "mrg2" */
#define GATE_TOKEN_WORDS 8	    /* words that the tag covers, with the scope in place of its first half */

/* Returns the token's tag and clears it in the token. */
static __always_inline struct bytes16 gate_token_tag(const struct siphash_key *key, struct gate_token *token,
						     __u64 scope)
{
	store64(token->tag, scope);
	return siphash128(key->words, (const __u8 *)token, GATE_TOKEN_WORDS);
}

static __always_inline int gate_token_is_ours(const struct gate_token *token)
{
	return load32(token->magic) == GATE_TOKEN_MAGIC;
}

/* Reports whether the token was made with the key, for this scope and address, less than `seconds` ago. Clears its
 * tag.
 */
static __always_inline int gate_token_is_valid(const struct siphash_key *key, struct gate_token *token,
					       __u64 scope, const struct gate_address *address, __be16 port,
					       __u64 now, __u32 seconds)
{
	__u64 issued = __builtin_bswap32(token->issued);
	struct bytes16 tag = load128(token->tag);

	return !differ128(gate_token_tag(key, token, scope), tag) &&
	       !differ128(load128(token->address.bytes), load128(address->bytes)) && token->port == port &&
	       token->id_len <= GATE_ID_MAX && issued <= now + 1 && now <= issued + seconds;
}

#endif
