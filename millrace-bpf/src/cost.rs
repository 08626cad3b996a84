//! What networking costs on each CPU: events timed exactly, and the stacks sampled inside them.
//!
//! This is the mechanism; `millrace-cost` makes reports of it. Why it is so: `docs/design/0005-cost.md`.

mod aio;
mod buffer;
mod calls;
mod intf;
mod perf;
mod points;
mod price;
mod sockets;
mod uring;

use std::collections::HashMap;
use std::io;
use std::num::NonZero;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};

use libbpf_rs::{Link, MapCore, MapFlags};

use crate::Error;
use crate::intf::Plain;
use crate::memory::Table;
use crate::object::{Loaded, embedded};
use buffer::Buffer;
use intf::EVENTS;
use points::{Kernel, Point};

pub use buffer::Record;
pub use perf::{clock, interrupt_time};
pub use points::{WAYS, Way};
pub use price::CallTimes;
pub use sockets::Sockets;

const OBJECT: &str = "cost.bpf.o";

/// `enum cost_event`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Event {
    NetRx = 1,
    NetTx = 2,
    Send = 3,
    Receive = 4,
    IoUring = 5,
}

impl Event {
    pub const ALL: [Self; 5] = [Self::NetRx, Self::NetTx, Self::Send, Self::Receive, Self::IoUring];

    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|event| *event as u8 == code)
    }
}

/// Where calls that send or receive are timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// At the kernel's functions, all callers included.
    Functions,
    /// At system calls and io_uring requests: costs a little in every system call of the machine, and does not see
    /// the kernel's own sockets. For kernels that allow no programs on functions.
    SystemCalls,
}

/// How stacks come to userspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// A double buffer per CPU in shared memory.
    #[default]
    DoubleBuffer,
    /// One BPF ring buffer for all CPUs.
    RingBuffer,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Time events, once [attached](Cost::attach), and sample inside them. Otherwise nothing but the sampler is loaded, and
    /// it samples always.
    pub events: bool,
    /// `None` takes functions where the kernel lets it.
    pub method: Option<Method>,
    pub transport: Transport,
    /// Room for stacks per CPU between two calls of [`Cost::drain`]. A stack of 40 functions takes 336 bytes.
    pub buffer_bytes: u32,
    /// Whether processes may be [watched](Cost::watch).
    pub watch: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            events: true,
            method: None,
            transport: Transport::default(),
            buffer_bytes: 1 << 18,
            watch: false,
        }
    }
}

/// Sums since loading, of one CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    ns: [u64; EVENTS],
    calls: [u64; EVENTS],
    /// Runs of the sampler.
    pub samples: u64,
    pub lost_samples: u64,
    pub lost_stacks: u64,
    pub lost_processes: u64,
    pub lost_tasks: u64,
    other_softirqs: u64,
    system_calls: u64,
    switches: u64,
}

impl Totals {
    pub fn ns(&self, event: Event) -> u64 {
        self.ns.get(event as usize).copied().unwrap_or(0)
    }

    /// How often the event began.
    pub fn calls(&self, event: Event) -> u64 {
        self.calls.get(event as usize).copied().unwrap_or(0)
    }

    /// How often the programs that time events were at work.
    pub fn probed(&self) -> Probed {
        let calls = self.calls(Event::Send) + self.calls(Event::Receive);
        let softirqs = self.calls(Event::NetRx) + self.calls(Event::NetTx) + self.other_softirqs;
        Probed {
            timed: calls + softirqs + self.switches,
            // Requests of io_uring count as calls too.
            other_calls: self.system_calls.saturating_sub(calls),
        }
    }
}

/// See [`Totals::probed`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Probed {
    /// Calls that send or receive, softirqs, task switches: about equally dear.
    pub timed: u64,
    /// System calls that were only looked at.
    pub other_calls: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessId {
    /// As the initial PID namespace numbers it.
    pub pid: u32,
    /// ID of its cgroup (v2): the inode number of the directory.
    pub cgroup: u64,
}

/// Sums of a process in a cgroup, since its entry was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    pub id: ProcessId,
    /// As this process' PID namespace numbers it; 0: outside of it.
    pub pid: u32,
    /// Of the thread that was seen first.
    pub name: String,
    ns: [u64; EVENTS],
    calls: [u64; EVENTS],
}

impl Process {
    pub fn ns(&self, event: Event) -> u64 {
        self.ns.get(event as usize).copied().unwrap_or(0)
    }

    pub fn calls(&self, event: Event) -> u64 {
        self.calls.get(event as usize).copied().unwrap_or(0)
    }
}

/// A way to send or to receive, or an event, that is not timed on this kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    pub event: Event,
    pub what: &'static str,
    pub reason: String,
}

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

/// The end of something comes before its beginning: what is attached only half must not stay open for ever.
const TRACEPOINTS: [Tracepoint; 3] = [
    ("sched_switch", "cost_sched_switch"),
    ("softirq_exit", "cost_softirq_exit"),
    ("softirq_entry", "cost_softirq_entry"),
];
const OF_SYSTEM_CALLS: [Tracepoint; 2] = [("sys_exit", "cost_sys_exit"), ("sys_enter", "cost_sys_enter")];
/// Not on every kernel. The last two are one tracepoint, before and after 6.5.
const OF_REQUESTS: [Tracepoint; 5] = [
    ("io_uring_complete", "cost_completed"),
    ("io_uring_poll_arm", "cost_polled"),
    ("io_uring_queue_async_work", "cost_queued"),
    ("io_uring_submit_req", "cost_request"),
    ("io_uring_submit_sqe", "cost_request"),
];
const SAMPLER: &str = "cost_sample";

