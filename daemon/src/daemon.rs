//! The frame of all daemons: where they are asked, what can be seen of them, ticks, reload, signals.

use std::{
    borrow::Cow,
    convert::Infallible,
    future::pending,
    io,
    net::SocketAddr,
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
    memory::Memory,
    notify,
    socket::Socket,
};

/// The addresses on which a daemon answers, and who may ask.
pub struct Front {
    pub socket: PathBuf,
    pub socket_group: Option<String>,
    pub http: Option<SocketAddr>,
    pub http_access: access::Flags,
}

impl Front {
    /// Binds the control socket. Errors call the daemon `who`.
    fn bind(&self, who: &str) -> anyhow::Result<Socket> {
        Socket::bind(&self.socket, who, self.socket_group.as_deref())
    }

    /// Serves HTTP until the returned server is dropped.
    async fn serve(&self, router: Router) -> anyhow::Result<Option<http::Server>> {
        let Some(addr) = self.http else { return Ok(None) };
        let server = http::serve(addr, router, self.http_access.access()?).await?;
        info!(addr = %server.local_addr, "metrics, health and status");
        Ok(Some(server))
    }
}

/// A daemon's answers to HTTP requests. Each may take some 10 ms.
pub trait Observed: Send + Sync + 'static {
    type Status: Serialize;

    fn status(&self) -> anyhow::Result<Self::Status>;

    /// Returns the status as a page of metrics.
    fn metrics(&self) -> anyhow::Result<String>;

    /// Whether all is as it should be.
    fn is_well(&self) -> bool;

    /// Returns the words of `/healthz`, which everybody may read: not what the trouble is, which may name files. `/status` says that, to those
    /// who show the token.
    fn health(&self) -> Cow<'static, str> {
        if self.is_well() { "ok\n" } else { "trouble\n" }.into()
    }
}

/// A daemon that a [`Frame`] runs.
pub trait Daemon: Observed {
    /// Message on the control socket.
    type Request: DeserializeOwned;
    /// Answer to a request that asks for something.
    type Answer: Serialize;
    /// State of one connection to the control socket, dropped when that ends.
    type Caller: Send + 'static;

    /// Time between two calls of [`tick`](Self::tick).
    const TICK: Duration = Duration::from_secs(1);

    /// Makes the state of a new connection to the control socket.
    fn caller(&self) -> Self::Caller;

    /// Does what is asked. `None`: it is done, and there is nothing to report.
    fn answer(
        &self,
        caller: &mut Self::Caller,
        request: Self::Request,
    ) -> anyhow::Result<Option<Self::Answer>>;

    /// Reads the settings again, all or nothing. Others call [`reload`](Self::reload).
    fn read_settings(&self) -> anyhow::Result<()>;

    /// Returns where outcomes of reloads are kept.
    fn reloads(&self) -> &Reloads;

    /// Does what is due from time to time.
    ///
    /// # Errors
    /// The daemon cannot go on, and ends.
    fn tick(&self) -> anyhow::Result<()>;

    /// Reads the settings again, and keeps the outcome for the status.
    fn reload(&self) -> anyhow::Result<()> {
        notify::reloading();
        let done = block_in_place(|| self.read_settings());
        self.reloads().note(&done);
        notify::ready();
        done
    }
}

/// Outcome of the latest reading of the settings; at first of that at start-up.
pub struct Reloads(Mutex<Reload>);

impl Default for Reloads {
    fn default() -> Self {
        Self(Mutex::new(Reload { time_s: unix_time(), error: None }))
    }
}

impl Reloads {
    /// Keeps an outcome.
    pub fn note<T>(&self, done: &anyhow::Result<T>) {
        let error = done.as_ref().err().map(|error| format!("{error:#}"));
        *self.0.lock() = Reload { time_s: unix_time(), error };
    }

    /// Returns the latest outcome.
    pub fn latest(&self) -> Reload {
        self.0.lock().clone()
    }

    /// Returns what a status says of a reload that failed. `stays`: such as `settings before stay`.
    pub fn trouble(&self, stays: &str) -> Option<String> {
        let latest = self.latest();
        latest.error.map(|error| format!("the latest reload failed, the {stays}: {error}"))
    }
}

