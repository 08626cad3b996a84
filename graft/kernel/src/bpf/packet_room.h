/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Decides when an application is told that it may send again, after a packet was refused because too many were in
 * flight. The application is told once: when it may send a quarter of the allowed packets in flight, or when no packet
 * is in flight any more.
 */
#ifndef MILLRACE_PACKET_ROOM_H
#define MILLRACE_PACKET_ROOM_H

#include "graft_packet.h"

/* Returns how many packets this host's application may send now. */
static __always_inline __u32 free_packets(const struct graft_shared *shared, __u32 packets)
{
	__u32 next = shared->next, under_way = next - shared->delivered, free;

	/* The packet function `window` has the same two limits: the number of packets in flight, and the range of
	 * packet numbers that an acknowledgement's bitmap covers.
	 */
	if (under_way >= packets || next - shared->acked >= GRAFT_WINDOW / 2)
		return 0;
	free = packets - under_way;
	if (!shared->room)
		return free;
	if (graft_not_before(next, shared->room))
		return 0;
	return shared->room - next < free ? shared->room - next : free;
}

/* Returns whether the application has to be told that it may send again. The function `window` sets `refused` when it
 * refuses a packet. This function clears `refused`, and only the CPU that clears it tells the application.
 */
static __always_inline int takes_sign(const struct graft_work *work)
{
	struct graft_shared *shared = work->tells_room ? graft_shared(work) : NULL;
	__u32 packets, free;

	if (!shared)
		return 0;
	packets = shared->refused;
	if (!packets)
		return 0;
	free = free_packets(shared, packets);
	if (!free || (free < (packets + 3) / 4 && shared->next != shared->delivered))
		return 0;
	return __sync_lock_test_and_set(&shared->refused, 0) != 0;
}

#endif
