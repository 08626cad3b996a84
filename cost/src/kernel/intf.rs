//! Structures and constants of `bpf/cost_intf.h`, which the build generates from the header.

#![allow(unsafe_code)]

use millrace_kernel::memory::Shared;

pub(crate) use generated::{
    COST_ARG_FD, COST_ARG_FILE, COST_ARG_KIOCB, COST_ARG_REGS, COST_ARG_REQUEST, COST_ARG_SOCKET,
    COST_ARG_TO, COST_CALL_CREATE, COST_CALL_READ, COST_CALL_RECEIVE, COST_CALL_SEND, COST_CALL_SENDFILE,
    COST_CALL_SOCKET, COST_CALL_SPLICE, COST_CALL_WRITE, CostConfig as Config, CostControl as Control,
    CostCpu as Cpu, CostHalf as Half, CostProcess as Process, CostProcessKey as ProcessKey,
    CostRecord as Record,
};

mod generated {
    #![allow(dead_code, reason = "userspace uses only some constants of the header")]

    include!(concat!(env!("OUT_DIR"), "/intf.rs"));
}

pub(crate) const EVENTS: usize = generated::COST_EVENTS as usize;
pub(crate) const CALLS: usize = generated::COST_CALLS as usize;
pub(crate) const POINTS: usize = generated::COST_POINTS as usize;
/// Index of softirqs that are not networking, in the arrays of times and calls of a CPU.
pub(crate) const SOFTIRQ: usize = generated::COST_SOFTIRQ as usize;

// SAFETY: all fields are atomics, so the kernel may write them at any time.
unsafe impl Shared for Cpu {}

// SAFETY: all fields of `Control` are atomics, so the kernel may write them at any time.
unsafe impl Shared for Control {}
