// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The dispatcher of packet grafts. It has three hooks: packet_tx at TC egress, packet_rx at XDP (called by
 * root.bpf.c), and packet_repair at TC ingress. Each finds the packet's session, authenticates the frame, and
 * runs the session's functions by tail calls. The last function calls the hook's verdict (`..._done`),
 * entry 0 of the same program array. Only the verdict passes or drops the packet.
 *
 *   graft_packet.h   the interface of functions
 *   packet_intf.h     the interface of userspace
 *   packet_frame.h    making, authenticating and removing frames
 *   packet_seal.h     the calls of the programs that seal and open datagrams (seal.bpf.c)
 *   packet_active.h   activity counters of sessions
 *   packet_path.h     sessions with several paths
 */
#include "barrier.h"
#include "packet_active.h"
#include "packet_frame.h"
#include "packet_intf.h"
#include "packet_kept.h"
#include "packet_path.h"
#include "packet_room.h"
#include "packet_seal.h"
#include "sk_buff.h"
#include <linux/pkt_cls.h>

SEC(".rodata.config")
const volatile struct packet_config config;

BPF_MAP(HASH, sessions, struct packet_key, struct packet_session, GRAFT_SESSIONS);

/* Index of a session that is sealed (encrypted), by its two addresses. If several such sessions have the same two
 * addresses, the map contains only one of them.
 */
BPF_MAP(HASH, sealed_pairs, struct packet_pair, __u32, GRAFT_SESSIONS);

BPF_MAP(PERCPU_ARRAY, counters, __u32, struct packet_counts, GRAFT_SESSIONS);

/* Number of packets that belong to no session. */
BPF_MAP(PERCPU_ARRAY, others, __u32, __u64, 1);

BPF_MAP(PERCPU_ARRAY, times, __u32, struct packet_times, GRAFT_SESSIONS);

BPF_MAP(PERCPU_ARRAY, heads, __u32, struct net_head, 1);

static __always_inline void count(__u32 session, __u32 reason)
{
	struct packet_counts *counts = bpf_map_lookup_elem(&counters, &session);

	if (counts)
		counts->packets[reason & (PACKET_REASONS - 1)]++;
}

static __always_inline void count_other(void)
{
	add_to(&others, 0, 1);
}

static __noinline int write_message(struct packet_message *message, const struct graft_work *work)
{
	*message = (struct packet_message){
		.session = work->session, .number = work->number, .kind = work->kind, .epoch = work->epoch};
	return 0;
}

static __always_inline void hear(const struct graft_work *work)
{
	struct packet_message *message = bpf_ringbuf_reserve(&messages, sizeof(*message), 0);

	if (!message)
		return;
	write_message(message, work);
	bpf_ringbuf_submit(message, 0);
}

/* --- The dispatcher --- */

enum found {
	FOUND,
	FOUND_OTHER, /* the packet is not UDP */
	FOUND_ODD,   /* only the addresses are known, since the UDP ports could not be found */
};

/* Returns whether a fragment may belong to a UDP datagram. An IPv6 fragment may show only that more extension
 * headers follow.
 */
static __always_inline int may_be_udp(struct net_cursor *cursor, const struct udp_packet *packet)
{
	__u16 offset;
	__u8 next;

	return packet->family == 4 || take_fragment(cursor, &next, &offset) || next == IPPROTO_UDP ||
	       is_extension(next);
}

static __always_inline enum found find_udp_in(struct net_cursor *cursor, struct udp_packet *packet,
					      struct graft_work *work)
{
	struct net_udp udp;
	enum parse result;
	__be16 protocol;

	if (take_ethernet(cursor, &protocol, NULL))
		return FOUND_OTHER;
	work->ip_at = cursor->at;
	if (protocol == bpf_htons(ETH_P_IP))
		result = parse_ipv4(cursor, packet);
	else if (protocol == bpf_htons(ETH_P_IPV6))
		result = parse_ipv6(cursor, packet);
	else
		return FOUND_OTHER;
	if (result == PARSE_NOT_UDP || !packet->family)
		return FOUND_OTHER;
	/* Only a first fragment contains the ports, so fragments are matched by their addresses alone. */
	if (result == PARSE_FRAGMENT)
		return may_be_udp(cursor, packet) ? FOUND_ODD : FOUND_OTHER;
	if (result)
		return FOUND_ODD; /* The packet has more extension headers than this program parses. */
	work->udp_at = cursor->at;
	if (take_udp(cursor, &udp))
		return FOUND_OTHER;
	if (udp.bytes < UDP_BYTES)
		return FOUND_ODD; /* IPv6 jumbograms have length 0 in the IP header. */
	packet->source_port = udp.source;
	packet->destination_port = udp.destination;
	packet->udp_bytes = udp.bytes;
	work->family = packet->family;
	return FOUND;
}

