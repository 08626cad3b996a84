/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Retransmits lost packets, for two functions. `repair` retransmits all of them. `partial` retransmits them until a
 * deadline. After it, the receiver gives a missing packet up, which means that it no longer expects it, but no more
 * than a configured share of all packets.
 *
 * The sender stores its latest packets. When a newer packet arrives, the receiver requests each missing one, and
 * repeats the request every `retry_us`. At the sender, TC ingress turns a request into the requested packet, without
 * waking a process; if the packet is no longer stored, it answers GRAFT_GONE. Packets that arrive while an earlier one
 * is missing are delivered at once; the function `order` or `gobackn` takes care of the order.
 *
 * A packet that was given up is not requested any more, and functions that wait for completeness do not
 * wait for it. If it arrives nevertheless, `repair` delivers it.
 */
#ifndef MILLRACE_REPAIR_H
#define MILLRACE_REPAIR_H

#include "packet_retransmit.h"

struct repair_config {
	__u32 retry_us;
	__u32 tries; /* most requests for a packet; 0: no limit */
	/* time after which the receiver gives a missing packet up (no longer expects it), unless the number of such
	 * packets would then exceed `give_up_permille`; 0: never
	 */
	__u32 deadline_ms;
	/* permille of all packets that the receiver may give up (no longer expect); 1000: all */
	__u32 give_up_permille;
};

#define OPEN_MAX GRAFT_WINDOW /* most missing packets that are requested at the same time */
/* number of packet numbers that are checked for missing packets again whenever a packet is received */
#define OPEN_STEP 32
#define ASK_MAX	  8 /* most requests sent for one received packet */

/* A missing packet that the receiver has requested. The entry is freed when the packet arrives, or is no longer
 * expected.
 */
struct open {
	__u32 number;
	__u32 tries; /* requests sent so far; 0: the entry is free */
	__u64 asked_ns;
	__u64 since_ns;
};

struct state {
	/* first packet number for which the receiver has not yet checked whether the packet is missing */
	__u32 looked;
	__u32 again; /* number of the missing packet that is checked next, to repeat its request */
	__u32 begun;
	__u32 counted; /* first packet number that the counter `numbers` does not include yet */
	/* number of all packets so far, received or missing; `give_up_permille` is a share of this number */
	__u64 numbers;
	__u64 gave_up;
	struct open open[OPEN_MAX];
};

BPF_MAP(ARRAY, state, __u32, struct state, GRAFT_SESSIONS);

/* --- At the sender: requests are answered --- */

/* Returns whether acknowledgements show that the receiver has the packet. If the list of functions has no
 * `acknowledge`, `acked` is not updated, and the result is 0.
 */
static __always_inline int has_come(const struct graft_shared *shared, __u32 number)
{
	return shared->next - shared->acked <= GRAFT_WINDOW && !graft_not_before(number, shared->acked);
}

static __always_inline int answer(struct __sk_buff *skb, struct graft_work *work, struct graft_shared *shared)
{
	int is_kept;

	/* Requests for packets that were never sent, and replayed old requests, get no answer. */
	if (!shared || graft_not_before(work->number, shared->next) || has_come(shared, work->number))
		return GRAFT_ANSWERED;
	is_kept = kept_find(work, work->number) != NULL;
	/* Another CPU is just sending the packet. */
	if (!is_kept && !kept_is_gone(work, shared, work->number))
		return GRAFT_ANSWERED;
	/* A retransmitted packet gives no round-trip sample, since its acknowledgement would be ambiguous. */
	shared->went_ns[work->number % GRAFT_WINDOW] = 0;
	if (turn(skb, work))
		return GRAFT_NO_ROOM;
	skb->mark = work->mark;
	if (is_kept ? become(skb, work, work->number) : say_gone(skb, work, work->number))
		return GRAFT_NO_ROOM;
	return GRAFT_RESENT;
}

/* --- At the receiver: missing packets are requested --- */

