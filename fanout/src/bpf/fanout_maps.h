/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The fan-out's configuration, its maps, and the memory that a run of the program works with. Maps that are declared
 * with one entry get their real size from userspace before the program is loaded.
 */
#ifndef MILLRACE_FANOUT_MAPS_H
#define MILLRACE_FANOUT_MAPS_H

#include "fan.h"
#include "fanout_intf.h"
#include "rtp.h"

/* State of a packet that is kept from one run of the program to the packet's next run. */
struct cursor_kept {
	__u64 traced_ns; /* time when the packet arrived; 0: the packet is not traced */
};

/* high 16 bits of skb->mark while a packet waits for its next run (fan_runs.h) */
#define CURSOR_ID 0x4d460000U
#include "fan_runs.h"

#define HEAD_ROOM    64 /* room for the longest headers, ETHERNET_BYTES + IPV6_BYTES + UDP_BYTES, rounded up */
#define UDP_AT	     (ETHERNET_BYTES + IPV6_BYTES)
#define HEADS_END    (UDP_AT + UDP_BYTES)
#define PAYLOAD_ROOM 32 /* bytes of payload that are loaded, at least RTCP_REPORT_BYTES */

SEC(".rodata.config")
const volatile struct fanout_config config = {};

/* Maps the address and port that a stream arrives at to the stream's index. */
BPF_MAP(HASH, places, struct fanout_at, __u32, 1);

BPF_MAP_FLAGS(ARRAY, streams, __u32, struct fanout_stream, 1, BPF_F_MMAPABLE);

BPF_MAP_FLAGS(ARRAY, receivers, __u32, struct fanout_receiver, 1, BPF_F_MMAPABLE);

/* Counts what happened to received packets (enum fanout_outcome), to their copies for receivers (enum
 * fanout_copy_outcome) and in further runs for the same packet (enum fanout_further_run).
 */
BPF_MAP(PERCPU_ARRAY, outcomes, __u32, __u64, FANOUT_OUTCOMES + FANOUT_COPY_OUTCOMES + FANOUT_FURTHER_RUNS);

/* The filter of traced packets. It is a global variable, so that tracing costs one load and one branch while it is
 * off. */
SEC(".data.tracing")
volatile struct fanout_tracing tracing = {};

/* Events about traced packets: struct fanout_event. */
BPF_RING(events, 1 << 12);

/* The variables of a run of the program, which are too large for the stack. With PREEMPT_RT a run may interrupt another
 * run that uses the variables of the same CPU. The interrupting run finds `busy` set.
 */
struct fanout_work {
	__u64 busy; /* 0: no run of the program uses these variables */
	__u64 now_ns;
	__u64 traced_ns; /* time when the packet arrived; 0: the packet is not traced */
	struct fan_frame frame;
	__u32 stream;
	__u32 receiver;	 /* index of the next receiver, counted from the stream's first */
	__u32 receivers; /* number of the stream's receivers */
	__u8 traffic_class;
	__u8 pad[3];
	__u16 check; /* UDP checksum as received */
	__u16 pad2;
	struct rtp_packet rtp;
	struct net_path came;	    /* addresses and ports of the received packet: `local` is its source */
	struct net_path path;	    /* addresses and ports of the copy for one receiver */
	__u8 head[HEAD_ROOM];	    /* headers as received */
	__u8 out[HEAD_ROOM];	    /* headers of the copy for one receiver, which end at HEADS_END */
	__u8 payload[PAYLOAD_ROOM]; /* the beginning of the UDP payload */
	struct cursor_entry cursor;
	struct bpf_fib_lookup route;
};

/* Index 0 -> the variables of a run of the program on this CPU. */
BPF_MAP(PERCPU_ARRAY, works, __u32, struct fanout_work, 1);

#endif
