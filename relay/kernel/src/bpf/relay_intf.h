/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The structures that the BPF program shares with userspace. The build generates Rust types and constants from this
 * file.
 *
 * An upstream is a connection on which media arrives, a downstream is one on which media is sent. A slot is a stream of
 * an upstream, or a track whose objects arrive as datagrams. An egress is one subscriber's copy of a slot.
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
#define RELAY_SEEN    8 /* number of words in a sliding bitmap of stream numbers; a word covers 32 streams */
#define RELAY_NUMBERS 128 /* number of words in the replay window; a word covers 32 packet numbers */
/* number of low bits that hold the packet number, in words that combine packet number and key generation */
#define RELAY_NUMBER_BITS 48
/* index that marks the end of a list of subscribers' copies (struct relay_egress) */
#define RELAY_END     0xffffffffU
#define RELAY_UNKNOWN (~0ULL) /* value of `final_size` for a stream whose end is not known */
/* Bit of a value in the map `ids`, which finds connections by their connection ID. If it is set, the other bits are the
 * index of a downstream (media is sent on it), else of an upstream (media arrives on it).
 */
#define RELAY_SUBSCRIBER 0x80000000U
/* number of deferred packets' arrival times in the map `arrivals`, a power of two */
#define RELAY_ARRIVALS 4096
/* the most future streams of a track that userspace prepares at a time, a power of two */
#define RELAY_OPENINGS 64
/* Value of `id` in a struct relay_ingress that is prepared for a stream which has not begun. */
#define RELAY_UNBOUND (~0ULL)

/* Values of `id` in a struct relay_egress whose subscriber's stream is not open. Stream IDs are smaller than
 * RELAY_CLOSED.
 */
#define RELAY_UNOPENED (~0ULL)	   /* the program may open the subscriber's stream */
#define RELAY_OPENING  (~0ULL - 1) /* a program run is opening the subscriber's stream */
#define RELAY_CLOSED   (~0ULL - 2) /* only userspace may open the subscriber's stream */

/* Configuration that is set when the program is loaded. */
struct relay_config {
	__u32 max_copies_per_run;  /* the most copies of frames that one run of the program sends */
	__u32 max_runs;		   /* the most runs of the program for one received packet */
	__u32 id_bytes;		   /* length of the connection IDs that this relay chooses, bytes */
	__be16 ports[RELAY_PORTS]; /* UDP ports that the relay listens on; 0: unused */
};

/* A connection ID, padded with zeroes. */
struct relay_id {
	__u8 bytes[RELAY_ID_MAX];
};

/* The part of the map `keystreams` that holds the keystreams of one direction of a connection, as a ring. The keystream
 * of packet number n belongs at index start + n % len. `start` and `len` are in one word, because they change together.
 */
struct relay_ring {
	/* high 32 bits: `len`, the number of entries, a power of two, or 0 without a ring; low 32 bits: `start` */
	__u64 run;
};

/* The precomputed keystream of one packet. Userspace clears `word`, changes the other fields, and sets `word` again.
 * The program compares `word` before it uses the keystream, and again after encrypting.
 */
struct relay_keystream {
	__u64 word;  /* packet number and key generation of the packet, plus 1; 0: the entry is empty */
	__u32 bytes; /* bytes of packet payload that the keystream covers */
	__u32 pad;
	struct quic_keystream keystream;
} SHARED;

/* The result of looking up a precomputed keystream. The program computes the keystream itself, except after a hit. */
enum relay_lookup {
	RELAY_LOOKUP_HIT = 0,
	RELAY_LOOKUP_STALE, /* the keystream entry belongs to another packet, is too short, or is being replaced */
	RELAY_LOOKUP_MISS, /* the connection has no ring of keystreams, or the keystream entry is empty */
	RELAY_LOOKUPS,
};