static __always_inline struct packet_session *find_session(const struct udp_packet *packet, int out)
{
	struct packet_key key = {
		.local_port = out ? packet->source_port : packet->destination_port,
		.remote_port = out ? packet->destination_port : packet->source_port,
	};

	__builtin_memcpy(key.local, out ? packet->source : packet->destination, sizeof(key.local));
	__builtin_memcpy(key.remote, out ? packet->destination : packet->source, sizeof(key.remote));
	return bpf_map_lookup_elem(&sessions, &key);
}

/* Returns whether a packet that could not be parsed is dropped. It is dropped if a session with its addresses
 * accepts only sealed packets, since it may be part of that session. XDP leaves this decision to TC, which
 * sees the packet later.
 */
static __always_inline int is_dropped(const struct udp_packet *packet, int out)
{
	struct packet_pair pair;
	__u32 *session;

	__builtin_memcpy(pair.local, out ? packet->source : packet->destination, sizeof(pair.local));
	__builtin_memcpy(pair.remote, out ? packet->destination : packet->source, sizeof(pair.remote));
	session = bpf_map_lookup_elem(&sealed_pairs, &pair);
	if (session)
		count(*session, GRAFT_FRAGMENT);
	return session != NULL;
}

static __always_inline void begin(struct graft_work *work, const struct packet_session *session, __u32 hook,
				  __u32 epoch)
{
	work->list = session->lists[epoch & 1][hook];
	work->list_id = session->list_ids[epoch & 1];
	work->key[0] = session->key[0];
	work->key[1] = session->key[1];
	work->session = session->index;
	work->budget_ns = session->budget_ns;
	work->epoch = epoch;
	work->mark = config.mark;
	work->number = 0;
	work->is_numbered = work->is_late = work->behind = work->is_marked_later = 0;
	work->again = work->is_kept = work->was_given_up = work->is_returned = 0;
	work->is_sealed = session->is_sealed;
	work->tells_room = session->tells_room;
	work->has_paths = session->paths != 0;
	work->limit = 0;
	work->takes_ns = work->spare_ns = 0;
	work->leaves_ns = 0;
	/* The coarse clock costs less, and its resolution of some ms suffices for functions. */
	work->now_ns = bpf_ktime_get_coarse_ns();
	work->start_ns = 0;
}

static __always_inline struct packet_time *time_of(const struct graft_work *work, __u32 hook)
{
	__u32 session = work->session;
	struct packet_times *of = bpf_map_lookup_elem(&times, &session);

	return of ? &of->hooks[hook] : NULL;
}

/* Starts to measure the processing time of every 64th packet. It covers the functions and adding or removing the frame,
 * but not encryption (sealing).
 */
static __always_inline void start_time(struct graft_work *work, __u32 hook)
{
	struct packet_time *time = time_of(work, hook);

	if (time && time->packets++ % PACKET_SAMPLE_EVERY == 0) {
		work->start_ns = bpf_ktime_get_ns();
		mark_active(work->session);
	}
}

static __always_inline void put_context(struct frame_context *context, const struct udp_packet *packet,
					__u32 payload_bytes)
{
	__builtin_memcpy(context->source, packet->source, sizeof(context->source));
	context->source_port = packet->source_port;
	context->destination_port = packet->destination_port;
	context->payload_bytes = payload_bytes;
}

/* Authenticates the graft frame of a packet, and copies its fields to `work`. Returns GRAFT_OTHER if the frame is
 * authentic, else the reason to drop the packet.
 */
static __always_inline enum graft_reason prove(struct graft_work *work, const struct packet_session *session,
					       const struct graft_frame *frame,
					       const struct udp_packet *packet)
{
	__u32 epoch = frame->bits & 1;
	struct frame_context context;

	if (frame->magic != GRAFT_MAGIC || frame->bits >> 5 != GRAFT_VERSION)
		return GRAFT_MALFORMED;
	put_context(&context, packet, work->payload_bytes);
	if (frame_tag(work->key, frame, &context) != frame->tag)
		return GRAFT_FORGED;
	work->epoch = epoch;
	work->kind = frame->bits >> 1 & (GRAFT_KINDS - 1);
	work->number = bpf_ntohl(frame->number);
	/* The hosts' daemons send each other messages in frames. These are accepted even if the frame's list of
	 * functions is outdated, so that a daemon notices a restart of the peer's daemon.
	 */
	if (work->kind < GRAFT_SAYS &&
	    (!(session->live & 1 << epoch) || frame->list != session->list_ids[epoch]))
		return GRAFT_STALE;
	return GRAFT_OTHER;
}

