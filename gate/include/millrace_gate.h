/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The gate's library: drops unwanted QUIC packets at XDP, by rules and by what the server reports about its
 * connections.
 *
 *	millrace_gate *gate;
 *	millrace_gate_scope *scope;
 *
 *	if (millrace_gate_open("eth0", policy, MILLRACE_GATE_MODE_AUTO, &gate))
 *		errx(1, "%s", millrace_gate_error());
 *	millrace_gate_scope_open(gate, "web", &scope);
 *
 * For each connection, call `publish` for each connection ID before the peer learns it, and `inc` when the handshake is
 * complete (not before: the source address of an Initial may be forged). Call `retire` and `dec` when the ID or the
 * connection is gone.
 *
 * Every function may be called from any thread at any time, also on the same object. Only the two functions that free
 * an object must not run while another call uses this object. Functions return 0 or a negative millrace_gate_status. On
 * failure they do not write their results. The library never exits, prints, installs signal handlers or unwinds into
 * the caller. When the process ends, in whatever way, the gate is detached.
 *
 * A process that goes to the background, or forks its workers, must open the gate afterwards. The gate belongs to the
 * process that opened it and ends with that process. A child process must not pass inherited objects to these
 * functions.
 */
#ifndef MILLRACE_GATE_H
#define MILLRACE_GATE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header's ABI. The soname changes whenever programs have to be compiled again. */
#define MILLRACE_GATE_ABI 0

#define MILLRACE_GATE_ID_MAX   20 /* bytes of the longest connection ID of QUIC versions 1 and 2 */
#define MILLRACE_GATE_NAME_MAX 64 /* largest size of the names in millrace_gate_count, with the terminating zero */

typedef struct millrace_gate millrace_gate;
typedef struct millrace_gate_scope millrace_gate_scope;

typedef enum millrace_gate_status {
	MILLRACE_GATE_OK = 0,
	MILLRACE_GATE_INVALID = -1,   /* an argument is null, not UTF-8, not an address, an ID that is too long ... */
	MILLRACE_GATE_POLICY = -2,    /* the policy is not valid; nothing was changed */
	MILLRACE_GATE_NOT_FOUND = -3, /* the interface or scope does not exist, or the token is not valid */
	MILLRACE_GATE_FULL = -4,      /* a table is full; the policy sets its size */
	MILLRACE_GATE_SYSTEM = -5,    /* the kernel refused: missing CAP_BPF or CAP_NET_ADMIN, old kernel, driver */
	MILLRACE_GATE_INTERNAL = -6   /* the library has a bug */
} millrace_gate_status;

typedef enum millrace_gate_mode {
	MILLRACE_GATE_MODE_AUTO = 0,   /* native if the driver supports it, else generic */
	MILLRACE_GATE_MODE_NATIVE = 1, /* XDP in the driver */
	MILLRACE_GATE_MODE_GENERIC = 2 /* XDP in the network stack: slower, but works with every driver */
} millrace_gate_mode;

typedef enum millrace_gate_entry {
	/* Removes the list entry that an earlier call added. The policy's own entry for the prefix applies again. */
	MILLRACE_GATE_UNLIST = 0,
	MILLRACE_GATE_BLOCK = 1,
	MILLRACE_GATE_ALLOW = 2
} millrace_gate_entry;

/* Counters of the packets for one guarded application (scope) that one rule refused, or that passed for one reason. */
typedef struct millrace_gate_count {
	char scope[MILLRACE_GATE_NAME_MAX];
	char reason[MILLRACE_GATE_NAME_MAX]; /* a rule's name, or the reason why packets passed */
	uint8_t is_rule;		     /* 1: a rule refused `packets`; 0: `packets` passed */
	uint8_t reserved[7];
	uint64_t packets;
	uint64_t bytes;	    /* bytes of UDP payload */
	uint64_t monitored; /* packets that the rule would have refused in mode "enforce" */
} millrace_gate_count;

