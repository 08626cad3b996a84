/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Addresses that programs compare by words. */
#ifndef MILLRACE_ADDRESS_INTF_H
#define MILLRACE_ADDRESS_INTF_H

#include <linux/types.h>

/* An address in network byte order; IPv4 is ::ffff:a.b.c.d. Rust has 16 bytes in its place. */
typedef __u32 address_words[4];

#endif
