//! An independent profile: `perf record` of all CPUs, told apart by the names in its stacks.
//!
//! It shares the observer's definitions (the taxonomy: which function is which part) and nothing else: another
//! clock, another way for the stacks, another reader of symbols, and the event of a stack comes from the stack.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use millrace_cost::function_name;
use millrace_cost::report::Event;
use millrace_cost::taxonomy::{Rules, Taxonomy};
use tempfile::TempDir;

use super::super::process::Process;
use super::network::needs;

/// Not a divisor or multiple of the rates of the observer and of the tick.
const FREQUENCY_HZ: u32 = 1997;
/// Until perf samples; what comes before is checked for.
const SETTLE: Duration = Duration::from_millis(700);
const MARGIN: Duration = Duration::from_millis(1500);
const FINISH: Duration = Duration::from_secs(60);
/// Kernel addresses have the highest bit set.
const KERNEL: u64 = 1 << 63;
const IDLE_TASK: i32 = 0;
const SOFTIRQ: [&str; 2] = ["handle_softirqs", "__do_softirq"];

pub struct Recording {
    perf: Process,
    data: PathBuf,
    _directory: TempDir,
}

/// What the samples of one CPU were in.
#[derive(Debug, Default, PartialEq)]
pub struct Cpu {
    pub parts: BTreeMap<(Event, String), u64>,
    /// The kernel, neither in an event nor idle.
    pub rest: u64,
}

impl Recording {
    /// Records for `length` and a margin on either side.
    pub fn start(length: Duration) -> anyhow::Result<Self> {
        needs("perf", "linux-perf")?;
        let directory = tempfile::tempdir()?;
        let data = directory.path().join("perf.data");
        let mut command = Command::new("perf");
        command.args(["record", "--all-cpus", "--event", "cpu-clock", "--clockid", "CLOCK_MONOTONIC"]);
        command.args(["--kernel-callchains", "--call-graph", "fp", "--freq", &FREQUENCY_HZ.to_string()]);
        command.arg("--output").arg(&data);
        command.args(["sleep", &(SETTLE + length + MARGIN).as_secs_f64().to_string()]);
        let mut perf = Process::start("perf", command, directory.path())?;
        std::thread::sleep(SETTLE);
        perf.check_runs()?;
        Ok(Self { perf, data, _directory: directory })
    }

    /// What happened between two times of `CLOCK_MONOTONIC`.
    pub fn finish(self, from_ns: u64, to_ns: u64) -> anyhow::Result<BTreeMap<u32, Cpu>> {
        self.perf.finish(FINISH)?;
        let output = Command::new("perf")
            .args(["script", "--ns", "--fields", "pid,cpu,time,ip,sym", "--input"])
            .arg(&self.data)
            .output()
            .context("cannot run perf script")?;
        ensure!(output.status.success(), "perf script: {}", String::from_utf8_lossy(&output.stderr).trim());
        parse(&String::from_utf8_lossy(&output.stdout), from_ns, to_ns)
    }
}

/// Samples are paragraphs: `PID [CPU] SECONDS:`, then a line of address and function per frame, innermost first.
fn parse(text: &str, from_ns: u64, to_ns: u64) -> anyhow::Result<BTreeMap<u32, Cpu>> {
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
        cpus.entry(cpu).or_default().add(task, &stack, &taxonomy, &rules);
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
    fn add(&mut self, task: i32, stack: &[Box<str>], taxonomy: &Taxonomy, rules: &BTreeMap<Box<str>, Rules>) {
        let frames = || stack.iter().filter_map(|function| Some((&**function, rules.get(function)?)));
        if let Some(event) = taxonomy.event(frames().map(|(_, rules)| rules)) {
            let part = taxonomy.part(event, frames()).to_owned();
            *self.parts.entry((event, part)).or_default() += 1;
            return;
        }
        let in_softirq = || stack.iter().any(|function| SOFTIRQ.contains(&&**function));
        if !stack.is_empty() && (task != IDLE_TASK || in_softirq()) {
            self.rest += 1;
        }
    }
}

/// Percent of the CPU in a time. Not by the samples that were taken: some CPUs take none while they are idle.
pub fn percent(samples: u64, time_ns: u64) -> f64 {
    samples as f64 * 100.0 / (time_ns.max(1) as f64 / 1e9 * f64::from(FREQUENCY_HZ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
  17 [000] 4.900000000: \n\tffffffff81000004 do_filp_open\n

  17 [000] 5.100000000: \n\tffffffff81000001 memcpy_orig\n\tffffffff81000002 ip_forward.isra.0\n\tffffffff81000003 net_rx_action\n\tffffffff81000004 __x64_sys_sendto\n

  17 [000] 5.200000000: \n\tffffffff81000004 do_filp_open\n\t    55aa0001 main\n

  17 [000] 5.300000000: \n\t    55aa0001 main\n

   0 [001] 5.300000000: \n\tffffffff81000001 default_idle\n

  -1 [001] 5.400000000: \n\tffffffff81000001 rcu_core\n\tffffffff81000002 handle_softirqs\n

  17 [001] 6.000000000: \n\tffffffff81000001 do_filp_open\n
";

    #[test]
    fn samples_are_told_apart() {
        let cpus = parse(TEXT, 5_000_000_000, 6_000_000_000).expect("it parses");
        let forwarded = BTreeMap::from([((Event::NetRx, "forwarding v4".to_owned()), 1)]);
        assert_eq!(cpus[&0], Cpu { parts: forwarded, rest: 1 });
        assert_eq!(cpus[&1], Cpu { parts: BTreeMap::new(), rest: 1 });
    }

    #[test]
    fn a_recording_that_is_too_short_is_an_error() {
        assert!(parse(TEXT, 4_000_000_000, 6_000_000_000).is_err());
        assert!(parse(TEXT, 5_000_000_000, 6_000_000_001).is_err());
    }

    #[test]
    fn idle_time_without_samples_is_not_the_others() {
        assert_eq!(percent(u64::from(FREQUENCY_HZ), 4_000_000_000), 25.0);
    }

    #[test]
    fn what_is_not_understood_is_an_error() {
        assert!(parse("perf 17 [000] 5.1:\n", 0, 1).is_err());
    }
}
