/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The gate: admission of QUIC packets at XDP, told by the server.
 *
 *	millrace_gate *gate;
 *	millrace_gate_scope *scope;
 *
 *	if (millrace_gate_open("eth0", policy, MILLRACE_GATE_MODE_AUTO, &gate))
 *		errx(1, "%s", millrace_gate_error());
 *	millrace_gate_scope_open(gate, "web", &scope);
 *
 * then, for each connection, `publish` for each connection ID before the peer is told, `inc` when the handshake is
 * complete (not before: an Initial proves nothing about its address), and `retire` and `dec` when they are gone.
 *
 * Every function may be called from any thread at any time, on the same objects too; only the two that free wait
 * for nobody: no other call may be using what they free. Functions return 0 or a negative millrace_gate_status and
 * then leave their results untouched. The library neither exits, prints, installs signal handlers nor lets a panic
 * out. Whatever ends the process, the gate is off the interface afterwards.
 *
 * A process that goes to the background, or forks its workers, opens the gate afterwards: the gate is its process's, ends
 * with it, and is of no use in a child, which must not pass what it inherited to any of these functions.
 */
#ifndef MILLRACE_GATE_H
#define MILLRACE_GATE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Of this header. The soname changes whenever a program would have to be compiled anew. */
#define MILLRACE_GATE_ABI 0

#define MILLRACE_GATE_ID_MAX	20 /* bytes; the longest connection ID of QUIC versions 1 and 2 */
#define MILLRACE_GATE_NAME_MAX	64 /* bytes, the terminating zero included; names of scopes and reasons */

typedef struct millrace_gate millrace_gate;
typedef struct millrace_gate_scope millrace_gate_scope;

typedef enum millrace_gate_status {
	MILLRACE_GATE_OK = 0,
	MILLRACE_GATE_INVALID = -1,   /* an argument: null, not UTF-8, no address, an ID that is too long ... */
	MILLRACE_GATE_POLICY = -2,    /* the policy is not usable; nothing was changed */
	MILLRACE_GATE_NOT_FOUND = -3, /* no such interface or scope, or a token that proves nothing */
	MILLRACE_GATE_FULL = -4,      /* no room; the limits are in the policy */
	MILLRACE_GATE_SYSTEM = -5,    /* the kernel refused: privilege (CAP_BPF, CAP_NET_ADMIN), age, driver */
	MILLRACE_GATE_INTERNAL = -6   /* a fault of the library */
} millrace_gate_status;

typedef enum millrace_gate_mode {
	MILLRACE_GATE_MODE_AUTO = 0,	/* native where the driver can, else generic */
	MILLRACE_GATE_MODE_NATIVE = 1,	/* in the driver */
	MILLRACE_GATE_MODE_GENERIC = 2	/* in the stack: every driver can, at some cost */
} millrace_gate_mode;

typedef enum millrace_gate_entry {
	MILLRACE_GATE_UNLIST = 0, /* what the policy says counts again */
	MILLRACE_GATE_BLOCK = 1,
	MILLRACE_GATE_ALLOW = 2
} millrace_gate_entry;

/* What became of packets, for one reason. */
typedef struct millrace_gate_count {
	char scope[MILLRACE_GATE_NAME_MAX];
	char reason[MILLRACE_GATE_NAME_MAX]; /* a rule's name, or why packets passed */
	uint8_t is_rule;		     /* 1: a rule, `packets` were refused; 0: they passed */
	uint8_t reserved[7];
	uint64_t packets;
	uint64_t bytes;	    /* of UDP payload */
	uint64_t monitored; /* packets that the rule would have refused if it were enforced */
} millrace_gate_count;

typedef struct millrace_gate_id {
	uint8_t len;
	uint8_t bytes[MILLRACE_GATE_ID_MAX];
} millrace_gate_id;

/* "0.1.0", of the library. */
const char *millrace_gate_version(void);

/* What the calling thread's last failure was about, in words; valid until its next call. Never null. */
const char *millrace_gate_error(void);

/* Loads the gate with `policy`, the text of a policy file (docs/gate.md), attaches it to `interface` and keeps it
 * going with a thread of its own. */
int millrace_gate_open(const char *interface, const char *policy, millrace_gate_mode mode, millrace_gate **gate);

/* Another interface, with the same policy and the same counts. */
int millrace_gate_attach(millrace_gate *gate, const char *interface, millrace_gate_mode mode);

/* Replaces the policy, as a whole or not at all; connections and their counts stay. */
int millrace_gate_set_policy(millrace_gate *gate, const char *policy);

/* Detaches from every interface and frees. Scopes that are still open stay valid, and of no effect. */
void millrace_gate_close(millrace_gate *gate);

/* The scope of that name, which the policy must have. */
int millrace_gate_scope_open(millrace_gate *gate, const char *name, millrace_gate_scope **scope);
void millrace_gate_scope_close(millrace_gate_scope *scope);

/* `client` has one connection more or less; its port does not matter. `connections`, which may be null: how many it
 * has now. The gate refuses Initials beyond the quota, and `inc` never does: of handshakes that run at the same time more
 * may complete, so a server that means the quota strictly closes the connection if `connections` is higher. For scopes
 * with `count = "application"`. */
int millrace_gate_inc(millrace_gate_scope *scope, const struct sockaddr *client, socklen_t client_len,
		      uint32_t *connections);
int millrace_gate_dec(millrace_gate_scope *scope, const struct sockaddr *client, socklen_t client_len,
		      uint32_t *connections);

/* Packets with this connection ID belong to a live connection, from whatever address, until it is retired. Publish
 * before the peer is told. For scopes with `live = "published"`. Retiring an ID that is not known does nothing. */
int millrace_gate_publish(millrace_gate_scope *scope, const uint8_t *id, size_t id_len);
int millrace_gate_retire(millrace_gate_scope *scope, const uint8_t *id, size_t id_len);

/* Changes the block and allow list of one scope, or of all (null), at once; beyond changes of the policy, and in place
 * of its entry for the same prefix. MILLRACE_GATE_UNLIST takes that back.
 * `prefix`: "192.0.2.0/24", "2001:db8::1". */
int millrace_gate_list(millrace_gate *gate, const char *scope, const char *prefix, millrace_gate_entry entry);

/* Whether `token`, of an Initial packet, is of a Retry packet of the gate to `client`, port included. If so, the
 * server must take `original` for the connection's original destination connection ID, and the packet's destination
 * connection ID for the Retry's source connection ID (RFC 9000, section 7.3). Everything else is
 * MILLRACE_GATE_NOT_FOUND: treat the packet as if it had no token. */
int millrace_gate_check_token(const millrace_gate_scope *scope, const struct sockaddr *client, socklen_t client_len,
			      const uint8_t *token, size_t token_len, millrace_gate_id *original);

/* Every scope's count of every reason. `counts` has room for `room` of them; `have` tells how many there are, all
 * told: if that is more than `room`, those that fit were filled in. */
int millrace_gate_statistics(const millrace_gate *gate, millrace_gate_count *counts, size_t room, size_t *have);

#ifdef __cplusplus
}
#endif

#endif
