/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A fan-out that takes several runs of the program.
 *
 * One run sends no more than a fixed number of copies. If there are more to send, the packet goes, as it came, to the end
 * of the queue of packets that wait for the stack. It reaches this program again behind everybody who came meanwhile,
 * and on another CPU if the interface spreads its packets (RPS). Where to go on stands in an entry of `cursors`, and the
 * packet's mark names the entry: a mark does not come by wire.
 *
 * A program that includes this says before what else it keeps of a packet between its runs (struct cursor_kept), and which
 * marks are its own (CURSOR_ID).
 */
#ifndef MILLRACE_FAN_RUNS_H
#define MILLRACE_FAN_RUNS_H

#include "util.h"

#define CURSORS	     4096 /* packets that wait at the same time; others get no further run */
#define CURSOR_LOW   0xffffU
#define CURSOR_BUSY  1U			  /* in place of an ID: the entry is being written */
#define CURSOR_NS    (10 * 1000000000ULL) /* a packet that waits longer was lost with its interface */
#define GOLDEN_RATIO 0x9e3779b9U	  /* of 2^32: its multiples are spread evenly */

/* The place where the fan-out of a packet goes on in its next run.
 *
 * `id` says who owns the entry, and changes by atomic exchange alone: 0, free; CURSOR_BUSY, the run that writes it; otherwise the
 * packet with this mark. free_cursor() and queue_again() give it to a packet, and take_cursor() frees it when the packet comes by. An
 * entry whose packet never comes is taken after CURSOR_NS.
 */
struct cursor_entry {
	__u32 id;   /* the packet's mark while it waits; 0: the entry is free */
	__u32 mark; /* the packet's original mark, which it gets back */
	__u32 at;   /* the next copy, as the program counts them */
	__u32 runs; /* number of runs so far */
	__u64 since_ns;
	struct cursor_kept kept;
};

/* Maps the low bits of a mark to the place where the packet's next run goes on. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct cursor_entry);
	__uint(max_entries, CURSORS);
} cursors SEC(".maps");

/* Number of cursors handed out. Its low bits name the next one. */
__u32 cursors_used = 0;

/* If the mark names a cursor, takes the cursor and gives the packet its own mark back. Not inlined:
 * it has a stack frame of its own.
 */
static __noinline int take_cursor(struct __sk_buff *skb, struct cursor_entry *cursor)
{
	__u32 id = skb->mark, key = id & (CURSORS - 1);
	struct cursor_entry *entry;

	*cursor = (struct cursor_entry){};
	if ((id & ~CURSOR_LOW) != CURSOR_ID)
		return 0;
	entry = bpf_map_lookup_elem(&cursors, &key);
	if (!entry)
		return 0;
	/* Read before the entry is given back: the next packet may get it at once. */
	*cursor = *entry;
	if (__sync_val_compare_and_swap(&entry->id, id, 0) != id) {
		*cursor = (struct cursor_entry){};
		return 0;
	}
	cursor->id = id;
	skb->mark = cursor->mark;
	bpf_set_hash_invalid(skb);
	return 1;
}

/* Returns a free entry, whose ID is CURSOR_BUSY until it is written; NULL: its packet still waits. */
static __always_inline struct cursor_entry *free_cursor(__u32 key, __u64 now_ns)
{
	struct cursor_entry *entry = bpf_map_lookup_elem(&cursors, &key);
	__u32 id;

	if (!entry)
		return NULL;
	id = READ_ONCE(entry->id);
	if (id == CURSOR_BUSY || (id && now_ns - entry->since_ns < CURSOR_NS))
		return NULL;
	return __sync_val_compare_and_swap(&entry->id, id, CURSOR_BUSY) == id ? entry : NULL;
}

/* Queues the packet for another run, at `at`, if it may have one. Returns not 0 if not; the packet
 * is unchanged then.
 */
static __always_inline int queue_again(struct __sk_buff *skb, const struct cursor_entry *cursor, __u32 at,
				       const struct cursor_kept *kept, __u32 max_runs)
{
	/* A fan-out in progress stays at its entry, under another ID. */
	__u32 next = cursor->id ? cursor->id + CURSORS : __sync_fetch_and_add(&cursors_used, 1);
	__u32 id = CURSOR_ID | (next & CURSOR_LOW), key = id & (CURSORS - 1);
	__u32 mark = skb->mark, runs = cursor->runs + 1;
	__u64 now_ns = bpf_ktime_get_ns();
	struct cursor_entry *entry;

	if (runs >= max_runs)
		return -1;
	entry = free_cursor(key, now_ns);
	if (!entry)
		return -1;
	entry->mark = mark;
	entry->at = at;
	entry->runs = runs;
	entry->since_ns = now_ns;
	entry->kept = *kept;
	/* The ID is written last, with a barrier: the entry is complete now. */
	__sync_lock_test_and_set(&entry->id, id);
	skb->mark = id;
	/* A new hash moves the runs over the CPUs that the interface spreads its packets to, if it does. */
	bpf_set_hash(skb, runs * GOLDEN_RATIO);
	if (!bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS))
		return 0;
	skb->mark = mark;
	bpf_set_hash_invalid(skb);
	__sync_val_compare_and_swap(&entry->id, id, 0);
	return -1;
}

#endif
