/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Structures and constants that the gate shares with userspace. The build writes Rust's types and constants from
 * this header. Addresses have 16 bytes; IPv4 is mapped (::ffff:a.b.c.d). A client, and each wider network that
 * contains it, is an address whose bits after the prefix are cleared.
 */
#ifndef MILLRACE_GATE_INTF_H
#define MILLRACE_GATE_INTF_H

#include "bucket_intf.h"
#include "crypto_intf.h"
#include <linux/types.h>

#define GATE_RESTS 1024 /* largest number of interfaces with further XDP programs */
#define GATE_BARE  1024 /* largest number of interfaces without a link-layer header */
/* Number of scopes: guarded applications with rules of their own, and scope 0 for all other packets. */
#define GATE_SCOPES	64
#define GATE_ID_MAX	20 /* longest connection ID of QUIC versions 1 and 2, in bytes */
#define GATE_ID_LENS	8  /* largest number of different lengths of one application's connection IDs */
#define GATE_VERSIONS	4  /* largest number of QUIC versions in a policy */
#define GATE_PORTS	32 /* largest number of source ports in a policy */
#define GATE_TOKEN_KEYS 2  /* keys whose tokens are accepted: the present key and the previous one */
#define GATE_TRACERS	8  /* largest number of simultaneous traces of refused packets */
#define GATE_MODES	24 /* length of the array gate_policy.modes, which has an element for each rule */
#define GATE_LEVELS	3  /* number of network sizes that have limits: a client, and two wider networks */
/* Bits of an index into `marks`, a Bloom filter of 256 KiB: two sets of a million bits */
#define GATE_MARKS_BITS 14

struct gate_address {
	__u8 bytes[16];
};

/* A size of networks, and their limit. */
struct gate_level {
	struct gate_address mask; /* the bits of the prefix are 1, and all others are 0 */
	__u64 times; /* the network's limit as a multiple of one client's limit; 0: networks of this size have none */
};

/* Sizes of networks, from narrow to wide. The first is a client. */
struct gate_levels {
	struct gate_level v4[GATE_LEVELS];
	struct gate_level v6[GATE_LEVELS];
};

/* Configuration of the gate's BPF programs, which userspace sets before it loads them. */
struct gate_config {
	struct gate_levels levels;
	/* Least time between two logged samples of the packets that an application's rules refused, in ticks; 0: none.
	 */
	__u64 sample_ticks;
	__u64 mark_seed; /* random seed of the Bloom filter's hash, so that nobody can choose colliding addresses */
	__u64 client_ids; /* largest number of tracked connections of a client, unless its quota is higher */
	__u64 ids;	  /* largest number of entries of the map `connections` */
	/* How many new clients may begin with full token buckets, in each period of gate_active.fill_ticks. */
	__u64 fresh_rates;
	__u64 nests; /* not 0 on PREEMPT_RT: a run may interrupt another run on the same CPU */
};

/* The rules in the order of their evaluation. */
enum gate_rule {
	GATE_FRAGMENT = 0,
	GATE_HEADERS,
	GATE_OPTIONS,
	GATE_BLOCK,
	GATE_SHORT,
	GATE_MALFORMED,
	GATE_VERSION,
	GATE_INITIAL_SIZE,
	GATE_LIVE_PACKETS,
	GATE_LIVE_BYTES,
	GATE_SOURCE_PORT,
	GATE_UNKNOWN_ID,
	GATE_QUOTA,
	GATE_NETWORK_QUOTA, /* GATE_NETWORK_X limits wider networks as GATE_X limits clients, in the same mode */
	GATE_RETRY,
	GATE_UNKNOWN_INITIALS,
	GATE_UNKNOWN_PACKETS,
	GATE_UNKNOWN_BYTES,
	GATE_CLIENT_INITIALS,
	GATE_CLIENT_PACKETS,
	GATE_CLIENT_BYTES,
	GATE_NETWORK_INITIALS,
	GATE_NETWORK_PACKETS,
	GATE_NETWORK_BYTES,
	GATE_RULES,
};

/* The reason why a packet passed. The numbers continue those of enum gate_rule, since both are indexes into the
 * counters of an application.
 */
