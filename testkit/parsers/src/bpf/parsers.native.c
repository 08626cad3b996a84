// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Compiles the BPF programs' parsers of network input natively, for fuzz/kernel_checks.rs. */
/* Global functions of the headers become static, because crypto_test.native.c defines them in the same program. */
#define __noinline static __attribute__((noinline, unused))

#include <errno.h>
#include <string.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

struct native_skb {
	struct __sk_buff skb;
	const __u8 *frame;
};

static long native_load_bytes(const struct __sk_buff *skb, __u32 offset, void *to, __u32 bytes)
{
	const struct native_skb *native = (const struct native_skb *)skb;

	if (offset > skb->len || bytes > skb->len - offset)
		return -EFAULT;
	memcpy(to, native->frame + offset, bytes);
	return 0;
}

#define bpf_skb_load_bytes native_load_bytes

static void *native_lookup(const void *map, const void *key);

#define bpf_map_lookup_elem native_lookup
#define bpf_loop(times, step, context, flags)                  \
	({                                                     \
		__u32 at_ = 0;                                 \
		while (at_ < (times) && !step(at_, (context))) \
			at_++;                                 \
		(long)at_;                                     \
	})

#include "ack.h"
#include "congestion.h"
#include "frames.h"
#include "bucket.h"
#include "gate_networks.h"
#include "gate_packet.h"
#include "graft_option.h"
#include "quic_packet.h"
#include "rtp.h"
#include "skb_udp.h"
#include "subgroup.h"
#include "web.h"

/* Replaces relay_maps.h by the few map entries that one stream, or the datagrams of one track, need. */
#define MILLRACE_RELAY_MAPS_H
#include "aead.h"
#include "relay_intf.h"
#include "run_bytes.h"

static struct relay_ingress native_ingress;
static struct run_bytes native_run;
static struct quic_buf native_in;
static const char ingresses, runs;

#include "relay_judge.h"

static void *native_lookup(const void *map, const void *key)
{
	if (*(const __u32 *)key)
		return NULL;
	return map == &ingresses ? (void *)&native_ingress : map == &runs ? (void *)&native_run : NULL;
}

struct native_walk {
	__u32 steps;
	__u32 count;
	struct frame_stream *streams;
};

int frames_native_walk(const __u8 *text, __u32 at, __u32 end, struct native_walk *out);
int subgroup_native_walk(struct subgroup_state *state, const __u8 *text, __u32 at, __u32 end, __u32 *steps);
int subgroup_native_may_end(const struct subgroup_state *state);
int subgroup_native_read_head(const __u8 *text, __u32 at, __u32 len, struct subgroup_head *out);
int web_native_enter_stream(const __u8 *text, __u32 at, __u32 len, __u64 session);
int web_native_enter_datagram(const __u8 *text, __u32 at, __u32 len, __u64 session);
__u32 web_native_put_stream(__u8 *end, __u64 session);
__u32 web_native_put_datagram(__u8 *end, __u64 session);
__u32 web_native_stream_len(__u64 session);
__u32 web_native_datagram_len(__u64 session);
int udp_native_parse(const __u8 *frame, __u32 bytes, const __u16 *vlan_tci, struct udp_packet *out);
int gate_native_read(const __u8 *frame, __u32 bytes, __u8 fill, __u32 bare, struct gate_packet *out);
int gate_native_take(__u64 *full_at, const struct bucket_rate *rate, __u64 times, __u64 now_ns);
__u32 gate_native_network(const struct gate_levels *levels, const __u8 *address, __u32 level, __u8 *to);
__u64 gate_native_most(__u64 of_client, __u32 times, __u64 all);
int graft_native_read(const __u8 *found, __u32 bytes);
int rtp_native_read(const __u8 *payload, __u32 bytes, struct rtp_packet *out);
/* fuzz/kernel_overlap.rs declares this struct with the same layout. */
_Static_assert(__builtin_offsetof(struct relay_ingress, next) == 24 &&
		       __builtin_offsetof(struct relay_ingress, state) == 80 &&
		       sizeof(struct relay_ingress) == 144,
	       "as mirrored");
struct relay_ingress *judge_native_begin(void);
enum relay_frame_outcome judge_native_frame(const __u8 *data, __u64 offset, __u32 len, __u32 fin);
int judge_native_leave(__u64 offset, __u32 len, __u32 fin);
enum relay_frame_outcome judge_native_datagram(__u64 group, __u64 object);
/* fuzz/kernel_ack.rs declares these structs with the same layout. */
_Static_assert(sizeof(struct graft_shared) == 16472 && sizeof(struct congestion) == 32, "as mirrored");
_Static_assert(__builtin_offsetof(struct graft_shared, acked) == 8224 &&
		       __builtin_offsetof(struct graft_shared, went_ns) == 8264,
	       "as mirrored");
