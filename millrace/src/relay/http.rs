//! `/metrics`, `/healthz`, `/status` and `/trace` over HTTP.

use std::{io, net::SocketAddr, sync::Arc};

use axum::{
    Json, Router,
    body::Body,
    extract::{RawQuery, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use millrace_relay::trace::{Tracer, Wanted};
use tokio::net::TcpListener;

use super::{
    metrics,
    status::{Status, StatusSource},
};
use crate::openmetrics::CONTENT_TYPE;

#[derive(Debug, thiserror::Error)]
#[error("http {addr}: {source}")]
pub struct BindError {
    addr: SocketAddr,
    source: io::Error,
}

/// Serves until the task is aborted; returns the bound address once it is.
pub async fn start(
    addr: SocketAddr,
    source: Arc<dyn StatusSource>,
    tracer: Arc<Tracer>,
) -> Result<Server, BindError> {
    serve(addr, router(source, tracer)).await
}

/// The same for any router.
pub(crate) async fn serve(addr: SocketAddr, router: Router) -> Result<Server, BindError> {
    let bound = async {
        let listener = TcpListener::bind(addr).await?;
        Ok((listener.local_addr()?, listener))
    };
    let (local_addr, listener) = bound.await.map_err(|source| BindError { addr, source })?;
    let task = tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, router).await {
            tracing::error!(%error, "http ended");
        }
    });
    Ok(Server { local_addr, task })
}

/// A running HTTP server; stops when dropped.
pub struct Server {
    pub local_addr: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

type Source = State<Arc<dyn StatusSource>>;

fn router(source: Arc<dyn StatusSource>, tracer: Arc<Tracer>) -> Router {
    let trace = Router::new().route("/trace", get(trace)).with_state(tracer);
    Router::new()
        .route("/metrics", get(scrape))
        .route("/healthz", get(healthz))
        .route("/status", get(status))
        .with_state(source)
        .merge(trace)
}

async fn status(State(source): Source) -> Json<Status> {
    Json(source.status())
}

/// Lines of JSON until the viewer leaves.
async fn trace(State(tracer): State<Arc<Tracer>>, RawQuery(query): RawQuery) -> Response {
    let wanted = match Wanted::parse(query.as_deref().unwrap_or_default()) {
        Ok(wanted) => wanted,
        Err(error) => return (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
    };
    match tracer.watch(wanted) {
        Ok(watch) => {
            ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(watch)).into_response()
        }
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")).into_response(),
    }
}

async fn healthz(State(source): Source) -> (StatusCode, &'static str) {
    if source.draining() { (StatusCode::SERVICE_UNAVAILABLE, "draining\n") } else { (StatusCode::OK, "ok\n") }
}

async fn scrape(State(source): Source) -> Response {
    match metrics::encode(source.status()) {
        Ok(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::relay::{
        config::{Config, EngineChoice, Settings},
        server,
        status::fetch,
        tls,
    };

    #[derive(Default)]
    struct Fake(AtomicBool);

    impl StatusSource for Fake {
        fn status(&self) -> Status {
            millrace_relay::status::Status {
                version: "test".into(),
                draining: self.draining(),
                ..Default::default()
            }
            .into()
        }
        fn draining(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }
    }

    /// Of a relay that does nothing.
    fn tracer() -> Arc<Tracer> {
        let settings = Settings { listen: Some(vec![([127, 0, 0, 1], 0).into()]), ..Settings::default() };
        let config = Config { engine: EngineChoice::User, ..Config::new(settings, None).unwrap() };
        let certificate = tls::identity(&config.identity, vec!["localhost".into()]).unwrap();
        let identity = server::Identity { certificate, upstream_roots: None, key_log: None };
        Arc::clone(server::Server::start(config, identity).unwrap().tracer())
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn paths_are_served() {
        let source = Arc::new(Fake::default());
        let server = start(([127, 0, 0, 1], 0).into(), source.clone(), tracer()).await.unwrap();
        let get = async |path: &str| {
            let (addr, path) = (server.local_addr, path.to_owned());
            tokio::task::spawn_blocking(move || fetch(addr, &path)).await.unwrap().unwrap()
        };
        assert_eq!(get("/healthz").await, (200, "ok\n".to_owned()));
        source.0.store(true, Ordering::Relaxed);
        assert_eq!(get("/healthz").await, (503, "draining\n".to_owned()));
        let (code, body) = get("/status").await;
        assert_eq!((code, serde_json::from_str::<Status>(&body).unwrap()), (200, source.status()));
        let (code, body) = get("/metrics").await;
        assert_eq!(code, 200);
        assert!(body.contains("millrace_relay_draining 1"), "{body}");
        assert_eq!(get("/").await.0, 404);
        for (query, part) in [("sample=0", "sample"), ("track=x", "track"), ("tracks=1", "tracks")] {
            let (code, body) = get(&format!("/trace?{query}")).await;
            assert!(code == 400 && body.starts_with(part), "{code} {body}");
        }
    }

    #[tokio::test]
    async fn a_taken_port_is_named() {
        let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = taken.local_addr().unwrap();
        let error = start(addr, Arc::new(Fake::default()), tracer()).await.map(|_| ()).unwrap_err();
        assert!(error.to_string().starts_with(&format!("http {addr}: ")), "{error}");
    }
}
