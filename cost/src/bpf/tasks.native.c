// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Compiles cost.bpf.c natively and runs it on a simulated CPU with two tasks and a clock. At a chosen reading of the
 * clock, a task switch or the sampler interrupts the program. tests/preemption.rs has the expected sums.
 */
#include <stddef.h>
#include <string.h>
#include <linux/types.h>
#include <linux/bpf.h>

#pragma clang diagnostic ignored "-Wunknown-attributes" /* preserve_access_index exists for BPF only */
#pragma clang diagnostic ignored "-Wunused-function"

/* Replacements for libbpf's macros and helpers. */
#undef __always_inline
#define __BPF_HELPERS__
#define __BPF_CORE_READ_H__
#define SEC(name)
#define __always_inline			       inline __attribute__((always_inline))
#define __noinline			       __attribute__((noinline))
#define __uint(name, value)		       int(*name)[value]
#define __type(name, value)		       typeof(value) *name
#define bpf_core_field_exists(field)	       1
#define bpf_core_type_size(type)	       sizeof(type)
#define bpf_ksym_exists(symbol)		       1
#define bpf_core_cast(pointer, type)	       ((const type *)(pointer))
#define __builtin_preserve_access_index(place) (place)
#define READ_1(from, a)			       ((from)->a)
#define READ_2(from, a, b)		       ((from)->a->b)
#define READ_3(from, a, b, c)		       ((from)->a->b->c)
#define READ(_1, _2, _3, name, ...)	       name
#define BPF_CORE_READ(from, ...)	       READ(__VA_ARGS__, READ_3, READ_2, READ_1)(from, __VA_ARGS__)
#define BPF_LOCAL_STORAGE_GET_F_CREATE	       1

static void *bpf_map_lookup_elem(void *map, const void *key);
static long bpf_map_update_elem(void *map, const void *key, const void *value, __u64 flags);
static void *bpf_task_storage_get(void *map, void *task, void *value, __u64 flags);
static __u64 bpf_ktime_get_ns(void);
static __u64 bpf_get_current_pid_tgid(void);
static void *bpf_get_current_task_btf(void);

static inline __u32 bpf_get_smp_processor_id(void)
{
	return 0;
}

static inline __u64 bpf_get_current_cgroup_id(void)
{
	return 1;
}

static inline long bpf_get_current_comm(void *name, __u32 bytes)
{
	memset(name, 0, bytes);
	return 0;
}

static inline long bpf_task_pt_regs(void *task)
{
	return (long)task;
}

static inline long bpf_get_stack(void *context, void *to, __u32 bytes, __u64 flags)
{
	return -1;
}

static inline long bpf_ringbuf_output(void *ring, void *from, __u64 bytes, __u64 flags)
{
	return -1;
}

static inline long bpf_probe_read_kernel(void *to, __u32 bytes, const void *from)
{
	memcpy(to, from, bytes);
	return 0;
}

#include "cost.bpf.c"

/* A task's kernel structure and storage, and its process's sums. */
struct task {
	struct task_struct kernel;
	__u64 place;
	__u32 pid;
	struct cost_process sums;
};

/* The tasks' number in userspace's PID namespace. No sum in this test depends on it. */
static struct pid_namespace namespace;
static struct pid number = {.numbers = {{.ns = &namespace}}};

static struct cost_cpu the_cpu;
static struct task tasks[2];
static struct task *current;
static __u64 now;

/* The kind of interruption, the number of the clock reading at which it comes, and whether it comes after or before
 * that reading. */
static enum { NOTHING, PREEMPTION, SAMPLER } intruder;
static int reading, behind;

#define OTHER_NS 10000000ULL /* time that the other task runs */
#define STEP_NS	 10ULL	     /* time between two readings of the clock */

static void switch_to(struct task *next)
{
	__u64 arguments[3] = {1, (__u64)&current->kernel, (__u64)&next->kernel};

	cost_sched_switch(arguments);
	current = next;
}

static void intrude(void)
{
	struct task *preempted = current;

	if (intruder == SAMPLER) {
		intruder = NOTHING;
		cost_sample(0);
	} else if (intruder == PREEMPTION) {
		intruder = NOTHING;
		switch_to(&tasks[preempted == &tasks[0]]);
		now += OTHER_NS;
		switch_to(preempted);
	}
}

static __u64 bpf_ktime_get_ns(void)
{
	int here = intruder && reading-- == 0;
	__u64 read;

	if (here && !behind)
		intrude();
	now += STEP_NS;
	read = now;
	if (here && behind)
		intrude();
	return read;
}

static __u64 bpf_get_current_pid_tgid(void)
{
	return (__u64)current->pid << 32 | current->pid;
}

static void *bpf_get_current_task_btf(void)
{
	return &current->kernel;
}

static void *bpf_map_lookup_elem(void *map, const void *key)
{
	if (map == (void *)&cpus)
		return &the_cpu;
	if (map == (void *)&processes)
		return &tasks[((const struct cost_process_key *)key)->pid - 1].sums;
	return 0;
}

static long bpf_map_update_elem(void *map, const void *key, const void *value, __u64 flags)
{
	return 0;
}

static void *bpf_task_storage_get(void *map, void *task, void *value, __u64 flags)
{
	struct task *of = (struct task *)task;

	if (flags)
		of->kernel.bpf_storage = &of->place;
	return of->kernel.bpf_storage ? &of->place : 0;
}

/* Times of the first task's process and of the whole CPU, in ns. */
struct tasks_result {
	__u64 call_ns;
	__u64 worker_ns;
	__u64 cpu_ns;
	__u64 clock_ns;
	__u64 left; /* 1 if the clock was read too few times for the interruption */
};

/* Runs a task that makes one socket call of `call_ns`, timed at a kernel function, with an interruption of kind `what`
 * at clock reading `at`. With `worker`, the task is a worker thread of io_uring, whose whole time is counted as
 * networking.
 */
void tasks_run(int what, int at, int is_behind, int worker, __u64 call_ns, struct tasks_result *result);

void tasks_run(int what, int at, int is_behind, int worker, __u64 call_ns, struct tasks_result *result)
{
	__u32 event, pid;

	memset(&the_cpu, 0, sizeof(the_cpu));
	memset(tasks, 0, sizeof(tasks));
	for (pid = 1; pid <= 2; pid++) {
		tasks[pid - 1].pid = pid;
		tasks[pid - 1].kernel.group_leader = &tasks[pid - 1].kernel;
		tasks[pid - 1].kernel.thread_pid = &number;
	}
	tasks[0].kernel.flags = worker ? PF_IO_WORKER : 0;
	now = 1ULL << 40;
	current = &tasks[1];
	intruder = NOTHING;
	switch_to(&tasks[0]);
	result->clock_ns = now;

	intruder = what;
	reading = at;
	behind = is_behind;
	begin(FIRST_FUNCTION, COST_SEND, 0);
	now += call_ns;
	end(FIRST_FUNCTION, FIRST_FUNCTION);
	result->left = intruder != NOTHING;
	intruder = NOTHING;
	switch_to(&tasks[1]);

	result->clock_ns = now - result->clock_ns;
	result->call_ns = tasks[0].sums.ns[COST_SEND];
	result->worker_ns = tasks[0].sums.ns[COST_IO_URING];
	result->cpu_ns = 0;
	for (event = COST_NET_RX; event <= COST_LOCAL; event++)
		result->cpu_ns += the_cpu.ns[event];
}
