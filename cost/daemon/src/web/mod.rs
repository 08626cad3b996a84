//! Serves the dashboard, its data as JSON, and `/metrics` over HTTP.
//!
//! Reports go through a bounded queue to the server's thread, and from there through a bounded queue to each viewer. A
//! slow server or viewer misses reports, which are counted. It delays neither the observer nor other viewers.

mod api;
mod assets;
mod history;
mod metrics;
#[cfg(test)]
mod tests;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use axum::body::Bytes;
use millrace_cost::report::Report;
use millrace_daemon::http::{self, HttpStartError, access::HttpAccess};
use parking_lot::Mutex;
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, mpsc};

use super::losses::ReportLosses;
use super::sink::ReportSink;
use history::ReportHistory;

/// Largest number of reports that wait for the server. With the usual period of 1 s, this is the same number of
/// seconds.
const QUEUE: usize = 8;
/// Largest number of messages that wait for a viewer, in addition to those in its socket's buffers.
const VIEWER_QUEUE: usize = 4;
const MAX_VIEWERS: usize = 64;
/// Largest number of sums of reports that are computed at once.
const MAX_SUMS: usize = 2;

/// The dashboard's running HTTP server. It ends when this value is dropped.
pub struct Dashboard {
    /// Address of the listening socket.
    pub local_addr: SocketAddr,
    /// Sends reports to the server's thread, which ends when this is dropped.
    reports: mpsc::Sender<Arc<Report>>,
    shared: Arc<DashboardShared>,
}

/// A server that has an address but no thread yet, so it answers no requests.
pub struct BoundDashboard {
    config: Config,
    shared: Arc<DashboardShared>,
    server: http::HttpServer,
    runtime: Runtime,
}

/// Settings of the dashboard.
#[derive(Debug, Clone)]
pub struct Config {
    /// The address to listen on.
    pub addr: SocketAddr,
    /// Approximate memory in bytes for stored reports.
    pub memory_bytes: usize,
    /// True if further reports will follow; false for a log that was read as a whole.
    pub live: bool,
    /// The rules for requests: tokens and allowed hosts.
    pub access: HttpAccess,
    /// Numbers of reports that the other outputs (log file, exports) could not write, for `/metrics`.
    pub losses: Arc<ReportLosses>,
}

impl Dashboard {
    /// Starts a server on a loopback address, without a token, so every user of this machine can read it.
    ///
    /// # Errors
    /// Fails if there is no free port or thread.
    pub fn on_loopback(memory_bytes: usize) -> Result<Self, HttpStartError> {
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Self::start(&Config {
            addr,
            memory_bytes,
            live: true,
            access: HttpAccess::default(),
            losses: Arc::default(),
        })
    }

    /// Starts a server.
    ///
    /// # Errors
    /// Fails if the server cannot listen on the address, or no thread can be started.
    pub fn start(config: &Config) -> Result<Self, HttpStartError> {
        BoundDashboard::new(config)?.run()
    }

    #[cfg(test)]
    fn load(&self, report: Arc<Report>) {
        self.shared.take(report, 1, false);
    }

    /// Returns the number of stored reports that were dropped to stay within the configured memory.
    pub fn forgotten(&self) -> u64 {
        self.shared.state.lock().history.forgotten()
    }

    /// Returns the number of reports that one point of the dashboard's chart averages, and the number of reports in
    /// each stored sum of reports.
    pub fn steps(&self) -> (usize, usize) {
        self.shared.state.lock().history.steps()
    }
}

