// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Has lost packets sent again, and nothing else. Behind `number`.
 *
 * The sender keeps its latest packets in a ring. The receiver asks for each number that is missing as soon as a newer one
 * has come, and again after `retry_us`, up to `tries` times. A request is turned into the packet that it asks for, at TC
 * ingress, without a process waking up. What is behind a gap is delivered at once: order is another function's matter.
 */
#include "joint_frame.h"

struct repair_config {
	__u32 retry_us;
	__u32 tries;
};

SEC(".rodata.config")
const volatile struct repair_config config = {
	.retry_us = 50000,
	.tries = 10,
};

#define RING	     4096 /* packets, of all sessions */
#define PACKET_BYTES 2048 /* more than a payload may have to be kept, a power of two */
#define OPEN_MAX     512  /* numbers that are asked for at the same time, a power of two */
#define OPEN_STEP    16	  /* of these, looked at for each packet */
#define BEGINNING    64	  /* numbers below it are those of a session that begins */
#define ASK_MAX	     8	  /* requests for one packet that came */

struct kept {
	__u32 session;
	__u32 life; /* of the session, which begins to count anew with each */
	__u32 number;
	__u32 bytes;			/* 0: nothing */
	__u8 payload[PACKET_BYTES + 8]; /* with what a checksum reads behind it */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, RING);
	__type(key, __u32);
	__type(value, struct kept);
} ring SEC(".maps");

/* What a packet's payload is put while a request is made of it. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct kept);
} spare SEC(".maps");

struct open {
	__u32 number;
	__u32 tries; /* 0: free */
	__u64 asked_ns;
};

struct state {
	__u32 looked; /* the first number that was not looked for yet */
	__u32 gave_up;
	__u32 step; /* of the next walk over `open` */
	__u32 begun;
	struct open open[OPEN_MAX];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, GRAFT_SESSIONS);
	__type(key, __u32);
	__type(value, struct state);
} state SEC(".maps");

static __always_inline struct kept *place_of(const struct graft_work *work, __u32 number)
{
	__u32 at = (work->session * (RING / 8) + number) % RING;

	return bpf_map_lookup_elem(&ring, &at);
}

/* --- The sender keeps --- */

static __noinline int keep(struct __sk_buff *skb, struct graft_work *work)
{
	struct kept *kept = place_of(work, work->number);
	struct graft_shared *shared = graft_shared(work);
	__u32 bytes = work->payload_bytes;

	if (!kept || !shared)
		return -1;
	kept->bytes = 0;
	if (!is_size(&bytes, PACKET_BYTES - 1))
		return -1;
	if (bpf_skb_load_bytes(skb, work->udp_at + UDP_BYTES, kept->payload, bytes))
		return -1;
	kept->session = work->session;
	kept->life = shared->life;
	kept->number = work->number;
	kept->bytes = bytes;
	return 0;
}

SEC("tcx/egress")
int repair_tx(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_TX);

	if (!work)
		return GRAFT_PASS_tx;
	if (work->is_numbered)
		keep(skb, work);
	return graft_next(skb, tx, work);
}

/* --- A packet is turned around --- */

struct addresses {
	__u8 source[16];
	__u8 destination[16];
	__be16 ports[2];
};

static __always_inline int swap(struct __sk_buff *skb, __u32 at, const __u32 bytes)
{
	__u64 both[4];
	__u8 *other = (__u8 *)both + bytes;

	if (bpf_skb_load_bytes(skb, at, both, 2 * bytes) || bpf_skb_store_bytes(skb, at, other, bytes, 0))
		return -1;
	return bpf_skb_store_bytes(skb, at + bytes, both, bytes, 0);
}

/* Both of Ethernet's addresses, of IP's, of UDP's. Sums do not change. */
static __noinline int turn(struct __sk_buff *skb, struct graft_work *work)
{
	__u8 macs[12];

	if (bpf_skb_load_bytes(skb, 0, macs, 12) || bpf_skb_store_bytes(skb, 0, macs + 6, 6, 0) ||
	    bpf_skb_store_bytes(skb, 6, macs, 6, 0))
		return -1;
	if (work->family == 4 ? swap(skb, work->ip_at + 12, 4) : swap(skb, work->ip_at + 8, 16))
		return -1;
	return swap(skb, work->udp_at, 2);
}

