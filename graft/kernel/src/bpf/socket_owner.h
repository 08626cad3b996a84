/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Reads the owner of a TCP socket (user and group), as netfilter matches it. CO-RE finds the offsets. */
#ifndef MILLRACE_SOCKET_OWNER_H
#define MILLRACE_SOCKET_OWNER_H

#include "util.h"

#define KERNEL __attribute__((preserve_access_index))

typedef struct {
	unsigned int val;
} KERNEL kuid_t;

typedef struct {
	unsigned int val;
} KERNEL kgid_t;

struct cred {
	kuid_t fsuid;
	kgid_t fsgid;
} KERNEL;

struct file {
	const struct cred *f_cred;
} KERNEL;

struct socket {
	struct file *file;
} KERNEL;

struct sock {
	struct socket *sk_socket;
} KERNEL;

/* Reads user and group of a socket. Both are 0 (root) if the socket has no file, as kernel sockets have none.
 */
static __always_inline void read_owner(struct bpf_sock *sk, __u32 *uid, __u32 *gid)
{
	const struct sock *kernel = (const struct sock *)bpf_skc_to_tcp_sock(sk);
	const struct cred *owner;

	*uid = 0;
	*gid = 0;
	if (!kernel)
		return;
	owner = kernel->sk_socket->file->f_cred;
	*uid = owner->fsuid.val;
	*gid = owner->fsgid.val;
}

#endif