impl ReportSink for Dashboard {
    fn report(&mut self, report: &Arc<Report>) -> anyhow::Result<()> {
        if self.reports.try_send(Arc::clone(report)).is_err() {
            self.shared.skipped_reports.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl BoundDashboard {
    /// Listens on the address.
    ///
    /// # Errors
    /// Fails if the server cannot listen on the address.
    pub fn new(config: &Config) -> Result<Self, HttpStartError> {
        let addr = config.addr;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .thread_name("cost-web")
            .enable_all()
            .build()
            .map_err(|source| HttpStartError { addr, source })?;
        let shared = Arc::new(DashboardShared::new(config));
        let router = api::router(Arc::clone(&shared));
        let server = runtime.block_on(http::serve(addr, router, config.access.clone()))?;
        Ok(Self { config: config.clone(), shared, server, runtime })
    }

    /// Returns the address of the listening socket, with the port that the kernel chose.
    pub fn local_addr(&self) -> SocketAddr {
        self.server.local_addr
    }

    /// Stores the sum of `reports` consecutive reports before the server runs, so that the first request finds the
    /// whole log. Returns how many reports the caller may add up for the next call.
    pub fn load(&self, report: Arc<Report>, reports: usize) -> usize {
        self.shared.take(report, reports, false);
        let (point, range) = self.shared.state.lock().history.steps();
        point.min(range)
    }

    /// Starts to answer requests, in a thread with this thread's privileges.
    ///
    /// # Errors
    /// Fails if no thread can be started.
    pub fn run(self) -> Result<Dashboard, HttpStartError> {
        let Self { config, shared, server, runtime } = self;
        let (reports, incoming) = mpsc::channel(QUEUE);
        let local_addr = server.local_addr;
        let pumped = Arc::clone(&shared);
        let serve = move || {
            runtime.block_on(async {
                // The server ends together with `pump`, which returns when the sender of reports is dropped.
                let _server = server;
                pump(incoming, pumped).await;
            });
            // Do not wait for threads that still add up reports for a request.
            runtime.shutdown_background();
        };
        let started = thread::Builder::new().name("cost-web".to_owned()).spawn(serve);
        started.map_err(|source| HttpStartError { addr: config.addr, source })?;
        Ok(Dashboard { local_addr, reports, shared })
    }
}

async fn pump(mut incoming: mpsc::Receiver<Arc<Report>>, shared: Arc<DashboardShared>) {
    while let Some(report) = incoming.recv().await {
        shared.take(report, 1, true);
    }
}

struct DashboardShared {
    live: bool,
    /// True if requests must have a token. Only then are command lines shown, since they may contain secrets.
    arguments: bool,
    /// Number of reports that were skipped because the server's queue was full.
    skipped_reports: AtomicU64,
    losses: Arc<ReportLosses>,
    state: Mutex<DashboardState>,
    /// Limits how many sums of reports are computed at the same time.
    sums: Arc<Semaphore>,
}

struct DashboardState {
    history: ReportHistory,
    metrics: metrics::DashboardTotals,
    /// The last report, encoded for viewers; `None` if it was loaded from a log.
    latest: Option<Bytes>,
    viewers: Vec<DashboardViewer>,
    dropped_frames: u64,
}

struct DashboardViewer {
    frames: mpsc::Sender<Bytes>,
    /// Number of reports dropped since the viewer was last told about drops.
    dropped: u64,
}

#[derive(Debug, thiserror::Error)]
#[error("there are {MAX_VIEWERS} viewers of the dashboard already: close one")]
struct TooManyViewers;

impl DashboardShared {
    fn new(config: &Config) -> Self {
        let state = DashboardState {
            history: ReportHistory::new(config.memory_bytes, config.live),
            metrics: metrics::DashboardTotals::default(),
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

    /// Stores a report, which is the sum of `reports` reports. With `live`, it is sent to viewers.
    fn take(&self, mut report: Arc<Report>, reports: usize, live: bool) {
        // Command lines are removed before the report is stored, so no later request can show them.
        if !self.arguments && report.has_arguments() {
            let processes = &mut Arc::make_mut(&mut report).processes;
            processes.iter_mut().for_each(|process| process.arguments = None);
        }
        // The report is encoded before the lock is taken, since requests wait for this lock.
        let frame = live.then(|| report_frame(&report)).flatten();
        let mut state = self.state.lock();
        state.metrics.add(&report, reports);
        state.history.push(report, reports);
        state.latest.clone_from(&frame);
        if let Some(frame) = frame {
            state.send(&frame);
        }
    }

    fn watch(&self) -> Result<mpsc::Receiver<Bytes>, TooManyViewers> {
        let mut state = self.state.lock();
        // Viewers that have left must not count against the limit of viewers.
        state.viewers.retain(|viewer| !viewer.frames.is_closed());
        if state.viewers.len() >= MAX_VIEWERS {
            return Err(TooManyViewers);
        }
        let (frames, receiver) = mpsc::channel(VIEWER_QUEUE);
        // The viewer's queue is empty and has space for two messages, so sending `hello` and the latest report cannot
        // fail.
        let _ = frames.try_send(frame("hello", &format!("{{\"live\":{}}}", self.live)));
        let loaded = || report_frame(&*state.history.latest()?);
        if let Some(latest) = state.latest.clone().or_else(loaded) {
            let _ = frames.try_send(latest);
        }
        state.viewers.push(DashboardViewer { frames, dropped: 0 });
        Ok(receiver)
    }
}

impl DashboardState {
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

impl DashboardViewer {
    fn send(&mut self, report: &Bytes) -> bool {
        // Queue the `dropped` message only if the next report fits too. Otherwise the message itself would cause
        // another drop.
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

/// Encodes a report for viewers, without its stacks: they are large, and pages request them separately.
fn report_frame(report: &Report) -> Option<Bytes> {
    let json = serde_json::to_string(&report.without_stacks());
    json.inspect_err(|error| tracing::error!(%error, "cannot encode a cost report as JSON: the dashboard does not show it"))
        .ok()
        .map(|json| frame("report", &json))
}

/// Encodes a server-sent event. Its data needs no escaping, since the JSON has no line breaks.
fn frame(event: &str, json: &str) -> Bytes {
    format!("event: {event}\ndata: {json}\n\n").into()
}