/* Lengths, checksum and frame of a packet with `bytes` of payload, which are in the skb already and whose sum is given. */
static __noinline int finish(struct __sk_buff *skb, struct graft_work *work, __u32 number,
			     __u32 kind_and_bytes, __u32 payload_sum)
{
	__u32 bytes = kind_and_bytes & 0xffff, udp_bytes = UDP_BYTES + bytes + GRAFT_FRAME_BYTES;
	struct frame_context context = {.payload_bytes = bytes};
	struct graft_frame frame;
	struct udphdr udp = {};
	__u8 addresses[32] = {};
	__u32 ip_change;
	__be16 length;
	__u64 sum;

	if (work->family == 4) {
		if (bpf_skb_load_bytes(skb, work->ip_at + 12, addresses, 4) ||
		    bpf_skb_load_bytes(skb, work->ip_at + 16, addresses + 16, 4) ||
		    bpf_skb_load_bytes(skb, work->ip_at + 2, &length, sizeof(length)))
			return -1;
		ip_change = work->udp_at - work->ip_at + udp_bytes - bpf_ntohs(length);
	} else {
		if (bpf_skb_load_bytes(skb, work->ip_at + 8, addresses, 32) ||
		    bpf_skb_load_bytes(skb, work->ip_at + 4, &length, sizeof(length)))
			return -1;
		ip_change = work->udp_at - work->ip_at - IPV6_BYTES + udp_bytes - bpf_ntohs(length);
	}
	if (bpf_skb_load_bytes(skb, work->udp_at, &udp, 4))
		return -1;
	__builtin_memcpy(context.source, addresses, sizeof(context.source));
	context.source_port = udp.source;
	context.destination_port = udp.dest;
	frame_make(&frame, work, kind_and_bytes >> 16, number, &context);
	udp.len = bpf_htons(udp_bytes);
	sum = csum_pseudo(addresses, sizeof(addresses), udp_bytes);
	if (work->is_partial) {
		udp.check = csum_fold(sum);
	} else {
		__u16 of_frame = csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)&frame, sizeof(frame), 0));

		if (bytes & 1)
			of_frame = of_frame << 8 | of_frame >> 8;
		sum = bpf_csum_diff(NULL, 0, (__be32 *)&udp, sizeof(udp), csum_fold(sum));
		put_udp_checksum(&udp, (__u64)csum_fold(sum) + of_frame + payload_sum);
	}
	if (bpf_skb_store_bytes(skb, work->udp_at, &udp, sizeof(udp), 0) ||
	    bpf_skb_store_bytes(skb, work->udp_at + UDP_BYTES + bytes, &frame, sizeof(frame), 0))
		return -1;
	return change_ip_length(skb, work, ip_change);
}

/* --- The sender answers a request --- */

static __noinline int resend(struct __sk_buff *skb, struct graft_work *work)
{
	struct kept *kept = place_of(work, work->number);
	struct graft_shared *shared = graft_shared(work);
	__u32 bytes, sum;

	if (!kept || !shared)
		return GRAFT_ANSWERED;
	bytes = kept->bytes;
	if (kept->session != work->session || kept->life != shared->life || kept->number != work->number ||
	    !is_size(&bytes, PACKET_BYTES - 1))
		return GRAFT_ANSWERED;
	if (bpf_skb_change_tail(skb, work->udp_at + UDP_BYTES + bytes + GRAFT_FRAME_BYTES, 0) ||
	    turn(skb, work) || bpf_skb_store_bytes(skb, work->udp_at + UDP_BYTES, kept->payload, bytes, 0))
		return GRAFT_NO_ROOM;
	bytes &= PACKET_BYTES - 1;
	store32(kept->payload + bytes, 0);
	sum = csum_fold(csum_add(kept->payload, bytes, PACKET_BYTES, 0));
	if (finish(skb, work, work->number, GRAFT_DATA << 16 | bytes, sum))
		return GRAFT_NO_ROOM;
	skb->mark = work->mark;
	return GRAFT_RESENT;
}

/* --- The receiver asks --- */

struct asking {
	struct __sk_buff *skb;
	struct graft_work *work;
	struct graft_shared *shared;
	struct state *state;
	__u32 count;
	__u32 failed;
	__u32 numbers[ASK_MAX];
};

static __always_inline void want(struct asking *asking, __u32 number)
{
	__u32 at = asking->count;

	if (at < ASK_MAX) {
		asking->numbers[at & (ASK_MAX - 1)] = number;
		asking->count = at + 1;
	}
}

/* What came meanwhile needs no asking for; what was asked for often enough is given up. */
static long look_again(__u32 index, struct asking *asking)
{
	struct state *state = asking->state;
	struct open *open = &state->open[(state->step + index) & (OPEN_MAX - 1)];
	__u64 now_ns = asking->work->now_ns;

	if (!open->tries)
		return 0;
	if (!graft_is_missing(asking->shared, open->number)) {
		open->tries = 0;
	} else if (now_ns - open->asked_ns > (__u64)config.retry_us * 1000) {
		if (open->tries >= config.tries) {
			open->tries = 0;
			state->gave_up++;
			return 0;
		}
		open->tries++;
		open->asked_ns = now_ns;
		want(asking, open->number);
	}
	return asking->count >= ASK_MAX;
}

