/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Structures that the wire probe (which records when UDP packets pass an interface) and the counters of softirqs and
 * system calls share with userspace. The build generates Rust's types and constants from this header.
 */
#ifndef MILLRACE_INTF_H
#define MILLRACE_INTF_H

#include <linux/types.h>

enum probe_direction {
	PROBE_INGRESS = 0,
	PROBE_EGRESS = 1,
};

/* Load-time configuration of the wire probe (probe.bpf.c), which records when UDP packets pass an interface. */
struct probe_config {
	__u32 min_payload_bytes; /* bytes; packets with a smaller UDP payload (per GSO/GRO segment) are not recorded */
};

/* One UDP packet, or one GSO/GRO super-packet, as it passed an interface. */
struct probe_sample {
	__u64 time_ns; /* time by CLOCK_MONOTONIC */
	__u32 ifindex;
	__u32 payload_bytes; /* UDP payload of the whole frame, all segments together */
	__u32 segment_bytes; /* UDP payload per segment; 0: not a super-packet */
	__be16 source_port;
	__be16 destination_port;
	__u16 vlan;	 /* outermost VLAN ID; 0: untagged */
	__u8 direction;	 /* enum probe_direction */
	__u8 family;	 /* IP version: 4 or 6 */
	__u8 source[16]; /* IPv4 addresses are in the first 4 bytes, the rest is zero */
	__u8 destination[16];
	__u32 pad;
};
_Static_assert(sizeof(struct probe_sample) == 64, "probe_sample has no hidden padding");

/* What the wire probe did with a packet; the index into the map `outcomes`, which counts packets. */
enum probe_outcome {
	PROBE_SAMPLED = 0,
	PROBE_RING_FULL, /* not recorded: the ring buffer was full */
	PROBE_SMALL,	 /* UDP payload below min_payload_bytes */
	PROBE_NOT_UDP,
	PROBE_FRAGMENT,	 /* IP fragment, whose UDP payload size is unknown */
	PROBE_MALFORMED, /* truncated, or more headers than the parser follows */
	PROBE_OUTCOMES,
};

/* Load-time configuration of the system call counter (syscalls.bpf.c). */
struct syscalls_config {
	__u32 tgid; /* ID in the initial PID namespace of the process whose calls are counted, in all threads */
};

/* elements of the map that counts system calls by number; numbers from 511 on share the last element */
#define SYSCALLS_MAX 512

/* Load-time configuration of softirqs.bpf.c, which times networking softirqs. */
struct softirqs_config {
	__u32 tgid; /* ID in the initial PID namespace of the process whose softirq time is counted, in all threads */
};

/* Index into the map `times`, which has times of networking softirqs in ns. */
enum softirqs_time {
	SOFTIRQS_ALL = 0,
	SOFTIRQS_OWN, /* time of softirqs that interrupted the process */
	SOFTIRQS_TIMES,
};

#endif
