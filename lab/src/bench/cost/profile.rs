//! An independent profile: `perf record` on all CPUs, whose samples are assigned by the function names in their stacks.
//! Each belongs to a kernel context (its event, such as NET_RX) and to a layer of the network stack (its part, such as
//! TCP).
//!
//! Profile and observer (`millrace cost`) share only the taxonomy, a list that says which function belongs to which
//! layer. The profile has its own clock, its own way to collect stacks, and its own symbol reader. It derives the event
//! of a sample from the stack.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use millrace_cost::function_name;
use millrace_cost::report::Event;
use millrace_cost::taxonomy::{FunctionRules, Taxonomy};
use tempfile::TempDir;

use super::super::process::BenchProcess;
use super::network::needs;

/// Sampling rates of the first CPU, which sends, and of all others. None is a divisor or multiple of another one, of
/// the observer's rate or of the tick's. If the samplers of both CPUs ran in step, each sample of the receiver would
/// come shortly after an interrupt of the sender, when the receiver has nothing to do.
const FREQUENCIES_HZ: [u32; 2] = [1949, 2087];
/// Longest wait for perf's first sample. Before that sample, perf reads the state of all processes on the machine.
const READY: Duration = Duration::from_secs(20);
/// The command that perf starts once it samples. Its process shows that sampling has begun.
const WORKLOAD: &str = "sleep";
/// Time for which sampling continues after the measured period. Samples from this time show that perf sampled until the
/// end of the period.
const MARGIN: Duration = Duration::from_millis(500);
/// Extra time for which perf's workload runs, to cover delays on a busy machine. The workload's end stops perf even if
/// this program is killed.
const LONGEST: Duration = Duration::from_secs(120);
const FINISH: Duration = Duration::from_secs(60);
/// The highest bit, which is set in kernel addresses only.
const KERNEL: u64 = 1 << 63;
const IDLE_TASK: i32 = 0;
const SOFTIRQ: [&str; 2] = ["handle_softirqs", "__do_softirq"];

pub struct PerfRecording {
    perfs: Vec<Perf>,
    _directory: TempDir,
}

/// A running `perf record` on some of the CPUs.
struct Perf {
    process: BenchProcess,
    data: PathBuf,
    frequency_hz: u32,
}

/// The data that a `perf record` has written.
struct Recorded {
    data: PathBuf,
    frequency_hz: u32,
}

/// Numbers of `perf` samples on one CPU, by the code that ran.
#[derive(Debug, PartialEq)]
pub struct CpuSamples {
    frequency_hz: u32,
    pub parts: BTreeMap<(Event, String), u64>,
    /// Samples in the observer's BPF programs and in the kernel code that calls them, both during networking and at
    /// other times.
    pub observer: u64,
    /// Samples of all other kernel code, except the idle task: neither networking nor the observer.
    pub rest: u64,
    /// Samples whose stacks have a function of the network stack, except AF_UNIX and netlink. The functions are listed
    /// in [`NETWORKING`] and [`LOCAL`], independently of the taxonomy.
    pub networking: u64,
    /// Samples in user mode.
    pub user: u64,
}

impl PerfRecording {
    /// Records samples on `cpus` for about `length`, until [`finish`](Self::finish) is called.
    pub fn start(cpus: &[u32], length: Duration) -> anyhow::Result<Self> {
        needs("perf", "linux-perf")?;
        let directory = tempfile::tempdir()?;
        // Each group of CPUs has its own sampling rate.
        let (first, others) = cpus.split_at(cpus.len().min(1));
        let groups = [first, others].into_iter().zip(FREQUENCIES_HZ).filter(|(cpus, _)| !cpus.is_empty());
        let perfs = groups.map(|(cpus, hz)| Perf::start(cpus, hz, length, directory.path()));
        let mut perfs = perfs.collect::<anyhow::Result<Vec<Perf>>>()?;
        perfs.iter_mut().try_for_each(Perf::wait_until_it_samples)?;
        Ok(Self { perfs, _directory: directory })
    }

