// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Forwards media at TC ingress. The program decrypts the 1-RTT packets of upstream connections. Each STREAM or DATAGRAM
 * frame of a stream or track that userspace has set up for forwarding is sent on as one packet per subscriber,
 * encrypted for the subscriber's connection. Then the received packet continues to userspace unchanged: userspace sees
 * everything, and sends whatever this program declined to send.
 *
 * - relay_intf.h: the structures shared with userspace.
 * - relay_maps.h: configuration and maps. relay_work.h: the work area of a run.
 * - relay_ingress.h: finds and opens the received packet, and walks its frames.
 * - relay_open.h: opens subscribers' streams for a publisher's stream that begins.
 * - relay_judge.h: decides which bytes of a stream may be forwarded. subgroup.h: parses the framing of streams.
 * - relay_egress.h: admits, numbers, seals and sends a copy. relay_frame.h: writes its link, IP and UDP headers.
 * - relay_keystream.h: opens and seals with precomputed keystreams.
 * - relay_runs.h: spreads a fan-out over several runs.
 * - relay_super.h: forwards super-packets segment by segment.
 * - fan.h, fan_runs.h: the parts that all fan-outs share.
 * - relay_defer.h: defers packets that need not wake userspace.
 * - relay_trace.h: sends events about single packets.
 */
#include "relay_super.h"
#include <linux/pkt_cls.h>

/* Converts the result of processing a received packet (enum relay_outcome) to the TC verdict that the program returns.
 * All verdicts on received packets come from this function.
 */
static __always_inline int verdict_of(enum relay_outcome outcome)
{
	switch (outcome) {
	case RELAY_CONTINUED:	 /* drop this skb: a clone of it is queued for the next run of the program */
	case RELAY_NOT_RESTORED: /* drop this skb: it was rewritten for a subscriber and could not be restored */
		return TC_ACT_SHOT;
	default:
		return PASS_ON;
	}
}

/* A run is split into functions that are called one after another and not inlined: the stack of the code that makes
 * copies must stay small.
 */

static __noinline enum relay_outcome begin(struct __sk_buff *skb, struct work *work)
{
	work->arrival.traced_ns = 0;
	work->arrival.frame.changed = 0;
	work->super.segments = 0;
	work->copies = 0;
	take_cursor(skb, &work->cursor);
	return find_packet(skb, &work->arrival);
}

static __noinline int end(struct __sk_buff *skb, struct work *work, enum relay_outcome outcome)
{
	if (restore(skb, work))
		outcome = RELAY_NOT_RESTORED;
	else if (outcome == RELAY_CONTINUED && put_back(skb, work))
		outcome = RELAY_OVER_BUDGET;
	if (outcome == RELAY_FROM_SUBSCRIBER)
		defer_short(skb, &work->arrival);
	else
		defer(skb, work, outcome);
	count(work, outcome);
	if (work->arrival.traced_ns)
		trace_packet(work, outcome);
	return verdict_of(outcome);
}

/* Lets a packet pass to userspace because another run of the program uses this CPU's work area. Not inlined, so that
 * its stack is not added to the program's.
 */
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
	enum relay_outcome outcome;
	int verdict;

	if (!work)
		return PASS_ON; /* never NULL, since each CPU has a work area; the verifier needs the check */
	/* The link header must be in linear memory; a frame without it is not recognized as a packet of the relay. */
	have_link(skb);
	/* An interrupt may start this program on a CPU whose run is not over. Only one of the two program runs can use
	 * the CPU's work area.
	 */
	if (__sync_lock_test_and_set(&work->busy, 1))
		return pass_by(skb);
	outcome = begin(skb, work);
	if (outcome == RELAY_SUPER_PACKET) {
		outcome = send_clone(skb, work);
		verdict = verdict_of(end_super(skb, work, outcome));
	} else {
		if (!outcome)
			outcome = forward_packet(skb, work);
		verdict = end(skb, work, outcome);
	}
	/* Only runs on the same CPU use this work area, so a plain store suffices. */
	WRITE_ONCE(work->busy, 0);
	return verdict;
}

/* Forwards clones of super-packets at the egress of the loopback interface, where relay_ingress sends them. */
SEC("tcx/egress")
int clone_egress(struct __sk_buff *skb)
{
	__u32 key = 0;
	struct work *work = bpf_map_lookup_elem(&works, &key);

	if (!work || !is_clone(skb, work))
		return PASS_ON;
	if (!begin_clone(skb, work))
		forward_clone(skb, work);
	return TC_ACT_SHOT;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
