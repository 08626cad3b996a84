/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A type for addresses that programs compare by words. */
#ifndef MILLRACE_ADDRESS_INTF_H
#define MILLRACE_ADDRESS_INTF_H

#include <linux/types.h>

/* An address in network byte order. IPv4 addresses are mapped to ::ffff:a.b.c.d. In Rust it is an array of 16 bytes. */
typedef __u32 address_words[4];

#endif
