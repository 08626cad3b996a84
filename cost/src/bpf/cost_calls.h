/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Finds out whether a system call or an io_uring request sends or receives, and on which socket. */
#ifndef MILLRACE_COST_CALLS_H
#define MILLRACE_COST_CALLS_H

#include "cost_state.h"
#include <linux/io_uring.h>

/* --- System calls --- */

/* Returns an argument of a system call, counted from 0, or -1 on an unknown architecture. */
static __always_inline __u64 argument(void *context, int number)
{
	struct pt_regs___arm64 *arm64 = context;
	struct pt_regs___x86 *x86 = context;

	if (bpf_core_field_exists(x86->di))
		return number == 0 ? x86->di : number == 1 ? x86->si : x86->dx;
	if (bpf_core_field_exists(arm64->pstate))
		return arm64->regs[number];
	return -1;
}

/* Reports whether the caller runs in 32-bit mode, where system calls have other numbers. */
static __always_inline int is_compat(void *context)
{
	struct pt_regs___arm64 *arm64 = context;
	struct pt_regs___x86 *x86 = context;

	if (bpf_core_field_exists(x86->di))
		return x86->cs == 0x23; /* __USER32_CS */
	if (bpf_core_field_exists(arm64->pstate))
		return arm64->pstate & 0x10; /* PSR_MODE32_BIT */
	return 0;
}

/* Returns the calling process's open file, or 0. Another thread may close the file at any moment: reads then return
 * stale data, but never fault.
 */
static __always_inline struct file *file_of(__u64 fd)
{
	struct task_struct *task = (void *)bpf_get_current_task_btf();
	/* Plain loads through BTF pointers return 0 on a fault. They are several times as fast as helper calls. */
	struct fdtable *table = task->files->fdt;
	struct file *file = 0;

	fd = (__u32)fd;
	if (fd < table->max_fds)
		bpf_probe_read_kernel(&file, sizeof(file), (void *)table->fd + fd * sizeof(file));
	return file;
}

static __always_inline int is_socket(const struct file *file)
{
	__u16 mode;

	if (!file)
		return 0;
	if (bpf_ksym_exists(bpf_rdonly_cast)) /* from Linux 6.2 on, the cast allows plain loads */
		mode = bpf_core_cast(file, struct file)->f_inode->i_mode;
	else
		mode = BPF_CORE_READ(file, f_inode, i_mode);
	return (mode & S_IFMT) == S_IFSOCK;
}

static __always_inline int is_local_family(__u64 family)
{
	return family == AF_UNIX || family == AF_NETLINK;
}

/* Reports whether a socket is AF_UNIX or netlink. Another thread may close it at any moment: reads then return stale
 * data, but never fault.
 */
static __always_inline int is_local_socket(const struct socket *socket)
{
	__u16 family;

	if (!socket)
		return 0;
	if (bpf_ksym_exists(bpf_rdonly_cast))
		family = bpf_core_cast(socket, struct socket)->sk->__sk_common.skc_family;
	else
		family = BPF_CORE_READ(socket, sk, __sk_common.skc_family);
	return is_local_family(family);
}

/* Reports whether a file is an AF_UNIX or netlink socket. */
static __always_inline int is_local(const struct file *file)
{
	if (!file)
		return 0;
	if (bpf_ksym_exists(bpf_rdonly_cast))
		return is_local_socket(bpf_core_cast(file, struct file)->private_data);
	return is_local_socket(BPF_CORE_READ(file, private_data));
}

/* A call's direction, and the file that it sends or receives on. */
struct call {
	__u64 direction; /* COST_SEND, COST_RECEIVE, or 0 */
	const struct file *file;
};

/* Returns a call on this file. Its direction is `direction` if the file is a socket, or else 0. */
static __always_inline struct call if_socket(const struct file *file, __u64 direction)
{
	return (struct call){is_socket(file) ? direction : 0, file};
}

/* Returns the direction and the file of a system call of this kind (enum cost_call). */
static __always_inline struct call describe_call(void *regs, __u8 call)
{
	struct call moves;

	switch (call) {
	case COST_CALL_SEND:
		return (struct call){COST_SEND, file_of(argument(regs, 0))};
	case COST_CALL_RECEIVE:
		return (struct call){COST_RECEIVE, file_of(argument(regs, 0))};
	case COST_CALL_WRITE:
		return if_socket(file_of(argument(regs, 0)), COST_SEND);
	case COST_CALL_READ:
		return if_socket(file_of(argument(regs, 0)), COST_RECEIVE);
	case COST_CALL_SENDFILE:
		moves = if_socket(file_of(argument(regs, 0)), COST_SEND);
		return moves.direction ? moves : if_socket(file_of(argument(regs, 1)), COST_RECEIVE);
	case COST_CALL_SPLICE:
		moves = if_socket(file_of(argument(regs, 2)), COST_SEND);
		return moves.direction ? moves : if_socket(file_of(argument(regs, 0)), COST_RECEIVE);
	default:
		return (struct call){};
	}
}

