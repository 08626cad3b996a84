//! What a relay runs with.

use std::{fmt, net::SocketAddr, sync::Arc, time::Duration};

use millrace_moq::{
    Draft,
    message::Setup,
    token::{Credential, Form},
    tracks::cache,
};
use url::{Position, Url};

use crate::{Adaptive, Delays};

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
    /// How long subscriptions wait for a publisher that is gone without a word.
    pub linger: Duration,
    /// From GOAWAY until sessions that are still open are closed.
    pub drain_timeout: Duration,
    /// Where clients are told to go then; otherwise to where they are.
    pub goaway_uri: Option<Url>,
    /// How long media may wait for a subscriber.
    pub delays: Delays,
    /// Whether subscriptions are adapted to what their path carries.
    pub adaptive: Adaptive,
    /// Whether subscribers may name tracks that can stand for each other (draft-wilaw-moq-moqt-ssts, whose code points are
    /// provisional).
    pub switching_sets: bool,
    /// What is spoken in sessions of WebTransport, the preferred one first; over QUIC `transport.alpn` says so.
    pub drafts: Vec<Draft>,
    /// From where browsers may connect, where `transport.alpn` offers WebTransport.
    pub origins: Origins,
}

/// The origins of web pages that may connect. Clients that are no browsers say none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Origins {
    #[default]
    Any,
    /// Such as `https://example.org` or `http://localhost:8080`, in lower case.
    Only(Vec<String>),
}

impl Origins {
    pub fn allow(&self, origin: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Only(origins) => origins.iter().any(|allowed| allowed.eq_ignore_ascii_case(origin)),
        }
    }
}

/// Another relay that is asked for what nobody here publishes.
#[derive(Clone)]
pub struct Upstream {
    /// `moqt://HOST:PORT[/PATH]`, or `https://HOST:PORT[/PATH]` for WebTransport.
    pub url: Url,
    /// Says what we show there, each time that we connect.
    pub token: Option<Arc<dyn Fn() -> Option<Credential> + Send + Sync>>,
}

impl Upstream {
    /// The same relay, as it is to be reached at `uri`: empty for where it is; `None` if that is no such address.
    pub fn at(&self, uri: &str) -> Option<Self> {
        let url = match uri {
            "" => self.url.clone(),
            uri => Url::parse(uri).ok().filter(is_of_a_relay)?,
        };
        Some(Self { url, token: self.token.clone() })
    }

    /// The SETUP that a session with it begins with.
    pub fn setup(&self) -> Setup {
        let token = self.token.as_ref().and_then(|token| token());
        let setup = Setup {
            authorization_tokens: token.map(|token| Form::UseValue(token).encode()).into_iter().collect(),
            ..Setup::default()
        };
        if self.url.scheme() == "https" {
            // The request for the session says where to.
            return setup;
        }
        let path = &self.url[Position::BeforePath..Position::AfterQuery];
        let host = self.url.host_str().unwrap_or_default();
        let port = self.url.port().map(|port| format!(":{port}")).unwrap_or_default();
        Setup {
            path: (!matches!(path, "" | "/")).then(|| path.to_owned()),
            authority: Some(format!("{host}{port}")),
            ..setup
        }
    }
}

/// Whether a relay can be reached there: `moqt://HOST`, or `https://HOST` for WebTransport. There are no users: a name or password would be of no
/// use, and shown to whoever sees the relay's status.
pub fn is_of_a_relay(url: &Url) -> bool {
    let has_host = url.host_str().is_some_and(|host| !host.is_empty());
    matches!(url.scheme(), "moqt" | "https") && has_host && !has_user(url)
}

/// Whether it names a user or a password.
pub fn has_user(url: &Url) -> bool {
    !url.username().is_empty() || url.password().is_some()
}

impl fmt::Debug for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upstream").field("host", &self.url.host_str()).finish_non_exhaustive()
    }
}
