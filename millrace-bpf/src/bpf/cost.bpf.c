// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* What networking costs on each CPU: times events exactly and samples the stacks inside them.
 * docs/design/0005-cost.md says why it is like this. It changes nothing.
 */
#include "cost_intf.h"
#include <linux/bpf.h>
#include <linux/bpf_perf_event.h>
#include <linux/io_uring.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

SEC(".rodata.config")
const volatile struct cost_config config = {};

/* The kernel's structures, as far as they are needed here; CO-RE finds the offsets. */
#define KERNEL __attribute__((preserve_access_index))

struct inode {
	unsigned short i_mode;
} KERNEL;

struct file {
	struct inode *f_inode;
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
	struct upid numbers[]; /* up to `level`, from the initial namespace on */
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
	__u8 opcode;
	unsigned int flags; /* of 64 bits on newer kernels, which CO-RE knows */
	struct io_cqe cqe;
} KERNEL;

/* The registers of a system call: one of these exists. */
struct pt_regs___x86 {
	unsigned long di, si, dx, cs;
} KERNEL;

struct pt_regs___arm64 {
	__u64 regs[31];
	__u64 pstate;
} KERNEL;

#define S_IFMT	     0170000
#define S_IFSOCK     0140000
#define PF_IO_WORKER 0x00000010 /* io_uring's workers and its SQPOLL threads */
#define PF_KTHREAD   0x00200000

enum softirq {
	NET_TX_SOFTIRQ = 2,
	NET_RX_SOFTIRQ = 3,
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct cost_cpu);
	__uint(max_entries, 1); /* set before loading: one per CPU */
} cpus SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct cost_control);
	__uint(max_entries, 1);
} control SEC(".maps");

/* The double buffers: two entries per CPU. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, 1 << 16); /* set before loading, as the number of entries */
	__uint(max_entries, 2);
} halves SEC(".maps");

/* The other way for stacks to travel. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 12); /* set before loading */
} ring SEC(".maps");

/* Preallocated, since the sampler runs in interrupts. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, struct cost_process_key);
	__type(value, struct cost_process);
	__uint(max_entries, COST_PROCESSES);
} processes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, __u32);
	__type(value, __u8);
	__uint(max_entries, COST_WATCHED);
} watched SEC(".maps");

/* Of a task that left the CPU inside a call: low bits of its word, and above them cost_cpu.epoch. */
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

/* Who runs, as userspace's PID namespace numbers it */

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

/* Calls: begin() and end() around whatever sends or receives */

static __always_inline int begin(enum point point, __u64 event)
{
	struct cost_cpu *cpu = this_cpu();
	__u64 clock;

	event &= COST_EVENTS - 1;
	/* In a softirq the kernel's own sockets may send: that is the softirq's time. */
	if (!cpu || cpu->softirq || POINT(cpu->task))
		return 0;
	clock = task_clock(cpu);
	if (cpu->task)
		count_time(cpu, __sync_lock_test_and_set(&cpu->task, 0), clock);
	cpu->task = word(clock, point << POINT_SHIFT | event);
	/* Programs on functions may be preempted, those on tracepoints not. */
	if (point < SYSTEM_CALL)
		add(&cpu->calls[event], 1);
	else
		cpu->calls[event]++;
	if (cpu->check_tid && cpu->check_tid == current_thread())
		add(&cpu->checked[event], 1);
	return 0;
}

static __always_inline int end(enum point first, enum point last)
{
	struct cost_cpu *cpu = this_cpu();
	__u64 clock;

	if (!cpu || POINT(cpu->task) < first || POINT(cpu->task) > last || cpu->softirq)
		return 0;
	clock = task_clock(cpu);
	count_time(cpu, __sync_lock_test_and_set(&cpu->task, cpu->base ? word(clock, cpu->base) : 0), clock);
	return 0;
}

/* Method "functions": loaded for those that userspace names. */

#define FUNCTION(n)                                                       \
	SEC("?fentry")                                                    \
	int cost_begin_##n(void *ctx)                                     \
	{                                                                 \
		return begin(FIRST_FUNCTION + n, config.point_events[n]); \
	}                                                                 \
	SEC("?fexit")                                                     \
	int cost_end_##n(void *ctx)                                       \
	{                                                                 \
		return end(FIRST_FUNCTION + n, FIRST_FUNCTION + n);       \
	}

/* clang-format off */
FUNCTION(0)  FUNCTION(1)  FUNCTION(2)  FUNCTION(3)  FUNCTION(4)  FUNCTION(5)  FUNCTION(6)  FUNCTION(7)
FUNCTION(8)  FUNCTION(9)  FUNCTION(10) FUNCTION(11) FUNCTION(12) FUNCTION(13) FUNCTION(14) FUNCTION(15)
FUNCTION(16) FUNCTION(17) FUNCTION(18) FUNCTION(19) FUNCTION(20) FUNCTION(21) FUNCTION(22) FUNCTION(23)
FUNCTION(24) FUNCTION(25) FUNCTION(26) FUNCTION(27) FUNCTION(28) FUNCTION(29) FUNCTION(30) FUNCTION(31)
/* clang-format on */