/* A connection on which media arrives. */
struct relay_upstream {
	__u64 expected; /* largest packet number that was received and authenticated, plus 1 */
	/* The replay window. Each word covers 32 packet numbers: the high half is number / 32, the low half has a bit
	 * for each number seen.
	 */
	__u64 seen[RELAY_NUMBERS];
	/* sliding bitmap of streams whose copies the program or userspace has begun to open */
	__u64 streams[RELAY_SEEN];
	/* sliding bitmap of streams of which only the WebTransport header has arrived so far */
	__u64 preambles[RELAY_SEEN];
	/* sliding bitmap of streams whose later bytes arrived before the first byte */
	__u64 late[RELAY_SEEN];
	__u64 web; /* ID of the WebTransport session, or WEB_BARE without one */
	/* For each key phase: the generation of the installed keys plus 1; 0: no keys. */
	__u32 generations[2];
	struct relay_ring ring;
	__u64 lookups[RELAY_LOOKUPS];
	__u32 session;	       /* ID of the session in trace events */
	__u32 deferred_socket; /* index in `sockets` of the socket for deferred packets, plus 1; 0: none */
	/* Number of packets for which a wake-up could be deferred. Every (DEFERRED_IN_A_ROW + 1)-th wakes userspace. */
	__u32 deferred;
	__u32 tracks; /* number of tracks for whose new streams the program may open subscribers' streams */
} SHARED;

enum relay_kind {
	RELAY_STREAM = 0,
	RELAY_DATAGRAMS, /* the data of a track that arrives as datagrams */
	RELAY_TRACK,	 /* a track for whose new streams the program may open subscribers' streams */
};

/* The key of the map `slots`: a stream or a track of an upstream connection. */
struct relay_slot {
	__u64 id; /* stream ID, or track alias */
	__u32 upstream;
	__u32 kind; /* whether `id` is a stream ID or a track alias: enum relay_kind */
};

/* A track for whose new streams the program may open subscribers' streams. An opening is a prepared entry for a stream
 * that has not begun: a struct relay_ingress with its subscribers' copies. Only the holder of `lock` may assign an
 * opening to a stream.
 */
struct relay_track {
	__u64 alias;
	__u32 upstream;
	__u32 lock; /* 0: the lock is free */
	/* Group of the subgroup that began last; the program opens streams only for later subgroups. */
	__u64 group;
	__u64 subgroup; /* ID of the subgroup that began last */
	/* number of openings (entries for streams that have not begun) that userspace has added to the track */
	__u32 put;
	__u32 taken; /* number of openings that the program has assigned to streams of the track */
	__u32 low; /* userspace is woken to prepare further openings when only this many unused ones are left */
	__u32 missed; /* number of streams that began while the track had no unused opening */
	/* indices of the openings in the map `ingresses`; the n-th is at n modulo RELAY_OPENINGS */
	__u32 openings[RELAY_OPENINGS];
} SHARED;
_Static_assert(sizeof(struct relay_track) == 48 + 4 * RELAY_OPENINGS, "relay_track has no hidden padding");

/* The state of a stream or a track's datagrams that the program forwards (a slot), and the offset up to which the
 * stream was checked (judged). The holder of `lock` owns the other fields. A program run that finds the lock taken
 * forwards nothing of the stream or track.
 */
struct relay_ingress {
	/* Stream ID or track alias. Each program run checks it, since userspace may have reused the entry. */
	__u64 id;
	__u32 upstream;
	__u32 kind;
	__u32 first;	  /* index of the first subscriber's copy (struct relay_egress), or RELAY_END */
	__u32 lock;	  /* 0: the lock is free */
	__u64 next;	  /* offset up to which the program or userspace has parsed the stream */
	__u64 final_size; /* final size of the stream, or RELAY_UNKNOWN */
	/* Start of a gapless range of stream bytes that arrived after a hole. `run_end` is its end. There is no such
	 * range if `run_end` is not above `next`.
	 */
	__u64 run;
	__u64 run_end;
	/* Start of a range of stream bytes after `next`, some of which userspace has received in packets that this
	 * program did not check. Userspace keeps its version of these bytes. `apart_end` is the range's end. There is
	 * no such range if it is not above `next`.
	 */
	__u64 apart;
	__u64 apart_end;
	__u32 contradicted; /* set by userspace: the forwarded bytes may differ from those that userspace has */
	__u32 pad;
	/* Parser state at the stream offset `next`. For datagrams: `value` is the group of the last object, `previous`
	 * its ID plus 1, and `left` has a bit for each of the objects before it that have arrived.
	 */
	struct subgroup_state state;
	struct subgroup_state scratch; /* working copy of `state` that the program parses with */
} SHARED;
_Static_assert(sizeof(struct relay_ingress) == 144, "relay_ingress has no hidden padding");

