/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the relay program shares with userspace. The Rust mirrors are in relay/intf.rs, whose test compares
 * sizes and offsets with the BTF of the compiled object.
 *
 * `upstreams`, `egresses` and `downstreams` are mapped into the relay process. Words that both sides touch are
 * only touched atomically; an entry is only reused after every program run that may have seen it has ended.
 */
#ifndef MILLRACE_RELAY_INTF_H
#define MILLRACE_RELAY_INTF_H

#include "crypto_intf.h"
#include <linux/types.h>

#define RELAY_ID_MAX	  20 /* longest connection ID of QUIC version 1 */
#define RELAY_PORTS	  4
#define RELAY_SEEN	  8	      /* words of the replay window */
#define RELAY_NUMBER_BITS 48	      /* of the number word; the key generation is above */
#define RELAY_END	  0xffffffffU /* no further egress */
#define RELAY_SUBSCRIBER  0x80000000U /* in `ids`: the rest is the index of a downstream */
#define RELAY_ARRIVALS	  4096	      /* entries of `arrivals`, a power of two */

/* Load-time configuration. */
struct relay_config {
	__u32 max_copies_per_run;  /* packets that one received packet may become in one run of the program */
	__u32 max_runs;		   /* that one received packet may take */
	__u32 id_bytes;		   /* length of the connection IDs that this relay hands out */
	__be16 ports[RELAY_PORTS]; /* UDP ports that it listens on; 0: unused */
};

/* Key of the map `ids`: a connection ID and zeroes. The value is the index of the upstream, or RELAY_SUBSCRIBER and that
 * of the downstream if nothing is forwarded from the connection.
 */
struct relay_id {
	__u8 bytes[RELAY_ID_MAX];
};

/* Keystreams of the packets to come, entries of the map `keystreams`: that of packet number n is, if
 * userspace was in time, at start + n % len. One word, since both change together.
 */
struct relay_ring {
	__u64 run; /* len in the high half, a power of two, 0: no ring; start in the low half */
};

/* Userspace clears `word` before it changes anything else, and sets it afterwards. */
struct relay_keystream {
	__u64 word; /* one more than generation and number in the form of the number word; 0: nothing there */
	__u32 bytes; /* of text that it is enough for */
	__u32 pad;
	struct quic_keystream keystream;
};

/* Where a packet's keystream came from. */
enum relay_lookup {
	RELAY_LOOKUP_HIT = 0,
	RELAY_LOOKUP_STALE, /* computed here: the entry was another packet's, too short, or just being replaced */
	RELAY_LOOKUP_MISS, /* computed here: nothing was there */
	RELAY_LOOKUPS,
};

/* A connection that media arrives on. */
struct relay_upstream {
	__u64 expected; /* one more than the largest packet number that was authentic */
	/* Ring of 32 numbers each: number / 32 in the high half, a bit for each number seen in the low half. */
	__u64 seen[RELAY_SEEN];
	__u32 generations[2]; /* by key phase: one more than the generation of its keys, 0 without keys */
	struct relay_ring ring;
	__u64 lookups[RELAY_LOOKUPS];
	__u32 session;	       /* its name in events */
	__u32 deferred_socket; /* one more than its index in `sockets`; 0: none */
	__u32 deferred;	       /* packets that went there, or nearly did */
	__u32 pad;
};

enum relay_kind {
	RELAY_STREAM = 0,
	RELAY_DATAGRAMS, /* of a track */
};

/* Key of the map `slots`. The value is the index of the first egress. */
struct relay_slot {
	__u64 id; /* of the stream, or the track's alias */
	__u32 upstream;
	__u32 kind; /* enum relay_kind */
};

/* One subscriber's copy of an upstream stream, or of a track's datagrams. */
struct relay_egress {
	__u64 upstream_id; /* ID of the slot: a slot's value may be another slot's by the time it is used */
	__u64 id;	   /* downstream: of the stream, or the track's alias */
	__u64 shift; /* downstream offset minus upstream offset, modulo 2^64. Datagrams: first object of `from` */
	__u64 from; /* upstream offset; what begins before it is left to userspace. Datagrams: first group */
	__u64 max_offset; /* downstream; the peer's MAX_STREAM_DATA. Datagrams: last group */
	__u64 tag;	  /* userspace's, for registrations */
	__u64 group;	  /* userspace's, for events */
	__u32 next;	  /* egress of the same slot, or RELAY_END */
	__u32 downstream;
	__u32 upstream; /* of the slot */
	__u32 epoch;	/* that the downstream must have */
	__u32 level; /* of urgency, 16 bits: smaller is more urgent. A datagram's own priority replaces the low 8 */
	__u32 track;	 /* its name in events */
	__u32 kind;	 /* of the slot */
	__u32 exclusive; /* nobody but the slot's egresses waits for the stream: userspace may hear of it later */
};

