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

#define CURSORS	     4096 /* packets that wait at a time; more take the entries of older ones */
#define CURSOR_LOW   0xffffU
#define GOLDEN_RATIO 0x9e3779b9U /* of 2^32: its multiples are spread evenly */

/* Where the fan-out of a packet goes on in its next run. */
struct cursor_entry {
	__u32 id;   /* the packet's mark while it waits; 0: nobody's */
	__u32 mark; /* the packet's own, which it gets back */
	__u32 at;   /* the next copy, in the program's own terms */
	__u32 runs; /* so far */
	struct cursor_kept kept;
};

/* Low bits of a mark -> where the next run of that packet goes on. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct cursor_entry);
	__uint(max_entries, CURSORS);
} cursors SEC(".maps");

/* How many cursors were handed out, of which the low bits name the next one. */
__u32 cursors_used = 0;

/* If the mark names a cursor, takes it and gives the packet its own mark back. Not inlined, so that its stack is not the program's. */
static __noinline int take_cursor(struct __sk_buff *skb, struct cursor_entry *cursor)
{
	__u32 id = skb->mark, key = id & (CURSORS - 1);
	struct cursor_entry *entry;

	*cursor = (struct cursor_entry){};
	if ((id & ~CURSOR_LOW) != CURSOR_ID)
		return 0;
	entry = bpf_map_lookup_elem(&cursors, &key);
	if (!entry || __sync_val_compare_and_swap(&entry->id, id, 0) != id)
		return 0;
	*cursor = *entry;
	cursor->id = id;
	skb->mark = entry->mark;
	bpf_set_hash_invalid(skb);
	return 1;
}

/* Queues the packet for another run, at `at`, if it may take one. Not 0: it has none, and is as it was. */
static __always_inline int queue_again(struct __sk_buff *skb, const struct cursor_entry *cursor, __u32 at,
				       const struct cursor_kept *kept, __u32 max_runs)
{
	__u32 id = CURSOR_ID | (__sync_fetch_and_add(&cursors_used, 1) & CURSOR_LOW),
	      key = id & (CURSORS - 1);
	struct cursor_entry *entry = bpf_map_lookup_elem(&cursors, &key);
	__u32 mark = skb->mark, runs = cursor->runs + 1;

	if (!entry || runs >= max_runs)
		return -1;
	*entry = (struct cursor_entry){.id = id, .mark = mark, .at = at, .runs = runs, .kept = *kept};
	skb->mark = id;
	/* Runs take turns on the CPUs that the interface spreads its packets over, if it does. */
	bpf_set_hash(skb, runs * GOLDEN_RATIO);
	if (!bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS))
		return 0;
	skb->mark = mark;
	bpf_set_hash_invalid(skb);
	__sync_val_compare_and_swap(&entry->id, id, 0);
	return -1;
}

#endif