/* Method "system calls": for kernels that allow no programs on functions. */

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

/* Arguments: struct pt_regs *regs, long number. */
SEC("?tp_btf/sys_enter")
int cost_sys_enter(__u64 *ctx)
{
	__u64 number = ctx[1], event;
	struct cost_cpu *cpu;

	if (number >= COST_CALLS || !config.calls[number] || is_compat((void *)ctx[0]))
		return 0;
	event = event_of_call((void *)ctx[0], config.calls[number]);
	cpu = this_cpu();
	if (!event || !cpu)
		return 0;
	/* No call is inside another: the end of the last one was lost. */
	if (POINT(cpu->task))
		cpu->task = 0;
	return begin(SYSTEM_CALL, event);
}

SEC("?tp_btf/sys_exit")
int cost_sys_exit(__u64 *ctx)
{
	struct cost_cpu *cpu = this_cpu();

	if (cpu)
		cpu->system_calls++;
	return end(SYSTEM_CALL, URING_REQUEST);
}

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

/* io_uring is about to try a request. It is done when it completes, when it has to wait, or when another one or the end
 * of the system call comes. (sock_send_length and sock_recv_length would be nearer, and cost something in every socket call
 * of the machine.)
 */
SEC("?tp_btf/io_uring_submit_req")
int cost_request(__u64 *ctx)
{
	__u64 event = event_of_request((void *)ctx[0]);

	end(URING_REQUEST, URING_REQUEST);
	return event ? begin(URING_REQUEST, event) : 0;
}

SEC("?tp_btf/io_uring_complete")
int cost_completed(__u64 *ctx)
{
	return end(URING_REQUEST, URING_REQUEST);
}

/* It waits for its socket. */
SEC("?tp_btf/io_uring_poll_arm")
int cost_polled(__u64 *ctx)
{
	return end(URING_REQUEST, URING_REQUEST);
}

/* It goes to a worker. */
SEC("?tp_btf/io_uring_queue_async_work")
int cost_queued(__u64 *ctx)
{
	return end(URING_REQUEST, URING_REQUEST);
}

/* Softirqs: they do not nest, nor does anything but a hardware interrupt come in between. */

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

/* Closes the softirq's word and leaves `next`. The sampler does not add to these sums meanwhile: either it is who closes,
 * or `next` has no event.
 */
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
	/* Not 0 yet: the sampler must not look at the task clock before the sum is right. */
	close_softirq(cpu, bpf_ktime_get_ns(), 1 << POINT_SHIFT);
	cpu->softirq = 0;
	return 0;
}

/* Tasks */