/* Where a downstream's packets go: IPv4 addresses are in the first 4 bytes, the rest zero. */
struct relay_path {
	__u8 local[16];
	__u8 remote[16];
	__be16 local_port;
	__be16 remote_port;
	__be32 flow_label;  /* IPv6, 20 bits */
	__u8 family;	    /* 4 or 6 */
	__u8 traffic_class; /* DSCP and ECN */
	__u8 id_bytes;
	__u8 id[RELAY_ID_MAX];
	__u8 pad;
};

/* What became of an egress. */
enum relay_egress_outcome {
	RELAY_EGRESS_SENT = 0,
	RELAY_EGRESS_GONE, /* the slot or the downstream is another one by now */
	RELAY_EGRESS_BEFORE, /* starts in front of what the kernel may send; datagrams: outside of the egress's groups */
	RELAY_EGRESS_TOO_LARGE,	    /* for the path, or for the route's MTU */
	RELAY_EGRESS_STREAM_CREDIT, /* beyond the peer's MAX_STREAM_DATA */
	RELAY_EGRESS_DATA_CREDIT,   /* beyond the kernel's share of the peer's MAX_DATA */
	RELAY_EGRESS_WINDOW,	    /* beyond the kernel's share of the congestion window */
	RELAY_EGRESS_BEHIND,	    /* something as urgent waits in userspace */
	RELAY_EGRESS_NO_KEYS,	    /* userspace has not installed the generation that is in use */
	RELAY_EGRESS_NO_ROUTE,
	RELAY_EGRESS_NO_NEIGHBOUR, /* the next hop's link address is not known */
	RELAY_EGRESS_RING_FULL,	   /* no room to register what would be sent */
	RELAY_EGRESS_LOST, /* registered, but the packet could not be written or queued: loss recovery's */
	RELAY_EGRESS_OUTCOMES,
};

/* A socket that userspace looks at only now and then. */
struct relay_deferral {
	__u64 packets; /* that were led there */
	__u64 others;  /* of the same connections, that were not */
	__u64 heard;   /* userspace's: `others` that it has read all of, before it went to sleep */
	__u64 media;   /* of `packets`, those of publishers */
	__u64 taken;   /* userspace's: of `packets`, those that do not wait there any more */
	__u64 room;    /* userspace's: packets that may wait there */
};

/* When a packet arrived that a deferred socket may get, by its last 8 bytes: the low half of them is the index in
 * `arrivals`, modulo RELAY_ARRIVALS, the high half is here. An entry is lost to a later packet with the same index.
 */
struct relay_arrival {
	__u64 word; /* of the packet in the high half; CLOCK_MONOTONIC in microseconds, modulo 2^32, in the low half */
};

/* A subscriber's connection. */
struct relay_downstream {
	__u64 number;	      /* the word of millrace-proto's quic::number */
	__u64 max_data;	      /* total of stream bytes that the kernel may send */
	__u64 data;	      /* that it has sent or is about to */
	__u64 max_bytes;      /* total of UDP payload that it may send */
	__u64 bytes;	      /* that it has sent or is about to */
	__u32 epoch;	      /* 0: not in use */
	__u32 mtu;	      /* UDP payload bytes */
	__u32 generations[2]; /* by parity: one more than the generation of its keys, 0 without keys */
	__u32 path;	      /* which of the two is in use */
	__u32 session;	      /* its name in events */
	__u32 waiting; /* level of what waits in userspace: egresses of this one, or less urgent, are userspace's */
	__u32 max_datagram;    /* the peer's max_datagram_frame_size */
	__u32 deferred_socket; /* one more than its index in `sockets`; 0: none */
	__u32 deferred_bytes; /* UDP payload that a packet of the peer may have and be no hurry for userspace ... */
	__u64 deferred_until; /* ... while `bytes` is not beyond this */
	__u64 deferred;	      /* packets that went there */
	struct relay_ring ring;
	__u64 lookups[RELAY_LOOKUPS];
	struct relay_path paths[2];
	__u64 outcomes[RELAY_EGRESS_OUTCOMES];
};

