/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The interface between cost.bpf.c and userspace. The build generates Rust types and constants from this header. */
#ifndef MILLRACE_COST_INTF_H
#define MILLRACE_COST_INTF_H

#include "shared.h"
#include <linux/types.h>

/* Kinds of kernel work whose time is measured. The values are the indexes of the arrays ns[] and calls[] of struct
 * cost_cpu; 0: other work.
 */
enum cost_event {
	COST_NET_RX = 1,
	COST_NET_TX = 2,
	COST_SEND = 3,
	COST_RECEIVE = 4,
	COST_IO_URING = 5,
	COST_LOCAL = 6,	  /* calls that send or receive on AF_UNIX and netlink sockets */
	COST_SOFTIRQ = 7, /* a softirq that is not networking */
	/* Length of the arrays that enum cost_event indexes. It is a power of two, since indexes are masked. */
	COST_EVENTS = 8,
};

/* How a system call uses a socket, and which argument is the socket. System calls with the values 1 to 6 are timed. */
enum cost_call {
	COST_CALL_SEND = 1,    /* a system call that sends; its first argument is always a socket */
	COST_CALL_RECEIVE = 2, /* a system call that receives; its first argument is always a socket */
	COST_CALL_WRITE = 3,   /* a system call that sends if the first argument is a socket */
	COST_CALL_READ = 4,    /* a system call that receives if the first argument is a socket */
	/* sendfile: sends if the first argument is a socket, receives if the second is */
	COST_CALL_SENDFILE = 5,
	COST_CALL_SPLICE = 6, /* splice: sends if the third argument is a socket, receives if the first is */
	/* a system call that neither sends nor receives; its first argument is a socket */
	COST_CALL_SOCKET = 7,
	COST_CALL_CREATE = 8, /* a system call that creates sockets of the family in its first argument */
};

/* The argument in which a kernel function gets its socket. */
enum cost_argument {
	COST_ARG_SOCKET = 1,  /* struct socket *, the first argument */
	COST_ARG_FILE = 2,    /* struct file *, the first argument */
	COST_ARG_TO = 3,      /* struct file *, the second argument */
	COST_ARG_KIOCB = 4,   /* struct kiocb *, the first argument */
	COST_ARG_REQUEST = 5, /* struct io_kiocb *, the first argument */
	COST_ARG_FD = 6,      /* a file descriptor, the first argument */
	COST_ARG_REGS = 7, /* struct pt_regs * of a system call whose first argument is a file descriptor */
};

#define COST_POINTS    32   /* largest number of timed functions, each with a pair of programs */
#define COST_CALLS     512  /* length of the array that is indexed by system call number */
#define COST_FRAMES    127  /* largest number of frames of a stack, as in kernel.perf_event_max_stack */
#define COST_WATCHED   256  /* largest number of processes that are sampled in user mode too */
#define COST_PROCESSES 8192 /* size of the map `processes`, whose entries userspace removes */

/* Configuration of the BPF programs, which userspace sets before it loads them. */
struct cost_config {
	__u32 pidns_ino;  /* userspace's PID namespace */
	__u32 half_bytes; /* size of one half of a CPU's double buffer */
	__u8 ring;	  /* 1: stacks go through the map `ring`, not through the double buffers */
	__u8 watch;	  /* 1: processes in the map `watched` are sampled in user mode too */
	__u8 pad[2];
	__u8 point_events[COST_POINTS];	   /* enum cost_event of each timed function */
	__u8 point_arguments[COST_POINTS]; /* enum cost_argument of each timed function */
	__u8 calls[COST_CALLS];		   /* enum cost_call by system call number; 0: uses no socket */
};

/* The sums of one CPU's times, and the socket call and softirq that run on it now. BPF programs on other CPUs never
 * write to this. Userspace writes the fields marked `userspace`, and sets `task`, `softirq` and `base` to 0 before it
 * attaches the programs.
 */