/* --- Timers of sessions: notify the daemon of sessions that send nothing --- */

/* A session's timer has a short period (FAST), a long one (SLOW), or is stopped (STANDS). Each sent packet sets FAST,
 * in wind(). Each expiry chooses the next state, in pace_of(): FAST until nothing was sent for PACKET_SILENT_NS, then
 * SLOW, or STANDS if the peer has acknowledged everything. Another CPU may send a packet during an expiry, so tick()
 * reads sent_ns again after it has stored the state.
 */
enum pace {
	STANDS, /* no timer runs until the session sends a packet */
	SLOW,
	FAST,
};

struct packet_clock {
	struct bpf_timer timer;
	__u64 period_ns; /* 0: the session needs no timer */
	__u64 pace;
};

BPF_MAP(ARRAY, clocks, __u32, struct packet_clock, GRAFT_SESSIONS);

/* Sets a session's timer to FAST. It is called after the function `number` has stored the sending time of the packet.
 */
static __always_inline void wind(const struct graft_work *work)
{
	__u32 session = work->session;
	struct packet_clock *clock = bpf_map_lookup_elem(&clocks, &session);

	if (!clock || !clock->period_ns || READ_ONCE(clock->pace) == FAST)
		return;
	/* The atomic exchange makes exactly one of several sending CPUs start the timer. */
	if (__sync_lock_test_and_set(&clock->pace, FAST) != FAST)
		bpf_timer_start(&clock->timer, clock->period_ns, 0);
}

/* --- TC egress --- */

/* Drops a packet. If it is a packet that a function sends after the application's packet, the application must not get
 * an error: the packet is redirected to interface 0, which does not exist. (TCX would pass on TC_ACT_STOLEN.)
 */
static __always_inline int drop(__u32 is_behind)
{
	return is_behind ? bpf_redirect(0, 0) : TC_ACT_SHOT;
}

/* Calls the sealing program packet_seal, which then calls packet_tx_out. */
static __always_inline int seal(struct __sk_buff *skb, struct seal_call what)
{
	struct seal_call *call = seal_call();

	if (call) {
		*call = what;
		/* The tail call returns only if the sealing programs are not loaded. */
		bpf_tail_call(skb, &stages_tx, STAGE_SEAL);
	}
	count(what.session, GRAFT_NO_KEYS);
	return drop(what.is_behind);
}

/* Number of attempts to reserve a departure time while other CPUs send at the same time. */
#define PACE_TRIES 8

/* Reserves the packet's departure time: not before the departure of the previous packet plus the pacing
 * interval.
 */
static __noinline int draw_time(struct graft_work *work)
{
	struct graft_shared *shared = graft_shared(work);
	__u64 now_ns = bpf_ktime_get_ns(), least_ns = 0, next_ns, at_ns;

	if (!shared)
		return 0;
	if (now_ns > work->spare_ns)
		least_ns = now_ns - work->spare_ns;
	for (int i = 0; i < PACE_TRIES; i++) {
		next_ns = *(volatile __u64 *)&shared->leaves_ns;
		at_ns = next_ns > least_ns ? next_ns : least_ns;
		if (__sync_val_compare_and_swap(&shared->leaves_ns, next_ns, at_ns + work->takes_ns) ==
		    next_ns)
			break;
	}
	/* If every attempt failed since other CPUs stored a time first, the packet departs at the time of its last
	 * attempt. Another packet may depart at the same time.
	 */
	work->leaves_ns = at_ns > now_ns ? at_ns : now_ns;
	return 0;
}

static __always_inline void put_time(struct __sk_buff *skb, const struct graft_work *work)
{
	if (work->leaves_ns)
		bpf_skb_set_tstamp(skb, work->leaves_ns, BPF_SKB_TSTAMP_DELIVERY_MONO);
}

/* Chooses a network path if the session has several. Returns the TC verdict, and sets `reason` if the packet is dropped.
 */
static __always_inline int leave(struct __sk_buff *skb, const struct graft_work *work,
				 const struct seal_call *what, __u32 *reason)
{
	int verdict = PASS_ON;

	if (what->has_paths)
		verdict = what->path ? path_leave(skb, work, what->session, what->path - 1,
						  config.path_mark + PACKET_PATHS)
				     : path_out(skb, work, what->session, config.path_mark);
	if (verdict == TC_ACT_SHOT)
		*reason = GRAFT_NO_PATH;
	return verdict;
}

