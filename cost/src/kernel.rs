//! Loads and reads the BPF programs that time softirqs and socket calls on each CPU and sample their stacks.
//!
//! [`Observer`](crate::Observer) makes reports from these figures. `docs/notes/design/0005-cost.md` has the reasons for
//! the design.

mod aio;
mod attach;
mod buffer;
mod calls;
mod config;
mod features;
mod intf;
mod perf;
mod points;
mod price;
mod sockets;
mod sums;
mod uring;
mod ways;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::num::NonZero;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};

use buffer::Buffer;
use libbpf_rs::{Link, MapCore, MapFlags};
use millrace_kernel::Error;
use millrace_kernel::intf::Plain;
use millrace_kernel::memory::MappedArray;
use millrace_kernel::object::{LoadedObject, embedded};
use points::{RunningKernel, TimedFunction, Tracepoint, bytes_of_points};

pub use attach::MissingPoint;
pub use buffer::StackRecord;
pub use config::{Config, KernelEvent, StackTransport, TimingMethod};
pub use features::missing as missing_features;
pub use perf::{clock, interrupt_time, period_ns};
pub use price::CallTimes;
pub use sockets::SocketPair;
pub use sums::{CpuSums, ProbedCalls, ProcessId, ProcessSums};
pub use ways::{SocketCall, WAYS};

const OBJECT: &str = "cost.bpf.o";

/// The loaded BPF programs. Dropping this detaches them, and so does the end of the process, even by a signal.
///
/// # Order of calls
///
/// Call [`Self::load`] first, then [`Self::attach`] to time calls, and [`Self::sample`] for each CPU to sample stacks.
/// [`Self::detach`] and `attach` may alternate. Each `attach` begins an epoch: calls that began before it are not
/// counted. Call [`Self::drain`] often enough that the buffers do not fill. [`Self::totals`] may be called at any time.
/// Sums only grow, so the difference of two calls is the time and the number of calls in between.
pub struct CostPrograms {
    cpus: MappedArray<intf::Cpu>,
    buffer: Buffer,
    /// Number of CPUs that have a stack buffer. Buffers are assigned when a CPU is first sampled.
    buffers_given: u64,
    method: Option<TimingMethod>,
    /// Why the kernel refused programs on functions, if they were tried first.
    refused: Option<String>,
    tracepoints: Vec<Tracepoint>,
    points: Vec<TimedFunction>,
    /// Kernel functions to which attaching was tried: `Ok` if programs are attached, or the reason why attaching
    /// failed.
    attached: HashMap<&'static str, Result<(), String>>,
    /// BPF links of the programs that time softirqs and socket calls, in the order of attaching. The program at the end
    /// of a softirq or call precedes the program at its start.
    probes: Vec<Link>,
    samplers: BTreeMap<u32, Link>,
    /// The loaded BPF object. It is the last field, since fields are dropped in order and the object must outlive its
    /// BPF links.
    object: LoadedObject,
}

const SAMPLER: &str = "cost_sample";

impl CostPrograms {
    /// Loads the programs. They time nothing before [`Self::attach`].
    ///
    /// Without a method in `config`, programs on functions are tried first, then programs on system calls if the kernel
    /// refuses the former.
    pub fn load(config: &Config) -> Result<Self, Error> {
        let methods: &[Option<TimingMethod>] = match (config.events, config.method) {
            (false, _) => &[None],
            (true, Some(TimingMethod::Functions)) => &[Some(TimingMethod::Functions)],
            (true, Some(TimingMethod::SystemCalls)) => &[Some(TimingMethod::SystemCalls)],
            (true, None) => &[Some(TimingMethod::Functions), Some(TimingMethod::SystemCalls)],
        };
        let kernel = RunningKernel::read()
            .map_err(|source| Error::Prepare { what: "the kernel's functions", source })?;
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
        // Distinguishes lockdown mode from missing privileges: in lockdown mode, programs on system calls can still be
        // loaded.
        let only_functions = config.method == Some(TimingMethod::Functions)
            && refused.is_denied()
            && Self::load_with(config, Some(TimingMethod::SystemCalls), &kernel).is_ok();
        Err(if only_functions { no_functions(refused) } else { refused })
    }

