/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Structures that the probe and the counters of softirqs and system calls share with userspace. The build generates
 * Rust's types and constants from this header.
 */
#ifndef MILLRACE_INTF_H
#define MILLRACE_INTF_H

#include <linux/types.h>

enum probe_direction {
	PROBE_INGRESS = 0,
	PROBE_EGRESS = 1,
};

/* Load-time configuration of the wire probe. */
struct probe_config {
	__u32 min_payload_bytes; /* UDP payload per segment; smaller packets are not sampled */
};

/* One UDP packet, or one GSO/GRO super-packet, as it passed an interface. */
struct probe_sample {
	__u64 time_ns; /* CLOCK_MONOTONIC */
	__u32 ifindex;
	__u32 payload_bytes; /* UDP payload of the whole frame, all segments */
	__u32 segment_bytes; /* UDP payload per segment; 0: not a super-packet */
	__be16 source_port;
	__be16 destination_port;
	__u16 vlan;	 /* outermost VLAN ID; 0: untagged */
	__u8 direction;	 /* enum probe_direction */
	__u8 family;	 /* 4 or 6 */
	__u8 source[16]; /* IPv4 in the first 4 bytes, the rest zero */
	__u8 destination[16];
	__u32 pad;
};
_Static_assert(sizeof(struct probe_sample) == 64, "probe_sample has no hidden padding");

/* Outcome of a packet at the probe; the index into the map `outcomes`. */
enum probe_outcome {
	PROBE_SAMPLED = 0,
	PROBE_RING_FULL, /* would have been sampled, but userspace did not drain in time */
	PROBE_SMALL,	 /* UDP, below min_payload_bytes */
	PROBE_NOT_UDP,
	PROBE_FRAGMENT,	 /* a datagram in fragments has no size of its own */
	PROBE_MALFORMED, /* truncated, or more headers than the parser follows */
	PROBE_OUTCOMES,
};

/* Load-time configuration of the system call counter. */
struct syscalls_config {
	__u32 tgid; /* process whose calls count, all threads; as the initial PID namespace numbers it */
};

#define SYSCALLS_MAX 512 /* numbers from here on share the last slot */

/* Load-time configuration of the timer of networking softirqs. */
struct softirqs_config {
	__u32 tgid; /* process whose own softirq time is counted, all threads; as the initial PID namespace numbers it */
};

/* Index into the map `times`, whose values are ns. */
enum softirqs_time {
	SOFTIRQS_ALL = 0,
	SOFTIRQS_OWN, /* the part on top of the process */
	SOFTIRQS_TIMES,
};

#endif
