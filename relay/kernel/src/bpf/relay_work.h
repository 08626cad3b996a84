/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What a run of the relay program works with. */
#ifndef MILLRACE_RELAY_WORK_H
#define MILLRACE_RELAY_WORK_H

#include "aead.h"
#include "fan.h"
#include "frames.h"
#include "object.h"
#include "relay_intf.h"
#include "run_bytes.h"
#include "subgroup.h"
#include "web.h"
#include <linux/bpf.h>

#define FRAME_BYTES 2048 /* Ethernet frames that are longer are left to userspace */
#define CHUNKS	    8	 /* frames of one packet that are forwarded; a power of two */

/* A frame of the received packet that has a slot. */
struct chunk {
	/* What of it is the application's, behind the preamble of a WebTransport session. Of a datagram: the alias, the group,
	 * and what follows the alias.
	 */
	struct frame_stream frame;
	__u64 object;
	__u32 type; /* of a datagram */
	__s32 priority;
	__u32 kind;
	__u32 ingress;
	__u32 egress;  /* first of its slot */
	__u32 ordinal; /* among the packet's STREAM and DATAGRAM frames */
	__u32 begins;  /* the application's part of a stream of the peer begins with it */
};

/* The packet that arrived. */
struct arrival {
	__u64 traced_ns; /* when it arrived; 0: it is not traced */
	__u64 number;	 /* for traces */
	__u64 web;	 /* of the upstream */
	__u32 upstream;
	__u32 downstream; /* of RELAY_FROM_SUBSCRIBER */
	__u32 opens;	  /* streams may be opened */
	__u32 pad;
	struct fan_frame frame;
};

/* A packet to be sent for one egress. */
struct egress_packet {
	__u64 word;    /* the drawn number and its key generation */
	__u64 id;      /* of the stream, or the track's alias */
	__u64 streams; /* of the downstream, when its next stream was looked up for this one */
	__u64 web;     /* of the downstream */
	__u64 offset;  /* downstream; group of a datagram */
	__u32 data_at;
	__u32 data_bytes; /* that are copied as they are */
	__u32 len;	  /* stream bytes, or of the datagram */
	__u32 credit;	  /* bytes that count against MAX_DATA */
	__u32 level;
	__u32 size; /* UDP payload */
	__u32 frame_bytes;
	__u32 header_bytes;
	__u32 fin;
	__u32 opens;	   /* it opens its stream */
	__u32 alias_bytes; /* of the track's alias then */
	__u32 pad;
};

/* How far the fan-out is: at this chunk, and this egress of its slot. */
struct fan {
	__u32 chunks;
	__u32 chunk;
	__u32 egress;
	__u32 left_over; /* chunks for which there was no room */
	__u32 wakes;	 /* something in the packet should reach userspace at once */
	__u32 ordinal;	 /* of the next frame */
	__u64 good;	 /* by ordinal: frames that are forwarded */
	__u32 opens;	 /* by chunk: those with which streams may be opened */
	__u32 kept;	 /* chunks that were judged and are good */
};

/* What is kept of a packet between its runs. */
struct cursor_kept {
	__u64 number;	 /* of the QUIC packet */
	__u64 traced_ns; /* as in struct arrival */
	__u64 good;	 /* as in struct fan: frames are judged once */
	__u32 chunk;
	__u32 opens; /* as in struct fan */
};

#define CURSOR_ID 0x4d520000U /* in the high half of an entry's ID */
#include "fan_runs.h"

/* What does not fit the stack. On a kernel with PREEMPT_RT one run may begin on a CPU while another one is in the middle of
 * its own there: it finds the word taken.
 */
struct work {
	__u64 busy; /* 0: no run has it */
	struct quic_buf in;
	struct quic_buf out;
	__u8 frame[FRAME_BYTES]; /* as it arrived */
	struct arrival arrival;
	struct chunk chunks[CHUNKS];
	struct subgroup_head heads[CHUNKS]; /* of the chunks at offset 0 */
	struct fan fan;
	struct egress_packet packet;
	struct cursor_entry cursor; /* where this run began; without an ID: at the beginning */
	struct bpf_fib_lookup route;
};

#endif