struct asking {
	struct __sk_buff *skb;
	struct graft_work *work;
	struct graft_shared *shared;
	struct state *state;
	__u64 retry_ns;
	__u64 deadline_ns;
	__u32 tries;
	__u32 permille;
	__u32 count;
	__u32 failed;
	__u32 numbers[ASK_MAX];
};

static __always_inline void want(struct asking *asking, struct open *open, __u32 number)
{
	__u32 at = asking->count;

	if (at >= ASK_MAX)
		return;
	asking->numbers[at & (ASK_MAX - 1)] = number;
	asking->count = at + 1;
	open->asked_ns = asking->work->now_ns;
	if (open->tries < 0xffff)
		open->tries++;
}

static __always_inline void give_up(struct asking *asking, struct open *open)
{
	__u64 *seen = &asking->shared->seen[open->number % GRAFT_WINDOW];
	__u64 before = *seen;

	open->tries = 0;
	/* If the packet arrives on another CPU at this moment, the compare-and-swap fails, and the packet counts as
	 * received.
	 */
	if (before == (GRAFT_SEEN | open->number) ||
	    __sync_val_compare_and_swap(seen, before, GRAFT_GIVEN_UP | open->number) != before)
		return;
	asking->state->gave_up++;
}

static __always_inline int is_given_up(const struct asking *asking, const struct open *open)
{
	const struct state *state = asking->state;
	__u64 now_ns = asking->work->now_ns;

	/* Packets that the sender has sent with its previous list of functions are never given up here, since that list
	 * may require all packets.
	 */
	if (!graft_is_own(asking->shared, asking->work, open->number))
		return 0;
	if (asking->tries && open->tries >= asking->tries)
		return 1;
	return asking->deadline_ns && now_ns - open->since_ns >= asking->deadline_ns &&
	       (state->gave_up + 1) * 1000 <= state->numbers * asking->permille;
}

/* Checks a missing packet again. If it is still missing and its last request is old enough, it is requested
 * again.
 */
static long look_again(__u32 index, struct asking *asking)
{
	struct state *state = asking->state;
	__u32 number = state->again;
	struct open *open = &state->open[number & (OPEN_MAX - 1)];

	if (asking->count >= ASK_MAX)
		return 1;
	if (graft_not_before(number, state->looked)) {
		/* All missing packets were checked, so checking begins again with the first missing packet.
		 */
		state->again = asking->shared->complete;
		return 1;
	}
	state->again = number + 1;
	if (!open->tries || open->number != number)
		return 0;
	if (!graft_is_missing(asking->shared, number))
		open->tries = 0;
	else if (is_given_up(asking, open))
		give_up(asking, open);
	else if (asking->work->now_ns - open->asked_ns > asking->retry_ns)
		want(asking, open, number);
	return 0;
}

static long look_at_next(__u32 index, struct asking *asking)
{
	struct state *state = asking->state;
	__u32 number = state->looked;
	struct open *open = &state->open[number & (OPEN_MAX - 1)];

	if (graft_not_before(number, asking->shared->newest))
		return 1;
	/* A missing packet is requested, unless another CPU has just requested it. */
	if (graft_is_missing(asking->shared, number) && !(open->tries && open->number == number)) {
		if (asking->count >= ASK_MAX)
			return 1;
		if (open->tries)
			give_up(asking, open);
		open->number = number;
		open->tries = 0;
		open->since_ns = asking->work->now_ns;
		want(asking, open, number);
	}
	state->looked = number + 1;
	return 0;
}

/* Returns whether the first missing packet was first recorded as received, but was then lost between XDP and TC
 * (arrivals.h). Such a packet was never requested.
 */
static __always_inline int is_forgotten(const struct state *state, const struct graft_shared *shared)
{
	__u32 number = shared->complete;
	const struct open *open = &state->open[number & (OPEN_MAX - 1)];

	return !graft_not_before(number, state->looked) && graft_is_missing(shared, number) &&
	       !(open->tries && open->number == number);
}

