/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Address and port of one end of a connection. IPv4 addresses are stored as mapped IPv6 addresses
 * (::ffff:a.b.c.d).
 */
#ifndef MILLRACE_HOOK_END_H
#define MILLRACE_HOOK_END_H

#include "graft_hook_intf.h"
#include <stdbool.h>
#include <bpf/bpf_endian.h>

#define AF_INET	  2
#define AF_INET6  10
#define LOOPBACK4 0x7f000001

static __always_inline void set_v4(struct hook_end *end, __be32 address)
{
	end->address[0] = 0;
	end->address[1] = 0;
	end->address[2] = bpf_htonl(0xffff);
	end->address[3] = address;
}

static __always_inline bool is_v4(const struct hook_end *end)
{
	return !end->address[0] && !end->address[1] && end->address[2] == bpf_htonl(0xffff);
}

#endif
