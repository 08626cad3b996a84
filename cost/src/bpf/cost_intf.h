/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The interface between cost.bpf.c and userspace. The build generates Rust's types and constants from it. */
#ifndef MILLRACE_COST_INTF_H
#define MILLRACE_COST_INTF_H

#include "shared.h"
#include <linux/types.h>

/* 0 is no event: indexes into ns[] and calls[] are these. */
enum cost_event {
	COST_NET_RX = 1,
	COST_NET_TX = 2,
	COST_SEND = 3,
	COST_RECEIVE = 4,
	COST_IO_URING = 5,
	COST_LOCAL = 6,	  /* calls that send or receive on AF_UNIX and netlink sockets */
	COST_SOFTIRQ = 7, /* a softirq that is not networking */
	COST_EVENTS = 8,  /* a power of two */
};

/* The use that a system call makes of a socket, and the socket's argument. The first six are timed. */
enum cost_call {
	COST_CALL_SEND = 1, /* always a socket */
	COST_CALL_RECEIVE = 2,
	COST_CALL_WRITE = 3, /* sends if the first argument is a socket */
	COST_CALL_READ = 4,
	COST_CALL_SENDFILE = 5, /* sends if the first is, receives if the second is */
	COST_CALL_SPLICE = 6,	/* sends if the third is, receives if the first is */
	COST_CALL_SOCKET = 7,	/* does something else with the socket in its first argument */
	COST_CALL_CREATE = 8,	/* makes sockets of the family in its first argument */
};

/* Where a function has its socket. */
enum cost_argument {
	COST_ARG_SOCKET = 1,  /* struct socket *, the first argument */
	COST_ARG_FILE = 2,    /* struct file *, the first argument */
	COST_ARG_TO = 3,      /* struct file *, the second argument */
	COST_ARG_KIOCB = 4,   /* struct kiocb *, the first argument */
	COST_ARG_REQUEST = 5, /* struct io_kiocb *, the first argument */
	COST_ARG_FD = 6,      /* a number, the first argument */
	COST_ARG_REGS = 7,    /* struct pt_regs *, the first argument, whose own first argument is a number */
};

#define COST_POINTS    32   /* pairs of programs for functions that send or receive */
#define COST_CALLS     512  /* system call numbers that are known */
#define COST_FRAMES    127  /* of one stack; what sysctl kernel.perf_event_max_stack allows by default */
#define COST_WATCHED   256  /* processes that are sampled always */
#define COST_PROCESSES 8192 /* processes with calls between two readings */

/* Load-time configuration. */
struct cost_config {
	__u32 pidns_ino;  /* userspace's PID namespace */
	__u32 half_bytes; /* size of one half of a CPU's double buffer */
	__u8 ring;	  /* stacks travel through the ring buffer */
	__u8 watch;	  /* look at the map `watched` */
	__u8 pad[2];
	__u8 point_events[COST_POINTS];	   /* enum cost_event of each point */
	__u8 point_arguments[COST_POINTS]; /* enum cost_argument of each point */
	__u8 calls[COST_CALLS];		   /* enum cost_call by number; 0: none of them */
};

/* One per CPU; only that CPU's programs write to it, but for check_tid and what they say about it. */
struct cost_cpu {
	/* The running event, one word per context: its begin in ns << 9, point << 3, event; 0: nothing that is timed.
	 * The task's begins are on the task clock, the softirq's on the monotonic clock.
	 */
	__u64 task;
	__u64 softirq;
	__u64 base;	  /* low bits of the word of a thread that is an event as a whole */
	__u64 softirq_ns; /* in all softirqs: what the task clock leaves out */
	__u64 ns[COST_EVENTS];
	__u64 calls[COST_EVENTS];
	/* The part of ns[] and calls[] that was handed to processes. */
	__u64 seen_ns[COST_EVENTS];
	__u64 seen_calls[COST_EVENTS];
	__u64 samples;		    /* all runs of the sampler */
	__u64 user_samples;	    /* runs that found user mode, as far as it looked */
	__u64 lost_samples;	    /* no room in the buffer */
	__u64 lost_stacks;	    /* the kernel could not walk the stack */
	__u64 lost_processes;	    /* no room in `processes` */
	__u64 lost_tasks;	    /* no storage for a task's place in a call */
	__u64 writing;		    /* the sampler may be writing to either half */
	__u64 check_tid;	    /* userspace: count the calls of this thread of its namespace ... */
	__u64 checked[COST_EVENTS]; /* ... here */
	__u64 epoch;		    /* userspace: how often the programs that time events were attached */
	__u64 hidden;		    /* userspace: what processes do on this CPU is not asked for */
	/* Further runs of the programs that time events, beyond ns[] and calls[]. */
	__u64 system_calls;  /* all, also those that have nothing to do with sockets */
	__u64 switches;	     /* of tasks */
	__u64 other_storage; /* tasks were seen that have storage of other programs */
	__u64 buffer;	     /* userspace: number of the buffer for stacks, from 1 on; 0: none */
	__u64 pad[6];	     /* to whole cache lines */
} SHARED;
_Static_assert(sizeof(struct cost_cpu) % 128 == 0, "no line is shared by two CPUs");

/* The part that all CPUs read. */
struct cost_control {
	__u32 half; /* 0 or 1: the half that samplers append to */
	__u32 pad;
} SHARED;

/* One half of a CPU's double buffer; records follow up to half_bytes. */
struct cost_half {
	__u64 used_bytes; /* of records */
};

/* A sampled stack: frames follow, the kernel's first, innermost first. */
struct cost_record {
	__u32 pid; /* tgid in userspace's namespace; 0: idle, or outside of it */
	__u32 cpu;
	__u16 kernel_frames;
	__u16 user_frames;
	__u8 event; /* enum cost_event; 0: none, or not known */
	__u8 watched;
	__u8 local; /* in a system call on an AF_UNIX or netlink socket */
	__u8 pad;
	__u64 cgroup; /* v2, of what was running */
	__u8 name[16];
};

struct cost_process_key {
	__u64 cgroup; /* v2 */
	__u32 pid;    /* tgid in the initial namespace, so that there is one */
	__u32 pad;
};

struct cost_process {
	__u64 ns[COST_EVENTS];
	__u64 calls[COST_EVENTS];
	__u32 pid; /* tgid in userspace's namespace; 0: outside of it */
	__u32 pad;
	__u8 name[16];
};

#endif
