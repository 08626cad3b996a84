/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Structures that the flood shares with userspace. The build generates Rust's types from this header. */
#ifndef MILLRACE_FLOOD_INTF_H
#define MILLRACE_FLOOD_INTF_H

#include <linux/types.h>

/* Load-time configuration of the flood program (flood.bpf.c). */
struct flood_config {
	__u32 ifindex;	  /* interface that frames are sent on; 0: frames are dropped */
	__u32 header_sum; /* sum of the IPv4 header's 16-bit words, without source address and checksum */
	__u32 network;	  /* lowest source address, in host byte order */
	__u32 hosts;	  /* number of sources minus 1; a power of two minus 1 */
};

#endif
