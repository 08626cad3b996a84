/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Congestion control after RFC 5681: additive increase, multiplicative decrease. The header also compiles as native
 * code, for tests.
 */
#ifndef MILLRACE_CONGESTION_H
#define MILLRACE_CONGESTION_H

#include "graft_packet.h"

#define ONE_PACKET     256U /* windows are counted in 256ths of a packet */
#define WINDOW_LEAST   (2 * ONE_PACKET)
#define WINDOW_MOST    (GRAFT_WINDOW * ONE_PACKET)
#define TIMEOUT_LEAST  200000000ULL  /* ns; least retransmission timeout, as in Linux TCP */
#define TIMEOUT_AT_ALL 1000000000ULL /* ns; retransmission timeout while no round trip is known (RFC 6298) */

struct congestion {
	__u32 begun;
	__u32 window;
	__u32 threshold; /* slow-start threshold: once the window is this large, it grows linearly */
	__u32 delivered; /* value of graft_shared.delivered when the window was last updated */
	__u32 losses;
	__u32 pad;
	/* start of the retransmission timeout, ns: the latest time at which no packet was in flight, or a timeout
	 * expired
	 */
	__u64 since_ns;
};

static __always_inline __u64 congestion_timeout(const struct graft_shared *shared)
{
	__u64 ns = ((__u64)shared->srtt_us + 4 * (__u64)shared->rttvar_us) * 1000;

	if (!shared->srtt_us)
		return TIMEOUT_AT_ALL;
	return ns < TIMEOUT_LEAST ? TIMEOUT_LEAST : ns;
}

static __always_inline void congestion_halve(struct congestion *own)
{
	own->threshold = own->window / 2 < WINDOW_LEAST ? WINDOW_LEAST : own->window / 2;
}

/* Grows the window for newly delivered packets: by one packet for each in slow start, and by one packet for
 * each full window above the threshold.
 */
static __always_inline void congestion_grow(struct congestion *own, __u32 come)
{
	__u64 window = own->window;

	if (own->window < own->threshold) {
		window += (__u64)come * ONE_PACKET;
		if (window > own->threshold)
			window = own->threshold;
	} else {
		window += (__u64)come * ONE_PACKET * ONE_PACKET / own->window;
	}
	own->window = window > WINDOW_MOST ? WINDOW_MOST : window;
}

/* Updates the window after a timeout, a loss, or newly acknowledged packets. Returns how many packets may be
 * in flight, at least 1.
 */
static __always_inline __u32 congestion_look(struct congestion *own, const struct graft_shared *shared,
					     __u32 initial, __u64 now_ns)
{
	__u32 come = shared->delivered - own->delivered, under_way = shared->next - shared->delivered;
	/* The window does not grow while the sender does not fill it, since that does not test the path (RFC
	 * 7661).
	 */
	int is_used = 2ULL * (under_way + come) * ONE_PACKET >= own->window;
	__u64 heard_ns = shared->acked_ns > own->since_ns ? shared->acked_ns : own->since_ns;

	if (!own->begun) {
		own->begun = 1;
		own->window = initial * ONE_PACKET;
		/* No threshold is known before the first loss, so slow start continues until then. */
		own->threshold = WINDOW_MOST;
		own->since_ns = now_ns;
	} else if (under_way && now_ns > heard_ns && now_ns - heard_ns > congestion_timeout(shared)) {
		congestion_halve(own);
		/* Timeout: no packet was acknowledged for too long, so the window restarts at one packet. */
		own->window = ONE_PACKET;
		own->since_ns = now_ns;
	} else if (shared->losses != own->losses) {
		congestion_halve(own);
		/* A loss that acknowledgements reported halves the window. */
		own->window = own->threshold;
	} else if (come && come <= GRAFT_WINDOW && is_used) {
		congestion_grow(own, come);
	}
	if (!under_way)
		own->since_ns = now_ns;
	own->delivered = shared->delivered;
	own->losses = shared->losses;
	return own->window / ONE_PACKET;
}

#endif
