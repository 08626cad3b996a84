// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Delivers all packets in order (go-back-N): the receiver accepts only the next packet in order, and the
 * sender repeats all packets from a missing one on. In a list of functions it follows `window`, which assigns
 * packet numbers. It precedes `acknowledge` and `number`, which must not see packets that are not accepted
 * here.
 *
 * The receiver sends a request at the first packet out of order, when a repeated packet was lost again, and
 * every `retry_us` after that. At the sender, TC ingress answers a request with all packets from the
 * requested one on, without waking a process.
 */
#include "packet_retransmit.h"

struct gobackn_config {
	__u32 retry_us;
};

SEC(".rodata.config")
const volatile struct gobackn_config config = {
	.retry_us = 500000,
};

#define REPEAT_MAX 256 /* largest number of packets that the sender repeats for one request */

struct state {
	__u32 asked; /* packet number of the latest request */
	__u32 has_asked;
	__u32 latest;	/* packet number of the latest packet that arrived out of order */
	__u32 repeated; /* packet number of the first packet that was repeated for the latest request */
	__u64 asked_ns;
	__u64 repeated_ns;
};

BPF_MAP(ARRAY, state, __u32, struct state, GRAFT_SESSIONS);

/* --- At the sender: packets are kept and repeated --- */

SEC("tcx/egress")
int gobackn_tx(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_TX);

	if (!work)
		return GRAFT_PASS_tx;
	keep(skb, work);
	return graft_next(skb, tx, work);
}

struct repeating {
	struct __sk_buff *skb;
	struct graft_work *work;
	struct graft_shared *shared;
	__u32 failed;
};

static long repeat(__u32 index, struct repeating *repeating)
{
	struct __sk_buff *skb = repeating->skb;
	__u32 number = repeating->work->number + index;

	if (graft_not_before(number, repeating->shared->next) || !kept_find(repeating->work, number))
		return 1;
	/* The socket buffer still has the packet of the previous iteration. A copy of it is sent now, before the buffer
	 * gets the next packet. A full queue may drop the copy, like a loss on the path.
	 */
	if (index && bpf_clone_redirect(skb, skb->ifindex, 0) < 0)
		repeating->failed = 1;
	skb->mark = repeating->work->mark;
	repeating->shared->went_ns[number % GRAFT_WINDOW] = 0;
	if (become(skb, repeating->work, number))
		repeating->failed = 1;
	return repeating->failed ? 1 : 0;
}

/* Returns whether a request is ignored: its packet was never sent, is acknowledged already, or was repeated
 * within half a round trip.
 */
static __always_inline int is_answered(const struct state *own, const struct graft_work *work,
				       const struct graft_shared *shared)
{
	if (graft_not_before(work->number, shared->next) || !graft_not_before(work->number, shared->acked))
		return 1;
	return own->repeated_ns && own->repeated == work->number &&
	       work->now_ns - own->repeated_ns < (__u64)shared->min_rtt_us * 500;
}

static __always_inline int go_back(struct __sk_buff *skb, struct graft_work *work,
				   struct graft_shared *shared, struct state *own)
{
	struct repeating repeating = {.skb = skb, .work = work, .shared = shared};
	int is_kept;

	if (is_answered(own, work, shared))
		return GRAFT_ANSWERED;
	is_kept = kept_find(work, work->number) != NULL;
	/* Another CPU is just sending the packet. */
	if (!is_kept && !kept_is_gone(work, shared, work->number))
		return GRAFT_ANSWERED;
	own->repeated = work->number;
	own->repeated_ns = work->now_ns;
	if (turn(skb, work))
		return GRAFT_NO_ROOM;
	skb->mark = work->mark;
	/* The sender no longer stores the requested packet, so it answers GRAFT_GONE. */
	if (!is_kept)
		return say_gone(skb, work, work->number) ? GRAFT_NO_ROOM : GRAFT_RESENT;
	bpf_loop(REPEAT_MAX, repeat, &repeating, 0);
	return repeating.failed ? GRAFT_NO_ROOM : GRAFT_RESENT;
}

/* --- At the receiver: missing packets are requested --- */

/* Makes TC mark packets as received instead of XDP, since a packet that `gobackn_repair` drops has to be
 * accepted when it is repeated.
 */
SEC("xdp.frags")
int gobackn_rx(struct xdp_md *ctx)
{
	struct graft_work *work = graft_work(GRAFT_RX);

	if (!work)
		return GRAFT_PASS_rx;
	work->is_marked_later = 1;
	return graft_next(ctx, rx, work);
}

/* Returns whether a request for the missing packet has to be sent now. */
static __always_inline int is_due(struct state *own, const struct graft_work *work, __u32 missing)
{
	int is_new = !own->has_asked || own->asked != missing;
	int is_again = work->now_ns - own->asked_ns > (__u64)config.retry_us * 1000;
	/* Packet numbers went back, so the sender is repeating, and the first repeated packet was lost again.
	 */
	int is_round = work->kind == GRAFT_DATA && !graft_not_before(work->number, own->latest + 1);

	if (work->kind == GRAFT_DATA)
		own->latest = work->number;
	if (!is_new && !is_again && !is_round)
		return 0;
	own->has_asked = 1;
	own->asked = missing;
	own->asked_ns = work->now_ns;
	return 1;
}

static __noinline int ask(struct __sk_buff *skb, struct graft_work *work, __u32 missing)
{
	struct letter letter = {.kind = GRAFT_REQUEST, .number = missing};
	struct loan loan = {};

	if (borrow(skb, work, &loan, 0))
		return 0;
	if (!finish(skb, work, &letter))
		bpf_clone_redirect(skb, skb->ifindex, 0);
	return give_back(skb, work, &loan);
}

SEC("tcx/ingress")
int gobackn_repair(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_REPAIR);
	struct graft_shared *shared;
	__u32 session, missing;
	struct state *own;

	if (!work)
		return GRAFT_PASS_repair;
	shared = graft_shared(work);
	session = work->session;
	own = bpf_map_lookup_elem(&state, &session);
	if (!shared || !own)
		return graft_next(skb, repair, work);
	if (work->kind == GRAFT_REQUEST)
		return graft_done(skb, repair, work, go_back(skb, work, shared, own));
	graft_advance(shared);
	missing = shared->complete;
	/* The sender has answered that it no longer stores the missing packet. The receiver stops waiting for it, since
	 * otherwise no later packet could be delivered.
	 */
	if (work->kind == GRAFT_GONE && work->number == missing &&
	    graft_not_before(shared->newest, missing + 1))
		shared->seen[missing % GRAFT_WINDOW] = GRAFT_GIVEN_UP | missing;
	if (work->kind != GRAFT_DATA && work->kind != GRAFT_LAST)
		return graft_next(skb, repair, work);
	if (work->kind == GRAFT_DATA && work->number == missing) {
		shared->seen[missing % GRAFT_WINDOW] = GRAFT_SEEN | missing;
		return graft_next(skb, repair, work);
	}
	/* The receiver has all packets that the sender has sent. */
	if (work->kind == GRAFT_LAST && graft_not_before(missing, work->number))
		return graft_next(skb, repair, work);
	if (is_due(own, work, missing) && ask(skb, work, missing))
		return graft_done(skb, repair, work, GRAFT_NO_ROOM);
	if (work->kind == GRAFT_LAST)
		return graft_next(skb, repair, work);
	/* A packet that arrives while an earlier one is missing is dropped, since the sender repeats it together with
	 * the missing one.
	 */
	return graft_done(skb, repair, work, GRAFT_OUT_OF_TURN);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
