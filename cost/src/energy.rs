//! Reads the machine's energy from RAPL, through powercap or else perf, and estimates networking's part of it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use millrace_kernel::energy::EnergyCounter;

use crate::report::{Energy, EnergyDomain};

const POWERCAP: &str = "/sys/class/powercap";
const PERF: &str = "/sys/bus/event_source/devices/power";
/// Names of RAPL domains: the perf event and the name that powercap uses.
const PERF_DOMAINS: [(&str, &str); 2] = [("energy-pkg", "package"), ("energy-ram", "dram")];

/// Measures the energy, in joules, between two readings of the RAPL counters.
#[derive(Debug)]
pub struct EnergyMeter {
    source: Result<(&'static str, Vec<Domain>), String>,
    idle_watts: Option<f64>,
}

#[derive(Debug)]
struct Domain {
    name: String,
    kind: EnergyDomainKind,
    reader: EnergyReader,
    /// The previous reading of the counters. `None` after a failed reading: the next difference would cover more than
    /// one period.
    last: Option<u64>,
}

/// The kind of a RAPL domain. Package and memory domains do not overlap, so their energy can be added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EnergyDomainKind {
    Package,
    Memory,
    /// A part of a package (`core`), or a domain that contains packages (`psys`).
    Other,
}

impl EnergyDomainKind {
    /// Returns the kind of a domain by its powercap name: `package-0`, `dram`, `core`, `uncore`, `psys`.
    fn from_domain_name(name: &str) -> Self {
        match name {
            _ if name.starts_with("package") => Self::Package,
            _ if name.starts_with("dram") => Self::Memory,
            _ => Self::Other,
        }
    }
}

#[derive(Debug)]
enum EnergyReader {
    /// A counter in microjoules that restarts at 0 after `range`.
    Powercap { file: File, range: u64 },
    /// A 64-bit perf counter whose unit is `joules`.
    Perf { counter: EnergyCounter, joules: f64 },
}

impl EnergyMeter {
    /// Opens the counters. `idle_watts` is the power of all packages and memory together on an idle machine.
    pub fn new(idle_watts: Option<f64>) -> Self {
        Self { source: open(Path::new(POWERCAP), Path::new(PERF)), idle_watts }
    }

    /// Measures the energy since the last call. `networking_ns` is the networking time on the reported CPUs. `busy_ns`
    /// is the busy time of all CPUs, since the counters cover all of them.
    pub fn read(&mut self, period: Duration, networking_ns: u64, busy_ns: u64) -> Energy {
        let read = |(source, domains): &mut (&'static str, Vec<Domain>)| {
            // Reads every domain even if one fails, so that each domain's next period begins now.
            let read: Vec<Result<_, String>> = domains.iter_mut().map(|domain| domain.read(period)).collect();
            Ok((*source, read.into_iter().collect::<Result<Vec<_>, _>>()?))
        };
        match self.source.as_mut().map_err(|reason| reason.clone()).and_then(read) {
            Err(reason) => Energy::Absent { reason },
            Ok((source, readings)) => {
                let counted = readings.iter().filter(|(kind, _)| *kind != EnergyDomainKind::Other);
                let total: f64 = counted.map(|(_, domain)| domain.joules).sum();
                let active = self.idle_watts.map(|idle| active_joules(total, idle, period));
                let networking = networking_joules(active.unwrap_or(total), networking_ns, busy_ns);
                Energy::Measured {
                    source: source.to_owned(),
                    domains: readings.into_iter().map(|(_, domain)| domain).collect(),
                    total_joules: total,
                    active_joules: active,
                    networking_joules: networking,
                    networking_watts: watts(networking, period),
                    idle_watts: self.idle_watts,
                }
            }
        }
    }
}

/// Returns the energy beyond what an idle machine would have used in the same period.
fn active_joules(joules: f64, idle_watts: f64, period: Duration) -> f64 {
    (joules - idle_watts * period.as_secs_f64()).max(0.0)
}

/// Returns networking's energy, in proportion to its part of the CPUs' busy time.
fn networking_joules(joules: f64, networking_ns: u64, busy_ns: u64) -> f64 {
    if busy_ns == 0 {
        return 0.0;
    }
    joules * (networking_ns as f64 / busy_ns as f64).min(1.0)
}

fn watts(joules: f64, period: Duration) -> f64 {
    if period.is_zero() { 0.0 } else { joules / period.as_secs_f64() }
}

impl Domain {
    fn read(&mut self, period: Duration) -> Result<(EnergyDomainKind, EnergyDomain), String> {
        let error = |what: &str| format!("cannot read the energy of {}: {what}", self.name);
        let before = self.last.take();
        let now = self.reader.count().map_err(|source| error(&source.to_string()))?;
        self.last = Some(now);
        let before = before.ok_or_else(|| error("the reading before this one failed"))?;
        let joules = self.reader.joules(before, now);
        Ok((self.kind, EnergyDomain { name: self.name.clone(), joules, watts: watts(joules, period) }))
    }
}

