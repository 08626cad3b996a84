/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The structures that the BPF program shares with userspace. The build generates Rust types and constants from this
 * file.
 *
 * An upstream is a connection on which media arrives, a downstream one on which it is sent. A slot is a stream of an
 * upstream, or a track whose objects arrive as datagrams. An egress is one subscriber's copy of a slot.
 *
 * `upstreams`, `ingresses`, `egresses` and `downstreams` are mapped into the relay's process. Both sides use atomic
 * operations on the words that they share. An entry is reused only after all program runs that may have seen it have
 * ended.
 */
#ifndef MILLRACE_RELAY_INTF_H
#define MILLRACE_RELAY_INTF_H

#include "crypto_intf.h"
#include "fan_intf.h"
#include "subgroup_intf.h"
#include "shared.h"
#include <linux/types.h>

#define RELAY_ID_MAX  20 /* longest connection ID of QUIC version 1, bytes */
#define RELAY_PORTS   4
#define RELAY_SEEN    8	  /* words of a window of streams, 32 streams each */
#define RELAY_NUMBERS 128 /* words of the replay window, 32 packet numbers each */
#define RELAY_NUMBER_BITS \
	48 /* bits of the packet number in a number word; the key generation is above them */
#define RELAY_END	 0xffffffffU /* marks the end of a list of egresses */
#define RELAY_UNKNOWN	 (~0ULL)     /* size of a stream whose end is not known */
#define RELAY_SUBSCRIBER 0x80000000U /* bit of a value in `ids`: the rest is the index of a downstream */
#define RELAY_ARRIVALS	 4096	     /* number of entries in `arrivals`, a power of two */
#define RELAY_OPENINGS	 64	     /* number of openings of a track, a power of two */
#define RELAY_UNBOUND	 (~0ULL)     /* ID of an ingress that waits for a stream to begin */

/* Values of `id` for an egress without a stream. Stream IDs are smaller than RELAY_CLOSED. */
#define RELAY_UNOPENED (~0ULL)	   /* the program may open the stream */
#define RELAY_OPENING  (~0ULL - 1) /* a program run is opening the stream */
#define RELAY_CLOSED   (~0ULL - 2) /* only userspace may open the stream */

/* Configuration that is set when the program is loaded. */
struct relay_config {
	__u32 max_copies_per_run;  /* the most copies that one run makes */
	__u32 max_runs;		   /* the most runs for one received packet */
	__u32 id_bytes;		   /* length of the connection IDs that this relay chooses, bytes */
	__be16 ports[RELAY_PORTS]; /* UDP ports that the relay listens on; 0: unused */
};

/* A connection ID, padded with zeroes. */
struct relay_id {
	__u8 bytes[RELAY_ID_MAX];
};

/* The part of the map `keystreams` that holds the ring of one direction of a connection: the keystream of packet number
 * n belongs at index start + n % len. Both are in one word, because they change together.
 */
struct relay_ring {
	__u64 run; /* high half: len, a power of two, or 0 without a ring; low half: start */
};

/* The precomputed keystream of one packet. Userspace clears `word`, changes the rest, and sets `word` again. The
 * program compares `word` before it uses the keystream, and again after encrypting.
 */
struct relay_keystream {
	__u64 word;  /* the packet's number word plus 1; 0: empty */
	__u32 bytes; /* bytes of packet payload that the keystream covers */
	__u32 pad;
	struct quic_keystream keystream;
} SHARED;

/* The result of looking up a precomputed keystream. The program computes the keystream itself, except after a hit. */
enum relay_lookup {
	RELAY_LOOKUP_HIT = 0,
	RELAY_LOOKUP_STALE, /* the entry belongs to another packet, is too short, or is being replaced */
	RELAY_LOOKUP_MISS,  /* there is no ring, or the entry is empty */
	RELAY_LOOKUPS,
};

