/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A fan-out that takes several runs of the program.
 *
 * One run sends no more than a fixed number of copies. If there are more to send, the packet goes, as it came, to the end
 * of the queue of packets that wait for the stack. It reaches this program again behind everybody who came meanwhile,
 * and on another CPU if the interface spreads its packets (RPS). Where to go on stands in an entry of `cursors`, and the
 * packet's mark names the entry: a mark does not come by wire.
 *
 * The packet goes up to userspace from its last run. So whoever sees it there finds registered what it became.
 */
#ifndef MILLRACE_RELAY_RUNS_H
#define MILLRACE_RELAY_RUNS_H

#include "relay_maps.h"
#include "util.h"

#define GOLDEN_RATIO 0x9e3779b9U /* of 2^32: its multiples are spread evenly */

/* If the mark names a cursor, takes it and gives the packet its own mark back. */
static __always_inline void take_cursor(struct __sk_buff *skb, struct cursor_entry *cursor)
{
	__u32 id = skb->mark, key = id & (CURSORS - 1);
	struct cursor_entry *entry;

	*cursor = (struct cursor_entry){};
	if ((id & ~CURSOR_LOW) != CURSOR_ID)
		return;
	entry = bpf_map_lookup_elem(&cursors, &key);
	if (!entry || __sync_val_compare_and_swap(&entry->id, id, 0) != id)
		return;
	*cursor = *entry;
	cursor->id = id;
	skb->mark = entry->mark;
	bpf_set_hash_invalid(skb);
}

/* Queues the packet for another run. Not 0: it has none, and is as it was. */
static __noinline int put_back(struct __sk_buff *skb, struct work *work)
{
	__u32 id = CURSOR_ID | (__sync_fetch_and_add(&cursors_used, 1) & CURSOR_LOW),
	      key = id & (CURSORS - 1);
	struct cursor_entry *entry = bpf_map_lookup_elem(&cursors, &key);
	__u32 mark = skb->mark, runs = work->cursor.runs + 1;

	if (!entry || runs >= config.max_runs)
		return -1;
	*entry = (struct cursor_entry){
		.number = work->cursor.number,
		.traced_ns = work->arrival.traced_ns,
		.good = work->fan.good,
		.id = id,
		.mark = mark,
		.egress = work->fan.egress,
		.chunk = work->fan.chunk,
		.runs = runs,
		.opens = work->fan.opens,
	};
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

/* What a run after the first one is counted as. */
static __noinline enum relay_further_run further_run(enum relay_outcome outcome)
{
	return outcome == RELAY_FORWARDED   ? RELAY_RUN_LAST
	       : outcome == RELAY_CONTINUED ? RELAY_RUN_CONTINUED
					    : RELAY_RUN_LEFT;
}

#endif
