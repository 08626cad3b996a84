//! What a relay runs with.

use std::{net::SocketAddr, time::Duration};

use millrace_proto::relay::cache;
use url::Url;

#[derive(Clone)]
pub struct Config {
    /// UDP addresses; each takes its own address family only, `[::]` IPv6.
    pub listen: Vec<SocketAddr>,
    pub upstream: Option<Upstream>,
    /// How connections are made: with the certificate that clients are shown, and with the certificates that the upstream
    /// relay may have.
    pub transport: millrace_transport::Config,
    pub cache: cache::Limits,
    pub max_sessions: usize,
    pub max_tracks: usize,
    /// From GOAWAY until sessions that are still open are closed.
    pub drain_timeout: Duration,
}

/// Another relay that is asked for what nobody here publishes.
#[derive(Clone, Debug)]
pub struct Upstream {
    /// `moqt://HOST:PORT`.
    pub url: Url,
}
