/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The memory that one run of the relay program works with, too large for the BPF stack. */
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

#define FRAME_BYTES 2048  /* longest Ethernet frame that is forwarded, bytes; userspace handles longer ones */
#define CHUNKS	    8	  /* the most QUIC frames of one packet that are forwarded; a power of two */
#define SUPER_BYTES 65536 /* size of the buffer for a super-packet's payload, bytes */
#define SEGMENTS    128	  /* the most segments of a super-packet: UDP_MAX_SEGMENTS of Linux */

/* A QUIC frame of the received packet that may be forwarded. */
struct chunk {
	/* The application's part of the frame, without the preamble of a WebTransport session. For a datagram: `id` is
	 * the track alias, `offset` the group ID, and the data are the bytes after the alias.
	 */
	struct frame_stream frame;
	__u64 object;
	__u32 type; /* type of an object datagram */
	__s32 priority;
	__u32 kind;
	__u32 ingress;
	__u32 egress;  /* index of the first subscriber's copy (egress) of the frame */
	__u32 ordinal; /* the frame's number among the STREAM and DATAGRAM frames of the packet */
	__u32 begins;  /* whether the application's part of a peer's stream begins in this frame */
};

/* The received packet. */
struct arrival {
	__u64 traced_ns; /* arrival time, if the packet is traced, or else 0 */
	__u64 number;	 /* packet number, for trace events */
	__u64 web;	 /* ID of the publisher's WebTransport session, or WEB_BARE without one */
	__u32 upstream;
	__u32 downstream; /* index of the subscriber's connection, set only for the outcome RELAY_FROM_SUBSCRIBER */
	/* number of the upstream's tracks for whose new streams the program may open subscribers' streams */
	__u32 opens;
	__u32 pad;
	struct fan_frame frame;
};

/* A packet that is to be sent to one subscriber, with a copy of one frame. */
struct egress_packet {
	__u64 word; /* number of the packet to be sent; the high bits are its key generation */
	__u64 id;   /* ID of the subscriber's stream, or the track alias of a datagram */
	__u64 streams; /* the field `streams` of struct relay_downstream, as read when the stream's ID was chosen */
	__u64 web;    /* ID of the subscriber's WebTransport session, or WEB_BARE without one */
	__u64 offset; /* offset in the subscriber's stream, or group ID of a datagram */
	__u32 data_at;
	__u32 data_bytes; /* number of bytes that are copied unchanged from the received packet */
	__u32 len;	  /* number of stream bytes, or length of the datagram */
	__u32 credit;	  /* number of bytes that the packet adds to the total for MAX_DATA */
	__u32 level;
	__u32 size; /* size of the packet's UDP payload, bytes */
	__u32 frame_bytes;
	__u32 header_bytes;
	__u32 fin;
	__u32 opens;	   /* whether the packet opens the subscriber's stream */
	__u32 alias_bytes; /* length of the subscriber's track alias in bytes, if the packet opens its stream */
	__u32 pad;
};

/* The state of the fan-out: the frame, and the subscriber's copy (egress) of it, that is sent next. */
struct fan {
	__u32 chunks;
	__u32 chunk;
	__u32 egress;
	__u32 left_over; /* whether the packet has more frames than `chunks` can hold */
	__u32 wakes;	 /* whether the packet has to wake userspace */
	__u32 ordinal;	 /* ordinal that the next STREAM or DATAGRAM frame gets */
	__u64 good;	 /* bitmap by the frames' ordinals in the packet: the frames that are forwarded */
	__u32 opens; /* bitmap by index in `chunks`: the frames whose copies may open subscribers' streams */
	__u32 kept;  /* number of frames that may be forwarded */
};

/* The super-packet that is being forwarded (relay_super.h). */
struct super_packet {
	__u32 segment;	/* index of the segment that is processed now or next */
	__u32 segments; /* number of segments; 0: the packet is no super-packet */
	__u32 bytes;	/* length of the super-packet's payload, bytes */
	__u32 mark;	/* firewall mark (`skb->mark`) of the super-packet */
	/* whether the clone of the super-packet was redirected to the loopback interface and is not processed yet */
	__u32 comes;
	__u32 goes_on;	/* whether this run leaves copies of a segment to another run of the program */
	__u32 wakes;	/* whether the super-packet has to wake userspace */
	__u32 received; /* whether a segment of the super-packet belongs to an upstream connection */
	__u32 first;	/* index of the first segment that this run has processed */
	/* ID of the super-packet's cursor (its state that is saved between runs). The cursor in struct work belongs to
	 * the current segment, and its ID is 0 in the segment's first run.
	 */
	__u32 cursor_id;
};

/* The payload of a super-packet. */
struct super_bytes {
	__u8 bytes[SUPER_BYTES];
};

/* The part of a packet's state that is saved between the program's runs for this packet. */
struct cursor_kept {
	__u64 number;	 /* number of the QUIC packet */
	__u64 traced_ns; /* arrival time if the packet is traced, as in struct arrival */
	/* bitmap by the frames' ordinals in the packet: the frames that the first run allowed to be forwarded */
	__u64 good;
	__u32 chunk;
	__u32 opens;   /* bitmap by index in `chunks`: the frames that may open subscribers' streams */
	__u32 segment; /* index of the segment, for a super-packet */
	__u32 begun;   /* whether an earlier run has made copies of the current segment */
};

/* high half of the IDs of packets' saved state (cursors); other programs use other values */
#define CURSOR_ID 0x4d520000U
#include "fan_runs.h"

/* The work area of one CPU. With PREEMPT_RT a run may interrupt another one on the same CPU; the interrupting run finds
 * `busy` set.
 */
struct work {
	__u64 busy; /* 0: no run uses the work area */
	struct quic_buf in;
	struct quic_buf out;
	__u8 frame[FRAME_BYTES]; /* the Ethernet frame as it was received */
	struct arrival arrival;
	struct chunk chunks[CHUNKS];
	/* subgroup headers of the frames in `chunks` that begin a stream */
	struct subgroup_head heads[CHUNKS];
	struct fan fan;
	struct super_packet super;
	__u32 copies; /* copies that this run has tried to send, plus one for each segment that it has finished */
	__u32 pad;
	struct egress_packet packet;
	/* the packet's saved state: which subscriber's copy this run continues with; ID 0 in a packet's first run */
	struct cursor_entry cursor;
	struct bpf_fib_lookup route;
};

#endif
