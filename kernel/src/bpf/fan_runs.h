/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Sends copies of a packet to many receivers (fan-out) in several runs of the BPF program.
 *
 * One run sends at most a fixed number of copies. If more are to be sent, the program queues the unchanged packet
 * behind all packets that the network stack has not processed yet. The program gets the packet again after those, on
 * another CPU if the interface spreads its packets (RPS). An entry of the map `cursors` has the index of the next copy
 * to send. The packet's mark (skb->mark) is the ID of the entry: no sender can forge it, since marks are not
 * transmitted.
 *
 * Before including this header, a program must define struct cursor_kept, the further state that it keeps of a packet
 * between runs, and CURSOR_ID, the high bits of its marks.
 */
#ifndef MILLRACE_FAN_RUNS_H
#define MILLRACE_FAN_RUNS_H

#include "util.h"

/* largest number of packets that may wait at the same time for the next run of a fan-out program */
#define CURSORS	    4096
#define CURSOR_LOW  0xffffU /* the bits of skb->mark that differ between packets; the others are CURSOR_ID */
#define CURSOR_BUSY 1U	    /* value of `id` while a run of the program writes the entry */
#define CURSOR_NS   (10 * 1000000000ULL) /* a packet that waits longer for its next run counts as lost */
/* 2^32 divided by the golden ratio; its multiples give well distributed hashes */
#define GOLDEN_RATIO 0x9e3779b9U

/* The state of sending a packet's copies, which the next run of the program for this packet continues.
 *
 * `id` names the packet that owns the entry, and changes only by atomic exchange. 0 means that the entry is free,
 * CURSOR_BUSY that a run writes it; any other value is the mark of the packet that owns it. free_cursor() and
 * queue_again() give the entry to a packet, and take_cursor() frees it when the packet arrives. If the packet
 * never arrives, another packet can get the entry after CURSOR_NS.
 */
struct cursor_entry {
	__u32 id;   /* skb->mark of the packet while it is queued for its next run; 0 if the entry is free */
	__u32 mark; /* the packet's original mark, which is restored */
	__u32 at;   /* index of the next copy to send */
	__u32 runs; /* number of runs of the program for the packet so far */
	__u64 since_ns; /* time by CLOCK_MONOTONIC at which the packet was queued for its next run */
	struct cursor_kept kept;
};

/* Low bits of a packet's mark (skb->mark) -> state of sending its copies. */
BPF_MAP(ARRAY, cursors, __u32, struct cursor_entry, CURSORS);

/* Number of times that a packet's copies were continued in another run. Its low bits are the index in the map `cursors`
 * at which the next entry is allocated.
 */
__u32 cursors_used = 0;

/* If the packet's mark (skb->mark) is the ID of an entry of `cursors`, copies and frees the entry and restores the
 * packet's own mark. Returns 1 if so. The function is not inlined, so that it has its own stack frame.
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
	/* The entry is copied before it is freed, because another packet may get it at once. */
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

/* Allocates the entry at index `key` of the map `cursors`, and sets its ID to CURSOR_BUSY until it is written. Returns
 * NULL if a packet that is queued for its next run still owns the entry.
 */
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

/* Queues the packet for another run, which continues with copy `at`. Returns not 0 if the packet may have no further
 * run, or there is no free entry; the packet is then unchanged.
 */
static __always_inline int queue_again(struct __sk_buff *skb, const struct cursor_entry *cursor, __u32 at,
				       const struct cursor_kept *kept, __u32 max_runs)
{
	/* A packet that had runs before keeps its entry in `cursors` (the same index), with a new ID. */
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
	/* The ID is written last, with a memory barrier: only now is the entry complete. */
	__sync_lock_test_and_set(&entry->id, id);
	skb->mark = id;
	/* With a new skb->hash the next run may be on another CPU, if the interface spreads its packets. */
	bpf_set_hash(skb, runs * GOLDEN_RATIO);
	if (!bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS))
		return 0;
	skb->mark = mark;
	bpf_set_hash_invalid(skb);
	__sync_val_compare_and_swap(&entry->id, id, 0);
	return -1;
}

#endif
