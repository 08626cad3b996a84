// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Seals and opens datagrams for the dispatcher of packet grafts (packet.bpf.c). packet_seal encrypts outgoing
 * datagrams after all functions, and packet_open decrypts incoming ones before any function. Functions thus
 * see clear text only, and no forged datagrams.
 *
 *   seal_intf.h   the interface of userspace, and the format of a sealed datagram
 *   packet_seal.h  maps and calls that are shared with the dispatcher
 *   aead.h        the AEAD ciphers
 */
#include "aead.h"
#include "packet_frame.h"
#include "packet_seal.h"
#include "sk_buff.h"
#include <linux/pkt_cls.h>

/* The map is declared without BTF types: before Linux 6.2 a map with types does not match the maps that
 * userspace creates.
 */
struct key_map {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct seal_key));
} no_key SEC(".maps");

/* Keys of each session, in the order of enum seal_place: two for decryption and one for encryption. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, GRAFT_SESSIONS *SEAL_PLACES);
	__type(key, __u32);
	__array(values, struct key_map);
} seal_keys SEC(".maps");

/* Two buffers for each CPU, one for encryption and one for decryption, since a function may send a datagram while a
 * received one is processed.
 */
BPF_MAP(PERCPU_ARRAY, seal_bufs, __u32, struct quic_buf, 2);

static __always_inline struct seal_key *find_key(__u32 session, __u32 place)
{
	__u32 index = session * SEAL_PLACES + place, zero = 0;
	void *map = bpf_map_lookup_elem(&seal_keys, &index);

	return map ? bpf_map_lookup_elem(map, &zero) : NULL;
}

static __always_inline struct quic_buf *find_buf(__u32 direction)
{
	return bpf_map_lookup_elem(&seal_bufs, &direction);
}

/* Layout of the buffer: the tail (struct seal_tail) as associated data, the plaintext or ciphertext, and the AEAD's
 * tag. For outgoing datagrams, the tail and zeroes for the checksum follow.
 */
#define TEXT_AT ((__u32)sizeof(struct seal_tail))
#define ROOM	2048 /* only payloads shorter than this can be sealed; a power of two */

static __always_inline struct quic_extent extent_of(__u32 text_bytes)
{
	return (struct quic_extent){.header_bytes = TEXT_AT, .plain_at = TEXT_AT, .text_bytes = text_bytes};
}

static __always_inline void put_tail(struct quic_buf *buf, __u32 phase, __u64 number)
{
	buf->bytes[0] = SEAL_MAGIC;
	buf->bytes[1] = SEAL_VERSION << 4 | (phase & SEAL_PHASE);
	store16(buf->bytes + 2, bpf_htons(number >> 32));
	store32(buf->bytes + 4, bpf_htonl(number));
}

static __always_inline __u64 number_of(const struct quic_buf *buf)
{
	return (__u64)bpf_ntohs(load16(buf->bytes + 2)) << 32 | bpf_ntohl(load32(buf->bytes + 4));
}

/* Returns the checksum of the datagram in the buffer. */
static __noinline __u32 sum_of(const struct quic_buf *buf, __u32 bytes)
{
	bytes &= ROOM - 1;
	/* Without this barrier, clang removes the bound of the loop below. */
	OPAQUE(bytes);
	return csum_fold(csum_add(buf->bytes + TEXT_AT, bytes, ROOM, 0));
}

/* --- Outgoing packets --- */

static __noinline int seal_text(struct seal_key *key, struct quic_buf *buf, __u32 bytes)
{
	struct quic_extent extent = extent_of(bytes);
	__u64 number = __sync_fetch_and_add(&key->next, 1);
	__u8 *end;

	/* The datagram's number was taken from the counter atomically, so it is never used as a nonce again, even if
	 * this datagram is dropped.
	 */
	if (number >= key->limit)
		return GRAFT_NO_KEYS;
	put_tail(buf, key->phase, number);
	if (quic_seal(&key->seals, number, buf, buf, &extent))
		return GRAFT_TOO_LONG;
	end = buf->bytes + TEXT_AT + SEAL_TAG + (bytes & QUIC_AT_MAX);
	/* The tail (struct seal_tail: version, key phase, datagram number) is the associated data. In the buffer it
	 * precedes the ciphertext, and in the datagram it follows the AEAD's tag.
	 */
	store64(end, load64(buf->bytes));
	store32(end + sizeof(struct seal_tail), 0);
	return 0;
}

