// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Measures networking's cost on each CPU: the programs time softirqs and socket calls, and sample their stacks. They
 * never change packets, calls or scheduling. docs/notes/design/0005-cost.md has the reasons for the design.
 */
#include "cost_calls.h"
#include "cost_sample.h"
#include "softirq.h"

/* Timing method "functions": userspace chooses kernel functions, and loads one pair of programs for each. */

#define FUNCTION(n)                                                              \
	SEC("?fentry")                                                           \
	int cost_begin_##n(__u64 *ctx)                                           \
	{                                                                        \
		int local = is_local_argument(ctx, config.point_arguments[n]);   \
		return begin(FIRST_FUNCTION + n, config.point_events[n], local); \
	}                                                                        \
	SEC("?fexit")                                                            \
	int cost_end_##n(void *ctx)                                              \
	{                                                                        \
		return end(FIRST_FUNCTION + n, FIRST_FUNCTION + n);              \
	}

/* clang-format off */
FUNCTION(0)  FUNCTION(1)  FUNCTION(2)  FUNCTION(3)  FUNCTION(4)  FUNCTION(5)  FUNCTION(6)  FUNCTION(7)
FUNCTION(8)  FUNCTION(9)  FUNCTION(10) FUNCTION(11) FUNCTION(12) FUNCTION(13) FUNCTION(14) FUNCTION(15)
FUNCTION(16) FUNCTION(17) FUNCTION(18) FUNCTION(19) FUNCTION(20) FUNCTION(21) FUNCTION(22) FUNCTION(23)
FUNCTION(24) FUNCTION(25) FUNCTION(26) FUNCTION(27) FUNCTION(28) FUNCTION(29) FUNCTION(30) FUNCTION(31)
/* clang-format on */

/* Timing method "system calls", for kernels that allow no programs on functions. */

/* The tracepoint's arguments: struct pt_regs *regs, long number. */
SEC("?tp_btf/sys_enter")
int cost_sys_enter(__u64 *ctx)
{
	__u64 number = ctx[1];
	struct cost_cpu *cpu;
	struct call call;

	if (number >= COST_CALLS || !config.calls[number] || is_compat((void *)ctx[0]))
		return 0;
	call = describe_call((void *)ctx[0], config.calls[number]);
	cpu = this_cpu();
	if (!call.direction || !cpu)
		return 0;
	/* System calls do not nest: if cpu->task still holds a call, the end of that call was not seen. */
	if (POINT(cpu->task))
		cpu->task = 0;
	return begin(SYSTEM_CALL, call.direction, is_local(call.file));
}

SEC("?tp_btf/sys_exit")
int cost_sys_exit(__u64 *ctx)
{
	struct cost_cpu *cpu = this_cpu();

	if (cpu)
		cpu->system_calls++;
	/* If the system call is io_uring_enter(), its end also ends the io_uring request that it handled last. */
	return end(SYSTEM_CALL, URING_REQUEST);
}

/* io_uring is about to try a request. The request's time ends when it completes, when it has to wait, when the next
 * request begins, or when the system call ends. The tracepoints sock_send_length and sock_recv_length would be more
 * exact, but they would slow down every socket call of the machine.
 */
SEC("?tp_btf/io_uring_submit_req")
int cost_request(__u64 *ctx)
{
	struct call call = describe_request((void *)ctx[0]);

	end(URING_REQUEST, URING_REQUEST);
	return call.direction ? begin(URING_REQUEST, call.direction, is_local(call.file)) : 0;
}

SEC("?tp_btf/io_uring_complete")
int cost_completed(__u64 *ctx)
{
	return end(URING_REQUEST, URING_REQUEST);
}

/* The request waits until its socket is ready. */
SEC("?tp_btf/io_uring_poll_arm")
int cost_polled(__u64 *ctx)
{
	return end(URING_REQUEST, URING_REQUEST);
}

/* The request goes to a worker thread of io_uring. */
SEC("?tp_btf/io_uring_queue_async_work")
int cost_queued(__u64 *ctx)
{
	return end(URING_REQUEST, URING_REQUEST);
}

/* Softirqs. They do not nest, and only hardware interrupts interrupt them. */

SEC("?tp_btf/softirq_entry")
int cost_softirq_entry(__u64 *ctx)
{
	struct cost_cpu *cpu = this_cpu();
	__u64 vector = ctx[0];
	__u64 event;

	if (!cpu)
		return 0;
	event = vector == NET_RX_SOFTIRQ   ? COST_NET_RX
		: vector == NET_TX_SOFTIRQ ? COST_NET_TX
					   : COST_SOFTIRQ;
	cpu->calls[event]++;
	cpu->softirq = word(bpf_ktime_get_ns(), event);
	return 0;
}

/* Adds the running softirq's time to cpu->ns[], and replaces cpu->softirq with `next`. The additions need no atomic
 * operations although the sampler may interrupt them. If the caller is not the sampler, `next` contains no enum
 * cost_event. A sampler that interrupts the additions then adds nothing. */
static __always_inline void close_softirq(struct cost_cpu *cpu, __u64 now, __u64 next)
{
	__u64 began = __sync_lock_test_and_set(&cpu->softirq, next);
	__s64 ns = elapsed(began, now);

	if (!EVENT(began) || ns <= 0)
		return;
	cpu->ns[EVENT(began)] += ns;
	cpu->softirq_ns += ns;
}