/// Name of the tracepoint, name of the program.
type Tracepoint = (&'static str, &'static str);

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

    /// Begins to time events. Makes one call of each way to send and to receive, to see that it is counted.
    pub fn attach(&mut self) -> Result<Vec<Missing>, Error> {
        self.forget_the_past();
        for (tracepoint, program) in self.tracepoints.iter().copied() {
            let link = self.object.program(program)?.attach_trace();
            self.probes.push(link.map_err(|source| Error::Tracepoint { tracepoint, source })?);
        }
        let sockets =
            Sockets::new().map_err(|source| Error::Prepare { what: "a pair of sockets", source })?;
        let missing = WAYS.iter().filter_map(|way| {
            let reason = self.attach_way(way, &sockets).err()?;
            Some(Missing { event: way.event, what: way.name, reason })
        });
        Ok(missing.collect())
    }

    /// No longer times events: sums stay as they are. [`attach`](Self::attach) begins again.
    pub fn detach(&mut self) {
        // Beginnings before ends.
        while let Some(link) = self.probes.pop() {
            drop(link);
        }
        self.attached.clear();
    }

    /// Whatever was going on when the programs were detached is over.
    fn forget_the_past(&self) {
        for cpu in self.all_cpus() {
            cpu.epoch.fetch_add(1, Ordering::Relaxed);
            [&cpu.task, &cpu.softirq, &cpu.base].iter().for_each(|word| word.store(0, Ordering::Relaxed));
            // What no process was charged with is nobody's.
            let charged = cpu.seen_ns.iter().zip(&cpu.ns).chain(cpu.seen_calls.iter().zip(&cpu.calls));
            charged.for_each(|(seen, sum)| seen.store(load(sum), Ordering::Relaxed));
        }
    }

    /// Whether samplers take the stack of whatever runs, and not only inside of events.
    pub fn sample_always(&self, always: bool) {
        self.control.get(0).always.store(u32::from(always), Ordering::Relaxed);
    }

    /// Attaches to one function after the other until a call of this way is counted, exactly once.
    fn attach_way(&mut self, way: &Way, sockets: &Sockets) -> Result<(), String> {
        if self.method == Some(Method::SystemCalls) {
            return self.prove(way, sockets);
        }
        let mut reason = String::from("the kernel has no function for it that programs may be attached to");
        for function in way.functions {
            let Some(number) = self.points.iter().position(|point| point.function == *function) else {
                continue;
            };
            match self.attach_point(number).and_then(|()| self.prove(way, sockets)) {
                Ok(()) => return Ok(()),
                Err(error) => reason = error,
            }
        }
        Err(reason)
    }

    fn prove(&self, way: &Way, sockets: &Sockets) -> Result<(), String> {
        match self.counted(way, sockets) {
            Ok(1) => Ok(()),
            Ok(0) => Err("a call was not noticed".to_owned()),
            Ok(calls) => Err(format!("one call was counted {calls} times")),
            Err(error) => Err(format!("a call failed: {error}")),
        }
    }

    /// Functions stay attached even when this way does not come through them: another one may.
    fn attach_point(&mut self, number: usize) -> Result<(), String> {
        let Some(point) = self.points.get(number).copied() else { return Err(String::new()) };
        if let Some(known) = self.attached.get(point.function) {
            return known.clone();
        }
        // The end first: a beginning without an end would never be closed.
        let done = ["cost_end", "cost_begin"].into_iter().try_for_each(|program| {
            let link = self.object.program_by_name(&format!("{program}_{number}"))?.attach_trace();
            self.probes.push(link.map_err(|source| Error::Function { function: point.function, source })?);
            Ok(())
        });
        let done = done.map_err(|error: Error| error.to_string());
        self.attached.insert(point.function, done.clone());
        done
    }

    /// How often a call of `way` by this thread is counted.
    fn counted(&self, way: &Way, sockets: &Sockets) -> io::Result<u64> {
        let event = way.event as usize;
        let thread = u64::from(sockets::thread_id());
        let checked =
            || -> u64 { self.all_cpus().filter_map(|cpu| Some(load(cpu.checked.get(event)?))).sum() };
        let before = checked();
        self.all_cpus().for_each(|cpu| cpu.check_tid.store(thread, Ordering::Relaxed));
        let done = sockets.call(way);
        self.all_cpus().for_each(|cpu| cpu.check_tid.store(0, Ordering::Relaxed));
        done.map(|()| checked() - before)
    }

    /// Functions at which calls are timed.
    pub fn functions(&self) -> Vec<&'static str> {
        let mut functions: Vec<_> =
            self.attached.iter().filter(|(_, done)| done.is_ok()).map(|(function, _)| *function).collect();
        functions.sort_unstable();
        functions
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

    /// Makes room. A process that is not gone begins again with sums of 0.
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

/// Of what was refused with functions and is allowed without.
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

fn events_of(points: &[Point]) -> [u8; intf::POINTS] {
    let mut events = [0; intf::POINTS];
    for (slot, point) in events.iter_mut().zip(points) {
        *slot = point.event as u8;
    }
    events
}

fn load(sum: &AtomicU64) -> u64 {
    sum.load(Ordering::Relaxed)
}

/// Up to the first zero byte.
pub fn name(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned()
}