/* Reports whether the current task is in a system call on an AF_UNIX or netlink socket. A sampled stack does not show
 * the socket's family before the system call has reached the functions of that family.
 */
static __always_inline int in_local_call(void)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct pt_regs___arm64 *arm64;
	struct pt_regs___x86 *x86;
	struct call moves;
	__u64 number;
	void *regs;

	/* Kernel threads and io_uring's workers make no system calls, so their saved registers mean nothing. */
	if (task->flags & (PF_KTHREAD | PF_IO_WORKER))
		return 0;
	regs = (void *)bpf_task_pt_regs(task);
	x86 = regs;
	arm64 = regs;
	if (bpf_core_field_exists(x86->di))
		number = x86->orig_ax;
	else if (bpf_core_field_exists(arm64->pstate))
		number = arm64->syscallno;
	else
		return 0;
	if (number >= COST_CALLS || is_compat(regs))
		return 0;
	switch (config.calls[number]) {
	case 0:
		return 0;
	case COST_CALL_CREATE:
		return is_local_family(argument(regs, 0));
	case COST_CALL_SOCKET:
		moves = if_socket(file_of(argument(regs, 0)), COST_SEND);
		break;
	default:
		moves = describe_call(regs, config.calls[number]);
	}
	return moves.direction && is_local(moves.file);
}

/* --- Functions --- */

/* Reports whether the socket of a timed function is AF_UNIX or netlink. `argument_kind` is an enum cost_argument. */
static __always_inline int is_local_argument(__u64 *ctx, __u8 argument_kind)
{
	switch (argument_kind) {
	case COST_ARG_SOCKET:
		return is_local_family(BPF_CORE_READ((struct socket *)ctx[0], sk, __sk_common.skc_family));
	case COST_ARG_FILE:
		return is_local((struct file *)ctx[0]);
	case COST_ARG_TO:
		return is_local((struct file *)ctx[1]);
	case COST_ARG_KIOCB:
		return is_local(BPF_CORE_READ((struct kiocb *)ctx[0], ki_filp));
	case COST_ARG_REQUEST:
		return is_local(BPF_CORE_READ((struct io_kiocb *)ctx[0], file));
	case COST_ARG_FD:
		return is_local(file_of(ctx[0]));
	case COST_ARG_REGS:
		return is_local(file_of(argument((void *)ctx[0], 0)));
	default:
		return 0;
	}
}

/* --- Requests of io_uring --- */

/* Opcodes that are missing in the headers of Linux 6.1. */
enum {
	URING_READ_MULTISHOT = 49,
	URING_RECV_ZC = 58,
	URING_READV_FIXED = 60,
	URING_WRITEV_FIXED = 61,
};

#define REQ_F_FIXED_FILE 1 /* the request's file number is an index of the ring's registered files */

/* Returns the file of a request that io_uring has not looked up yet. Returns 0 for a registered file: only the ring
 * knows which file has that number.
 */
static __always_inline struct file *file_of_request(const struct io_kiocb *request)
{
	return request->flags & REQ_F_FIXED_FILE ? 0 : file_of(request->cqe.fd);
}

static __always_inline struct call describe_request(const struct io_kiocb *request)
{
	const struct file *file = file_of_request(request);

	switch (request->opcode) {
	case IORING_OP_SENDMSG:
	case IORING_OP_SEND:
	case IORING_OP_SEND_ZC:
	case IORING_OP_SENDMSG_ZC:
		return (struct call){COST_SEND, file};
	case IORING_OP_RECVMSG:
	case IORING_OP_RECV:
	case URING_RECV_ZC:
		return (struct call){COST_RECEIVE, file};
	case IORING_OP_WRITE:
	case IORING_OP_WRITEV:
	case IORING_OP_WRITE_FIXED:
	case URING_WRITEV_FIXED:
		return if_socket(file, COST_SEND);
	case IORING_OP_READ:
	case IORING_OP_READV:
	case IORING_OP_READ_FIXED:
	case URING_READV_FIXED:
	case URING_READ_MULTISHOT:
		return if_socket(file, COST_RECEIVE);
	default:
		return (struct call){};
	}
}

#endif
