/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The fixed headers of RTP and RTCP (RFC 3550), which SRTP leaves in the clear. Plain C: it also compiles natively, and
 * testkit/parsers compares its results with those of the Rust parser in millrace-fanout.
 */
#ifndef MILLRACE_RTP_H
#define MILLRACE_RTP_H

#include "bytes.h"

#define RTP_VERSION	   2
#define RTP_HEADER_BYTES   12
#define RTCP_HEADER_BYTES  8  /* RTCP header, including the SSRC of the report's author */
#define RTCP_REPORT_BYTES  28 /* the part of a sender report in front of its report blocks */
#define RTCP_SENDER_REPORT 200
/* RTCP packet types on a port shared with RTP: payload types with the marker bit set (RFC 5761, section 4). */
#define RTCP_FIRST 192
#define RTCP_LAST  223

enum rtp_kind {
	RTP_NOT = 0,
	RTP_MEDIA,
	RTP_CONTROL,
};

struct rtp_packet {
	__u32 ssrc;
	__u32 timestamp;
	__u32 ntp_middle; /* middle 32 bits of the NTP time of a complete sender report; 0 for other packets */
	__u16 sequence;
	__u8 kind;   /* enum rtp_kind */
	__u8 second; /* second byte of the packet */
};

/* Classifies a payload of `bytes` bytes. `header` has its first RTCP_REPORT_BYTES; bytes after the
 * payload's end are undefined.
 */
static __always_inline enum rtp_kind rtp_parse(const __u8 *header, __u32 bytes, struct rtp_packet *packet)
{
	*packet = (struct rtp_packet){.second = header[1]};
	if (bytes < RTCP_HEADER_BYTES || header[0] >> 6 != RTP_VERSION)
		return RTP_NOT;
	if (packet->second >= RTCP_FIRST && packet->second <= RTCP_LAST) {
		packet->ssrc = __builtin_bswap32(load32(header + 4));
		if (packet->second == RTCP_SENDER_REPORT && bytes >= RTCP_REPORT_BYTES)
			packet->ntp_middle = __builtin_bswap32(load32(header + 10));
		return packet->kind = RTP_CONTROL;
	}
	if (bytes < RTP_HEADER_BYTES)
		return RTP_NOT;
	packet->sequence = __builtin_bswap16(load16(header + 2));
	packet->timestamp = __builtin_bswap32(load32(header + 4));
	packet->ssrc = __builtin_bswap32(load32(header + 8));
	return packet->kind = RTP_MEDIA;
}

#endif
