/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Marks structures for Rust, which has them from the headers (millrace-kernel-build). */
#ifndef MILLRACE_SHARED_H
#define MILLRACE_SHARED_H

/* Behind a structure that is mapped into a process, which changes it while programs run: its words are atomics there. */
#define SHARED __attribute__((btf_decl_tag("shared")))

#endif