    /// Returns the samples between two times of `CLOCK_MONOTONIC`. If `socket_files` is the name of a process, all its
    /// read and write system calls count as calls on sockets. The stack at the beginning of such a call does not show
    /// whether it is on a socket or another file.
    pub fn finish(
        self,
        from_ns: u64,
        to_ns: u64,
        socket_files: Option<&str>,
    ) -> anyhow::Result<BTreeMap<u32, CpuSamples>> {
        std::thread::sleep(MARGIN);
        // All perfs are stopped before the first recording is read, since reading takes long.
        let recorded: Vec<_> = self.perfs.into_iter().map(Perf::stop).collect::<anyhow::Result<_>>()?;
        let mut cpus = BTreeMap::new();
        for recording in recorded {
            cpus.extend(recording.read(from_ns, to_ns, socket_files)?);
        }
        Ok(cpus)
    }
}

impl Perf {
    fn start(cpus: &[u32], frequency_hz: u32, length: Duration, directory: &Path) -> anyhow::Result<Self> {
        let list: Vec<String> = cpus.iter().map(u32::to_string).collect();
        let data = directory.join(format!("{frequency_hz}.data"));
        let mut command = Command::new("perf");
        command.args([
            "record",
            "--cpu",
            &list.join(","),
            "--event",
            "cpu-clock",
            "--clockid",
            "CLOCK_MONOTONIC",
        ]);
        command.args(["--kernel-callchains", "--call-graph", "fp", "--freq", &frequency_hz.to_string()]);
        command.arg("--output").arg(&data);
        command.args([WORKLOAD, &(length + LONGEST).as_secs_f64().to_string()]);
        Ok(Self { process: BenchProcess::start("perf", command, directory)?, data, frequency_hz })
    }

    /// Waits until perf has started its workload. perf does so once it samples.
    fn wait_until_it_samples(&mut self) -> anyhow::Result<()> {
        let perf = self.process.id();
        self.process.wait_until("sampling", READY, || has_child(perf, WORKLOAD))
    }

    fn stop(self) -> anyhow::Result<Recorded> {
        // SIGINT makes perf write all its data before it ends.
        self.process.interrupt(FINISH)?;
        Ok(Recorded { data: self.data, frequency_hz: self.frequency_hz })
    }
}

impl Recorded {
    fn read(
        &self,
        from_ns: u64,
        to_ns: u64,
        socket_files: Option<&str>,
    ) -> anyhow::Result<BTreeMap<u32, CpuSamples>> {
        let output = Command::new("perf")
            .args(["script", "--ns", "--fields", "comm,pid,cpu,time,ip,sym", "--input"])
            .arg(&self.data)
            .output()
            .context("cannot run perf script")?;
        ensure!(output.status.success(), "perf script: {}", String::from_utf8_lossy(&output.stderr).trim());
        parse(&String::from_utf8_lossy(&output.stdout), self.frequency_hz, from_ns, to_ns, socket_files)
    }
}

fn has_child(parent: u32, name: &str) -> bool {
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
    let called = |child: &str| fs::read_to_string(format!("/proc/{child}/comm"));
    children.split_whitespace().any(|child| called(child).is_ok_and(|comm| comm.trim_end() == name))
}

/// Parses the output of `perf script`. Each sample is a paragraph: a line `NAME PID [CPU] SECONDS:`, then a line with
/// address and function per stack frame, innermost first.
fn parse(
    text: &str,
    frequency_hz: u32,
    from_ns: u64,
    to_ns: u64,
    socket_files: Option<&str>,
) -> anyhow::Result<BTreeMap<u32, CpuSamples>> {
    let taxonomy = Taxonomy::builtin()?;
    let mut rules = BTreeMap::new();
    let mut cpus = BTreeMap::<u32, CpuSamples>::new();
    let mut early = false;
    let mut late = false;
    for sample in text.split("\n\n") {
        let mut lines = sample.lines().filter(|line| !line.trim().is_empty());
        let Some(head) = lines.next() else { continue };
        let SampleHead { name, task, cpu, time_ns } =
            parse_head(head).with_context(|| format!("cannot parse this line of perf script: {head:?}"))?;
        // Samples before and after the period show that perf sampled throughout it.
        early |= time_ns < from_ns;
        late |= time_ns >= to_ns;
        if !(from_ns..to_ns).contains(&time_ns) {
            continue;
        }
        let stack: Vec<Box<str>> = lines.filter_map(kernel_function).collect();
        for function in &stack {
            // Cache the taxonomy's rules for the function, so that each function is looked up only once.
            rules.entry(function.clone()).or_insert_with(|| taxonomy.rules(function));
        }
        let call = socket_files.filter(|files| *files == name).and_then(|_| file_call(&stack));
        let samples = cpus.entry(cpu).or_insert_with(|| CpuSamples::new(frequency_hz));
        samples.add(task, &stack, call, &taxonomy, &rules);
    }
    ensure!(early && late, "perf did not sample all the time");
    Ok(cpus)
}

