//! One MoQ session: control streams, request streams, data streams and datagrams of one connection.
//!
//! A session is a [`SessionContext`] (the peer, its rights and quotas, the tasks that end with the session), and one
//! module for each family of requests, which owns that family's state:
//!
//! | module | what the peer sends | state |
//! | --- | --- | --- |
//! | `subscribe` | SUBSCRIBE, and the answer to our PUBLISH | subscriptions, their aliases |
//! | `publish` | PUBLISH, and the answer to our SUBSCRIBE | the peer's tracks by alias |
//! | `fetch` | FETCH, and FILL_PARAMETERS of a subscription | responses under way |
//! | `upstream_fetch` | the answer to our FETCH | FETCHes that wait for their stream |
//! | `namespaces` | PUBLISH_NAMESPACE, SUBSCRIBE_NAMESPACE, SUBSCRIBE_TRACKS | published namespaces, watched prefixes |
//! | `track_status` | TRACK_STATUS | |
//! | `control` | SETUP, GOAWAY | |
//! | `streams`, `datagrams` | media | |
//! | `rights` | tokens, and what the peer may do | rights of requests |
//! | `bounds` | any message: what bounds the work that it causes | |
//!
//! `requests` passes the first message of a request stream to its family, once [`SessionContext::admit`] has admitted
//! it. `publisher` is the peer as the hub uses it. `attach` runs on sessions with the upstream relay, `mesh` on those
//! with relays of the cluster.

mod ask;
mod attach;
mod backups;
mod bounds;
mod context;
mod control;
mod datagrams;
mod dialect;
mod fetch;
mod filters;
mod gaps;
mod mesh;
mod namespaces;
mod publish;
mod publisher;
mod quotas;
mod requests;
mod responses;
mod rights;
mod standby;
mod streams;
mod subscribe;
mod tasks;
mod track_status;
mod upstream_fetch;
mod uses;
mod within;

use std::{sync::Arc, time::Duration};

use millrace_moq::{Draft, code, message::SetupOptions};
use millrace_transport::Connection;
use millrace_webtransport::Tunnel;
use parking_lot::Mutex;
use tokio::sync::oneshot;

pub use self::context::{PeerHop, PeerTerms};
use self::{
    context::{SessionContext, SessionLinkEnd},
    datagrams::SessionDatagrams,
    fetch::Fetches,
    namespaces::SessionNamespaces,
    publish::Publications,
    publisher::SessionPublisher,
    requests::Requests,
    responses::Responses,
    rights::SessionRights,
    streams::StreamReceiver,
    subscribe::Subscriptions,
    upstream_fetch::UpstreamFetches,
};
use crate::{
    hub::{self, Hub},
    wire::SessionError,
};
use millrace_access::{Access, unproven};

/// A session with a publisher, a subscriber, another relay, or all of them at once.
///
/// [`Self::new`] sends nothing. [`Self::run`] is called once. It sends SETUP, and the session is *ready* once the
/// peer's SETUP has arrived and was accepted. [`Self::start_drain`] may be called at any time: a ready session then
/// sends GOAWAY and refuses new requests, while its subscriptions continue. The session is *over* when the first part
/// of `run` ends: the peer closes the connection or violates the protocol, its rights end, or [`Self::close`] was
/// called. The connection is then closed, and all tasks and subscriptions of the session end, even if the future of
/// `run` is dropped.
pub struct RelaySession {
    context: Arc<SessionContext>,
    requests: Arc<Requests>,
    streams: Arc<StreamReceiver>,
    datagrams: Arc<SessionDatagrams>,
    publisher: Arc<dyn hub::HubPublisher>,
    upstream_fetches: Arc<UpstreamFetches>,
    setup: SetupOptions,
    /// Counts the session against the limit of sessions that have not proved an access right. `None` once the session
    /// runs.
    place: Mutex<Option<unproven::UnprovenPlace>>,
}

/// State that a session has only if this relay opened its connection.
pub struct Dialed {
    pub setup: SetupOptions,
    /// The settings for the peer if it is a relay of the cluster. `None`: the peer is the upstream relay.
    pub peer: Option<Arc<PeerTerms>>,
}

/// Whether the peer publishes or subscribes in the session, and how many subscriptions and tracks it has, as the status
/// shows them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Roles {
    pub publisher: bool,
    pub subscriber: bool,
    /// Subscriptions and FETCH responses under way.
    pub subscriptions: u64,
    /// Tracks that the peer publishes.
    pub publications: u64,
}