fn unix_time() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64()
}

/// The control socket and the signals of a daemon, which are taken before it starts, and the loop that runs it.
pub struct Frame {
    front: Front,
    socket: Socket,
    signals: Signals,
}

impl Frame {
    /// Takes the signals over, and binds the control socket, which says that no other daemon uses it. Inside of a runtime.
    ///
    /// # Errors
    /// Another daemon answers on the socket, or it cannot be there.
    pub fn open(front: Front, who: &str) -> anyhow::Result<Self> {
        let signals = Signals::new()?;
        let socket = front.bind(who)?;
        Ok(Self { front, socket, signals })
    }

    /// Runs a daemon until a signal ends it.
    ///
    /// # Errors
    /// Metrics cannot be served, or the daemon cannot go on.
    pub async fn run<D: Daemon>(self, daemon: &Arc<D>) -> anyhow::Result<()> {
        self.run_beside(daemon, pending()).await
    }

    /// Runs a daemon, and `beside` at the same time.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub async fn run_beside<D: Daemon>(
        self,
        daemon: &Arc<D>,
        beside: impl Future<Output = Infallible>,
    ) -> anyhow::Result<()> {
        let Self { front, socket, mut signals } = self;
        let _http = front.serve(router(daemon.clone())).await?;
        let serve = socket.serve(|| {
            let (daemon, mut caller) = (daemon.clone(), daemon.caller());
            move |line: &[u8]| {
                daemon.answer(&mut caller, serde_json::from_slice(line).context("not a request")?)
            }
        });
        tokio::pin!(serve, beside);
        let mut ticks = tokio::time::interval(D::TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut memory = Memory::default();
        info!("ready");
        notify::ready();
        loop {
            tokio::select! {
                never = &mut serve => match never {},
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
                            error!("the new settings are not usable, the old ones stay: {error:#}");
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
    /// SIGHUP: read the settings again.
    Reload,
    /// SIGTERM, SIGINT.
    End,
}

/// Signals to end that come so soon after the first express the same wish: `timeout`, `tini -g` and service managers send one to the process
/// and one to its group, and a wrapper that got one passes it on, on a busy machine late. A user who insists takes longer, or tries once
/// more: to end without a drain by mistake costs viewers, to wait for a third signal costs a second.
const ONE_WISH: Duration = Duration::from_secs(1);
/// Shortest time between two signals of a user. Sooner ones come from a program.
const MACHINE: Duration = Duration::from_millis(100);

/// SIGTERM and SIGINT. Once this exists, neither ends the process by itself.
pub struct Ends {
    terminate: unix::Signal,
    interrupt: unix::Signal,
}

impl Ends {
    /// Takes the signals over.
    ///
    /// # Errors
    /// The kernel does not allow it.
    pub fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Waits for the next one; may be given up and asked for again.
    pub async fn next(&mut self) -> SignalKind {
        tokio::select! {
            _ = self.terminate.recv() => SignalKind::terminate(),
            _ = self.interrupt.recv() => SignalKind::interrupt(),
        }
    }

    /// Waits until the end is asked for again, by whoever has done so just now: by a signal later than [`ONE_WISH`].
    pub async fn again(&mut self) -> SignalKind {
        let first = Instant::now();
        loop {
            let kind = self.next().await;
            let since = first.elapsed();
            if since >= ONE_WISH {
                return kind;
            }
            if since >= MACHINE {
                info!(
                    "a signal within a second of the first is taken for the same: send one more to end at once"
                );
            }
        }
    }
}

/// SIGHUP, SIGTERM and SIGINT. Once this exists, none of them ends the process by itself.
struct Signals {
    ends: Ends,
    hangup: unix::Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self { ends: Ends::new()?, hangup: signal(SignalKind::hangup())? })
    }

    /// The next one; may be given up and asked for again.
    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.hangup.recv() => Signal::Reload,
            _ = self.ends.next() => Signal::End,
        }
    }
}
