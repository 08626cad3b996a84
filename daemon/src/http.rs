//! HTTP servers: how each of them is started, whom they answer, and what they answer alike.

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
    access::Access,
    crowd::{Crowd, Member},
};
use crate::openmetrics::CONTENT_TYPE;

/// Where a daemon listens: an address, or `off`.
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

/// Nothing can be served there.
#[derive(Debug, thiserror::Error)]
#[error("http {addr}: {source}{}", hint(source))]
pub struct StartError {
    pub addr: SocketAddr,
    pub source: io::Error,
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "; somebody else serves there: choose another with --http, or --http off",
        _ => "",
    }
}

/// What clients may take.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// At once. For one more the [`Crowd`] makes room, or it waits until one has ended.
    connections: usize,
    /// For the head of a request, from when the connection is free for it. Idle connections end with it.
    head: Duration,
    /// For the other end to take any of what waits for it.
    unread: Duration,
    /// That the kernel keeps for it meanwhile, bytes.
    unread_bytes: usize,
}

const LIMITS: Limits = Limits {
    connections: 256,
    head: Duration::from_secs(10),
    unread: Duration::from_secs(30),
    unread_bytes: 256 << 10,
};
/// After an error of accept, such as no more file descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// A running server; stops when dropped.
pub struct Server {
    /// What it is bound to.
    pub local_addr: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

/// Binds, and serves in a task whom `access` lets in.
///
/// # Errors
/// The address cannot be had.
pub async fn serve(addr: SocketAddr, router: Router, access: Access) -> Result<Server, StartError> {
    let bound = async {
        let listener = match TcpListener::bind(addr).await {
            // All addresses, on a machine without IPv6.
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
    let (local_addr, listener) = bound.await.map_err(|source| StartError { addr, source })?;
    let access = Arc::new(access.at(local_addr.port()));
    let router = access.guard(router);
    let task = tokio::spawn(async move { match accept(listener, router, access, LIMITS).await {} });
    Ok(Server { local_addr, task })
}

/// Serves connections until it is dropped, which ends them.
async fn accept(listener: TcpListener, router: Router, access: Arc<Access>, limits: Limits) -> Infallible {
    let (places, crowd) = (Arc::new(Semaphore::new(limits.connections)), Arc::new(Crowd::default()));
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _)) => {
                if let Err(error) = bound(&stream, limits) {
                    tracing::debug!(%error, "an http connection ended at once");
                    continue;
                }
                let place = place(&places, &crowd).await;
                let (tell, told) = oneshot::channel();
                let (router, access, crowd) = (router.clone(), access.clone(), crowd.clone());
                let handle = connections.spawn(async move {
                    let Ok(handle) = told.await else { return };
                    converse(stream, router, access, &Member::new(crowd, handle), limits.head).await;
                    drop(place);
                });
                // It waits for that.
                let _ = tell.send(handle);
            }
            Err(error) => {
                tracing::warn!(%error, "http cannot accept");
                sleep(PAUSE).await;
            }
        }
    }
}

/// Waits for one, and has somebody make room who may have to.
async fn place(places: &Arc<Semaphore>, crowd: &Crowd) -> OwnedSemaphorePermit {
    loop {
        if let Ok(place) = places.clone().try_acquire_owned() {
            return place;
        }
        let makes_room = crowd.end_one();
        tokio::select! {
            // It is never closed.
            Ok(place) = places.clone().acquire_owned() => return place,
            () = crowd.more(), if !makes_room => {}
        }
    }
}

/// Whoever reads nothing ends, too, and holds no more than a share of memory until then.
fn bound(stream: &TcpStream, limits: Limits) -> nix::Result<()> {
    let unread = u32::try_from(limits.unread.as_millis()).unwrap_or(u32::MAX);
    setsockopt(stream, sockopt::TcpUserTimeout, &unread)?;
    setsockopt(stream, sockopt::SndBuf, &limits.unread_bytes)
}

async fn converse(stream: TcpStream, router: Router, access: Arc<Access>, member: &Member, head: Duration) {
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(head);
    let router = TowerToHyperService::new(router);
    let answer = service_fn(|request: Request<Incoming>| {
        if access.is_shown(request.headers()) {
            member.leave();
        } else {
            member.wait();
        }
        router.call(request)
    });
    if let Err(error) = server.serve_connection(TokioIo::new(stream), answer).await {
        tracing::debug!(%error, "an http connection ended");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The answer to a scrape of `/metrics`.
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

    /// Whoever holds connections and asks nothing, or only begins to, does so for a while.
    #[tokio::test]
    async fn silent_connections_end_and_make_room() {
        const PATIENCE: Duration = Duration::from_secs(60);
        let limits = Limits { connections: 3, head: Duration::from_millis(200), ..LIMITS };
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
            // And then it is silent as well.
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

    /// Whoever asks for what does not end, and never reads, makes room as well.
    #[tokio::test]
    async fn deaf_connections_end_and_make_room() {
        const PATIENCE: Duration = Duration::from_secs(120);
        let limits =
            Limits { connections: 2, unread: Duration::from_millis(500), unread_bytes: 8 << 10, ..LIMITS };
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

    /// Connections that ask nothing, and such as ask for what everybody may have and do not read it, hold all places for an hour; a request
    /// with a token goes on meanwhile.
    #[tokio::test]
    async fn healthz_is_answered_while_strangers_hold_all_places() {
        const PATIENCE: Duration = Duration::from_secs(60);
        const HOUR: Duration = Duration::from_secs(3600);
        let limits = Limits { connections: 8, head: HOUR, unread: HOUR, unread_bytes: 8 << 10 };
        let directory = tempfile::tempdir().unwrap();
        let file = token::TokenFile::At(directory.path().join("token"));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let access = Access::new(&file, Vec::new()).unwrap().with_public(&["/page"]).at(addr.port());
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
    async fn a_taken_port_is_named() {
        let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = taken.local_addr().unwrap();
        let error = serve(addr, Router::new(), Access::default()).await.map(|_| ()).unwrap_err();
        assert!(error.to_string().starts_with(&format!("http {addr}: ")), "{error}");
        assert!(error.to_string().contains("--http off"), "{error}");
    }
}
