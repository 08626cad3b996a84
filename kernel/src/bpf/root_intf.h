/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Structures that the XDP root shares with kernel/src/xdp/root.rs, and with processes of other
 * versions: a change of the slots needs another name for root_xdp.
 */
#ifndef MILLRACE_ROOT_INTF_H
#define MILLRACE_ROOT_INTF_H

#include <linux/types.h>

/* Index into `root_slots`, in the order of turns. */
enum root_slot {
	ROOT_GATE,
	ROOT_GRAFT,
	ROOT_LEAVING, /* a process is about to detach the root: no other may join */
	ROOT_SLOTS,
};

struct root_config {
	__u32 slot; /* slot of the program that runs root_turn */
};

#endif
