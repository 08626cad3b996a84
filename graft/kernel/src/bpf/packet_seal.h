/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Maps that the dispatcher (packet.bpf.c) and the sealing programs (seal.bpf.c) share, and the calls between
 * them. Sealing (encryption and authentication) is a separate object file, since the verifier needs long for
 * the cryptography. It is loaded with the first sealed session.
 */
#ifndef MILLRACE_PACKET_SEAL_H
#define MILLRACE_PACKET_SEAL_H

#include "graft_packet.h"
#include "packet_active.h"
#include "packet_intf.h"
#include "seal_intf.h"

/* Indices in the program array for outgoing packets: packet_seal encrypts a packet, and then calls packet_tx_out. */
enum stage_tx {
	STAGE_SEAL,
	STAGE_OUT,
	STAGES_TX,
};

/* Indices in the program array for incoming packets: packet_open decrypts a packet, and then calls packet_rx_opened,
 * which handles the packet as if it had arrived unencrypted.
 */
enum stage_rx {
	STAGE_OPEN,
	STAGE_OPENED,
	STAGES_RX,
};

BPF_MAP(PROG_ARRAY, stages_tx, __u32, __u32, STAGES_TX);

BPF_MAP(PROG_ARRAY, stages_rx, __u32, __u32, STAGES_RX);

/* The datagram of an application or a function that is being sealed (encrypted) on this CPU. The dispatcher's state
 * `works` is separate, since it may describe a different packet while this one is sealed.
 */
struct seal_call {
	__u32 session;
	__u32 bytes;  /* bytes of the datagram behind the UDP header */
	__u32 reason; /* reason (enum graft_reason) that is counted for the packet; changed if sealing fails */
	__u32 is_behind; /* not 0: a function made the packet, which is sent after the application's packet */
	__u32 has_paths; /* number of the session's network paths */
	__u32 path; /* 1 + number of the network path to send by; 0: chosen according to the paths' weights */
};

BPF_MAP(PERCPU_ARRAY, seal_calls, __u32, struct seal_call, 1);

static __always_inline struct seal_call *seal_call(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&seal_calls, &zero);
}

/* Ring buffer of struct packet_message: messages from the peers' daemons. A full buffer may lose messages, since
 * daemons repeat those that get no answer.
 */
BPF_RING(messages, 16 << 10);

#endif
