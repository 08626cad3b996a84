// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* What the tests of this crate load: the barrier, and the structures that no program of its own has. */
#include "barrier.h"
#include "fan_intf.h"

struct net_path path;

char LICENSE[] SEC("license") = "Dual BSD/GPL";