enum gate_pass {
	GATE_OTHER = GATE_RULES, /* the packet is for no guarded application; counted for scope 0 */
	GATE_LIVE,		 /* the packet has a live connection's ID */
	GATE_LIVE_PATH, /* the packet has another ID, but a live connection's source address and port */
	GATE_HANDSHAKE, /* the packet has the ID that the server chose in an ongoing handshake */
	GATE_ALLOWED,	/* the source is on the allow list */
	GATE_PROVED,	/* the packet begins a connection and has a valid token */
	GATE_NEW,	/* the packet begins a connection */
	GATE_UNKNOWN,	/* no other reason to pass applies, and no rule refuses the packet */
	GATE_NOT_UDP, /* the frame is not readable UDP over IP; counted for scope 0, which is no application's */
	GATE_REASONS,
};

enum gate_mode {
	GATE_OFF = 0,
	GATE_MONITOR,
	GATE_ENFORCE,
};

enum gate_rate_index {
	GATE_RATE_INITIALS = 0,
	GATE_RATE_PACKETS,
	GATE_RATE_BYTES,
	GATE_RATES,
};

#define GATE_TRACK 1 /* the gate tracks live connections */
#define GATE_COUNT 2 /* the gate counts the connections that it tracks */

/* The rules of a scope (a guarded application): an entry of the map `policies`. The map has two halves, 0 and 1, of
 * which one is in use. The entry of scope s in half h has the index h * GATE_SCOPES + s.
 */
struct gate_policy {
	__u8 modes[GATE_MODES]; /* enum gate_mode of each rule; the array index is enum gate_rule */
	__u32 flags;		/* the bits GATE_TRACK and GATE_COUNT */
	__u32 id_bytes;	     /* length of the server's connection IDs; 0: learned from the server's packets */
	__u32 quota;	     /* largest number of connections of one client */
	__u32 token_seconds; /* lifetime of a token */
	__u64 idle_ns;	     /* idle time after which a tracked connection is forgotten */
	/* Time after the gate's start (gate_active.since_ns) in which it may not know connections that are older. */
	__u64 unsure_ns;
	__u64 token_scope; /* hash of the application's name; a token is only valid for this application */
	/* rate of new connections without a token below which no Retry is sent */
	struct bucket_rate retry_above;
	struct bucket_rate live[GATE_RATES]; /* rate limits for packets of a client's live connections */
	struct bucket_rate unknown[GATE_RATES];
	struct bucket_rate client[GATE_RATES];
	__be32 versions[GATE_VERSIONS]; /* versions that the server supports; 0: unused */
	__be16 ports[GATE_PORTS];	/* source ports that reflection attacks use; 0: unused */
	__u32 answers; /* rules that answer with Version Negotiation instead of dropping silently: one bit each */
	__u32 pad;
};
_Static_assert(GATE_RULES <= sizeof(((struct gate_policy *)0)->modes), "a mode for each rule");

/* Key of the map `scopes`, whose value is the index of the application to which packets with this destination belong.
 */
struct gate_scope_key {
	struct gate_address address; /* destination address; all zeroes: any address */
	__be16 port;		     /* destination port; 0: any port */
	__u16 half;
};

/* Key of the map `prefixes`, the block and allow lists, whose value is the entry's rank. If two entries match a packet,
 * the one with the higher rank decides. Entries of scope 0 apply to all applications.
 */
struct gate_prefix_key {
	__u32 prefix_bits; /* length of the address prefix in bits, plus 32 for the bits of `table` and `scope` */
	__be16 table;	   /* the half of the map (0 or 1; gate_active.turn), plus GATE_TABLE_V6 for IPv6 */
	__be16 scope;
	struct gate_address address;
};

#define GATE_TABLE_V6 2 /* keeps IPv6 apart, so that ::/0 does not match IPv4-mapped addresses */

/* The two low bits of a rank, the value of a block or allow list entry. The other bits are `prefix_bits`, so that the
 * longest prefix has the highest rank.
 */
enum gate_entry {
	GATE_ENTRY_ALLOW = 1,
	GATE_ENTRY_BLOCK = 2,
};

#define GATE_ENTRY 3

/* A client, or a wider network. */
struct gate_client {
	struct gate_address address;
	__u16 scope;
	__u16 level; /* index of the network's size in gate_levels; 0: a client */
};

/* Value of the map `clients`. CPUs change `all` only by compare-and-exchange. The CPU that removes the entry first
 * moves `all` from zero to GATE_COUNT_GONE, so that no other CPU counts in an entry that is about to be deleted.
 */
struct gate_count {
	__u64 all;     /* the three bit fields below, or GATE_COUNT_GONE while the entry is being removed */
	__u64 zero_ns; /* CLOCK_MONOTONIC since when `all` has been zero */
};

