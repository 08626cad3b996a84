// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Sends `parity` parity packets behind each block of `packets` packets. With n parity packets the receiver
 * recovers any n lost packets of the block, without a round trip (the erasure code is in parity.h). In a list
 * of functions it follows `number`, and precedes `order` and functions that retransmit.
 *
 * The payload of a parity packet is struct graft_parity and as many bytes as the longest packet of the
 * block, in whole elements.
 */
#include "packet_send.h"
#include "parity.h"
#include <bpf/bpf_core_read.h>

struct fec_config {
	__u32 packets;
	__u32 parity;
};

SEC(".rodata.config")
const volatile struct fec_config config = {
	.packets = 8,
	.parity = 1,
};

#define COME_EACH (2 * BLOCK_MAX) /* number of received packets that are stored for each session */

/* Ring of the latest received packets of each session, from which lost ones are recovered. */
BPF_MAP(ARRAY, kept_come, __u32, struct kept, GRAFT_STORING_SESSIONS *COME_EACH);

static __always_inline struct kept *place_of(const struct graft_work *work, __u32 number)
{
	__u32 at = work->session * COME_EACH + number % COME_EACH;

	return bpf_map_lookup_elem(&kept_come, &at);
}

BPF_MAP(PERCPU_ARRAY, sums, __u32, struct sum, GRAFT_HOOKS);

#define CHECKSUM_PARTIAL 3

struct sk_buff {
	__u8 ip_summed : 2;
} __attribute__((preserve_access_index));

static __always_inline struct sum *sum_of(__u32 hook)
{
	return bpf_map_lookup_elem(&sums, &hook);
}

__noinline int add(struct sum *sum, struct kept *kept)
{
	return sum && kept ? parity_add(sum, kept, config.parity) : -1;
}

static __always_inline void pad(struct kept *kept)
{
	__u32 bytes = kept->bytes & (KEPT_BYTES - 1);

	store64(kept->payload + bytes, 0);
}

/* --- At the sender: parity packets are made --- */

struct block {
	struct graft_work *work;
	struct graft_shared *shared;
	struct sum *sum;
};

static long add_sent(__u32 index, struct block *block)
{
	__u32 number = block->work->number - index;
	struct kept *kept = kept_find(block->work, number);

	if (!kept || add(block->sum, kept) || kept->number != number)
		block->sum->failed = 1;
	return block->sum->failed ? 1 : 0;
}

static __always_inline void sum_up(struct block *block)
{
	parity_clear(block->sum, config.parity);
	block->sum->unit = 0;
	bpf_loop(config.packets & (BLOCK_MAX - 1), add_sent, block, 0);
}

/* Turns the application's packet in the buffer into a parity packet. The frame is added later, by the hook's
 * verdict.
 */
static __noinline int protect(struct __sk_buff *skb, struct graft_work *work, struct sum *sum, __u32 index)
{
	struct row *row = parity_row(sum, index);
	struct graft_parity parity = {
		.row = index, .packets = config.packets, .length = bpf_htons(row->length)};
	__u32 at = work->udp_at + UDP_BYTES, bytes = sum->bytes, total, of_head, mtu = 0;

	if (!bytes || bytes >= KEPT_BYTES)
		return GRAFT_NO_ROOM;
	bytes = KEPT_BOUNDED(bytes);
	total = at + sizeof(parity) + bytes;
	if (bpf_check_mtu(skb, 0, &mtu, (__s32)(total + graft_more_bytes(work) - skb->len), 0))
		return GRAFT_TOO_LONG;
	if (bpf_skb_change_tail(skb, total, 0) || bpf_skb_store_bytes(skb, at, &parity, sizeof(parity), 0) ||
	    bpf_skb_store_bytes(skb, at + sizeof(parity), row->bits, bytes, 0))
		return GRAFT_NO_ROOM;
	bytes &= KEPT_BYTES - 1;
	OPAQUE(bytes);
	work->is_partial =
		BPF_CORE_READ_BITFIELD_PROBED((struct sk_buff *)skb, ip_summed) == CHECKSUM_PARTIAL;
	of_head = csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)&parity, sizeof(parity), 0));
	if (put_datagram(skb, work, sizeof(parity) + bytes,
			 of_head + csum_fold(csum_add(row->bits, bytes, KEPT_BYTES, 0))))
		return GRAFT_NO_ROOM;
	work->payload_bytes = sizeof(parity) + bytes;
	work->kind = GRAFT_PARITY;
	return GRAFT_PROTECTED;
}

/* Sends the next parity packet of the block. The call for the block's first parity packet computes all parity
 * packets of the block.
 */
