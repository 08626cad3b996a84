/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The relay program's maps, and what it keeps in them while it runs. */
#ifndef MILLRACE_RELAY_STATE_H
#define MILLRACE_RELAY_STATE_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include "aead.h"
#include "barrier.h"
#include "frames.h"
#include "object.h"
#include "relay_intf.h"

#define FRAME_BYTES 2048
#define SOCKETS	    16
#define CHUNKS	    8 /* frames of one packet that are forwarded; a power of two */

/* A frame that has a slot. */
struct chunk {
	struct frame_stream frame; /* of a datagram: the alias, the group, and what follows the alias */
	__u64 object;
	__u32 type; /* of a datagram */
	__s32 priority;
	__u32 kind;
	__u32 egress; /* first of its slot */
};

/* The frame that arrived, and what has been done to it. */
struct arrival {
	__u64 traced_ns; /* when it arrived; 0: it is not traced */
	__u64 number;	 /* for traces */
	__u32 frame_bytes;
	__u32 packet_at; /* the QUIC packet's place in the frame */
	__u32 packet_bytes;
	__u32 upstream;
	__u32 downstream; /* of RELAY_FROM_SUBSCRIBER */
	__u16 vlan_tci;
	__be16 vlan_protocol; /* 0: untagged */
	__u8 family;	      /* 4 or 6 */
	__u8 family_now;
	__u8 summed; /* enum ip_summed */
	__u8 changed;
	__u8 untagged; /* the tag was taken off */
	__u8 pad[3];
};

/* A packet for one egress. */
struct egress_packet {
	__u64 word;   /* the drawn number and its key generation */
	__u64 offset; /* downstream; group of a datagram */
	__u32 data_at;
	__u32 data_bytes; /* that are taken over as they are */
	__u32 len;	  /* stream bytes, or of the datagram */
	__u32 credit;	  /* of the connection that it takes, bytes */
	__u32 level;
	__u32 size; /* UDP payload */
	__u32 frame_bytes;
	__u32 header_bytes;
	__u32 fin;
};

/* Where the fan-out is. */
struct fan {
	__u32 chunks;
	__u32 chunk;
	__u32 egress;
	__u32 left_over; /* chunks for which there was no room */
	__u32 wakes;	 /* there is something in the packet that userspace should not wait for */
	__u32 pad;
};

/* Where the fan-out of a packet goes on that was put back into the queue of its interface. */
struct cursor_entry {
	__u64 number;	 /* of the QUIC packet */
	__u64 traced_ns; /* as in struct arrival */
	__u32 id;	 /* the packet's mark while it waits; 0: nobody's */
	__u32 mark;	 /* that it had, and gets back */
	__u32 egress;
	__u32 chunk;
	__u32 runs; /* that it has taken */
	__u32 pad;
};

#define CURSORS	   4096	       /* packets that wait at a time; what is more loses its place to newer ones */
#define CURSOR_ID  0x4d520000U /* in the high half of an entry's ID */
#define CURSOR_LOW 0xffffU

/* What does not fit the stack. A program run has it to itself: softirqs do not nest. */
struct work {
	struct quic_buf in;
	struct quic_buf out;
	__u8 frame[FRAME_BYTES]; /* as it arrived */
	struct arrival arrival;
	struct chunk chunks[CHUNKS];
	struct fan fan;
	struct egress_packet packet;
	struct cursor_entry cursor; /* where it began; without an ID: at the beginning */
	struct bpf_fib_lookup route;
};

SEC(".rodata.config")
const volatile struct relay_config config = {};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct relay_id);
	__type(value, __u32);
	__uint(max_entries, 1); /* sizes are set before loading */
} ids SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_upstream);
	__uint(max_entries, 1);
} upstreams SEC(".maps");

/* Two for each upstream, by key phase. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct quic_keys);
	__uint(max_entries, 2);
} open_keys SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct relay_slot);
	__type(value, __u32);
	__uint(max_entries, 1);
} slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_egress);
	__uint(max_entries, 1);
} egresses SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_downstream);
	__uint(max_entries, 1);
} downstreams SEC(".maps");

/* Two for each downstream, by parity of the generation. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct quic_keys);
	__uint(max_entries, 2);
} seal_keys SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_keystream);
	__uint(max_entries, 1);
} keystreams SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 12);
} forwarded SEC(".maps");

/* Userspace's, for packets that need not wake it. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, SOCKETS);
} sockets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_deferral);
	__uint(max_entries, SOCKETS);
} deferrals SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct relay_arrival);
	__uint(max_entries, RELAY_ARRIVALS);
} arrivals SEC(".maps");

/* A variable, so that all it costs while nobody traces is a load and a branch. */
SEC(".data.tracing")
volatile struct relay_tracing tracing = {};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 12);
} events SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, RELAY_OUTCOMES + RELAY_EGRESS_OUTCOMES + RELAY_FURTHER_RUNS);
} outcomes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct work);
	__uint(max_entries, 1);
} works SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct cursor_entry);
	__uint(max_entries, CURSORS);
} cursors SEC(".maps");

__u32 cursors_used = 0;

#endif
