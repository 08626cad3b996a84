/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Memory for stream bytes that arrived after a hole (a gap in the stream), until the hole is filled. */
#ifndef MILLRACE_RUN_BYTES_H
#define MILLRACE_RUN_BYTES_H

#include "frames.h"

#define RUNS	  64	/* number of run buffers, each for one stream with a hole; a power of two */
#define RUN_BYTES 65536 /* the most bytes after a hole in a stream that are stored; a power of two */

/* Buffer for a run: gapless stream bytes that arrived after a hole, see `run` in struct relay_ingress. */
struct run_bytes {
	__u32 owner; /* index of the stream's entry in `ingresses`, plus 1; 0: no stream owns the buffer */
	__u32 pad;
	__u8 bytes[RUN_BYTES + FRAMES_MAX + 16];
};

#endif
