// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The receiver says what has come, and for how much more it has room; the sender learns what is no longer under way, and how
 * long a round trip is. Behind `number`, and behind functions that drop or repair at the receiver.
 *
 * It is said for each packet of `every`, and at once when something is missing, was missing, or was asked for by a word of
 * the sender's daemon: so words make up for acknowledgements that are lost.
 */
#include "ack.h"
#include "joint_send.h"
#include <bpf/bpf_core_read.h>

struct acknowledge_config {
	__u32 every;
};

SEC(".rodata.config")
const volatile struct acknowledge_config config = {
	.every = 1,
};

struct state {
	__u32 waiting;	/* packets since the latest acknowledgement */
	__u32 complete; /* at the latest packet */
	__u32 truesize; /* that the largest packet took in the kernel's memory */
	__u32 pad;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, GRAFT_SESSIONS);
	__type(key, __u32);
	__type(value, struct state);
} state SEC(".maps");

/* --- The sender --- */

SEC("tcx/egress")
int acknowledge_tx(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_TX);
	struct graft_shared *shared;

	if (!work)
		return GRAFT_PASS_tx;
	shared = graft_shared(work);
	if (shared && work->is_numbered)
		shared->went_ns[work->number % GRAFT_WINDOW] = bpf_ktime_get_ns();
	return graft_next(skb, tx, work);
}

/* What an acknowledgement's tag is over, and the tag. */
struct proof {
	__u64 frame_tag;
	struct graft_ack ack;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct proof);
} proofs SEC(".maps");

static __always_inline struct proof *proof_of_cpu(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&proofs, &zero);
}

static __always_inline __u64 tag_of(const struct graft_work *work, const struct proof *proof)
{
	return siphash128(work->key, (const __u8 *)proof, __builtin_offsetof(struct proof, ack.tag) / 8).low;
}

static __noinline int hear(struct __sk_buff *skb, struct graft_work *work, struct graft_shared *shared)
{
	__u32 at = work->udp_at + UDP_BYTES;
	struct proof *proof = proof_of_cpu();

	if (!proof || work->payload_bytes != sizeof(proof->ack) ||
	    bpf_skb_load_bytes(skb, at, &proof->ack, sizeof(proof->ack)) ||
	    bpf_skb_load_bytes(skb, at + sizeof(proof->ack) + __builtin_offsetof(struct graft_frame, tag),
			       &proof->frame_tag, sizeof(proof->frame_tag)))
		return GRAFT_MALFORMED;
	if (tag_of(work, proof) != proof->ack.tag)
		return GRAFT_FORGED;
	return ack_take(shared, work->number, &proof->ack, bpf_ktime_get_ns()) ? GRAFT_MALFORMED
									       : GRAFT_ANSWERED;
}

/* --- The receiver --- */

struct filling {
	struct graft_shared *shared;
	struct graft_ack *ack;
	__u32 number; /* the frame's: `complete` may go on meanwhile */
};

static long fill(__u32 index, struct filling *filling)
{
	__u32 number = filling->number + index;

	if (index >= ACK_COME || graft_not_before(number, filling->shared->newest))
		return 1;
	if (!graft_is_missing(filling->shared, number))
		filling->ack->come[index / 8 % (ACK_COME / 8)] |= 1 << index % 8;
	return 0;
}

struct sock {
	int sk_rcvbuf;
	struct {
		struct {
			int counter;
		} rmem_alloc;
	} sk_backlog;
} __attribute__((preserve_access_index));

struct sk_buff {
	unsigned int truesize;
} __attribute__((preserve_access_index));

#define ROOM_MAX  GRAFT_WINDOW /* packets */
#define ROOM_NONE 0xffffffff
#define BATCH	  8    /* packets that come here before the first of them is in its socket */
#define TRUESIZE  2304 /* of a packet of 1500 bytes: smaller ones may be followed by such */

