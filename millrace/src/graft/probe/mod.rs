//! Measures paths on request: packets at even times, and what their answers say. The latest reports of each path are kept.

mod send;

use std::{
    collections::{BTreeMap, VecDeque},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use anyhow::bail;
use millrace_bpf::clock;
use millrace_proto::graft::measure::Report;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// Paths that are remembered; the one that was probed longest ago goes.
const PATHS_MAX: usize = 256;
/// At once.
const RUNNING_MAX: usize = 8;
/// Reports of each.
const HISTORY: usize = 32;
const PERIOD_MIN: Duration = Duration::from_millis(5);
const DURATION_MAX: Duration = Duration::from_secs(600);
const PACKETS_MAX: u128 = 10_000;

/// Whom, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Target {
    pub peer: IpAddr,
    /// A UDP port where somebody echoes, or nobody listens: either is an answer. `None`: by ICMP.
    pub udp_port: Option<u16>,
}

impl Target {
    pub fn by(&self) -> String {
        self.udp_port.map_or("icmp".to_owned(), |port| format!("udp:{port}"))
    }
}

/// What was found out about a path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Probed {
    pub target: Target,
    /// One is under way.
    pub runs: bool,
    /// Of the path, by its least round trip of late.
    pub class: String,
    /// The oldest first.
    pub history: Vec<Record>,
    /// Why the latest came to nothing.
    pub error: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Seconds since 1970, when it was over.
    pub time_s: f64,
    pub period_ms: u64,
    pub report: Report,
}

#[derive(Default)]
struct Path {
    runs: bool,
    history: VecDeque<Record>,
    error: Option<String>,
    begun_ns: u64,
}

/// All paths.
#[derive(Clone, Default)]
pub struct Probes(Arc<Mutex<BTreeMap<Target, Path>>>);

impl Probes {
    /// Goes on by itself; to be called inside of a runtime.
    ///
    /// # Errors
    /// It is too much, or one is under way.
    pub fn start(&self, target: Target, period: Duration, duration: Duration) -> anyhow::Result<()> {
        check(period, duration)?;
        self.begin(target)?;
        let probes = self.clone();
        tokio::spawn(async move {
            let done = send::probe(target, period, duration).await;
            probes.end(target, period, done.map_err(|error| error.to_string()));
        });
        Ok(())
    }

    fn begin(&self, target: Target) -> anyhow::Result<()> {
        let mut paths = self.0.lock();
        if paths.values().filter(|path| path.runs).count() >= RUNNING_MAX {
            bail!("{RUNNING_MAX} paths are being probed already");
        }
        if paths.get(&target).is_some_and(|path| path.runs) {
            bail!("{} is being probed by {} already", target.peer, target.by());
        }
        if !paths.contains_key(&target) && paths.len() >= PATHS_MAX {
            let idle = paths.iter().filter(|(_, path)| !path.runs);
            let oldest = idle.min_by_key(|(_, path)| path.begun_ns).map(|(target, _)| *target);
            oldest.map(|target| paths.remove(&target));
        }
        let path = paths.entry(target).or_default();
        (path.runs, path.begun_ns) = (true, clock::monotonic_ns());
        Ok(())
    }

    fn end(&self, target: Target, period: Duration, done: Result<Report, String>) {
        let mut paths = self.0.lock();
        let Some(path) = paths.get_mut(&target) else { return };
        path.runs = false;
        path.error = done.as_ref().err().cloned();
        let Ok(report) = done else { return };
        let time_s = clock::unix_ns() as f64 / 1e9;
        let period_ms = u64::try_from(period.as_millis()).unwrap_or(u64::MAX);
        path.history.push_back(Record { time_s, period_ms, report });
        if path.history.len() > HISTORY {
            path.history.pop_front();
        }
    }

    /// `class`: of a least round trip.
    pub fn all(&self, class: impl Fn(u32) -> String) -> Vec<Probed> {
        let paths = self.0.lock();
        let probed = |(target, path): (&Target, &Path)| {
            let answered = path.history.iter().map(|it| &it.report).filter(|it| it.answered > 0);
            let least = answered.map(|it| it.rtt_min_us).min();
            Probed {
                target: *target,
                runs: path.runs,
                class: least.map(&class).unwrap_or_default(),
                history: path.history.iter().cloned().collect(),
                error: path.error.clone(),
            }
        };
        paths.iter().map(probed).collect()
    }
}

fn check(period: Duration, duration: Duration) -> anyhow::Result<()> {
    if period < PERIOD_MIN {
        bail!("a period is at least {PERIOD_MIN:?}");
    }
    if duration < period || duration > DURATION_MAX {
        bail!("a duration is from one period to {DURATION_MAX:?}");
    }
    let packets = duration.as_nanos() / period.as_nanos();
    if packets > PACKETS_MAX {
        bail!("{packets} packets are more than {PACKETS_MAX}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(last: u8) -> Target {
        Target { peer: [192, 0, 2, last].into(), udp_port: None }
    }

    #[test]
    fn what_is_too_much_is_refused() {
        let ms = Duration::from_millis;
        assert!(check(ms(100), ms(5000)).is_ok());
        for (period, duration, wanted) in [
            (ms(4), ms(100), "at least 5ms"),
            (ms(100), ms(99), "from one period"),
            (ms(5), ms(601_000), "to 600s"),
            (ms(5), ms(60_000), "12000 packets"),
        ] {
            let error = check(period, duration).expect_err(wanted).to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }

    #[test]
    fn paths_reports_and_runs_are_bounded() {
        let probes = Probes::default();
        for last in 0..RUNNING_MAX as u8 {
            probes.begin(target(last)).expect("room");
        }
        let error = |last| probes.begin(target(last)).expect_err("no room").to_string();
        assert!(error(200).contains("8 paths"));
        probes.end(target(0), PERIOD_MIN, Err("nothing".into()));
        assert!(error(1).contains("192.0.2.1 is being probed by icmp already"));
        for _ in 0..HISTORY + 3 {
            probes.begin(target(0)).expect("again");
            probes.end(target(0), PERIOD_MIN, Ok(Report { answered: 1, rtt_min_us: 7, ..Report::default() }));
        }
        let first = probes.all(|us| format!("{us} us")).remove(0);
        assert_eq!((first.history.len(), first.class.as_str(), first.runs), (HISTORY, "7 us", false));
        for port in 0..PATHS_MAX as u16 + 5 {
            let target = Target { udp_port: Some(port), ..target(0) };
            probes.begin(target).expect("room");
            probes.end(target, PERIOD_MIN, Ok(Report::default()));
        }
        assert_eq!(probes.0.lock().len(), PATHS_MAX);
        assert_eq!(probes.0.lock().values().filter(|path| path.runs).count(), RUNNING_MAX - 1);
    }
}
