/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the relay program shares with userspace. The build writes Rust's types and constants from here.
 *
 * An upstream is a connection that media arrives on, a downstream one that it leaves on. A slot is a stream of an
 * upstream, or a track whose objects come as its datagrams; an egress is one subscriber's copy of that.
 *
 * `upstreams`, `ingresses`, `egresses` and `downstreams` are mapped into the relay process. Both sides use atomic operations on the
 * words that they share. An entry is reused only after every program run that may have seen it has ended.
 */
#ifndef MILLRACE_RELAY_INTF_H
#define MILLRACE_RELAY_INTF_H

#include "crypto_intf.h"
#include "fan_intf.h"
#include "subgroup_intf.h"
#include "shared.h"
#include <linux/types.h>

#define RELAY_ID_MAX	  20 /* longest connection ID of QUIC version 1 */
#define RELAY_PORTS	  4
#define RELAY_SEEN	  8	      /* words of a window of streams, 32 each */
#define RELAY_NUMBERS	  128	      /* words of the replay window, 32 packet numbers each */
#define RELAY_NUMBER_BITS 48	      /* of the packet number word; the key generation is above */
#define RELAY_END	  0xffffffffU /* no further egress */
#define RELAY_UNKNOWN	  (~0ULL)     /* size of a stream whose end has not come */
#define RELAY_SUBSCRIBER  0x80000000U /* in `ids`: the rest is the index of a downstream */
#define RELAY_ARRIVALS	  4096	      /* entries of `arrivals`, a power of two */
#define RELAY_OPENINGS	  64	      /* of a track, a power of two */
#define RELAY_UNBOUND	  (~0ULL)     /* ID of an ingress whose stream has not begun */

/* IDs of an egress without a stream; those from RELAY_CLOSED on are none. */
#define RELAY_UNOPENED (~0ULL)	   /* the program may open one */
#define RELAY_OPENING  (~0ULL - 1) /* it is about to */
#define RELAY_CLOSED   (~0ULL - 2) /* userspace does */

/* Load-time configuration. */
struct relay_config {
	__u32 max_copies_per_run;  /* of one received packet */
	__u32 max_runs;		   /* of the program, for one received packet */
	__u32 id_bytes;		   /* length of the connection IDs that this relay hands out */
	__be16 ports[RELAY_PORTS]; /* UDP ports that the relay listens on; 0: unused */
};

/* A connection ID, filled up with zeroes. */
struct relay_id {
	__u8 bytes[RELAY_ID_MAX];
};

/* Where in the map `keystreams` a direction of a connection has its ring: the keystream of packet number n belongs at
 * start + n % len. One word, since both change together.
 */
struct relay_ring {
	__u64 run; /* high half: len, a power of two, or 0 for no ring; low half: start */
};

/* The precomputed keystream of one packet. Userspace clears `word`, changes the rest, and sets it again. */
struct relay_keystream {
	__u64 word;  /* the packet's number word plus 1; 0: nothing is here */
	__u32 bytes; /* of text that it covers */
	__u32 pad;
	struct quic_keystream keystream;
} SHARED;

/* How the look-up of a precomputed keystream ended. After all but a hit, the program computes it. */
enum relay_lookup {
	RELAY_LOOKUP_HIT = 0,
	RELAY_LOOKUP_STALE, /* the entry is another packet's, too short, or just being replaced */
	RELAY_LOOKUP_MISS,  /* there is no entry, or nothing in it */
	RELAY_LOOKUPS,
};

/* A connection that media arrives on. */
struct relay_upstream {
	__u64 expected; /* one more than the largest packet number that was authentic */
	/* The replay window. Each word is about 32 numbers: high half: number / 32; low half: a bit for each that was seen. */
	__u64 seen[RELAY_NUMBERS];
	__u64 streams
		[RELAY_SEEN]; /* the same of unidirectional streams that somebody has taken, by their index */
	__u64 preambles[RELAY_SEEN]; /* and of those of which only the session's preamble has come */
	__u64 late[RELAY_SEEN];	     /* and of those of which something came before their beginning */
	__u64 web;		     /* ID of its WebTransport session, or WEB_BARE */
	__u32 generations[2]; /* by key phase: one more than the generation of its keys, 0 without keys */
	struct relay_ring ring;
	__u64 lookups[RELAY_LOOKUPS];
	__u32 session;	       /* its name in events */
	__u32 deferred_socket; /* one more than its index in `sockets`; 0: none */
	__u32 deferred;	       /* packets that were steered there, or nearly were */
	__u32 tracks;	       /* of which the program may open streams */
} SHARED;

enum relay_kind {
	RELAY_STREAM = 0,
	RELAY_DATAGRAMS, /* of a track */
	RELAY_TRACK,	 /* whose streams the program may open: names an entry of `tracks` */
};

