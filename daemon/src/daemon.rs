//! The parts that all daemons share: control socket, HTTP server, periodic tick, reload, signals.

use std::{
    borrow::Cow,
    convert::Infallible,
    future::pending,
    io,
    net::SocketAddr,
    os::fd::{BorrowedFd, OwnedFd},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use anyhow::Context as _;
use axum::{
    Json, Router,
    extract::State,
    http::StatusCode,
    response::{IntoResponse as _, Response},
    routing::get,
};
use millrace_base::Reload;
use parking_lot::Mutex;
use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    signal::unix::{self, SignalKind, signal},
    task::block_in_place,
    time::MissedTickBehavior,
};
use tracing::{error, info};

use crate::{
    http::{self, access},
    inherited::Inherited,
    memory::MemoryTrimmer,
    notify,
    socket::ControlSocket,
};

/// The addresses on which a daemon answers requests, and the group that may use the control socket.
pub struct DaemonFront {
    /// Path of the control socket.
    pub socket: PathBuf,
    /// The group that may use the control socket in addition to its owner. `None`: only the owner may.
    pub socket_group: Option<String>,
    /// The address of the HTTP server. `None`: the daemon has none.
    pub http: Option<SocketAddr>,
    /// The rules for which HTTP requests are answered.
    pub http_access: access::HttpFlags,
}

impl DaemonFront {
    /// Binds the control socket. `who` is the daemon's name in errors.
    fn bind(&self, who: &str) -> anyhow::Result<ControlSocket> {
        ControlSocket::bind(&self.socket, who, self.socket_group.as_deref())
    }

    /// Serves HTTP until the returned server is dropped.
    async fn serve(&self, router: Router) -> anyhow::Result<Option<http::HttpServer>> {
        let Some(addr) = self.http else { return Ok(None) };
        let server = http::serve(addr, router, self.http_access.access()?).await?;
        info!(addr = %server.local_addr, "HTTP serves metrics, health and status");
        Ok(Some(server))
    }
}

/// The methods that answer HTTP requests to a daemon. Each call may take about 10 ms.
pub trait Observed: Send + Sync + 'static {
    /// The daemon's status, which is sent as JSON.
    type Status: Serialize;

    /// Returns the status at this moment.
    ///
    /// # Errors
    /// Fails if the status cannot be read. The client gets the text of the error.
    fn status(&self) -> anyhow::Result<Self::Status>;

    /// Returns the status as metrics in OpenMetrics text.
    fn metrics(&self) -> anyhow::Result<String>;

    /// Reports whether the daemon works without a fault.
    fn is_well(&self) -> bool;

    /// Returns the body of `/healthz`, which is served without a token. It does not describe a fault, because a
    /// description may contain file names. `/status`, which requires the token, does.
    fn health(&self) -> Cow<'static, str> {
        if self.is_well() { "ok\n" } else { "trouble\n" }.into()
    }
}

/// A daemon that a [`DaemonFrame`] runs.
pub trait Daemon: Observed {
    /// Message on the control socket.
    type Request: DeserializeOwned;
    /// Answer to a request that returns data.
    type Answer: Serialize;
    /// State of one connection to the control socket. It is dropped when the connection ends.
    type Caller: Send + 'static;

    /// Time between two calls of [`tick`](Self::tick).
    const TICK: Duration = Duration::from_secs(1);

    /// Creates the state of a new connection to the control socket.
    fn caller(&self) -> Self::Caller;

    /// Executes a request. Returns `None` if the answer has no data.
    fn answer(
        &self,
        caller: &mut Self::Caller,
        request: Self::Request,
    ) -> anyhow::Result<Option<Self::Answer>>;

    /// Reads the settings again. Either all new settings apply, or none does. Do not call it directly: call
    /// [`reload`](Self::reload).
    fn read_settings(&self) -> anyhow::Result<()>;

    /// Returns the record of the latest reload's outcome.
    fn reloads(&self) -> &Reloads;

    /// Does periodic work.
    ///
    /// # Errors
    /// Fails if the daemon cannot continue. The daemon then ends.
    fn tick(&self) -> anyhow::Result<()>;

    /// Takes one end of a connection whose other end the part `_name` of the daemon gets in the same way, if this
    /// process is a part with partners. An earlier connection ends when one of its ends is dropped.
    fn linked(self: &Arc<Self>, _name: &str, _partner: OwnedFd) {}

    /// Reads the settings again, and records the outcome for the status.
    fn reload(&self) -> anyhow::Result<()> {
        notify::reloading();
        let done = self.reloads().run(|| self.read_settings());
        notify::ready();
        done
    }
}

/// The outcome of the latest reload of the settings. Before the first reload, it is the outcome of start-up.
pub struct Reloads(Mutex<Reload>);

impl Default for Reloads {
    fn default() -> Self {
        Self(Mutex::new(Reload { time_s: unix_time(), error: None }))
    }
}

