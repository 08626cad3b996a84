//! From start-up to the end of a gate: socket, HTTP, samples, signals.

use std::{fmt, sync::Arc};

use axum::{
    Json, Router,
    extract::State,
    http::StatusCode,
    response::{IntoResponse as _, Response},
    routing::get,
};
use millrace_daemon::{
    daemon::{Signal, Signals},
    http,
};
use millrace_gate::status::trouble;
use tracing::{error, info};

use super::{
    control,
    daemon::{Daemon, Setup},
};
use crate::{
    metrics,
    watch::{self, Watch},
};

/// Until a signal ends it.
pub async fn run(setup: Setup) -> anyhow::Result<()> {
    let mut signals = Signals::new()?;
    let socket = setup.front.bind("gate")?;
    let daemon = Arc::new(Daemon::start(&setup)?);
    let _http = setup.front.serve(router(daemon.clone())).await?;
    if daemon.dry_run {
        info!("dry run: nothing is refused");
    }
    let mut ticks = tokio::time::interval(watch::TICK);
    let mut watch = Watch::default();
    let serve = control::serve(&socket, daemon.clone());
    tokio::pin!(serve);
    loop {
        tokio::select! {
            never = &mut serve => match never {},
            _ = ticks.tick() => daemon.tick(&mut watch),
            signal = signals.next() => match signal {
                Signal::Reload => {
                    if let Err(error) = tokio::task::block_in_place(|| daemon.reload()) {
                        error!("the new policy is not usable, the old one stays: {error:#}");
                    }
                }
                Signal::End => break,
            },
        }
    }
    daemon.gate.detach();
    info!("detached");
    Ok(())
}

fn router(daemon: Arc<Daemon>) -> Router {
    Router::new()
        .route("/metrics", get(scrape))
        .route("/healthz", get(healthz))
        .route("/status", get(show))
        .with_state(daemon)
}

async fn healthz(State(daemon): State<Arc<Daemon>>) -> (StatusCode, String) {
    match trouble(&daemon.gate).as_slice() {
        [] => (StatusCode::OK, "ok\n".to_owned()),
        trouble => (StatusCode::SERVICE_UNAVAILABLE, trouble.join("\n") + "\n"),
    }
}

async fn show(State(daemon): State<Arc<Daemon>>) -> Response {
    match daemon.status() {
        Ok(status) => Json(status).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn scrape(State(daemon): State<Arc<Daemon>>) -> Response {
    http::metrics(daemon.status().map_err(|_| fmt::Error).and_then(metrics::encode))
}
