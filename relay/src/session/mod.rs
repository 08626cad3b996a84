//! One MoQ session: control streams, request streams, data streams and datagrams of one connection.
//!
//! A session is a [`Context`] (the peer, what it may use, the tasks that end with it), and one module for each
//! family of requests, which owns that family's state:
//!
//! | module | what the peer sends | state |
//! | --- | --- | --- |
//! | `subscribe` | SUBSCRIBE, and the answer to our PUBLISH | subscriptions, their aliases |
//! | `publish` | PUBLISH, and the answer to our SUBSCRIBE | the peer's tracks by alias |
//! | `fetch` | FETCH, and FILL_PARAMETERS of a subscription | responses under way |
//! | `upstream_fetch` | the answer to our FETCH | FETCHes that wait for their stream |
//! | `namespaces` | PUBLISH_NAMESPACE, SUBSCRIBE_NAMESPACE, SUBSCRIBE_TRACKS | namespaces, watched prefixes |
//! | `track_status` | TRACK_STATUS | |
//! | `control` | SETUP, GOAWAY | |
//! | `streams`, `datagrams` | media | |
//! | `rights` | tokens; what it may do | rights of requests |
//! | `bounds` | any message: what bounds the work that it causes | |
//!
//! `requests` takes the first message of a request stream to its family, after [`Context::admit`] has let it in.
//! `publisher` is the peer as the hub asks it, `attach` what we do at an upstream relay.

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
mod namespaces;
mod publish;
mod publisher;
mod quotas;
mod request_ids;
mod requests;
mod responses;
mod rights;
mod streams;
mod subscribe;
mod tasks;
mod track_status;
mod upstream_fetch;
mod uses;
mod within;

use std::{sync::Arc, time::Duration};

use millrace_moq::{Draft, code, message::Setup};
use millrace_transport::Connection;
use millrace_webtransport::Tunnel;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use self::{
    context::Context, datagrams::Datagrams, fetch::Fetches, namespaces::Namespaces, publish::Publications,
    publisher::Publisher, requests::Requests, responses::Responses, rights::Authority, streams::Streams,
    subscribe::Subscriptions, upstream_fetch::UpstreamFetches,
};
use crate::{
    access::{Access, unproven},
    hub::{self, Hub},
    wire::SessionError,
};

/// A session with a publisher, a subscriber, another relay, or all of them at once.
pub struct Session {
    context: Arc<Context>,
    requests: Arc<Requests>,
    streams: Arc<Streams>,
    datagrams: Arc<Datagrams>,
    publisher: Arc<dyn hub::Publisher>,
    setup: Setup,
    /// Among the sessions without a right, until it runs.
    place: Mutex<Option<unproven::Place>>,
}

/// What a session does, for the operator.
#[derive(Clone, Copy, Debug, Default)]
pub struct Roles {
    pub publisher: bool,
    pub subscriber: bool,
    /// Subscriptions and FETCH responses under way.
    pub subscriptions: u64,
    /// Tracks that the peer publishes.
    pub publications: u64,
}

