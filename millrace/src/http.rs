//! HTTP servers: how each of them is started, whom they answer, and what they answer alike.

pub mod access;
pub mod token;

use std::{fmt, io, net::SocketAddr, str::FromStr};

use axum::{
    Router,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use tokio::net::TcpListener;

use self::access::Access;
use crate::openmetrics::CONTENT_TYPE;

/// Where a daemon listens: an address, or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenAddr(pub Option<SocketAddr>);

impl FromStr for ListenAddr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self(None)),
            _ => text
                .parse()
                .map(|addr| Self(Some(addr)))
                .map_err(|_| format!("`{text}` is not ADDR:PORT or off")),
        }
    }
}

/// Nothing can be served there.
#[derive(Debug, thiserror::Error)]
#[error("http {addr}: {source}")]
pub struct StartError {
    pub addr: SocketAddr,
    pub source: io::Error,
}

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
        let listener = TcpListener::bind(addr).await?;
        Ok((listener.local_addr()?, listener))
    };
    let (local_addr, listener) = bound.await.map_err(|source| StartError { addr, source })?;
    let router = access.guard(router);
    let task = tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, router).await {
            tracing::error!(%error, "http ended");
        }
    });
    Ok(Server { local_addr, task })
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The answer to a scrape of `/metrics`.
pub fn metrics(text: Result<String, fmt::Error>) -> Response {
    match text {
        Ok(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_taken_port_is_named() {
        let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = taken.local_addr().unwrap();
        let error = serve(addr, Router::new(), Access::default()).await.map(|_| ()).unwrap_err();
        assert!(error.to_string().starts_with(&format!("http {addr}: ")), "{error}");
    }
}
