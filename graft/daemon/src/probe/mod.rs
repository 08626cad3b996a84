//! Measures paths to peers, on request or as the settings schedule it: sends packets at regular intervals, and
//! evaluates their answers. The latest reports on each path are kept.

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
use millrace_graft_proto::measure::PathReport;
use millrace_kernel::clock;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::debug;

use self::schedule::Schedule;

/// Limit of remembered paths, beyond which the path that was probed longest ago is forgotten.
const PATHS_MAX: usize = 256;
/// Limit of probes that run at the same time.
const RUNNING_MAX: usize = 8;
/// Number of reports that are kept for each path.
const HISTORY: usize = 32;
/// Limit of new reports that were not yet passed on to the part of the daemon that chooses congestion controls.
const FRESH_MAX: usize = 64;

/// A peer, and the protocol to probe it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ProbeTarget {
    /// Address of the peer.
    pub peer: IpAddr,
    /// UDP port to probe: an echo and an ICMP error both count as answers. With `None` the probe uses ICMP.
    pub udp_port: Option<u16>,
}

impl ProbeTarget {
    /// Returns the protocol of the probe as text: `icmp`, or `udp:` and the port.
    pub fn protocol_name(&self) -> String {
        self.udp_port.map_or("icmp".to_owned(), |port| format!("udp:{port}"))
    }
}

/// Results of the probes of one path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProbeStatus {
    /// The peer and the protocol of the probes.
    pub target: ProbeTarget,
    /// True while a probe runs.
    pub runs: bool,
    /// Class of the path, according to its smallest recent round trip.
    pub class: String,
    /// Results of the latest probes of the path, the oldest first.
    pub history: Vec<ProbeRecord>,
    /// Reason why the latest probe failed.
    pub error: Option<String>,
}

/// The result of one probe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProbeRecord {
    /// Time of the probe's end, in seconds since 1970.
    pub time_s: f64,
    /// Time between two packets of the probe, in milliseconds.
    pub period_ms: u64,
    /// Round-trip times, losses and other properties of the path that the probe has measured.
    pub report: PathReport,
}

#[derive(Default)]
struct ProbedPath {
    runs: bool,
    history: VecDeque<ProbeRecord>,
    error: Option<String>,
    begun_ns: u64,
}

/// Probes of all paths, shared between tasks.
#[derive(Clone, Default)]
pub struct Probes(Arc<Mutex<ProbeHistory>>);

#[derive(Default)]
/// Probes of all paths, and the new reports that were not yet passed on to the part of the daemon that chooses
/// congestion controls.
struct ProbeHistory {
    paths: BTreeMap<ProbeTarget, ProbedPath>,
    fresh: VecDeque<(IpAddr, PathReport)>,
    schedule: Schedule,
}

impl ProbeHistory {
    fn running(&self) -> usize {
        self.paths.values().filter(|path| path.runs).count()
    }
}

impl Probes {
    /// Starts a probe, which runs in a task of its own. Must be called inside of a tokio runtime.
    ///
    /// # Errors
    /// The probe would send too much, too many probes run, or one of this path runs already.
    pub fn start(&self, target: ProbeTarget, period: Duration, duration: Duration) -> anyhow::Result<()> {
        check(period, duration).map_err(anyhow::Error::msg)?;
        self.begin(target)?;
        let probes = self.clone();
        tokio::spawn(async move {
            let done = send::probe(target, period, duration).await;
            probes.end(target, period, done.map_err(|error| error.to_string()));
        });
        Ok(())
    }

    /// Starts the scheduled probes that are due. Probes that were started on request count towards the limit.
    pub fn start_due(&self, wanted: &[settings::ProbeSettings]) {
        let now = Duration::from_nanos(clock::monotonic_ns());
        let due: Vec<_> = {
            let mut known = self.0.lock();
            let room = schedule::AT_ONCE.saturating_sub(known.running());
            known.schedule.due_probe(wanted, now, room)
        };
        for probe in due {
            if let Err(error) = self.start(probe.into(), probe.period, probe.duration) {
                debug!(peer = %probe.peer, "a scheduled probe cannot start now: {error}");
            }
        }
    }

    /// Returns the reports that have been added since the last call.
    pub fn take_fresh(&self) -> Vec<(IpAddr, PathReport)> {
        self.0.lock().fresh.drain(..).collect()
    }

    fn begin(&self, target: ProbeTarget) -> anyhow::Result<()> {
        let mut known = self.0.lock();
        let running = known.running();
        let paths = &mut known.paths;
        if running >= RUNNING_MAX {
            bail!("{RUNNING_MAX} paths are being probed already");
        }
        if paths.get(&target).is_some_and(|path| path.runs) {
            bail!("{} is being probed by {} already", target.peer, target.protocol_name());
        }
        // The path that was probed longest ago is forgotten, unless its probe still runs.
        if !paths.contains_key(&target) && paths.len() >= PATHS_MAX {
            let idle = paths.iter().filter(|(_, path)| !path.runs);
            let oldest = idle.min_by_key(|(_, path)| path.begun_ns).map(|(target, _)| *target);
            oldest.map(|target| paths.remove(&target));
        }
        let path = paths.entry(target).or_default();
        (path.runs, path.begun_ns) = (true, clock::monotonic_ns());
        Ok(())
    }

    fn end(&self, target: ProbeTarget, period: Duration, done: Result<PathReport, String>) {
        let mut known = self.0.lock();
        let ProbeHistory { paths, fresh, .. } = &mut *known;
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
        path.history.push_back(ProbeRecord { time_s, period_ms, report });
        if path.history.len() > HISTORY {
            path.history.pop_front();
        }
    }

    /// Returns the status of all probed paths. `class` returns a path's class for its smallest round trip.
    pub fn all(&self, class: impl Fn(u32) -> String) -> Vec<ProbeStatus> {
        let paths = &self.0.lock().paths;
        let probed = |(target, path): (&ProbeTarget, &ProbedPath)| {
            let answered = path.history.iter().map(|it| &it.report).filter(|it| it.answered > 0);
            let least = answered.map(|it| it.rtt_min_us).min();
            ProbeStatus {
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

    fn target(last: u8) -> ProbeTarget {
        ProbeTarget { peer: [192, 0, 2, last].into(), udp_port: None }
    }

    #[test]
    fn running_path_probes_and_stored_probe_reports_are_bounded() {
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
            probes.end(
                target(0),
                SECOND,
                Ok(PathReport { answered: 1, rtt_min_us: 7, ..PathReport::default() }),
            );
        }
        let first = probes.all(|us| format!("{us} us")).remove(0);
        assert_eq!((first.history.len(), first.class.as_str(), first.runs), (HISTORY, "7 us", false));
        for port in 0..PATHS_MAX as u16 + 5 {
            let target = ProbeTarget { udp_port: Some(port), ..target(0) };
            probes.begin(target).expect("room");
            probes.end(target, SECOND, Ok(PathReport::default()));
        }
        assert_eq!(probes.0.lock().paths.len(), PATHS_MAX);
        assert_eq!(probes.0.lock().running(), RUNNING_MAX - 1);
        assert_eq!(probes.take_fresh().len(), FRESH_MAX);
        assert!(probes.take_fresh().is_empty(), "each once");
    }
}
