// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Fans out RTP over UDP at TC ingress. A packet of a stream's sender is copied once per receiver, with other headers in
 * front of the same payload, and is then dropped. All other packets pass on unchanged: receivers' requests and reports,
 * and packets of the sender that this program does not understand, which userspace fans out.
 *
 *   fanout_intf.h      structures that are shared with userspace
 *   fanout_maps.h      configuration, maps, the variables of a run
 *   fanout_map.h       finds the stream of a received packet; rtp.h: classifies the packet
 *   fanout_rewrite.h   a copy: its lease, its rate limit, its headers
 *   fanout_trace.h     events about single packets
 *   fan.h, fan_runs.h  code that all fan-outs share
 */
#include "fanout_map.h"
#include "fanout_rewrite.h"
#include "fanout_trace.h"
#include <linux/pkt_cls.h>

struct receiver_loop {
	struct __sk_buff *skb;
	struct fanout_work *work;
};

static long next_receiver(__u32 index, struct receiver_loop *loop)
{
	struct fanout_work *work = loop->work;
	struct fanout_stream *stream;
	struct fanout_receiver *receiver;
	__u32 outcome, key, epoch;

	if (work->receiver >= work->receivers)
		return 1;
	key = work->stream;
	stream = bpf_map_lookup_elem(&streams, &key);
	if (!stream)
		return 1;
	key = stream->first + work->receiver;
	work->receiver++;
	receiver = bpf_map_lookup_elem(&receivers, &key);
	if (!receiver)
		return 1;
	epoch = epoch_of(receiver);
	if (!epoch)
		return 0;
	outcome = copy_to(loop->skb, work, receiver, epoch);
	OPAQUE(outcome);
	if (outcome < FANOUT_COPY_OUTCOMES)
		__sync_fetch_and_add(&receiver->outcomes[outcome], 1);
	if (work->traced_ns)
		trace(work, receiver->number, outcome);
	add_to(&outcomes, FANOUT_OUTCOMES + outcome, 1);
	return 0;
}

static __noinline int put_back(struct __sk_buff *skb, struct fanout_work *work)
{
	struct cursor_kept kept = {.traced_ns = work->traced_ns};

	return queue_again(skb, &work->cursor, work->receiver, &kept, config.max_runs);
}

static __always_inline enum fanout_outcome fan_out(struct __sk_buff *skb, struct fanout_work *work)
{
	struct receiver_loop loop = {.skb = skb, .work = work};
	enum fanout_outcome outcome;

	outcome = find_stream(skb, work);
	if (outcome)
		return outcome;
	work->now_ns = bpf_ktime_get_ns();
	outcome = find_media(skb, work);
	if (outcome)
		return outcome;
	work->frame.summed = IP_SUMMED(skb);
	bpf_loop(config.max_copies_per_run, next_receiver, &loop, 0);
	if (work->receiver >= work->receivers)
		return FANOUT_FORWARDED;
	if (restore(skb, work))
		return FANOUT_NOT_RESTORED;
	return put_back(skb, work) ? FANOUT_OVER_BUDGET : FANOUT_CONTINUED;
}

/* If one run of the program cannot copy a packet to all receivers, further runs continue. This function converts the
 * result of such a further run to an enum fanout_further_run. */
static __noinline enum fanout_further_run further_run(enum fanout_outcome outcome)
{
	return outcome == FANOUT_FORWARDED   ? FANOUT_RUN_LAST
	       : outcome == FANOUT_CONTINUED ? FANOUT_RUN_CONTINUED
					     : FANOUT_RUN_LEFT;
}

/* Counts what a run of the program did with a packet. Further runs for the same packet, for its remaining receivers,
 * are counted separately, by enum fanout_further_run.
 */
static __always_inline void count(const struct fanout_work *work, enum fanout_outcome outcome)
{
	__u32 index =
		work->cursor.id ? FANOUT_OUTCOMES + FANOUT_COPY_OUTCOMES + further_run(outcome) : outcome;

	add_to(&outcomes, index, 1);
}

/* Returns the TC action (drop, or pass on) for the result of a run. Nothing else decides what happens to the packet. */
static __always_inline int verdict_of(enum fanout_outcome outcome)
{
	return outcome <= FANOUT_TAKEN ? TC_ACT_SHOT : PASS_ON;
}

static __always_inline int run(struct __sk_buff *skb, struct fanout_work *work)
{
	enum fanout_outcome outcome;

	work->traced_ns = 0;
	take_cursor(skb, &work->cursor);
	outcome = fan_out(skb, work);
	count(work, outcome);
	if (work->traced_ns && outcome != FANOUT_FORWARDED && outcome != FANOUT_CONTINUED)
		trace(work, 0, outcome);
	return verdict_of(outcome);
}

/* Passes a packet to userspace, because an interrupted run on this CPU still uses the CPU's entry of the map with
 * struct fanout_work. Not inlined, so that it has a stack frame of its own.
 */
static __noinline int pass_by(struct __sk_buff *skb)
{
	struct cursor_entry cursor;

	take_cursor(skb, &cursor);
	add_to(&outcomes, FANOUT_BUSY, 1);
	return PASS_ON;
}

SEC("tcx/ingress")
int fanout_ingress(struct __sk_buff *skb)
{
	__u32 key = 0;
	struct fanout_work *work = bpf_map_lookup_elem(&works, &key);
	int verdict;

	if (!work)
		return PASS_ON; /* never true: each CPU has an entry, but the verifier wants the check */
	/* If the link header cannot be pulled into the linear part, parsing fails and the frame counts as malformed. */
	have_link(skb);
	/* With PREEMPT_RT this run may have interrupted another one on its CPU, which still uses `work`. */
	if (__sync_lock_test_and_set(&work->busy, 1))
		return pass_by(skb);
	verdict = run(skb, work);
	/* A plain store is enough, since only runs on this CPU read `busy`. */
	WRITE_ONCE(work->busy, 0);
	return verdict;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
