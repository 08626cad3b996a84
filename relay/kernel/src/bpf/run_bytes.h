/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What is kept of a stream behind a hole. */
#ifndef MILLRACE_RUN_BYTES_H
#define MILLRACE_RUN_BYTES_H

#include "frames.h"

#define RUNS	  64	/* streams whose run is kept at a time; a power of two */
#define RUN_BYTES 65536 /* a power of two */

/* The bytes of a run, see struct relay_ingress. */
struct run_bytes {
	__u32 owner; /* one more than the index of its ingress; 0: nobody's */
	__u32 pad;
	__u8 bytes[RUN_BYTES + FRAMES_MAX + 16];
};

#endif