/* Each packet mark (skb->mark) of this program is a range of 8 consecutive values. The lowest three bits are the number
 * of a network path.
 */
#define MARKS 8

static __always_inline int is_marked(const struct __sk_buff *skb, __u32 mark)
{
	return (skb->mark & ~(MARKS - 1)) == mark;
}

/* Sends a packet that a packet function or the daemon made, and which already has a graft frame. At this time `works`
 * contains the state of a different packet: the one that the function is processing.
 */
static __always_inline int pass_own(struct __sk_buff *skb, const struct packet_session *session,
				    const struct udp_packet *packet)
{
	const struct graft_work *work = graft_work(GRAFT_TX);
	__u32 mark = skb->mark, reason = GRAFT_SENT_BY_US;
	struct seal_call what = {
		.session = session->index,
		.bytes = packet->udp_bytes - UDP_BYTES,
		.reason = reason,
		.has_paths = session->paths,
		.path = mark == config.mark ? 0 : 1 + (mark & (MARKS - 1)),
	};
	int verdict;

	if (!work)
		return TC_ACT_SHOT;
	skb->mark = 0;
	/* A packet that a function made departs at the same time as the packet that the function is processing.
	 */
	put_time(skb, work);
	if (session->is_sealed)
		return seal(skb, what);
	verdict = leave(skb, work, &what, &reason);
	count(session->index, reason);
	return verdict;
}

/* Sends a copy of a framed and sealed packet by one of the session's redundant paths. */
static __always_inline int pass_copy(struct __sk_buff *skb, const struct packet_session *session)
{
	const struct graft_work *work = graft_work(GRAFT_TX);
	struct seal_call what = {
		.session = session->index,
		.has_paths = session->paths,
		.path = 1 + (skb->mark & (MARKS - 1)),
	};
	__u32 reason = GRAFT_NO_PATH;
	int verdict = TC_ACT_SHOT;

	skb->mark = 0;
	if (work && session->paths)
		verdict = leave(skb, work, &what, &reason);
	if (verdict == TC_ACT_SHOT)
		count(session->index, reason);
	return verdict;
}

static __always_inline int is_too_long(struct __sk_buff *skb, const struct graft_work *work)
{
	__u32 mtu = 0, more = graft_more_bytes(work);

	if (work->is_sealed && work->payload_bytes + GRAFT_FRAME_BYTES > QUIC_TEXT_MAX)
		return 1;
	if (work->has_paths && path_is_too_narrow(skb, work->session, more))
		return 1;
	return bpf_check_mtu(skb, 0, &mtu, more, 0) != 0;
}

SEC("tcx/egress")
int packet_tx(struct __sk_buff *skb)
{
	struct net_scratch scratch;
	struct net_cursor cursor = {.source = NET_SKB, .skb = skb, .scratch = &scratch};
	struct graft_work *work = graft_work(GRAFT_TX);
	struct udp_packet packet = {};
	struct packet_session *session;
	enum found found;

	if (!work)
		goto other;
	/* This program has handled the packet before, and has redirected it to the interface of its network path. */
	if (skb->mark == config.path_mark + PACKET_PATHS) {
		skb->mark = 0;
		return PASS_ON;
	}
	found = find_udp_in(&cursor, &packet, work);
	if (found == FOUND_ODD && is_dropped(&packet, 1))
		return TC_ACT_SHOT;
	if (found)
		goto other;
	session = find_session(&packet, 1);
	if (!session)
		goto other;
	if (is_marked(skb, config.path_mark))
		return pass_copy(skb, session);
	if (skb->mark == config.mark || is_marked(skb, config.message_mark))
		return pass_own(skb, session, &packet);
	begin(work, session, GRAFT_TX, session->epoch);
	start_time(work, GRAFT_TX);
	work->payload_bytes = packet.udp_bytes - UDP_BYTES;
	work->kind = GRAFT_DATA;
	if (session->is_paused)
		return graft_done(skb, tx, work, GRAFT_PAUSED);
	/* A buffer with several datagrams (GSO) would get only one frame, so it is dropped. */
	if (skb->gso_segs > 1)
		return graft_done(skb, tx, work, GRAFT_MERGED);
	/* The length is checked before functions assign a packet number, since a numbered packet has to be
	 * sent.
	 */
	if (is_too_long(skb, work))
		return graft_done(skb, tx, work, GRAFT_TOO_LONG);
	work->reason = GRAFT_SENT;
	return graft_next(skb, tx, work);
other:
	count_other();
	return PASS_ON;
}

