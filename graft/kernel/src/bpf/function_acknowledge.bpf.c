// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Acknowledges packets. The receiver reports which packets it has received and how many more its socket can take. The
 * sender derives the packets in flight and the round-trip time. In a graft's list of functions, this one follows the
 * function `number`, and functions that drop or recover packets at the receiver.
 *
 * One in `every` packets is acknowledged. A gap in the packet numbers, the end of a gap, or a request by the sender's
 * daemon is acknowledged at once. Every acknowledgement is complete, so a lost one is replaced by the next.
 */
#include "ack.h"
#include "arrivals.h"
#include "packet_send.h"
#include "socket_room.h"

struct acknowledge_config {
	__u32 every;
};

SEC(".rodata.config")
const volatile struct acknowledge_config config = {
	.every = 1,
};

struct state {
	__u32 waiting; /* number of packets received since the latest acknowledgement */
	/* lowest missing packet number (graft_shared.complete) when the latest packet arrived */
	__u32 complete;
	__u32 truesize; /* bytes of socket memory that the largest packet so far takes */
	__u32 batch;	/* number of packets that TC delivered in quick succession, at most BATCH */
	__u64 passed_ns;
	struct arrivals arrivals;
};

BPF_MAP(ARRAY, state, __u32, struct state, GRAFT_SESSIONS);

/* --- At the sender of data --- */

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

/* The bytes that the authentication tag of an acknowledgement covers, followed by the tag. */
struct proof {
	__u64 frame_tag;
	struct graft_ack ack;
};

BPF_MAP(PERCPU_ARRAY, proofs, __u32, struct proof, 1);

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

/* --- At the receiver of data --- */

/* The receiver's state that an acknowledgement reports. Packets that XDP has accepted, but that have not reached TC
 * yet, are reported as not received.
 */
struct standing {
	__u32 number; /* all packets below this number were received, or are no longer expected */
	__u32 newest;
	__u32 room; /* number of packets, from `number` on, for which the socket has space */
};

struct holding {
	const struct arrivals *arrivals;
	struct graft_ack *ack;
	__u32 number;
};

static long hold_number(__u32 index, struct holding *holding)
{
	__u32 turn = holding->arrivals->passed + index, number;

	if (turn == holding->arrivals->let_in)
		return 1;
	number = holding->arrivals->numbers[turn % GRAFT_WINDOW];
	if (holding->arrivals->places[turn % GRAFT_WINDOW] && !graft_not_before(number, holding->number))
		holding->number = number;
	return 0;
}

static long hold_bit(__u32 index, struct holding *holding)
{
	__u32 turn = holding->arrivals->passed + index, bit;

	if (turn == holding->arrivals->let_in)
		return 1;
	bit = holding->arrivals->numbers[turn % GRAFT_WINDOW] - holding->number;
	if (bit < ACK_COME && holding->arrivals->places[turn % GRAFT_WINDOW])
		holding->ack->come[bit / 8 % (ACK_COME / 8)] &= ~(1 << bit % 8);
	return 0;
}

static __noinline int stand(struct standing *standing, const struct state *own,
			    const struct graft_shared *shared)
{
	__u32 newest = *(volatile __u32 *)&shared->newest, complete;
	struct holding holding = {.arrivals = &own->arrivals, .number = newest};
	__u32 is_waiting = arrivals_waiting(&own->arrivals);

	/* The ring is read before `complete`: a packet that has left the ring meanwhile is taken back already, or was
	 * delivered.
	 */
	if (is_waiting)
		bpf_loop(GRAFT_WINDOW, hold_number, &holding, 0);
	complete = *(volatile __u32 *)&shared->complete;
	if (!graft_not_before(complete, holding.number))
		holding.number = complete;
	if (is_waiting) {
		if (graft_not_before(newest, own->arrivals.newest))
			newest = own->arrivals.newest;
		if (!graft_not_before(newest, holding.number))
			newest = holding.number;
	}
	*standing = (struct standing){.number = holding.number, .newest = newest};
	return 0;
}