static __always_inline int put_udp_around(struct __sk_buff *skb, const struct graft_work *work,
					  const struct quic_buf *buf, __u32 bytes)
{
	__u32 udp_bytes = UDP_BYTES + bytes;
	__u8 addresses[32] = {};
	struct udphdr udp;
	__u64 sum;

	if (bpf_skb_load_bytes(skb, work->udp_at, &udp, sizeof(udp)) ||
	    (work->family == 4 ? bpf_skb_load_bytes(skb, work->ip_at + 12, addresses, 8)
			       : bpf_skb_load_bytes(skb, work->ip_at + 8, addresses, 32)))
		return -1;
	put_udp(&udp, udp.source, udp.dest, udp_bytes);
	sum = csum_pseudo(addresses, sizeof(addresses), udp_bytes);
	if (IP_SUMMED(skb) == CHECKSUM_PARTIAL)
		udp.check = csum_fold(sum);
	else
		put_udp_checksum(&udp, bpf_csum_diff(NULL, 0, (__be32 *)&udp, sizeof(udp), csum_fold(sum)) +
					       sum_of(buf, bytes));
	return bpf_skb_store_bytes(skb, work->udp_at, &udp, sizeof(udp), 0);
}

static __always_inline enum graft_reason seal(struct __sk_buff *skb, const struct graft_work *work,
					      const struct seal_call *call, struct quic_buf *buf)
{
	struct seal_key *key = find_key(call->session, SEAL_SEALS);
	__u32 bytes = call->bytes, mtu = 0, wrong;

	if (!key)
		return GRAFT_NO_KEYS;
	OPAQUE(bytes);
	if (!bytes || bytes > QUIC_TEXT_MAX || bpf_check_mtu(skb, 0, &mtu, SEAL_BYTES, 0))
		return GRAFT_TOO_LONG;
	bytes = BOUNDED(bytes, ROOM);
	if (bpf_skb_load_bytes(skb, work->udp_at + UDP_BYTES, buf->bytes + TEXT_AT, bytes))
		return GRAFT_NO_ROOM;
	wrong = seal_text(key, buf, bytes);
	if (wrong)
		return wrong;
	bytes = call->bytes + SEAL_BYTES;
	OPAQUE(bytes);
	if (bytes <= SEAL_BYTES || bytes > QUIC_TEXT_MAX + SEAL_BYTES)
		return GRAFT_TOO_LONG;
	bytes = BOUNDED(bytes, ROOM);
	if (bpf_skb_change_tail(skb, work->udp_at + UDP_BYTES + bytes, 0) ||
	    bpf_skb_store_bytes(skb, work->udp_at + UDP_BYTES, buf->bytes + TEXT_AT, bytes, 0) ||
	    put_udp_around(skb, work, buf, bytes) || change_ip_length(skb, work, SEAL_BYTES))
		return GRAFT_NO_ROOM;
	return GRAFT_OTHER;
}

SEC("tcx/egress")
int packet_seal(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_TX);
	struct seal_call *call = seal_call();
	struct quic_buf *buf = find_buf(0);
	enum graft_reason wrong;

	if (!call || !work || !buf)
		return TC_ACT_SHOT;
	wrong = seal(skb, work, call, buf);
	/* If sealing failed, packet_tx_out counts the reason and drops the datagram. */
	if (wrong)
		call->reason = wrong;
	bpf_tail_call(skb, &stages_tx, STAGE_OUT);
	return TC_ACT_SHOT;
}

/* --- Incoming packets --- */

static __always_inline __u64 *place_of(struct seal_key *key, __u64 number)
{
	return &key->seen[number % SEAL_WINDOW];
}

/* Returns whether a datagram of this number was received before, or is too old to tell. */
static __always_inline int is_known(struct seal_key *key, __u64 number)
{
	return READ_ONCE(*place_of(key, number)) > number;
}

/* Marks a datagram's number as received, after the datagram was authenticated. Returns not 0 if another CPU
 * has just marked this number, or a newer one that uses the same entry of the replay window.
 */
static __always_inline int remember(struct seal_key *key, __u64 number)
{
	__u64 *place = place_of(key, number);

	for (int i = 0; i < 4; i++) {
		__u64 old = READ_ONCE(*place);

		/* The entry of the replay window holds a newer number, so this datagram is a replay or too
		 * old to tell.
		 */
		if (old > number)
			return -1;
		if (__sync_val_compare_and_swap(place, old, number + 1) == old)
			return 0;
	}
	return -1;
}

static __noinline int open_text(struct seal_key *key, struct quic_buf *buf, __u32 bytes)
{
	struct quic_extent extent = extent_of(bytes);
	__u64 number = number_of(buf);

	if (key->failures >= SEAL_FAILURES_MAX)
		return GRAFT_NO_KEYS;
	/* Replays are checked before decryption, which is expensive, and again in remember(). */
	if (is_known(key, number))
		return GRAFT_REPLAYED;
	if (quic_open(&key->opens, number, buf, &extent)) {
		__sync_fetch_and_add(&key->failures, 1);
		return GRAFT_UNOPENED;
	}
	return remember(key, number) ? GRAFT_REPLAYED : 0;
}

/* Reduces the total length in the IPv4 header by the bytes that decryption removed, and updates the header's checksum
 * (RFC 1624).
 */
