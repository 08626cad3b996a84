/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The latest packets that were sent, of all sessions: for functions that send them again, or make others out of them. One ring,
 * whichever functions use it, so that what was sent by one list can be sent again by the next one.
 */
#ifndef MILLRACE_JOINT_KEPT_H
#define MILLRACE_JOINT_KEPT_H

#include "graft_packet.h"
#include "skb_udp.h"

#define KEPT_EACH  GRAFT_WINDOW /* packets of a session */
#define KEPT_BYTES 2048		/* more than a payload may have to be kept, a power of two */

/* Of a payload. */
#define KEPT_BOUNDED(bytes) BOUNDED(bytes, KEPT_BYTES)

struct kept {
	__u32 session;
	__u32 number;
	__u32 bytes;		      /* 0: nothing */
	__u32 birth;		      /* of the session: numbers come again when it begins anew */
	__u8 payload[KEPT_BYTES + 8]; /* with what a checksum reads behind it */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, GRAFT_KEEPERS *KEPT_EACH);
	__type(key, __u32);
	__type(value, struct kept);
} kept_packets SEC(".maps");

/* Behind the last one, of sessions that keep nothing: settings have none then. */
static __always_inline __u32 kept_at(const struct graft_work *work, __u32 number)
{
	return work->session * KEPT_EACH + number % KEPT_EACH;
}

/* Whether it is this packet of the session. */
static __always_inline int kept_is(const struct kept *kept, const struct graft_work *work, __u32 number)
{
	const struct graft_shared *shared = graft_shared(work);

	return shared && kept->bytes && kept->session == work->session && kept->number == number &&
	       kept->birth == shared->birth;
}

/* NULL: there is another one in its place, or none. */
static __always_inline struct kept *kept_find(const struct graft_work *work, __u32 number)
{
	__u32 at = kept_at(work, number);
	struct kept *kept = bpf_map_lookup_elem(&kept_packets, &at);

	return kept && kept_is(kept, work, number) ? kept : NULL;
}

/* Its payload, into an entry of a map. */
static __noinline int kept_put(struct __sk_buff *skb, struct graft_work *work, struct kept *kept)
{
	const struct graft_shared *shared = graft_shared(work);
	__u32 bytes = work->payload_bytes;

	kept->bytes = 0;
	if (!shared || !bytes || bytes >= KEPT_BYTES)
		return -1;
	bytes = KEPT_BOUNDED(bytes);
	if (bpf_skb_load_bytes(skb, work->udp_at + UDP_BYTES, kept->payload, bytes))
		return -1;
	kept->session = work->session;
	kept->number = work->number;
	kept->birth = shared->birth;
	kept->bytes = bytes;
	return 0;
}

/* What is going out, once, whichever functions of the list need it. */
static __always_inline void keep(struct __sk_buff *skb, struct graft_work *work)
{
	__u32 at = kept_at(work, work->number);
	struct kept *kept = bpf_map_lookup_elem(&kept_packets, &at);

	if (!kept || !work->is_numbered || work->is_kept)
		return;
	work->is_kept = 1;
	kept_put(skb, work, kept);
}

#endif
