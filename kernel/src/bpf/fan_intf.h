/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Structures that all fan-out programs (which send copies of a packet to many receivers) share with userspace. The
 * build generates Rust's types from this header.
 */
#ifndef MILLRACE_FAN_INTF_H
#define MILLRACE_FAN_INTF_H

#include <linux/types.h>

/* The destination of copies. An IPv4 address is in the first 4 bytes, and the rest is zero. The fields that a checksum
 * covers come first.
 */
struct net_path {
	__u8 local[16];
	__u8 remote[16];
	__be16 local_port;
	__be16 remote_port;
	__be32 flow_label;  /* flow label of IPv6, 20 bits */
	__u8 family;	    /* IP version: 4 or 6 */
	__u8 traffic_class; /* DSCP and ECN */
	__u8 pad[2];
};

#endif