/* mask of 24 bits: connections for the quota, counted by the gate or the application */
#define GATE_CONNECTIONS   0xffffffULL
#define GATE_TRACKED_BIT   24
#define GATE_LINGERING_BIT 44
/* The number to add to gate_count.all for one connection whose ID is in use: 1 in a field of 20 bits. */
#define GATE_TRACKED (1LL << GATE_TRACKED_BIT)
/* The number to add to gate_count.all for one connection whose ID is no longer used, although packets still arrive from
 * its client's address and port: 1 in a field of 20 bits.
 */
#define GATE_LINGERING (1LL << GATE_LINGERING_BIT)
/* Mask of the two 20-bit fields of gate_count.all, after a shift to bit 0, and the largest value that they reach. */
#define GATE_KEPT	0xfffffULL
#define GATE_KEPT_MAX	0x3ffff
#define GATE_COUNT_GONE (~0ULL)

/* A connection ID, padded with zeroes. */
struct gate_id {
	__u32 scope;
	__u8 bytes[GATE_ID_MAX]; /* aligned, because it is read and written by words */
	__u32 len;
};

struct gate_path {
	struct gate_address address;
	__u32 scope;
	__be16 port;
	__u16 pad;
};

/* The state of a connection; gate_track.h describes the transitions. */
enum gate_phase {
	GATE_PUBLISHED = 0, /* the application has published the ID, and retires it itself */
	GATE_OPENING,	    /* the client has used the server's ID, only in long headers so far */
	GATE_ESTABLISHED,   /* the client has used the server's ID in a short header */
	GATE_OUTLIVED,	    /* the ID is no longer seen, but the client's address and port use other IDs */
	GATE_ENDED,	    /* the entry is being removed */
};

/* How well it is known that a network path (a source address and port) belongs to a connection. If several connections
 * use the same path, the one with the greatest value owns it.
 */
enum gate_claim {
	/* a packet with the connection's ID, perhaps forged, came from the address and port */
	GATE_CLAIM_FAR = 0,
	GATE_CLAIM_NEAR, /* a packet with the connection's ID came from the port, and the address is the client's */
	GATE_CLAIM_PROVED, /* the server's handshake packets were sent to the address and port, and arrived */
};

/* A live connection. Unless the gate tracks the connection, only `phase` is used. */
struct gate_connection {
	__u64 seen_ns;	       /* time of the last packet with the connection's ID, up to 250 ms too early */
	struct gate_path path; /* the path of the last short header */
	struct gate_client client; /* client whose quota the connection counts for, also after a migration */
	__u32 phase;		   /* enum gate_phase */
	__u8 counted;		   /* 1 if the gate counts the connection for its client */
	__u8 claim;		   /* enum gate_claim: how well it is known that `path` is the connection's */
	__u16 pad;
	__u32 pad2;
};

/* Value of the map `paths`: the connection (owner) to which a network path, a client's address and port, belongs. */
struct gate_path_state {
	__u64 seen_ns; /* time of the last packet from the path with an ID other than the connection's */
	struct gate_id owner; /* ID of the connection; the entry is removed only together with it */
	__u32 claim;	      /* enum gate_claim: how well it is known that the path is the connection's */
};

/* Value of the map `openings`: the client whose Initial had a connection ID as its destination. Value of the map
 * `handshakes`: the client to which a server sent a handshake packet with a connection ID as its source.
 */
struct gate_opening {
	struct gate_address address;
	__be16 port;
	/* In `openings`: how often the Initial was repeated. In `handshakes`: 1 if the ID's connection was live before.
	 */
	__u16 repeated;
};

/* The kinds of a client's packets. Each kind has token buckets of its own for the rates of gate_rate_index. */
enum gate_bucket {
	GATE_BUCKET_STRANGER = 0, /* packets of no live connection, without a valid token */
	GATE_BUCKET_LIVE, /* packets with the ID of one of the client's connections, from any address */
	/* Packets from the address and port of a connection, but with another ID. Anybody can forge them. */
	GATE_BUCKET_PATH,
	GATE_BUCKET_ID,	    /* packets with a published ID; the key is the ID's hash instead of the client */
	GATE_BUCKET_PROVED, /* Initials with a valid token, which nobody can forge */
};