impl RelaySession {
    /// Makes a session. `dialed` is set if this relay opened the connection. `tunnel` is the WebTransport session, if
    /// there is one. `place` counts the session against the limit of sessions that have not proved an access right.
    pub fn new(
        hub: Arc<Hub>,
        access: &Arc<Access>,
        connection: Arc<Connection>,
        dialed: Option<Dialed>,
        tunnel: Option<Tunnel>,
        place: Option<unproven::UnprovenPlace>,
    ) -> Self {
        let (link, setup) = match dialed {
            None => (SessionLinkEnd::Accepted, SetupOptions::default()),
            Some(Dialed { setup, peer: None }) => (SessionLinkEnd::Upstream, setup),
            Some(Dialed { setup, peer: Some(terms) }) => (SessionLinkEnd::Peer(terms), setup),
        };
        let context = SessionContext::new(hub, access, connection, link, tunnel);
        let of = || Arc::clone(&context);
        let responses = Responses::new(of());
        let subscriptions = Subscriptions::new(of(), Arc::clone(&responses));
        let fetches = UpstreamFetches::new(of());
        let publications = Publications::new(of(), Arc::clone(&fetches));
        let publisher: Arc<dyn hub::HubPublisher> = Arc::new(SessionPublisher {
            context: of(),
            publications: Arc::clone(&publications),
            fetches: Arc::clone(&fetches),
            backups: Arc::default(),
        });
        let requests = Requests {
            context: of(),
            subscriptions: Arc::clone(&subscriptions),
            publications: Arc::clone(&publications),
            fetches: Fetches::new(of(), Arc::clone(&subscriptions), responses),
            namespaces: SessionNamespaces::new(
                of(),
                Arc::clone(&publisher),
                Arc::clone(&publications),
                subscriptions,
            ),
        };
        Self {
            requests: Arc::new(requests),
            streams: Arc::new(StreamReceiver::new(of(), Arc::clone(&publications), Arc::clone(&fetches))),
            datagrams: Arc::new(SessionDatagrams { context: of(), publications }),
            publisher,
            upstream_fetches: fetches,
            setup,
            place: Mutex::new(place),
            context,
        }
    }

    /// Makes the session of the private link between both processes of a takeover.
    pub fn link(
        hub: Arc<Hub>,
        access: &Arc<Access>,
        connection: Arc<Connection>,
        dialed: Option<Dialed>,
    ) -> Self {
        let session = Self::new(hub, access, connection, dialed, None, None);
        session.context.set_link();
        session
    }

    /// Reports whether the peer is the other process of a takeover.
    pub fn is_link(&self) -> bool {
        self.context.is_link()
    }

    pub fn id(&self) -> u64 {
        self.context.id()
    }

    pub fn connection(&self) -> &Arc<Connection> {
        self.context.connection()
    }

    /// Reports whether the peer is the configured upstream relay.
    pub fn is_upstream(&self) -> bool {
        self.context.is_upstream()
    }

    /// Reports whether this relay opened the connection.
    pub fn is_dialed(&self) -> bool {
        self.context.is_dialed()
    }

    /// Returns the peer's hop ID and cost, if it is a member of the cluster.
    pub fn hop(&self) -> Option<PeerHop> {
        self.context.hop()
    }

    /// Reports whether the peer is a relay of the cluster.
    pub fn is_relay(&self) -> bool {
        self.context.is_relay()
    }

    /// Returns the cost of receiving from the peer.
    pub fn link_cost(&self) -> u64 {
        self.context.link_cost()
    }

    /// Returns the draft that the peer speaks.
    pub fn draft(&self) -> Draft {
        self.context.draft()
    }

    pub fn age(&self) -> Duration {
        self.context.age()
    }

