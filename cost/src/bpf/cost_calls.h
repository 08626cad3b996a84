/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Which event a system call or a request of io_uring is. */
#ifndef MILLRACE_COST_CALLS_H
#define MILLRACE_COST_CALLS_H

#include "cost_state.h"
#include <linux/io_uring.h>

/* --- System calls --- */

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

/* Whether the caller is a 32-bit program, whose call numbers mean something else. */
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

/* The calling process' open file, or 0. It may be closed at any moment: what is read then is old, not invalid. */
static __always_inline struct file *file_of(__u64 fd)
{
	struct task_struct *task = (void *)bpf_get_current_task_btf();
	/* Plain loads, which fault to 0: several times as fast as a helper for each. */
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
	if (bpf_ksym_exists(bpf_rdonly_cast)) /* from 6.2 on: plain loads here too */
		mode = bpf_core_cast(file, struct file)->f_inode->i_mode;
	else
		mode = BPF_CORE_READ(file, f_inode, i_mode);
	return (mode & S_IFMT) == S_IFSOCK;
}

static __always_inline __u64 send_if_socket(const struct file *file)
{
	return is_socket(file) ? COST_SEND : 0;
}

static __always_inline __u64 receive_if_socket(const struct file *file)
{
	return is_socket(file) ? COST_RECEIVE : 0;
}

static __always_inline __u64 event_of_call(void *regs, __u8 call)
{
	__u64 event;

	switch (call) {
	case COST_CALL_SEND:
		return COST_SEND;
	case COST_CALL_RECEIVE:
		return COST_RECEIVE;
	case COST_CALL_WRITE:
		return send_if_socket(file_of(argument(regs, 0)));
	case COST_CALL_READ:
		return receive_if_socket(file_of(argument(regs, 0)));
	case COST_CALL_SENDFILE:
		event = send_if_socket(file_of(argument(regs, 0)));
		return event ? event : receive_if_socket(file_of(argument(regs, 1)));
	case COST_CALL_SPLICE:
		event = send_if_socket(file_of(argument(regs, 2)));
		return event ? event : receive_if_socket(file_of(argument(regs, 0)));
	default:
		return 0;
	}
}

/* --- Requests of io_uring --- */

/* What the headers of Linux 6.1 do not have yet. */
enum {
	URING_READ_MULTISHOT = 49,
	URING_RECV_ZC = 58,
	URING_READV_FIXED = 60,
	URING_WRITEV_FIXED = 61,
};

#define REQ_F_FIXED_FILE 1 /* the number is one of the ring's registered files */

/* io_uring has not looked its file up yet. Which file is registered at a number only the ring knows: 0 then. */
static __always_inline struct file *file_of_request(const struct io_kiocb *request)
{
	return request->flags & REQ_F_FIXED_FILE ? 0 : file_of(request->cqe.fd);
}

static __always_inline __u64 event_of_request(const struct io_kiocb *request)
{
	switch (request->opcode) {
	case IORING_OP_SENDMSG:
	case IORING_OP_SEND:
	case IORING_OP_SEND_ZC:
	case IORING_OP_SENDMSG_ZC:
		return COST_SEND;
	case IORING_OP_RECVMSG:
	case IORING_OP_RECV:
	case URING_RECV_ZC:
		return COST_RECEIVE;
	case IORING_OP_WRITE:
	case IORING_OP_WRITEV:
	case IORING_OP_WRITE_FIXED:
	case URING_WRITEV_FIXED:
		return send_if_socket(file_of_request(request));
	case IORING_OP_READ:
	case IORING_OP_READV:
	case IORING_OP_READ_FIXED:
	case URING_READV_FIXED:
	case URING_READ_MULTISHOT:
		return receive_if_socket(file_of_request(request));
	default:
		return 0;
	}
}

#endif
