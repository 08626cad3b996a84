/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The state of the CPU time observer: its BPF maps, the socket call and softirq that each CPU runs now with their start
 * times, and the sums of times by process.
 */
#ifndef MILLRACE_COST_STATE_H
#define MILLRACE_COST_STATE_H

#include "cost_intf.h"
#include "cost_kernel.h"
#include "util.h"
#include <linux/bpf.h>

SEC(".rodata.config")
const volatile struct cost_config config = {};

/* CPU -> its sums of times and calls by enum cost_event, and the socket call and softirq that it runs now. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct cost_cpu);
	__uint(max_entries, 1); /* userspace sets it to the number of CPUs before loading */
} cpus SEC(".maps");

/* Index 0 -> the state that userspace sets for the sampling programs of all CPUs. */
BPF_MAP_FLAGS(ARRAY, control, __u32, struct cost_control, 1, BPF_F_MMAPABLE);

/* Twice the number of a CPU's buffer (from 0 on), plus 0 or 1 -> a half of that buffer: struct cost_half, records. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, 1 << 16); /* userspace sets this and max_entries before loading */
	__uint(max_entries, 2);
} halves SEC(".maps");

/* Stacks as struct cost_record with frames, if the configuration uses this ring instead of `halves`. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 12); /* userspace sets the size in bytes before loading */
} ring SEC(".maps");

/* Process and cgroup -> its sums of times and calls by enum cost_event. Preallocated, since the sampler runs in
 * interrupts and must not allocate. */
BPF_MAP(HASH, processes, struct cost_process_key, struct cost_process, COST_PROCESSES);

/* Process, by its number in userspace's PID namespace -> 1. Its stacks are sampled in user mode too. */
BPF_MAP(HASH, watched, __u32, __u8, COST_WATCHED);

/* Task -> the socket call that it was in when it left the CPU: enum cost_event and enum point as in cost_cpu.task, and
 * cost_cpu.epoch in the bits above them. */
struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, __u64);
} inside SEC(".maps");

/* The layout of cost_cpu.task and cost_cpu.softirq, called words: bits 0 to 2 are an enum cost_event, bits 3 to 8 an
 * enum point, the rest is the start time in ns. */
#define POINT_SHIFT 3
#define TIME_SHIFT  9
#define LOW_BITS    ((1ULL << TIME_SHIFT) - 1)
#define EVENT(word) ((word) & (COST_EVENTS - 1))
#define POINT(word) (((word) & LOW_BITS) >> POINT_SHIFT)

/* Where the BPF programs that time the running socket call are attached: at a kernel function, at system calls, or at
 * io_uring requests. NO_POINT: no socket call is timed. A worker of io_uring or a NAPI thread may be running, whose
 * whole time is counted as networking. */
enum point {
	NO_POINT = 0,
	FIRST_FUNCTION = 1,
	SYSTEM_CALL = FIRST_FUNCTION + COST_POINTS,
	URING_REQUEST,
};
_Static_assert(URING_REQUEST << POINT_SHIFT <= LOW_BITS, "points fit");

static __always_inline struct cost_cpu *this_cpu(void)
{
	__u32 cpu = bpf_get_smp_processor_id();

	return bpf_map_lookup_elem(&cpus, &cpu);
}

/* Returns the time of this CPU without its softirqs, in ns. Must not be called inside a softirq, whose time is not yet
 * in softirq_ns.
 */
static __always_inline __u64 task_clock(const struct cost_cpu *cpu)
{
	const volatile __u64 *softirq_ns = &cpu->softirq_ns;
	__u64 before, now;

	/* A softirq between reading softirq_ns and the clock would count for the task, so repeat both reads once. A
	 * softirq between the repeated reads is too rare for a loop. */
	before = *softirq_ns;
	now = bpf_ktime_get_ns();
	if (before != *softirq_ns) {
		before = *softirq_ns;
		now = bpf_ktime_get_ns();
	}
	return now - before;
}

static __always_inline __u64 word(__u64 clock, __u64 low)
{
	return clock << TIME_SHIFT | low;
}