typedef struct millrace_gate_id {
	uint8_t len;
	uint8_t bytes[MILLRACE_GATE_ID_MAX];
} millrace_gate_id;

/* Returns the library's version, such as "0.1.0". */
const char *millrace_gate_version(void);

/* Returns a description of the calling thread's last failure. It is never null, and valid until the thread's next call.
 */
const char *millrace_gate_error(void);

/* Loads the gate with `policy`, the text of a policy file (docs/guide/gate.md), and attaches it to `interface`. A
 * thread of the library then maintains it.
 */
int millrace_gate_open(const char *interface, const char *policy, millrace_gate_mode mode, millrace_gate **gate);

/* Attaches the gate to another interface, with the same policy and the same counters. */
int millrace_gate_attach(millrace_gate *gate, const char *interface, millrace_gate_mode mode);

/* Replaces the policy as a whole, or not at all. Connections and their counts stay. */
int millrace_gate_set_policy(millrace_gate *gate, const char *policy);

/* Detaches from every interface and frees the gate. Objects of type millrace_gate_scope stay valid, without effect. */
void millrace_gate_close(millrace_gate *gate);

/* Opens the policy's scope with this name: the section of one application, with its ports and rules. Fails if the
 * policy has no such scope.
 */
int millrace_gate_scope_open(millrace_gate *gate, const char *name, millrace_gate_scope **scope);
void millrace_gate_scope_close(millrace_gate_scope *scope);

/* Adds or removes one connection of `client`; the port of the address is ignored. `connections`, which may be null,
 * receives the client's number of connections. Use these functions for scopes with `count = "application"`.
 *
 * The gate refuses Initials over the quota, but `inc` succeeds over the quota. When a client has several handshakes at
 * the same time, more of them may complete than the quota allows. A server with a strict quota should therefore close
 * the connection if `connections` exceeds the quota.
 */
int millrace_gate_inc(millrace_gate_scope *scope, const struct sockaddr *client, socklen_t client_len,
		      uint32_t *connections);
int millrace_gate_dec(millrace_gate_scope *scope, const struct sockaddr *client, socklen_t client_len,
		      uint32_t *connections);

/* Tells the gate that packets with this connection ID, from any address, belong to a live connection until the ID is
 * retired. Publish an ID before the peer learns it. Use these functions for scopes with `live = "published"`. Retiring
 * an unknown ID has no effect.
 */
int millrace_gate_publish(millrace_gate_scope *scope, const uint8_t *id, size_t id_len);
int millrace_gate_retire(millrace_gate_scope *scope, const uint8_t *id, size_t id_len);

/* Adds an entry to the block or allow list of one application's scope, or of all if `scope` is null. The entry applies
 * at once, stays when the policy changes, and replaces the policy's entry for the same prefix. MILLRACE_GATE_UNLIST
 * removes the entry. `prefix` is written as "192.0.2.0/24" or "2001:db8::1".
 */
int millrace_gate_list(millrace_gate *gate, const char *scope, const char *prefix, millrace_gate_entry entry);

/* Checks whether `token`, from an Initial packet, is from a Retry packet that the gate sent to `client` (address
 * and port). If so, the server must use `original` as the connection's original destination connection ID. The
 * packet's destination connection ID is the Retry's source connection ID (RFC 9000, section 7.3). Otherwise the
 * result is MILLRACE_GATE_NOT_FOUND: treat the packet as if it had no token. */
int millrace_gate_check_token(const millrace_gate_scope *scope, const struct sockaddr *client, socklen_t client_len,
			      const uint8_t *token, size_t token_len, millrace_gate_id *original);

/* Reads the counters of every scope, by the rule that refused packets or the reason why they passed. `counts` points to
 * an array of `room` elements. `have` receives the number of counters; if it is larger than `room`, only the first
 * `room` were written.
 */
int millrace_gate_statistics(const millrace_gate *gate, millrace_gate_count *counts, size_t room, size_t *have);

#ifdef __cplusplus
}
#endif

#endif