static __always_inline void put_own_context(struct __sk_buff *skb, const struct graft_work *work,
					    struct frame_context *context)
{
	__u32 at = work->ip_at + (work->family == 4 ? __builtin_offsetof(struct iphdr, saddr)
						    : __builtin_offsetof(struct ipv6hdr, saddr));

	if (work->family == 4)
		bpf_skb_load_bytes(skb, at, context->source, 4);
	else
		bpf_skb_load_bytes(skb, at, context->source, 16);
	bpf_skb_load_bytes(skb, work->udp_at, &context->source_port, 2 * sizeof(__be16));
	context->payload_bytes = work->payload_bytes;
}

static __always_inline enum graft_reason send_framed(struct __sk_buff *skb, const struct graft_work *work)
{
	struct frame_context context = {};
	struct graft_frame frame;

	put_own_context(skb, work, &context);
	frame_make(&frame, work, work->kind, work->number, &context);
	return frame_put(skb, work, &frame) ? GRAFT_NO_ROOM : work->reason;
}

/* --- Verdicts --- */

static __always_inline int goes_on(__u32 reason)
{
	return reason <= GRAFT_NO_FUNCTION;
}

static __always_inline void take_time(const struct graft_work *work, __u32 hook)
{
	struct packet_time *time;
	__u64 ns;

	if (!work->start_ns)
		return;
	ns = bpf_ktime_get_ns() - work->start_ns;
	time = time_of(work, hook);
	if (!time)
		return;
	time->samples++;
	time->total_ns += ns;
	if (ns > time->most_ns)
		time->most_ns = ns;
	if (work->budget_ns && ns > work->budget_ns)
		time->over++;
}

static __always_inline void conclude(const struct graft_work *work, __u32 hook, __u32 reason)
{
	count(work->session, reason < GRAFT_REASONS ? reason : GRAFT_MALFORMED);
	take_time(work, hook);
}

/* Sends a copy of the application's packet now, since a function wants to send a packet of its own after it. That
 * function then runs again, and turns the packet in the socket buffer into its own packet.
 */
static __always_inline int follow(struct __sk_buff *skb, struct graft_work *work)
{
	__u32 again = work->again;
	long failed;

	work->again = 0;
	work->start_ns = 0;
	/* The packet mark tells packet_tx that the copy already has its graft frame. */
	skb->mark = work->mark;
	/* bpf_clone_redirect sends the copy, and calls packet_tx for it before it returns. */
	failed = bpf_clone_redirect(skb, skb->ifindex, 0) < 0;
	work->leaves_ns = 0;
	if (failed)
		return TC_ACT_SHOT;
	skb->mark = 0;
	work->behind++;
	work->current = again;
	work->list = 0;
	/* `behind` is not 0 now, which tells the function to turn the packet in the buffer into its own packet. */
	bpf_tail_call(skb, &programs_tx, again);
	return drop(1);
}

SEC("tcx/egress")
int packet_tx_done(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_TX);
	int verdict = PASS_ON;
	__u32 reason;

	if (!work)
		return PASS_ON;
	reason = work->reason;
	/* The frame is added after all functions, since they may have changed the packet. */
	if (goes_on(reason))
		reason = send_framed(skb, work);
	/* The session's timer has to run, since the acknowledgement of this packet may be lost. */
	if (goes_on(reason))
		wind(work);
	if (goes_on(reason) && work->takes_ns) {
		draw_time(work);
		put_time(skb, work);
	}
	if (!work->again || !goes_on(reason))
		work->leaves_ns = 0;
	if (goes_on(reason) && work->is_sealed && !work->again) {
		take_time(work, GRAFT_TX);
		return seal(skb, (struct seal_call){.session = work->session,
						    .bytes = work->payload_bytes + GRAFT_FRAME_BYTES,
						    .reason = reason,
						    .is_behind = work->behind,
						    .has_paths = work->has_paths});
	}
	if (goes_on(reason) && !work->again)
		verdict = leave(skb, work,
				&(struct seal_call){.session = work->session, .has_paths = work->has_paths},
				&reason);
	conclude(work, GRAFT_TX, reason);
	if (work->again && goes_on(reason))
		return follow(skb, work);
	return goes_on(reason) ? verdict : drop(work->behind);
}