/* Packets that its socket has room for. Nobody listens, or it cannot be found: no bound. */
static __noinline __u32 find_room(struct __sk_buff *skb, struct graft_work *work, struct state *own)
{
	struct bpf_sock_tuple tuple = {};
	const struct sock *kernels = NULL;
	struct bpf_sock *found;
	__s32 have, used;
	__u32 each = 0, room;

	if (work->family == 4) {
		if (bpf_skb_load_bytes(skb, work->ip_at + __builtin_offsetof(struct iphdr, saddr), &tuple,
				       8) ||
		    bpf_skb_load_bytes(skb, work->udp_at, &tuple.ipv4.sport, 4))
			return ROOM_NONE;
	} else {
		if (bpf_skb_load_bytes(skb, work->ip_at + __builtin_offsetof(struct ipv6hdr, saddr), &tuple,
				       32) ||
		    bpf_skb_load_bytes(skb, work->udp_at, &tuple.ipv6.sport, 4))
			return ROOM_NONE;
	}
	found = work->family == 4
			? bpf_sk_lookup_udp(skb, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS, 0)
			: bpf_sk_lookup_udp(skb, &tuple, sizeof(tuple.ipv6), BPF_F_CURRENT_NETNS, 0);
	if (!found)
		return ROOM_NONE;
	/* Its address as a number: the verifier lets nobody look into sockets otherwise. */
	bpf_probe_read_kernel(&kernels, sizeof(kernels), &found);
	have = BPF_CORE_READ(kernels, sk_rcvbuf);
	used = BPF_CORE_READ(kernels, sk_backlog.rmem_alloc.counter);
	bpf_sk_release(found);
	bpf_probe_read_kernel(&each, sizeof(each), &((struct sk_buff *)skb)->truesize);
	if (each < TRUESIZE)
		each = TRUESIZE;
	if (each > own->truesize)
		own->truesize = each;
	if (used >= have)
		return 0;
	room = (__u32)(have - used) / own->truesize;
	if (room > 2 * BATCH)
		return room - BATCH;
	if (used)
		return room > BATCH ? room - BATCH : 0;
	/* Of an empty socket there is always room for one. */
	return room > 1 ? room / 2 : 1;
}

static __always_inline __u32 room_for(struct __sk_buff *skb, struct graft_work *work, struct state *own)
{
	__u32 room = find_room(skb, work, own);

	return room > ROOM_MAX ? ROOM_MAX : room;
}

static __noinline int say(struct __sk_buff *skb, struct graft_work *work, struct graft_shared *shared,
			  __u32 room)
{
	struct letter letter = {
		.kind = GRAFT_ACK, .number = shared->complete, .bytes = sizeof(struct graft_ack)};
	struct proof *proof = proof_of_cpu();
	struct filling filling = {.shared = shared};
	struct graft_ack *ack;

	if (!proof)
		return -1;
	ack = &proof->ack;
	*ack = (struct graft_ack){
		.newest = bpf_htonl(shared->newest),
		.echo = bpf_htonl(work->kind == GRAFT_DATA ? work->number
							   : shared->complete - GRAFT_WINDOW - 1),
		.room = bpf_htonl(shared->complete + room),
	};
	if (!graft_not_before(shared->newest, letter.number))
		letter.number = shared->newest;
	filling.number = letter.number;
	filling.ack = ack;
	if (letter.number != shared->newest)
		bpf_loop(ACK_COME, fill, &filling, 0);
	if (make_frame(skb, work, &letter))
		return -1;
	proof->frame_tag = letter.frame.tag;
	ack->tag = tag_of(work, proof);
	if (bpf_skb_store_bytes(skb, work->udp_at + UDP_BYTES, ack, sizeof(*ack), 0))
		return -1;
	letter.sum = csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)ack, sizeof(*ack), 0));
	return finish(skb, work, &letter) || bpf_clone_redirect(skb, skb->ifindex, 0);
}

static __always_inline int is_due(struct state *own, const struct graft_shared *shared,
				  const struct graft_work *work)
{
	int is_due;

	own->waiting++;
	is_due = work->kind != GRAFT_DATA || own->waiting >= config.every ||
		 shared->complete - own->complete != 1 || shared->complete != shared->newest;
	own->complete = shared->complete;
	if (is_due)
		own->waiting = 0;
	return is_due;
}

SEC("tcx/ingress")
int acknowledge_repair(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_REPAIR);
	struct graft_shared *shared;
	struct loan loan = {};
	struct state *own;
	__u32 room, session;

	if (!work)
		return GRAFT_PASS_repair;
	shared = graft_shared(work);
	session = work->session;
	own = bpf_map_lookup_elem(&state, &session);
	if (!shared || !own || work->kind == GRAFT_REQUEST || work->kind == GRAFT_PARITY)
		return graft_next(skb, repair, work);
	if (work->kind == GRAFT_ACK)
		return graft_done(skb, repair, work, hear(skb, work, shared));
	graft_advance(shared);
	if (!is_due(own, shared, work))
		return graft_next(skb, repair, work);
	room = room_for(skb, work, own);
	if (!borrow(skb, work, &loan, sizeof(struct graft_ack))) {
		say(skb, work, shared, room);
		if (give_back(skb, work, &loan))
			return graft_done(skb, repair, work, GRAFT_NO_ROOM);
	}
	return graft_next(skb, repair, work);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