struct filling {
	struct graft_shared *shared;
	struct graft_ack *ack;
	struct standing standing;
};

static long fill(__u32 index, struct filling *filling)
{
	__u32 number = filling->standing.number + index;

	if (index >= ACK_COME || graft_not_before(number, filling->standing.newest))
		return 1;
	if (!graft_is_missing(filling->shared, number))
		filling->ack->come[index / 8 % (ACK_COME / 8)] |= 1 << index % 8;
	return 0;
}

#define ROOM_MAX GRAFT_WINDOW /* largest buffer space that a receiver announces, in packets */
/* number of packets that TC may have delivered while the kernel still batches them before the socket
 * (net.core.gro_normal_batch)
 */
#define BATCH 8
/* ns after which a batch of delivered packets is in the socket: longer than one poll of an interface */
#define BATCH_NS 16000000
/* bytes of socket memory that a packet of 1500 bytes takes; this much is reserved for each announced packet, even if
 * all packets so far were smaller
 */
#define LARGEST 4416

/* Returns how many packets TC has delivered that may not be in the application's socket yet. */
static __always_inline __u32 under_way(const struct state *own, const struct socket_room *room, __u64 now_ns)
{
	/* If the socket has a large buffer, always assume that BATCH delivered packets are not in the socket yet, since
	 * other senders may use the socket, too.
	 */
	if (room->have > 4 * BATCH * own->truesize)
		return BATCH;
	return now_ns - own->passed_ns > BATCH_NS ? 0 : own->batch;
}

/* Returns whether the socket would drop the packet, which then counts as not received. */
static __noinline int is_too_much(struct graft_work *work, struct state *own, struct socket_room *room,
				  __u32 bytes)
{
	__u32 before;

	if (bytes > own->truesize)
		own->truesize = bytes;
	if (!room->have)
		return 0;
	before = under_way(own, room, work->now_ns);
	/* The kernel accepts a datagram of any length in an empty socket. */
	if (room->have <= 4 * BATCH * own->truesize && !room->used && !before)
		return 0;
	return (__u64)room->used + before * own->truesize + bytes > room->have;
}

static __always_inline void pass(struct graft_work *work, struct state *own)
{
	if (work->now_ns - own->passed_ns > BATCH_NS)
		own->batch = 0;
	if (own->batch < BATCH)
		own->batch++;
	own->passed_ns = work->now_ns;
}

/* Returns how many more packets the socket has space for. If no socket is bound to the port, the result is
 * ROOM_MAX.
 */
static __noinline __u32 count_room(struct graft_work *work, struct state *own, struct socket_room *room)
{
	__u32 each = own->truesize > LARGEST ? own->truesize : LARGEST, packets, before;

	if (!room->have)
		return ROOM_MAX;
	/* Space is reserved for packets that are still on their way to the socket, both now and when the last
	 * announced packet arrives.
	 */
	before = 2 * under_way(own, room, work->now_ns) + arrivals_waiting(&own->arrivals);
	packets = room->used < room->have ? (room->have - room->used) / each : 0;
	if (packets > before)
		return packets - before > ROOM_MAX ? ROOM_MAX : packets - before;
	return !room->used && !arrivals_waiting(&own->arrivals);
}

static __noinline int say(struct __sk_buff *skb, struct graft_work *work, struct graft_shared *shared,
			  struct state *own, struct standing *standing)
{
	struct letter letter = {
		.kind = GRAFT_ACK, .number = standing->number, .bytes = sizeof(struct graft_ack)};
	struct holding holding = {.arrivals = &own->arrivals, .number = standing->number};
	struct filling filling = {.shared = shared, .standing = *standing};
	struct proof *proof = proof_of_cpu();
	struct graft_ack *ack;