/* Names a stream or a track of an upstream. */
struct relay_slot {
	__u64 id; /* of the stream, or the track's alias */
	__u32 upstream;
	__u32 kind; /* enum relay_kind */
};

/* A track whose streams the program may open. An opening is an ingress with its egresses, prepared for whatever stream
 * begins next; whoever takes the lock may take one out.
 */
struct relay_track {
	__u64 alias;
	__u32 upstream;
	__u32 lock;	/* 0: nobody has it */
	__u64 group;	/* of the subgroup that began last; only what comes behind it is opened here */
	__u64 subgroup; /* its ID in the group */
	__u32 put;	/* openings that were put in so far */
	__u32 taken;	/* that were taken out */
	__u32 low;	/* openings that are left when userspace should be woken to prepare more */
	__u32 missed;	/* streams that found none */
	__u32 openings[RELAY_OPENINGS]; /* indexes of ingresses, by number modulo RELAY_OPENINGS */
} SHARED;
_Static_assert(sizeof(struct relay_track) == 48 + 4 * RELAY_OPENINGS, "relay_track has no hidden padding");

/* What is in a slot, and how far a stream was judged. Whoever takes the lock has the rest to himself; who finds it taken
 * does without.
 */
struct relay_ingress {
	__u64 id; /* of the slot, since the entry may have become another slot's before a run uses it */
	__u32 upstream;
	__u32 kind;
	__u32 first;	  /* egress, or RELAY_END */
	__u32 lock;	  /* 0: nobody has it */
	__u64 next;	  /* the stream's bytes before this offset were judged, here or by userspace */
	__u64 final_size; /* the stream's size, or RELAY_UNKNOWN */
	/* Bytes that came behind a hole, without gaps. Before `next`: none. */
	__u64 run;
	__u64 run_end;
	/* Where bytes lie that came behind `next`, or that were not looked at. Userspace has some of them, and keeps them. Before
	 * `next`: there are none.
	 */
	__u64 apart;
	__u64 apart_end;
	__u32 contradicted; /* userspace's: something else may have been forwarded than it has */
	__u32 pad;
	/* At `next`. Of datagrams: `value` is the group of the last object, `previous` one more than its ID, and `left` has a bit
	 * for each of those before it that have come.
	 */
	struct subgroup_state state;
	struct subgroup_state scratch; /* the program's */
} SHARED;
_Static_assert(sizeof(struct relay_ingress) == 144, "relay_ingress has no hidden padding");

/* One subscriber's copy of an upstream stream, or of a track's datagrams. */
struct relay_egress {
	__u64 upstream_id; /* of the slot, since the entry may have become another slot's before a run uses it */
	__u64 id;	   /* downstream: stream ID, RELAY_UNOPENED and its like, or the track's alias */
	__u64 shift; /* downstream offset minus upstream offset, modulo 2^64. Datagrams: first object of `from` */
	__u64 from; /* upstream offset; what begins before it is left to userspace. Datagrams: first group */
	__u64 max_offset; /* downstream; the peer's MAX_STREAM_DATA. Datagrams: last group */
	__u64 tag;	  /* userspace's, for registrations */
	__u64 group;	  /* userspace's, for events */
	__u64 counted; /* downstream offset up to which bytes were counted against MAX_DATA; what is skipped counts */
	__u32 next; /* egress of the slot, or RELAY_END */
	__u32 downstream;
	__u32 upstream;	 /* of the slot */
	__u32 epoch;	 /* of the downstream; 0: not in use */
	__u32 level;	 /* priority, 16 bits: smaller is more urgent. A datagram's own replaces the low 8 */
	__u32 track;	 /* its name in events */
	__u32 kind;	 /* of the slot */
	__u32 exclusive; /* nobody waits for the stream but the slot's egresses: its packets may be deferred */
	/* Of one that was prepared, until the program opens its stream. Its level has the track's default priority. */
	__u64 alias;	   /* of the track downstream */
	__u64 first_group; /* what the subscriber wants of the track, from this object of this group on */
	__u64 first_object;
	__u64 last_group;
	__u32 ingress;
	__u32 pad;
} SHARED;

/* Where a downstream's packets go. */
struct relay_path {
	struct net_path way;
	__u8 id_bytes;
	__u8 id[RELAY_ID_MAX];
	__u8 pad[3];
};