static long look_at_next(__u32 index, struct asking *asking)
{
	struct state *state = asking->state;
	__u32 number = state->looked;
	struct open *open = &state->open[number & (OPEN_MAX - 1)];

	if (graft_not_before(number, asking->shared->newest))
		return 1;
	state->looked = number + 1;
	if (!graft_is_missing(asking->shared, number))
		return 0;
	if (open->tries)
		state->gave_up++;
	open->number = number;
	open->tries = 1;
	open->asked_ns = asking->work->now_ns;
	want(asking, number);
	return asking->count >= ASK_MAX;
}

static __always_inline __u32 look(struct asking *asking)
{
	struct state *state = asking->state;
	__u32 oldest = asking->shared->newest - GRAFT_WINDOW / 2, number = asking->work->number;

	/* This end was started later than the other one, which it does not ask for what was before. */
	if (!state->begun && number >= BEGINNING)
		state->looked = number;
	state->begun = 1;

	/* So many at once are a pause of the path, or of the other side. */
	if (graft_not_before(oldest, state->looked)) {
		state->gave_up += oldest - state->looked;
		state->looked = oldest;
	}
	bpf_loop(2 * ASK_MAX, look_at_next, asking, 0);
	bpf_loop(asking->work->kind == GRAFT_LAST ? OPEN_MAX : OPEN_STEP, look_again, asking, 0);
	state->step += OPEN_STEP;
	return asking->count;
}

static long send_request(__u32 index, struct asking *asking)
{
	struct __sk_buff *skb = asking->skb;
	struct graft_work *work = asking->work;
	__u32 number = asking->numbers[index & (ASK_MAX - 1)];

	asking->failed |=
		finish(skb, work, number, GRAFT_REQUEST << 16, 0) || bpf_clone_redirect(skb, skb->ifindex, 0);
	return asking->failed ? 1 : 0;
}

/* The packet becomes each request in turn, and then itself again. */
static __always_inline int ask(struct __sk_buff *skb, struct asking *asking)
{
	__u32 zero = 0, bytes, total, mark = skb->mark;
	struct kept *saved = bpf_map_lookup_elem(&spare, &zero);
	struct graft_work *work = asking->work;
	__u16 check;

	if (!saved)
		return 0;
	total = work->udp_at + UDP_BYTES + work->payload_bytes + GRAFT_FRAME_BYTES;
	bytes = work->payload_bytes + GRAFT_FRAME_BYTES;
	OPAQUE(bytes);
	if (bytes < GRAFT_FRAME_BYTES || bytes >= PACKET_BYTES)
		return 0;
	if (bpf_skb_load_bytes(skb, work->udp_at + UDP_BYTES, saved->payload, bytes) ||
	    bpf_skb_load_bytes(skb, CHECK_AT(work), &check, sizeof(check)))
		return 0;
	if (bpf_skb_change_tail(skb, work->udp_at + UDP_BYTES + GRAFT_FRAME_BYTES, 0))
		return 0;
	asking->failed = turn(skb, work);
	skb->mark = work->mark;
	if (!asking->failed)
		bpf_loop(asking->count, send_request, asking, 0);
	skb->mark = mark;
	bytes = work->payload_bytes + GRAFT_FRAME_BYTES;
	OPAQUE(bytes);
	if (bytes < GRAFT_FRAME_BYTES || bytes >= PACKET_BYTES)
		return -1;
	if (turn(skb, work) || finish(skb, work, 0, GRAFT_DATA << 16, 0) ||
	    bpf_skb_change_tail(skb, total, 0) ||
	    change_udp_length(skb, work, UDP_BYTES + GRAFT_FRAME_BYTES, bytes + UDP_BYTES) ||
	    change_ip_length(skb, work, work->payload_bytes) ||
	    bpf_skb_store_bytes(skb, work->udp_at + UDP_BYTES, saved->payload, bytes, 0))
		return -1;
	return bpf_skb_store_bytes(skb, CHECK_AT(work), &check, sizeof(check), 0);
}

/* The number of a word GRAFT_LAST is that of the sender's next packet: those before it have been sent. */
static __always_inline void believe(struct graft_shared *shared, __u32 next)
{
	if (graft_not_before(next, shared->newest))
		shared->newest = next;
}

SEC("tcx/ingress")
int repair_repair(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_REPAIR);
	struct asking asking = {.skb = skb, .work = work};
	__u32 session;

	if (!work)
		return GRAFT_PASS_repair;
	if (work->kind == GRAFT_REQUEST)
		return graft_done(skb, repair, work, resend(skb, work));
	session = work->session;
	asking.state = bpf_map_lookup_elem(&state, &session);
	asking.shared = graft_shared(work);
	if (asking.shared && work->kind == GRAFT_LAST)
		believe(asking.shared, work->number);
	if (asking.state && asking.shared && look(&asking) && ask(skb, &asking))
		return graft_done(skb, repair, work, GRAFT_NO_ROOM);
	return graft_next(skb, repair, work);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