/* Sends a packet that packet_seal has encrypted. */
SEC("tcx/egress")
int packet_tx_out(struct __sk_buff *skb)
{
	const struct graft_work *work = graft_work(GRAFT_TX);
	struct seal_call *call = seal_call(), what;
	int verdict = PASS_ON;

	if (!call || !work)
		return TC_ACT_SHOT;
	/* `*call` is copied first. leave() sends copies of the packet by other paths, which run the same
	 * programs and may overwrite `*call`.
	 */
	what = *call;
	if (goes_on(what.reason))
		verdict = leave(skb, work, &what, &what.reason);
	count(what.session, what.reason < GRAFT_REASONS ? what.reason : GRAFT_MALFORMED);
	return goes_on(what.reason) ? verdict : drop(what.is_behind);
}

/* Returns whether a packet proves that its path works. It does if it is new, or if it is a late or duplicate
 * packet of a sealed session. Without sealing a duplicate may be a replay; packet_open drops replays of
 * sealed packets.
 */
static __always_inline int is_new_and_true(const struct graft_work *work, __u32 reason)
{
	return goes_on(reason) || (work->is_sealed && (reason == GRAFT_DUPLICATE || reason == GRAFT_OLD ||
						       reason == GRAFT_LATE));
}

SEC("xdp.frags")
int packet_rx_done(struct xdp_md *ctx)
{
	struct graft_work *work = graft_work(GRAFT_RX);
	__u32 reason;

	if (!work)
		return XDP_PASS;
	reason = work->reason;
	if (work->has_paths && is_new_and_true(work, reason))
		path_came(work);
	conclude(work, GRAFT_RX, reason);
	return goes_on(reason) ? XDP_PASS : XDP_DROP;
}

SEC("tcx/ingress")
int packet_repair_done(struct __sk_buff *skb)
{
	struct graft_work *work = graft_work(GRAFT_REPAIR);
	__u32 reason;

	if (!work)
		return PASS_ON;
	reason = work->reason;
	if (goes_on(reason) && work->kind != GRAFT_DATA)
		reason = GRAFT_ANSWERED;
	else if (goes_on(reason) && frame_take(skb, work))
		reason = GRAFT_NO_ROOM;
	if (reason == GRAFT_ANSWERED && work->kind == GRAFT_ACK && takes_sign(work)) {
		work->kind = PACKET_ROOM;
		hear(work);
	}
	conclude(work, GRAFT_REPAIR, reason);
	/* A function has changed the received request into the packet that answers it, with source and destination
	 * swapped. This packet is sent by the interface where the request arrived.
	 */
	if (reason == GRAFT_RESENT)
		return bpf_redirect(skb->ifindex, 0);
	return goes_on(reason) ? PASS_ON : TC_ACT_SHOT;
}

/* --- XDP --- */

static __always_inline int copy_head(struct xdp_md *ctx, struct net_head *head)
{
	__u32 bytes = bpf_xdp_get_buff_len(ctx);

	head->frame_bytes = bytes;
	if (bytes > 128)
		bytes = 128;
	head->have = bytes;
	OPAQUE(bytes);
	if (bytes < ETHERNET_BYTES || bytes > 128)
		return -1;
	return bpf_xdp_load_bytes(ctx, 0, head->bytes, bytes);
}

static __always_inline enum graft_reason prove_xdp(struct xdp_md *ctx, struct graft_work *work,
						   const struct packet_session *session,
						   const struct udp_packet *packet)
{
	struct graft_frame frame;

	work->payload_bytes = packet->udp_bytes - UDP_BYTES - GRAFT_FRAME_BYTES;
	if (packet->udp_bytes < UDP_BYTES + GRAFT_FRAME_BYTES ||
	    bpf_xdp_load_bytes(ctx, work->udp_at + packet->udp_bytes - GRAFT_FRAME_BYTES, &frame,
			       sizeof(frame)))
		return GRAFT_MALFORMED;
	return prove(work, session, &frame, packet);
}

