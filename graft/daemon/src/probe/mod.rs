//! Measures paths, on request and as the settings say: packets at even times, and what their answers say. The latest reports of
//! each path are kept.

mod schedule;
mod send;

use std::{
    collections::{BTreeMap, VecDeque},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use anyhow::bail;
use millrace_graft::settings::{self, probe::check};
use millrace_graft_proto::measure::Report;
use millrace_kernel::clock;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::debug;

use self::schedule::Schedule;

/// Paths that are remembered; the one that was probed longest ago goes.
const PATHS_MAX: usize = 256;
/// At once.
const RUNNING_MAX: usize = 8;
/// Reports of each.
const HISTORY: usize = 32;
/// Reports that nobody has taken yet.
const FRESH_MAX: usize = 64;

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
pub struct Probes(Arc<Mutex<Known>>);

#[derive(Default)]
struct Known {
    paths: BTreeMap<Target, Path>,
    fresh: VecDeque<(IpAddr, Report)>,
    schedule: Schedule,
}

impl Known {
    fn running(&self) -> usize {
        self.paths.values().filter(|path| path.runs).count()
    }
}

impl Probes {
    /// Goes on by itself; to be called inside of a runtime.
    ///
    /// # Errors
    /// It is too much, or one is under way.
    pub fn start(&self, target: Target, period: Duration, duration: Duration) -> anyhow::Result<()> {
        check(period, duration).map_err(anyhow::Error::msg)?;
        self.begin(target)?;
        let probes = self.clone();
        tokio::spawn(async move {
            let done = send::probe(target, period, duration).await;
            probes.end(target, period, done.map_err(|error| error.to_string()));
        });
        Ok(())
    }

    /// Begins those of the settings whose time has come. One that is under way already, by a request, counts.
    pub fn start_due(&self, wanted: &[settings::Probe]) {
        let now = Duration::from_nanos(clock::monotonic_ns());
        let due: Vec<_> = {
            let mut known = self.0.lock();
            let room = schedule::AT_ONCE.saturating_sub(known.running());
            known.schedule.due(wanted, now, room)
        };
        for probe in due {
            if let Err(error) = self.start(probe.into(), probe.period, probe.duration) {
                debug!(peer = %probe.peer, "not probed this time: {error}");
            }
        }
    }

    /// Reports since this was asked last.
    pub fn take_fresh(&self) -> Vec<(IpAddr, Report)> {
        self.0.lock().fresh.drain(..).collect()
    }

    fn begin(&self, target: Target) -> anyhow::Result<()> {
        let mut known = self.0.lock();
        let running = known.running();
        let paths = &mut known.paths;
        if running >= RUNNING_MAX {
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
        let mut known = self.0.lock();
        let Known { paths, fresh, .. } = &mut *known;
        let Some(path) = paths.get_mut(&target) else { return };
        path.runs = false;
        path.error = done.as_ref().err().cloned();
        let Ok(report) = done else { return };
        fresh.push_back((target.peer, report.clone()));
        if fresh.len() > FRESH_MAX {
            fresh.pop_front();
        }
        let time_s = clock::unix_ns() as f64 / 1e9;
        let period_ms = u64::try_from(period.as_millis()).unwrap_or(u64::MAX);
        path.history.push_back(Record { time_s, period_ms, report });
        if path.history.len() > HISTORY {
            path.history.pop_front();
        }
    }

    /// `class`: of a least round trip.
    pub fn all(&self, class: impl Fn(u32) -> String) -> Vec<Probed> {
        let paths = &self.0.lock().paths;
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

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn target(last: u8) -> Target {
        Target { peer: [192, 0, 2, last].into(), udp_port: None }
    }

    #[test]
    fn paths_reports_and_runs_are_bounded() {
        let probes = Probes::default();
        for last in 0..RUNNING_MAX as u8 {
            probes.begin(target(last)).expect("room");
        }
        let error = |last| probes.begin(target(last)).expect_err("no room").to_string();
        assert!(error(200).contains("8 paths"));
        probes.end(target(0), SECOND, Err("nothing".into()));
        assert!(error(1).contains("192.0.2.1 is being probed by icmp already"));
        for _ in 0..HISTORY + 3 {
            probes.begin(target(0)).expect("again");
            probes.end(target(0), SECOND, Ok(Report { answered: 1, rtt_min_us: 7, ..Report::default() }));
        }
        let first = probes.all(|us| format!("{us} us")).remove(0);
        assert_eq!((first.history.len(), first.class.as_str(), first.runs), (HISTORY, "7 us", false));
        for port in 0..PATHS_MAX as u16 + 5 {
            let target = Target { udp_port: Some(port), ..target(0) };
            probes.begin(target).expect("room");
            probes.end(target, SECOND, Ok(Report::default()));
        }
        assert_eq!(probes.0.lock().paths.len(), PATHS_MAX);
        assert_eq!(probes.0.lock().running(), RUNNING_MAX - 1);
        assert_eq!(probes.take_fresh().len(), FRESH_MAX);
        assert!(probes.take_fresh().is_empty(), "each once");
    }
}
