// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Admission control for QUIC servers, before the network stack. The policy has a scope for each guarded application,
 * with its addresses, ports and rules. gate_xdp applies the rules, in the order of enum gate_rule, to every packet for
 * such an application. gate_egress reads connection IDs from servers' handshake packets, if the scope tracks
 * connections. Userspace calls the other programs: they change maps inside the kernel, because packets change the same
 * entries at the same time.
 *
 *   gate_intf.h      structures shared with userspace
 *   gate_maps.h      configuration and maps
 *   gate_head.h      the copied start of the frame
 *   gate_packet.h    parser of that copy
 *   gate_rules.h     the rules
 *   gate_track.h     live connections
 *   gate_marks.h     a filter in front of the connections' maps
 *   gate_networks.h  clients, and the wider networks that contain them
 *   gate_sample.h    samples of refused packets, for the log and for traces
 *   gate_answer.h    Retry and Version Negotiation
 *   gate_token.h     tokens
 *   gate_expire.h    walks that end idle connections
 */
#include "skb_udp.h"
#include "gate_answer.h"
#include "gate_expire.h"
#include "gate_rules.h"
#include "gate_sample.h"

/* --- Verdicts --- */

static __always_inline void count(__u32 scope, __u32 reason, __u32 bytes)
{
	__u32 key = scope * GATE_REASONS + reason;
	struct gate_counter *counter = bpf_map_lookup_elem(&counters, &key);

	if (counter) {
		counter->packets += 1;
		counter->bytes += bytes;
	}
}

/* Adds one to `monitored` of each rule that would have refused the packet in this CPU's scratch memory. The function is
 * global, not static, so that the verifier checks it once instead of once for each path that calls it.
 */
__noinline int count_monitored(void)
{
	__u32 zero = 0;
	const struct gate_work *work = bpf_map_lookup_elem(&works, &zero);

	if (!work)
		return 0;
	for (int rule = 0; rule < GATE_RULES; rule++) {
		__u32 key = work->scope * GATE_REASONS + rule;
		struct gate_counter *counter;

		if (!(work->monitored & 1 << rule))
			continue;
		counter = bpf_map_lookup_elem(&counters, &key);
		if (counter)
			counter->monitored += 1;
	}
	return 0;
}

/* Reports whether an answer fits into the packet's frame. The QUIC packet must have at least 1200 bytes, no IP options
 * or extension headers in front of it, and no connection ID that is longer than 20 bytes. An answer has less than half
 * as many bytes, and no options either.
 */
static __always_inline int can_be_answered(const struct gate_packet *packet)
{
	return packet->end - packet->quic_at >= INITIAL_DATAGRAM && !packet->options && !packet->long_ids;
}

/* Reports whether the rule answers the packet instead of dropping it silently. A repeated Initial of an admitted
 * connection gets no answer: the server may be about to answer, and the gate's answer would end that connection. Only
 * rule GATE_VERSION answers packets that are not Initials.
 */
static __always_inline int is_answered(const struct gate_work *work, const struct gate_policy *policy,
				       __u32 rule)
{
	if (rule == GATE_VERSION)
		return policy->answers & 1 << rule;
	if (work->packet.kind != QUIC_INITIAL)
		return 0;
	return rule == GATE_RETRY || (policy->answers & 1 << rule && begins_connection(work));
}

/* Reports whether the interface's driver strips VLAN tags: the program cannot see them, so an answer would lack them.
 */
static __always_inline int hides_tags(const struct xdp_md *ctx)
{
	__u32 ifindex = ctx->ingress_ifindex;

	return !!bpf_map_lookup_elem(&untagged, &ifindex);
}

/* Drops a refused packet, or sends an answer in its place. */
static __always_inline int refuse(struct xdp_md *ctx, struct gate_work *work,
				  const struct gate_policy *policy, __u32 rule)
{
	if (!is_answered(work, policy, rule))
		return XDP_DROP;
	if (can_be_answered(&work->packet) && !hides_tags(ctx) &&
	    !(rule == GATE_RETRY ? make_retry(work, policy) : make_version_negotiation(work, policy, rule)) &&
	    !put_answer(ctx, work)) {
		count_event(GATE_ANSWERED);
		return XDP_TX;
	}
	count_event(GATE_NOT_ANSWERED);
	return XDP_DROP;
}

/* Reports whether the packet is IPv4 directly after Ethernet, and certainly not UDP. Most other traffic is recognised
 * here, without a copy of its headers.
 */
static __always_inline int is_bystander(const struct xdp_md *ctx)
{
	const struct ethhdr *eth = (void *)(long)ctx->data;
	const struct iphdr *ip = (void *)(eth + 1);
	const void *end = (void *)(long)ctx->data_end;

	return (void *)(ip + 1) <= end && eth->h_proto == bpf_htons(ETH_P_IP) && ip->protocol != IPPROTO_UDP;
}

static __always_inline int run(struct xdp_md *ctx, struct gate_work *work, const struct gate_active *now)
{
	struct gate_policy *policy;
	int found, reason;
	__u32 key, bytes;

	work->head.bare = is_bare(now, ctx->ingress_ifindex);
	found = !work->head.bare && is_bystander(ctx) ? FIND_OTHER : take_headers(ctx, work);
	if (found == FIND_OTHER) {
		/* Scope 0 stands for packets that belong to no guarded application. */
		count(0, GATE_NOT_UDP, bpf_xdp_get_buff_len(ctx));
		return XDP_PASS;
	}
	/* The run reads gate_active once and uses this copy, so that a change by userspace cannot mix old and new rules
	 * for the packet.
	 */
	work->active = *now;
	work->now_ns = bpf_ktime_get_coarse_ns();
	work->exact_ns = 0;
	work->monitored = 0;
	work->is_new = work->is_repeated = work->is_proved = 0;
	bytes = found == FIND_OK && !work->packet.bad_lengths ? work->packet.end - work->packet.quic_at
							      : work->head.frame_bytes;
	if (find_scope(work, found)) {
		count(0, GATE_OTHER, bytes);
		return XDP_PASS;
	}
	key = half_of(&work->active) * GATE_SCOPES + work->scope;
	policy = bpf_map_lookup_elem(&policies, &key);
	if (!policy)
		return XDP_PASS;
	reason = judge(ctx, work, found, policy);
	count(work->scope, reason, bytes);
	if (work->monitored)
		count_monitored();
	if (work->monitored || reason < GATE_RULES) {
		sample(work, reason, bytes);
		if (work->active.tracers)
			trace(reason, bytes);
	}
	return reason < GATE_RULES ? refuse(ctx, work, policy, reason) : XDP_PASS;
}

