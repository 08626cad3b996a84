// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Sends a parity packet behind each `packets`: their XOR. Where one of them is missing, the parity packet becomes it, without
 * a round trip. Behind `number`; in front of `order` and of functions that repair.
 *
 * Its payload is graft_parity, and as many bytes as the longest of them has.
 */
#include "joint_send.h"
#include <bpf/bpf_core_read.h>

struct fec_config {
	__u32 packets;
};

SEC(".rodata.config")
const volatile struct fec_config config = {
	.packets = 8,
};

#define BLOCK_MAX 64
#define COME_EACH (2 * BLOCK_MAX) /* packets of a session */

struct graft_parity {
	__be16 packets;
	__be16 lengths; /* of their payloads, XOR */
};

/* The latest that have come. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, GRAFT_KEEPERS *COME_EACH);
	__type(key, __u32);
	__type(value, struct kept);
} kept_come SEC(".maps");

static __always_inline struct kept *place_of(const struct graft_work *work, __u32 number)
{
	__u32 at = work->session * COME_EACH + number % COME_EACH;

	return bpf_map_lookup_elem(&kept_come, &at);
}

/* What a walk over packets has found. Not on the stack: a verifier that knew the counts would look at each turn of the walk. */
struct sum {
	__u32 bytes; /* of the longest */
	__u32 lengths;
	__u32 missing; /* the latest of them */
	__u32 count;   /* of those that are missing */
	__u32 failed;
	__u32 pad;
	__u8 bits[KEPT_BYTES + 8];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, GRAFT_JOINTS);
	__type(key, __u32);
	__type(value, struct sum);
} sums SEC(".maps");

#define CHECKSUM_PARTIAL 3

struct sk_buff {
	__u8 ip_summed : 2;
} __attribute__((preserve_access_index));

/* What is behind its bytes is zero up to the next 8 of them. Global, so that the verifier looks at it once. */
__noinline int add(struct sum *sum, struct kept *kept)
{
	__u32 bytes;

	if (!sum || !kept)
		return -1;
	bytes = kept->bytes;
	if (!bytes || bytes >= KEPT_BYTES)
		return -1;
	sum->lengths ^= bytes;
	if (bytes > sum->bytes)
		sum->bytes = bytes;
	for (__u32 at = 0; at < KEPT_BYTES; at += 8) {
		if (at >= bytes)
			break;
		store64(sum->bits + at, load64(sum->bits + at) ^ load64(kept->payload + at));
	}
	return 0;
}

/* Otherwise clang makes one call of it, to what BPF does not have. */
#define SEPARATELY asm volatile("" ::: "memory")

__noinline int clear(struct sum *sum)
{
	if (!sum)
		return -1;
	sum->bytes = sum->lengths = sum->missing = sum->count = sum->failed = 0;
	for (__u32 at = 0; at < sizeof(sum->bits); at += 8) {
		store64(sum->bits + at, 0);
		SEPARATELY;
	}
	return 0;
}

static __always_inline struct sum *sum_of(__u32 joint)
{
	return bpf_map_lookup_elem(&sums, &joint);
}

static __always_inline void pad(struct kept *kept)
{
	__u32 bytes = kept->bytes & (KEPT_BYTES - 1);

	store64(kept->payload + bytes, 0);
}

/* --- The sender --- */

struct block {
	struct graft_work *work;
	struct graft_shared *shared;
	struct sum *sum;
	__u32 packets;
};

static long add_sent(__u32 index, struct block *block)
{
	__u32 number = block->work->number - index;
	struct kept *kept = kept_find(block->work, number);

	if (!kept || add(block->sum, kept) || kept->number != number)
		block->sum->failed = 1;
	return block->sum->failed ? 1 : 0;
}

/* The packet becomes a parity packet without a frame, which the verdict puts on. */
static __noinline int protect(struct __sk_buff *skb, struct graft_work *work, struct sum *sum)
{
	struct graft_parity parity = {.packets = bpf_htons(config.packets),
				      .lengths = bpf_htons(sum->lengths)};
	__u32 at = work->udp_at + UDP_BYTES, bytes = sum->bytes, total, of_head, mtu = 0;

	if (!bytes || bytes >= KEPT_BYTES)
		return GRAFT_NO_ROOM;
	bytes = KEPT_BOUNDED(bytes);
	total = at + sizeof(parity) + bytes;
	if (bpf_check_mtu(skb, 0, &mtu, (__s32)(total + graft_more_bytes(work) - skb->len), 0))
		return GRAFT_TOO_LONG;
	if (bpf_skb_change_tail(skb, total, 0) || bpf_skb_store_bytes(skb, at, &parity, sizeof(parity), 0) ||
	    bpf_skb_store_bytes(skb, at + sizeof(parity), sum->bits, bytes, 0))
		return GRAFT_NO_ROOM;
	bytes &= KEPT_BYTES - 1;
	OPAQUE(bytes);
	work->is_partial =
		BPF_CORE_READ_BITFIELD_PROBED((struct sk_buff *)skb, ip_summed) == CHECKSUM_PARTIAL;
	of_head = csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)&parity, sizeof(parity), 0));
	if (put_datagram(skb, work, sizeof(parity) + bytes,
			 of_head + csum_fold(csum_add(sum->bits, bytes, KEPT_BYTES, 0))))
		return GRAFT_NO_ROOM;
	work->payload_bytes = sizeof(parity) + bytes;
	work->kind = GRAFT_PARITY;
	return GRAFT_PROTECTED;
}

