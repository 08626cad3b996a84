//! The connection between the worker processes `tunnel` and `grafts`. It carries reports of tunnelled connections, from
//! which the model learns that chooses between the tunnel and congestion controls.
//!
//! `tunnel` reports, and `grafts` answers each report. `grafts` trusts no report: its lists and texts are bounded.

use std::{
    collections::BTreeMap,
    io,
    net::IpAddr,
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::ensure;
use millrace_daemon::socket::Conversation;
use millrace_graft::CarriedFlow;
use millrace_graft_proto::select::kind::ClassLesson;
use millrace_graft_tunnel::TunnelBroker;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::debug;

/// Interval of reports while there is something to report.
pub const REPORT: Duration = Duration::from_millis(100);
/// Longest interval of reports.
const REPORT_MOST: Duration = Duration::from_secs(1);
/// Most connections in a report. A longer queue is reported in several reports.
const REPORTED_MAX: usize = 1000;
/// Most hosts with a tunnel broker in a report.
const CARRIERS_MAX: usize = 4096;
/// Longest report in bytes.
pub const BYTES_MAX: u64 = 4 << 20;
/// Longest text in a report, in bytes.
const TEXT_MAX: usize = 512;

/// A report of the worker process `tunnel`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TunnelReport {
    /// True in the first report over a connection.
    pub is_first: bool,
    /// Hosts with a tunnel broker, and whether a carrier to each is ready ("warm").
    pub carriers: BTreeMap<IpAddr, bool>,
    /// Tunnelled connections that have begun or ended since the previous report, in order.
    pub flows: Vec<CarriedFlow>,
    /// Connections that have ended, from which the use of new ones is predicted.
    pub lessons: Vec<ClassLesson>,
}

/// The answer of the worker process `grafts`.
#[derive(Debug, Serialize, Deserialize)]
pub struct TunnelAnswer {
    /// Connections without a tunnel that have ended since the previous report, or all that are remembered.
    pub lessons: Vec<ClassLesson>,
}

impl TunnelReport {
    /// Checks the lengths of lists and texts.
    ///
    /// # Errors
    /// One of them is too long.
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(
            self.carriers.len() <= CARRIERS_MAX
                && self.flows.len() <= REPORTED_MAX
                && self.lessons.len() <= REPORTED_MAX,
            "a list is too long"
        );
        let flows = self.flows.iter().flat_map(|flow| match flow {
            CarriedFlow::Began { carrier, expected, command, .. } => {
                [carrier.as_deref(), command.as_deref(), Some(expected.words.as_str())]
            }
            CarriedFlow::Ended { flow, .. } => [flow.command.as_deref(), Some(flow.candidate.as_str()), None],
        });
        let lessons = self.lessons.iter().map(|lesson| Some(lesson.kind.command.as_str()));
        let mut texts = flows.chain(lessons).flatten();
        ensure!(texts.all(|text| text.len() <= TEXT_MAX), "a text is too long");
        Ok(())
    }
}

/// The thread of the worker process `tunnel` that reports. It ends when this value is dropped.
pub struct Reporter {
    shared: Arc<ReporterShared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct ReporterShared {
    /// A new connection to the worker process `grafts`, which the thread uses from now on.
    partner: Mutex<Option<UnixStream>>,
    has_ended: AtomicBool,
}

impl Reporter {
    /// Starts the thread.
    pub fn start(broker: Arc<TunnelBroker>) -> io::Result<Self> {
        let shared = Arc::new(ReporterShared::default());
        let reports = Reports { shared: shared.clone(), flows: Vec::new(), lessons: Vec::new() };
        let thread = thread::Builder::new().name("reports".into()).spawn(move || reports.run(&broker))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Uses this connection from now on.
    pub fn renew(&self, partner: UnixStream) {
        *self.shared.partner.lock() = Some(partner);
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        self.shared.has_ended.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The reporting thread, with the events that were not reported yet.
struct Reports {
    shared: Arc<ReporterShared>,
    flows: Vec<CarriedFlow>,
    lessons: Vec<ClassLesson>,
}

impl Reports {
    fn run(mut self, broker: &TunnelBroker) {
        let mut link = None;
        let mut told: Option<(Instant, BTreeMap<IpAddr, bool>)> = None;
        while !self.shared.has_ended.load(Relaxed) {
            thread::sleep(REPORT);
            if let Some(stream) = self.shared.partner.lock().take() {
                link = Some(Conversation::over(stream, "part grafts"));
                told = None;
            }
            // Until there is a connection, the broker keeps a bounded number of events.
            let Some(open) = link.as_mut() else { continue };
            if self.flows.is_empty() {
                self.flows = broker.take_flows();
            }
            if self.lessons.is_empty() {
                self.lessons = broker.purposes().take_lessons();
            }
            let carriers = broker.warmth();
            let is_same =
                told.as_ref().is_some_and(|(at, told)| at.elapsed() < REPORT_MOST && *told == carriers);
            if is_same && self.flows.is_empty() && self.lessons.is_empty() {
                continue;
            }
            let is_first = told.is_none();
            told = Some((Instant::now(), carriers.clone()));
            match self.report(open, is_first, carriers) {
                Ok(lessons) => broker.purposes().teach(lessons),
                Err(error) => {
                    debug!("the part grafts has not taken a report of tunnelled connections: {error:#}")
                }
            }
            if open.has_ended() {
                link = None;
            }
        }
    }

    /// Sends a report and waits for the answer. If `grafts` hangs, this waits until it continues or has ended.
    fn report(
        &mut self,
        link: &mut Conversation,
        is_first: bool,
        carriers: BTreeMap<IpAddr, bool>,
    ) -> anyhow::Result<Vec<ClassLesson>> {
        let flows = self.flows.drain(..self.flows.len().min(REPORTED_MAX)).collect();
        let lessons = self.lessons.drain(..self.lessons.len().min(REPORTED_MAX)).collect();
        let report = TunnelReport { is_first, carriers, flows, lessons };
        let goes_on = || !self.shared.has_ended.load(Relaxed) && self.shared.partner.lock().is_none();
        let answer: Option<TunnelAnswer> = link.ask_while(&report, goes_on)?;
        Ok(answer.map(|answer| answer.lessons).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use millrace_graft_proto::select::kind::{FlowFigures, Saw, TrafficClass};

    use super::*;

    #[test]
    fn report_with_too_long_lists_or_texts_is_refused() {
        let lesson = |bytes: usize| ClassLesson {
            kind: TrafficClass { is_client: true, port: 80, command: "a".repeat(bytes), cgroup: 0 },
            seen: Saw::Flow(1, FlowFigures::default()),
        };
        let report =
            |lessons| TunnelReport { is_first: true, carriers: BTreeMap::new(), flows: Vec::new(), lessons };
        assert!(report(vec![lesson(TEXT_MAX); REPORTED_MAX]).check().is_ok());
        assert!(report(vec![lesson(TEXT_MAX + 1)]).check().is_err());
        assert!(report(vec![lesson(1); REPORTED_MAX + 1]).check().is_err());
        let text = serde_json::to_string(&report(vec![lesson(1)])).unwrap();
        assert!(serde_json::from_str::<TunnelReport>(&text).is_ok());
        assert!(serde_json::from_str::<TunnelReport>(&text.replacen('{', "{\"more\":1,", 1)).is_err());
    }
}
