//! An independent profile: `perf record` of all CPUs, told apart by the names in its stacks.
//!
//! It shares the observer's definitions (the taxonomy: which function is which part) and nothing else: another
//! clock, another way for the stacks, another reader of symbols, and the event of a stack comes from the stack.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use millrace_cost::function_name;
use millrace_cost::report::Event;
use millrace_cost::taxonomy::{Rules, Taxonomy};
use tempfile::TempDir;

use super::super::process::Process;
use super::network::needs;

/// Of the first CPU, which sends, and of all others. Not divisors or multiples of the rates of the observer and of the
/// tick, nor of each other: samplers in step see the receiver always as long after the sender was interrupted, which is
/// when it has nothing to do.
const FREQUENCIES_HZ: [u32; 2] = [1949, 2087];
/// Reading what runs on the machine comes before the first sample.
const READY: Duration = Duration::from_secs(20);
/// What perf runs, once it samples.
const WORKLOAD: &str = "sleep";
/// Samples behind the time that is asked about show that there were some all the time.
const MARGIN: Duration = Duration::from_millis(500);
/// perf ends by itself if this program is killed. A busy machine may take this much longer than it was asked to.
const LONGEST: Duration = Duration::from_secs(120);
const FINISH: Duration = Duration::from_secs(60);
/// Kernel addresses have the highest bit set.
const KERNEL: u64 = 1 << 63;
const IDLE_TASK: i32 = 0;
const SOFTIRQ: [&str; 2] = ["handle_softirqs", "__do_softirq"];

pub struct Recording {
    perfs: Vec<Perf>,
    _directory: TempDir,
}

/// Some of the CPUs.
struct Perf {
    process: Process,
    data: PathBuf,
    frequency_hz: u32,
}

/// What the samples of one CPU were in.
#[derive(Debug, PartialEq)]
pub struct Cpu {
    frequency_hz: u32,
    pub parts: BTreeMap<(Event, String), u64>,
    /// The observer's programs and what calls programs, on top of whatever.
    pub observer: u64,
    /// The kernel, neither in an event nor idle.
    pub rest: u64,
    /// User mode.
    pub user: u64,
}

impl Recording {
    /// Records `cpus` until it is finished, which is about `length` later.
    pub fn start(cpus: &[u32], length: Duration) -> anyhow::Result<Self> {
        needs("perf", "linux-perf")?;
        let directory = tempfile::tempdir()?;
        let (first, others) = cpus.split_at(cpus.len().min(1));
        let groups = [first, others].into_iter().zip(FREQUENCIES_HZ).filter(|(cpus, _)| !cpus.is_empty());
        let perfs = groups.map(|(cpus, hz)| Perf::start(cpus, hz, length, directory.path()));
        let mut perfs = perfs.collect::<anyhow::Result<Vec<Perf>>>()?;
        perfs.iter_mut().try_for_each(Perf::wait_until_it_samples)?;
        Ok(Self { perfs, _directory: directory })
    }

    /// What happened between two times of `CLOCK_MONOTONIC`.
    pub fn finish(self, from_ns: u64, to_ns: u64) -> anyhow::Result<BTreeMap<u32, Cpu>> {
        std::thread::sleep(MARGIN);
        let mut cpus = BTreeMap::new();
        for perf in self.perfs {
            cpus.extend(perf.finish(from_ns, to_ns)?);
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
        Ok(Self { process: Process::start("perf", command, directory)?, data, frequency_hz })
    }

    /// perf lets its workload begin after it has begun itself.
    fn wait_until_it_samples(&mut self) -> anyhow::Result<()> {
        let perf = self.process.id();
        self.process.wait_until("sampling", READY, || has_child(perf, WORKLOAD))
    }

    fn finish(self, from_ns: u64, to_ns: u64) -> anyhow::Result<BTreeMap<u32, Cpu>> {
        self.process.interrupt(FINISH)?;
        let output = Command::new("perf")
            .args(["script", "--ns", "--fields", "pid,cpu,time,ip,sym", "--input"])
            .arg(&self.data)
            .output()
            .context("cannot run perf script")?;
        ensure!(output.status.success(), "perf script: {}", String::from_utf8_lossy(&output.stderr).trim());
        parse(&String::from_utf8_lossy(&output.stdout), self.frequency_hz, from_ns, to_ns)
    }
}

fn has_child(parent: u32, name: &str) -> bool {
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
    let called = |child: &str| fs::read_to_string(format!("/proc/{child}/comm"));
    children.split_whitespace().any(|child| called(child).is_ok_and(|comm| comm.trim_end() == name))
}

/// Samples are paragraphs: `PID [CPU] SECONDS:`, then a line of address and function per frame, innermost first.
fn parse(text: &str, frequency_hz: u32, from_ns: u64, to_ns: u64) -> anyhow::Result<BTreeMap<u32, Cpu>> {
    let taxonomy = Taxonomy::builtin()?;
    let mut rules = BTreeMap::new();
    let mut cpus = BTreeMap::<u32, Cpu>::new();
    let (mut early, mut late) = (false, false);
    for sample in text.split("\n\n") {
        let mut lines = sample.lines().filter(|line| !line.trim().is_empty());
        let Some(head) = lines.next() else { continue };
        let (task, cpu, time_ns) = parse_head(head).with_context(|| format!("perf script says {head:?}"))?;
        early |= time_ns < from_ns;
        late |= time_ns >= to_ns;
        if !(from_ns..to_ns).contains(&time_ns) {
            continue;
        }
        let stack: Vec<Box<str>> = lines.filter_map(kernel_function).collect();
        for function in &stack {
            rules.entry(function.clone()).or_insert_with(|| taxonomy.rules(function));
        }
        cpus.entry(cpu).or_insert_with(|| Cpu::new(frequency_hz)).add(task, &stack, &taxonomy, &rules);
    }
    ensure!(early && late, "perf did not sample all the time");
    Ok(cpus)
}

/// A task that is ending is -1.
fn parse_head(line: &str) -> Option<(i32, u32, u64)> {
    let mut fields = line.split_whitespace();
    let task = fields.next()?.parse().ok()?;
    let cpu = fields.next()?.strip_prefix('[')?.strip_suffix(']')?.parse().ok()?;
    let (seconds, fraction) = fields.next()?.strip_suffix(':')?.split_once('.')?;
    let ns: u64 = (fraction.len() == 9).then(|| fraction.parse().ok())??;
    Some((task, cpu, seconds.parse::<u64>().ok()? * 1_000_000_000 + ns))
}

fn kernel_function(line: &str) -> Option<Box<str>> {
    let (address, name) = line.trim().split_once(' ')?;
    (u64::from_str_radix(address, 16).ok()? >= KERNEL).then(|| function_name(name.trim()))
}

impl Cpu {
    fn new(frequency_hz: u32) -> Self {
        Self { frequency_hz, parts: BTreeMap::new(), observer: 0, rest: 0, user: 0 }
    }