/* One subscriber's copy of an upstream stream, or of a track's datagrams.
 *
 * While the subscriber's stream is not open, `id` is RELAY_UNOPENED. A program run that opens the stream changes it to
 * RELAY_OPENING, and then to the stream's ID, or back to RELAY_UNOPENED if that ID was used for another stream
 * meanwhile. If userspace opens the stream, it changes RELAY_UNOPENED to RELAY_CLOSED first. All of these are
 * compare-and-exchange operations, so that exactly one side opens the stream.
 */
struct relay_egress {
	/* Stream ID or track alias on the publisher's connection. Each program run checks it, since userspace may have
	 * reused the entry.
	 */
	__u64 upstream_id;
	/* Stream ID on the subscriber's connection, or RELAY_CLOSED, RELAY_OPENING or RELAY_UNOPENED; for datagrams:
	 * the track alias.
	 */
	__u64 id;
	/* Offset on the subscriber's stream minus offset on the publisher's stream, modulo 2^64. For datagrams: ID of
	 * the first object of group `from` that is sent.
	 */
	__u64 shift;
	/* Offset on the publisher's stream before which userspace sends the bytes. For datagrams: first group that is
	 * sent.
	 */
	__u64 from;
	/* The MAX_STREAM_DATA limit of the subscriber's stream. For datagrams: last group that is sent. */
	__u64 max_offset;
	/* set by userspace: identifies this subscriber's copy in reports of sent packets (struct relay_forwarded) */
	__u64 tag;
	__u64 group; /* group ID that trace events show for this copy, set by userspace */
	__u64 counted; /* offset on the subscriber's stream up to which bytes have been counted against MAX_DATA */
	__u32 next; /* next subscriber's copy of the same data, or RELAY_END */
	__u32 downstream;
	__u32 upstream; /* index of the upstream connection on which the data arrives */
	/* `epoch` of the subscriber's connection (struct relay_downstream); 0: this table entry is not in use */
	__u32 epoch;
	/* Priority, 16 bits: smaller is more urgent. A datagram's own priority replaces the low 8 bits. */
	__u32 level;
	__u32 track; /* number by which trace events identify the track */
	__u32 kind;  /* enum relay_kind: copy of a stream or of datagrams */
	/* Set if the program serves every subscriber that needs the stream, so that the stream's packets need not wake
	 * userspace.
	 */
	__u32 exclusive;
	/* The fields from here to `pad` are used until the program opens the subscriber's stream. `level` has the
	 * track's default priority.
	 */
	__u64 alias;	   /* track alias that the subscriber knows */
	__u64 first_group; /* first group that the subscriber wants, from `first_object` on */
	__u64 first_object;
	__u64 last_group;
	__u32 ingress;
	__u32 pad;
} SHARED;

/* The network path and the destination connection ID of a connection on which media is sent. */
struct relay_path {
	struct net_path way;
	__u8 id_bytes;
	__u8 id[RELAY_ID_MAX];
	__u8 pad[3];
};