    fn load_with(
        config: &Config,
        method: Option<TimingMethod>,
        kernel: &RunningKernel,
    ) -> Result<Self, Error> {
        let cpus = cpus()?;
        // The halves of the stack buffers are mapped into this process, so their size is a multiple of the page size.
        let half_bytes = config.buffer_bytes.clamp(1 << 13, 1 << 24).next_multiple_of(4096);
        let buffers = buffers(cpus, online()?);
        let points = if method == Some(TimingMethod::Functions) { kernel.points() } else { Vec::new() };
        let tracepoints = kernel.tracepoints(method);
        let ring_bytes = match config.transport {
            StackTransport::RingBuffer => {
                half_bytes.saturating_mul(buffers.get()).next_power_of_two().min(1 << 30)
            }
            StackTransport::DoubleBuffer => 4096,
        };
        let mut open = embedded!("cost.bpf.o").open()?;
        open.configure(&intf::Config {
            pidns_ino: pid_namespace()?,
            half_bytes,
            ring: u8::from(config.transport == StackTransport::RingBuffer),
            watch: u8::from(config.watch),
            pad: [0; 2],
            point_events: bytes_of_points(&points, |point| point.event as u8),
            point_arguments: bytes_of_points(&points, TimedFunction::argument),
            calls: calls::table(),
        })?;
        let error = |source| Error::Open { object: OBJECT, source };
        open.map("cpus")?.set_max_entries(cpus.get()).map_err(error)?;
        open.map("halves")?.set_max_entries(2 * buffers.get()).map_err(error)?;
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
        let table = MappedArray::new(object.map("cpus")?.as_fd(), cpus)
            .map_err(|source| Error::Memory { what: "cpus", source })?;
        let buffer = Buffer::new(&mut object, config.transport, cpus, buffers, half_bytes, ring_bytes)?;
        Ok(Self {
            cpus: table,
            buffer,
            buffers_given: 0,
            method,
            refused: None,
            tracepoints,
            points,
            attached: HashMap::new(),
            probes: Vec::new(),
            samplers: BTreeMap::new(),
            object,
        })
    }

    /// Returns how networking is timed (at kernel functions or at system calls), or `None` if it is not.
    pub fn method(&self) -> Option<TimingMethod> {
        self.method
    }

    /// Returns why the kernel refused programs on functions, if these were tried and refused.
    pub fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    /// Chooses whether [`Self::processes`] includes the work that processes do on this CPU. By default, it is included.
    pub fn show_processes(&self, cpu: u32, shown: bool) {
        self.cpus.get(cpu).hidden.store(u64::from(!shown), Ordering::Relaxed);
    }

    /// Returns the CPUs whose stacks are sampled.
    pub fn sampled(&self) -> BTreeSet<u32> {
        self.samplers.keys().copied().collect()
    }

    /// Ends sampling on a CPU. A CPU that went offline has lost its sampler and needs a new one when it comes back.
    pub fn stop_sampling(&mut self, cpu: u32) {
        self.samplers.remove(&cpu);
    }

    /// Samples the stacks on a CPU `hz` times a second, until the programs are dropped or [`Self::stop_sampling`] is
    /// called. There are buffers for twice as many CPUs as were online at loading. Samples of further CPUs count as
    /// lost.
    pub fn sample(&mut self, cpu: u32, hz: u32) -> Result<(), Error> {
        use std::os::fd::IntoRawFd;
        // A CPU keeps its stack buffer, so it needs no second buffer after it was offline.
        let number = &self.cpus.get(cpu).buffer;
        if load(number) == 0 {
            self.buffers_given += 1;
            number.store(self.buffers_given, Ordering::Relaxed);
        }
        let clock = perf::clock(cpu, hz).map_err(|source| Error::Sampler { cpu, source })?;
        // libbpf's link takes ownership of the descriptor.
        let link = self.object.program(SAMPLER)?.attach_perf_event(clock.into_raw_fd());
        let link = link.map_err(|source| Error::Sampler { cpu, source: io::Error::other(source) })?;
        self.samplers.insert(cpu, link);
        Ok(())
    }

