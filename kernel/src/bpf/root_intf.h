/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What the XDP root shares with kernel/src/xdp/root.rs, and processes of different versions with each other: whoever
 * changes the slots gives root_xdp another name.
 */
#ifndef MILLRACE_ROOT_INTF_H
#define MILLRACE_ROOT_INTF_H

#include <linux/types.h>

/* Index into `root_slots`, in the order of turns. */
enum root_slot {
	ROOT_GATE,
	ROOT_GRAFT,
	ROOT_LEAVING, /* held by whoever is about to detach the root, so that nobody joins any more */
	ROOT_SLOTS,
};

struct root_config {
	__u32 slot; /* whose turn root_turn is */
};

#endif
