//! The dashboard, its data as JSON, and `/metrics`, over HTTP.
//!
//! Reports go through a bounded queue to a thread of its own, and from there through a bounded queue to each viewer.
//! Whoever does not keep up misses reports, which is counted, and holds up nobody: least of all the observer.

mod api;
mod assets;
mod history;
mod metrics;
#[cfg(test)]
mod tests;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::body::Bytes;
use millrace_cost::report::Report;
use millrace_daemon::http::{self, StartError, access::Access};
use parking_lot::Mutex;
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, mpsc};

use super::losses::Losses;
use super::sink::Sink;
use history::History;

/// Reports that wait for the server; seconds at the usual period.
const QUEUE: usize = 8;
/// Reports that wait for a viewer, besides what its connection holds.
const VIEWER_QUEUE: usize = 4;
const MAX_VIEWERS: usize = 64;
/// Sums of reports that are made at once.
const MAX_SUMS: usize = 2;

/// A running server; ends when dropped.
pub struct Dashboard {
    /// What it is bound to.
    pub local_addr: SocketAddr,
    reports: mpsc::Sender<Arc<Report>>,
    shared: Arc<Shared>,
    _server: http::Server,
    /// `None` only while it is dropped.
    runtime: Option<Runtime>,
}

#[derive(Debug, Clone)]
pub struct Config {
    pub addr: SocketAddr,
    /// For reports that can still be asked for, approximately.
    pub memory_bytes: usize,
    /// More reports will come; otherwise these are all.
    pub live: bool,
    /// Who is answered.
    pub access: Access,
    /// Of other outputs, for the metrics.
    pub losses: Arc<Losses>,
}

impl Dashboard {
    /// Starts one on a loopback address, for everybody of this machine.
    ///
    /// # Errors
    /// There is no room for it.
    pub fn on_loopback(memory_bytes: usize) -> Result<Self, StartError> {
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Self::start(&Config {
            addr,
            memory_bytes,
            live: true,
            access: Access::default(),
            losses: Arc::default(),
        })
    }

    pub fn start(config: &Config) -> Result<Self, StartError> {
        let addr = config.addr;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("cost-web")
            .enable_all()
            .build()
            .map_err(|source| StartError { addr, source })?;
        let shared = Arc::new(Shared::new(config));
        let router = api::router(Arc::clone(&shared));
        let server = runtime.block_on(http::serve(addr, router, config.access.clone()))?;
        let (reports, incoming) = mpsc::channel(QUEUE);
        runtime.spawn(pump(incoming, Arc::clone(&shared)));
        Ok(Self { local_addr: server.local_addr, reports, shared, _server: server, runtime: Some(runtime) })
    }

    /// Takes a report at once, also if there are many: for those that are there already.
    pub fn load(&self, report: Arc<Report>) {
        self.shared.take(report);
    }

    /// Reports that memory had no room for any more.
    pub fn forgotten(&self) -> u64 {
        self.shared.state.lock().history.forgotten()
    }
}

impl Sink for Dashboard {
    fn report(&mut self, report: &Arc<Report>) -> anyhow::Result<()> {
        if self.reports.try_send(Arc::clone(report)).is_err() {
            self.shared.skipped_reports.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl Drop for Dashboard {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn pump(mut incoming: mpsc::Receiver<Arc<Report>>, shared: Arc<Shared>) {
    while let Some(report) = incoming.recv().await {
        shared.take(report);
    }
}

struct Shared {
    live: bool,
    /// Command lines may hold secrets: they are for who shows a token.
    arguments: bool,
    /// Reports that the server was too slow for.
    skipped_reports: AtomicU64,
    losses: Arc<Losses>,
    state: Mutex<State>,
    /// Turns to sum up reports.
    sums: Arc<Semaphore>,
}

struct State {
    history: History,
    metrics: metrics::Totals,
    /// The last report as viewers get it.
    latest: Option<Bytes>,
    viewers: Vec<Viewer>,
    dropped_frames: u64,
}

struct Viewer {
    frames: mpsc::Sender<Bytes>,
    /// Since the viewer was last told.
    dropped: u64,
}

#[derive(Debug, thiserror::Error)]
#[error("there are {MAX_VIEWERS} viewers already")]
struct TooMany;

impl Shared {
    fn new(config: &Config) -> Self {
        let state = State {
            history: History::new(config.memory_bytes),
            metrics: metrics::Totals::default(),
            latest: None,
            viewers: Vec::new(),
            dropped_frames: 0,
        };
        Self {
            live: config.live,
            arguments: config.access.token().is_some(),
            skipped_reports: AtomicU64::new(0),
            losses: Arc::clone(&config.losses),
            state: Mutex::new(state),
            sums: Arc::new(Semaphore::new(MAX_SUMS)),
        }
    }

    fn take(&self, mut report: Arc<Report>) {
        if !self.arguments && report.has_arguments() {
            let processes = &mut Arc::make_mut(&mut report).processes;
            processes.iter_mut().for_each(|process| process.arguments = None);
        }
        // Stacks are large and looked at seldom: they are asked for.
        let json = match serde_json::to_string(&report.without_stacks()) {
            Ok(json) => json,
            Err(error) => return tracing::error!(%error, "a report is no JSON"),
        };
        let frame = frame("report", &json);
        let mut state = self.state.lock();
        state.metrics.add(&report);
        state.history.push(report, json.len());
        state.latest = Some(frame.clone());
        state.send(&frame);
    }

    fn watch(&self) -> Result<mpsc::Receiver<Bytes>, TooMany> {
        let mut state = self.state.lock();
        state.viewers.retain(|viewer| !viewer.frames.is_closed());
        if state.viewers.len() >= MAX_VIEWERS {
            return Err(TooMany);
        }
        let (frames, receiver) = mpsc::channel(VIEWER_QUEUE);
        // There is room for both.
        let _ = frames.try_send(frame("hello", &format!("{{\"live\":{}}}", self.live)));
        if let Some(latest) = &state.latest {
            let _ = frames.try_send(latest.clone());
        }
        state.viewers.push(Viewer { frames, dropped: 0 });
        Ok(receiver)
    }
}

impl State {
    fn send(&mut self, frame: &Bytes) {
        let mut dropped = 0;
        self.viewers.retain_mut(|viewer| {
            if viewer.frames.is_closed() {
                return false;
            }
            if !viewer.send(frame) {
                dropped += 1;
            }
            true
        });
        self.dropped_frames += dropped;
    }
}

impl Viewer {
    fn send(&mut self, report: &Bytes) -> bool {
        if self.dropped > 0
            && self.frames.capacity() >= 2
            && self.frames.try_send(frame("dropped", &self.dropped.to_string())).is_ok()
        {
            self.dropped = 0;
        }
        let sent = self.frames.try_send(report.clone()).is_ok();
        self.dropped += u64::from(!sent);
        sent
    }
}

/// A server-sent event. JSON has no line breaks.
fn frame(event: &str, json: &str) -> Bytes {
    format!("event: {event}\ndata: {json}\n\n").into()
}
