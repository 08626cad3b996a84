/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Decrypts and encrypts packets with the keystream that userspace has precomputed, or with one that the program
 * computes itself.
 */
#ifndef MILLRACE_RELAY_KEYSTREAM_H
#define MILLRACE_RELAY_KEYSTREAM_H

#include "quic_packet.h"
#include "relay_maps.h"

#define NUMBER_MASK ((1ULL << RELAY_NUMBER_BITS) - 1)

/* Returns the entry for a packet in the connection's ring of precomputed keystreams. The entry's keystream may not have
 * been computed yet. Returns NULL if the connection has no such ring.
 */
static __always_inline struct relay_keystream *find_keystream(const struct relay_ring *ring, __u64 word)
{
	__u64 run = READ_ONCE(ring->run);
	__u32 len = run >> 32;
	/* The length `len` of the keystream ring is a power of two, so the mask takes the packet number modulo `len`.
	 */
	__u32 index = (__u32)run + (word & (len - 1));

	return len ? bpf_map_lookup_elem(&keystreams, &index) : NULL;
}

/* Reports whether the keystream entry belongs to the packet. The atomic operation is a full barrier, so a keystream
 * that was read before this check belongs to the packet, too.
 */
static __always_inline int is_ready(struct relay_keystream *entry, __u64 word)
{
	return __sync_fetch_and_add(&entry->word, 0) == word + 1;
}

static __noinline int count_lookup(__u64 *lookups, enum relay_lookup lookup)
{
	if (lookup < RELAY_LOOKUPS)
		__sync_fetch_and_add(&lookups[lookup], 1);
	return 0;
}

static __always_inline enum relay_lookup lookup_of(const struct relay_keystream *entry, int hit)
{
	if (hit)
		return RELAY_LOOKUP_HIT;
	return entry && entry->word ? RELAY_LOOKUP_STALE : RELAY_LOOKUP_MISS;
}

/* Decrypts the packet in place. If userspace replaces the keystream meanwhile, authentication fails and the packet is
 * left to userspace.
 */
static __noinline int open_text(struct relay_upstream *upstream, const struct quic_keys *keys, __u64 word,
				struct work *work, const struct quic_extent *extent)
{
	struct relay_keystream *entry = find_keystream(&upstream->ring, word);
	int hit = entry && is_ready(entry, word) && extent->text_bytes <= entry->bytes;

	count_lookup(upstream->lookups, lookup_of(entry, hit));
	if (hit)
		return quic_open_with(keys, &entry->keystream, &work->in, extent);
	return quic_open(keys, word & NUMBER_MASK, &work->in, extent);
}

/* Encrypts a packet from one buffer into another. If userspace replaces the keystream meanwhile, the packet is
 * encrypted again with a keystream that the program computes.
 */
static __noinline int seal_text(struct relay_downstream *downstream, const struct quic_keys *keys,
				struct work *work, const struct quic_extent *extent)
{
	__u64 word = work->packet.word;
	struct relay_keystream *entry = find_keystream(&downstream->ring, word);
	int hit = entry && is_ready(entry, word) && extent->text_bytes <= entry->bytes &&
		  !quic_seal_with(keys, &entry->keystream, &work->out, &work->in, extent) &&
		  is_ready(entry, word);

	count_lookup(downstream->lookups, lookup_of(entry, hit));
	return hit ? 0 : quic_seal(keys, word & NUMBER_MASK, &work->out, &work->in, extent);
}

#endif
