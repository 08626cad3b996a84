/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The kernel's numbers of the softirq vectors for networking. */
#ifndef MILLRACE_SOFTIRQ_H
#define MILLRACE_SOFTIRQ_H

enum softirq {
	NET_TX_SOFTIRQ = 2,
	NET_RX_SOFTIRQ = 3,
};

#endif