static __always_inline int decide(struct xdp_md *ctx)
{
	__u32 zero = 0;
	struct gate_work *work = bpf_map_lookup_elem(&works, &zero);
	struct gate_active *now = bpf_map_lookup_elem(&active, &zero);
	int verdict;

	if (!work || !now)
		return XDP_PASS;
	/* On PREEMPT_RT a run may interrupt another run on the same CPU, and would overwrite its scratch memory. */
	if (config.nests && __sync_lock_test_and_set(&work->busy, 1)) {
		count_event(GATE_BUSY);
		return XDP_PASS;
	}
	verdict = run(ctx, work, now);
	/* A plain store is enough, since only runs on this CPU read `busy`. */
	if (config.nests)
		WRITE_ONCE(work->busy, 0);
	return verdict;
}

SEC("xdp.frags")
int gate_xdp(struct xdp_md *ctx)
{
	__u32 ifindex = ctx->ingress_ifindex;
	int verdict = decide(ctx);
	__u32 *rest;

	if (verdict != XDP_PASS)
		return verdict;
	/* The interface may have further XDP programs (root.bpf.c), which decide about packets that pass here. */
	rest = bpf_map_lookup_elem(&rest_at, &ifindex);
	/* The tail call returns only if it fails. The packet then passes. */
	if (rest)
		bpf_tail_call(ctx, &rests, *rest);
	return XDP_PASS;
}

SEC("tcx/egress")
int gate_egress(struct __sk_buff *skb)
{
	struct gate_address server;
	struct gate_opening opening = {};
	struct udp_packet packet = {};
	struct gate_policy *policy;
	struct gate_active *now;
	struct gate_state *state;
	struct gate_id id = {};
	__u32 zero = 0;
	__u8 first;

	now = bpf_map_lookup_elem(&active, &zero);
	if (!now)
		return PASS_ON;
	if (parse_udp_on(skb, is_bare(now, skb->ifindex), &packet) ||
	    bpf_skb_load_bytes(skb, packet.payload_offset, &first, 1) || !(first & QUIC_LONG_HEADER))
		return PASS_ON;
	to_address(&server, packet.source, packet.family);
	to_address(&opening.address, packet.destination, packet.family);
	opening.port = packet.destination_port;
	policy = find_tracking(&server, packet.source_port, &id.scope);
	if (!policy || take_source_id(skb, packet.payload_offset, &id))
		return PASS_ON;
	if (!bpf_map_update_elem(&handshakes, &id, &opening, BPF_ANY))
		MARK(MARK_SERVER_ID, &id);
	state = bpf_map_lookup_elem(&states, &id.scope);
	if (state)
		note_id_len(state, id.len);
	return PASS_ON;
}

/* --- Calls of userspace --- */

SEC("syscall")
int gate_count(struct gate_count_call *call)
{
	struct gate_client client = call->client;
	__s64 count = change_counts(&client, call->change, 0, ~0ULL);

	call->error = count < 0;
	call->connections = count;
	return 0;
}

SEC("syscall")
int gate_publish(struct gate_publish_call *call)
{
	const struct gate_connection connection = {};
	struct gate_id id = call->id;

	call->error = bpf_map_update_elem(&connections, &id, &connection, BPF_ANY);
	if (!call->error)
		MARK(MARK_SERVER_ID, &id);
	return 0;
}

/* Defines a function that is not inlined, for each map. The compiler would otherwise merge the calls into one whose map
 * is a variable, which Linux 6.1 refuses.
 */
#define WALK(map, entry)                                                 \
	static __noinline long walk_##map(struct gate_expire_call *call) \
	{                                                                \
		return bpf_for_each_map_elem(&map, entry, call, 0);      \
	}

WALK(connections, expire_connection)
WALK(paths, expire_path)
WALK(clients, expire_client)
WALK(handshakes, keep_handshake)
WALK(openings, keep_opening)

SEC("syscall")
int gate_expire(struct gate_expire_call *call)
{
	/* bpf_for_each_map_elem takes its context from the stack only. */
	struct gate_expire_call local = *call;

	switch (local.walk) {
	case GATE_WALK_CONNECTIONS:
		walk_connections(&local);
		break;
	case GATE_WALK_PATHS:
		walk_paths(&local);
		break;
	case GATE_WALK_CLIENTS:
		walk_clients(&local);
		break;
	case GATE_WALK_HANDSHAKES:
		walk_handshakes(&local);
		break;
	case GATE_WALK_OPENINGS:
		walk_openings(&local);
		break;
	}
	*call = local;
	return 0;
}

/* Clears one of the Bloom filter's two sets of bits (gate_marks.h), before userspace makes it the set to which new keys
 * are added. */
SEC("syscall")
int gate_forget(struct gate_forget_call *call)
{
	__u32 age = call->age;

	bpf_for_each_map_elem(&marks, forget_marks, &age, 0);
	return 0;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