/* What was counted since the last time belongs to the current process. */
static __always_inline void hand_over(struct cost_cpu *cpu)
{
	struct cost_process_key key = {};
	struct cost_process *process;
	struct cost_process fresh = {};
	__u64 ns = 0, calls = 0;
	__u32 event;

#pragma unroll
	for (event = COST_SEND; event <= COST_IO_URING; event++) {
		ns += cpu->ns[event] - cpu->seen_ns[event];
		calls += cpu->calls[event] - cpu->seen_calls[event];
	}
	if (!ns && !calls)
		return;
	key.pid = bpf_get_current_pid_tgid() >> 32;
	key.cgroup = bpf_get_current_cgroup_id();
	process = bpf_map_lookup_elem(&processes, &key);
	if (!process) {
		fresh.pid = current_process();
		bpf_get_current_comm(fresh.name, sizeof(fresh.name));
		bpf_map_update_elem(&processes, &key, &fresh, BPF_NOEXIST);
		process = bpf_map_lookup_elem(&processes, &key);
	}
	if (!process)
		cpu->lost_processes++;
#pragma unroll
	for (event = COST_SEND; event <= COST_IO_URING; event++) {
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

static __always_inline int is_napi_thread(const struct task_struct *task)
{
	const char *name = task->comm;

	return name[0] == 'n' && name[1] == 'a' && name[2] == 'p' && name[3] == 'i' && name[4] == '/';
}

/* The low byte for a thread that is an event as a whole, or 0. */
static __always_inline __u64 base_of(const struct task_struct *task)
{
	if (task->flags & PF_IO_WORKER)
		return COST_IO_URING;
	if (task->flags & PF_KTHREAD && is_napi_thread(task))
		return COST_NET_RX;
	return 0;
}

/* Keeps the place in a call of a task that leaves. */
static __always_inline void leave(struct cost_cpu *cpu, struct task_struct *task, __u64 began)
{
	__u64 *place;

	/* An SQPOLL thread is not in the request that it tried last. */
	if (!POINT(began) || (POINT(began) == URING_REQUEST && cpu->base))
		return;
	place = bpf_task_storage_get(&inside, task, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (place)
		*place = word(cpu->epoch, began & LOW_BITS);
	else
		cpu->lost_tasks++;
}

/* The low bits of the word of a task that comes. */
static __always_inline __u64 return_to(struct cost_cpu *cpu, struct task_struct *task)
{
	__u64 *place, kept;

	/* Most tasks have no storage at all, which is cheaper to see than to look it up. */
	if (!task->bpf_storage)
		return cpu->base;
	place = bpf_task_storage_get(&inside, task, 0, 0);
	kept = place ? *place : 0;
	if (!kept)
		return cpu->base;
	*place = 0;
	/* From before the programs were detached: the call may have ended unseen. */
	return kept >> TIME_SHIFT == cpu->epoch ? kept & LOW_BITS : cpu->base;
}

/* Arguments: bool preempt, struct task_struct *prev, struct task_struct *next, ... Interrupts are off. */
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

/* Brings the sums up to this moment, so that what runs for long shows before it ends. */
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

static __always_inline int is_watched(__u32 pid)
{
	return config.watch && bpf_map_lookup_elem(&watched, &pid);
}

#define STACK_BYTES  (COST_FRAMES * sizeof(__u64))
#define RECORD_BYTES (sizeof(struct cost_record) + 2 * STACK_BYTES)

static __noinline int describe(struct cost_record *record, __u64 kernel_bytes, __u64 user_bytes, __u8 event)
{
	record->cpu = bpf_get_smp_processor_id();
	record->kernel_frames = kernel_bytes / sizeof(__u64);
	record->user_frames = user_bytes / sizeof(__u64);
	record->event = event;
	record->pad = 0;
	return 0;
}

/* Writes a record to the active half of this CPU's buffer. */
static __always_inline void sample(struct bpf_perf_event_data *ctx, struct cost_cpu *cpu, __u64 event)
{
	struct cost_control *shared;
	struct cost_record *record;
	struct cost_half *half;
	__u32 zero = 0, index;
	__u64 used, bytes;
	long kernel, user = 0;
	__u32 pid = current_process();
	__u8 always_this = is_watched(pid);

	shared = bpf_map_lookup_elem(&control, &zero);
	if (!shared || (!event && !*(volatile __u32 *)&shared->always && !always_this))
		return;
	index = bpf_get_smp_processor_id() * 2 + (*(volatile __u32 *)&shared->half & 1);
	half = bpf_map_lookup_elem(&halves, &index);
	if (!half)
		return;
	used = *(volatile __u64 *)&half->used_bytes;
	if (used > config.half_bytes - sizeof(*half) - RECORD_BYTES) {
		cpu->lost_samples++;
		return;
	}
	record = (void *)(half + 1) + used;
	kernel = bpf_get_stack(ctx, record + 1, STACK_BYTES, 0);
	if (kernel < 0) {
		cpu->lost_stacks++;
		return;
	}
	if (!kernel) {
		cpu->user_samples++;
		/* No task is in a call while it is in user mode: an end was lost. */
		if (!cpu->softirq && POINT(cpu->task))
			cpu->task = 0;
		event = 0;
	}
	if (kernel > STACK_BYTES)
		return;
	if (always_this) {
		user = bpf_get_stack(ctx, (void *)(record + 1) + kernel, STACK_BYTES, BPF_F_USER_STACK);
		if (user < 0 || user > STACK_BYTES)
			user = 0;
	} else if (!kernel) {
		return;
	}
	record->pid = pid;
	record->cgroup = bpf_get_current_cgroup_id();
	bpf_get_current_comm(record->name, sizeof(record->name));
	record->watched = always_this;
	describe(record, kernel, user, event);
	bytes = sizeof(*record) + kernel + user;
	if (!config.ring)
		half->used_bytes = used + bytes;
	else if (bytes <= RECORD_BYTES && bpf_ringbuf_output(&ring, record, bytes, BPF_RB_NO_WAKEUP))
		cpu->lost_samples++;
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
	/* Both exchanges are full barriers: either userspace sees the mark, or this sees the other half. */
	__sync_lock_test_and_set(&cpu->writing, 1);
	/* A softirq's word has no event any more when its time is over: the rest of cost_softirq_exit is on the task's. */
	event = EVENT(EVENT(cpu->softirq) ? cpu->softirq : cpu->task);
	sample(ctx, cpu, event == COST_SOFTIRQ ? 0 : event);
	__sync_lock_test_and_set(&cpu->writing, 0);
	return 0;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