int ack_native_take(struct graft_shared *shared, __u32 number, const struct graft_ack *ack, __u64 now_ns);
__u32 congestion_native_look(struct congestion *own, const struct graft_shared *shared, __u32 initial,
			     __u64 now_ns);
int quic_native_unprotect(const __u8 key[32], __u8 *packet, __u32 bytes, __u32 at, __u32 id_bytes,
			  __u64 expected, struct quic_short *header, __u64 *number);
int quic_native_protect(const __u8 key[32], __u8 *packet, __u32 bytes, __u32 at, __u32 id_bytes);

/* Parses the frames of a QUIC packet. `text` has FRAMES_MAX + 8 bytes, and `out` has space for as many streams
 * as `text` has bytes. Returns 1 if all frames are well-formed.
 */
int frames_native_walk(const __u8 *text, __u32 at, __u32 end, struct native_walk *out)
{
	struct frame_walk walk = {.at = at, .end = end};

	for (;;) {
		struct frame_stream stream = {};
		enum frame_step step = frame_next(&walk, text, &stream);

		out->steps++;
		if (step == FRAME_IS_STREAM)
			out->streams[out->count++] = stream;
		if (step == FRAME_END || step == FRAME_BAD)
			return step == FRAME_END;
	}
}

/* Parses the bytes of a subgroup stream up to `end`. `text` has FRAMES_MAX + 8 bytes. Returns 1 if the bytes are
 * well-formed.
 */
int subgroup_native_walk(struct subgroup_state *state, const __u8 *text, __u32 at, __u32 end, __u32 *steps)
{
	struct frame_walk walk = {.at = at, .end = end};

	for (;;) {
		enum subgroup_step step = subgroup_next(state, &walk, text);

		++*steps;
		if (step == SUBGROUP_DONE || step == SUBGROUP_BAD)
			return step == SUBGROUP_DONE;
	}
}

int subgroup_native_may_end(const struct subgroup_state *state)
{
	return subgroup_may_end(state);
}

/* Reads the header of a data stream. `text` has FRAMES_MAX + 8 bytes. Returns nonzero if the BPF program does not
 * forward such a stream.
 */
int subgroup_native_read_head(const __u8 *text, __u32 at, __u32 len, struct subgroup_head *out)
{
	return subgroup_read_head(text, at, len, out);
}

/* Returns the length of a stream's WebTransport prefix in bytes, or -1 if the prefix is incomplete or names another
 * session. `text` has FRAMES_MAX + 8 bytes.
 */
int web_native_enter_stream(const __u8 *text, __u32 at, __u32 len, __u64 session)
{
	struct frame_stream frame = {.at = at, .len = len};

	return web_enter_stream(&frame, text, session) ? -1 : (int)frame.offset;
}

int web_native_enter_datagram(const __u8 *text, __u32 at, __u32 len, __u64 session)
{
	struct frame_stream frame = {.at = at, .len = len};

	return web_enter_datagram(&frame, text, session) ? -1 : (int)frame.offset;
}

__u32 web_native_put_stream(__u8 *end, __u64 session)
{
	return web_put_stream_before(end, session);
}

__u32 web_native_put_datagram(__u8 *end, __u64 session)
{
	return web_put_datagram_before(end, session);
}

__u32 web_native_stream_len(__u64 session)
{
	return web_stream_len(session);
}

__u32 web_native_datagram_len(__u64 session)
{
	return web_datagram_len(session);
}

/* Parses a frame as TC programs do, and returns enum parse. `vlan_tci` is the VLAN tag of the skb, or NULL. */
int udp_native_parse(const __u8 *frame, __u32 bytes, const __u16 *vlan_tci, struct udp_packet *out)
{
	struct native_skb native = {.skb.len = bytes, .frame = frame};

	native.skb.vlan_present = !!vlan_tci;
	native.skb.vlan_tci = vlan_tci ? *vlan_tci : 0;
	return parse_udp(&native.skb, out);
}

static void copy_head(struct net_head *head, const __u8 *frame, __u32 most)
{
	head->have = head->frame_bytes < most ? head->frame_bytes : most;
	memcpy(head->bytes, frame, head->have);
}

/* Parses a frame in the steps of gate_head.h, and returns enum gate_find. The memory after the frame has the byte
 * `fill`, as if an earlier frame had left it there. If `bare` is not 0, the frame begins with its IP header.
 */
int gate_native_read(const __u8 *frame, __u32 bytes, __u8 fill, __u32 bare, struct gate_packet *out)
{
	struct net_head head = {.frame_bytes = bytes, .bare = bare};
	enum gate_find found;

	memset(head.bytes, fill, sizeof(head.bytes));
	copy_head(&head, frame, bytes < NEAR_BYTES ? HEAD_BYTES : NEAR_BYTES);
	found = find_udp(&head, out);
	if (is_cut(&head, out)) {
		copy_head(&head, frame, HEAD_BYTES);
		*out = (struct gate_packet){};
		found = find_udp(&head, out);
	}
	if (found != FIND_OK || out->bad_lengths || out->fragment)
		return found;
	read_quic(&head, out);
	if (is_cut(&head, out)) {
		copy_head(&head, frame, HEAD_BYTES);
		read_quic(&head, out);
	}
	return found;
}

