/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Tokens of Retry packets (RFC 9000, section 8.1). gate/src/kernel/token.rs has the same code in Rust. */
#ifndef MILLRACE_GATE_TOKEN_H
#define MILLRACE_GATE_TOKEN_H

#include "gate_intf.h"
#include "siphash.h"

#define GATE_TOKEN_MAGIC 0x3267726d /* the bytes "mrg2", with which every token begins */
/* Number of 8-byte words from which a token's tag is computed; the last is a hash of the guarded application's name. */
#define GATE_TOKEN_WORDS 8

/* Returns the tag that the token should have. Overwrites the first half of the token's tag with
 * gate_policy.token_scope.
 */
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

/* Reports whether the token was made with this key, for this guarded application (`scope`), address and port, at most
 * `seconds` ago. Overwrites the token's tag. A token may be dated one second ahead, since clocks of several machines
 * differ.
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