static __always_inline int send_parity(struct __sk_buff *skb, struct graft_work *work)
{
	struct block block = {.work = work, .sum = sum_of(GRAFT_TX)};

	if (!block.sum)
		return GRAFT_NO_ROOM;
	clear(block.sum);
	bpf_loop(config.packets & (BLOCK_MAX - 1), add_sent, &block, 0);
	return block.sum->failed ? GRAFT_NO_ROOM : protect(skb, work, block.sum);
}

SEC("tcx/egress")
int fec_tx(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_TX);
	struct kept *kept;

	if (!work)
		return GRAFT_PASS_tx;
	if (work->is_behind)
		return graft_done(skb, tx, work, send_parity(skb, work));
	keep(skb, work);
	kept = kept_find(work, work->number);
	if (kept)
		pad(kept);
	if (work->is_numbered && work->number % config.packets == config.packets - 1)
		work->again = work->current;
	return graft_next(skb, tx, work);
}

/* --- The receiver --- */

static __always_inline int has_come(const struct graft_shared *shared, __u32 number)
{
	return shared->seen[number % GRAFT_WINDOW] == (GRAFT_SEEN | number);
}

static long add_come(__u32 index, struct block *block)
{
	__u32 number = block->work->number - index;
	struct kept *kept = place_of(block->work, number);

	if (!has_come(block->shared, number)) {
		block->sum->missing = number;
		block->sum->count++;
	} else if (!kept || !kept_is(kept, block->work, number) || add(block->sum, kept) ||
		   kept->number != number) {
		block->sum->failed = 1;
	}
	return block->sum->failed || block->sum->count > 1 ? 1 : 0;
}

/* The parity, to which all that have come are added: what is missing is left. Not 0: there is none. */
static __noinline int find_missing(struct __sk_buff *skb, struct block *block)
{
	struct graft_work *work = block->work;
	__u32 at = work->udp_at + UDP_BYTES, bytes = work->payload_bytes - sizeof(struct graft_parity),
	      packets;
	struct graft_parity parity;

	if (work->payload_bytes <= sizeof(parity) || bpf_skb_load_bytes(skb, at, &parity, sizeof(parity)))
		return -1;
	packets = bpf_ntohs(parity.packets);
	if (packets < 2 || packets >= BLOCK_MAX || !bytes || bytes >= KEPT_BYTES)
		return -1;
	bytes = KEPT_BOUNDED(bytes);
	clear(block->sum);
	if (bpf_skb_load_bytes(skb, at + sizeof(parity), block->sum->bits, bytes))
		return -1;
	bpf_loop(packets, add_come, block, 0);
	block->sum->lengths ^= bpf_ntohs(parity.lengths);
	return block->sum->failed || block->sum->count != 1 || block->sum->bytes > bytes ||
	       block->sum->lengths > bytes;
}

static __noinline int recover(struct __sk_buff *skb, struct block *block)
{
	struct graft_work *work = block->work;
	struct letter letter = {.kind = GRAFT_DATA, .number = block->sum->missing};
	__u64 *seen = &block->shared->seen[block->sum->missing % GRAFT_WINDOW],
	      mark = GRAFT_SEEN | block->sum->missing;
	__u32 bytes = block->sum->lengths;

	if (!bytes || bytes >= KEPT_BYTES)
		return GRAFT_ANSWERED;
	bytes = KEPT_BOUNDED(bytes);
	/* It may come at this moment. */
	if (__sync_lock_test_and_set(seen, mark) == mark)
		return GRAFT_ANSWERED;
	/* What the interface has summed up is of the bytes before: it is forgotten when a packet grows. */
	bpf_skb_change_tail(skb, skb->len + 1, 0);
	if (bpf_skb_change_tail(skb, work->udp_at + UDP_BYTES + bytes + GRAFT_FRAME_BYTES, 0) ||
	    bpf_skb_store_bytes(skb, work->udp_at + UDP_BYTES, block->sum->bits, bytes, 0))
		return GRAFT_NO_ROOM;
	bytes &= KEPT_BYTES - 1;
	OPAQUE(bytes);
	store64(block->sum->bits + bytes, 0);
	letter.bytes = bytes;
	letter.sum = csum_fold(csum_add(block->sum->bits, bytes, KEPT_BYTES, 0));
	if (finish(skb, work, &letter))
		return GRAFT_NO_ROOM;
	work->kind = GRAFT_DATA;
	work->number = block->sum->missing;
	work->payload_bytes = bytes;
	work->is_late = graft_not_before(block->shared->newest, block->sum->missing + 2);
	return GRAFT_RECOVERED;
}

/* What has come is needed for what has not. */
static __always_inline void note(struct __sk_buff *skb, struct graft_work *work)
{
	struct kept *kept = place_of(work, work->number);

	if (kept && !kept_put(skb, work, kept))
		pad(kept);
}

SEC("tcx/ingress")
int fec_repair(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_REPAIR);
	struct block block = {.work = work, .sum = sum_of(GRAFT_REPAIR)};
	int reason;

	if (!work || !block.sum)
		return GRAFT_PASS_repair;
	if (work->kind == GRAFT_DATA)
		note(skb, work);
	block.shared = graft_shared(work);
	if (work->kind != GRAFT_PARITY || !block.shared)
		return graft_next(skb, repair, work);
	/* All up to it have been sent. */
	if (graft_not_before(work->number, block.shared->newest))
		block.shared->newest = work->number + 1;
	if (find_missing(skb, &block))
		return graft_next(skb, repair, work);
	reason = recover(skb, &block);
	if (reason != GRAFT_RECOVERED)
		return graft_done(skb, repair, work, reason);
	note(skb, work);
	work->reason = reason;
	return graft_next(skb, repair, work);
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
