// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The BPF object for tests of barrier.h, which lets userspace wait for runs of BPF programs. */
#include "barrier.h"

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