static __always_inline int receive(struct xdp_md *ctx, const int is_opened)
{
	__u32 zero = 0;
	struct net_head *head = bpf_map_lookup_elem(&heads, &zero);
	struct graft_work *work = graft_work(GRAFT_RX);
	struct net_cursor cursor = {.source = NET_HEAD, .head = head};
	struct udp_packet packet = {};
	struct packet_session *session;
	enum graft_reason wrong;
	int is_new;

	/* The headers are copied, since the packet's memory may be fragmented (XDP frags). */
	if (!work || !head || copy_head(ctx, head) || find_udp_in(&cursor, &packet, work))
		goto other;
	if (!is_opened)
		work->path = 0;
	session = find_session(&packet, 0);
	if (!session && !is_opened && path_in(ctx, work, &packet))
		session = find_session(&packet, 0);
	if (!session)
		goto other;
	/* The packet's frame names an epoch, that is a list of functions. It is trusted only after the frame was
	 * authenticated.
	 */
	begin(work, session, GRAFT_RX, 0);
	if (!session->is_sealed || is_opened)
		start_time(work, GRAFT_RX);
	wrong = prove_xdp(ctx, work, session, &packet);
	/* In generic mode, XDP also sees packets that this host injected (GRAFT_RETURNED). They are decrypted
	 * UDP packets already.
	 */
	is_new = !is_opened && (wrong || work->kind != GRAFT_RETURNED);
	if (session->is_sealed && is_new) {
		work->payload_bytes = packet.udp_bytes - UDP_BYTES;
		bpf_tail_call(ctx, &stages_rx, STAGE_OPEN);
		return graft_done(ctx, rx, work, GRAFT_NO_KEYS);
	}
	if (wrong)
		return graft_done(ctx, rx, work, wrong);
	work->list = session->lists[work->epoch & 1][GRAFT_RX];
	work->reason = GRAFT_LET_IN;
	/* No functions are run for the messages of the peer's daemon, nor for packets that this host has recovered from
	 * parity packets.
	 */
	if (work->kind >= GRAFT_SAYS || work->kind == GRAFT_RETURNED)
		work->list = 0;
	return graft_next(ctx, rx, work);
other:
	count_other();
	return XDP_PASS;
}

SEC("xdp.frags")
int packet_rx(struct xdp_md *ctx)
{
	return receive(ctx, 0);
}

/* Processes a packet that packet_open has decrypted. */
SEC("xdp.frags")
int packet_rx_opened(struct xdp_md *ctx)
{
	return receive(ctx, 1);
}

/* --- TC ingress --- */

/* Prepares a packet whose UDP checksum is still to be completed by an interface (CHECKSUM_PARTIAL). Decryption has stored
 * a complete checksum, which is replaced by that of the pseudo header.
 */
static __always_inline int put_partial_checksum(struct __sk_buff *skb, const struct graft_work *work,
						const struct udp_packet *packet)
{
	__u64 sum = csum_pseudo(packet->source, 2 * sizeof(packet->source), packet->udp_bytes);
	__u16 check = csum_fold(sum);

	return bpf_skb_store_bytes(skb, CHECK_AT(work), &check, sizeof(check), 0);
}

/* Accepts a packet that this host has recovered and injected. Its packet mark proves its origin, since no other sender
 * can set this mark.
 */
static __always_inline int take_returned(struct __sk_buff *skb, struct graft_work *work)
{
	if (skb->mark != config.mark)
		return -1;
	skb->mark = 0;
	work->kind = GRAFT_DATA;
	work->is_returned = 1;
	return 0;
}

SEC("tcx/ingress")
int packet_repair(struct __sk_buff *skb)
{
	struct net_scratch scratch;
	struct net_cursor cursor = {.source = NET_SKB, .skb = skb, .scratch = &scratch};
	struct graft_work *work = graft_work(GRAFT_REPAIR);
	struct udp_packet packet = {};
	struct packet_session *session;
	struct graft_frame frame;
	enum graft_reason wrong;
	enum found found;

	if (!work || have_link(skb))
		goto other;
	found = find_udp_in(&cursor, &packet, work);
	if (found == FOUND_ODD && is_dropped(&packet, 0))
		return TC_ACT_SHOT;
	if (found)
		goto other;
	session = find_session(&packet, 0);
	if (!session)
		goto other;
	begin(work, session, GRAFT_REPAIR, 0);
	start_time(work, GRAFT_REPAIR);
	/* GRO has merged several datagrams, so their frames are now inside the payload. */
	if (skb->gso_segs > 1)
		return graft_done(skb, repair, work, GRAFT_MERGED);
	work->payload_bytes = packet.udp_bytes - UDP_BYTES - GRAFT_FRAME_BYTES;
	if (packet.udp_bytes < UDP_BYTES + GRAFT_FRAME_BYTES ||
	    bpf_skb_load_bytes(skb, work->udp_at + packet.udp_bytes - GRAFT_FRAME_BYTES, &frame,
			       sizeof(frame)))
		return graft_done(skb, repair, work, GRAFT_MALFORMED);
	/* The frame is authenticated again, since TC does not know whether the XDP program has authenticated it, or was
	 * attached at all.
	 */
	wrong = prove(work, session, &frame, &packet);
	if (wrong)
		return graft_done(skb, repair, work, wrong);
	/* Packets from the same host (veth) arrive with a checksum that is not complete yet. */
	work->is_partial = IP_SUMMED(skb) == CHECKSUM_PARTIAL;
	if (work->is_partial && (work->is_sealed || session->paths) &&
	    put_partial_checksum(skb, work, &packet))
		return graft_done(skb, repair, work, GRAFT_NO_ROOM);
	if (work->kind >= GRAFT_SAYS) {
		hear(work);
		return graft_done(skb, repair, work, GRAFT_ANSWERED);
	}
	if (work->kind == GRAFT_RETURNED && take_returned(skb, work))
		return graft_done(skb, repair, work, GRAFT_MALFORMED);
	work->list = session->lists[work->epoch & 1][GRAFT_REPAIR];
	work->list_id = frame.list;
	work->reason = work->is_returned ? GRAFT_RECOVERED : GRAFT_DELIVERED;
	return graft_next(skb, repair, work);
other:
	count_other();
	return PASS_ON;
}

