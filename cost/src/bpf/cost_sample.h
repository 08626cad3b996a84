/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Writes sampled stacks to the half of a CPU's buffer that userspace does not read. */
#ifndef MILLRACE_COST_SAMPLE_H
#define MILLRACE_COST_SAMPLE_H

#include "cost_calls.h"
#include <linux/bpf_perf_event.h>

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
	record->local = in_local_call();
	record->pad = 0;
	return 0;
}

/* Writes a sampled stack (struct cost_record) to the active half of this CPU's buffer. */
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
	if (!shared)
		return;
	/* If the CPU has no buffer (0), the index wraps and the lookup fails. */
	index = (cpu->buffer - 1) * 2 + (*(volatile __u32 *)&shared->half & 1);
	half = bpf_map_lookup_elem(&halves, &index);
	if (!half) {
		cpu->lost_samples++;
		return;
	}
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
		/* A task in user mode is in no system call. If cpu->task still holds one, its end was not traced. */
		if (!cpu->softirq && POINT(cpu->task))
			cpu->task = 0;
		event = 0;
	}
	if (kernel > STACK_BYTES) /* never true, but the verifier needs the bound */
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

#endif
