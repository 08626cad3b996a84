/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Structures and constants that the RTP fan-out shares with userspace. The build writes Rust's
 * types and constants from this header.
 */
#ifndef MILLRACE_FANOUT_INTF_H
#define MILLRACE_FANOUT_INTF_H

#include "bucket_intf.h"
#include "fan_intf.h"
#include "shared.h"
#include <linux/types.h>

#define FANOUT_REPORTS 8 /* number of latest sender reports that are stored, a power of two */

/* Configuration of the BPF program, which userspace sets before it loads the program. */
struct fanout_config {
	__u32 max_copies_per_run; /* largest number of copies of a received packet that one run makes */
	__u32 max_runs;		  /* largest number of runs of the program for one received packet */
};

/* Address and port that a stream's packets arrive at. IPv4 addresses are in the first 4 bytes. */
struct fanout_at {
	__u8 address[16];
	__be16 port;
	__u8 family; /* IP version: 4 or 6 */
	__u8 pad;
};

#define FANOUT_SSRC_KNOWN (1ULL << 32) /* set in fanout_stream.ssrc once its low 32 bits are an SSRC */

/* One sender's stream, which is copied to many receivers. */
struct fanout_stream {
	__u8 sender[16];  /* the sender's address, of the same family as the stream's */
	__be16 port;	  /* source port of the sender's RTP, and of its RTCP if `rtcp_port` is 0 */
	__be16 rtcp_port; /* source port of the sender's RTCP; 0: `port` */
	__u32 one_ssrc; /* not 0: only packets with `ssrc` are forwarded; if it is not set, the next packet sets it */
	__u64 ssrc;
	__u32 first;	 /* index of the stream's first receiver: the receivers of a stream are consecutive */
	__u32 receivers; /* number of the stream's receiver entries that may be in use */
	__u64 packets;	 /* packets that were fanned out; `bytes` counts their UDP payload */
	__u64 bytes;
	__u64 last_ns; /* arrival time of the latest packet, CLOCK_MONOTONIC */
	__u64 sent;    /* number of sender reports so far; `reports` has the latest ones */
	/* High half: the middle 32 bits of a report's NTP time. Low half: the time when the report passed
	 * this host, in microseconds of CLOCK_MONOTONIC modulo 2^32. A receiver repeats the NTP time, so the
	 * round trip follows (RFC 3550, section 6.4.1).
	 */
	__u64 reports[FANOUT_REPORTS];
	__u32 number; /* identifies the stream in trace events */
	__u32 pad;
} SHARED;

/* What happened to the copy of a packet for one receiver. */
enum fanout_copy_outcome {
	FANOUT_COPY_SENT = 0,
	FANOUT_COPY_ENDED,	  /* the receiver's lease has ended */
	FANOUT_COPY_RATE,	  /* the copy exceeds the receiver's rate limit */
	FANOUT_COPY_TOO_LARGE,	  /* the copy is larger than the route's MTU */
	FANOUT_COPY_NO_ROUTE,	  /* there is no route, or the receiver is on this host */
	FANOUT_COPY_NO_NEIGHBOUR, /* the next hop's link address is not known */
	FANOUT_COPY_CHANGED,	  /* userspace has just removed the receiver */
	FANOUT_COPY_LOST,	  /* the copy could not be written or queued */
	FANOUT_COPY_OUTCOMES,
};

/* One receiver's copy of a stream. Userspace writes 0 to `epoch`, then the other fields, then
 * another epoch. A reader that finds the same epoch before and after has read consistent fields.
 */
struct fanout_receiver {
	__u32 epoch;	/* 0: the entry is not in use */
	__u32 number;	/* identifies the receiver in trace events */
	__u64 until_ns; /* end of the lease, CLOCK_MONOTONIC: nothing is sent from then on */
	__u64 full_at;	/* time when the receiver's token bucket is full again, in ticks (bucket_intf.h) */
	struct bucket_rate rate; /* limit of bytes per time, all headers from IP on included */
	struct net_path path;
	__u32 pad;
	__u64 packets; /* packets that were sent; `bytes` counts their UDP payload */
	__u64 bytes;
	__u64 outcomes[FANOUT_COPY_OUTCOMES];
} SHARED;