impl EnergyReader {
    fn count(&self) -> io::Result<u64> {
        match self {
            Self::Powercap { file, .. } => {
                // Reads the counter's file, opened at start-up: the process may have lost the privilege to open it.
                let mut text = [0; 32];
                let read = file.read_at(&mut text, 0)?;
                parsed(&String::from_utf8_lossy(text.get(..read).unwrap_or_default()))
            }
            Self::Perf { counter, .. } => counter.read(),
        }
    }

    fn joules(&self, before: u64, after: u64) -> f64 {
        match self {
            Self::Powercap { range, .. } => wrapped(before, after, *range) as f64 * 1e-6,
            Self::Perf { joules, .. } => after.wrapping_sub(before) as f64 * joules,
        }
    }
}

/// Returns the difference of two readings of a counter that wraps to 0 after `range`. At most one wrap is assumed.
fn wrapped(before: u64, after: u64, range: u64) -> u64 {
    match after.checked_sub(before) {
        Some(difference) => difference,
        None => range.saturating_sub(before).saturating_add(after).saturating_add(1),
    }
}

fn open(powercap: &Path, perf: &Path) -> Result<(&'static str, Vec<Domain>), String> {
    let domains = powercap_domains(powercap).map_err(|error| error.to_string())?;
    if !domains.is_empty() {
        return Ok(("powercap", domains));
    }
    match perf_domains(perf) {
        Ok(domains) if !domains.is_empty() => Ok(("perf", domains)),
        Ok(_) => Err("no RAPL, neither in powercap nor in perf".to_owned()),
        Err(error) => Err(format!("no RAPL in powercap; in perf: {error}")),
    }
}

/// Returns the domains below `/sys/class/powercap`: `intel-rapl:0` is a package, `intel-rapl:0:1` a part of it, also on
/// AMD. `intel-rapl-mmio` is skipped: its counters repeat those of the same hardware.
fn powercap_domains(root: &Path) -> io::Result<Vec<Domain>> {
    let entries = match fs::read_dir(root) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let zone = |path: &&PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("intel-rapl:"))
    };
    paths.iter().filter(zone).map(|path| powercap_domain(path)).collect()
}

fn powercap_domain(path: &Path) -> io::Result<Domain> {
    let name = fs::read_to_string(path.join("name"))?.trim().to_owned();
    let range = number(&path.join("max_energy_range_uj"))?;
    let reader = EnergyReader::Powercap { file: File::open(path.join("energy_uj"))?, range };
    Ok(Domain { kind: EnergyDomainKind::from_domain_name(&name), last: Some(reader.count()?), name, reader })
}

fn perf_domains(root: &Path) -> io::Result<Vec<Domain>> {
    let mut domains = Vec::new();
    if !root.exists() {
        return Ok(domains);
    }
    let kind = u32::try_from(number(&root.join("type"))?).map_err(io::Error::other)?;
    let cpus = cpu_list(&fs::read_to_string(root.join("cpumask"))?);
    for (event, name) in PERF_DOMAINS {
        let Some(config) = event_config(&root.join("events").join(event)) else { continue };
        let scale = fs::read_to_string(root.join("events").join(format!("{event}.scale")))?;
        let joules = scale.trim().parse().map_err(io::Error::other)?;
        for (package, cpu) in cpus.iter().enumerate() {
            let counter = EnergyCounter::open(kind, config, *cpu)?;
            domains.push(Domain {
                name: format!("{name}-{package}"),
                kind: EnergyDomainKind::from_domain_name(name),
                last: Some(counter.read()?),
                reader: EnergyReader::Perf { counter, joules },
            });
        }
    }
    Ok(domains)
}

/// Returns the number in a perf event file such as `event=0x02`.
fn event_config(path: &Path) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    u64::from_str_radix(text.trim().strip_prefix("event=0x")?, 16).ok()
}