static __always_inline void count_looked(struct state *state)
{
	if (graft_not_before(state->counted, state->looked))
		return;
	state->numbers += state->looked - state->counted;
	state->counted = state->looked;
}

static __always_inline __u32 look(struct asking *asking)
{
	struct state *state = asking->state;
	struct graft_shared *shared = asking->shared;

	graft_advance(shared);
	if (!state->begun) {
		state->looked = state->counted = shared->complete;
		state->begun = 1;
	}
	/* No packet with a number below `complete` is missing. The search for missing packets begins at `complete`,
	 * also if a packet was recorded as received and then lost between XDP and TC.
	 */
	if (!graft_not_before(state->looked, shared->complete) || is_forgotten(state, shared))
		state->looked = shared->complete;
	bpf_loop(2 * ASK_MAX, look_at_next, asking, 0);
	count_looked(state);
	if (asking->work->kind == GRAFT_LAST || !graft_not_before(state->again, shared->complete))
		state->again = shared->complete;
	bpf_loop(asking->work->kind == GRAFT_LAST ? OPEN_MAX : OPEN_STEP, look_again, asking, 0);
	graft_advance(shared);
	return asking->count;
}

static long send_request(__u32 index, struct asking *asking)
{
	struct __sk_buff *skb = asking->skb;
	struct letter letter = {.kind = GRAFT_REQUEST, .number = asking->numbers[index & (ASK_MAX - 1)]};

	asking->failed |= finish(skb, asking->work, &letter) || bpf_clone_redirect(skb, skb->ifindex, 0);
	return asking->failed ? 1 : 0;
}

/* Sends all requests one after another in the buffer of the received packet, and then restores that packet.
 */
static __always_inline int ask(struct __sk_buff *skb, struct asking *asking)
{
	struct loan loan = {};

	if (borrow(skb, asking->work, &loan, 0))
		return 0;
	bpf_loop(asking->count, send_request, asking, 0);
	return give_back(skb, asking->work, &loan);
}

/* Processes a frame of type GRAFT_LAST, which states the sender's next packet number: packets with lower numbers have
 * been sent.
 */
static __always_inline void believe(struct graft_shared *shared, __u32 next)
{
	if (graft_not_before(next, shared->newest))
		shared->newest = next;
}

static __always_inline void hear_gone(struct asking *asking)
{
	__u32 number = asking->work->number;
	struct open *open = &asking->state->open[number & (OPEN_MAX - 1)];

	if (open->tries && open->number == number)
		give_up(asking, open);
}

static __always_inline int repair_at_tx(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_TX);

	if (!work)
		return GRAFT_PASS_tx;
	keep(skb, work);
	return graft_next(skb, tx, work);
}

static __always_inline int repair_at_repair(struct __sk_buff *skb,
					    const volatile struct repair_config *config)
{
	struct graft_work *work = graft_work(GRAFT_REPAIR);
	struct asking asking = {.skb = skb, .work = work};
	__u32 session;

	if (!work)
		return GRAFT_PASS_repair;
	asking.shared = graft_shared(work);
	if (work->kind == GRAFT_REQUEST)
		return graft_done(skb, repair, work, answer(skb, work, asking.shared));
	if (work->kind == GRAFT_ACK || work->kind == GRAFT_PARITY)
		return graft_next(skb, repair, work);
	session = work->session;
	asking.state = bpf_map_lookup_elem(&state, &session);
	if (!asking.state || !asking.shared)
		return graft_next(skb, repair, work);
	asking.retry_ns = (__u64)config->retry_us * 1000;
	asking.deadline_ns = (__u64)config->deadline_ms * 1000000;
	asking.tries = config->tries;
	asking.permille = config->give_up_permille;
	if (work->kind == GRAFT_GONE)
		hear_gone(&asking);
	if (work->kind == GRAFT_LAST)
		believe(asking.shared, work->number);
	if (look(&asking) && ask(skb, &asking))
		return graft_done(skb, repair, work, GRAFT_NO_ROOM);
	return graft_next(skb, repair, work);
}

#endif
