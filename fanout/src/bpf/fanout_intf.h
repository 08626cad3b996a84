/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the fan-out of RTP shares with userspace. The build writes Rust's types and constants from here. */
#ifndef MILLRACE_FANOUT_INTF_H
#define MILLRACE_FANOUT_INTF_H

#include "bucket_intf.h"
#include "fan_intf.h"
#include "shared.h"
#include <linux/types.h>

#define FANOUT_REPORTS 8 /* of the sender that are remembered, a power of two */

/* Load-time configuration. */
struct fanout_config {
	__u32 max_copies_per_run; /* of one received packet */
	__u32 max_runs;		  /* of the program, for one received packet */
};

/* Where a stream's packets arrive. IPv4 addresses are in the first 4 bytes. */
struct fanout_at {
	__u8 address[16];
	__be16 port;
	__u8 family; /* 4 or 6 */
	__u8 pad;
};

#define FANOUT_SSRC_KNOWN (1ULL << 32) /* in `ssrc` of a stream: the low half is one */

/* What one sender sends to many receivers. */
struct fanout_stream {
	__u8 sender[16];  /* its address, of the family of the stream's own */
	__be16 port;	  /* that its RTP comes from, and its RTCP too, unless */
	__be16 rtcp_port; /* not 0: its RTCP comes from there */
	__u32 one_ssrc;	  /* only packets of `ssrc`; of whatever comes first, where it is not known */
	__u64 ssrc;
	__u32 first;   /* of its legs: they lie in a row */
	__u32 legs;    /* how many of them may be in use */
	__u64 packets; /* that were fanned out, with their UDP payload */
	__u64 bytes;
	__u64 last_ns; /* when the latest one arrived, CLOCK_MONOTONIC */
	__u64 sent;    /* sender reports so far, of which the latest are in `reports` */
	/* High half: the middle 32 bits of a report's NTP time; low half: when it passed, in CLOCK_MONOTONIC's microseconds,
	 * modulo 2^32. What a receiver says of that report tells the round trip (RFC 3550, section 6.4.1).
	 */
	__u64 reports[FANOUT_REPORTS];
	__u32 number; /* its name in events */
	__u32 pad;
} SHARED;

/* What became of a copy. */
enum fanout_leg_outcome {
	FANOUT_LEG_SENT = 0,
	FANOUT_LEG_ENDED,	 /* its lease */
	FANOUT_LEG_RATE,	 /* beyond its cap */
	FANOUT_LEG_TOO_LARGE,	 /* for the route's MTU */
	FANOUT_LEG_NO_ROUTE,	 /* or the receiver is on this host */
	FANOUT_LEG_NO_NEIGHBOUR, /* the next hop's link address is not known */
	FANOUT_LEG_CHANGED,	 /* userspace has just taken it away */
	FANOUT_LEG_LOST,	 /* it could not be written or queued */
	FANOUT_LEG_OUTCOMES,
};

/* One receiver's copy of a stream. Userspace writes 0 to `epoch`, then the rest, then another epoch: who has read the same one
 * before and after has read what belongs together.
 */
struct fanout_leg {
	__u32 epoch;		 /* 0: not in use */
	__u32 number;		 /* its name in events */
	__u64 until_ns;		 /* from then on nothing is sent, CLOCK_MONOTONIC */
	__u64 full_at;		 /* of its bucket, in ticks: bucket.h */
	struct bucket_rate rate; /* of bytes, with all headers from IP on */
	struct net_path path;
	__u32 pad;
	__u64 packets; /* that were sent, with their UDP payload */
	__u64 bytes;
	__u64 outcomes[FANOUT_LEG_OUTCOMES];
} SHARED;

/* What became of a received packet: index into the map `outcomes`, where enum fanout_leg_outcome and enum fanout_further_run
 * follow. Those up to FANOUT_TAKEN are taken off the wire, all others go up as they came.
 */
enum fanout_outcome {
	FANOUT_FORWARDED = 0, /* every copy was tried */
	FANOUT_CONTINUED,     /* some copies were tried, the others are left to further runs */
	FANOUT_OVER_BUDGET,   /* some copies were tried, and there is no further run: the others are lost */
	FANOUT_NOT_RESTORED,  /* the same, for want of memory */
	FANOUT_OTHER_SSRC,    /* of the sender, but not the one that is forwarded */
	FANOUT_NOT_RTP,	      /* of the sender, but neither RTP nor RTCP */
	FANOUT_NOT_UDP,
	FANOUT_FRAGMENT,
	FANOUT_MALFORMED, /* link, IP or UDP header */
	FANOUT_OTHER,	  /* to no stream */
	FANOUT_NOT_SENDER, /* to a stream, from somebody else: receivers' requests and reports, and forged packets */
	FANOUT_SUPER_PACKET, /* merged by GRO or from a local sender with GSO: userspace fans out what it is made of */
	FANOUT_ODD_HEADERS, /* IPv4 options, IPv6 extension headers, stacked VLAN tags: userspace fans it out */
	FANOUT_BUSY, /* a run was interrupted by this one, which has nothing to work with: userspace fans it out */
	FANOUT_OUTCOMES,
};
#define FANOUT_TAKEN FANOUT_NOT_RTP /* the last outcome that ends a packet here */

/* What became of a packet in a run after its first. */
enum fanout_further_run {
	FANOUT_RUN_LAST = 0, /* every copy has been tried */
	FANOUT_RUN_CONTINUED,
	FANOUT_RUN_LEFT, /* the other copies are lost */
	FANOUT_FURTHER_RUNS,
};

/* Whose packets become events; userspace changes it while the program runs. */
struct fanout_tracing {
	__u32 every;  /* packets whose sequence number is a multiple of this; 0: none */
	__u32 stream; /* only of this stream; 0: any */
	__u32 leg;    /* only copies for this receiver; 0: any */
	__u32 pad;
	__u64 lost; /* events for which there was no room */
} SHARED;

/* What became of a copy, or of a sender's packet that did not become copies: in the ring buffer `events`. */
struct fanout_event {
	__u64 arrived_ns; /* CLOCK_MONOTONIC */
	__u64 time_ns;	  /* when the copy, or the packet, had been dealt with */
	__u32 stream;
	__u32 leg; /* 0: about the packet itself */
	__u32 ssrc;
	__u32 timestamp; /* of RTP; 0 of RTCP */
	__u16 sequence;	 /* of RTP; 0 of RTCP */
	__u16 size;	 /* UDP payload */
	__u8 outcome;	 /* enum fanout_leg_outcome of a copy, enum fanout_outcome of a packet */
	__u8 kind;	 /* its second byte: marker and payload type, or the type of RTCP */
	__u8 pad[2];
};

#endif