/* A connection on which media arrives. */
struct relay_upstream {
	__u64 expected; /* largest authentic packet number plus 1 */
	/* The replay window. Each word covers 32 packet numbers: the high half is number / 32, the low half has a bit
	 * for each number seen.
	 */
	__u64 seen[RELAY_NUMBERS];
	__u64 streams
		[RELAY_SEEN]; /* window of unidirectional streams that the program or userspace has claimed, by index */
	__u64 preambles
		[RELAY_SEEN];	/* window of streams that have sent only their WebTransport preamble so far */
	__u64 late[RELAY_SEEN]; /* window of streams whose later bytes arrived before the first */
	__u64 web;		/* ID of the WebTransport session, or WEB_BARE without one */
	__u32 generations[2];	/* by key phase: the generation of the keys plus 1; 0: no keys */
	struct relay_ring ring;
	__u64 lookups[RELAY_LOOKUPS];
	__u32 session;	       /* ID of the session in trace events */
	__u32 deferred_socket; /* index in `sockets` plus 1; 0: none */
	__u32 deferred;	       /* packets that were steered to the deferred socket, or could have been */
	__u32 tracks;	       /* number of tracks whose streams the program may open */
} SHARED;

enum relay_kind {
	RELAY_STREAM = 0,
	RELAY_DATAGRAMS, /* the datagrams of a track */
	RELAY_TRACK,	 /* a track whose streams the program may open: an entry of `tracks` */
};

/* The key of the map `slots`: a stream or a track of an upstream. */
struct relay_slot {
	__u64 id; /* stream ID, or track alias */
	__u32 upstream;
	__u32 kind; /* enum relay_kind */
};

/* A track whose streams the program may open. An opening is an ingress with egresses, prepared for a stream that has
 * not begun. The holder of `lock` may take an opening.
 */
struct relay_track {
	__u64 alias;
	__u32 upstream;
	__u32 lock;	/* 0: the lock is free */
	__u64 group;	/* group of the subgroup that began last; only later subgroups are opened */
	__u64 subgroup; /* ID of that subgroup within its group */
	__u32 put;	/* number of openings that were added */
	__u32 taken;	/* number of openings that were taken */
	__u32 low;	/* userspace is woken to add openings when this many are left */
	__u32 missed;	/* streams that began while there was no opening */
	__u32 openings[RELAY_OPENINGS]; /* indexes of ingresses; opening n is at n modulo RELAY_OPENINGS */
} SHARED;
_Static_assert(sizeof(struct relay_track) == 48 + 4 * RELAY_OPENINGS, "relay_track has no hidden padding");

/* The state of a slot, and the offset up to which its stream was judged. The holder of `lock` owns the other fields. A
 * run that finds the lock taken forwards nothing of the slot.
 */
struct relay_ingress {
	__u64 id; /* stream ID or alias of the slot. Checked by each run, since the entry may have been reused */
	__u32 upstream;
	__u32 kind;
	__u32 first; /* index of the first egress, or RELAY_END */
	__u32 lock;  /* 0: the lock is free */
	__u64 next;  /* all bytes of the stream before this offset were judged, by the program or userspace */
	__u64 final_size; /* size of the stream, or RELAY_UNKNOWN */
	/* Start of a gapless run of bytes that arrived after a hole. If it ends before `next`, there is none. */
	__u64 run;
	__u64 run_end;
	/* Start of the range of bytes after `next` that have arrived or were not judged. Userspace has some of them,
	 * and keeps its version. If it ends before `next`, there is none.
	 */
	__u64 apart;
	__u64 apart_end;
	__u32 contradicted; /* set by userspace: the forwarded bytes may differ from those that userspace has */
	__u32 pad;
	/* Parser state at `next`. For datagrams: `value` is the group of the last object, `previous` its ID plus 1, and
	 * `left` has a bit for each of the objects before it that have arrived.
	 */
	struct subgroup_state state;
	struct subgroup_state scratch; /* a working copy of the program */
} SHARED;
_Static_assert(sizeof(struct relay_ingress) == 144, "relay_ingress has no hidden padding");

/* One subscriber's copy of an upstream stream, or of a track's datagrams.
 *
 * A prepared egress has the `id` RELAY_UNOPENED. A run that opens the stream changes it to RELAY_OPENING, and then to
 * the stream's ID, or back to RELAY_UNOPENED if the ID was taken meanwhile. Userspace changes RELAY_UNOPENED to
 * RELAY_CLOSED. All of these are compare-and-exchange operations, so that exactly one side opens the stream.
 */