static __always_inline int shorten_ipv4(struct xdp_md *ctx, __u32 ip_at)
{
	struct iphdr ip;
	__be16 old;

	if (bpf_xdp_load_bytes(ctx, ip_at, &ip, sizeof(ip)))
		return -1;
	old = ip.tot_len;
	ip.tot_len = bpf_htons(bpf_ntohs(old) - SEAL_BYTES);
	ip.check = ~csum_fold((__u64)(__u16)~ip.check + (__u16)~old + ip.tot_len);
	return bpf_xdp_store_bytes(ctx, ip_at, &ip, sizeof(ip));
}

static __always_inline int shorten_ipv6(struct xdp_md *ctx, __u32 ip_at)
{
	__u32 at = ip_at + __builtin_offsetof(struct ipv6hdr, payload_len);
	__be16 length;

	if (bpf_xdp_load_bytes(ctx, at, &length, sizeof(length)))
		return -1;
	length = bpf_htons(bpf_ntohs(length) - SEAL_BYTES);
	return bpf_xdp_store_bytes(ctx, at, &length, sizeof(length));
}

/* Writes lengths and UDP checksum for the opened datagram; a checksum of 0 (none) is not changed. If the sender left
 * the checksum to its interface (CHECKSUM_PARTIAL), packet_repair corrects it, since XDP cannot see that flag of the
 * skb.
 */
static __noinline int put_headers(struct xdp_md *ctx, const struct graft_work *work, struct quic_buf *buf,
				  __u32 bytes)
{
	__u32 udp_bytes = UDP_BYTES + bytes;
	__u8 addresses[32] = {};
	struct udphdr udp;
	__be16 check;
	__u64 sum;

	if (bpf_xdp_load_bytes(ctx, work->udp_at, &udp, sizeof(udp)) ||
	    (work->family == 4 ? bpf_xdp_load_bytes(ctx, work->ip_at + 12, addresses, 8)
			       : bpf_xdp_load_bytes(ctx, work->ip_at + 8, addresses, 32)))
		return -1;
	check = udp.check;
	put_udp(&udp, udp.source, udp.dest, udp_bytes);
	if (check || work->family != 4) {
		store32(buf->bytes + TEXT_AT + (bytes & QUIC_AT_MAX), 0);
		sum = csum_pseudo(addresses, sizeof(addresses), udp_bytes);
		sum = bpf_csum_diff(NULL, 0, (__be32 *)&udp, sizeof(udp), csum_fold(sum));
		put_udp_checksum(&udp, sum + sum_of(buf, bytes));
	}
	if (bpf_xdp_store_bytes(ctx, work->udp_at, &udp, sizeof(udp)))
		return -1;
	return work->family == 4 ? shorten_ipv4(ctx, work->ip_at) : shorten_ipv6(ctx, work->ip_at);
}

static __always_inline enum graft_reason open(struct xdp_md *ctx, const struct graft_work *work,
					      struct quic_buf *buf)
{
	struct seal_key *key = find_key(work->session, buf->bytes[1] & SEAL_PHASE);
	__u32 bytes = work->payload_bytes - sizeof(struct seal_tail), wrong;

	if (!key)
		return GRAFT_NO_KEYS;
	OPAQUE(bytes);
	if (bytes <= SEAL_TAG || bytes > QUIC_TEXT_MAX + SEAL_TAG)
		return GRAFT_MALFORMED;
	bytes = BOUNDED(bytes, ROOM);
	if (bpf_xdp_load_bytes(ctx, work->udp_at + UDP_BYTES, buf->bytes + TEXT_AT, bytes))
		return GRAFT_MALFORMED;
	bytes = work->payload_bytes - SEAL_BYTES;
	wrong = open_text(key, buf, bytes);
	if (wrong == GRAFT_UNOPENED)
		mark_active(work->session);
	if (wrong)
		return wrong;
	OPAQUE(bytes);
	if (!bytes || bytes > QUIC_TEXT_MAX)
		return GRAFT_MALFORMED;
	bytes = BOUNDED(bytes, ROOM);
	if (bpf_xdp_store_bytes(ctx, work->udp_at + UDP_BYTES, buf->bytes + TEXT_AT, bytes) ||
	    put_headers(ctx, work, buf, bytes))
		return GRAFT_NO_ROOM;
	return GRAFT_OTHER;
}

SEC("xdp.frags")
int packet_open(struct xdp_md *ctx)
{
	struct graft_work *work = graft_work(GRAFT_RX);
	struct quic_buf *buf = find_buf(1);
	enum graft_reason wrong;

	if (!work || !buf)
		return XDP_DROP;
	if (work->payload_bytes <= SEAL_BYTES ||
	    bpf_xdp_load_bytes(ctx, work->udp_at + UDP_BYTES + work->payload_bytes - sizeof(struct seal_tail),
			       buf->bytes, sizeof(struct seal_tail)) ||
	    buf->bytes[0] != SEAL_MAGIC || buf->bytes[1] >> 4 != SEAL_VERSION)
		return graft_done(ctx, rx, work, GRAFT_MALFORMED);
	wrong = open(ctx, work, buf);
	if (wrong)
		return graft_done(ctx, rx, work, wrong);
	bpf_tail_call(ctx, &stages_rx, STAGE_OPENED);
	return XDP_DROP;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
