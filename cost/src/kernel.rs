//! What networking costs on each CPU: events timed exactly, and the stacks sampled inside them.
//!
//! This is the mechanism; `millrace-cost` makes reports of it. Why it is so: `docs/design/0005-cost.md`.

mod aio;
mod attach;
mod buffer;
mod calls;
mod config;
mod intf;
mod perf;
mod points;
mod price;
mod sockets;
mod sums;
mod uring;
mod ways;

use std::collections::HashMap;
use std::io;
use std::num::NonZero;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};

use buffer::Buffer;
use libbpf_rs::{Link, MapCore, MapFlags};
use millrace_kernel::Error;
use millrace_kernel::intf::Plain;
use millrace_kernel::memory::Table;
use millrace_kernel::object::{Loaded, embedded};
use points::{Kernel, Point, Tracepoint, events_of};

pub use attach::Missing;
pub use buffer::Record;
pub use config::{Config, Event, Method, Transport};
pub use perf::{clock, interrupt_time};
pub use price::CallTimes;
pub use sockets::Sockets;
pub use sums::{Probed, Process, ProcessId, Totals};
pub use ways::{WAYS, Way};

const OBJECT: &str = "cost.bpf.o";

/// The programs, loaded. Dropping it detaches them, as does the end of the process, however it comes.
pub struct Cost {
    cpus: Table<intf::Cpu>,
    buffer: Buffer,
    method: Option<Method>,
    refused: Option<String>,
    tracepoints: Vec<Tracepoint>,
    points: Vec<Point>,
    /// By function: attached, or the reason why it cannot be.
    attached: HashMap<&'static str, Result<(), String>>,
    /// What times events; ends before beginnings.
    probes: Vec<Link>,
    samplers: Vec<Link>,
    control: Table<intf::Control>,
    /// Last, so that it outlives the links.
    object: Loaded,
}

const SAMPLER: &str = "cost_sample";