/* Key of the map `buckets`: the client or network whose rates are limited. */
struct gate_bucket_key {
	struct gate_address client; /* address of a client, or of a wider network */
	__u16 scope;
	__u8 kind;  /* enum gate_bucket */
	__u8 level; /* index of the network's size in gate_levels; 0: a client */
};

/* The time in ticks when each rate's bucket will be full again. A bucket fills as time passes. */
struct gate_buckets {
	__u64 full_at[GATE_RATES];
};

/* Value of the map `marks`, a Bloom filter (gate_marks.h): 64 bits of each of the filter's two bit sets. */
struct gate_marks {
	__u64 bits[2];
};

/* Entry of the map `states`: the state of a guarded application (scope) that packets change. A token bucket is stored
 * as the time in ticks when the bucket will be full.
 */
struct gate_state {
	__u64 retry_above_at; /* token bucket of new connections without a token, for gate_policy.retry_above */
	__u64 sample_at;      /* token bucket of samples for the log */
	struct gate_buckets unknown; /* shared by all clients: buckets for packets of no live connection */
	__u64 id_lens; /* lengths of connection IDs that servers use: a byte each, then zeroes */
	/* Token bucket that limits how many new entries of the map `buckets` begin full; used in scope 0 only. */
	__u64 fresh_at;
};

/* Entry of the map `counters`: packets of one guarded application that one rule refused, or that passed for one reason.
 */
struct gate_counter {
	__u64 packets;
	__u64 bytes;	 /* bytes of UDP payload, or of the whole frame if the payload is unknown */
	__u64 monitored; /* packets that the rule would have refused in mode enforce */
};

/* Events that are counted in addition to passed and refused packets. The value is the index into the map `events`. */
enum gate_event {
	GATE_CONNECTION_TRACKED = 0,
	GATE_CONNECTION_EXPIRED,
	GATE_CONNECTIONS_FULL, /* a client validated its address, but there was no room to track its connection */
	GATE_TOKEN_INVALID, /* a token has the gate's format, but is forged, expired or another address's */
	GATE_ANSWERED,	    /* a refused packet was answered with Retry or Version Negotiation */
	GATE_NOT_ANSWERED,  /* a refused packet was dropped, because the answer could not be made */
	GATE_SAMPLES_LOST,  /* a sample was lost, because userspace did not read the ring buffer in time */
	GATE_BUSY,	    /* a packet passed unchecked, because it interrupted another run on its CPU */
	GATE_RATES_CROWDED, /* a new client's buckets began almost empty, because too many new clients had come */
	GATE_EVENTS,
};

/* A packet that a rule refused, or would have refused; an item of the ring buffers `samples` and `traces`. */
struct gate_sample {
	__u64 time_ns; /* time of the packet, CLOCK_MONOTONIC */
	__u16 scope;
	__u8 reason;	 /* enum gate_rule that refused the packet, or enum gate_pass if it passed */
	__u8 first;	 /* first byte of the QUIC packet */
	__u32 monitored; /* rules in mode "monitor" that would have refused the packet: one bit each */
	struct gate_address source;
	struct gate_address destination;
	__be16 source_port;
	__be16 destination_port;
	__u32 bytes; /* bytes of UDP payload */
	__be32 version;
	__u8 id_len;
	__u8 id[GATE_ID_MAX];
	__u8 tracers; /* traces that the packet matches: one bit each */
	__u8 kind;    /* enum quic_kind; 0 if a rule refused the packet before its type was read */
	__u8 pad[5];
};
_Static_assert(GATE_TRACERS <= 8, "a bit for each tracer");

/* Entry of the map `tracers`: the packets that a trace follows, and their largest rate. Userspace does not change the
 * entry while its bit in gate_active.tracers is set.
 */
struct gate_tracer {
	struct gate_address mask;
	struct gate_address address; /* prefix that the sender must have; see `mask` */
	struct bucket_rate rate;
	__u64 full_at;
	__u64 scopes; /* guarded applications (scopes) whose packets the trace follows: one bit each */
	__u32 rules;  /* the trace follows packets that these rules refused, or would have: one bit each */
	__u32 family; /* 4 or 6, so that ::/0 does not match IPv4-mapped addresses; 0: either */
};
_Static_assert(GATE_SCOPES <= 64 && GATE_RULES <= 32, "a bit for each scope and rule");

/* Entry of the map `traced`: counters of a trace's packets. */
struct gate_traced {
	__u64 matched;
	__u64 left_out; /* packets left out, because the trace was over its rate */
	__u64 lost;	/* packets lost, because userspace did not read the ring buffer in time */
};