/* Returns the nanoseconds from the start time that is stored in `began` (a value of cpu->task) to `clock`. The result
 * is negative if an interrupt restarted cpu->task after `clock` was read: then nothing is left to count. The arithmetic
 * shift keeps the result right when the time overflows its bits.
 */
static __always_inline __s64 elapsed(__u64 began, __u64 clock)
{
	return (__s64)((clock << TIME_SHIFT) - (began & ~LOW_BITS)) >> TIME_SHIFT;
}

/* Adds atomically. No other CPU writes these sums, but code that interrupts or preempts a task on this CPU does. A
 * softirq and the sampler can use plain additions.
 */
static __always_inline void add(__u64 *sum, __u64 value)
{
	__sync_fetch_and_add(sum, value);
}

/* Adds the time from the start in `began` (a value of cpu->task) until `clock` to cpu->ns[], at the enum cost_event in
 * `began`.
 */
static __always_inline void count_time(struct cost_cpu *cpu, __u64 began, __u64 clock)
{
	__s64 ns = elapsed(began, clock);

	if (ns > 0)
		add(&cpu->ns[EVENT(began)], ns);
}

/* The numbers of the running thread and process in userspace's PID namespace. */

#define INITIAL_PIDNS	 0xEFFFFFFC /* inode of the initial namespace, which the kernel fixes */
#define PIDNS_LEVELS_MAX 32

/* Returns the number of a thread in userspace's PID namespace, or 0 if it is outside. */
static __noinline __u32 number_of(const struct pid *pid)
{
	void *numbers = __builtin_preserve_access_index((void *)&pid->numbers[0]);
	__u32 last = BPF_CORE_READ(pid, level), level;

	for (level = 0; level <= PIDNS_LEVELS_MAX && level <= last; level++) {
		struct upid *number = numbers + level * bpf_core_type_size(struct upid);

		if (BPF_CORE_READ(number, ns, ns.inum) == config.pidns_ino)
			return BPF_CORE_READ(number, nr);
	}
	return 0;
}

static __always_inline __u32 current_thread(void)
{
	struct task_struct *task = (void *)bpf_get_current_task_btf();

	if (config.pidns_ino == INITIAL_PIDNS)
		return bpf_get_current_pid_tgid();
	return number_of(BPF_CORE_READ(task, thread_pid));
}

static __always_inline __u32 current_process(void)
{
	struct task_struct *task = (void *)bpf_get_current_task_btf();

	if (config.pidns_ino == INITIAL_PIDNS)
		return bpf_get_current_pid_tgid() >> 32;
	return number_of(BPF_CORE_READ(task, group_leader, thread_pid));
}

/* Adds the times and calls that this CPU has counted since the last such addition to the current process's sums. */
static __always_inline void hand_over(struct cost_cpu *cpu)
{
	struct cost_process_key key = {};
	struct cost_process *process;
	struct cost_process fresh = {};
	__u64 ns = 0, calls = 0;
	__u32 event;

#pragma unroll
	for (event = COST_SEND; event <= COST_LOCAL; event++) {
		ns += cpu->ns[event] - cpu->seen_ns[event];
		calls += cpu->calls[event] - cpu->seen_calls[event];
	}
	if (!ns && !calls)
		return;
	key.pid = bpf_get_current_pid_tgid() >> 32;
	key.cgroup = bpf_get_current_cgroup_id();
	process = cpu->hidden ? 0 : bpf_map_lookup_elem(&processes, &key);
	if (!process && !cpu->hidden) {
		fresh.pid = current_process();
		bpf_get_current_comm(fresh.name, sizeof(fresh.name));
		bpf_map_update_elem(&processes, &key, &fresh, BPF_NOEXIST);
		process = bpf_map_lookup_elem(&processes, &key);
	}
	if (!process && !cpu->hidden)
		cpu->lost_processes++;
	/* seen_* advance even if the map `processes` is full: this time must not be added to the next process's sums.
	 */
#pragma unroll
	for (event = COST_SEND; event <= COST_LOCAL; event++) {
		ns = cpu->ns[event] - cpu->seen_ns[event];
		calls = cpu->calls[event] - cpu->seen_calls[event];
		cpu->seen_ns[event] += ns;
		cpu->seen_calls[event] += calls;
		if (process && ns)
			add(&process->ns[event], ns);
		if (process && calls)
			add(&process->calls[event], calls);
	}
}

