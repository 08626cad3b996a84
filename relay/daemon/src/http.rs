//! Serves `/metrics`, `/healthz`, `/status`, `/routes`, `/events`, `/trace` and the web page over HTTP.

use std::{borrow::Cow, io, net::SocketAddr, os::fd::OwnedFd, sync::Arc};

use axum::{
    Router,
    body::Body,
    extract::{RawQuery, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use millrace_daemon::{
    daemon::{self, Observed},
    http::{self, HttpStartError, push::Channel},
};
use millrace_moq::Namespace;
use millrace_relay::trace::{EventFilter, EventTracer};

use super::{
    events, metrics, page,
    status::{Status, StatusSource},
};
pub use millrace_daemon::http::{HttpServer, access::HttpAccess};

/// Starts the server, which runs until it is dropped.
///
/// # Errors
/// Fails if the server cannot listen on the address.
pub async fn start(
    addr: SocketAddr,
    source: Arc<dyn StatusSource>,
    tracer: Arc<EventTracer>,
    access: HttpAccess,
) -> Result<HttpServer, HttpStartError> {
    http::serve(addr, router(source, tracer), access.with_public(page::PUBLIC)).await
}

/// Starts the server on a listening socket of another process, which it has given up.
///
/// # Errors
/// Fails if the socket is not usable.
pub fn take_over(
    socket: OwnedFd,
    source: Arc<dyn StatusSource>,
    tracer: Arc<EventTracer>,
    access: HttpAccess,
) -> io::Result<HttpServer> {
    http::take_over(socket, router(source, tracer), access.with_public(page::PUBLIC))
}

fn router(source: Arc<dyn StatusSource>, tracer: Arc<EventTracer>) -> Router {
    let channel = events::channel(Arc::clone(&source));
    let observed = Arc::new(CountedListeners { source: Arc::clone(&source), channel: Arc::clone(&channel) });
    let events = Router::new().route("/events", get(listen)).with_state(channel);
    let routes = Router::new().route("/routes", get(routes)).with_state(Arc::clone(&source));
    let trace = Router::new().route("/trace", get(trace)).with_state(tracer);
    let page = page::router().with_state(source);
    daemon::router(observed).merge(page).merge(events).merge(trace).merge(routes)
}

/// Sends server-sent events: a `status` each second.
async fn listen(State(channel): State<Arc<Channel>>) -> Response {
    channel.answer()
}

/// Returns the routes to namespaces below the parameter `prefix`, or all routes without it.
async fn routes(State(source): State<Arc<dyn StatusSource>>, RawQuery(query): RawQuery) -> Response {
    let query = query.unwrap_or_default();
    let given = url::form_urlencoded::parse(query.as_bytes()).find(|(key, _)| key == "prefix");
    let prefix = match given.map(|(_, prefix)| prefix.parse::<Namespace>()).transpose() {
        Ok(prefix) => prefix.unwrap_or_default(),
        Err(error) => return (StatusCode::BAD_REQUEST, format!("prefix: {error}\n")).into_response(),
    };
    match source.routes(&prefix) {
        Some(routes) => match serde_json::to_string(&routes) {
            Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
        },
        None => (StatusCode::NOT_FOUND, "the relay is in no cluster\n").into_response(),
    }
}

/// Sends trace events as lines of JSON until the client disconnects.
async fn trace(State(tracer): State<Arc<EventTracer>>, RawQuery(query): RawQuery) -> Response {
    let wanted = match EventFilter::parse(query.as_deref().unwrap_or_default()) {
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

/// Adds the number of HTTP clients that listen to `/events` to a relay's status.
struct CountedListeners {
    source: Arc<dyn StatusSource>,
    channel: Arc<Channel>,
}

impl Observed for CountedListeners {
    type Status = Status;

    fn status(&self) -> anyhow::Result<Status> {
        Ok(Status { events: self.channel.counts(), ..self.source.status() })
    }

    fn metrics(&self) -> anyhow::Result<String> {
        Ok(metrics::encode(self.status()?)?)
    }

    fn is_well(&self) -> bool {
        !self.source.draining()
    }

    /// Returns the body of `/healthz`. A relay with unreadable files still serves clients that other files allow, so it
    /// is healthy, and the body mentions the files.
    fn health(&self) -> Cow<'static, str> {
        match (self.source.draining(), self.source.unread()) {
            (true, _) => "draining\n".into(),
            (false, 0) => "ok\n".into(),
            (false, unread) => {
                format!("ok\nunread: {unread} files of the settings, see access in /status\n").into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicBool, AtomicUsize, Ordering},
        time::Duration,
    };

    use millrace_daemon::http::fetch;
    use millrace_daemon::http::token::TokenFile;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpStream,
        time::timeout,
    };

    use super::*;
    use crate::{
        config::{Config, EngineChoice, Settings},
        server,
        status::{RoutesStatus, Web},
        tls,
    };

    #[derive(Default)]
    struct FakeStatusSource(AtomicBool, AtomicUsize);

    impl StatusSource for FakeStatusSource {
        fn status(&self) -> Status {
            millrace_relay::status::Status {
                version: "test".into(),
                draining: self.draining(),
                ..Default::default()
            }
            .into()
        }
        fn routes(&self, prefix: &Namespace) -> Option<RoutesStatus> {
            prefix.is_empty().then(RoutesStatus::default)
        }
        fn draining(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }
        fn unread(&self) -> usize {
            self.1.load(Ordering::Relaxed)
        }
        fn fingerprint(&self) -> String {
            "ab".repeat(32)
        }
        fn web(&self) -> Web {
            Web { port: Some(4443), local: Some([127, 0, 0, 1].into()), sha256: Some(self.fingerprint()) }
        }
    }

    /// Returns the tracer of a relay that has no sessions.
    fn tracer() -> Arc<EventTracer> {
        let settings = Settings {
            listen: Some(vec![std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()]),
            ..Settings::default()
        };
        let config = Config { engine: EngineChoice::User, ..Config::new(settings, None).unwrap() };
        let certificate = tls::identity(&config.identity, vec!["localhost".into()]).unwrap();
        let identity = server::RelayIdentity::from_certificate(certificate);
        Arc::clone(server::RunningServer::start(config, identity).unwrap().tracer())
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn http_paths_need_a_token_except_public_ones() {
        let source = Arc::new(FakeStatusSource::default());
        let directory = tempfile::tempdir().unwrap();
        let access = HttpAccess::new(&TokenFile::At(directory.path().join("token")), Vec::new()).unwrap();
        let token = access.token().unwrap().text().to_owned();
        let server = start(([127, 0, 0, 1], 0).into(), source.clone(), tracer(), access).await.unwrap();
        let ask = async |path: &str, token: Option<&str>| {
            let addr = server.local_addr;
            let path = path.to_owned();
            let token = token.map(str::to_owned);
            // exact: the fake status source has fixed answers to all requests
            let asking = move || fetch(addr, &path, token.as_deref());
            tokio::task::spawn_blocking(asking).await.unwrap().unwrap()
        };
        let get = async |path: &str| ask(path, Some(&token)).await;
        for path in ["/status", "/events", "/metrics", "/routes", "/trace", "/nowhere"] {
            assert_eq!(ask(path, None).await.0, 401, "{path}");
        }
        assert_eq!(ask("/healthz", None).await, (200, "ok\n".to_owned()));
        source.1.store(2, Ordering::Relaxed);
        let (code, body) = ask("/healthz", None).await;
        assert!(code == 200 && body.starts_with("ok\nunread: 2 "), "{code} {body}");
        for path in page::PUBLIC {
            let (code, body) = ask(path, None).await;
            assert!(code == 200 && !body.is_empty(), "{path}: {code}");
        }
        assert_eq!(ask("/certificate.sha256", None).await.1, source.fingerprint());
        let web: serde_json::Value = serde_json::from_str(&ask("/web.json", None).await.1).unwrap();
        assert_eq!(
            web,
            serde_json::json!({ "port": 4443, "local": "127.0.0.1", "sha256": source.fingerprint() })
        );
        source.0.store(true, Ordering::Relaxed);
        assert_eq!(get("/healthz").await, (503, "draining\n".to_owned()));
        let (code, body) = get("/status").await;
        // exact: `FakeStatusSource` always returns the same status
        assert_eq!((code, serde_json::from_str::<Status>(&body).unwrap()), (200, source.status()));
        let (code, body) = get("/metrics").await;
        assert_eq!(code, 200);
        assert!(body.contains("millrace_relay_draining 1"), "{body}");
        assert_eq!(get("/nowhere").await.0, 404);
        let routes: RoutesStatus = serde_json::from_str(&get("/routes").await.1).unwrap();
        assert_eq!(routes, RoutesStatus::default());
        assert_eq!(get("/routes?prefix=live").await.0, 404, "in no cluster");
        assert_eq!(get("/routes?prefix=a//b").await.0, 400);
        for (query, part) in [("sample=0", "sample"), ("track=x", "track"), ("tracks=1", "tracks")] {
            let (code, body) = get(&format!("/trace?{query}")).await;
            assert!(code == 400 && body.starts_with(part), "{code} {body}");
        }
    }

    /// HTTP clients that listen to `/events` with the token and never read are limited in number, and are forgotten
    /// when they disconnect.
    #[tokio::test(flavor = "multi_thread")]
    async fn http_event_clients_that_never_read_are_limited_and_later_freed() {
        const MANY: usize = 100;
        const PATIENCE: Duration = Duration::from_secs(60);
        let directory = tempfile::tempdir().unwrap();
        let access = HttpAccess::new(&TokenFile::At(directory.path().join("token")), Vec::new()).unwrap();
        let token = access.token().unwrap().text().to_owned();
        let server =
            start(([127, 0, 0, 1], 0).into(), Arc::new(FakeStatusSource::default()), tracer(), access);
        let server = server.await.unwrap();
        let addr = server.local_addr;
        let mut listeners = Vec::new();
        let mut refused = 0;
        for _ in 0..MANY {
            let mut stream = TcpStream::connect(addr).await.unwrap();
            let request =
                format!("GET /events HTTP/1.1\r\nHost: {addr}\r\nAuthorization: Bearer {token}\r\n\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = [0; 12];
            timeout(PATIENCE, stream.read_exact(&mut answer)).await.unwrap().unwrap();
            refused += u64::from(answer == *b"HTTP/1.1 503");
            listeners.push(stream);
        }
        let counts = async || {
            let token = token.clone();
            // exact: the HTTP server counts an event listener before it responds, and every listener has a response
            let asking = move || fetch(addr, "/status", Some(&token)).unwrap();
            let (_, body) = tokio::task::spawn_blocking(asking).await.unwrap();
            serde_json::from_str::<Status>(&body).unwrap().events
        };
        let now = counts().await;
        assert_eq!((now.listeners + now.refused, now.refused), (MANY as u64, refused));
        assert!(now.listeners == 64, "{now:?}");
        drop(listeners);
        let gone = async {
            while counts().await.listeners > 0 {
                tokio::task::yield_now().await;
            }
        };
        timeout(PATIENCE, gone).await.expect("listeners that are gone are counted");
    }
}