struct SampleHead<'a> {
    /// Name of the sampled process.
    name: &'a str,
    task: i32,
    cpu: u32,
    time_ns: u64,
}

/// Parses the first line of a sample. A name may contain spaces, and the ID of an exiting task is -1.
fn parse_head(line: &str) -> Option<SampleHead<'_>> {
    let (line, time) = line.trim().rsplit_once(char::is_whitespace)?;
    let (line, cpu) = line.trim_end().rsplit_once(char::is_whitespace)?;
    let (name, task) = line.trim_end().rsplit_once(char::is_whitespace)?;
    let (seconds, fraction) = time.strip_suffix(':')?.split_once('.')?;
    // `--ns` makes perf print nine decimal places.
    let ns: u64 = (fraction.len() == 9).then(|| fraction.parse().ok())??;
    Some(SampleHead {
        name: name.trim_end(),
        task: task.parse().ok()?,
        cpu: cpu.strip_prefix('[')?.strip_suffix(']')?.parse().ok()?,
        time_ns: seconds.parse::<u64>().ok()? * 1_000_000_000 + ns,
    })
}

/// Returns the event of a stack that is in the system call write (counted as a send) or read (a receive). Returns
/// `None` for other stacks, and for a softirq that interrupts the system call.
fn file_call(stack: &[Box<str>]) -> Option<Event> {
    let has = |names: &[&str]| stack.iter().any(|function| names.contains(&&**function));
    match () {
        () if has(&SOFTIRQ) => None,
        () if has(&["ksys_write", "vfs_write", "__x64_sys_write", "__arm64_sys_write"]) => Some(Event::Send),
        () if has(&["ksys_read", "vfs_read", "__x64_sys_read", "__arm64_sys_read"]) => Some(Event::Receive),
        () => None,
    }
}

fn kernel_function(line: &str) -> Option<Box<str>> {
    let (address, name) = line.trim().split_once(' ')?;
    (u64::from_str_radix(address, 16).ok()? >= KERNEL).then(|| function_name(name.trim()))
}

/// Prefixes of function names in the network stack. Whole families of functions are listed, since a tail call can hide
/// any single function from a stack. io_uring's kernel threads count as networking, as the observer counts them.
const NETWORKING: [&str; 77] = [
    "tcp_",
    "__tcp_",
    "tcp4_",
    "tcp6_",
    "udp_",
    "__udp",
    "udp4_",
    "udp6_",
    "udpv6_",
    "ip_",
    "__ip_",
    "ip6_",
    "ipv6_",
    "inet_",
    "__inet_",
    "inet6_",
    "fib_",
    "dst_",
    "neigh_",
    "arp_",
    "icmp",
    "raw_v4",
    "sock_",
    "__sock_",
    "sk_",
    "__sk_",
    "skb_",
    "__skb_",
    "__alloc_skb",
    "kfree_skb",
    "__kfree_skb",
    "consume_skb",
    "build_skb",
    "lock_sock",
    "release_sock",
    "__sys_sendto",
    "__sys_sendmsg",
    "___sys_sendmsg",
    "__sys_recvfrom",
    "__sys_recvmsg",
    "___sys_recvmsg",
    "__sys_connect",
    "__sys_accept",
    "__sys_socket",
    "__sys_bind",
    "__sys_listen",
    "__sys_setsockopt",
    "__sys_shutdown",
    "do_accept",
    "net_rx_action",
    "net_tx_action",
    "napi_",
    "__napi_",
    "netif_",
    "__netif_",
    "process_backlog",
    "dev_hard_start",
    "dev_queue_xmit",
    "__dev_queue_xmit",
    "dev_gro",
    "eth_type",
    "veth_",
    "tun_",
    "vxlan_",
    "br_",
    "xdp_",
    "cpu_map_",
    "bq_",
    "qdisc_",
    "__qdisc_",
    "sch_",
    "tcf_",
    "nf_",
    "nft_",
    "bbr_",
    "io_sq_thread",
    "io_wq_worker",
];
const LOCAL: [&str; 4] = ["unix_", "netlink_", "rtnetlink_", "genl_"];

