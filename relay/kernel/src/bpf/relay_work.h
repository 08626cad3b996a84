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

#define FRAME_BYTES 2048  /* bytes; longer Ethernet frames are left to userspace */
#define CHUNKS	    8	  /* the most frames of one packet that are forwarded; a power of two */
#define SUPER_BYTES 65536 /* bytes; the payload of a super-packet is shorter */
#define SEGMENTS    128	  /* the most segments of a super-packet: UDP_MAX_SEGMENTS of Linux */

/* A frame of the received packet that may be forwarded. */
struct chunk {
	/* The application's part of the frame, without the preamble of a WebTransport session. For a datagram: `id` is
	 * the alias, `offset` the group, and the data are the bytes after the alias.
	 */
	struct frame_stream frame;
	__u64 object;
	__u32 type; /* type of a datagram */
	__s32 priority;
	__u32 kind;
	__u32 ingress;
	__u32 egress;  /* index of the slot's first egress */
	__u32 ordinal; /* the frame's number among the STREAM and DATAGRAM frames of the packet */
	__u32 begins;  /* whether the application's part of a peer's stream begins in this frame */
};

/* The received packet. */
struct arrival {
	__u64 traced_ns; /* arrival time, if the packet is traced, or else 0 */
	__u64 number;	 /* packet number, for trace events */
	__u64 web;	 /* ID of the upstream's WebTransport session, or WEB_BARE */
	__u32 upstream;
	__u32 downstream; /* index; set for the outcome RELAY_FROM_SUBSCRIBER only */
	__u32 opens;	  /* number of tracks of the upstream whose streams may be opened */
	__u32 pad;
	struct fan_frame frame;
};

/* A packet that is to be sent for one egress. */
struct egress_packet {
	__u64 word;    /* the packet number that was drawn, with its key generation */
	__u64 id;      /* stream ID, or track alias */
	__u64 streams; /* the downstream's `streams` when the ID of its next stream was taken */
	__u64 web;     /* ID of the downstream's WebTransport session, or WEB_BARE */
	__u64 offset;  /* offset in the downstream stream, or group of a datagram */
	__u32 data_at;
	__u32 data_bytes; /* bytes that are copied unchanged from the received packet */
	__u32 len;	  /* length of the stream bytes, or of the datagram */
	__u32 credit;	  /* bytes that count against MAX_DATA */
	__u32 level;
	__u32 size; /* UDP payload, bytes */
	__u32 frame_bytes;
	__u32 header_bytes;
	__u32 fin;
	__u32 opens;	   /* whether the packet opens its stream */
	__u32 alias_bytes; /* length of the track alias, if the packet opens its stream */
	__u32 pad;
};

/* The state of the fan-out: the frame and the egress whose copy is made next. */
struct fan {
	__u32 chunks;
	__u32 chunk;
	__u32 egress;
	__u32 left_over; /* whether there were more frames than `chunks` has room for */
	__u32 wakes;	 /* whether userspace should see the packet at once */
	__u32 ordinal;	 /* ordinal of the next frame */
	__u64 good;	 /* by ordinal: the frames that are forwarded */
	__u32 opens;	 /* by index in `chunks`: the frames with which streams may be opened */
	__u32 kept;	 /* number of frames that were judged and found good */
};

/* The super-packet that is being forwarded (relay_super.h). */
struct super_packet {
	__u32 segment;	/* index of the present or next segment */
	__u32 segments; /* number of segments; 0: the packet is no super-packet */
	__u32 bytes;	/* length of the payload */
	__u32 mark;	/* firewall mark of the packet */
	__u32 comes;	/* whether the clone is on its way through the loopback interface */
	__u32 goes_on;	/* whether copies of a segment are left to a further run */
	__u32 wakes;	/* whether userspace should see the packet at once */
	__u32 received; /* whether a segment belongs to an upstream */
	__u32 first;	/* index of the segment that this run began with */
	__u32 cursor_id; /* cursor ID of the packet; the cursor in struct work is the segment's, and 0 in its first run */
};

/* The payload of a super-packet. */
struct super_bytes {
	__u8 bytes[SUPER_BYTES];
};

/* The part of a packet's state that is kept between its runs. */
struct cursor_kept {
	__u64 number;	 /* number of the QUIC packet */
	__u64 traced_ns; /* as in struct arrival */
	__u64 good;	 /* as in struct fan, since frames are judged only once */
	__u32 chunk;
	__u32 opens;   /* as in struct fan */
	__u32 segment; /* index of the segment, for a super-packet */
	__u32 begun;   /* whether copies of the present segment were made */
};

#define CURSOR_ID \
	0x4d520000U /* in the high half of an entry's ID, to tell the relay's entries from others' */
#include "fan_runs.h"

/* The work area of one CPU. With PREEMPT_RT a run may interrupt another one on the same CPU; it then finds `busy` set.
 */
struct work {
	__u64 busy; /* 0: no run uses the work area */
	struct quic_buf in;
	struct quic_buf out;
	__u8 frame[FRAME_BYTES]; /* the Ethernet frame as it was received */
	struct arrival arrival;
	struct chunk chunks[CHUNKS];
	struct subgroup_head heads[CHUNKS]; /* subgroup headers of the chunks that begin a stream */
	struct fan fan;
	struct super_packet super;
	__u32 copies; /* copies that this run has tried, plus one for each segment that it has finished */
	__u32 pad;
	struct egress_packet packet;
	struct cursor_entry
		cursor; /* the place where this run continues; without an ID it is the packet's first run */
	struct bpf_fib_lookup route;
};

#endif