/* The result of sending one copy of a frame to one subscriber. */
enum relay_egress_outcome {
	RELAY_EGRESS_SENT = 0,
	RELAY_EGRESS_GONE, /* the subscription or its connection has ended */
	/* The stream bytes are before the range that the kernel may send; for datagrams: outside the range of objects
	 * that the subscriber requested.
	 */
	RELAY_EGRESS_BEFORE,
	RELAY_EGRESS_UNOPENED, /* the program could not open the stream, and userspace has not opened it yet */
	RELAY_EGRESS_STREAM_LIMIT, /* the peer's stream limit is reached, or userspace is about to open streams */
	RELAY_EGRESS_TOO_LARGE,	    /* the copy exceeds the MTU of the path or the route */
	RELAY_EGRESS_STREAM_CREDIT, /* the copy would exceed the peer's MAX_STREAM_DATA */
	RELAY_EGRESS_DATA_CREDIT,   /* the copy would exceed the kernel's share of the peer's MAX_DATA */
	RELAY_EGRESS_WINDOW,	    /* the copy would exceed the kernel's share of the congestion window */
	RELAY_EGRESS_BEHIND,	    /* data of the same or higher priority waits in userspace */
	RELAY_EGRESS_NO_KEYS,	    /* userspace has not installed the current key generation */
	RELAY_EGRESS_NO_ROUTE,
	RELAY_EGRESS_NO_NEIGHBOUR, /* the link address of the next hop is not known */
	RELAY_EGRESS_RING_FULL, /* the ring buffer `forwarded`, by which userspace learns of sent packets, is full */
	/* The packet was recorded in `forwarded` for userspace, but could not be built or sent; loss recovery will
	 * retransmit its data.
	 */
	RELAY_EGRESS_LOST,
	RELAY_EGRESS_OUTCOMES,
};

/* A socket to which deferred packets are steered. */
struct relay_deferral {
	__u64 packets; /* number of packets that were steered to the deferred socket */
	/* Number of packets that went to the ordinary socket instead of the deferred one, and wake userspace. */
	__u64 wakes;
	/* Set by userspace: the value of `wakes` when userspace had read all packets and went to sleep. */
	__u64 wakes_read;
	__u64 media; /* how many of the packets counted in `packets` came from publishers */
	__u64 taken; /* set by userspace: number of steered packets that were read or dropped */
	__u64 room;  /* set by userspace: the most packets that may wait in the deferred socket */
} SHARED;

/* The arrival time of a deferred packet. The low half of the packet's last 8 bytes, modulo RELAY_ARRIVALS, is the index
 * in `arrivals`. A later packet with the same index overwrites the entry.
 */
struct relay_arrival {
	/* High half: the high half of the packet's last 8 bytes, which identifies the packet; low half:
	 * CLOCK_MONOTONIC, microseconds, modulo 2^32.
	 */
	__u64 word;
} SHARED;

/* A connection on which media is sent.
 *
 * Limits and totals: the program adds to its total, then compares with the limit, and subtracts again if the limit is
 * exceeded. Userspace stores the limit, then reads the total. Keys and paths have two entries each: userspace changes
 * the unused entry, then switches to it with one store.
 */
struct relay_downstream {
	/* The next packet number and the key generation in one word, as in millrace-quic's module `number`. */
	__u64 number;
	__u64 max_data; /* the most stream bytes that the kernel may send in total */
	__u64 data;	/* stream bytes that the kernel has sent or is about to send */
	/* High half: the number of unidirectional streams that the kernel may open; low half: the index of the next
	 * stream. Both are in one word, so that the program and userspace cannot open the same stream.
	 */
	__u64 streams;
	__u64 web;	 /* ID of the WebTransport session, or WEB_BARE without one */
	__u64 max_bytes; /* the most bytes of UDP payload that the kernel may send in total */
	__u64 bytes;	 /* bytes of UDP payload that the kernel has sent or is about to send */
	/* distinguishes this connection from earlier ones that used this table entry; 0: the entry is not in use */
	__u32 epoch;
	__u32 mtu; /* largest UDP payload that fits the path, bytes */
	/* For even and odd generations: the generation of the installed keys plus 1; 0: no keys. */
	__u32 generations[2];
	__u32 path;    /* index of the entry of `paths` that is in use */
	__u32 session; /* ID of the session in trace events */
	/* Priority level of data that waits in userspace; copies of this level or less urgent are left to userspace. */
	__u32 waiting;
	__u32 max_datagram; /* the peer's max_datagram_frame_size, bytes */
	__u32 stream_bits;  /* low two bits of the IDs of the relay's unidirectional streams */
	__u32 pad;
	__u32 deferred_socket; /* index of the socket for the peer's deferred packets in `sockets`, plus 1; 0: none */
	__u32 deferred_bytes; /* largest UDP payload of a packet from the peer that may be deferred, bytes */
	__u64 deferred_until; /* the peer's packets are deferred only while `bytes`, the bytes sent, is at most this */
	__u64 deferred; /* number of the peer's packets that were steered to the deferred socket */
	struct relay_ring ring;
	__u64 lookups[RELAY_LOOKUPS];
	struct relay_path paths[2];
	__u64 outcomes[RELAY_EGRESS_OUTCOMES];
} SHARED;

