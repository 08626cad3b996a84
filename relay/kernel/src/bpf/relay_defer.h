/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Deferred wake-ups, as in interrupt moderation. A packet that userspace need not see at once is steered to a socket
 * that no thread sleeps on. Userspace reads the deferred socket when another packet has woken it, or when its timer
 * expires.
 *
 * Packets must not be reordered, since a publisher takes packets that are acknowledged out of order for lost, and slows
 * down. So once a packet wakes userspace, all further packets go to the ordinary socket, until userspace has read
 * everything and sleeps again. Packets in the deferred socket are therefore always older than those in the ordinary
 * socket.
 */
#ifndef MILLRACE_RELAY_DEFER_H
#define MILLRACE_RELAY_DEFER_H

#include "relay_maps.h"
#include "util.h"

/* packets of one publisher that may be deferred in a row; a power of two minus one */
#define DEFERRED_IN_A_ROW 31

/* Reports whether the packet belongs to an upstream connection, and is passed to userspace in this run of the program.
 */
static __always_inline int is_received(enum relay_outcome outcome)
{
	return outcome == RELAY_FORWARDED || outcome == RELAY_OVER_BUDGET || outcome == RELAY_REPLAYED ||
	       outcome == RELAY_BAD_FRAMES || outcome == RELAY_NO_SLOT || outcome == RELAY_BAD_STREAM ||
	       outcome == RELAY_DECLINED;
}

/* Steers a packet, or a super-packet of `packets` segments, to the deferred socket. Returns 0 if the packet goes to the
 * ordinary socket instead: because it `wakes` userspace, userspace is awake, or too many packets are deferred.
 */
static __always_inline int steer(struct __sk_buff *skb, struct relay_deferral *deferral, __u32 key, int wakes,
				 __u32 packets)
{
	struct bpf_sock *socket;

	/* The counters `wakes_read` (of userspace) and `wakes` (of this program) are equal while userspace sleeps and
	 * has read every packet that woke it.
	 */
	if (!wakes && READ_ONCE(deferral->wakes_read) == READ_ONCE(deferral->wakes) &&
	    READ_ONCE(deferral->packets) - READ_ONCE(deferral->taken) + packets <=
		    READ_ONCE(deferral->room)) {
		socket = bpf_map_lookup_elem(&sockets, &key);
		if (socket) {
			wakes = bpf_sk_assign(skb, socket, 0);
			bpf_sk_release(socket);
			if (!wakes) {
				__sync_fetch_and_add(&deferral->packets, packets);
				return 1;
			}
		}
	}
	__sync_fetch_and_add(&deferral->wakes, 1);
	return 0;
}

/* Defers a packet of a publisher if the kernel has made all copies of its frames, so that no other work is urgent. At
 * most DEFERRED_IN_A_ROW packets are deferred in a row, so that userspace does not have to read a fast stream in large
 * bursts.
 */
static __noinline int defer(struct __sk_buff *skb, const struct work *work, enum relay_outcome outcome)
{
	/* Only the program's first run for a packet knows which of its frames the program could not forward. So a
	 * packet that needs a further run always wakes userspace.
	 */
	int wakes = outcome != RELAY_FORWARDED || work->fan.wakes || work->cursor.id;
	__u32 packets = work->super.segments ? work->super.segments : 1;
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
		wakes = (__sync_fetch_and_add(&upstream->deferred, packets) & DEFERRED_IN_A_ROW) + packets >
			DEFERRED_IN_A_ROW;
	if (steer(skb, deferral, key, wakes, packets))
		__sync_fetch_and_add(&deferral->media, packets);
	return 0;
}

/* Stores when a deferred packet arrived, keyed by its last 8 bytes. These bytes belong to the authentication tag, so
 * they are as good as random. Returns an error (not 0) if the time could not be stored.
 */
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

/* Defers a packet of a subscriber that is so short that it can only be an ACK which reports no loss. The packet is not
 * decrypted to check that. Userspace sets the largest size of such packets. It also sets how many bytes may be sent to
 * the subscriber before all of the subscriber's packets wake userspace again. Segments of super-packets are not
 * deferred.
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
	wakes = arrival->frame.segment_bytes ||
		arrival->frame.packet_bytes > READ_ONCE(downstream->deferred_bytes) ||
		READ_ONCE(downstream->bytes) > READ_ONCE(downstream->deferred_until) ||
		note_arrival(skb, arrival);
	if (steer(skb, deferral, key, wakes, 1))
		__sync_fetch_and_add(&downstream->deferred, 1);
	return 0;
}

#endif
