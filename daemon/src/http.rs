//! HTTP servers of daemons: start-up, access, limits, and common answers.

pub mod access;
pub mod asset;
mod crowd;
mod fetch;
pub mod push;
pub mod token;

pub use fetch::fetch;

use std::{
    convert::Infallible,
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd as _, OwnedFd},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use crate::address;
use axum::{
    Router,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use hyper::{
    Request,
    body::Incoming,
    server::conn::http1,
    service::{Service as _, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use nix::{
    errno::Errno,
    sys::socket::{setsockopt, sockopt},
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    task::JoinSet,
    time::sleep,
};

use self::{
    access::HttpAccess,
    crowd::{ConnectionCrowd, CrowdMember},
};
use crate::openmetrics::CONTENT_TYPE;

/// The address that an HTTP server listens on, or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenAddr(pub Option<SocketAddr>);

impl FromStr for ListenAddr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self(None)),
            _ => match address::listen_once(text) {
                Ok(addr) => Ok(Self(Some(addr))),
                Err(error) => Err(format!("{error}, or off")),
            },
        }
    }
}

/// The error for a server that cannot listen on its address.
#[derive(Debug, thiserror::Error)]
#[error("cannot serve HTTP on {addr}: {source}{}", hint(source))]
pub struct HttpStartError {
    /// The address that the server should listen on.
    pub addr: SocketAddr,
    /// The operating system's error.
    pub source: io::Error,
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "; another program listens there: use another --http, or --http off",
        _ => "",
    }
}

/// Limits on the resources that clients of an HTTP server may use.
#[derive(Clone, Copy, Debug)]
struct HttpLimits {
    /// Largest number of connections. At the limit, the [`ConnectionCrowd`] closes a connection for each new one, or
    /// the new one waits until another has ended.
    connections: usize,
    /// Time within which a client has to send the head of a request, from the moment the server is ready for it. Idle
    /// connections are closed after this time.
    head: Duration,
    /// TCP user timeout: longest time that data may wait to be acknowledged, or to be sent while the client does not
    /// read.
    unread: Duration,
    /// Size of the kernel's send buffer for a client, in bytes.
    unread_bytes: usize,
}

const LIMITS: HttpLimits = HttpLimits {
    connections: 256,
    head: Duration::from_secs(10),
    unread: Duration::from_secs(30),
    unread_bytes: 256 << 10,
};
/// Pause after accept fails, for example for lack of file descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// A running HTTP server. It stops when this value is dropped.
pub struct HttpServer {
    /// The address that the server is bound to.
    pub local_addr: SocketAddr,
    /// A descriptor of the listening socket, for a process that takes it over.
    pub socket: OwnedFd,
    task: tokio::task::JoinHandle<()>,
}

/// Binds the address, and starts a task that serves the requests that `access` allows.
///
/// # Errors
/// Fails if the address cannot be bound.
pub async fn serve(
    addr: SocketAddr,
    router: Router,
    access: HttpAccess,
) -> Result<HttpServer, HttpStartError> {
    let bound = async {
        let listener = match TcpListener::bind(addr).await {
            // A server on `::` also has to start on a machine without IPv6, where it binds the IPv4 wildcard address.
            Err(error)
                if addr.ip() == Ipv6Addr::UNSPECIFIED
                    && error.raw_os_error() == Some(Errno::EAFNOSUPPORT as i32) =>
            {
                TcpListener::bind((Ipv4Addr::UNSPECIFIED, addr.port())).await?
            }
            bound => bound?,
        };
        Ok((listener.local_addr()?, listener))
    };
    let started = bound.await.and_then(|(local_addr, listener)| on(local_addr, listener, router, access));
    started.map_err(|source| HttpStartError { addr, source })
}

/// Serves requests like [`serve`], on a listening socket of another process, which it has given up.
///
/// # Errors
/// Fails if the socket does not listen for TCP connections.
pub fn take_over(socket: OwnedFd, router: Router, access: HttpAccess) -> io::Result<HttpServer> {
    let listener = std::net::TcpListener::from(socket);
    listener.set_nonblocking(true)?;
    on(listener.local_addr()?, TcpListener::from_std(listener)?, router, access)
}

fn on(
    local_addr: SocketAddr,
    listener: TcpListener,
    router: Router,
    access: HttpAccess,
) -> io::Result<HttpServer> {
    let socket = listener.as_fd().try_clone_to_owned()?;
    let access = Arc::new(access.at(local_addr.port()));
    let router = access.guard(router);
    let task = tokio::spawn(async move { match accept(listener, router, access, LIMITS).await {} });
    Ok(HttpServer { local_addr, socket, task })
}