struct relay_egress {
	__u64 upstream_id; /* stream ID or alias of the slot. Checked by each run, since the entry may have been reused */
	__u64 id; /* downstream stream ID, a value from RELAY_CLOSED on, or the track alias for datagrams */
	__u64 shift; /* downstream offset minus upstream offset, modulo 2^64. For datagrams: first object in group `from` */
	__u64 from; /* upstream offset; userspace sends what begins before it. For datagrams: first group */
	__u64 max_offset; /* the peer's MAX_STREAM_DATA, as downstream offset. For datagrams: last group */
	__u64 tag;	  /* set by userspace, and copied to `forwarded` */
	__u64 group;	  /* set by userspace, and copied to trace events */
	__u64 counted; /* downstream offset up to which bytes, skipped ones included, count against MAX_DATA */
	__u32 next;    /* next egress of the slot, or RELAY_END */
	__u32 downstream;
	__u32 upstream; /* index of the slot's upstream */
	__u32 epoch;	/* epoch of the downstream; 0: not in use */
	__u32 level; /* priority, 16 bits: smaller is more urgent. The priority of a datagram replaces the low 8 */
	__u32 track;	 /* number of the track in trace events */
	__u32 kind;	 /* enum relay_kind of the slot */
	__u32 exclusive; /* only the slot's egresses need the stream, so its packets may be deferred */
	/* The fields up to `pad` are used until the program opens the stream of a prepared egress. `level` has the
	 * track's default priority.
	 */
	__u64 alias;	   /* track alias that the subscriber knows */
	__u64 first_group; /* first group that the subscriber wants, from `first_object` on */
	__u64 first_object;
	__u64 last_group;
	__u32 ingress;
	__u32 pad;
} SHARED;

/* The network path and the destination connection ID of a downstream. */
struct relay_path {
	struct net_path way;
	__u8 id_bytes;
	__u8 id[RELAY_ID_MAX];
	__u8 pad[3];
};

/* The outcome of one copy. */
enum relay_egress_outcome {
	RELAY_EGRESS_SENT = 0,
	RELAY_EGRESS_GONE, /* the egress or the downstream was removed */
	RELAY_EGRESS_BEFORE, /* before the range that the kernel may send; for datagrams: outside the subscriber's range */
	RELAY_EGRESS_UNOPENED,	   /* the stream was not opened here, and userspace has not opened it yet */
	RELAY_EGRESS_STREAM_LIMIT, /* the peer's stream limit is reached, or userspace is about to open streams */
	RELAY_EGRESS_TOO_LARGE,	    /* the copy exceeds the MTU of the path or the route */
	RELAY_EGRESS_STREAM_CREDIT, /* the copy would exceed the peer's MAX_STREAM_DATA */
	RELAY_EGRESS_DATA_CREDIT,   /* the copy would exceed the kernel's share of the peer's MAX_DATA */
	RELAY_EGRESS_WINDOW,	    /* the copy would exceed the kernel's share of the congestion window */
	RELAY_EGRESS_BEHIND,	    /* data of the same or higher priority waits in userspace */
	RELAY_EGRESS_NO_KEYS,	    /* userspace has not installed the current key generation */
	RELAY_EGRESS_NO_ROUTE,
	RELAY_EGRESS_NO_NEIGHBOUR, /* the link address of the next hop is not known */
	RELAY_EGRESS_RING_FULL,	   /* the ring `forwarded` has no room to register the packet */
	RELAY_EGRESS_LOST, /* registered, but it could not be built or sent; loss recovery will notice */
	RELAY_EGRESS_OUTCOMES,
};

/* A socket to which deferred packets are steered. */
struct relay_deferral {
	__u64 packets; /* packets that were steered to this socket */
	__u64 wakes; /* packets of the same connections that went to the other socket, which wakes userspace */
	__u64 wakes_read; /* set by userspace: the value of `wakes` whose packets it had all read when it went to sleep */
	__u64 media; /* those of `packets` that publishers sent */
	__u64 taken; /* set by userspace: those of `packets` that it has read or that were dropped */
	__u64 room;  /* set by userspace: the most packets that may wait in the socket */
} SHARED;

/* The arrival time of a deferred packet. The low half of the packet's last 8 bytes, modulo RELAY_ARRIVALS, is the index
 * in `arrivals`. A later packet with the same index overwrites the entry.
 */
struct relay_arrival {
	__u64 word; /* high half: the high half of those 8 bytes; low half: CLOCK_MONOTONIC in microseconds, modulo 2^32 */
} SHARED;

