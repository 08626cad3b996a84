/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A Bloom filter with one hash function, in front of the maps of connections. A key whose bit (its mark) is not set is
 * in none of the maps. In a flood of random addresses and IDs, a packet would otherwise search three hash tables, and
 * each search would miss the CPU's cache. The filter has 256 KiB, and a look-up reads one cache line.
 *
 * A key's bit is set after the key was put into a map. A single bit cannot be cleared, because several keys may share
 * it. So there are two bit sets, called ages. About every second the bits of all keys in the maps are set again in the
 * newer set (gate_expire). Every few seconds userspace clears the older set, which then becomes the newer
 * (gate_forget). A walk over a map can miss an entry that moves meanwhile, but not the same entry in all walks before a
 * set is cleared.
 */
#ifndef MILLRACE_GATE_MARKS_H
#define MILLRACE_GATE_MARKS_H

#include "gate_maps.h"

enum gate_mark {
	MARK_SERVER_ID, /* the filter's bit for a key of the map `connections` or `handshakes` */
	MARK_OPENING,	/* the filter's bit for a key of `openings`, the map of admitted Initials */
	MARK_PATH,	/* the filter's bit for a key of the map `paths` */
	MARK_CLIENT,	/* the filter's bit for a key of the map `clients` */
};

/* Returns the Bloom filter's hash of a key. It is not cryptographic: an attacker who finds two keys with the same bit
 * only makes the gate search the maps.
 */
static __always_inline __u64 mark_hash(enum gate_mark kind, const __u32 *words, __u32 count)
{
	__u64 hash = config.mark_seed + kind;

	for (int i = 0; i < count; i += 2) {
		hash ^= words[i] | (i + 1 < count ? (__u64)words[i + 1] << 32 : 0);
		hash *= 0x9e3779b97f4a7c15; /* 2^64 divided by the golden ratio (Fibonacci hashing) */
		hash ^= hash >> 32;
	}
	return hash;
}

static __always_inline struct gate_marks *find_marks(__u64 hash)
{
	__u32 index = hash & ((1 << GATE_MARKS_BITS) - 1);

	return bpf_map_lookup_elem(&marks, &index);
}

static __always_inline __u64 mark_bit(__u64 hash)
{
	return 1ULL << (hash >> GATE_MARKS_BITS & 63);
}

static __always_inline void put_mark(__u64 hash)
{
	__u32 zero = 0;
	struct gate_active *now = bpf_map_lookup_elem(&active, &zero);
	struct gate_marks *at = find_marks(hash);
	__u64 *bits;

	if (!now || !at)
		return;
	bits = now->age & 1 ? &at->bits[1] : &at->bits[0];
	/* The bits of most keys are set already; reading first keeps the cache line shared between CPUs. */
	if (!(*bits & mark_bit(hash)))
		__sync_fetch_and_or(bits, mark_bit(hash));
}

static __always_inline int has_mark(__u64 hash)
{
	const struct gate_marks *at = find_marks(hash);

	return !at || (at->bits[0] | at->bits[1]) & mark_bit(hash);
}

#define HASH_OF(kind, key)   mark_hash(kind, (const __u32 *)(key), sizeof(*(key)) / sizeof(__u32))
#define MARK(kind, key)	     put_mark(HASH_OF(kind, key))
#define IS_MARKED(kind, key) has_mark(HASH_OF(kind, key))

static long forget_marks(void *map, __u32 *key, struct gate_marks *at, const __u32 *age)
{
	if (*age)
		at->bits[1] = 0;
	else
		at->bits[0] = 0;
	return 0;
}

#endif