/* A packet that the kernel sends, in the ring buffer `forwarded` before it leaves. */
struct relay_forwarded {
	__u64 time_ns; /* CLOCK_MONOTONIC */
	__u64 number;
	__u64 tag;
	__u64 offset; /* downstream; group of a datagram */
	__u64 object; /* of a datagram */
	__u32 downstream;
	__u32 epoch;
	__u16 len;  /* stream bytes, or of the datagram */
	__u16 size; /* UDP payload bytes */
	__u16 generation;
	__u8 fin;
	__u8 kind; /* enum relay_kind */
};

/* What became of a received packet: index into the map `outcomes`, where enum relay_egress_outcome and enum
 * relay_further_run follow.
 */
enum relay_outcome {
	RELAY_FORWARDED = 0, /* its egresses were tried */
	RELAY_CONTINUED,     /* some of them were, the others are in further runs */
	RELAY_OVER_BUDGET,   /* some of them were, the others are left to userspace */
	RELAY_NOT_RESTORED, /* as RELAY_FORWARDED, but out of memory for the original: the one that is dropped */
	RELAY_NOT_UDP,
	RELAY_FRAGMENT,
	RELAY_MALFORMED, /* link, IP or UDP header */
	RELAY_OTHER_PORT,
	RELAY_SUPER_PACKET, /* merged by GRO or from a local sender with GSO */
	RELAY_ODD_HEADERS,  /* IPv4 options, IPv6 extension headers, stacked VLAN tags */
	RELAY_LONG_HEADER,  /* handshake */
	RELAY_BAD_SIZE,	    /* too short for a 1-RTT packet, or longer than any that is forwarded */
	RELAY_UNKNOWN_ID,   /* not an upstream */
	RELAY_NO_KEYS,
	RELAY_NOT_AUTHENTIC,
	RELAY_REPLAYED, /* or too old to tell */
	RELAY_BAD_FRAMES,
	RELAY_NO_SLOT,	       /* no frame that has a slot */
	RELAY_FROM_SUBSCRIBER, /* of a connection that nothing is forwarded from: not opened */
	RELAY_OUTCOMES,
};

/* What became of a packet in a run that went on with it. */
enum relay_further_run {
	RELAY_RUN_LAST = 0, /* all its egresses were tried by now */
	RELAY_RUN_CONTINUED,
	RELAY_RUN_LEFT, /* the other egresses are left to userspace */
	RELAY_FURTHER_RUNS,
};

/* Whose packets become events; userspace changes it while the program runs. */
struct relay_tracing {
	__u32 every;   /* of an upstream's packets those whose number is a multiple of it; 0: none */
	__u32 track;   /* only about copies of it; 0: any */
	__u32 session; /* only where it is the publisher or the subscriber; 0: any */
	__u32 pad;
	__u64 lost; /* events for which there was no room */
};

/* What became of a copy of a frame of an upstream's packet, or of a packet that was not just copied, in the ring buffer
 * `events`.
 */
struct relay_event {
	__u64 arrived_ns; /* CLOCK_MONOTONIC */
	__u64 time_ns;	  /* when it, or the copy, had been dealt with */
	__u64 received;	  /* packet number upstream; 0 where it could not be told */
	__u64 number;	  /* of the copy, if one was drawn */
	__u64 group;
	__u64 stream_id; /* downstream, as is the offset; of a datagram alias and object */
	__u64 offset;
	__u32 publisher;  /* session */
	__u32 subscriber; /* session */
	__u32 track;
	__u16 len;    /* stream bytes */
	__u16 size;   /* UDP payload; of a copy only if a number was drawn */
	__u8 is_copy; /* otherwise it is about the packet itself, and the rest about it is 0 */
	__u8 outcome; /* enum relay_egress_outcome of a copy, enum relay_outcome of a packet */
	__u8 fin;
	__u8 pad[5];
};

#endif