impl Reloads {
    /// Records the outcome of a reload.
    pub fn note<T>(&self, done: &anyhow::Result<T>) {
        let error = done.as_ref().err().map(|error| format!("{error:#}"));
        *self.0.lock() = Reload { time_s: unix_time(), error };
    }

    /// Reads the settings again, and records the outcome.
    ///
    /// # Errors
    /// The settings are refused.
    pub fn run(&self, read_settings: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
        let done = block_in_place(read_settings);
        self.note(&done);
        done
    }

    /// Returns the outcome of the latest reload.
    pub fn latest(&self) -> Reload {
        self.0.lock().clone()
    }

    /// Returns the status line about the latest reload, if it failed. `stays` says which settings remain in force, such
    /// as `settings before stay`.
    pub fn trouble(&self, stays: &str) -> Option<String> {
        let latest = self.latest();
        latest.error.map(|error| format!("the latest reload failed, the {stays}: {error}"))
    }
}

fn unix_time() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64()
}

/// The control socket and signals of a daemon, which are acquired before it starts, and the loop that runs it.
pub struct DaemonFrame {
    asked: RequestSource,
    signals: DaemonSignals,
}

/// The source of a daemon's requests.
enum RequestSource {
    /// Clients connect to the control socket and to HTTP.
    By(Box<DaemonFront>, ControlSocket),
    /// This process is a part of a daemon. The daemon's supervisor process serves HTTP, and passes it connections for
    /// requests.
    BySupervisor(Arc<Inherited>),
}

impl DaemonFrame {
    /// Installs the signal handlers, and binds the control socket. Call it inside a Tokio runtime.
    ///
    /// # Errors
    /// Fails if another daemon answers on the socket, or the socket cannot be created.
    pub fn open(front: DaemonFront, who: &str) -> anyhow::Result<Self> {
        let signals = DaemonSignals::new()?;
        let socket = front.bind(who)?;
        Ok(Self { asked: RequestSource::By(Box::new(front), socket), signals })
    }

    /// Installs the signal handlers in a part of a daemon, which is a process of its own. Its `supervisor` passes the
    /// connections of clients to it.
    pub(crate) fn inherited(supervisor: Arc<Inherited>) -> io::Result<Self> {
        Ok(Self { asked: RequestSource::BySupervisor(supervisor), signals: DaemonSignals::new()? })
    }

    /// Runs a daemon until a signal ends it.
    ///
    /// # Errors
    /// Fails if HTTP cannot be served, or the daemon cannot continue.
    pub async fn run<D: Daemon>(self, daemon: &Arc<D>) -> anyhow::Result<()> {
        self.run_beside(daemon, pending()).await
    }

    /// Runs a daemon, and the future `beside` at the same time.
    ///
    /// # Errors
    /// Fails for the same reasons as [`run`](Self::run).
    pub async fn run_beside<D: Daemon>(
        self,
        daemon: &Arc<D>,
        beside: impl Future<Output = Infallible>,
    ) -> anyhow::Result<()> {
        let Self { asked, mut signals } = self;
        let _http = match &asked {
            RequestSource::By(front, _) => front.serve(router(daemon.clone())).await?,
            RequestSource::BySupervisor(_) => None,
        };
        let answerer = || {
            let mut caller = daemon.caller();
            let daemon = daemon.clone();
            move |line: &[u8]| {
                daemon.answer(
                    &mut caller,
                    serde_json::from_slice(line).context("the line is not a request of this daemon")?,
                )
            }
        };
        let serve = async {
            match &asked {
                RequestSource::By(_, socket) => match socket.serve(answerer).await {},
                RequestSource::BySupervisor(supervisor) => {
                    supervisor.serve(answerer, |name, partner| daemon.linked(name, partner)).await
                }
            }
        };
        tokio::pin!(serve, beside);
        let mut ticks = tokio::time::interval(D::TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut memory = MemoryTrimmer::default();
        match &asked {
            RequestSource::By(..) => {
                info!("the daemon is ready");
                notify::ready();
            }
            RequestSource::BySupervisor(supervisor) => supervisor.ready()?,
        }
        loop {
            tokio::select! {
                // The supervisor has closed its connection to this child process, or has died.
                done = &mut serve => break done?,
                never = &mut beside => match never {},
                _ = ticks.tick() => block_in_place(|| {
                    if memory.is_time(Instant::now()) {
                        memory.look();
                    }
                    daemon.tick()
                })?,
                signal = signals.next() => match signal {
                    Signal::Reload => {
                        if let Err(error) = daemon.reload() {
                            error!("the new settings cannot be used, so the old ones stay in force: {error:#}");
                        }
                    }
                    Signal::End => break,
                },
            }
        }
        notify::stopping();
        Ok(())
    }
}

/// This process, as one part (child process) of a daemon.
#[derive(Clone)]
pub struct PartProcess(Arc<Inherited>);

impl PartProcess {
    /// Takes the connection to the supervisor process. Call it once, before other threads and processes are started.
    ///
    /// # Errors
    /// Fails if the process was not started by a supervisor.
    pub fn take() -> io::Result<Self> {
        Ok(Self(Arc::new(Inherited::take()?)))
    }