/// Returns the CPUs of a kernel list such as `0,4-5`.
fn cpu_list(text: &str) -> Vec<u32> {
    let range = |item: &str| {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    text.split(',').filter_map(range).flatten().collect()
}

fn number(path: &Path) -> io::Result<u64> {
    parsed(&fs::read_to_string(path)?)
}

fn parsed(text: &str) -> io::Result<u64> {
    text.trim().parse().map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn write(root: &Path, zone: &str, file: &str, text: &str) {
        fs::create_dir_all(root.join(zone)).expect("created");
        fs::write(root.join(zone).join(file), text).expect("written");
    }

    fn tree(root: &Path) {
        for (zone, name) in
            [("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "dram"), ("intel-rapl-mmio:0", "x")]
        {
            write(root, zone, "name", &format!("{name}\n"));
            write(root, zone, "max_energy_range_uj", "1000000\n");
            write(root, zone, "energy_uj", "999000\n");
        }
    }

    fn meter(root: &Path, idle_watts: Option<f64>) -> EnergyMeter {
        EnergyMeter { source: open(root, Path::new("/nonexistent")), idle_watts }
    }

    #[test]
    fn wrapped_energy_counter_is_extended() {
        let root = tempfile::tempdir().expect("a directory");
        tree(root.path());
        let mut meter = meter(root.path(), None);
        write(root.path(), "intel-rapl:0", "energy_uj", "500999");
        write(root.path(), "intel-rapl:0:0", "energy_uj", "999500");
        let Energy::Measured { source, domains, total_joules, active_joules, networking_joules, .. } =
            meter.read(SECOND, 1, 4)
        else {
            panic!("energy was not measured")
        };
        assert_eq!(source, "powercap");
        let joules: Vec<_> = domains.iter().map(|domain| (domain.name.as_str(), domain.joules)).collect();
        // The counter advances by 1001 microjoules until it wraps to 0, then by 500999: together 0.502 J.
        assert_eq!(joules, [("package-0", 0.502), ("dram", 0.0005)]);
        // The total is the energy of package and memory. Without `idle_watts`, the energy beyond an idle machine's is
        // not known.
        assert!((total_joules - 0.5025).abs() < 1e-9, "{total_joules}");
        assert_eq!(active_joules, None);
        assert!((networking_joules - 0.125_625).abs() < 1e-9, "{networking_joules}");
    }

    #[test]
    fn networking_energy_excludes_idle_power() {
        let root = tempfile::tempdir().expect("a directory");
        tree(root.path());
        let mut meter = meter(root.path(), Some(0.3));
        write(root.path(), "intel-rapl:0", "energy_uj", "499999");
        write(root.path(), "intel-rapl:0:0", "energy_uj", "99999");
        match meter.read(SECOND, 1, 2) {
            Energy::Measured { total_joules, active_joules, networking_watts, idle_watts, .. } => {
                assert!((total_joules - 0.602).abs() < 1e-9, "{total_joules}");
                assert!(
                    active_joules.is_some_and(|joules| (joules - 0.302).abs() < 1e-9),
                    "{active_joules:?}"
                );
                assert!((networking_watts - 0.151).abs() < 1e-9, "{networking_watts}");
                assert_eq!(idle_watts, Some(0.3));
            }
            Energy::Absent { reason } => panic!("{reason}"),
        }
    }

    #[test]
    fn rapl_core_and_psys_energy_is_left_out_of_the_total() {
        let root = tempfile::tempdir().expect("a directory");
        tree(root.path());
        for (zone, name) in [("intel-rapl:0:1", "core"), ("intel-rapl:1", "psys")] {
            write(root.path(), zone, "name", name);
            write(root.path(), zone, "max_energy_range_uj", "1000000");
            write(root.path(), zone, "energy_uj", "0");
        }
        let mut meter = meter(root.path(), None);
        for zone in ["intel-rapl:0", "intel-rapl:0:0", "intel-rapl:0:1", "intel-rapl:1"] {
            write(root.path(), zone, "energy_uj", "999900");
        }
        match meter.read(SECOND, 1, 2) {
            Energy::Measured { domains, total_joules, .. } => {
                assert_eq!(domains.len(), 4);
                assert!((total_joules - 0.0018).abs() < 1e-9, "{total_joules}");
            }
            Energy::Absent { reason } => panic!("{reason}"),
        }
    }

    #[test]
    fn unreadable_energy_counter_makes_energy_absent() {
        let root = tempfile::tempdir().expect("a directory");
        tree(root.path());
        let mut meter = meter(root.path(), None);
        let mut read = |text: &str| {
            write(root.path(), "intel-rapl:0:0", "energy_uj", text);
            meter.read(SECOND, 1, 2)
        };
        for (text, want) in [("?", "invalid digit"), ("999000", "the reading before")] {
            match read(text) {
                Energy::Absent { reason } => {
                    assert!(reason.contains("dram") && reason.contains(want), "{reason}");
                }
                Energy::Measured { .. } => panic!("{text}"),
            }
        }
        assert!(matches!(read("999000"), Energy::Measured { .. }));
    }

    #[test]
    fn absent_energy_counters_are_reported() {
        let root = tempfile::tempdir().expect("a directory");
        match meter(root.path(), None).read(SECOND, 1, 2) {
            Energy::Absent { reason } => assert!(reason.contains("no RAPL"), "{reason}"),
            Energy::Measured { .. } => panic!("energy was measured without counters"),
        }
    }

    #[test]
    fn idle_machine_has_no_networking_energy() {
        assert_eq!(networking_joules(1.0, 0, 0), 0.0);
        // Busy time is counted in coarse clock ticks, so the networking time may exceed it. Networking's energy still
        // never exceeds the total.
        assert_eq!(networking_joules(1.0, 3, 2), 1.0);
        assert_eq!(active_joules(1.0, 2.0, SECOND), 0.0);
    }

    #[test]
    fn cpu_lists_of_packages_are_parsed() {
        assert_eq!(cpu_list("0,4-6\n"), [0, 4, 5, 6]);
        assert_eq!(cpu_list("\n"), [] as [u32; 0]);
    }
}