/* SipHash key: two words, little endian on disk. */
struct siphash_key {
	__u64 words[2];
};

/* The token of a Retry packet, which is valid only for the connection that continues after this Retry. The application
 * can check a token too. Numbers are big endian.
 */
struct gate_token {
	__u8 magic[4];
	__u8 key; /* index of the key that the tag was made with */
	__u8 id_len;
	__be16 port;
	__be32 issued;	  /* time when the token was made, in seconds since 1970 */
	__u8 retry_id[8]; /* source connection ID of the Retry, random so that no two tokens are equal */
	struct gate_address address;
	__u8 id[GATE_ID_MAX]; /* original destination connection ID, padded with zeroes */
	__u8 tag[16];	      /* SipHash of all other fields, and of gate_policy.token_scope */
};
_Static_assert(sizeof(struct gate_token) == 72, "gate_token has the size of the token on the wire");

/* Entry of the map `token_keys`: a key of the tokens in Retry packets. */
struct gate_token_key {
	struct siphash_key key;
	__u32 valid;
	__u32 pad;
};

/* State that userspace changes while packets arrive. Each change is a single word, so no lock is needed. */
struct gate_active {
	/* Number of changes of the policy. The lowest bit says which half of the maps `policies`, `scopes` and
	 * `prefixes` is in use. */
	__u32 turn;
	__u32 lookups; /* GATE_LOOKUP_...: the map look-ups that can find an entry; all others are skipped */
	__u32 token_key;    /* index of the key that new tokens are made with */
	__u32 age;	    /* which of the Bloom filter's two bit sets new keys are added to: gate_marks.h */
	__s64 unix_seconds; /* seconds to add to CLOCK_MONOTONIC to get UNIX time */
	__u64 since_ns; /* CLOCK_MONOTONIC_COARSE since when the gate has seen the packets of all its interfaces */
	__u64 fill_ticks; /* time in which a client's slowest token bucket fills; 0: clients have no rate limits */
	__u32 tracers; /* active traces: one bit each */
	__u32 bare;    /* not 0 if `bare`, the map of interfaces without a link layer, has entries */
};

#define GATE_LOOKUP_BOTH     1 /* look up the guarded application by destination address and port */
#define GATE_LOOKUP_ADDRESS  2 /* look up the guarded application by destination address */
#define GATE_LOOKUP_PORT     4 /* look up the guarded application by destination port */
#define GATE_LOOKUP_PREFIXES 8 /* look up the address in the block and allow lists */

/* Entry of the map `retry_keys`: values derived from the constant key of Retry's integrity tag, for QUIC version 1 or
 * 2.
 */
struct gate_retry_key {
	struct ghash_key ghash;
	__u8 mask[16]; /* the encrypted first counter block of AES-GCM */
};

/* Argument of gate_count. */
struct gate_count_call {
	struct gate_client client;
	__s32 change;	   /* connections to add; negative: to remove */
	__u32 connections; /* result: the client's connections after the call */
	__s32 error;	   /* result: 1 if the count could not be changed */
};

/* Argument of gate_publish. */
struct gate_publish_call {
	struct gate_id id;
	__s32 error; /* result of the map's update: 0, or a negative errno */
};

/* Argument of gate_forget. */
struct gate_forget_call {
	__u64 age; /* which of the Bloom filter's two bit sets to clear: gate_marks.h */
};

/* The maps that gate_expire walks over. */
enum gate_walk {
	GATE_WALK_CONNECTIONS = 0,
	GATE_WALK_PATHS,
	GATE_WALK_CLIENTS,
	GATE_WALK_HANDSHAKES,
	GATE_WALK_OPENINGS,
	GATE_WALKS,
};

/* Argument of gate_expire: a part of a walk over one map. A walk takes several calls, so that no call takes long. */
struct gate_expire_call {
	__u64 now_ns;
	__u64 expired; /* result: connections that were forgotten */
	__u32 walk;    /* enum gate_walk */
	__u32 at;      /* number of the map's entries that this call has passed; 0 before the call */
	__u32 from;    /* number of entries to skip, which earlier calls have handled */
	__u32 to; /* number of the entry to stop after; if `at` stays below it, the map has no further entries */
	__u32 removed; /* result: number of expired entries that this call removed from the map it walks over */
	__u32 pad;
};

#endif