    /// Returns the descriptors that the daemon keeps for its parts. A second call returns none.
    pub fn take_kept(&self) -> Vec<OwnedFd> {
        self.0.take_kept()
    }

    /// Makes the daemon keep these descriptors for all parts that start from now on, instead of those that it has kept.
    ///
    /// # Errors
    /// Fails if the supervisor does not run.
    pub fn keep(&self, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.0.keep(descriptors)
    }

    /// Returns the result of a step before [`run`](Self::run). If the step has failed, the error is sent to the
    /// supervisor process, which reports it, and this process ends.
    pub fn expect<T>(&self, done: anyhow::Result<T>) -> T {
        done.unwrap_or_else(|error| {
            self.0.failed(&error);
            std::process::exit(1)
        })
    }

    /// Runs this part until the supervisor or a signal ends it. If `serve` fails, the error is sent to the supervisor
    /// process.
    ///
    /// # Errors
    /// Fails if signal handlers cannot be installed.
    pub async fn run<W>(self, serve: impl FnOnce(DaemonFrame) -> W) -> anyhow::Result<()>
    where
        W: Future<Output = anyhow::Result<()>>,
    {
        let frame = DaemonFrame::inherited(self.0.clone())?;
        self.expect(serve(frame).await);
        Ok(())
    }
}

/// Returns the routes `/metrics`, `/healthz` and `/status`.
pub fn router<D: Observed>(daemon: Arc<D>) -> Router {
    Router::new()
        .route("/metrics", get(scrape::<D>))
        .route("/healthz", get(healthz::<D>))
        .route("/status", get(show::<D>))
        .with_state(daemon)
}

async fn scrape<D: Observed>(State(daemon): State<Arc<D>>) -> Response {
    http::metrics(block_in_place(|| daemon.metrics()))
}

async fn healthz<D: Observed>(State(daemon): State<Arc<D>>) -> (StatusCode, Cow<'static, str>) {
    block_in_place(|| match daemon.is_well() {
        true => (StatusCode::OK, daemon.health()),
        false => (StatusCode::SERVICE_UNAVAILABLE, daemon.health()),
    })
}

async fn show<D: Observed>(State(daemon): State<Arc<D>>) -> Response {
    match block_in_place(|| daemon.status()) {
        Ok(status) => Json(status).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Signal {
    /// SIGHUP: the daemon reads its settings again.
    Reload,
    /// SIGTERM or SIGINT: the daemon ends.
    End,
}

/// Time after the first SIGTERM or SIGINT during which further such signals count as copies of the first. `timeout`,
/// `tini -g` and service managers send one signal to the process and one to its group. A wrapper process forwards its
/// own signal, late on a busy machine. A user who sends a second signal by hand takes longer. Ending without a drain by
/// mistake disconnects viewers; ignoring a user's second signal only costs a second.
const ONE_WISH: Duration = Duration::from_secs(1);
/// Shortest time between two signals that a user sends. Signals in faster succession come from a program.
const MACHINE: Duration = Duration::from_millis(100);

/// The signals SIGTERM and SIGINT. While this value exists, they do not end the process by default action.
pub struct EndSignals {
    terminate: unix::Signal,
    interrupt: unix::Signal,
}

impl EndSignals {
    /// Installs the signal handlers.
    ///
    /// # Errors
    /// Fails if the kernel does not allow it.
    pub fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Waits for the next signal. It is cancel safe: no signal is lost if the future is dropped.
    pub async fn next(&mut self) -> SignalKind {
        tokio::select! {
            _ = self.terminate.recv() => SignalKind::terminate(),
            _ = self.interrupt.recv() => SignalKind::interrupt(),
        }
    }

    /// Waits for the user's next SIGTERM or SIGINT. Signals that arrive within `ONE_WISH` after this call begins count
    /// as copies of the previous signal and are ignored.
    pub async fn next_signal(&mut self) -> SignalKind {
        let first = Instant::now();
        loop {
            let kind = self.next().await;
            let since = first.elapsed();
            if since >= ONE_WISH {
                return kind;
            }
            if since >= MACHINE {
                info!(
                    "ignored a second signal to end the daemon, within a second of the first: send it again to end at once"
                );
            }
        }
    }
}

/// The signals SIGHUP, SIGTERM and SIGINT. While this value exists, none of them ends the process by default action.
struct DaemonSignals {
    ends: EndSignals,
    hangup: unix::Signal,
}

impl DaemonSignals {
    fn new() -> io::Result<Self> {
        Ok(Self { ends: EndSignals::new()?, hangup: signal(SignalKind::hangup())? })
    }

    /// Waits for the next signal. It is cancel safe: no signal is lost if the future is dropped.
    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.hangup.recv() => Signal::Reload,
            _ = self.ends.next() => Signal::End,
        }
    }
}