impl Session {
    /// `upstream`: the peer is the configured upstream relay, we are the QUIC client, and this is what we say first. `tunnel`: what
    /// WebTransport clients asked for. `place`: among the sessions without a right, if it needs one.
    pub fn new(
        hub: Arc<Hub>,
        access: &Arc<Access>,
        connection: Arc<Connection>,
        upstream: Option<Setup>,
        tunnel: Option<Tunnel>,
        place: Option<unproven::Place>,
    ) -> Self {
        let context = Context::new(hub, access, connection, upstream.is_some(), tunnel);
        let of = || Arc::clone(&context);
        let responses = Responses::new(of());
        let subscriptions = Subscriptions::new(of(), Arc::clone(&responses));
        let publications = Publications::new(of());
        let fetches = UpstreamFetches::new(of());
        let publisher: Arc<dyn hub::Publisher> = Arc::new(Publisher {
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
            namespaces: Namespaces::new(
                of(),
                Arc::clone(&publisher),
                Arc::clone(&publications),
                subscriptions,
            ),
        };
        Self {
            requests: Arc::new(requests),
            streams: Arc::new(Streams::new(of(), Arc::clone(&publications), fetches)),
            datagrams: Arc::new(Datagrams { context: of(), publications }),
            publisher,
            setup: upstream.unwrap_or_default(),
            place: Mutex::new(place),
            context,
        }
    }

    pub fn id(&self) -> u64 {
        self.context.id()
    }

    pub fn connection(&self) -> &Arc<Connection> {
        self.context.connection()
    }

    /// The peer is the configured upstream relay.
    pub fn is_upstream(&self) -> bool {
        self.context.is_upstream()
    }

    /// What the peer speaks.
    pub fn draft(&self) -> Draft {
        self.context.draft()
    }

    pub fn age(&self) -> Duration {
        self.context.age()
    }

    /// Runs the session to its end, and closes the connection. Dropping this ends the session too.
    pub async fn run(&self) {
        let _end = End(self);
        let (control, control_streams) = mpsc::channel(1);
        let (publications, place) = (&self.requests.publications, self.place.lock().take());
        let result = tokio::select! {
            result = control::run(&self.context, self.setup.clone(), place, control_streams) => result,
            result = self.requests.accept() => result,
            result = self.streams.accept(control) => result,
            result = self.datagrams.accept() => result,
            result = self.follow_streams() => result,
            closed = self.tunnel_closed() => Err(closed),
            result = attach::run(&self.context, &self.publisher, publications), if self.is_upstream() => result,
        };
        match result {
            Err(SessionError::Lost(reason)) => self.context.is_over(&reason),
            Err(error) => self.context.fail(error),
            Ok(()) => {}
        }
    }

    /// Until a WebTransport client closes its session.
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

    /// Takes what happens to streams of the data plane to whom they belong to.
    async fn follow_streams(&self) -> Result<(), SessionError> {
        loop {
            for event in self.connection().events().await {
                if !self.requests.subscriptions.on_event(&event) {
                    self.requests.fetches.responses.on_event(event);
                }
            }
        }
    }

    /// Closes the session from our side.
    pub fn close(&self, code: code::Session, reason: &str) {
        self.context.close(code, reason);
    }

    /// Waits for the peer's GOAWAY, and returns its URI: empty for the same one as before.
    pub async fn until_peer_goes_away(&self) -> String {
        self.context.until_peer_goes_away().await
    }

    /// Of a session with the upstream relay: all that came from earlier ones comes from it, as far as it can.
    pub fn is_attached(&self) -> bool {
        self.context.is_attached() && !self.context.peer_goes_away()
    }

    /// Tells the peer to go away, to `uri` if that is not empty, within `timeout`; new requests are refused from now on.
    pub fn start_drain(&self, uri: &str, timeout: Duration) {
        self.context.start_drain(uri, timeout);
    }

    /// Whether nothing is under way any more.
    pub fn is_idle(&self) -> bool {
        let Requests { subscriptions, publications, fetches, .. } = &*self.requests;
        subscriptions.is_idle() && fetches.responses.count() == 0 && publications.count() == 0
    }

    /// What the peer uses, and as whom it was let in.
    pub fn authority(&self) -> &Authority {
        self.context.authority()
    }

    pub fn roles(&self) -> Roles {
        let Requests { subscriptions, publications, fetches, namespaces, .. } = &*self.requests;
        let (publications, subscriptions) =
            (publications.count(), subscriptions.count() + fetches.responses.count());
        Roles {
            publisher: namespaces.is_publisher() || publications > 0,
            subscriber: subscriptions > 0,
            subscriptions: subscriptions as u64,
            publications: publications as u64,
        }
    }

    /// Lives as long as anything of the session does.
    #[cfg(test)]
    pub fn remains(&self) -> Remains {
        Arc::downgrade(&self.context)
    }
}

#[cfg(test)]
pub use backups::AT_ONCE as BACKUPS_AT_ONCE;

/// Counts what still holds a session.
#[cfg(test)]
pub type Remains = std::sync::Weak<Context>;

/// Ends the session when dropped.
struct End<'a>(&'a Session);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.context.end();
        self.0.requests.subscriptions.end();
    }
}
