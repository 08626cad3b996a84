/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The fields of kernel structures that the programs read. CO-RE finds their offsets on the running kernel. */
#ifndef MILLRACE_COST_KERNEL_H
#define MILLRACE_COST_KERNEL_H

#include <linux/types.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#define KERNEL __attribute__((preserve_access_index))

struct inode {
	unsigned short i_mode;
} KERNEL;

struct file {
	struct inode *f_inode;
	void *private_data; /* struct socket, if the file is a socket */
} KERNEL;

struct sock_common {
	unsigned short skc_family;
} KERNEL;

struct sock {
	struct sock_common __sk_common;
} KERNEL;

struct socket {
	struct sock *sk;
} KERNEL;

struct kiocb {
	struct file *ki_filp;
} KERNEL;

struct fdtable {
	unsigned int max_fds;
	struct file **fd;
} KERNEL;

struct files_struct {
	struct fdtable *fdt;
} KERNEL;

struct ns_common {
	unsigned int inum;
} KERNEL;

struct pid_namespace {
	struct ns_common ns;
} KERNEL;

/* The number of a thread in one PID namespace. */
struct upid {
	int nr;
	struct pid_namespace *ns;
} KERNEL;

struct pid {
	unsigned int level;
	/* one number for each PID namespace, from the initial one (level 0) to the process's own (`level`) */
	struct upid numbers[];
} KERNEL;

struct task_struct {
	unsigned int flags;
	char comm[16];
	struct files_struct *files;
	struct task_struct *group_leader;
	struct pid *thread_pid;
	void *bpf_storage;
} KERNEL;

struct io_cqe {
	int fd;
} KERNEL;

struct io_kiocb {
	struct file *file; /* the request's file, valid once io_uring has looked it up */
	__u8 opcode;
	unsigned int flags; /* 64 bits wide on newer kernels; CO-RE adapts the load */
	struct io_cqe cqe;
} KERNEL;

/* The registers of a system call. Only the running architecture's structure has these fields. */
struct pt_regs___x86 {
	unsigned long di, si, dx, cs, orig_ax;
} KERNEL;

struct pt_regs___arm64 {
	__u64 regs[31];
	__u64 pstate;
	int syscallno;
} KERNEL;

#define S_IFMT	     0170000
#define S_IFSOCK     0140000
#define AF_UNIX	     1
#define AF_NETLINK   16
#define PF_IO_WORKER 0x00000010 /* io_uring's workers and its SQPOLL threads */
#define PF_KTHREAD   0x00200000

#endif
