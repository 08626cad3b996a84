//! Lists the kernel's functions and tracepoints where calls, softirqs and task switches are timed.

use std::collections::HashSet;
use std::{fs, io};

use libbpf_rs::btf::Btf;
use libbpf_rs::btf::types::{Func, Typedef};

use super::config::{KernelEvent, TimingMethod};
use super::intf;
use super::ways::WAYS;

/// The name of a tracepoint, and the name of the program for it.
pub(super) type Tracepoint = (&'static str, &'static str);

/// Tracepoints for task switches and softirqs, in the order of attaching. The program at a softirq's exit comes before
/// that at its entry: without the former, the timing of a softirq would never end.
const TRACEPOINTS: [Tracepoint; 3] = [
    ("sched_switch", "cost_sched_switch"),
    ("softirq_exit", "cost_softirq_exit"),
    ("softirq_entry", "cost_softirq_entry"),
];
const OF_SYSTEM_CALLS: [Tracepoint; 2] = [("sys_exit", "cost_sys_exit"), ("sys_enter", "cost_sys_enter")];
/// Tracepoints of io_uring, which only some kernels have. Linux 6.5 renamed `io_uring_submit_sqe` to
/// `io_uring_submit_req`.
const OF_REQUESTS: [Tracepoint; 5] = [
    ("io_uring_complete", "cost_completed"),
    ("io_uring_poll_arm", "cost_polled"),
    ("io_uring_queue_async_work", "cost_queued"),
    ("io_uring_submit_req", "cost_request"),
    ("io_uring_submit_sqe", "cost_request"),
];

/// A kernel function that may be timed. Its index N names its pair of programs, `cost_begin_N` and `cost_end_N`.
#[derive(Debug, Clone, Copy)]
pub(super) struct TimedFunction {
    pub function: &'static str,
    pub event: KernelEvent,
}

/// The running kernel's types and symbols.
pub(super) struct RunningKernel {
    btf: Btf<'static>,
    /// Kernel functions named in [`WAYS`] (the timed system calls and requests) that have a symbol.
    symbols: HashSet<&'static str>,
}

impl RunningKernel {
    pub fn read() -> io::Result<Self> {
        let text = fs::read_to_string("/proc/kallsyms")?;
        let wanted: HashSet<&'static str> = all().iter().map(|point| point.function).collect();
        let name = |line: &str| wanted.get(line.split_ascii_whitespace().nth(2)?).copied();
        let symbols = text.lines().filter_map(name).collect();
        Ok(Self { btf: Btf::from_vmlinux().map_err(io::Error::other)?, symbols })
    }

    /// Returns the functions named in [`WAYS`] (the timed system calls and requests) that this kernel has, each once. A
    /// function needs both a symbol and BTF.
    pub fn points(&self) -> Vec<TimedFunction> {
        let has = |point: &TimedFunction| {
            self.symbols.contains(point.function)
                && self.btf.type_by_name::<Func<'_>>(point.function).is_some()
        };
        all().into_iter().filter(has).collect()
    }

    pub fn tracepoints(&self, method: Option<TimingMethod>) -> Vec<Tracepoint> {
        let mut tracepoints = Vec::new();
        if method.is_some() {
            tracepoints.extend(TRACEPOINTS);
        }
        if method == Some(TimingMethod::SystemCalls) {
            tracepoints.extend(OF_SYSTEM_CALLS);
            let has = |(name, _): &Tracepoint| {
                self.btf.type_by_name::<Typedef<'_>>(&format!("btf_trace_{name}")).is_some()
            };
            tracepoints.extend(OF_REQUESTS.into_iter().filter(has));
        }
        tracepoints
    }
}

fn all() -> Vec<TimedFunction> {
    let mut points: Vec<TimedFunction> = Vec::new();
    for way in WAYS {
        for function in way.functions {
            if !points.iter().any(|point| point.function == *function) {
                points.push(TimedFunction { function, event: way.event });
            }
        }
    }
    points
}

/// Calls `byte` with each timed kernel function, and returns the results as an array for the BPF programs'
/// configuration.
pub(super) fn bytes_of_points(
    points: &[TimedFunction],
    byte: impl Fn(&TimedFunction) -> u8,
) -> [u8; intf::POINTS] {
    let mut bytes = [0; intf::POINTS];
    for (slot, point) in bytes.iter_mut().zip(points) {
        *slot = byte(point);
    }
    bytes
}

impl TimedFunction {
    /// Returns the position of the socket among the function's arguments: `enum cost_argument`.
    pub fn argument(&self) -> u8 {
        let argument = match self.function {
            "sock_write_iter" | "sock_read_iter" => intf::COST_ARG_KIOCB,
            "splice_to_socket" => intf::COST_ARG_TO,
            "sock_sendpage" | "sock_splice_read" => intf::COST_ARG_FILE,
            "sock_sendmsg" | "sock_recvmsg" | "__sys_sendmsg_sock" | "__sys_recvmsg_sock" => {
                intf::COST_ARG_SOCKET
            }
            name if name.starts_with("io_") => intf::COST_ARG_REQUEST,
            name if name.starts_with("___") => intf::COST_ARG_SOCKET,
            name if name.starts_with("__sys_") || name == "do_recvmmsg" => intf::COST_ARG_FD,
            _ => intf::COST_ARG_REGS,
        };
        argument as u8
    }
}

#[cfg(test)]
mod tests {
    use libbpf_rs::btf::types::{FuncProto, Ptr};
    use libbpf_rs::btf::{BtfType, ReferencesType as _};

    use super::*;
    use crate::kernel::intf::POINTS;

    #[test]
    fn every_timed_function_has_an_entry_and_an_exit_program() {
        assert!(all().len() <= POINTS, "{}", all().len());
    }

    /// Compares the type of the argument in which each function gets its socket with the kernel's BTF. At a wrong
    /// argument, a program would read other memory as a socket.
    #[test]
    fn socket_argument_positions_match_kernel_btf() {
        let kernel = RunningKernel::read().expect("BTF");
        for point in all() {
            let Some(function) = kernel.btf.type_by_name::<Func<'_>>(point.function) else { continue };
            let prototype = FuncProto::try_from(function.referenced_type()).expect("a prototype");
            // In BTF, `const` and other qualifiers are types between a pointer and its structure.
            let name_of = |at: usize| {
                let ty: BtfType<'_> = kernel.btf.type_by_id(prototype.get(at)?.ty)?;
                let target = Ptr::try_from(ty).ok()?.referenced_type().skip_mods_and_typedefs();
                target.name().map(|name| name.to_string_lossy().into_owned())
            };
            let want = match u32::from(point.argument()) {
                intf::COST_ARG_SOCKET => Some("socket"),
                intf::COST_ARG_FILE | intf::COST_ARG_TO => Some("file"),
                intf::COST_ARG_KIOCB => Some("kiocb"),
                intf::COST_ARG_REQUEST => Some("io_kiocb"),
                intf::COST_ARG_REGS => Some("pt_regs"),
                _ => None,
            };
            let at = usize::from(u32::from(point.argument()) == intf::COST_ARG_TO);
            assert_eq!(name_of(at).as_deref(), want, "{}", point.function);
        }
    }
}
