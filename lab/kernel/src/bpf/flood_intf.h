/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the flood shares with userspace. The build writes Rust's types from here. */
#ifndef MILLRACE_FLOOD_INTF_H
#define MILLRACE_FLOOD_INTF_H

#include <linux/types.h>

/* Load-time configuration. */
struct flood_config {
	__u32 ifindex;	  /* to which frames are sent; 0: they are dropped */
	__u32 header_sum; /* of the IPv4 header's words, without source and checksum */
	__u32 network;	  /* of the sources, in host byte order */
	__u32 hosts;	  /* of them, minus 1; a power of two minus 1 */
};

#endif
