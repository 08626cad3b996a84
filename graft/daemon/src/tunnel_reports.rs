//! The thread of the worker process `tunnel` that reports tunnelled connections to the worker process `grafts`.

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

use millrace_daemon::socket::Conversation;
use millrace_graft::CarriedFlow;
use millrace_graft_proto::select::kind::ClassLesson;
use millrace_graft_tunnel::TunnelBroker;
use parking_lot::Mutex;
use tracing::debug;

use super::tunnel_link::{REPORT, REPORTED_MAX, TunnelAnswer, TunnelReport};

/// Longest interval of reports.
const REPORT_MOST: Duration = Duration::from_secs(1);

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