/* A packet that the kernel sends. It is recorded for userspace in the ring buffer `forwarded` before it is sent. */
struct relay_forwarded {
	__u64 time_ns; /* time of sending, CLOCK_MONOTONIC */
	__u64 number;
	__u64 tag;
	__u64 id;     /* stream ID on the subscriber's connection, or the track alias of a datagram */
	__u64 offset; /* offset on the subscriber's stream, or the group ID of a datagram */
	__u64 object; /* object ID of a datagram. For a stream: number of bytes that count against MAX_DATA */
	__u32 downstream;
	__u32 epoch;
	__u16 len;  /* number of stream bytes, or length of the datagram */
	__u16 size; /* size of the packet's UDP payload, bytes */
	__u16 generation;
	__u8 fin;
	__u8 kind; /* enum relay_kind: stream or datagram */
};

/* What the program did with a received packet. The value is an index of a counter in the map `outcomes`. In that map,
 * the values of enum relay_egress_outcome, enum relay_further_run, enum relay_frame_outcome and enum relay_opening
 * follow.
 */
enum relay_outcome {
	RELAY_FORWARDED = 0, /* the program has tried to send every copy of the packet's frames */
	RELAY_CONTINUED,     /* the program has tried to send some copies; later runs make the other copies */
	RELAY_OVER_BUDGET,   /* the program has tried to send some copies; userspace sends the other copies */
	/* The program has tried to send copies, but had no memory to restore the received packet, so it is dropped. */
	RELAY_NOT_RESTORED,
	RELAY_NOT_UDP,
	RELAY_FRAGMENT,
	RELAY_MALFORMED, /* malformed link, IP or UDP header */
	RELAY_OTHER_PORT,
	/* A super-packet, merged by GRO or from a local sender with GSO, could not be segmented. */
	RELAY_SUPER_PACKET,
	RELAY_SEGMENTED,   /* a super-packet was segmented; each segment counts as a packet */
	RELAY_ODD_HEADERS, /* the packet has IPv4 options, IPv6 extension headers or stacked VLAN tags */
	RELAY_LONG_HEADER, /* the packet belongs to a handshake */
	RELAY_BAD_SIZE,	   /* the packet is too short for a 1-RTT packet */
	RELAY_TOO_LONG,	   /* the QUIC packet has more than QUIC_TEXT_MAX bytes, as with jumbo frames */
	RELAY_UNKNOWN_ID,  /* the packet belongs to no known connection */
	RELAY_NO_KEYS,
	RELAY_NOT_AUTHENTIC,
	RELAY_REPLAYED, /* the packet was replayed, or is too old for the replay window */
	RELAY_BAD_FRAMES,
	/* no frame of the packet belongs to a stream or track that userspace has set up for forwarding */
	RELAY_NO_SLOT,
	RELAY_BAD_STREAM, /* a stream is malformed, or exceeds its final size: nothing of the packet is forwarded */
	/* the packet has frames of streams set up for forwarding, but none may be forwarded, see enum
	 * relay_frame_outcome
	 */
	RELAY_DECLINED,
	RELAY_BUSY, /* this run has interrupted another run on the same CPU, which uses the CPU's work area */
	RELAY_FROM_SUBSCRIBER, /* the packet comes from a subscriber, and was not decrypted */
	RELAY_OUTCOMES,
};

