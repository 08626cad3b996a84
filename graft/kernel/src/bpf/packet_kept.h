/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Stores the latest sent packets of each session, for functions that retransmit them or compute parity packets. All
 * packet functions share one array of packets. If userspace replaces a session's functions, the new ones can retransmit
 * what the old ones sent.
 */
#ifndef MILLRACE_PACKET_KEPT_H
#define MILLRACE_PACKET_KEPT_H

#include "graft_packet.h"
#include "skb_udp.h"

#define KEPT_EACH  GRAFT_WINDOW /* number of packets stored for each session */
#define KEPT_BYTES 2048		/* only payloads shorter than this are stored; a power of two */
#define KEPT_NOT   KEPT_BYTES /* value of `bytes` for a packet that is not stored: it is empty or too long */
/* ns in which a packet is stored after its packet number was assigned: its CPU may be interrupted between both */
#define KEPT_NS 1000000000LL

/* Bounds a payload's length in a way that the verifier understands. */
#define KEPT_BOUNDED(bytes) BOUNDED(bytes, KEPT_BYTES)

struct kept {
	__u32 session;
	__u32 number;
	__u32 bytes; /* length of the payload; 0: the entry is empty, or is being written; or KEPT_NOT */
	/* `birth` of the session when the packet was stored, since packet numbers restart at 0 */
	__u32 birth;
	/* payload, with space for the zeroes that checksum code reads behind it */
	__u8 payload[KEPT_BYTES + 8];
};

BPF_MAP(ARRAY, kept_packets, __u32, struct kept, GRAFT_STORING_SESSIONS *KEPT_EACH);

/* Returns the index of a packet's entry in the map `kept_packets`. The map has no entries for sessions whose
 * configuration stores no packets. For them the index is beyond the map's end, so look-ups find nothing.
 */
static __always_inline __u32 kept_at(const struct graft_work *work, __u32 number)
{
	return work->session * KEPT_EACH + number % KEPT_EACH;
}

/* Returns whether an entry holds the packet of this number, stored since the session's latest start. */
static __always_inline int kept_is(const struct kept *kept, const struct graft_work *work, __u32 number)
{
	const struct graft_shared *shared = graft_shared(work);
	__u32 bytes = kept->bytes;

	/* Otherwise the compiler leaves out later masks of `bytes`, which the verifier needs. */
	OPAQUE(bytes);
	return shared && bytes && bytes < KEPT_BYTES && kept->session == work->session &&
	       kept->number == number && kept->birth == shared->birth;
}

/* Returns the stored packet of this number; NULL if it was overwritten or never stored. */
static __always_inline struct kept *kept_find(const struct graft_work *work, __u32 number)
{
	__u32 at = kept_at(work, number);
	struct kept *kept = bpf_map_lookup_elem(&kept_packets, &at);

	return kept && kept_is(kept, work, number) ? kept : NULL;
}

/* Returns whether a packet that was sent is not stored, and will not be. If its number has just been assigned, another
 * CPU may be about to store it, and its entry still has an older packet.
 */
static __always_inline int kept_is_gone(const struct graft_work *work, const struct graft_shared *shared,
					__u32 number)
{
	__u32 at = kept_at(work, number);
	const struct kept *kept = bpf_map_lookup_elem(&kept_packets, &at);

	if (!kept || (__s64)(work->now_ns - shared->went_ns[number % GRAFT_WINDOW]) > KEPT_NS)
		return 1;
	if (kept->session != work->session || kept->birth != shared->birth ||
	    !graft_not_before(kept->number, number))
		return 0;
	return kept->number != number || kept->bytes == KEPT_NOT;
}

/* Copies a packet's payload to an entry, or notes that the packet is not stored.
 */
static __noinline int kept_put(struct __sk_buff *skb, struct graft_work *work, struct kept *kept)
{
	const struct graft_shared *shared = graft_shared(work);
	__u32 bytes = work->payload_bytes, stored = KEPT_NOT;

	/* The entry is marked as empty while it is written, since another CPU may read it meanwhile. */
	kept->bytes = 0;
	if (!shared)
		return -1;
	if (bytes && bytes < KEPT_BYTES) {
		bytes = KEPT_BOUNDED(bytes);
		if (!bpf_skb_load_bytes(skb, work->udp_at + UDP_BYTES, kept->payload, bytes))
			stored = bytes;
	}
	kept->session = work->session;
	kept->number = work->number;
	kept->birth = shared->birth;
	kept->bytes = stored;
	return 0;
}

/* Stores an outgoing packet. Further calls by other functions for the same packet have no effect. */
static __always_inline void keep(struct __sk_buff *skb, struct graft_work *work)
{
	__u32 at = kept_at(work, work->number);
	struct kept *kept = bpf_map_lookup_elem(&kept_packets, &at);

	/* Packets without a packet number cannot be requested, so they are not stored. */
	if (!kept || !work->is_numbered || work->is_kept)
		return;
	work->is_kept = 1;
	kept_put(skb, work, kept);
}

#endif