/// Functions that all subsystems call. If one of them is tail-called, its caller is missing in the stack.
const ANYWHERE: [&str; 1] = ["_raw_spin_"];

/// Reports whether a stack, whose first function is the innermost one, belongs to networking. If a softirq has
/// interrupted other code, the functions of that code are ignored. At the begin and end of a softirq its own functions
/// are not in the stack, so the interrupted code counts there.
fn is_networking(stack: &[Box<str>]) -> bool {
    let functions = || stack.iter().map(|function| &**function);
    let is_softirq = |function: &&str| SOFTIRQ.contains(function);
    let any = |of: &[&str], begins: &[&str]| {
        of.iter().any(|function| begins.iter().any(|begin| function.starts_with(begin)))
    };
    let inside: Vec<&str> = functions().take_while(|function| !is_softirq(function)).collect();
    let says_what = inside.iter().any(|function| !any(&[*function], &ANYWHERE));
    if says_what && functions().any(|function| is_softirq(&function)) {
        return any(&inside, &NETWORKING);
    }
    let all: Vec<&str> = functions().collect();
    any(&all, &NETWORKING) && !any(&all, &LOCAL)
}

impl CpuSamples {
    pub fn new(frequency_hz: u32) -> Self {
        Self { frequency_hz, parts: BTreeMap::new(), observer: 0, rest: 0, networking: 0, user: 0 }
    }

    fn add(
        &mut self,
        task: i32,
        stack: &[Box<str>],
        call: Option<Event>,
        taxonomy: &Taxonomy,
        rules: &BTreeMap<Box<str>, FunctionRules>,
    ) {
        let frames = || stack.iter().filter_map(|function| Some((&**function, rules.get(function)?)));
        let owner = taxonomy.owner(frames().map(|(_, rules)| rules));
        if owner.observer {
            self.observer += 1;
            return;
        }
        self.networking += u64::from(is_networking(stack));
        if let Some(event) = owner.event.filter(|event| *event != Event::Kernel).or(call) {
            let part = taxonomy.part(event, frames()).to_owned();
            *self.parts.entry((event, part)).or_default() += 1;
            return;
        }
        let in_softirq = || stack.iter().any(|function| SOFTIRQ.contains(&&**function));
        match stack {
            [] => self.user += 1,
            _ if task != IDLE_TASK || in_softirq() => self.rest += 1,
            _ => {}
        }
    }

    pub fn events(&self) -> u64 {
        self.parts.values().sum()
    }

    /// Returns the number of samples outside of the idle task.
    pub fn busy(&self) -> u64 {
        self.events() + self.observer + self.rest + self.user
    }

    /// Returns the percentage of the CPU's time that a number of samples stands for, relative to the samples that were
    /// due in `time_ns`. An idle CPU, or one that a hypervisor has taken away, delivers fewer samples than are due.
    pub fn percent(&self, samples: u64, time_ns: u64) -> f64 {
        samples as f64 * 100.0 / self.due(time_ns)
    }