/* --- Events of the sessions' timers --- */

BPF_RING(ticks, 64 << 10);

static __noinline int put_tick(struct packet_tick *event, const struct graft_shared *state, __u32 session)
{
	*event = (struct packet_tick){.time_ns = bpf_ktime_get_ns(), .session = session};
	if (!state)
		return 0;
	event->sent_ns = state->sent_ns;
	event->next = state->next;
	event->newest = state->newest;
	event->acked = state->acked;
	event->srtt_us = state->srtt_us;
	return 0;
}

/* Returns the next period of a session's timer. If nothing was sent for PACKET_SILENT_NS, the timer stops if the peer
 * has acknowledged everything, and has the long period otherwise.
 */
static __always_inline __u64 pace_of(const struct graft_shared *state, __u64 silent_ns)
{
	if (!state->sent_ns)
		return STANDS;
	if (silent_ns < PACKET_SILENT_NS)
		return FAST;
	return state->acked == state->next ? STANDS : SLOW;
}

/* Runs at each expiry of a session's timer. The kernel cancels the timers when the map's last file descriptor is
 * closed, even after a kill.
 */
static int tick(void *map, __u32 *session, struct packet_clock *clock)
{
	__u32 key = *session;
	struct graft_shared *state = bpf_map_lookup_elem(&shared, &key);
	struct packet_tick *event = NULL;
	__u64 sent_ns, silent_ns, pace;

	/* The daemon has stopped the session's timer, so it is not started again. */
	if (!clock->period_ns || !state)
		return 0;
	sent_ns = READ_ONCE(state->sent_ns);
	silent_ns = bpf_ktime_get_ns() - sent_ns;
	pace = pace_of(state, silent_ns);
	if (sent_ns && silent_ns >= clock->period_ns)
		event = bpf_ringbuf_reserve(&ticks, sizeof(*event), 0);
	if (event) {
		put_tick(event, state, key);
		bpf_ringbuf_submit(event, 0);
	}
	__sync_lock_test_and_set(&clock->pace, pace);
	/* Another CPU may have sent a packet meanwhile. If the state was still FAST, that CPU did not start the timer.
	 */
	if (READ_ONCE(state->sent_ns) != sent_ns)
		clock->pace = pace = FAST;
	if (pace != STANDS)
		bpf_timer_start(&clock->timer, pace == FAST ? clock->period_ns : PACKET_SLOW_NS, 0);
	return 0;
}

#define MONOTONIC 1
#define EBUSY	  16

/* Starts or stops a session's timer; userspace runs this program. `error` is what the kernel's timer functions
 * returned. Since Linux 6.18 the kernel allocates a timer without waiting for locks, so ENOMEM may be temporary.
 */
SEC("syscall")
int packet_clock(struct packet_clock_call *call)
{
	__u32 session = call->session;
	struct packet_clock *clock = bpf_map_lookup_elem(&clocks, &session);

	call->error = -1;
	if (!clock)
		return 0;
	clock->period_ns = call->period_ns;
	if (!call->period_ns) {
		call->error = bpf_timer_cancel(&clock->timer) < 0;
		return 0;
	}
	call->error = bpf_timer_init(&clock->timer, &clocks, MONOTONIC);
	if (call->error && call->error != -EBUSY) /* EBUSY means that the timer was initialised before */
		return 0;
	clock->pace = FAST;
	call->error = bpf_timer_set_callback(&clock->timer, tick);
	if (!call->error)
		call->error = bpf_timer_start(&clock->timer, call->period_ns, 0);
	return 0;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
