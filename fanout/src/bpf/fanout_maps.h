/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The fan-out's configuration, maps, and what a run works with. Sizes of 1 are set by userspace before loading. */
#ifndef MILLRACE_FANOUT_MAPS_H
#define MILLRACE_FANOUT_MAPS_H

#include "fan.h"
#include "fanout_intf.h"
#include "rtp.h"

/* What is kept of a packet between its runs. */
struct cursor_kept {
	__u64 traced_ns; /* as in struct fanout_work */
};

#define CURSOR_ID 0x4d460000U /* in the high half of an entry's ID */
#include "fan_runs.h"

#define HEAD_ROOM    64 /* for the longest headers, ETHERNET_BYTES + IPV6_BYTES + UDP_BYTES, and a bit */
#define UDP_AT	     (ETHERNET_BYTES + IPV6_BYTES)
#define HEADS_END    (UDP_AT + UDP_BYTES)
#define PAYLOAD_ROOM 32 /* at least RTCP_REPORT_BYTES */

SEC(".rodata.config")
const volatile struct fanout_config config = {};

/* Where a stream arrives -> its index. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct fanout_at);
	__type(value, __u32);
	__uint(max_entries, 1);
} places SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct fanout_stream);
	__uint(max_entries, 1);
} streams SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct fanout_leg);
	__uint(max_entries, 1);
} legs SEC(".maps");

/* Outcome -> packets: enum fanout_outcome, enum fanout_leg_outcome, enum fanout_further_run. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, FANOUT_OUTCOMES + FANOUT_LEG_OUTCOMES + FANOUT_FURTHER_RUNS);
} outcomes SEC(".maps");

/* A variable, so that all it costs while nobody traces is a load and a branch. */
SEC(".data.tracing")
volatile struct fanout_tracing tracing = {};

/* What became of traced packets: struct fanout_event. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 12);
} events SEC(".maps");

/* What does not fit the stack. On a kernel with PREEMPT_RT one run may begin on a CPU while another one is in the middle of
 * its own there: it finds the word taken.
 */
struct fanout_work {
	__u64 busy; /* 0: no run has it */
	__u64 now_ns;
	__u64 traced_ns; /* when the packet arrived; 0: it is not traced */
	struct fan_frame frame;
	__u32 stream;
	__u32 leg;  /* the next one, from 0 on */
	__u32 legs; /* of the stream */
	__u8 traffic_class;
	__u8 pad[3];
	__u16 check; /* of UDP, as it came */
	__u16 pad2;
	struct rtp_packet rtp;
	struct net_path came;	    /* from its sender (`local`) to the stream's place (`remote`) */
	struct net_path path;	    /* of the copy */
	__u8 head[HEAD_ROOM];	    /* headers as they arrived */
	__u8 out[HEAD_ROOM];	    /* of the copy: they end at HEADS_END */
	__u8 payload[PAYLOAD_ROOM]; /* the beginning of what is behind */
	struct cursor_entry cursor;
	struct bpf_fib_lookup route;
};

/* 0 -> what this CPU's run works with. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct fanout_work);
	__uint(max_entries, 1);
} works SEC(".maps");

#endif