	if (!proof)
		return -1;
	ack = filling.ack = holding.ack = &proof->ack;
	*ack = (struct graft_ack){
		.newest = bpf_htonl(standing->newest),
		.echo = bpf_htonl(work->kind == GRAFT_DATA ? work->number
							   : standing->number - GRAFT_WINDOW - 1),
		.room = bpf_htonl(standing->number + standing->room),
	};
	if (standing->number != standing->newest) {
		bpf_loop(ACK_COME, fill, &filling, 0);
		bpf_loop(GRAFT_WINDOW, hold_bit, &holding, 0);
	}
	if (make_frame(skb, work, &letter))
		return -1;
	graft_move(&own->arrivals.told, standing->number, 0);
	/* The tag also covers the tag of the frame, so the contents cannot be moved to another frame. */
	proof->frame_tag = letter.frame.tag;
	ack->tag = tag_of(work, proof);
	if (bpf_skb_store_bytes(skb, work->udp_at + UDP_BYTES, ack, sizeof(*ack), 0))
		return -1;
	letter.sum = csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)ack, sizeof(*ack), 0));
	return finish(skb, work, &letter) || bpf_clone_redirect(skb, skb->ifindex, 0);
}

static __always_inline int is_due(struct state *own, const struct standing *standing,
				  const struct graft_work *work)
{
	int is_due;

	own->waiting++;
	/* An acknowledgement is due after `every` packets, or if the sender's daemon asks. It is also due when a packet
	 * is missing, or a missing one has arrived or is no longer expected.
	 */
	is_due = work->kind != GRAFT_DATA || own->waiting >= config.every ||
		 standing->number - own->complete != 1 || standing->number != standing->newest;
	own->complete = standing->number;
	if (is_due)
		own->waiting = 0;
	return is_due;
}

SEC("xdp.frags")
int acknowledge_rx(struct xdp_md *ctx)
{
	struct graft_work *work = graft_work(GRAFT_RX);
	struct state *own;
	__u32 session;

	if (!work)
		return GRAFT_PASS_rx;
	session = work->session;
	own = bpf_map_lookup_elem(&state, &session);
	/* The ring contains packets that XDP has marked as received and TC has not delivered. If a function of the
	 * graft makes TC mark packets as received, packets are not added to the ring.
	 */
	if (own && work->kind == GRAFT_DATA && !work->is_marked_later)
		arrivals_let_in(&own->arrivals, work, ctx->ingress_ifindex);
	return graft_next(ctx, rx, work);
}

SEC("tcx/ingress")
int acknowledge_repair(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_REPAIR);
	struct socket_room socket = {};
	struct standing standing;
	struct graft_shared *shared;
	struct loan loan = {};
	struct state *own;
	__u32 session;
	int is_refused;

	if (!work)
		return GRAFT_PASS_repair;
	shared = graft_shared(work);
	session = work->session;
	own = bpf_map_lookup_elem(&state, &session);
	if (!shared || !own || work->kind == GRAFT_REQUEST || work->kind == GRAFT_PARITY)
		return graft_next(skb, repair, work);
	if (work->kind == GRAFT_ACK)
		return graft_done(skb, repair, work, hear(skb, work, shared));
	find_room(skb, work, &socket);
	is_refused = work->kind == GRAFT_DATA && is_too_much(work, own, &socket, bytes_in_socket(skb));
	arrivals_pass(&own->arrivals, shared, work, skb->ifindex, is_refused);
	/* The packet is dropped here, since a full socket would drop it without any report. */
	if (is_refused)
		return graft_done(skb, repair, work, GRAFT_SOCKET_FULL);
	if (work->kind == GRAFT_DATA)
		pass(work, own);
	graft_advance(shared);
	stand(&standing, own, shared);
	if (!is_due(own, &standing, work))
		return graft_next(skb, repair, work);
	if (!borrow(skb, work, &loan, sizeof(struct graft_ack))) {
		standing.room = count_room(work, own, &socket);
		say(skb, work, shared, own, &standing);
		if (give_back(skb, work, &loan))
			return graft_done(skb, repair, work, GRAFT_NO_ROOM);
	}
	return graft_next(skb, repair, work);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
