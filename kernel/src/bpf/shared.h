/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Marks structures for Rust, whose types are written from the headers (millrace-kernel-build). */
#ifndef MILLRACE_SHARED_H
#define MILLRACE_SHARED_H

/* Follows a structure that is mapped into a process, which changes it while programs run. Its words
 * become atomics in Rust.
 */
#define SHARED __attribute__((btf_decl_tag("shared")))

#endif
