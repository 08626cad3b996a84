/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Loads and stores of words at any address, for BPF and native code, without a libc. */
#ifndef MILLRACE_BYTES_H
#define MILLRACE_BYTES_H

#include "util.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "loads and stores are little endian");

/* For BPF, clang compiles a memcpy from unaligned memory to loads of single bytes. The kernel allows unaligned access
 * to map values and packets, but not to the stack, and the JITs of common architectures compile it to one instruction.
 */
#ifdef __bpf__
#define DEFINE_UNALIGNED(bits)                                             \
	static __always_inline __u##bits load##bits(const void *from)      \
	{                                                                  \
		return *(const __u##bits *)from;                           \
	}                                                                  \
	static __always_inline void store##bits(void *to, __u##bits value) \
	{                                                                  \
		*(__u##bits *)to = value;                                  \
	}
#else
#define DEFINE_UNALIGNED(bits)                                             \
	static __always_inline __u##bits load##bits(const void *from)      \
	{                                                                  \
		__u##bits value;                                           \
		__builtin_memcpy(&value, from, sizeof(value));             \
		return value;                                              \
	}                                                                  \
	static __always_inline void store##bits(void *to, __u##bits value) \
	{                                                                  \
		__builtin_memcpy(to, &value, sizeof(value));               \
	}
#endif

DEFINE_UNALIGNED(16)
DEFINE_UNALIGNED(32)
DEFINE_UNALIGNED(64)

/* A block of 16 bytes, the unit of Poly1305 and of GHASH. */
struct bytes16 {
	__u64 low;  /* the first 8 bytes, little endian */
	__u64 high; /* the last 8 bytes, little endian */
};

static __always_inline struct bytes16 load128(const __u8 *from)
{
	return (struct bytes16){.low = load64(from), .high = load64(from + 8)};
}

static __always_inline void store128(__u8 *to, struct bytes16 value)
{
	store64(to, value.low);
	store64(to + 8, value.high);
}

static __always_inline struct bytes16 xor128(struct bytes16 a, struct bytes16 b)
{
	return (struct bytes16){.low = a.low ^ b.low, .high = a.high ^ b.high};
}

/* Returns the first `count` bytes of `value`, followed by zeroes. `count` is at least 1. */
static __always_inline struct bytes16 first128(struct bytes16 value, __u32 count)
{
	__u64 mask = ~0ULL >> (-count * 8 & 63);

	if (count >= 16)
		return value;
	if (count <= 8)
		return (struct bytes16){.low = value.low & mask};
	return (struct bytes16){.low = value.low, .high = value.high & mask};
}

/* Returns not 0 if the values differ, in constant time. */
static __always_inline int differ128(struct bytes16 a, struct bytes16 b)
{
	__u64 difference = (a.low ^ b.low) | (a.high ^ b.high);

	return difference != 0;
}

#endif