/* Takes one token from a network's token bucket at the time `now_ns`. Returns nonzero if the bucket is empty. */
int gate_native_take(__u64 *full_at, const struct bucket_rate *rate, __u64 times, __u64 now_ns)
{
	__u64 price = price_of(rate, 1, times);
	int over;
	__u64 next = bucket_after(*full_at, rate->burst, price, now_ns * BUCKET_TICKS, &over);

	if (!over)
		*full_at = next;
	return over;
}

__u32 gate_native_network(const struct gate_levels *levels, const __u8 *address, __u32 level, __u8 *to)
{
	return take_network(levels, address, level, to);
}

__u64 gate_native_most(__u64 of_client, __u32 times, __u64 all)
{
	return network_most(of_client, times, all);
}

static struct quic_buf buf;

/* Returns ChaCha20 keys of which only the header protection key is set. Cipher suites differ only in how they compute
 * the header protection mask.
 */
static struct quic_keys header_keys(const __u8 key[32])
{
	struct quic_keys keys = {.suite = QUIC_CHACHA20_POLY1305};

	memcpy(keys.chacha20.header.words, key, sizeof(keys.chacha20.header.words));
	return keys;
}

/* Removes a packet's header protection. Returns 0 and stores the packet number in `number`, or returns -1. */
int quic_native_unprotect(const __u8 key[32], __u8 *packet, __u32 bytes, __u32 at, __u32 id_bytes,
			  __u64 expected, struct quic_short *header, __u64 *number)
{
	struct quic_keys keys = header_keys(key);
	int result;

	memcpy(buf.bytes + at, packet, bytes);
	result = quic_unprotect(&keys, &buf, at, id_bytes, bytes, header);
	memcpy(packet, buf.bytes + at, bytes);
	if (!result)
		*number = quic_number(expected, header);
	return result;
}

int quic_native_protect(const __u8 key[32], __u8 *packet, __u32 bytes, __u32 at, __u32 id_bytes)
{
	struct quic_keys keys = header_keys(key);
	int result;

	memcpy(buf.bytes + at, packet, bytes);
	result = quic_protect(&keys, &buf, at, id_bytes);
	memcpy(packet, buf.bytes + at, bytes);
	return result;
}

/* Parses a TCP option that bpf_load_hdr_opt() has found. The kernel copies only what fits into the buffer, so
 * `bytes` exceeds the buffer if the option was truncated.
 */
int graft_native_read(const __u8 *found, __u32 bytes)
{
	struct graft_option option = {};

	memcpy(&option, found, bytes < sizeof(option) ? bytes : sizeof(option));
	return graft_read(&option, bytes);
}

/* Parses a UDP payload as RTP or RTCP. The memory after its end has arbitrary contents. */
int rtp_native_read(const __u8 *payload, __u32 bytes, struct rtp_packet *out)
{
	__u8 header[RTCP_REPORT_BYTES];

	memset(header, 0xa5, sizeof(header));
	memcpy(header, payload, bytes < sizeof(header) ? bytes : sizeof(header));
	return rtp_parse(header, bytes, out);
}

/* Processes an acknowledgement. Returns nonzero if it acknowledges a packet that was not sent. */
int ack_native_take(struct graft_shared *shared, __u32 number, const struct graft_ack *ack, __u64 now_ns)
{
	return ack_take(shared, number, ack, now_ns);
}

__u32 congestion_native_look(struct congestion *own, const struct graft_shared *shared, __u32 initial,
			     __u64 now_ns)
{
	return congestion_look(own, shared, initial, now_ns);
}

/* Returns the state of a stream, or of a track's datagrams, before any bytes have arrived. */
struct relay_ingress *judge_native_begin(void)
{
	native_run.owner = 0;
	native_ingress = (struct relay_ingress){.first = RELAY_END, .final_size = RELAY_UNKNOWN};
	return &native_ingress;
}

enum relay_frame_outcome judge_native_frame(const __u8 *data, __u64 offset, __u32 len, __u32 fin)
{
	struct frame_stream frame = {.offset = offset, .len = len, .fin = fin};

	memcpy(native_in.bytes, data, len);
	return judge_frame(&native_ingress, 0, &native_in, &frame);
}

int judge_native_leave(__u64 offset, __u32 len, __u32 fin)
{
	struct frame_stream frame = {.offset = offset, .len = len, .fin = fin};

	return leave_frame(&native_ingress, &frame);
}

enum relay_frame_outcome judge_native_datagram(__u64 group, __u64 object)
{
	return judge_datagram(&native_ingress, 0, group, object);
}