/// Accepts connections until the future is dropped, which closes the accepted connections.
async fn accept(
    listener: TcpListener,
    router: Router,
    access: Arc<HttpAccess>,
    limits: HttpLimits,
) -> Infallible {
    let places = Arc::new(Semaphore::new(limits.connections));
    let crowd = Arc::new(ConnectionCrowd::default());
    let mut connections = JoinSet::new();
    loop {
        // This loop removes the tasks of ended connections. Otherwise the `JoinSet` would keep the results of all of
        // them.
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _)) => {
                if let Err(error) = bound(&stream, limits) {
                    tracing::debug!(%error, "closed a new HTTP connection: its time-outs cannot be set");
                    continue;
                }
                let place = place(&places, &crowd).await;
                // The task needs its own abort handle, which exists only after the task was spawned.
                let (tell, told) = oneshot::channel();
                let router = router.clone();
                let access = access.clone();
                let crowd = crowd.clone();
                let handle = connections.spawn(async move {
                    let Ok(handle) = told.await else { return };
                    converse(stream, router, access, &CrowdMember::new(crowd, handle), limits.head).await;
                    drop(place);
                });
                // The connection's task waits for the handle, so the send cannot fail.
                let _ = tell.send(handle);
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept an HTTP connection: trying again");
                sleep(PAUSE).await;
            }
        }
    }
}

/// Waits for a free connection slot. If no slot is free, an idle connection that has not shown the token is closed.
async fn place(places: &Arc<Semaphore>, crowd: &ConnectionCrowd) -> OwnedSemaphorePermit {
    loop {
        if let Ok(place) = places.clone().try_acquire_owned() {
            return place;
        }
        let makes_room = crowd.end_one();
        tokio::select! {
            // The semaphore is never closed.
            Ok(place) = places.clone().acquire_owned() => return place,
            () = crowd.wait_for_activity(), if !makes_room => {}
        }
    }
}

/// Limits a connection whose client does not read: it ends after the TCP user timeout, and its send buffer is bounded.
fn bound(stream: &TcpStream, limits: HttpLimits) -> nix::Result<()> {
    let unread = u32::try_from(limits.unread.as_millis()).unwrap_or(u32::MAX);
    setsockopt(stream, sockopt::TcpUserTimeout, &unread)?;
    setsockopt(stream, sockopt::SndBuf, &limits.unread_bytes)
}

