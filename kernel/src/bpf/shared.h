/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* An attribute of structures that the generator of Rust's types reads (millrace-kernel-build). */
#ifndef MILLRACE_SHARED_H
#define MILLRACE_SHARED_H

/* Marks a structure in memory that is mapped into a process, which changes it while programs run. The structure's words
 * become atomics in Rust. The attribute follows the structure's closing brace.
 */
#define SHARED __attribute__((btf_decl_tag("shared")))

#endif
