// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Numbers outgoing packets, and drops received duplicates. */
#include "graft_packet.h"

#define BEGINNING 64 /* If the first received packet number is lower than this, the session has just begun. */

SEC("tcx/egress")
int number_tx(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_TX);
	struct graft_shared *shared;

	if (!work)
		return GRAFT_PASS_tx;
	shared = graft_shared(work);
	if (shared) {
		/* If the function list has `window`, that function has already assigned the packet number. */
		for (int i = 0; i < GRAFT_TRIES && !work->is_numbered; i++)
			graft_number(shared, work, *(volatile __u32 *)&shared->next);
		if (!work->is_numbered)
			work->number = __sync_fetch_and_add(&shared->next, 1);
		work->is_numbered = 1;
		shared->sent_ns = work->now_ns;
	}
	return graft_next(skb, tx, work);
}

#define PATHS 4
/* ns of silence after which a path is assumed to have no older packets in flight */
#define PATH_SILENT_NS 150000000

/* The newest packet number that arrived by each network path of a session, and the time of its arrival. */
struct progress {
	__u64 came_ns[PATHS];
	__u32 newest[PATHS]; /* one more than the newest packet number received by each path */
};

BPF_MAP(ARRAY, state, __u32, struct progress, GRAFT_SESSIONS);

/* Returns the lowest of the newest packet numbers of all active paths. If each path keeps its order, missing packets
 * below it are lost. Other functions use it as the newest number, so they neither request packets that a slower path
 * will deliver, nor count them as lost.
 */
static __noinline __u32 settled(struct graft_work *work)
{
	__u32 session = work->session, path = work->path & (PATHS - 1), least;
	struct progress *progress = bpf_map_lookup_elem(&state, &session);

	if (!progress)
		return work->number;
	if (work->now_ns - progress->came_ns[path] > PATH_SILENT_NS ||
	    graft_not_before(work->number, progress->newest[path]))
		progress->newest[path] = work->number + 1;
	progress->came_ns[path] = work->now_ns;
	least = progress->newest[path];
	for (int i = 0; i < PATHS; i++) {
		if (work->now_ns - progress->came_ns[i] <= PATH_SILENT_NS &&
		    graft_not_before(least, progress->newest[i]))
			least = progress->newest[i];
	}
	return least - 1;
}

static __always_inline int has_come(struct graft_shared *shared, struct graft_work *work)
{
	__u64 *seen = &shared->seen[work->number % GRAFT_WINDOW], mark = GRAFT_SEEN | work->number;
	__u64 before = work->is_marked_later ? *seen : __sync_lock_test_and_set(seen, mark);

	work->was_given_up = before == (GRAFT_GIVEN_UP | work->number);
	/* The atomic exchange makes exactly one CPU see the packet as new. */
	return before == mark;
}

SEC("xdp.frags")
int number_rx(struct xdp_md *ctx)
{
	struct graft_work *work = graft_work(GRAFT_RX);
	struct graft_shared *shared;
	__u32 newest, number, last;

	if (!work)
		return GRAFT_PASS_rx;
	shared = graft_shared(work);
	if (!shared)
		return graft_next(ctx, rx, work);
	number = last = work->number;
	if (work->kind == GRAFT_LAST && graft_not_before(number, shared->newest))
		graft_turn(shared, number, work->epoch);
	if (work->kind != GRAFT_DATA)
		return graft_next(ctx, rx, work);
	/* The first packet number shows that the session had begun before this host's graft was loaded, so earlier
	 * packets are not requested.
	 */
	if (!shared->begun && number >= BEGINNING)
		shared->complete = number;
	shared->begun = 1;
	newest = shared->newest;
	if (!graft_not_before(number, newest - GRAFT_WINDOW))
		return graft_done(ctx, rx, work, GRAFT_OLD);
	if (work->has_paths)
		last = settled(work);
	if (has_come(shared, work))
		return graft_done(ctx, rx, work, GRAFT_DUPLICATE);
	work->is_late = !graft_not_before(number, newest);
	if (!work->is_late)
		graft_turn(shared, number, work->epoch);
	graft_move(&shared->newest, last + 1, 0);
	return graft_next(ctx, rx, work);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