/* The functions below time the calls that send or receive: begin() starts the clock of a call, end() stops it. */

/* Allocates the task-local storage in which leave() saves the socket call that a task is in. leave() itself cannot
 * allocate: sched_switch runs under the run queue's lock, where kernels before 6.4 must not allocate. A task with any
 * BPF storage has this entry already, unless other BPF programs use task-local storage too.
 */
static __always_inline void make_room(const struct cost_cpu *cpu)
{
	struct task_struct *task = bpf_get_current_task_btf();

	if (!task->bpf_storage || cpu->other_storage)
		bpf_task_storage_get(&inside, task, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
}

/* A distance into the future that no clock reaches, in ns. A call whose start is still in the future counts as 0 ns. */
#define NOT_YET (1ULL << 53)

/* Adds the time of the call in cpu->task to its sum, and begins to time the call in `low` (enum cost_event and point).
 *
 * The caller may be preempted between reading the clock and storing cpu->task. The time of other tasks that run then
 * must not count as the caller's. So a start far in the future is stored first, from which no time is counted. If a
 * task switch or the sampler comes next, it replaces this start by the right time. Otherwise the compare-and-swap
 * stores the time that was read here.
 */
static __always_inline void reopen(struct cost_cpu *cpu, __u64 low)
{
	__u64 clock = task_clock(cpu);
	__u64 not_yet = word(clock + NOT_YET, low);

	count_time(cpu, __sync_lock_test_and_set(&cpu->task, not_yet), clock);
	__sync_val_compare_and_swap(&cpu->task, not_yet, word(task_clock(cpu), low));
}

/* Reports whether the BPF program that is attached here may be preempted: programs on functions may, programs on
 * tracepoints may not.
 */
static __always_inline int is_preemptible(enum point point)
{
	return point < SYSTEM_CALL;
}

/* Begins to time a call that sends or receives. `local` is true on an AF_UNIX or netlink socket.
 *
 * cpu->task is 0, or the task's running call with its start. begin() sets cpu->task for the outermost call only, so
 * the depth of nested calls need not be counted. end() clears cpu->task and adds the time to cpu->ns[]. If a task
 * leaves the CPU between begin() and end(), its call is saved in the map `inside`, and cpu->task is cleared. When the
 * task returns to a CPU, the timing of this call continues.
 */
static __always_inline int begin(enum point point, __u64 direction, int local)
{
	struct cost_cpu *cpu = this_cpu();
	__u64 event, low, clock;

	direction &= COST_EVENTS - 1;
	/* The kernel's own sockets may send inside a softirq: that time counts for the softirq. */
	if (!cpu || cpu->softirq || POINT(cpu->task))
		return 0;
	make_room(cpu);
	event = local ? COST_LOCAL : direction;
	low = point << POINT_SHIFT | event;
	if (is_preemptible(point)) {
		reopen(cpu, low);
	} else {
		clock = task_clock(cpu);
		if (cpu->task)
			count_time(cpu, __sync_lock_test_and_set(&cpu->task, 0), clock);
		cpu->task = word(clock, low);
	}
	if (is_preemptible(point))
		add(&cpu->calls[event], 1);
	else
		cpu->calls[event]++;
	if (cpu->check_tid && cpu->check_tid == current_thread())
		add(&cpu->checked[direction], 1);
	return 0;
}

/* Ends the running call if the programs at `first` to `last` time it. In a worker thread of io_uring or a NAPI
 * thread, time is then added to cpu->base again, the enum cost_event of such threads.
 */
static __always_inline int end(enum point first, enum point last)
{
	struct cost_cpu *cpu = this_cpu();
	__u64 clock;

	if (!cpu || POINT(cpu->task) < first || POINT(cpu->task) > last || cpu->softirq)
		return 0;
	if (cpu->base) {
		reopen(cpu, cpu->base);
		return 0;
	}
	clock = task_clock(cpu);
	count_time(cpu, __sync_lock_test_and_set(&cpu->task, 0), clock);
	return 0;
}

#endif