static __always_inline int send_parity(struct __sk_buff *skb, struct graft_work *work)
{
	struct block block = {.work = work, .sum = sum_of(GRAFT_TX)};
	__u32 index = work->behind - 1;

	if (!block.sum)
		return GRAFT_NO_ROOM;
	if (!index)
		sum_up(&block);
	if (block.sum->failed)
		return GRAFT_NO_ROOM;
	if (index + 1 < config.parity)
		work->again = work->current;
	return protect(skb, work, block.sum, index);
}

SEC("tcx/egress")
int fec_tx(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_TX);
	struct kept *kept;

	if (!work)
		return GRAFT_PASS_tx;
	if (work->behind)
		return graft_done(skb, tx, work, send_parity(skb, work));
	keep(skb, work);
	kept = kept_find(work, work->number);
	if (kept)
		pad(kept);
	if (work->is_numbered && work->number % config.packets == config.packets - 1)
		work->again = work->current;
	return graft_next(skb, tx, work);
}

/* --- At the receiver: parity packets are kept --- */

/* The parity packets received so far for one block. */
struct held {
	__u32 end; /* packet number of the block's last packet */
	__u32 birth;
	__u32 packets;
	__u32 bytes; /* length of each parity packet's data in bytes */
	__u32 rows;  /* bitmap of the received parity packets */
	__u32 pad;
	struct row parities[PARITY_MAX];
};

#define HELD_EACH 2 /* number of blocks whose parity packets are stored for each session */

BPF_MAP(ARRAY, kept_parities, __u32, struct held, GRAFT_STORING_SESSIONS *HELD_EACH);

static __always_inline struct held *held_at(const struct graft_work *work, __u32 block)
{
	__u32 at = work->session * HELD_EACH + block % HELD_EACH;

	return bpf_map_lookup_elem(&kept_parities, &at);
}

/* Stores a parity packet with the other parity packets of its block. Returns NULL if it is malformed, or
 * stored already.
 */
static __noinline struct held *hold(struct __sk_buff *skb, struct graft_work *work, __u32 birth)
{
	__u32 at = work->udp_at + UDP_BYTES, bytes = work->payload_bytes - sizeof(struct graft_parity);
	struct graft_parity parity;
	struct held *held;
	struct row *row;

	if (work->payload_bytes <= sizeof(parity) || bpf_skb_load_bytes(skb, at, &parity, sizeof(parity)))
		return NULL;
	if (parity.packets < 2 || parity.packets >= BLOCK_MAX || parity.row >= config.parity ||
	    bytes >= KEPT_BYTES)
		return NULL;
	bytes = KEPT_BOUNDED(bytes);
	held = held_at(work, work->number / parity.packets);
	if (!held)
		return NULL;
	/* If the map entry still has parity packets of an older block, they are discarded. */
	if (held->end != work->number || held->birth != birth || held->packets != parity.packets ||
	    held->bytes != bytes)
		held->rows = 0;
	if (held->rows & 1 << (parity.row & (PARITY_MAX - 1)))
		return NULL;
	row = &held->parities[parity.row & (PARITY_MAX - 1)];
	parity_clear_row(row);
	if (bpf_skb_load_bytes(skb, at + sizeof(parity), row->bits, bytes))
		return NULL;
	row->length = bpf_ntohs(parity.length);
	held->end = work->number;
	held->birth = birth;
	held->packets = parity.packets;
	held->bytes = bytes;
	held->rows |= 1 << (parity.row & (PARITY_MAX - 1));
	return held;
}

/* Returns the stored parity packets of the block that a received packet belongs to; NULL if none arrived before the
 * packet.
 */
static __always_inline struct held *held_for(const struct graft_work *work, __u32 birth)
{
	for (__u32 block = 0; block < HELD_EACH; block++) {
		struct held *held = held_at(work, block);

		if (held && held->rows && held->birth == birth && held->end - work->number < held->packets)
			return held;
	}
	return NULL;
}

/* --- At the receiver: lost packets are recovered --- */

struct recovery {
	struct __sk_buff *skb;
	struct graft_work *work;
	struct graft_shared *shared;
	struct sum *sum;
	struct held *held;
	__u32 come; /* number of parity packets received for the block */
	__u32 count;
};

static __always_inline int has_come(const struct graft_shared *shared, __u32 number)
{
	return shared->seen[number % GRAFT_WINDOW] == (GRAFT_SEEN | number);
}

static long count_missing(__u32 index, struct recovery *recovery)
{
	if (!has_come(recovery->shared, recovery->held->end - index))
		recovery->count++;
	return recovery->count > recovery->come ? 1 : 0;
}

