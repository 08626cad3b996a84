/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Structures that the XDP root shares with kernel/src/xdp/root.rs, and with processes of other versions of this
 * software. If the slots change, root_xdp must get another name.
 */
#ifndef MILLRACE_ROOT_INTF_H
#define MILLRACE_ROOT_INTF_H

#include <linux/types.h>

/* Index into `root_slots`. The slots of programs are in the order in which they are called. */
enum root_slot {
	ROOT_GATE,
	ROOT_GRAFT,
	/* This slot is not empty while a process is about to detach root_xdp. Other processes then add no program to a
	 * slot.
	 */
	ROOT_LEAVING,
	ROOT_SLOTS,
};

struct root_config {
	__u32 slot; /* enum root_slot of the process that loads root_turn */
};

#endif