    /// Runs the session until it ends, and closes the connection. Dropping the future also ends the session.
    pub async fn run(&self) {
        // The guard ends the session even if this future is dropped.
        let _end = SessionEnd(self);
        let (control, control_stream) = oneshot::channel();
        let control = Arc::new(Mutex::new(Some(control)));
        let publications = &self.requests.publications;
        let place = self.place.lock().take();
        // Few sessions have these parts, so their futures are made only when they are polled.
        let with_upstream =
            async { Box::pin(attach::run(&self.context, &self.publisher, publications)).await };
        let with_peer = async { Box::pin(mesh::run(&self.context, &self.publisher)).await };
        // All parts of the session run concurrently. The session ends with the first part that ends.
        let result = tokio::select! {
            result = control::run(&self.context, &self.setup, place, control_stream) => result,
            result = self.requests.accept() => result,
            result = self.streams.accept(control) => result,
            result = self.datagrams.accept() => result,
            result = self.follow_streams() => result,
            closed = self.tunnel_closed() => Err(closed),
            result = with_upstream, if self.is_upstream() => result,
            result = with_peer, if self.context.terms().is_some() => result,
        };
        match result {
            Err(SessionError::Lost(reason)) => self.context.is_over(&reason),
            Err(error) => self.context.fail(error),
            Ok(()) => {}
        }
    }

    /// Waits until the peer closes its WebTransport session. Never returns over plain QUIC.
    async fn tunnel_closed(&self) -> SessionError {
        match self.context.tunnel() {
            Some(tunnel) => {
                let closed = tunnel.closed().await;
                closed.err().map_or_else(
                    || SessionError::Lost("closed by the peer".into()),
                    |malformed| SessionError::violation(malformed.to_string()),
                )
            }
            None => std::future::pending().await,
        }
    }

    /// Passes the transport's events about sent media streams to the subscription or the FETCH response that the stream
    /// belongs to.
    async fn follow_streams(&self) -> Result<(), SessionError> {
        loop {
            for event in self.connection().events().await {
                if !self.requests.subscriptions.on_event(&event) {
                    self.requests.fetches.responses.on_event(event);
                }
            }
        }
    }

    /// Closes the session from this relay's side.
    pub fn close(&self, code: code::Session, reason: &str) {
        self.context.close(code, reason);
    }

    /// Waits for the peer's GOAWAY, and returns its URI. An empty URI means the present one.
    pub async fn until_peer_goes_away(&self) -> String {
        self.context.until_peer_goes_away().await
    }

    /// Leaves the upstream relay for another one, as if the upstream relay had sent GOAWAY.
    pub fn leave_upstream(&self) {
        self.context.set_peer_goes_away(String::new());
    }

    /// Reports whether this session has taken over the tracks of earlier sessions with the upstream relay.
    pub fn is_attached(&self) -> bool {
        self.context.is_attached() && !self.context.peer_goes_away()
    }

    /// Sends GOAWAY with `uri` and `timeout`, and refuses new requests from now on. An empty `uri` means the present
    /// one.
    pub fn start_drain(&self, uri: &str, timeout: Duration) {
        self.context.start_drain(uri, timeout);
    }

    /// Reports whether the session has no subscriptions, no publications and no responses under way in either
    /// direction.
    pub fn is_idle(&self) -> bool {
        self.is_served() && self.upstream_fetches.is_idle() && self.requests.publications.count() == 0
    }

    /// Reports whether the peer has no subscriptions here, and no responses to FETCH are under way to it.
    pub fn is_served(&self) -> bool {
        let Requests { subscriptions, fetches, .. } = &*self.requests;
        subscriptions.is_idle() && fetches.responses.count() == 0
    }

    /// Returns the peer's identity and access rights, and the resources that count against its quotas.
    pub fn authority(&self) -> &SessionRights {
        self.context.authority()
    }

    pub fn roles(&self) -> Roles {
        let Requests { subscriptions, publications, fetches, namespaces, .. } = &*self.requests;
        let publications = publications.count();
        let subscriptions = subscriptions.count() + fetches.responses.count();
        Roles {
            publisher: namespaces.is_publisher() || publications > 0,
            subscriber: subscriptions > 0,
            subscriptions: subscriptions as u64,
            publications: publications as u64,
        }
    }

    /// Returns a weak reference that expires when nothing holds the session's state any more.
    #[cfg(test)]
    pub fn remains(&self) -> Remains {
        Arc::downgrade(&self.context)
    }
}

#[cfg(test)]
pub use backups::AT_ONCE as BACKUPS_AT_ONCE;

/// Shows a test whether any part of a session's state still exists.
#[cfg(test)]
pub type Remains = std::sync::Weak<SessionContext>;

/// A guard that ends the session when it is dropped.
struct SessionEnd<'a>(&'a RelaySession);

impl Drop for SessionEnd<'_> {
    fn drop(&mut self) {
        self.0.context.end();
        self.0.requests.subscriptions.end();
    }
}