/* What became of a copy. */
enum relay_egress_outcome {
	RELAY_EGRESS_SENT = 0,
	RELAY_EGRESS_GONE, /* the egress was removed, or the downstream */
	RELAY_EGRESS_BEFORE, /* begins before what the kernel may send; datagrams: outside of what the subscriber wants */
	RELAY_EGRESS_UNOPENED,	    /* its stream was not opened here, and userspace has not done so yet */
	RELAY_EGRESS_STREAM_LIMIT,  /* the peer allows no more streams, or userspace is about to open some */
	RELAY_EGRESS_TOO_LARGE,	    /* for the path's or the route's MTU */
	RELAY_EGRESS_STREAM_CREDIT, /* beyond the peer's MAX_STREAM_DATA */
	RELAY_EGRESS_DATA_CREDIT,   /* beyond the kernel's budget of the peer's MAX_DATA */
	RELAY_EGRESS_WINDOW,	    /* beyond the kernel's budget of the congestion window */
	RELAY_EGRESS_BEHIND,	    /* something as urgent waits in userspace */
	RELAY_EGRESS_NO_KEYS,	    /* userspace has not installed the generation that is in use */
	RELAY_EGRESS_NO_ROUTE,
	RELAY_EGRESS_NO_NEIGHBOUR, /* the next hop's link address is not known */
	RELAY_EGRESS_RING_FULL,	   /* no room in `forwarded` to register it */
	RELAY_EGRESS_LOST, /* registered, but it could not be written or queued: loss recovery will find that */
	RELAY_EGRESS_OUTCOMES,
};

/* A socket that deferred packets are steered to. */
struct relay_deferral {
	__u64 packets; /* that were steered there */
	__u64 wakes;   /* packets of the same connections that went to the other socket, and wake userspace */
	__u64 wakes_read; /* userspace's: all of so many `wakes` it had read when it went to sleep */
	__u64 media;	  /* of `packets`, those of publishers */
	__u64 taken;	  /* userspace's: of `packets`, those that no longer wait there */
	__u64 room;	  /* userspace's: packets that may wait there */
} SHARED;

/* When a deferred packet arrived. The low half of its last 8 bytes is the index in `arrivals`, modulo RELAY_ARRIVALS; a
 * later packet with the same index takes the entry.
 */
struct relay_arrival {
	__u64 word; /* high half: that of the 8 bytes; low half: CLOCK_MONOTONIC in microseconds, modulo 2^32 */
} SHARED;

/* A connection that media leaves on. */
struct relay_downstream {
	__u64 number;	/* the packet number word: millrace-quic's number */
	__u64 max_data; /* total of stream bytes that the kernel may send */
	__u64 data;	/* that it has sent or is about to */
	/* High half: unidirectional streams that the kernel may have opened; low half: index of the next one. One word, so
	 * that nobody opens any while the other does.
	 */
	__u64 streams;
	__u64 web;	      /* ID of its WebTransport session, or WEB_BARE */
	__u64 max_bytes;      /* total of UDP payload that it may send */
	__u64 bytes;	      /* that it has sent or is about to */
	__u32 epoch;	      /* 0: not in use */
	__u32 mtu;	      /* UDP payload bytes */
	__u32 generations[2]; /* by parity: one more than the generation of its keys, 0 without keys */
	__u32 path;	      /* which of `paths` is in use */
	__u32 session;	      /* its name in events */
	__u32 waiting; /* level of what waits in userspace: copies of this level, or less urgent, are left to it */
	__u32 max_datagram; /* the peer's max_datagram_frame_size */
	__u32 stream_bits;  /* low bits of the IDs of this end's unidirectional streams */
	__u32 pad;
	__u32 deferred_socket; /* one more than its index in `sockets`; 0: none */
	__u32 deferred_bytes; /* a packet of the peer is deferred if its UDP payload has at most so many ... */
	__u64 deferred_until; /* ... and `bytes` is at most this */
	__u64 deferred;	      /* packets that were steered there */
	struct relay_ring ring;
	__u64 lookups[RELAY_LOOKUPS];
	struct relay_path paths[2];
	__u64 outcomes[RELAY_EGRESS_OUTCOMES];
} SHARED;

/* A packet that the kernel sends: registered in the ring buffer `forwarded` before it leaves. */
struct relay_forwarded {
	__u64 time_ns; /* CLOCK_MONOTONIC */
	__u64 number;
	__u64 tag;
	__u64 id;     /* of the stream downstream; the alias of a datagram */
	__u64 offset; /* downstream; group of a datagram */
	__u64 object; /* of a datagram. Of a stream: bytes that count against MAX_DATA */
	__u32 downstream;
	__u32 epoch;
	__u16 len;  /* stream bytes, or of the datagram */
	__u16 size; /* UDP payload bytes */
	__u16 generation;
	__u8 fin;
	__u8 kind; /* enum relay_kind */
};

/* What became of a received packet: index into the map `outcomes`, where enum relay_egress_outcome, enum
 * relay_further_run, enum relay_frame_outcome and enum relay_opening follow.
 */