SEC("?tp_btf/softirq_exit")
int cost_softirq_exit(__u64 *ctx)
{
	struct cost_cpu *cpu = this_cpu();

	if (!cpu || !cpu->softirq)
		return 0;
	/* cpu->softirq stays non-zero until softirq_ns is updated. Otherwise a sampler that interrupts here would read
	 * a task clock that still contains this softirq. */
	close_softirq(cpu, bpf_ktime_get_ns(), 1 << POINT_SHIFT);
	cpu->softirq = 0;
	return 0;
}

/* Tasks */

/* Reports whether a kernel thread polls a NIC (`napi/DEVICE-ID`) or, from Linux 6.10 on, a CPU's backlog
 * (`backlog_napi/CPU`).
 */
static __always_inline int is_napi_thread(const struct task_struct *task)
{
	return !__builtin_memcmp(task->comm, "napi/", 5) ||
	       !__builtin_memcmp(task->comm, "backlog_napi/", 13);
}

/* Returns the enum cost_event for which the whole time of a worker thread of io_uring or a NAPI thread counts, or 0 for
 * other threads.
 */
static __always_inline __u64 base_of(const struct task_struct *task)
{
	if (task->flags & PF_IO_WORKER)
		return COST_IO_URING;
	if (task->flags & PF_KTHREAD && is_napi_thread(task))
		return COST_NET_RX;
	return 0;
}

/* Saves which socket call (system call, function or io_uring request) a task is in when the task leaves the CPU. */
static __always_inline void leave(struct cost_cpu *cpu, struct task_struct *task, __u64 began)
{
	__u64 *place;

	/* An SQPOLL thread that leaves the CPU no longer works on the io_uring request that it handled last. */
	if (!POINT(began) || (POINT(began) == URING_REQUEST && cpu->base))
		return;
	place = bpf_task_storage_get(&inside, task, 0, 0);
	if (place) {
		*place = word(cpu->epoch, began & LOW_BITS);
	} else {
		cpu->lost_tasks++;
		cpu->other_storage = 1;
	}
}

/* Returns which socket call a task was in when it last left the CPU, so that its time is counted from now on. The value
 * is the low bits of cpu->task: enum cost_event, and enum point of the program that timed the call.
 */
static __always_inline __u64 return_to(struct cost_cpu *cpu, struct task_struct *task)
{
	__u64 *place, kept;

	/* Most tasks have no BPF storage at all. Testing the pointer to the storage is cheaper than a lookup. */
	if (!task->bpf_storage)
		return cpu->base;
	place = bpf_task_storage_get(&inside, task, 0, 0);
	kept = place ? *place : 0;
	if (!kept)
		return cpu->base;
	*place = 0;
	/* A call that was saved before the programs were last detached is ignored: it may have ended while they were
	 * detached. */
	return kept >> TIME_SHIFT == cpu->epoch ? kept & LOW_BITS : cpu->base;
}

/* The tracepoint's arguments: bool preempt, struct task_struct *prev, struct task_struct *next, ...
 * Interrupts are off.
 */
SEC("?tp_btf/sched_switch")
int cost_sched_switch(__u64 *ctx)
{
	struct task_struct *prev = (void *)ctx[1];
	struct task_struct *next = (void *)ctx[2];
	struct cost_cpu *cpu = this_cpu();
	__u64 began, low, clock = 0;

	if (!cpu)
		return 0;
	cpu->switches++;
	began = cpu->task;
	if (began) {
		cpu->task = 0;
		clock = task_clock(cpu);
		count_time(cpu, began, clock);
		leave(cpu, prev, began);
	}
	/* `prev` is still the current task, so the CPU time so far is counted for its process. */
	hand_over(cpu);

	cpu->base = base_of(next);
	low = return_to(cpu, next);
	if (!low)
		return 0;
	if (!POINT(low))
		add(&cpu->calls[EVENT(low)], 1);
	cpu->task = word(clock ? clock : task_clock(cpu), low);
	return 0;
}

/* The sampler */

/* Adds the time that the running softirq or socket call has taken so far to cpu->ns[]. So a long softirq or call is
 * visible before it ends.
 */
static __always_inline void bring_up_to_date(struct cost_cpu *cpu)
{
	__u64 now, clock, low;

	if (cpu->softirq) {
		now = bpf_ktime_get_ns();
		if (EVENT(cpu->softirq))
			close_softirq(cpu, now, word(now, EVENT(cpu->softirq)));
		return;
	}
	low = cpu->task & LOW_BITS;
	if (!low)
		return;
	clock = task_clock(cpu);
	count_time(cpu, __sync_lock_test_and_set(&cpu->task, word(clock, low)), clock);
	hand_over(cpu);
}

SEC("?perf_event")
int cost_sample(struct bpf_perf_event_data *ctx)
{
	struct cost_cpu *cpu = this_cpu();
	__u64 event;

	if (!cpu)
		return 0;
	cpu->samples++;
	bring_up_to_date(cpu);
	/* The atomic exchanges of `writing` here and below are full barriers. Either userspace sees that `writing` is
	 * set, or this program sees which half of the double buffer userspace has switched to. */
	__sync_lock_test_and_set(&cpu->writing, 1);
	/* After close_softirq(), cpu->softirq contains no enum cost_event. Then a sample that interrupts the rest of
	 * cost_softirq_exit counts for the task. */
	event = EVENT(EVENT(cpu->softirq) ? cpu->softirq : cpu->task);
	sample(ctx, cpu, event == COST_SOFTIRQ ? 0 : event);
	__sync_lock_test_and_set(&cpu->writing, 0);
	return 0;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