async fn converse(
    stream: TcpStream,
    router: Router,
    access: Arc<HttpAccess>,
    member: &CrowdMember,
    head: Duration,
) {
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(head);
    let router = TowerToHyperService::new(router);
    let answer = service_fn(|request: Request<Incoming>| {
        // A connection that has shown the token is not closed in favor of new connections.
        if access.is_shown(request.headers()) {
            member.leave();
        } else {
            member.wait();
        }
        router.call(request)
    });
    if let Err(error) = server.serve_connection(TokioIo::new(stream), answer).await {
        tracing::debug!(%error, "an HTTP connection ended with an error");
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Returns the answer to a scrape of `/metrics`.
pub fn metrics<E>(text: Result<String, E>) -> Response {
    match text {
        Ok(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Bytes;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        time::timeout,
    };

    use super::*;

    /// Clients that send no request, or only the beginning of one, keep their connections for a bounded time.
    #[tokio::test]
    async fn http_client_without_a_request_is_disconnected_after_a_timeout() {
        const PATIENCE: Duration = Duration::from_secs(60);
        let limits = HttpLimits { connections: 3, head: Duration::from_millis(200), ..LIMITS };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let router = Router::new().route("/", axum::routing::get(async || "here"));
        let server = tokio::spawn(accept(listener, router, Arc::default(), limits));
        let mut silent = Vec::new();
        for begun in ["", "", "GET / HTTP/1.1\r\nHost: a\r\n"] {
            let mut stream = TcpStream::connect(addr).await.unwrap();
            stream.write_all(begun.as_bytes()).await.unwrap();
            silent.push(stream);
        }
        let asking = async {
            let mut stream = TcpStream::connect(addr).await.unwrap();
            stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
            let mut answer = String::new();
            // The client sends no further request after the answer, so this connection is idle as well.
            stream.read_to_string(&mut answer).await.unwrap();
            answer
        };
        let answer = timeout(PATIENCE, asking).await.unwrap();
        assert!(answer.ends_with("here"), "{answer}");
        for mut stream in silent {
            let ended = timeout(PATIENCE, stream.read_to_end(&mut Vec::new())).await;
            assert!(ended.is_ok(), "a silent connection goes on");
        }
        server.abort();
    }

    /// A client that requests an endless answer and never reads it is disconnected, too.
    #[tokio::test]
    async fn http_client_that_does_not_read_its_answer_is_disconnected() {
        const PATIENCE: Duration = Duration::from_secs(120);
        let limits = HttpLimits {
            connections: 2,
            unread: Duration::from_millis(500),
            unread_bytes: 8 << 10,
            ..LIMITS
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let endless = || async { axum::body::Bytes::from_static(&[0; 16 << 20]) };
        let router = Router::new()
            .route("/endless", axum::routing::get(endless))
            .route("/", axum::routing::get(async || "here"));
        let server = tokio::spawn(accept(listener, router, Arc::default(), limits));
        let mut deaf = Vec::new();
        for _ in 0..limits.connections {
            let mut stream = TcpStream::connect(addr).await.unwrap();
            stream.write_all(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
            deaf.push(stream);
        }
        let asking = async {
            let mut stream = TcpStream::connect(addr).await.unwrap();
            stream.write_all(b"GET / HTTP/1.0\r\nHost: a\r\n\r\n").await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            answer
        };
        let answer = timeout(PATIENCE, asking).await.expect("deaf connections make no room");
        assert!(answer.ends_with("here"), "{answer}");
        drop(deaf);
        server.abort();
    }

    async fn ask(addr: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(addr).await.unwrap();
        stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    /// Clients that send no request, or do not read the answer to a request without a token, hold all connection slots
    /// for an hour. A request with the token is still answered.
    #[tokio::test]
    async fn healthz_is_answered_while_idle_clients_hold_all_http_connections() {
        const PATIENCE: Duration = Duration::from_secs(60);
        const HOUR: Duration = Duration::from_secs(3600);
        let limits = HttpLimits { connections: 8, head: HOUR, unread: HOUR, unread_bytes: 8 << 10 };
        let directory = tempfile::tempdir().unwrap();
        let file = token::TokenFile::At(directory.path().join("token"));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let access = HttpAccess::new(&file, Vec::new()).unwrap().with_public(&["/page"]).at(addr.port());
        let token = access.token().unwrap().text().to_owned();
        let access = Arc::new(access);
        let page = || async { Bytes::from_static(&[0; 16 << 20]) };
        let router = Router::new()
            .route("/page", axum::routing::get(page))
            .route("/status", axum::routing::get(page))
            .route("/healthz", axum::routing::get(async || "ok"));
        let server = tokio::spawn(accept(listener, access.guard(router), access, limits));
        let mut owner = TcpStream::connect(addr).await.unwrap();
        let head =
            format!("GET /status HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n");
        owner.write_all(head.as_bytes()).await.unwrap();
        owner.read_exact(&mut [0; 12]).await.unwrap();
        let mut hogs = Vec::new();
        for number in 0..40 {
            let mut hog = TcpStream::connect(addr).await.unwrap();
            let request = ["", "GET /page HTTP/1.1\r\nHost: localhost\r\n\r\n"][number % 2];
            hog.write_all(request.as_bytes()).await.unwrap();
            hogs.push(hog);
        }
        for _ in 0..3 {
            let answer = timeout(PATIENCE, ask(addr, "/healthz")).await.expect("no answer");
            assert!(answer.ends_with("ok"), "{answer}");
        }
        let mut rest = Vec::new();
        timeout(PATIENCE, owner.read_to_end(&mut rest)).await.expect("no end").unwrap();
        assert!(rest.len() > 16 << 20, "the owner's answer was cut off after {} bytes", rest.len());
        drop(hogs);
        server.abort();
    }

    #[tokio::test]
    async fn port_in_use_is_named_in_the_error() {
        let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = taken.local_addr().unwrap();
        let error = serve(addr, Router::new(), HttpAccess::default()).await.map(|_| ()).unwrap_err();
        assert!(error.to_string().starts_with(&format!("cannot serve HTTP on {addr}: ")), "{error}");
        assert!(error.to_string().contains("--http off"), "{error}");
    }
}
