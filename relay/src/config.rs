//! Settings that a relay runs with.

use std::{fmt, net::SocketAddr, sync::Arc, time::Duration};

use millrace_access::pattern::Pattern;
use millrace_moq::{
    Draft, HopId,
    message::SetupOptions,
    token::{Credential, Form},
    tracks::cache,
};
use url::{Position, Url};

use crate::{AdaptiveMode, Delays};

/// Settings of a [`Bound`](crate::Bound) relay. They do not change while it runs.
#[derive(Clone)]
pub struct Config {
    /// UDP addresses to listen on. `[::]` listens for IPv6 only, so IPv4 needs an address of its own.
    pub listen: Vec<SocketAddr>,
    /// Upstream relays, in order of preference. The relay has a session with one of them at a time, and asks it for
    /// tracks that have no publisher here.
    pub upstreams: Vec<UpstreamRelay>,
    /// The cluster that the relay belongs to, if any.
    pub cluster: Option<RelayCluster>,
    /// QUIC and TLS settings: the relay's certificate, and the roots that an upstream relay's certificate is checked
    /// against.
    pub transport: millrace_transport::Config,
    /// Size and age limits of the cache, and the share of the cache that one client's objects may use.
    pub cache: cache::CacheLimits,
    /// The most sessions that may be open at a time. Further peers are refused before their handshake.
    pub max_sessions: usize,
    /// The most tracks that may exist at a time. Further subscriptions and publications are refused.
    pub max_tracks: usize,
    /// The most tracks per session for which the engine `kernel` may prepare forwarding before the track's streams or
    /// datagrams begin. The session with the upstream relay has no such limit.
    pub offloaded_tracks: usize,
    /// How long subscriptions wait for a publisher to return, or for another one, after their publisher was lost
    /// without ending its tracks.
    pub linger: Duration,
    /// Time from GOAWAY until sessions that are still open are closed.
    pub drain_timeout: Duration,
    /// URI that GOAWAY sends clients to. `None`: clients connect again to the URI that they used.
    pub goaway_uri: Option<Url>,
    /// How long media may wait in the relay before it is dropped for a slow subscriber.
    pub delays: Delays,
    /// Whether the relay switches a subscription to a lower or higher rendition as the subscriber's bandwidth changes.
    pub adaptive: AdaptiveMode,
    /// Whether subscribers may name tracks that are alternatives of each other (draft-wilaw-moq-moqt-ssts, whose code
    /// points are provisional).
    pub switching_sets: bool,
    /// MoQ drafts offered in WebTransport sessions, in order of preference. `transport.alpn` lists the drafts that are
    /// offered over plain QUIC.
    pub drafts: Vec<Draft>,
    /// Origins of web pages that may open a WebTransport session.
    pub origins: Origins,
}

/// A cluster of relays, which exchange routes to namespaces (draft-lcurley-moq-cluster-01).
#[derive(Clone, Debug)]
pub struct RelayCluster {
    /// This relay's hop ID. No two relays of the cluster may have the same.
    pub hop: HopId,
    /// The cost that this relay announces for receiving from it. `None` announces 1.
    pub cost: Option<u64>,
    /// The relays to which this relay connects. Further relays may connect to this relay.
    pub peers: Vec<ClusterPeer>,
    /// The most namespaces to which one session may announce routes.
    pub max_routes: usize,
    /// How long a session with another relay stays open without a use, if relays look up namespaces in a
    /// [`NamespaceDirectory`](crate::NamespaceDirectory) and connect to each other on demand. `None`: they announce
    /// namespaces to each other.
    pub on_demand: Option<Duration>,
}

/// A relay of the cluster that this relay connects to.
#[derive(Clone, Debug)]
pub struct ClusterPeer {
    /// The address of the other relay, and the token that is sent to it.
    pub upstream: UpstreamRelay,
    /// The cost of receiving from the other relay. `None`: the cost that it announces.
    pub cost: Option<u64>,
    /// Patterns of namespaces that the other relay may announce. Empty: it may announce all.
    pub namespaces: Vec<Pattern>,
}

/// The origins of web pages that may open WebTransport sessions. Clients other than browsers send no origin, and may
/// always connect.
///
/// ```
/// use millrace_relay::Origins;
///
/// let origins = Origins::Only(vec!["https://example.org".to_owned()]);
/// assert!(origins.allow("https://Example.org"));
/// assert!(!origins.allow("https://example.com"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Origins {
    /// Pages of every origin may connect.
    #[default]
    Any,
    /// Only pages of these origins may connect, such as `https://example.org` or `http://localhost:8080`, in lower
    /// case.
    Only(Vec<String>),
}

impl Origins {
    /// Reports whether a page of this origin may connect. The comparison ignores case.
    pub fn allow(&self, origin: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Only(origins) => origins.iter().any(|allowed| allowed.eq_ignore_ascii_case(origin)),
        }
    }
}

/// Another relay that this relay connects to and subscribes at.
#[derive(Clone)]
pub struct UpstreamRelay {
    /// `moqt://HOST:PORT[/PATH]`, or `https://HOST:PORT[/PATH]` for WebTransport.
    pub url: Url,
    /// Returns the authorization token to send. It is called for each connection, so that a renewed token is used.
    pub token: Option<Arc<dyn Fn() -> Option<Credential> + Send + Sync>>,
}

impl UpstreamRelay {
    /// Returns the other relay's settings with the URI that its GOAWAY names. An empty `uri` keeps the present URI.
    /// Returns `None` if `uri` is not a relay's URI.
    pub fn at(&self, uri: &str) -> Option<Self> {
        let url = match uri {
            "" => self.url.clone(),
            uri => Url::parse(uri).ok().filter(is_of_a_relay)?,
        };
        Some(Self { url, token: self.token.clone() })
    }

    /// Returns the SETUP options that are sent to the other relay.
    pub fn setup(&self) -> SetupOptions {
        let token = self.token.as_ref().and_then(|token| token());
        let setup = SetupOptions {
            authorization_tokens: token.map(|token| Form::UseValue(token).encode()).into_iter().collect(),
            ..SetupOptions::default()
        };
        if self.url.scheme() == "https" {
            // WebTransport sends path and authority in its CONNECT request, so SETUP must not repeat them.
            return setup;
        }
        let path = &self.url[Position::BeforePath..Position::AfterQuery];
        let host = self.url.host_str().unwrap_or_default();
        let port = self.url.port().map(|port| format!(":{port}")).unwrap_or_default();
        SetupOptions {
            path: (!matches!(path, "" | "/")).then(|| path.to_owned()),
            authority: Some(format!("{host}{port}")),
            ..setup
        }
    }
}

/// Reports whether the URL is a relay's: `moqt://HOST`, or `https://HOST` for WebTransport. URLs with a user name or
/// password are refused, since MoQ has no use for them and the relay's status would show them.
pub fn is_of_a_relay(url: &Url) -> bool {
    let has_host = url.host_str().is_some_and(|host| !host.is_empty());
    matches!(url.scheme(), "moqt" | "https") && has_host && !has_user(url)
}

/// Reports whether the URL contains a user name or a password.
pub fn has_user(url: &Url) -> bool {
    !url.username().is_empty() || url.password().is_some()
}

impl fmt::Debug for UpstreamRelay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UpstreamRelay").field("host", &self.url.host_str()).finish_non_exhaustive()
    }
}