    fn add(&mut self, task: i32, stack: &[Box<str>], taxonomy: &Taxonomy, rules: &BTreeMap<Box<str>, Rules>) {
        let frames = || stack.iter().filter_map(|function| Some((&**function, rules.get(function)?)));
        let owner = taxonomy.owner(frames().map(|(_, rules)| rules));
        if owner.observer {
            self.observer += 1;
            return;
        }
        if let Some(event) = owner.event {
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

    /// All but the idle task.
    pub fn busy(&self) -> u64 {
        self.events() + self.observer + self.rest + self.user
    }

    /// Percent of the CPU in a time, by the samples that were due: some CPUs take none while they are idle, and none while a
    /// hypervisor runs something else.
    pub fn percent(&self, samples: u64, time_ns: u64) -> f64 {
        samples as f64 * 100.0 / self.due(time_ns)
    }

    /// Samples that a time is worth.
    pub fn due(&self, time_ns: u64) -> f64 {
        time_ns.max(1) as f64 / 1e9 * f64::from(self.frequency_hz)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
  17 [000] 4.900000000: \n\tffffffff81000004 do_filp_open\n

  17 [000] 5.100000000: \n\tffffffff81000001 memcpy_orig\n\tffffffff81000002 ip_forward.isra.0\n\tffffffff81000003 net_rx_action\n\tffffffff81000004 __x64_sys_sendto\n

  17 [000] 5.200000000: \n\tffffffff81000004 do_filp_open\n\t    55aa0001 main\n

  17 [000] 5.300000000: \n\t    55aa0001 main\n

  17 [000] 5.400000000: \n\tffffffff81000001 read_tsc\n\tffffffff81000002 bpf_prog_6bd6bd9a37fee1c3_cost_softirq_exit\n\tffffffff81000003 bpf_trace_run2\n\tffffffff81000004 __x64_sys_sendto\n

   0 [001] 5.300000000: \n\tffffffff81000001 default_idle\n

  -1 [001] 5.400000000: \n\tffffffff81000001 rcu_core\n\tffffffff81000002 handle_softirqs\n

  17 [001] 6.000000000: \n\tffffffff81000001 do_filp_open\n
";

    #[test]
    fn samples_are_told_apart() {
        let cpus = parse(TEXT, 100, 5_000_000_000, 6_000_000_000).expect("it parses");
        let forwarded = BTreeMap::from([((Event::NetRx, "forwarding v4".to_owned()), 1)]);
        assert_eq!(cpus[&0], Cpu { parts: forwarded, observer: 1, rest: 1, user: 1, ..Cpu::new(100) });
        assert_eq!((cpus[&0].events(), cpus[&0].busy()), (1, 4));
        assert_eq!(cpus[&1], Cpu { rest: 1, ..Cpu::new(100) });
    }

    #[test]
    fn a_recording_that_is_too_short_is_an_error() {
        assert!(parse(TEXT, 100, 4_000_000_000, 6_000_000_000).is_err());
        assert!(parse(TEXT, 100, 5_000_000_000, 6_000_000_001).is_err());
    }

    #[test]
    fn idle_time_without_samples_is_not_the_others() {
        assert_eq!(Cpu::new(1000).percent(1000, 4_000_000_000), 25.0);
    }

    #[test]
    fn what_is_not_understood_is_an_error() {
        assert!(parse("perf 17 [000] 5.1:\n", 100, 0, 1).is_err());
    }
}
