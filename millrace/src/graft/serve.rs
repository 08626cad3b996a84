//! From start-up to the end of a daemon of grafts: socket, HTTP, signals.

use std::{fmt, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::State,
    http::StatusCode,
    response::{IntoResponse as _, Response},
    routing::get,
};
use millrace_graft::settings::Agreement;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, info};

use super::{
    agreement::Agreements,
    control,
    daemon::{Daemon, Setup},
    metrics,
};
use crate::{http, socket::Socket};

/// How often the sockets are looked at.
const TICK: Duration = Duration::from_secs(1);

/// Until a signal ends it.
pub async fn run(setup: Setup) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let socket = Socket::bind(&setup.socket, "daemon of grafts", setup.socket_group.as_deref())?;
    let daemon = Arc::new(Daemon::start(&setup)?);
    let _http = match setup.http {
        Some(addr) => {
            let server = http::serve(addr, router(daemon.clone()), setup.http_access.access()?).await?;
            info!(addr = %server.local_addr, "metrics, health and status");
            Some(server)
        }
        None => None,
    };
    let mut agreements = Agreed::default();
    let mut changes = daemon.changes();
    agreements.follow(&daemon).await?;
    daemon.follow_carry()?;
    info!("ready");
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let serve = control::serve(&socket, daemon.clone());
    tokio::pin!(serve);
    loop {
        tokio::select! {
            never = &mut serve => match never {},
            _ = ticks.tick() => tokio::task::block_in_place(|| daemon.tick()),
            _ = hangup.recv() => {
                if let Err(error) = tokio::task::block_in_place(|| daemon.reload()) {
                    error!("the new settings are not usable, the old ones stay: {error:#}");
                }
            }
            _ = changes.changed() => {
                if let Err(error) = agreements.follow(&daemon).await {
                    error!("there are no agreements: {error:#}");
                }
                if let Err(error) = tokio::task::block_in_place(|| daemon.follow_carry()) {
                    error!("nothing is carried: {error:#}");
                }
            }
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
    }
    match setup.persist {
        true => info!("all of it stays; `millrace graft clean` takes it back"),
        false => info!("taken back; connections keep what they have"),
    }
    Ok(())
}

/// The agreements as the settings are.
#[derive(Default)]
struct Agreed {
    running: Option<Agreements>,
    settings: Option<Agreement>,
}

impl Agreed {
    /// Begins anew if the settings are others.
    async fn follow(&mut self, daemon: &Arc<Daemon>) -> anyhow::Result<()> {
        let settings = daemon.agreement();
        if settings == self.settings {
            return Ok(());
        }
        if let Some(mut running) = self.running.take() {
            running.end().await;
            daemon.with(millrace_graft::Runtime::release_all)?;
        }
        self.settings = settings.clone();
        let Some(settings) = settings else { return Ok(()) };
        let started = Agreements::start(daemon.clone(), settings).await;
        daemon.set_disagreement(started.as_ref().err().map(|error| format!("no agreements: {error:#}")));
        let running = started?;
        if let Some(at) = running.listens {
            info!(%at, "peers are heard");
        }
        self.running = Some(running);
        Ok(())
    }
}

fn router(daemon: Arc<Daemon>) -> Router {
    Router::new()
        .route("/metrics", get(scrape))
        .route("/healthz", get(healthz))
        .route("/status", get(show))
        .with_state(daemon)
}

/// Without what the trouble is, which may name files: `/status` says it, to those who show the token.
async fn healthz(State(daemon): State<Arc<Daemon>>) -> (StatusCode, &'static str) {
    match daemon.trouble().is_empty() {
        true => (StatusCode::OK, "ok\n"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "trouble\n"),
    }
}

async fn show(State(daemon): State<Arc<Daemon>>) -> Response {
    match daemon.status() {
        Ok(status) => Json(status).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn scrape(State(daemon): State<Arc<Daemon>>) -> Response {
    let status = daemon.status().map_err(|_| fmt::Error);
    http::metrics(status.and_then(|status| metrics::encode(status, daemon.probed())))
}
