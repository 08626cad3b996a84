//! What daemons have in common: where they are asked, what can be seen of them, signals.

use std::{
    fmt, io,
    net::SocketAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Json, Router,
    extract::State,
    http::StatusCode,
    response::{IntoResponse as _, Response},
    routing::get,
};
use serde::Serialize;
use tokio::signal::unix::{self, SignalKind, signal};
use tracing::info;

use crate::{
    http::{self, access},
    socket::Socket,
};

/// Where one is asked, and by whom.
pub struct Front {
    pub socket: PathBuf,
    pub socket_group: Option<String>,
    pub http: Option<SocketAddr>,
    pub http_access: access::Flags,
}

impl Front {
    /// `who`: as errors call it.
    pub fn bind(&self, who: &str) -> anyhow::Result<Socket> {
        Socket::bind(&self.socket, who, self.socket_group.as_deref())
    }

    /// Until what is returned is dropped.
    pub async fn serve(&self, router: Router) -> anyhow::Result<Option<http::Server>> {
        let Some(addr) = self.http else { return Ok(None) };
        let server = http::serve(addr, router, self.http_access.access()?).await?;
        info!(addr = %server.local_addr, "metrics, health and status");
        Ok(Some(server))
    }
}

/// What can be seen of a daemon by HTTP. Each may take some 10 ms.
pub trait Observed: Send + Sync + 'static {
    type Status: Serialize;

    fn status(&self) -> anyhow::Result<Self::Status>;

    fn metrics(&self) -> Result<String, fmt::Error>;

    /// Whether all is as it should be.
    fn is_well(&self) -> bool;
}

pub fn router<D: Observed>(daemon: Arc<D>) -> Router {
    Router::new()
        .route("/metrics", get(scrape::<D>))
        .route("/healthz", get(healthz::<D>))
        .route("/status", get(show::<D>))
        .with_state(daemon)
}

async fn scrape<D: Observed>(State(daemon): State<Arc<D>>) -> Response {
    http::metrics(tokio::task::block_in_place(|| daemon.metrics()))
}

/// Without what the trouble is, which may name files: `/status` says it, to those who show the token.
async fn healthz<D: Observed>(State(daemon): State<Arc<D>>) -> (StatusCode, &'static str) {
    match tokio::task::block_in_place(|| daemon.is_well()) {
        true => (StatusCode::OK, "ok\n"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "trouble\n"),
    }
}

async fn show<D: Observed>(State(daemon): State<Arc<D>>) -> Response {
    match tokio::task::block_in_place(|| daemon.status()) {
        Ok(status) => Json(status).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// What a daemon is told by signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGHUP: read the settings again.
    Reload,
    /// SIGTERM, SIGINT.
    End,
}

/// Signals to end that come so soon after the first express the same wish: `timeout`, `tini -g` and service managers send one to the process
/// and one to its group, and a wrapper that got one passes it on, on a busy machine late. A user who insists takes longer, or tries once
/// more: to end without a drain by mistake costs viewers, to wait for a third signal costs a second.
const ONE_WISH: Duration = Duration::from_secs(1);
/// What comes so soon after the first is no user's second one.
const MACHINE: Duration = Duration::from_millis(100);

/// SIGTERM and SIGINT. From when it is made on, none of them ends the process by itself.
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

/// From when it is made on, none of them ends the process by itself.
pub struct Signals {
    ends: Ends,
    hangup: unix::Signal,
}

impl Signals {
    pub fn new() -> io::Result<Self> {
        Ok(Self { ends: Ends::new()?, hangup: signal(SignalKind::hangup())? })
    }

    /// The next one; may be given up and asked for again.
    pub async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.hangup.recv() => Signal::Reload,
            _ = self.ends.next() => Signal::End,
        }
    }
}
