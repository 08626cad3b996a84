// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Forwards media at TC ingress. It opens the 1-RTT packets of upstream connections. Each of their STREAM and DATAGRAM
 * frames that has a slot leaves again as one packet per egress, sealed for that downstream connection. Then the packet goes
 * up as it came: userspace gets everything, and sends whatever this program declined to send.
 *
 *   relay_intf.h       what is shared with userspace
 *   relay_maps.h       configuration and maps; relay_work.h: what a run works with
 *   relay_ingress.h    the received packet: found, opened, its frames walked
 *   relay_open.h       streams that begin, for which egresses were prepared
 *   relay_judge.h      which of a stream's bytes may be forwarded; subgroup.h: their framing
 *   relay_egress.h     a copy: admitted, numbered, sealed, sent; relay_frame.h: its headers
 *   relay_keystream.h  opening and sealing with precomputed keystreams
 *   relay_runs.h       a fan-out that takes several runs
 *   fan.h, fan_runs.h  what all fan-outs have in common
 *   relay_defer.h      packets that do not wake userspace
 *   relay_trace.h      events about single packets
 */
#include "relay_defer.h"
#include "relay_egress.h"
#include "relay_ingress.h"
#include "relay_runs.h"
#include <linux/pkt_cls.h>

static __always_inline enum relay_outcome relay(struct __sk_buff *skb, struct work *work)
{
	struct egress_loop loop = {.skb = skb, .work = work};
	enum relay_outcome outcome;

	outcome = find_packet(skb, &work->arrival);
	if (outcome)
		return outcome;
	outcome = load_packet(skb, work);
	if (outcome)
		return outcome;
	outcome = find_connection(work);
	if (outcome)
		return outcome;
	outcome = walk_frames(work);
	if (outcome)
		return outcome;
	work->arrival.frame.summed = IP_SUMMED(skb);
	bpf_loop(config.max_copies_per_run, next_egress, &loop, 0);
	if (restore(skb, work))
		return RELAY_NOT_RESTORED;
	if (work->fan.chunk < work->fan.chunks)
		return put_back(skb, work) ? RELAY_OVER_BUDGET : RELAY_CONTINUED;
	return work->fan.left_over ? RELAY_OVER_BUDGET : RELAY_FORWARDED;
}

/* Counted by the outcome, in runs after a packet's first by enum relay_further_run. */
static __always_inline void count(const struct work *work, enum relay_outcome outcome)
{
	__u32 index =
		work->cursor.id ? RELAY_OUTCOMES + RELAY_EGRESS_OUTCOMES + further_run(outcome) : outcome;

	add_to(&outcomes, index, 1);
}

/* The one place where an outcome becomes a verdict. */
static __always_inline int verdict_of(enum relay_outcome outcome)
{
	switch (outcome) {
	case RELAY_CONTINUED:	 /* its clone waits in the queue */
	case RELAY_NOT_RESTORED: /* what is left of the frame may carry somebody else's address */
		return TC_ACT_SHOT;
	default:
		return PASS_ON;
	}
}

static __always_inline int run(struct __sk_buff *skb, struct work *work)
{
	enum relay_outcome outcome;

	work->arrival.traced_ns = 0;
	take_cursor(skb, &work->cursor);
	outcome = relay(skb, work);
	if (outcome == RELAY_FROM_SUBSCRIBER)
		defer_short(skb, &work->arrival);
	else
		defer(skb, work, outcome);
	count(work, outcome);
	if (work->arrival.traced_ns)
		trace_packet(work, outcome);
	return verdict_of(outcome);
}

/* Not inlined, so that its stack is not the program's. */
static __noinline int pass_by(struct __sk_buff *skb)
{
	struct cursor_entry cursor;

	take_cursor(skb, &cursor);
	add_to(&outcomes, RELAY_BUSY, 1);
	return PASS_ON;
}

SEC("tcx/ingress")
int relay_ingress(struct __sk_buff *skb)
{
	__u32 key = 0;
	struct work *work = bpf_map_lookup_elem(&works, &key);
	int verdict;

	if (!work)
		return PASS_ON; /* for the verifier: each CPU has one */
	/* Where it cannot be had, the frame is found to be none. */
	have_link(skb);
	if (__sync_lock_test_and_set(&work->busy, 1))
		return pass_by(skb);
	verdict = run(skb, work);
	/* Only runs on the same CPU look at it. */
	WRITE_ONCE(work->busy, 0);
	return verdict;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