static long add_come(__u32 index, struct recovery *recovery)
{
	__u32 number = recovery->held->end - index;
	struct sum *sum = recovery->sum;
	struct kept *kept = place_of(recovery->work, number);

	if (!has_come(recovery->shared, number)) {
		__u32 missing = sum->count;

		if (missing >= recovery->come || missing >= PARITY_MAX)
			return sum->failed = 1;
		sum->numbers[missing] = number;
		sum->unit = 1ULL << (16 * missing);
		sum->count = missing + 1;
		/* A missing packet is an unknown of the linear equations that are solved later: it adds zeroes to the
		 * sums over the block, and its factors to the matrix.
		 */
		add(sum, &sum->nothing);
		return 0;
	}
	sum->unit = 0;
	if (!kept || !kept_is(kept, recovery->work, number) || add(sum, kept) || kept->number != number)
		sum->failed = 1;
	return sum->failed ? 1 : 0;
}

__noinline int add_parity(struct sum *sum, struct held *held, __u32 index)
{
	struct row *to, *from;

	if (!sum || !held)
		return -1;
	index &= PARITY_MAX - 1;
	to = &sum->rows[index];
	from = &held->parities[index];
	to->length ^= from->length;
	for (__u32 at = 0; at < KEPT_BYTES; at += 8) {
		if (at >= held->bytes)
			break;
		store64(to->bits + at, load64(to->bits + at) ^ load64(from->bits + at));
	}
	return 0;
}

static __always_inline __u32 rows_of(const struct held *held)
{
	__u32 count = 0;

	for (__u32 index = 0; index < PARITY_MAX; index++)
		count += held->rows >> index & 1;
	return count;
}

/* Computes the missing packets of a block into rows of `sum`. Returns not 0 if none is missing, or if more are missing
 * than the received parity packets can recover.
 */
static __noinline int solve(struct recovery *recovery)
{
	struct held *held = recovery->held;
	struct sum *sum = recovery->sum;
	__u32 used = 0;

	recovery->come = rows_of(held);
	bpf_loop(held->packets & (BLOCK_MAX - 1), count_missing, recovery, 0);
	if (!recovery->count || recovery->count > recovery->come)
		return -1;
	parity_clear(sum, config.parity);
	sum->bytes = held->bytes;
	bpf_loop(held->packets & (BLOCK_MAX - 1), add_come, recovery, 0);
	/* A packet that is longer than the parity packets cannot belong to their block. */
	if (sum->failed || !sum->count || sum->bytes > held->bytes)
		return -1;
	for (__u32 index = 0; index < PARITY_MAX; index++) {
		if (!(held->rows >> index & 1) || used >= sum->count)
			continue;
		add_parity(sum, held, index);
		sum->order[used++ & (PARITY_MAX - 1)] = index;
	}
	return parity_solve(sum);
}

/* Replaces the packet in the buffer by another one, with a new payload and frame. */
static __noinline int become(struct __sk_buff *skb, struct graft_work *work, __u8 *payload,
			     struct letter *letter)
{
	__u32 bytes = letter->bytes;

	if (!bytes || bytes >= KEPT_BYTES)
		return -1;
	bytes = KEPT_BOUNDED(bytes);
	/* The checksum that the interface computed covers the old bytes. bpf_skb_change_tail discards it only
	 * when a packet grows, so the packet is first cut to its headers.
	 */
	if (bpf_skb_change_tail(skb, work->udp_at + UDP_BYTES, 0) ||
	    bpf_skb_change_tail(skb, work->udp_at + UDP_BYTES + bytes + GRAFT_FRAME_BYTES, 0) ||
	    bpf_skb_store_bytes(skb, work->udp_at + UDP_BYTES, payload, bytes, 0))
		return -1;
	bytes &= KEPT_BYTES - 1;
	OPAQUE(bytes);
	store64(payload + bytes, 0);
	letter->sum = csum_fold(csum_add(payload, bytes, KEPT_BYTES, 0));
	return finish(skb, work, letter);
}

/* Turns the packet in the buffer into a recovered one. Returns 0, or the reason of the failure. */
static __noinline int become_missing(struct recovery *recovery, __u32 which, __u32 kind)
{
	struct sum *sum = recovery->sum;
	__u32 number = sum->numbers[which & (PARITY_MAX - 1)];
	struct row *row = parity_row(sum, sum->order[which & (PARITY_MAX - 1)]);
	struct letter letter = {.kind = kind, .number = number, .bytes = row->length};
	__u64 *seen = &recovery->shared->seen[number % GRAFT_WINDOW], mark = GRAFT_SEEN | number;

	if (row->length > recovery->held->bytes)
		return GRAFT_ANSWERED;
	/* The missing packet may have arrived on another CPU meanwhile; then it is not recovered. */
	if (__sync_lock_test_and_set(seen, mark) == mark)
		return GRAFT_ANSWERED;
	if (!become(recovery->skb, recovery->work, row->bits, &letter))
		return 0;
	/* The recovered packet could not be written to the buffer, so it counts as missing again. */
	__sync_val_compare_and_swap(seen, mark, 0);
	return GRAFT_NO_ROOM;
}

