/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The observer's state: its maps, the words with each CPU's running event and its begin, and the sums of ended events by
 * process.
 */
#ifndef MILLRACE_COST_STATE_H
#define MILLRACE_COST_STATE_H

#include "cost_intf.h"
#include "cost_kernel.h"
#include <linux/bpf.h>

SEC(".rodata.config")
const volatile struct cost_config config = {};

/* CPU -> its sums, and the words that say in what it is. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct cost_cpu);
	__uint(max_entries, 1); /* set before loading: one per CPU */
} cpus SEC(".maps");

/* 0 -> what userspace tells all samplers. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct cost_control);
	__uint(max_entries, 1);
} control SEC(".maps");

/* Twice the number of a CPU's buffer (from 0 on), plus 0 or 1 -> half of the double buffer of stacks: struct cost_half. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, 1 << 16); /* set before loading, as the number of entries */
	__uint(max_entries, 2);
} halves SEC(".maps");

/* Stacks, if they do not travel in `halves`: struct cost_record with its frames. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 12); /* set before loading */
} ring SEC(".maps");

/* Process and cgroup -> its sums. Preallocated, since the sampler runs in interrupts. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct cost_process_key);
	__type(value, struct cost_process);
	__uint(max_entries, COST_PROCESSES);
} processes SEC(".maps");

/* Process, as userspace's PID namespace numbers it -> anything: it is sampled always. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, __u32);
	__type(value, __u8);
	__uint(max_entries, COST_WATCHED);
} watched SEC(".maps");

/* Task -> where it was in a call when it left the CPU: the low bits of its word, with cost_cpu.epoch above them. */
struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, __u64);
} inside SEC(".maps");

/* The parts of a word. */
#define POINT_SHIFT 3
#define TIME_SHIFT  9
#define LOW_BITS    ((1ULL << TIME_SHIFT) - 1)
#define EVENT(word) ((word) & (COST_EVENTS - 1))
#define POINT(word) (((word) & LOW_BITS) >> POINT_SHIFT)

/* Where a call is timed. A thread that is an event as a whole has none. */
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

/* Time of this CPU without its softirqs. Not to be called inside a softirq. */
static __always_inline __u64 task_clock(const struct cost_cpu *cpu)
{
	const volatile __u64 *softirq_ns = &cpu->softirq_ns;
	__u64 before, now;

	/* A softirq in between would count as the task's. A second one in a row is not worth a loop. */
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

/* Nanoseconds from the beginning of `began` to `clock`. Negative when an interrupt has reopened the word
 * after `clock` was read, which is nothing left to count. The shift keeps it right when the time overflows.
 */
static __always_inline __s64 elapsed(__u64 began, __u64 clock)
{
	return (__s64)((clock << TIME_SHIFT) - (began & ~LOW_BITS)) >> TIME_SHIFT;
}

/* Atomic not for other CPUs, which do not write here, but for what interrupts or preempts this: a task adds like this,
 * a softirq or the sampler need not.
 */
static __always_inline void add(__u64 *sum, __u64 value)
{
	__sync_fetch_and_add(sum, value);
}

static __always_inline void count_time(struct cost_cpu *cpu, __u64 began, __u64 clock)
{
	__s64 ns = elapsed(began, clock);

	if (ns > 0)
		add(&cpu->ns[EVENT(began)], ns);
}

/* The running thread and process, as userspace's PID namespace numbers them. */

#define INITIAL_PIDNS	 0xEFFFFFFC /* inode; fixed by the kernel */
#define PIDNS_LEVELS_MAX 32

/* 0: outside of the namespace. */
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

/* Charges the current process with the counts since the last call. */
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

/* Calls: begin() and end() around whatever sends or receives */

/* For the place in a call of a task that leaves its CPU: made here, since sched_switch runs under the run queue's lock, and
 * there kernels before 6.4 must not allocate. A task that has any storage has this, unless other programs keep theirs there.
 */
static __always_inline void make_room(const struct cost_cpu *cpu)
{
	struct task_struct *task = bpf_get_current_task_btf();

	if (!task->bpf_storage || cpu->other_storage)
		bpf_task_storage_get(&inside, task, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
}

/* No clock gets there: what ends before it has begun counts as nothing. */
#define NOT_YET (1ULL << 53)

/* Closes the task's word at this moment and leaves one that begins now and has these low bits.
 *
 * The caller may be preempted between reading the clock and storing it, and the time of the tasks that run meanwhile must not
 * count as its own. So the word that is stored first begins far in the future: whatever closes it counts nothing. A switch to
 * another task, and the sampler, close it and open it again with the right time. Only if nobody did is the time that was read
 * behind it still right, and then it is put in.
 */
static __always_inline void reopen(struct cost_cpu *cpu, __u64 low)
{
	__u64 clock = task_clock(cpu);
	__u64 not_yet = word(clock + NOT_YET, low);

	count_time(cpu, __sync_lock_test_and_set(&cpu->task, not_yet), clock);
	__sync_val_compare_and_swap(&cpu->task, not_yet, word(task_clock(cpu), low));
}

/* Programs on functions may be preempted, those on tracepoints not. */
static __always_inline int is_preemptible(enum point point)
{
	return point < SYSTEM_CALL;
}

/* A call that sends or receives; `local`: on a socket that has no network.
 *
 * The task's word is 0, or open: it has an event and the time when that began. begin() opens it for the outermost call only, so calls
 * within a call need no depth. end() closes it, and adds the time to the event's sum. In between, a switch of tasks closes it for the task
 * that leaves and notes its low bits in `inside`. The task that comes gets its own word opened again from there.
 */
static __always_inline int begin(enum point point, __u64 direction, int local)
{
	struct cost_cpu *cpu = this_cpu();
	__u64 event, low, clock;

	direction &= COST_EVENTS - 1;
	/* In a softirq the kernel's own sockets may send: that is the softirq's time. */
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
