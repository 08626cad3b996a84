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

#define GATE_RESTS	1024 /* shared interfaces */
#define GATE_BARE	1024 /* interfaces without a link-layer header */
#define GATE_SCOPES	64   /* scope 0 is for packets whose scope is unknown */
#define GATE_ID_MAX	20   /* longest connection ID of QUIC versions 1 and 2 */
#define GATE_ID_LENS	8    /* different lengths of connection IDs in a scope */
#define GATE_VERSIONS	4
#define GATE_PORTS	32
#define GATE_TOKEN_KEYS 2
#define GATE_TRACERS	8  /* simultaneous traces of refused packets */
#define GATE_MODES	24 /* rules that a policy has room for */
#define GATE_LEVELS	3  /* networks that contain an address: a client, and two wider ones */
#define GATE_MARKS_BITS 14 /* of an index into the map `marks`: 256 KiB, a million marks of either age */

struct gate_address {
	__u8 bytes[16];
};

/* The limits of networks of one size. */
struct gate_level {
	struct gate_address mask;
	__u64 times; /* limit as a multiple of one client's; 0: the level is not used */
};

/* Levels of networks. The first and narrowest is a client. */
struct gate_levels {
	struct gate_level v4[GATE_LEVELS];
	struct gate_level v6[GATE_LEVELS];
};