/* A connection on which media is sent.
 *
 * Limits and totals: the program adds to its total, then compares with the limit, and subtracts again if the limit is
 * exceeded. Userspace stores the limit, then reads the total. Keys and paths have two places each: userspace changes
 * the unused one, then switches with one store.
 */
struct relay_downstream {
	__u64 number;	/* the packet number word, see the module `number` of millrace-quic */
	__u64 max_data; /* the most stream bytes that the kernel may send in total */
	__u64 data;	/* stream bytes that the kernel has sent or is about to send */
	/* High half: the number of unidirectional streams that the kernel may open; low half: the index of the next
	 * one. Both are in one word, so that only one side can open a stream at a time.
	 */
	__u64 streams;
	__u64 web;	      /* ID of the WebTransport session, or WEB_BARE without one */
	__u64 max_bytes;      /* the most bytes of UDP payload that the kernel may send in total */
	__u64 bytes;	      /* bytes of UDP payload that the kernel has sent or is about to send */
	__u32 epoch;	      /* 0: the entry is not in use */
	__u32 mtu;	      /* largest UDP payload, bytes */
	__u32 generations[2]; /* by parity of the generation: the generation of the keys plus 1; 0: no keys */
	__u32 path;	      /* index of the entry of `paths` that is in use */
	__u32 session;	      /* ID of the session in trace events */
	__u32 waiting; /* priority level of data that waits in userspace; copies of this level or less urgent are left to it */
	__u32 max_datagram; /* the peer's max_datagram_frame_size, bytes */
	__u32 stream_bits;  /* low two bits of the IDs of this end's unidirectional streams */
	__u32 pad;
	__u32 deferred_socket; /* index in `sockets` plus 1; 0: none */
	__u32 deferred_bytes; /* a packet of the peer is deferred if its UDP payload has at most this many bytes ... */
	__u64 deferred_until; /* ... and `bytes` is at most this */
	__u64 deferred;	      /* packets that were steered to the deferred socket */
	struct relay_ring ring;
	__u64 lookups[RELAY_LOOKUPS];
	struct relay_path paths[2];
	__u64 outcomes[RELAY_EGRESS_OUTCOMES];
} SHARED;

/* A packet that the kernel sends. It is registered in the ring buffer `forwarded` before it is sent. */
struct relay_forwarded {
	__u64 time_ns; /* CLOCK_MONOTONIC */
	__u64 number;
	__u64 tag;
	__u64 id;     /* stream ID on the downstream connection, or the track alias of a datagram */
	__u64 offset; /* offset in the downstream stream, or the group of a datagram */
	__u64 object; /* object ID of a datagram. For a stream: bytes that count against MAX_DATA */
	__u32 downstream;
	__u32 epoch;
	__u16 len;  /* length of the stream bytes, or of the datagram */
	__u16 size; /* UDP payload, bytes */
	__u16 generation;
	__u8 fin;
	__u8 kind; /* enum relay_kind */
};

/* The outcome of a received packet, which is an index in the map `outcomes`. The values of enum relay_egress_outcome,
 * enum relay_further_run, enum relay_frame_outcome and enum relay_opening follow there.
 */
enum relay_outcome {
	RELAY_FORWARDED = 0, /* every copy was tried */
	RELAY_CONTINUED,     /* some copies were tried, the others are left to further runs */
	RELAY_OVER_BUDGET,   /* some copies were tried, the others are left to userspace */
	RELAY_NOT_RESTORED, /* copies were tried, but there was no memory to restore the packet, so it is dropped */
	RELAY_NOT_UDP,
	RELAY_FRAGMENT,
	RELAY_MALFORMED, /* malformed link, IP or UDP header */
	RELAY_OTHER_PORT,
	RELAY_SUPER_PACKET, /* merged by GRO, or sent by a local process with GSO, and could not be segmented */
	RELAY_SEGMENTED,    /* a super-packet whose segments count as packets of their own */
	RELAY_ODD_HEADERS, /* IPv4 options, IPv6 extension headers or stacked VLAN tags */
	RELAY_LONG_HEADER, /* the packet belongs to a handshake */
	RELAY_BAD_SIZE,	   /* the packet is too short for a 1-RTT packet */
	RELAY_TOO_LONG,	   /* the QUIC packet has more than QUIC_TEXT_MAX bytes, as with jumbo frames */
	RELAY_UNKNOWN_ID,  /* the packet belongs to no known connection */
	RELAY_NO_KEYS,
	RELAY_NOT_AUTHENTIC,
	RELAY_REPLAYED, /* the packet was replayed, or is too old for the replay window */
	RELAY_BAD_FRAMES,
	RELAY_NO_SLOT, /* no frame of the packet has a slot */
	RELAY_BAD_STREAM, /* a stream is malformed, or exceeds its final size: nothing of the packet is forwarded */
	RELAY_DECLINED, /* frames have slots, but none may be forwarded, see enum relay_frame_outcome */
	RELAY_BUSY,	/* this run has interrupted another one on its CPU, and has no work area */
	RELAY_FROM_SUBSCRIBER, /* the packet comes from a subscriber, and was not opened */
	RELAY_OUTCOMES,
};