/* Injects a copy of a recovered packet into the receive path, as if it had arrived. One buffer can hold only
 * one packet. If this fails, the packet counts as missing again.
 */
static long return_missing(__u32 which, struct recovery *recovery)
{
	struct __sk_buff *skb = recovery->skb;
	__u32 mark = skb->mark, number = recovery->sum->numbers[which & (PARITY_MAX - 1)];

	if (become_missing(recovery, which, GRAFT_RETURNED))
		return 0;
	skb->mark = recovery->work->mark;
	if (bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS) < 0)
		__sync_val_compare_and_swap(&recovery->shared->seen[number % GRAFT_WINDOW],
					    GRAFT_SEEN | number, 0);
	skb->mark = mark;
	return 0;
}

/* Delivers the recovered packets. The last one replaces the parity packet in its buffer; the others are injected into
 * the receive path before that.
 */
static __always_inline int recover(struct recovery *recovery)
{
	struct graft_work *work = recovery->work;
	struct sum *sum = recovery->sum;
	__u32 first = (sum->count - 1) & (PARITY_MAX - 1);
	int wrong;

	bpf_loop(first, return_missing, recovery, 0);
	wrong = become_missing(recovery, first, GRAFT_DATA);
	if (wrong)
		return wrong;
	work->kind = GRAFT_DATA;
	work->number = sum->numbers[first];
	work->payload_bytes = parity_row(sum, sum->order[first])->length;
	return GRAFT_RECOVERED;
}

/* Recovers missing packets of a block when one of its packets arrives after the parity packets. Recovered packets are
 * written to the arrived packet's buffer, from which copies are injected; then the arrived packet is restored in the
 * buffer. Returns not 0 if restoring failed and the arrived packet is lost.
 */
static __always_inline int recover_others(struct recovery *recovery)
{
	struct graft_work *work = recovery->work;
	struct kept *kept = place_of(work, work->number);
	struct letter letter = {.kind = GRAFT_DATA, .number = work->number, .bytes = work->payload_bytes};

	if (!kept || !kept_is(kept, work, work->number))
		return 0;
	bpf_loop(recovery->sum->count & (2 * PARITY_MAX - 1), return_missing, recovery, 0);
	return become(recovery->skb, work, kept->payload, &letter);
}

/* Stores a received packet, which may be needed to recover other packets of its block. */
static __always_inline void note(struct __sk_buff *skb, struct graft_work *work)
{
	struct kept *kept = place_of(work, work->number);

	if (kept && !kept_put(skb, work, kept))
		pad(kept);
}

static __always_inline void judge(struct graft_work *work, const struct graft_shared *shared)
{
	work->is_late = graft_not_before(shared->newest, work->number + 2);
}

SEC("tcx/ingress")
int fec_repair(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_REPAIR);
	struct recovery recovery = {.skb = skb, .work = work, .sum = sum_of(GRAFT_REPAIR)};
	struct graft_shared *shared;
	int reason;

	if (!work || !recovery.sum)
		return GRAFT_PASS_repair;
	shared = recovery.shared = graft_shared(work);
	if (!shared || (work->kind != GRAFT_DATA && work->kind != GRAFT_PARITY))
		return graft_next(skb, repair, work);
	if (work->is_returned) {
		judge(work, shared);
		return graft_next(skb, repair, work);
	}
	if (work->kind == GRAFT_DATA) {
		note(skb, work);
		recovery.held = held_for(work, shared->birth);
		if (recovery.held && !solve(&recovery) && recover_others(&recovery))
			return graft_done(skb, repair, work, GRAFT_NO_ROOM);
		return graft_next(skb, repair, work);
	}
	/* A parity packet is sent after all packets of its block, so all numbers up to its own have been
	 * sent.
	 */
	if (graft_not_before(work->number, shared->newest))
		shared->newest = work->number + 1;
	recovery.held = hold(skb, work, shared->birth);
	if (!recovery.held || solve(&recovery))
		return graft_next(skb, repair, work);
	reason = recover(&recovery);
	if (reason != GRAFT_RECOVERED)
		return graft_done(skb, repair, work, reason);
	judge(work, shared);
	work->reason = reason;
	return graft_next(skb, repair, work);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
