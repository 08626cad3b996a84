// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Wire probe: records when UDP packets pass an interface, at TC ingress and egress. It changes no packet, and passes
 * every packet on to the other programs at the hook.
 */
#include "intf.h"
#include "sk_buff.h"
#include "skb_udp.h"

SEC(".rodata.config")
const volatile struct probe_config config = {};

/* Ring buffer with one struct probe_sample for each packet that passed an interface and is large enough. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20); /* bytes; userspace sets the real size before loading */
} samples SEC(".maps");

/* What the probe did with packets (enum probe_outcome) -> number of such packets. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, PROBE_OUTCOMES);
} outcomes SEC(".maps");

static __noinline int fill(struct probe_sample *sample, const struct udp_packet *packet)
{
	sample->payload_bytes = packet->payload_bytes;
	sample->source_port = packet->source_port;
	sample->destination_port = packet->destination_port;
	sample->vlan = packet->vlan;
	sample->family = packet->family;
	__builtin_memcpy(sample->source, packet->source, sizeof(sample->source));
	__builtin_memcpy(sample->destination, packet->destination, sizeof(sample->destination));
	sample->pad = 0;
	return 0;
}

static __always_inline enum probe_outcome inspect(struct __sk_buff *skb, __u8 direction)
{
	__u64 now = bpf_ktime_get_ns();
	struct udp_packet packet = {};
	struct probe_sample *sample;
	__u32 size;

	switch (parse_udp(skb, &packet)) {
	case PARSE_OK:
		break;
	case PARSE_NOT_UDP:
		return PROBE_NOT_UDP;
	case PARSE_FRAGMENT:
		return PROBE_FRAGMENT;
	default:
		return PROBE_MALFORMED;
	}
	size = skb->gso_size ? skb->gso_size : packet.payload_bytes;
	if (size < config.min_payload_bytes)
		return PROBE_SMALL;
	sample = bpf_ringbuf_reserve(&samples, sizeof(*sample), 0);
	if (!sample)
		return PROBE_RING_FULL;
	sample->time_ns = now;
	sample->ifindex = skb->ifindex;
	sample->segment_bytes = skb->gso_size;
	sample->direction = direction;
	fill(sample, &packet);
	/* Userspace polls the ring. A wake-up per packet would cost time that the benchmark would then measure. */
	bpf_ringbuf_submit(sample, BPF_RB_NO_WAKEUP);
	return PROBE_SAMPLED;
}

SEC("tcx/ingress")
int probe_ingress(struct __sk_buff *skb)
{
	have_link(skb);
	add_to(&outcomes, inspect(skb, PROBE_INGRESS), 1);
	return PASS_ON;
}

SEC("tcx/egress")
int probe_egress(struct __sk_buff *skb)
{
	add_to(&outcomes, inspect(skb, PROBE_EGRESS), 1);
	return PASS_ON;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