/* Load-time configuration. */
struct gate_config {
	struct gate_levels levels;
	__u64 sample_ticks; /* least time between samples of a scope */
	__u64 mark_seed;    /* random, so that nobody can choose an address that shares another's mark */
	__u64 client_ids;   /* most tracked connections of one client, unless the quota is higher */
	__u64 ids;	    /* room for connection IDs */
	__u64 fresh_rates; /* entries of `buckets` that may be made full within the time in which rates fill */
	__u64 nests;	   /* PREEMPT_RT: a run may begin in the middle of another on the same CPU */
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
	GATE_NETWORK_QUOTA, /* rules on wider networks have the modes of the rules on clients */
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

/* The reason why a packet passed. Rules and these together are the index into a scope's part of the map
 * `counters`.
 */
enum gate_pass {
	GATE_OTHER = GATE_RULES, /* in no scope; counted in scope 0 */
	GATE_LIVE,		 /* a live connection's ID */
	GATE_LIVE_PATH,		 /* another ID, from a live connection's address and port */
	GATE_HANDSHAKE,		 /* has the ID from the server's answer */
	GATE_ALLOWED,		 /* on the allow list */
	GATE_PROVED,		 /* a new connection with a valid token */
	GATE_NEW,		 /* a new connection */
	GATE_UNKNOWN,		 /* none of these, and no rule refuses it */
	GATE_NOT_UDP,		 /* not UDP over IP that can be read; counted in scope 0 */
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
#define GATE_COUNT 2 /* and counts them */

/* An entry of the map `policies`. The entry of scope s in half h is at h * GATE_SCOPES + s. */
struct gate_policy {
	__u8 modes[GATE_MODES]; /* enum gate_mode by enum gate_rule */
	__u32 flags;
	__u32 id_bytes;	     /* length of the server's connection IDs; 0: learned from the server's answers */
	__u32 quota;	     /* connections per client */
	__u32 token_seconds; /* lifetime of a token */
	__u64 idle_ns;	     /* idle time after which a tracked connection is forgotten */
	__u64 unsure_ns;     /* time from `since_ns` in which not all live connections are known */
	__u64 token_scope;   /* hash of the scope's name, which its tokens are bound to */
	struct bucket_rate
		retry_above; /* rate of new connections without a token below which no Retry is sent */
	struct bucket_rate live[GATE_RATES]; /* per client */
	struct bucket_rate unknown[GATE_RATES];
	struct bucket_rate client[GATE_RATES];
	__be32 versions[GATE_VERSIONS]; /* versions that the server supports; 0: unused */
	__be16 ports[GATE_PORTS];	/* source ports of reflectors; 0: unused */
	__u32 answers; /* rules that answer with Version Negotiation instead of silence: one bit each */
	__u32 pad;
};
_Static_assert(GATE_RULES <= sizeof(((struct gate_policy *)0)->modes), "a mode for each rule");

/* Key of the map `scopes`, whose value is the scope's index. */
struct gate_scope_key {
	struct gate_address address; /* all zeroes: any address */
	__be16 port;		     /* 0: any port */
	__u16 half;
};

/* Key of the map `prefixes`, whose value is the entry's rank: of two matching entries, the one of higher rank
 * decides. Scope 0 is for all scopes.
 */
struct gate_prefix_key {
	__u32 prefix_bits; /* includes 32 for the fields in front of the address */
	__be16 table;	   /* the half, and GATE_TABLE_V6 */
	__be16 scope;
	struct gate_address address;
};

#define GATE_TABLE_V6 2 /* so that ::/0 does not match mapped addresses */

/* The low bits of a rank, after `prefix_bits` times 4. */
enum gate_entry {
	GATE_ENTRY_ALLOW = 1,
	GATE_ENTRY_BLOCK = 2,
};

#define GATE_ENTRY 3

/* A client, or a wider network. */
struct gate_client {
	struct gate_address address;
	__u16 scope;
	__u16 level; /* 0: a client */
};

/* Value of the map `clients`. CPUs change `all` by compare-and-exchange alone. Whoever removes the entry moves it from zero to
 * GATE_COUNT_GONE first, so nobody counts in an entry that goes.
 */
struct gate_count {
	__u64 all;     /* the three fields below, or GATE_COUNT_GONE while the entry is being removed */
	__u64 zero_ns; /* time since which it has been zero */
};

#define GATE_CONNECTIONS \
	0xffffffULL /* 24 bits: connections for the quota, counted by the gate or the application */
#define GATE_TRACKED_BIT   24
#define GATE_LINGERING_BIT 44
#define GATE_TRACKED	   (1LL << GATE_TRACKED_BIT) /* one of 20 bits: connections whose ID is in use */
#define GATE_LINGERING \
	(1LL << GATE_LINGERING_BIT) /* one of 20 bits: connections whose path is in use, but not their ID */
#define GATE_KEPT	0xfffffULL  /* all bits of either of the two */
#define GATE_KEPT_MAX	0x3ffff	    /* largest value of each of the two */
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

enum gate_phase {
	GATE_PUBLISHED = 0, /* by the application, which also retires it */
	GATE_OPENING,	    /* the client has used the server's ID, only in long headers so far */
	GATE_ESTABLISHED,
	GATE_OUTLIVED, /* its ID is no longer seen, but other IDs are used on its path */
	GATE_ENDED,    /* being removed */
};

/* The strength of a connection's claim to a path. The greater claim prevails. */
enum gate_claim {
	GATE_CLAIM_FAR =
		0, /* its ID came from there: a client with a live ID can send it from a forged address */
	GATE_CLAIM_NEAR,   /* and the path has its client's address */
	GATE_CLAIM_PROVED, /* the server's handshake packets went there, and arrived */
};

/* A live connection. Only the phase is used unless the gate tracks it. */
struct gate_connection {
	__u64 seen_ns;
	struct gate_path path;	   /* where it was last seen */
	struct gate_client client; /* client whose quota it counts for, even after it migrates */
	__u32 phase;
	__u8 counted; /* the gate counts it for its client */
	__u8 claim;   /* to its path */
	__u16 pad;
	__u32 pad2;
};

/* The owner of a path. */
struct gate_path_state {
	__u64 seen_ns;	      /* time of the last packet with another ID than its owner's */
	struct gate_id owner; /* only the owner removes the entry */
	__u32 claim;
};

/* The client that chose a connection ID. In `handshakes`, the client that a server answered with this ID. */
struct gate_opening {
	struct gate_address address;
	__be16 port;
	__u16 repeated; /* number of times that an Initial was repeated; of a handshake: whether it became a live connection */
};

enum gate_bucket {
	GATE_BUCKET_STRANGER = 0,
	GATE_BUCKET_LIVE,   /* packets with the ID of a connection of the client, from any address */
	GATE_BUCKET_PATH,   /* packets with another ID on a connection's path, which anybody can forge */
	GATE_BUCKET_ID,	    /* packets with a published ID, by its hash */
	GATE_BUCKET_PROVED, /* Initials with a valid token, which nobody can forge */
};

/* The owner of a set of buckets. */
struct gate_bucket_key {
	struct gate_address client; /* or a wider network */
	__u16 scope;
	__u8 kind; /* enum gate_bucket */
	__u8 level;
};

/* The time in ticks when each rate's bucket will be full again: a bucket fills as time passes. */
struct gate_buckets {
	__u64 full_at[GATE_RATES];
};

/* Marks of both ages, 64 each. */
struct gate_marks {
	__u64 bits[2];
};

/* Entry of the map `states`: the state of a scope that packets change. */
struct gate_state {
	__u64 retry_above_at;
	__u64 sample_at;
	struct gate_buckets unknown;
	__u64 id_lens;	/* lengths of connection IDs that servers use: a byte each, then zeroes */
	__u64 fresh_at; /* in scope 0, for all: bucket of entries of `buckets` that are made full */
};

/* Entry of the map `counters`, for each scope and reason. */
struct gate_counter {
	__u64 packets;
	__u64 bytes;	 /* of UDP payload; of frames where that is unknown */
	__u64 monitored; /* packets that the rule would have refused */
};

/* Other events. The value is the index into the map `events`. */
enum gate_event {
	GATE_CONNECTION_TRACKED = 0,
	GATE_CONNECTION_EXPIRED,
	GATE_CONNECTIONS_FULL, /* a client validated its address, but there was no room to track its connection */
	GATE_TOKEN_INVALID, /* in this gate's format, but forged, expired or of another address */
	GATE_ANSWERED,	    /* with Retry or Version Negotiation */
	GATE_NOT_ANSWERED,  /* dropped, because the answer could not be made */
	GATE_SAMPLES_LOST,  /* userspace did not read them in time */
	GATE_BUSY,	    /* passed unchecked: it arrived in the middle of another run */
	GATE_RATES_CROWDED, /* a client's rates began almost empty, because too many new clients had come */
	GATE_EVENTS,
};

/* A packet that a rule refused, or would have refused; an item of the ring buffers `samples` and `traces`. */
struct gate_sample {
	__u64 time_ns; /* CLOCK_MONOTONIC */
	__u16 scope;
	__u8 reason;	 /* of the verdict: enum gate_rule or enum gate_pass */
	__u8 first;	 /* byte of the QUIC packet */
	__u32 monitored; /* rules that would have refused it: one bit each */
	struct gate_address source;
	struct gate_address destination;
	__be16 source_port;
	__be16 destination_port;
	__u32 bytes; /* of UDP payload */
	__be32 version;
	__u8 id_len;
	__u8 id[GATE_ID_MAX];
	__u8 tracers; /* traces that it matches: one bit each */
	__u8 kind;    /* enum quic_kind; 0 where a rule refused it before that was read */
	__u8 pad[5];
};
_Static_assert(GATE_TRACERS <= 8, "a bit for each tracer");

/* Entry of the map `tracers`: the packets that a trace follows, and their largest rate. Not written while its bit
 * in gate_active.tracers is set.
 */
struct gate_tracer {
	struct gate_address mask;
	struct gate_address address; /* the sender's address must equal this under the mask */
	struct bucket_rate rate;
	__u64 full_at;
	__u64 scopes; /* one bit each */
	__u32 rules;  /* rules that refused it, or would have: one bit each */
	__u32 family; /* 4 or 6; 0: either, so that ::/0 does not match mapped addresses */
};
_Static_assert(GATE_SCOPES <= 64 && GATE_RULES <= 32, "a bit for each scope and rule");

/* Entry of the map `traced`: counters of a trace's packets. */
struct gate_traced {
	__u64 matched;
	__u64 left_out; /* over the rate */
	__u64 lost;	/* userspace did not read them in time */
};

/* SipHash key: two words, little endian on disk. */
struct siphash_key {
	__u64 words[2];
};

/* The token of a Retry packet, for the connection that continues from it. Applications can check it too. Numbers
 * are big endian.
 */
struct gate_token {
	__u8 magic[4];
	__u8 key; /* index of the key */
	__u8 id_len;
	__be16 port;
	__be32 issued;	  /* seconds since 1970 */
	__u8 retry_id[8]; /* source connection ID of the Retry, random so that no two tokens are equal */
	struct gate_address address;
	__u8 id[GATE_ID_MAX]; /* original destination connection ID, padded with zeroes */
	__u8 tag[16];	      /* over all that, and gate_policy.token_scope */
};
_Static_assert(sizeof(struct gate_token) == 72, "gate_token is as the wire has it");

/* Entry of the map `token_keys`. */
struct gate_token_key {
	struct siphash_key key;
	__u32 valid;
	__u32 pad;
};

/* State that userspace changes under load. Each change is a single word, so there is no lock. */
struct gate_active {
	__u32 turn; /* number of changes of the rules; its lowest bit is the half of policies, scopes and prefixes in use */
	__u32 lookups;	    /* look-ups that may find something: GATE_LOOKUP_... */
	__u32 token_key;    /* index of the key that tokens are made with */
	__u32 age;	    /* age that new marks get: 0 or 1 */
	__s64 unix_seconds; /* UNIX time minus CLOCK_MONOTONIC */
	__u64 since_ns; /* CLOCK_MONOTONIC_COARSE: time since which the gate has watched the present interfaces */
	__u64 fill_ticks; /* time in which the slowest rate of a client fills; 0: there is none */
	__u32 tracers;	  /* active traces: one bit each */
	__u32 bare;	  /* not 0: the map `bare` has interfaces */
};

#define GATE_LOOKUP_BOTH     1 /* scopes by address and port */
#define GATE_LOOKUP_ADDRESS  2
#define GATE_LOOKUP_PORT     4
#define GATE_LOOKUP_PREFIXES 8

/* Entry of the map `retry_keys`: the constant key of the integrity tag, for versions 1 and 2. */
struct gate_retry_key {
	struct ghash_key ghash;
	__u8 mask[16]; /* the encrypted first counter block */
};

/* Argument of gate_count. */
struct gate_count_call {
	struct gate_client client;
	__s32 change;
	__u32 connections; /* the client's connections after the call */
	__s32 error;
};

/* Argument of gate_publish. */
struct gate_publish_call {
	struct gate_id id;
	__s32 error; /* of the map's update */
};

/* Argument of gate_forget. */
struct gate_forget_call {
	__u64 age; /* age of the marks to clear */
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

/* Argument of gate_expire: a part of a walk, so that no call takes long. */
struct gate_expire_call {
	__u64 now_ns;
	__u64 expired; /* connections that were forgotten */
	__u32 walk;    /* enum gate_walk */
	__u32 at;      /* entries passed so far; 0 at the beginning */
	__u32 from;    /* entries to skip, which earlier parts have handled */
	__u32 to;      /* where this part ends; the map has ended if `at` is less afterwards */
	__u32 removed; /* entries of the table */
	__u32 pad;
};

#endif