impl Cost {
    pub fn load(config: &Config) -> Result<Self, Error> {
        let methods: &[Option<Method>] = match (config.events, config.method) {
            (false, _) => &[None],
            (true, Some(Method::Functions)) => &[Some(Method::Functions)],
            (true, Some(Method::SystemCalls)) => &[Some(Method::SystemCalls)],
            (true, None) => &[Some(Method::Functions), Some(Method::SystemCalls)],
        };
        let kernel =
            Kernel::read().map_err(|source| Error::Prepare { what: "the kernel's functions", source })?;
        let mut refused = None;
        for method in methods {
            match Self::load_with(config, *method, &kernel) {
                Ok(mut cost) => {
                    cost.refused = refused.map(|error: Error| no_functions(error).to_string());
                    return Ok(cost);
                }
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        let refused = refused.unwrap_or(Error::Config("no method to time calls"));
        let only_functions = config.method == Some(Method::Functions)
            && refused.is_denied()
            && Self::load_with(config, Some(Method::SystemCalls), &kernel).is_ok();
        Err(if only_functions { no_functions(refused) } else { refused })
    }

    fn load_with(config: &Config, method: Option<Method>, kernel: &Kernel) -> Result<Self, Error> {
        let cpus = cpus()?;
        let half_bytes = config.buffer_bytes.clamp(1 << 13, 1 << 24).next_multiple_of(4096);
        let points = if method == Some(Method::Functions) { kernel.points() } else { Vec::new() };
        let tracepoints = kernel.tracepoints(method);
        let ring_bytes = match config.transport {
            Transport::RingBuffer => half_bytes.saturating_mul(cpus.get()).next_power_of_two().min(1 << 30),
            Transport::DoubleBuffer => 4096,
        };
        let mut open = embedded!("cost.bpf.o").open()?;
        open.configure(&intf::Config {
            pidns_ino: pid_namespace()?,
            half_bytes,
            ring: u8::from(config.transport == Transport::RingBuffer),
            watch: u8::from(config.watch),
            pad: [0; 2],
            point_events: events_of(&points),
            calls: calls::table(),
        })?;
        let error = |source| Error::Open { object: OBJECT, source };
        open.map("cpus")?.set_max_entries(cpus.get()).map_err(error)?;
        open.map("halves")?.set_max_entries(2 * cpus.get()).map_err(error)?;
        open.map("halves")?.set_value_size(half_bytes).map_err(error)?;
        open.map("ring")?.set_max_entries(ring_bytes).map_err(error)?;
        open.enable(SAMPLER, None)?;
        for (tracepoint, program) in &tracepoints {
            open.enable(program, Some(tracepoint))?;
        }
        for (number, point) in points.iter().enumerate() {
            open.enable(&format!("cost_begin_{number}"), Some(point.function))?;
            open.enable(&format!("cost_end_{number}"), Some(point.function))?;
        }
        let mut object = open.load()?;
        let table = Table::new(object.map("cpus")?.as_fd(), cpus)
            .map_err(|source| Error::Memory { what: "cpus", source })?;
        let control = Table::new(object.map("control")?.as_fd(), NonZero::<u32>::MIN)
            .map_err(|source| Error::Memory { what: "control", source })?;
        let buffer = Buffer::new(&mut object, config.transport, cpus, half_bytes, ring_bytes)?;
        let cost = Self {
            cpus: table,
            buffer,
            method,
            refused: None,
            tracepoints,
            points,
            attached: HashMap::new(),
            probes: Vec::new(),
            samplers: Vec::new(),
            control,
            object,
        };
        cost.sample_always(method.is_none());
        Ok(cost)
    }

    /// `None`: events are not timed.
    pub fn method(&self) -> Option<Method> {
        self.method
    }

    /// Why functions could not be used, if that was tried.
    pub fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    /// Whether samplers take the stack of whatever runs, and not only inside of events.
    pub fn sample_always(&self, always: bool) {
        self.control.get(0).always.store(u32::from(always), Ordering::Relaxed);
    }

    /// Samples stacks on a CPU, `hz` times a second, until this is dropped.
    pub fn sample(&mut self, cpu: u32, hz: u32) -> Result<(), Error> {
        use std::os::fd::IntoRawFd;
        let clock = perf::clock(cpu, hz).map_err(|source| Error::Sampler { cpu, source })?;
        // The link owns the descriptor from here on.
        let link = self.object.program(SAMPLER)?.attach_perf_event(clock.into_raw_fd());
        self.samplers.push(link.map_err(|source| Error::Sampler { cpu, source: io::Error::other(source) })?);
        Ok(())
    }

    /// Samples all of a process, or no longer; by its number in this process' PID namespace. Only if [configured](Config::watch).
    pub fn watch(&mut self, pid: u32, watch: bool) -> Result<(), Error> {
        let map = self.object.map("watched")?;
        let key = pid.to_ne_bytes();
        let done = match watch {
            true => map.update(&key, &[1], MapFlags::ANY),
            false => map.delete(&key),
        };
        done.map_err(|source| Error::Write { what: "watched", source })
    }

    /// Sums by CPU number. The sampler brings them up to date; without it, what is running is not in them yet.
    pub fn totals(&self) -> Vec<Totals> {
        self.all_cpus()
            .map(|cpu| Totals {
                ns: cpu.ns.each_ref().map(load),
                calls: cpu.calls.each_ref().map(load),
                samples: load(&cpu.samples),
                lost_samples: load(&cpu.lost_samples),
                lost_stacks: load(&cpu.lost_stacks),
                lost_processes: load(&cpu.lost_processes),
                lost_tasks: load(&cpu.lost_tasks),
                other_softirqs: cpu.calls.get(intf::SOFTIRQ).map_or(0, load),
                system_calls: load(&cpu.system_calls),
                switches: load(&cpu.switches),
            })
            .collect()
    }

    fn all_cpus(&self) -> impl Iterator<Item = &intf::Cpu> {
        (0..self.cpus.len()).map(|cpu| self.cpus.get(cpu))
    }

    /// Every process that has sent, received or used io_uring's threads since it was last
    /// [forgotten](Self::forget).
    pub fn processes(&mut self) -> Result<Vec<Process>, Error> {
        let map = self.object.map("processes")?;
        let error = |source| Error::Read { what: "processes", source };
        let mut processes = Vec::new();
        for entry in map.lookup_batch(256, MapFlags::ANY, MapFlags::ANY).map_err(error)? {
            let (key, value) = entry;
            let (Some(key), Some(value)) =
                (intf::ProcessKey::from_bytes(&key), intf::Process::from_bytes(&value))
            else {
                continue;
            };
            processes.push(Process {
                id: ProcessId { pid: key.pid, cgroup: key.cgroup },
                pid: value.pid,
                name: name(&value.name),
                ns: value.ns,
                calls: value.calls,
            });
        }
        Ok(processes)
    }

    /// Forgets a process, to make room. If it still runs, it begins again with sums of 0.
    pub fn forget(&mut self, id: ProcessId) -> Result<(), Error> {
        let key = intf::ProcessKey { cgroup: id.cgroup, pid: id.pid, pad: 0 };
        match self.object.map("processes")?.delete(key.as_bytes()) {
            Err(error) if error.kind() != libbpf_rs::ErrorKind::NotFound => {
                Err(Error::Write { what: "processes", source: error })
            }
            _ => Ok(()),
        }
    }

    /// Hands over the stacks that were sampled since the last time.
    pub fn drain(&mut self, read: impl FnMut(Record<'_>)) {
        let cpus = &self.cpus;
        self.buffer.drain(|cpu| cpus.get(cpu).writing.load(Ordering::SeqCst) != 0, read);
    }

    /// IDs of the programs that were loaded.
    pub fn program_ids(&self) -> Vec<u32> {
        self.object.program_ids()
    }
}

/// Names of all programs that may be loaded, as they are in stacks.
pub fn programs() -> Result<Vec<String>, Error> {
    Ok(embedded!("cost.bpf.o").open()?.programs())
}

/// The error for a kernel that allows programs, but none on functions.
fn no_functions(error: Error) -> Error {
    if error.is_denied() { Error::NoFunctions } else { error }
}

fn cpus() -> Result<NonZero<u32>, Error> {
    let cpus =
        libbpf_rs::num_possible_cpus().map_err(|source| Error::Read { what: "possible CPUs", source })?;
    u32::try_from(cpus).ok().and_then(NonZero::new).ok_or(Error::Config("no possible CPU"))
}

/// Inode of this process' PID namespace.
fn pid_namespace() -> Result<u32, Error> {
    let error = |source| Error::Prepare { what: "the PID namespace", source };
    let namespace = std::fs::metadata("/proc/self/ns/pid").map_err(error)?;
    u32::try_from(namespace.ino()).map_err(|source| error(io::Error::other(source)))
}

fn load(sum: &AtomicU64) -> u64 {
    sum.load(Ordering::Relaxed)
}

/// Up to the first zero byte.
pub fn name(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `sched_switch` holds the run queue's lock: there kernels before 6.4 must not allocate.
    #[test]
    fn where_tasks_are_switched_nothing_is_allocated() {
        const TASK_STORAGE_GET: i32 = 156;
        const CREATE: i32 = 1;
        let open = embedded!("cost.bpf.o").open().unwrap();
        let flags = |program| open.fourth_arguments(program, TASK_STORAGE_GET);
        assert_eq!(flags("cost_sched_switch"), [Some(0), Some(0)]);
        assert_eq!(flags("cost_sys_enter"), [Some(CREATE)], "it is made where a call begins");
    }
}