/* The result of a program run that makes further copies of a packet which an earlier run began to forward. */
enum relay_further_run {
	RELAY_RUN_LAST = 0, /* the program has tried to send every copy of the packet */
	RELAY_RUN_CONTINUED,
	RELAY_RUN_LEFT, /* userspace sends the remaining copies of the packet */
	RELAY_FURTHER_RUNS,
};

/* Whether a STREAM frame, or a DATAGRAM frame with an object, may be forwarded, and if not, why. Only frames of streams
 * and tracks that are set up for forwarding count.
 */
enum relay_frame_outcome {
	RELAY_FRAME_GOOD = 0,
	RELAY_FRAME_REPEATED, /* some bytes of the frame have or may have arrived before */
	RELAY_FRAME_AHEAD,    /* earlier bytes of the stream have not arrived */
	RELAY_FRAME_BUSY,     /* another CPU or userspace works on the same stream */
	RELAY_FRAME_LONG,     /* the frame has more fields than the program can read */
	RELAY_FRAME_MALFORMED,
	RELAY_FRAME_OUTCOMES,
};

/* Whether the program begins to forward a publisher's new stream when its first bytes arrive, and if not, why. Counted
 * only for publishers with tracks for which the program may open subscribers' streams.
 */
enum relay_opening {
	/* the stream was assigned to an opening (an entry prepared for a future stream), so the program forwards it */
	RELAY_OPENING_BOUND = 0,
	/* The SUBGROUP_HEADER is incomplete or not in its shortest form, or the object ID that gives the subgroup its
	 * ID is missing.
	 */
	RELAY_OPENING_OTHER,
	/* The packet has only the WebTransport header of the stream; forwarding may begin with the stream's next bytes.
	 */
	RELAY_OPENING_PREAMBLE,
	RELAY_OPENING_NO_TRACK,
	RELAY_OPENING_ORDER,  /* the subgroup is not later than the subgroup of its track that began last */
	RELAY_OPENING_MISSED, /* the track has no unused opening (entry prepared for a future stream) */
	/* userspace opens this stream's copies, the stream is too old, or later bytes of it arrived first */
	RELAY_OPENING_TAKEN,
	RELAY_OPENING_BUSY, /* another CPU or userspace works on the same track */
	RELAY_OPENING_FULL, /* the map `slots` is full */
	RELAY_OPENING_OUTCOMES,
};

/* The filter that selects the packets and copies for which trace events are written. Userspace changes it while the
 * program runs.
 */
struct relay_tracing {
	__u32 every;   /* trace only packets whose packet number is a multiple of this; 0: trace none */
	__u32 track;   /* trace only subscribers' copies of this track's data; 0: of all tracks */
	__u32 session; /* trace only packets from or to this session; 0: all sessions */
	__u32 pad;
	__u64 lost; /* number of events that were dropped because the ring buffer was full */
} SHARED;

/* A trace event in the ring buffer `events`: what the program did with a copy, or with a received packet that was not
 * copied.
 */
struct relay_event {
	__u64 arrived_ns; /* arrival time of the received packet, CLOCK_MONOTONIC */
	__u64 time_ns;	  /* time when the copy or the packet was finished, CLOCK_MONOTONIC */
	__u64 received;	  /* packet number on the publisher's connection; 0: not known */
	__u64 number;	  /* packet number of the copy; 0: none was drawn */
	__u64 group;
	/* Stream ID on the subscriber's connection. For datagrams: the track alias; `offset` is the object ID then. */
	__u64 stream_id;
	__u64 offset;
	__u32 publisher;  /* session ID of the publisher */
	__u32 subscriber; /* ID of the subscriber's session */
	__u32 track;
	__u16 len;  /* number of stream bytes in the packet */
	__u16 size; /* size of the UDP payload, bytes; for a copy only if a packet number was drawn */
	/* 1: event of a copy; 0: event of the received packet, with 0 in the fields that describe a copy */
	__u8 is_copy;
	__u8 outcome; /* enum relay_egress_outcome of a copy, enum relay_outcome of a received packet */
	__u8 fin;
	__u8 pad[5];
};

#endif