struct cost_cpu {
	/* `task` is the task's socket call that is timed now, `softirq` the running softirq; 0: none. Both consist of
	 * the start time in ns << 9 | enum point << 3 | enum cost_event. The start time in `task` is on the task clock,
	 * that in `softirq` on the monotonic clock.
	 */
	__u64 task;
	__u64 softirq;
	__u64 base; /* enum cost_event for all time of an io_uring worker or NAPI thread; 0 in other threads */
	__u64 softirq_ns; /* time in all softirqs, which the task clock leaves out */
	__u64 ns[COST_EVENTS];
	__u64 calls[COST_EVENTS];
	/* The part of ns[] and calls[] that was already added to the sums of processes. */
	__u64 seen_ns[COST_EVENTS];
	__u64 seen_calls[COST_EVENTS];
	__u64 samples;	      /* how often the sampler ran on this CPU */
	__u64 user_samples;   /* samples taken while the CPU was in user mode, without lost samples */
	__u64 lost_samples;   /* samples that were lost because the stack buffer was full */
	__u64 lost_stacks;    /* stacks that the kernel could not walk */
	__u64 lost_processes; /* how often a process's times were lost because the map `processes` was full */
	/* Number of task switches at which the task's unfinished socket call could not be saved in the map `inside`. */
	__u64 lost_tasks;
	__u64 writing;	 /* 1 while the sampler may be writing to its stack buffer */
	__u64 check_tid; /* userspace: ID of the thread whose socket calls are counted in checked[] */
	__u64 checked[COST_EVENTS]; /* number of socket calls of thread check_tid, by enum cost_event */
	__u64 epoch;		    /* userspace: how often the programs that time calls were attached */
	__u64 hidden; /* userspace: 1 if times and calls on this CPU are not summed by process */
	/* How often the BPF programs at system calls and task switches ran, even if ns[] and calls[] did not change. */
	__u64 system_calls;  /* all system calls, also those without sockets */
	__u64 switches;	     /* all task switches */
	__u64 other_storage; /* 1 once a task had task-local BPF storage of other BPF programs only */
	__u64 buffer;	     /* userspace: number of the buffer for stacks, from 1 on; 0: none */
	__u64 pad[6];	     /* fills the last cache line */
} SHARED;
_Static_assert(sizeof(struct cost_cpu) % 128 == 0, "no line is shared by two CPUs");

/* State that the samplers of all CPUs read. */
struct cost_control {
	__u32 half; /* 0 or 1: the half of each CPU's double buffer that samplers append to */
	__u32 pad;
} SHARED;

/* The header of one half of a CPU's double buffer. Records follow, up to half_bytes in all. */
struct cost_half {
	__u64 used_bytes; /* bytes of this half that records take */
};

/* The header of a sampled stack. Return addresses follow: the kernel's, then user mode's, each innermost first. */
struct cost_record {
	__u32 pid; /* tgid in userspace's PID namespace; 0: idle, or outside of the namespace */
	__u32 cpu;
	__u16 kernel_frames;
	__u16 user_frames;
	__u8 event;   /* enum cost_event in which the sample was taken; 0: in other work, or not known */
	__u8 watched; /* 1: the process is in `watched` */
	__u8 local;   /* 1: in a system call on an AF_UNIX or netlink socket */
	__u8 pad;
	__u64 cgroup; /* ID of the running task's cgroup v2 */
	__u8 name[16];
};

struct cost_process_key {
	__u64 cgroup; /* ID of the cgroup v2 */
	__u32 pid;    /* tgid in the initial PID namespace, where every process has one */
	__u32 pad;
};

struct cost_process {
	__u64 ns[COST_EVENTS];
	__u64 calls[COST_EVENTS];
	__u32 pid; /* tgid in userspace's PID namespace; 0: outside of the namespace */
	__u32 pad;
	__u8 name[16];
};

#endif