/* The outcome of a packet in a run after its first. */
enum relay_further_run {
	RELAY_RUN_LAST = 0, /* every copy has been tried */
	RELAY_RUN_CONTINUED,
	RELAY_RUN_LEFT, /* the other copies are left to userspace */
	RELAY_FURTHER_RUNS,
};

/* The outcome of a frame that has a slot: a STREAM frame, or a DATAGRAM frame with an object. */
enum relay_frame_outcome {
	RELAY_FRAME_GOOD = 0,
	RELAY_FRAME_REPEATED, /* some bytes of the frame have arrived before, or may have */
	RELAY_FRAME_AHEAD,    /* earlier bytes of the stream have not arrived */
	RELAY_FRAME_BUSY,     /* another CPU or userspace works on the same stream */
	RELAY_FRAME_LONG,     /* the frame has more fields than the program can read */
	RELAY_FRAME_MALFORMED,
	RELAY_FRAME_OUTCOMES,
};

/* The outcome for the first bytes of a stream without a slot, on an upstream with tracks whose streams the program may
 * open.
 */
enum relay_opening {
	RELAY_OPENING_BOUND = 0, /* the stream has got a slot */
	RELAY_OPENING_OTHER, /* the SUBGROUP_HEADER is incomplete or not in its shortest form, or the object ID that names the subgroup is missing */
	RELAY_OPENING_PREAMBLE, /* the packet has only the WebTransport preamble; the next bytes may get a slot */
	RELAY_OPENING_NO_TRACK,
	RELAY_OPENING_ORDER,  /* the subgroup does not follow the one that began last */
	RELAY_OPENING_MISSED, /* userspace has no further opening prepared */
	RELAY_OPENING_TAKEN, /* userspace has claimed the stream, the stream is old, or later bytes of it arrived first */
	RELAY_OPENING_BUSY, /* another CPU or userspace works on the same track */
	RELAY_OPENING_FULL, /* all slots are in use */
	RELAY_OPENING_OUTCOMES,
};

/* Selects the packets that become trace events. Userspace changes it while the program runs. */
struct relay_tracing {
	__u32 every;   /* only packets whose number is a multiple of this; 0: none */
	__u32 track;   /* only copies of this track; 0: any */
	__u32 session; /* only packets from or to this session; 0: any */
	__u32 pad;
	__u64 lost; /* events that were dropped because the ring was full */
} SHARED;

/* A trace event in the ring buffer `events`: the outcome of a copy, or of a received packet that was not copied. */
struct relay_event {
	__u64 arrived_ns; /* CLOCK_MONOTONIC */
	__u64 time_ns;	  /* time when the copy or the packet was finished, CLOCK_MONOTONIC */
	__u64 received;	  /* packet number on the upstream connection; 0: not known */
	__u64 number;	  /* packet number of the copy, if one was drawn */
	__u64 group;
	__u64 stream_id; /* stream on the downstream connection. For datagrams: the track alias; `offset` is the object ID */
	__u64 offset;
	__u32 publisher;  /* ID of the publisher's session */
	__u32 subscriber; /* ID of the subscriber's session */
	__u32 track;
	__u16 len;    /* stream bytes in the packet */
	__u16 size;   /* UDP payload, bytes; for a copy only if a number was drawn */
	__u8 is_copy; /* 0: the event is about the received packet, and fields of a copy are 0 */
	__u8 outcome; /* enum relay_egress_outcome of a copy, enum relay_outcome of a received packet */
	__u8 fin;
	__u8 pad[5];
};

#endif