enum relay_outcome {
	RELAY_FORWARDED = 0, /* every copy was tried */
	RELAY_CONTINUED,     /* some copies were tried, the others are left to further runs */
	RELAY_OVER_BUDGET,   /* some copies were tried, the others are left to userspace */
	RELAY_NOT_RESTORED, /* copies were tried, but there was no memory to restore the packet: it is dropped */
	RELAY_NOT_UDP,
	RELAY_FRAGMENT,
	RELAY_MALFORMED, /* link, IP or UDP header */
	RELAY_OTHER_PORT,
	RELAY_SUPER_PACKET, /* merged by GRO or from a local sender with GSO */
	RELAY_ODD_HEADERS,  /* IPv4 options, IPv6 extension headers, stacked VLAN tags */
	RELAY_LONG_HEADER,  /* handshake */
	RELAY_BAD_SIZE,	    /* too short for a 1-RTT packet, or longer than any that is forwarded */
	RELAY_UNKNOWN_ID,   /* of no connection that is known */
	RELAY_NO_KEYS,
	RELAY_NOT_AUTHENTIC,
	RELAY_REPLAYED, /* or too old to tell */
	RELAY_BAD_FRAMES,
	RELAY_NO_SLOT, /* no frame that has a slot */
	RELAY_BAD_STREAM, /* a stream's bytes are malformed, or beyond its final size: nothing in the packet is forwarded */
	RELAY_DECLINED,	       /* there are slots, but no frame may be forwarded: enum relay_frame_outcome */
	RELAY_BUSY,	       /* a run was interrupted by this one, which has nothing to work with */
	RELAY_FROM_SUBSCRIBER, /* of a downstream that is no upstream: not opened */
	RELAY_OUTCOMES,
};

/* What became of a packet in a run after its first. */
enum relay_further_run {
	RELAY_RUN_LAST = 0, /* every copy has been tried */
	RELAY_RUN_CONTINUED,
	RELAY_RUN_LEFT, /* the other copies are left to userspace */
	RELAY_FURTHER_RUNS,
};

/* What became of a frame that has a slot: of a stream, or a datagram with an object. */
enum relay_frame_outcome {
	RELAY_FRAME_GOOD = 0,
	RELAY_FRAME_REPEATED, /* some of it came before, or may have */
	RELAY_FRAME_AHEAD,    /* of what is before it, something has not come */
	RELAY_FRAME_BUSY,     /* another CPU, or userspace, is at the same stream */
	RELAY_FRAME_LONG,     /* more fields than are looked at */
	RELAY_FRAME_MALFORMED,
	RELAY_FRAME_OUTCOMES,
};

/* What became of the beginning of a stream that has no slot, of an upstream with tracks whose streams may be opened. */
enum relay_opening {
	RELAY_OPENING_BOUND = 0, /* it has one now */
	RELAY_OPENING_OTHER, /* no whole SUBGROUP_HEADER in the shortest form, or it wants the first object */
	RELAY_OPENING_PREAMBLE, /* that of its WebTransport session: what follows may get one */
	RELAY_OPENING_NO_TRACK,
	RELAY_OPENING_ORDER,  /* not behind the subgroup that began last */
	RELAY_OPENING_MISSED, /* userspace has not prepared any more yet */
	RELAY_OPENING_TAKEN, /* userspace was faster, the stream is an old one, or something else of it came first */
	RELAY_OPENING_BUSY, /* another CPU, or userspace, is at the same track */
	RELAY_OPENING_FULL, /* there is no slot left */
	RELAY_OPENING_OUTCOMES,
};

/* Whose packets become events; userspace changes it while the program runs. */
struct relay_tracing {
	__u32 every;   /* packets whose number is a multiple of this; 0: none */
	__u32 track;   /* only copies of this track; 0: any */
	__u32 session; /* only from or to this session; 0: any */
	__u32 pad;
	__u64 lost; /* events for which there was no room */
} SHARED;

/* What became of a copy, or of a packet of an upstream that did not become copies: in the ring buffer `events`. */
struct relay_event {
	__u64 arrived_ns; /* CLOCK_MONOTONIC */
	__u64 time_ns;	  /* when the copy, or the packet, had been dealt with */
	__u64 received;	  /* packet number upstream; 0: not known */
	__u64 number;	  /* of the copy, if a packet number was drawn */
	__u64 group;
	__u64 stream_id; /* downstream, as is the offset. Datagrams: alias and object */
	__u64 offset;
	__u32 publisher;  /* session */
	__u32 subscriber; /* session */
	__u32 track;
	__u16 len;    /* stream bytes */
	__u16 size;   /* UDP payload; of a copy only if a number was drawn */
	__u8 is_copy; /* 0: about the packet itself; what is only known of copies is 0 */
	__u8 outcome; /* enum relay_egress_outcome of a copy, enum relay_outcome of a packet */
	__u8 fin;
	__u8 pad[5];
};

#endif
