/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the dispatcher (joint.bpf.c) and the stages of sealing (seal.bpf.c) have in common: maps, and the way from one to
 * the other. The stages are an object of their own, since its cryptography takes the verifier long: it is loaded with the
 * first sealed session.
 */
#ifndef MILLRACE_JOINT_SEAL_H
#define MILLRACE_JOINT_SEAL_H

#include "graft_packet.h"
#include "joint_active.h"
#include "joint_intf.h"
#include "seal_intf.h"

/* On the way out: seal, then the last verdict. */
enum stage_tx {
	STAGE_SEAL,
	STAGE_OUT,
	STAGES_TX,
};

/* On the way in: open, then on as if it had come so. */
enum stage_rx {
	STAGE_OPEN,
	STAGE_OPENED,
	STAGES_RX,
};

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, STAGES_TX);
	__type(key, __u32);
	__type(value, __u32);
} stages_tx SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, STAGES_RX);
	__type(key, __u32);
	__type(value, __u32);
} stages_rx SEC(".maps");

/* A datagram to be sealed: of an application, or of a function. So it has memory of its own beside `works`. */
struct seal_call {
	__u32 session;
	__u32 bytes;	 /* behind the UDP header */
	__u32 reason;	 /* what it is counted as, and what went wrong afterwards */
	__u32 is_behind; /* graft_work's */
	__u32 protocol;	 /* the session's */
	__u32 has_paths; /* the session's, too */
	__u32 path;	 /* 1 and more: by which it is to leave; 0: by any */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct seal_call);
} seal_calls SEC(".maps");

static __always_inline struct seal_call *seal_call(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&seal_calls, &zero);
}

/* What daemons say, a joint_word or a seal_heard each; what is not read in time is said again. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 16 << 10);
} words SEC(".maps");

#endif
