// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* The BPF object that the tests of the barrier load. */
#include "barrier.h"

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
