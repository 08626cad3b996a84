/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The code of `fec`: parity r of the packets 0, 1, ... of a block is the sum of x^(r * i) times packet i, as 16-bit elements of
 * gf16.h; lengths are elements, too. Parity 0 is their XOR, and 0 and 1 are what RAID-6 has. As every square part of the matrix of
 * these factors is invertible (for 4 parities and 63 packets; a test looks at all of them), any n parities make any n packets.
 *
 * A sum is taken from the last packet to the first, so that each step multiplies by x^r and adds one (Horner). What is missing
 * counts as zeroes, and its factors come out of the same sum: there, its own packet is the number 1.
 */
#ifndef MILLRACE_PARITY_H
#define MILLRACE_PARITY_H

#include "bytes.h"
#include "gf16.h"
#include "joint_kept.h"

#define PARITY_MAX 4  /* of a block; as many elements as a word has */
#define BLOCK_MAX  64 /* more than a block has packets */

/* In front of a parity packet's payload. */
struct graft_parity {
	__u8 row;
	__u8 packets;
	__be16 length; /* of their payloads, summed as they are */
};

/* An equation. What is done to it is done to all of its words. */
struct row {
	__u64 factors; /* of what is missing, an element each */
	__u64 length;  /* one element */
	__u8 bits[KEPT_BYTES + 8];
};

#define ROW_BYTES(bytes) (__builtin_offsetof(struct row, bits) + (bytes))

/* What a walk over a block makes. Not on the stack: a verifier that knew the counts would look at each turn of the walk. */
struct sum {
	__u64 unit;  /* factors of the packet that is added; 0: it is there */
	__u32 bytes; /* of the longest, in whole elements */
	__u32 count; /* of those that are missing */
	__u32 failed;
	__u32 numbers[PARITY_MAX]; /* of what is missing */
	__u32 order
		[PARITY_MAX]; /* rows of those parities that have come, as many as are missing: which one becomes which */
	__u32 pad;
	struct row rows[PARITY_MAX];
	struct kept nothing;
};

static __always_inline struct row *parity_row(struct sum *sum, __u32 index)
{
	return &sum->rows[index & (PARITY_MAX - 1)];
}

/* Otherwise clang makes one call of it, to what BPF does not have. */
#define SEPARATELY asm volatile("" ::: "memory")

__noinline int parity_clear_row(struct row *row)
{
	if (!row)
		return -1;
	row->factors = row->length = 0;
	for (__u32 at = 0; at < sizeof(row->bits); at += 8) {
		store64(row->bits + at, 0);
		SEPARATELY;
	}
	return 0;
}

static __always_inline void parity_clear(struct sum *sum, const __u32 rows)
{
	sum->bytes = sum->count = sum->failed = 0;
	for (__u32 index = 0; index < PARITY_MAX; index++)
		if (index < rows)
			parity_clear_row(&sum->rows[index]);
}

/* A step of each row: times x^row, and a packet's word. */
static __always_inline void parity_step(__u64 *words[PARITY_MAX], const __u32 rows, __u64 word)
{
	for (__u32 index = 0; index < PARITY_MAX; index++) {
		__u64 turned;

		if (index >= rows)
			break;
		turned = load64(words[index]);
		for (__u32 times = 0; times < index; times++)
			turned = gf16_twice(turned);
		store64(words[index], turned ^ word);
	}
}

#define PARITY_WORDS(sum, field) \
	{&(sum)->rows[0].field, &(sum)->rows[1].field, &(sum)->rows[2].field, &(sum)->rows[3].field}
#define PARITY_BITS(sum, at)                                                           \
	{(__u64 *)((sum)->rows[0].bits + (at)), (__u64 *)((sum)->rows[1].bits + (at)), \
	 (__u64 *)((sum)->rows[2].bits + (at)), (__u64 *)((sum)->rows[3].bits + (at))}

/* The next packet, the one before the last that was added. What is behind its bytes is zero up to the next 8 of them. */
static __always_inline int parity_add(struct sum *sum, const struct kept *kept, const __u32 rows)
{
	__u64 *factors[] = PARITY_WORDS(sum, factors), *lengths[] = PARITY_WORDS(sum, length);
	__u32 bytes = kept->bytes, longest;

	if (bytes >= KEPT_BYTES)
		return -1;
	if (bytes > sum->bytes)
		sum->bytes = (bytes + 1) & ~1U;
	parity_step(factors, rows, sum->unit);
	parity_step(lengths, rows, bytes);
	longest = READ_ONCE(sum->bytes);
	for (__u32 at = 0; at < KEPT_BYTES; at += 8) {
		__u64 *bits[] = PARITY_BITS(sum, at), left = (__u64)at - bytes;

		if (at >= longest)
			break;
		/* All ones, or zero where it has ended: without a branch, of which the verifier would look at both sides each time. */
		OPAQUE(left);
		parity_step(bits, rows, load64(kept->payload + at) & ((__s64)left >> 63));
	}
	return 0;
}

/* --- What is missing --- */

/* `times` a row, added to another one (or, if `is_new`, in its place). Global, so that the verifier looks at it once. */
__noinline int parity_combine(struct sum *sum, __u32 to, __u32 from, __u32 times, __u32 is_new)
{
	__u64 mask = is_new ? 0 : ~0ULL;
	__u32 bytes;

	if (!sum)
		return -1;
	bytes = ROW_BYTES(sum->bytes);
	for (__u32 at = 0; at < ROW_BYTES(KEPT_BYTES); at += 8) {
		__u8 *target = (__u8 *)parity_row(sum, to) + at;

		if (at >= bytes)
			break;
		store64(target, (load64(target) & mask) ^
					gf16_times(load64((__u8 *)parity_row(sum, from) + at), times));
	}
	return 0;
}

static __always_inline __u32 factor_of(struct sum *sum, __u32 index, __u32 missing)
{
	return parity_row(sum, index)->factors >> (16 * missing) & 0xffff;
}

/* Gauss and Jordan. There is no pivot that is zero, as every square part is invertible. */
__noinline int parity_solve(struct sum *sum)
{
	if (!sum)
		return -1;
	for (__u32 one = 0; one < PARITY_MAX; one++) {
		__u32 row = sum->order[one];

		if (one >= sum->count)
			break;
		parity_combine(sum, row, row, gf16_inverse(factor_of(sum, row, one)), 1);
		for (__u32 another = 0; another < PARITY_MAX; another++) {
			__u32 other = sum->order[another];

			if (another != one && another < sum->count)
				parity_combine(sum, other, row, factor_of(sum, other, one), 0);
		}
	}
	return 0;
}

#endif
