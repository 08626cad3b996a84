/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Addresses that programs compare by words. */
#ifndef MILLRACE_ADDRESS_INTF_H
#define MILLRACE_ADDRESS_INTF_H

#include <linux/types.h>

/* In network order; IPv4 as ::ffff:a.b.c.d. Rust has it as 16 bytes. */
typedef __u32 address_words[4];

#endif
