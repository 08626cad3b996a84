/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The erasure code of the function `fec`. Parity packet r of packets 0, 1, ... of a block is the sum over i of x^(r *
 * i) times packet i, in 16-bit elements of gf16.h; the lengths are encoded the same way. Parity 0 is the XOR of the
 * packets, and parities 0 and 1 are those of RAID-6. Any n parities recover any n packets, since every square part of
 * the factors' matrix is invertible (for 4 parities and 63 packets; a test checks all).
 *
 * A sum is computed from the last packet to the first, so that each step multiplies by x^r and adds a packet
 * (Horner). Missing packets count as zeroes. The factor x^(r * i) of a missing packet results from the same
 * steps, with the number 1 in place of the packet.
 */
#ifndef MILLRACE_PARITY_H
#define MILLRACE_PARITY_H

#include "bytes.h"
#include "gf16.h"
#include "packet_kept.h"

/* most parity packets of a block: a 64-bit word holds a 16-bit element for each of them */
#define PARITY_MAX 4
#define BLOCK_MAX  64 /* a block has fewer data packets than this */

/* Header in front of a parity packet's payload. */
struct graft_parity {
	__u8 row;
	__u8 packets;
	/* sum over the lengths of the block's payloads, with the same factors as the sum over their contents */
	__be16 length;
};

/* A row of the system of linear equations from which missing packets are computed. Row operations apply to all words of
 * the row.
 */
struct row {
	/* factors by which the missing packets are multiplied in this equation, 16 bits each */
	__u64 factors;
	__u64 length; /* sum of the packets' lengths, computed like the sum of their contents */
	__u8 bits[KEPT_BYTES + 8];
};

#define ROW_BYTES(bytes) (__builtin_offsetof(struct row, bits) + (bytes))

/* The sums over the packets of a block. They are in a map instead of on the stack: if the verifier knew the number of
 * iterations of the loops, it would check each iteration.
 */
struct sum {
	/* describes the packet that is added next; 0: it was received; otherwise it is missing, and the 16-bit element
	 * at the index of this missing packet is 1
	 */
	__u64 unit;
	__u32 bytes; /* length of the longest packet, rounded up to whole 16-bit elements, in bytes */
	__u32 count; /* number of missing packets */
	__u32 failed;
	__u32 numbers[PARITY_MAX]; /* packet numbers of the missing packets */
	/* for each missing packet, in the order of `numbers`: index of the row that contains the packet once the
	 * equations are solved
	 */
	__u32 order[PARITY_MAX];
	__u32 pad;
	struct row rows[PARITY_MAX];
	struct kept nothing;
};

static __always_inline struct row *parity_row(struct sum *sum, __u32 index)
{
	return &sum->rows[index & (PARITY_MAX - 1)];
}

/* Without this barrier, clang replaces the loop by a call of memset, which BPF does not have. */
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

/* Multiplies one 64-bit word of each row r by x^r, and adds the packet's word at the same offset to it. */
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

/* Adds a packet to all rows. Packets are added from the last one of the block to the first. Bytes behind the
 * packet have to be zero up to a multiple of 8.
 */
static __always_inline int parity_add(struct sum *sum, const struct kept *kept, const __u32 rows)
{
	__u64 *factors[] = PARITY_WORDS(sum, factors), *lengths[] = PARITY_WORDS(sum, length);
	__u32 bytes = kept->bytes, longest;

	if (bytes >= KEPT_BYTES)
		return -1;
	/* Elements have 16 bits, so lengths are rounded up to a multiple of 2 bytes. */
	if (bytes > sum->bytes)
		sum->bytes = (bytes + 1) & ~1U;
	parity_step(factors, rows, sum->unit);
	parity_step(lengths, rows, bytes);
	longest = READ_ONCE(sum->bytes);
	for (__u32 at = 0; at < KEPT_BYTES; at += 8) {
		__u64 *bits[] = PARITY_BITS(sum, at), left = (__u64)at - bytes;

		if (at >= longest)
			break;
		/* Bytes after the packet's end are masked to zero. A branch in place of the mask would double the paths
		 * that the verifier checks in each iteration.
		 */
		OPAQUE(left);
		parity_step(bits, rows, load64(kept->payload + at) & ((__s64)left >> 63));
	}
	return 0;
}

/* --- Solving for the missing packets --- */

/* Multiplies row `from` by `times` and adds the product to row `to`. If `is_new`, row `to` is set to the product. The
 * function is global, so that the verifier checks it once instead of at each call.
 */
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

/* Solves the equations by Gauss-Jordan elimination. No pivot is zero, since every square part of the matrix
 * is invertible.
 */
__noinline int parity_solve(struct sum *sum)
{
	if (!sum)
		return -1;
	for (__u32 one = 0; one < PARITY_MAX; one++) {
		__u32 row = sum->order[one];

		if (one >= sum->count)
			break;
		/* Scales the row so that the pivot is 1. */
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