/* The outcome of a received packet: an index into the map `outcomes`, in which enum
 * fanout_copy_outcome and enum fanout_further_run follow. Packets with an outcome up to FANOUT_TAKEN
 * are dropped after the copies were sent. All others go up the stack unchanged.
 */
enum fanout_outcome {
	FANOUT_FORWARDED = 0, /* sending was attempted for every receiver */
	/* This run of the program copied the packet to some receivers. Further runs copy it to the others. */
	FANOUT_CONTINUED,
	/* Some receivers got the packet, the others do not, since no further run of the program is allowed for it. */
	FANOUT_OVER_BUDGET,
	FANOUT_NOT_RESTORED, /* some receivers got the packet, the others do not, for want of memory */
	FANOUT_OTHER_SSRC,   /* the packet is from the sender, but does not have the SSRC that is forwarded */
	FANOUT_NOT_RTP,	     /* the packet is from the sender, but is neither RTP nor RTCP */
	FANOUT_NOT_UDP,
	FANOUT_FRAGMENT,
	FANOUT_MALFORMED, /* a link, IP or UDP header is malformed */
	FANOUT_OTHER,	  /* the packet is not addressed to a stream */
	FANOUT_NOT_SENDER, /* not from the stream's sender: a receiver's request or report, or a forged packet */
	FANOUT_SUPER_PACKET, /* merged by GRO, or sent with GSO by a local process: userspace fans out its segments */
	FANOUT_ODD_HEADERS, /* has IPv4 options, IPv6 extension headers or stacked VLAN tags: userspace fans it out */
	FANOUT_BUSY, /* this run interrupted another one that uses the CPU's variables: userspace fans the packet out */
	FANOUT_OUTCOMES,
};
/* the last value of enum fanout_outcome with which the packet is dropped */
#define FANOUT_TAKEN FANOUT_NOT_RTP

/* If one run of the program cannot copy a packet to all receivers, further runs continue. This is what such a further
 * run did.
 */
enum fanout_further_run {
	FANOUT_RUN_LAST = 0, /* sending was attempted for every remaining receiver */
	FANOUT_RUN_CONTINUED,
	FANOUT_RUN_LEFT, /* the remaining receivers do not get the packet */
	FANOUT_FURTHER_RUNS,
};

/* The filter that selects which packets become events. Userspace changes the filter while the program runs. */
struct fanout_tracing {
	__u32 every;	/* trace packets whose RTP sequence number is a multiple of this; 0: trace none */
	__u32 stream;	/* trace only the stream with this number; 0: any stream */
	__u32 receiver; /* trace only copies for the receiver with this number; 0: any receiver */
	__u32 pad;
	__u64 lost; /* events that were lost because the ring buffer was full */
} SHARED;

/* An event in the ring buffer `events`: what happened to the copy of a packet for one receiver, or to a sender's packet
 * that was not copied.
 */
struct fanout_event {
	__u64 arrived_ns; /* time when the packet arrived, CLOCK_MONOTONIC */
	__u64 time_ns; /* time when it was decided what happens to the copy or the packet, CLOCK_MONOTONIC */
	__u32 stream;
	__u32 receiver; /* number of the receiver; 0: the event is about the packet itself */
	__u32 ssrc;
	__u32 timestamp; /* RTP timestamp; 0 for RTCP */
	__u16 sequence;	 /* RTP sequence number; 0 for RTCP */
	__u16 size;	 /* bytes of UDP payload */
	__u8 outcome;	 /* enum fanout_copy_outcome of a copy, enum fanout_outcome of a packet */
	__u8 kind;	 /* second byte of the packet: RTP marker and payload type, or RTCP packet type */
	__u8 pad[2];
};

#endif
