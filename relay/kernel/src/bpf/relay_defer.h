/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Deferred wake-ups, as in interrupt moderation: a packet that userspace need not see at once is steered to a socket that
 * nobody sleeps on. Userspace reads it when another packet has woken it, or after a while.
 *
 * The order of packets must not change, since a publisher takes packets that are acknowledged out of order for lost, and
 * slows down. So once a packet wakes userspace, all go to the socket that it reads, until it has read everything and
 * sleeps again: whatever is in the deferred socket is older than what is in the other one.
 */
#ifndef MILLRACE_RELAY_DEFER_H
#define MILLRACE_RELAY_DEFER_H

#include "relay_maps.h"
#include "util.h"

#define DEFERRED_IN_A_ROW 31 /* packets of a publisher; one less than a power of two */

/* Whether the packet is of an upstream, and goes up to userspace in this run. */
static __always_inline int is_received(enum relay_outcome outcome)
{
	return outcome == RELAY_FORWARDED || outcome == RELAY_OVER_BUDGET || outcome == RELAY_REPLAYED ||
	       outcome == RELAY_BAD_FRAMES || outcome == RELAY_NO_SLOT || outcome == RELAY_BAD_STREAM ||
	       outcome == RELAY_DECLINED;
}

/* Steers a packet to the deferred socket. 0: it goes to the other one, because it `wakes` userspace, because userspace
 * is awake, or because too many wait already.
 */
static __always_inline int steer(struct __sk_buff *skb, struct relay_deferral *deferral, __u32 key, int wakes)
{
	struct bpf_sock *socket;

	if (!wakes && READ_ONCE(deferral->wakes_read) == READ_ONCE(deferral->wakes) &&
	    READ_ONCE(deferral->packets) - READ_ONCE(deferral->taken) < READ_ONCE(deferral->room)) {
		socket = bpf_map_lookup_elem(&sockets, &key);
		if (socket) {
			wakes = bpf_sk_assign(skb, socket, 0);
			bpf_sk_release(socket);
			if (!wakes) {
				__sync_fetch_and_add(&deferral->packets, 1);
				return 1;
			}
		}
	}
	__sync_fetch_and_add(&deferral->wakes, 1);
	return 0;
}

/* Defers a packet of a publisher if its kernel copies are all that anybody waits for. Not more than so many in a row, lest
 * userspace reads a fast stream in large lumps only.
 */
static __noinline int defer(struct __sk_buff *skb, const struct work *work, enum relay_outcome outcome)
{
	/* A further run does not know what the first one declined. */
	int wakes = outcome != RELAY_FORWARDED || work->fan.wakes || work->cursor.id;
	__u32 key = work->arrival.upstream;
	struct relay_upstream *upstream = bpf_map_lookup_elem(&upstreams, &key);
	struct relay_deferral *deferral;

	if (!upstream || !is_received(outcome))
		return 0;
	key = READ_ONCE(upstream->deferred_socket) - 1;
	deferral = bpf_map_lookup_elem(&deferrals, &key);
	if (!deferral)
		return 0;
	if (!wakes && READ_ONCE(deferral->wakes_read) == READ_ONCE(deferral->wakes))
		wakes = !(__sync_fetch_and_add(&upstream->deferred, 1) + 1 & DEFERRED_IN_A_ROW);
	if (steer(skb, deferral, key, wakes))
		__sync_fetch_and_add(&deferral->media, 1);
	return 0;
}

/* Notes when a packet arrived, by its last bytes: they are of its tag, and as good as random. Not 0: it is not noted. */
static __noinline int note_arrival(struct __sk_buff *skb, const struct arrival *arrival)
{
	__u32 index, at = arrival->frame.packet_at + arrival->frame.packet_bytes - sizeof(__u64);
	struct relay_arrival *entry;
	__u64 end;

	if (bpf_skb_load_bytes(skb, at, &end, sizeof(end)))
		return -1;
	index = end & (RELAY_ARRIVALS - 1);
	entry = bpf_map_lookup_elem(&arrivals, &index);
	if (!entry)
		return -1;
	entry->word = end >> 32 << 32 | (__u32)(bpf_ktime_get_ns() / 1000);
	return 0;
}

/* Defers a packet of a subscriber if it is as short as an acknowledgement without news; it is not opened to see. How short
 * that is userspace says, and until how many bytes sent it holds.
 */
static __noinline int defer_short(struct __sk_buff *skb, const struct arrival *arrival)
{
	__u32 key = arrival->downstream;
	struct relay_downstream *downstream = bpf_map_lookup_elem(&downstreams, &key);
	struct relay_deferral *deferral;
	int wakes;

	if (!downstream)
		return 0;
	key = READ_ONCE(downstream->deferred_socket) - 1;
	deferral = bpf_map_lookup_elem(&deferrals, &key);
	if (!deferral)
		return 0;
	wakes = arrival->frame.packet_bytes > READ_ONCE(downstream->deferred_bytes) ||
		READ_ONCE(downstream->bytes) > READ_ONCE(downstream->deferred_until) ||
		note_arrival(skb, arrival);
	if (steer(skb, deferral, key, wakes))
		__sync_fetch_and_add(&downstream->deferred, 1);
	return 0;
}

#endif