    /// Returns the number of samples that a CPU should deliver in this time.
    pub fn due(&self, time_ns: u64) -> f64 {
        time_ns.max(1) as f64 / 1e9 * f64::from(self.frequency_hz)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
i perf  17 [000] 4.900000000: \n\tffffffff81000004 do_filp_open\n

i perf  17 [000] 5.100000000: \n\tffffffff81000001 memcpy_orig\n\tffffffff81000002 ip_forward.isra.0\n\tffffffff81000003 net_rx_action\n\tffffffff81000004 __x64_sys_sendto\n

i perf  17 [000] 5.200000000: \n\tffffffff81000004 do_filp_open\n\t    55aa0001 main\n

i perf  17 [000] 5.300000000: \n\t    55aa0001 main\n

i perf  17 [000] 5.400000000: \n\tffffffff81000001 read_tsc\n\tffffffff81000002 bpf_prog_6bd6bd9a37fee1c3_cost_softirq_exit\n\tffffffff81000003 bpf_trace_run2\n\tffffffff81000004 __x64_sys_sendto\n

swapper     0 [001] 5.300000000: \n\tffffffff81000001 default_idle\n

:-1    -1 [001] 5.400000000: \n\tffffffff81000001 rcu_core\n\tffffffff81000002 handle_softirqs\n

i perf  17 [001] 6.000000000: \n\tffffffff81000001 do_filp_open\n
";

    #[test]
    fn perf_samples_are_classified_by_their_functions() {
        let cpus = parse(TEXT, 100, 5_000_000_000, 6_000_000_000, None).expect("it parses");
        let forwarded = BTreeMap::from([((Event::NetRx, "forwarding v4".to_owned()), 1)]);
        assert_eq!(
            cpus[&0],
            CpuSamples {
                parts: forwarded,
                observer: 1,
                rest: 1,
                networking: 1,
                user: 1,
                ..CpuSamples::new(100)
            }
        );
        assert_eq!((cpus[&0].events(), cpus[&0].busy()), (1, 4));
        assert_eq!(cpus[&1], CpuSamples { rest: 1, ..CpuSamples::new(100) });
    }

    #[test]
    fn networking_is_recognised_by_functions_in_the_perf_call_stack() {
        for (stack, want) in [
            (&["memcpy", "tcp_sendmsg", "sock_write_iter", "vfs_write"][..], true),
            (&["unix_stream_sendmsg", "sock_write_iter", "vfs_write"], false),
            (&["ip_rcv", "net_rx_action", "handle_softirqs", "unix_stream_sendmsg", "sock_write_iter"], true),
            (&["rcu_do_batch", "rcu_core", "handle_softirqs", "tcp_sendmsg"], false),
            (&["do_filp_open"], false),
            // Tail calls removed the softirq's own function from this stack.
            (&["handle_softirqs", "do_softirq", "__dev_queue_xmit", "__sys_sendto"], true),
            (
                &[
                    "_raw_spin_unlock_irqrestore",
                    "handle_softirqs",
                    "do_softirq",
                    "__release_sock",
                    "tcp_recvmsg",
                ],
                true,
            ),
            (&["handle_softirqs", "__irq_exit_rcu", "do_filp_open"], false),
            (&["handle_softirqs", "__irq_exit_rcu", "unix_stream_sendmsg", "sock_write_iter"], false),
        ] {
            let stack: Vec<Box<str>> = stack.iter().map(|function| (*function).into()).collect();
            assert_eq!(is_networking(&stack), want, "{stack:?}");
        }
    }

    #[test]
    fn perf_recording_shorter_than_the_measured_period_is_an_error() {
        assert!(parse(TEXT, 100, 4_000_000_000, 6_000_000_000, None).is_err());
        assert!(parse(TEXT, 100, 5_000_000_000, 6_000_000_001, None).is_err());
    }

    #[test]
    fn percentage_of_samples_does_not_depend_on_missing_idle_samples() {
        assert_eq!(CpuSamples::new(1000).percent(1000, 4_000_000_000), 25.0);
    }

    #[test]
    fn vfs_writes_of_the_load_process_count_as_socket_calls() {
        let text = TEXT.replace("do_filp_open", "vfs_write");
        let parse = |files| parse(&text, 100, 5_000_000_000, 6_000_000_000, files).expect("it parses");
        let sent = |cpus: &BTreeMap<u32, CpuSamples>| {
            cpus[&0].parts.get(&(Event::Send, "sockets".to_owned())).copied()
        };
        assert_eq!(sent(&parse(Some("i perf"))), Some(1));
        assert_eq!((sent(&parse(Some("other"))), sent(&parse(None))), (None, None));
    }

    #[test]
    fn malformed_sample_is_an_error() {
        assert!(parse("perf 17 [000] 5.1:\n", 100, 0, 1, None).is_err());
    }
}