    /// Begins or ends sampling a process in user mode too. `pid` is its number in this process's PID namespace. Takes
    /// effect only if [`Config::watch`] is set.
    pub fn watch(&mut self, pid: u32, watch: bool) -> Result<(), Error> {
        let map = self.object.map("watched")?;
        let key = pid.to_ne_bytes();
        let done = match watch {
            true => map.update(&key, &[1], MapFlags::ANY),
            false => map.delete(&key),
        };
        done.map_err(|source| Error::Write { what: "watched", source })
    }

    /// Returns the sums of times and calls of each CPU, by CPU number. Each sample adds the time of the running softirq
    /// or socket call so far. Without sampling, its time is added when it ends.
    pub fn totals(&self) -> Vec<CpuSums> {
        self.all_cpus()
            .map(|cpu| CpuSums {
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

    /// Returns the sums of every process that has sent, received or used io_uring's threads since it was last
    /// [forgotten](Self::forget).
    pub fn processes(&mut self) -> Result<Vec<ProcessSums>, Error> {
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
            processes.push(ProcessSums {
                id: ProcessId { pid: key.pid, cgroup: key.cgroup },
                pid: value.pid,
                name: name(&value.name),
                ns: value.ns,
                calls: value.calls,
            });
        }
        Ok(processes)
    }

    /// Removes a process from the kernel's table, which frees its entry. If the process still runs, its sums restart at
    /// 0.
    pub fn forget(&mut self, id: ProcessId) -> Result<(), Error> {
        let key = intf::ProcessKey { cgroup: id.cgroup, pid: id.pid, pad: 0 };
        match self.object.map("processes")?.delete(key.as_bytes()) {
            // It is no error if the table has no entry of this process.
            Err(error) if error.kind() != libbpf_rs::ErrorKind::NotFound => {
                Err(Error::Write { what: "processes", source: error })
            }
            _ => Ok(()),
        }
    }

    /// Calls `read` for each stack that was sampled since the last call.
    pub fn drain(&mut self, read: impl FnMut(StackRecord<'_>)) {
        let cpus = &self.cpus;
        self.buffer.drain(|cpu| cpus.get(cpu).writing.load(Ordering::SeqCst) != 0, read);
    }

    /// Returns the number of possible CPUs. Every CPU's number is below it.
    pub fn cpus(&self) -> u32 {
        self.cpus.len()
    }

    /// Returns descriptors of the loaded programs.
    pub fn program_fds(&self) -> io::Result<Vec<OwnedFd>> {
        self.object.program_fds()
    }

    /// Returns the kernel's IDs of the loaded programs.
    pub fn program_ids(&self) -> Vec<u32> {
        self.object.program_ids()
    }
}

/// Returns the names of all BPF programs of the CPU time observer, as sampled stacks show them.
pub fn programs() -> Result<Vec<String>, Error> {
    Ok(embedded!("cost.bpf.o").open()?.programs())
}

/// Returns the error for a kernel that allows BPF programs, but none on functions.
fn no_functions(error: Error) -> Error {
    if error.is_denied() { Error::NoFunctions } else { error }
}

fn cpus() -> Result<NonZero<u32>, Error> {
    let cpus =
        libbpf_rs::num_possible_cpus().map_err(|source| Error::Read { what: "possible CPUs", source })?;
    u32::try_from(cpus).ok().and_then(NonZero::new).ok_or(Error::Config("no possible CPU"))
}

fn online() -> Result<u32, Error> {
    let what = "/sys/devices/system/cpu/online";
    let listed = std::fs::read_to_string(what).map_err(|source| Error::Prepare { what, source })?;
    Ok(listed.trim().split(',').filter_map(count).sum())
}

/// Returns how many CPUs a range such as `3` or `0-3` has, or `None` if the text is no range.
fn count(range: &str) -> Option<u32> {
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    last.parse::<u32>().ok()?.checked_sub(first.parse().ok()?)?.checked_add(1)
}

/// Returns the number of CPUs that can be sampled: twice those online, at most all possible ones. In virtual machines,
/// most possible CPUs never come online, and a buffer for each would waste memory.
fn buffers(possible: NonZero<u32>, online: u32) -> NonZero<u32> {
    NonZero::new(online.saturating_mul(2)).map_or(possible, |most| most.min(possible))
}

/// Returns the inode number of this process's PID namespace.
fn pid_namespace() -> Result<u32, Error> {
    let error = |source| Error::Prepare { what: "the PID namespace", source };
    let namespace = std::fs::metadata("/proc/self/ns/pid").map_err(error)?;
    u32::try_from(namespace.ino()).map_err(|source| error(io::Error::other(source)))
}

fn load(sum: &AtomicU64) -> u64 {
    sum.load(Ordering::Relaxed)
}

/// Returns the text up to the first zero byte.
pub fn name(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_of_sample_buffers_is_twice_the_online_cpus() {
        let of = |possible, online| buffers(NonZero::new(possible).unwrap(), online).get();
        assert_eq!([of(240, 4), of(2, 2), of(8, 5), of(4096, 128)], [8, 2, 8, 256]);
        // Bytes of memory for the stack buffers of 240 possible CPUs, 4 of them online, and for the sums of 240 CPUs.
        let bytes = of(240, 4) as usize * 2 * (256 << 10) + 240 * size_of::<intf::Cpu>();
        assert!(bytes <= 16 << 20, "{bytes}");
        assert_eq!("0-3,8,10-11\n".trim().split(',').filter_map(count).sum::<u32>(), 7);
        assert_eq!([count("x"), count("3-1"), count("0-4294967295")], [None; 3]);
    }

    /// The map has two halves for each CPU that can be sampled, as the kernel reports its size.
    #[test]
    fn stack_buffer_map_is_sized_by_online_cpus() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP stack_buffer_map_is_sized_by_online_cpus: needs root");
            return;
        }
        let mut cost = CostPrograms::load(&Config::default()).unwrap();
        let online = online().unwrap() as usize;
        let possible = cpus().unwrap().get() as usize;
        let half = Config::default().buffer_bytes as usize;
        assert_eq!(cost.object.map("halves").unwrap().value_size() as usize, half);
        let entries = cost.object.map("halves").unwrap().info().unwrap().info.max_entries as usize;
        assert_eq!(entries, 2 * possible.min(2 * online));
        let cpu = (possible - 1).min(online - 1) as u32;
        for _ in 0..2 {
            cost.sample(cpu, 100).unwrap();
        }
        assert_eq!((load(&cost.cpus.get(cpu).buffer), cost.buffers_given), (1, 1), "one for each CPU");
    }

    /// Kernels before 6.4 must not allocate in `sched_switch`, which runs under the run queue's lock.
    #[test]
    fn sched_switch_program_allocates_no_task_storage() {
        const TASK_STORAGE_GET: i32 = 156;
        const CREATE: i32 = 1;
        let open = embedded!("cost.bpf.o").open().unwrap();
        let flags = |program| open.fourth_arguments(program, TASK_STORAGE_GET);
        assert_eq!(flags("cost_sched_switch"), [Some(0), Some(0)]);
        assert_eq!(flags("cost_sys_enter"), [Some(CREATE)], "the storage is created when a call begins");
    }
}
