//! One MoQ session: control streams, request streams and data streams of one connection.

mod asks;
mod fetch;
mod ingest;
mod namespaces;
mod serve;

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use bytes::BytesMut;
use millrace_proto::{
    moq::{
        Message, Namespace, TrackName, code,
        message::{GoAway, RequestError, Setup},
    },
    plane::downstream::Event,
};
use parking_lot::Mutex;
use quinn::{RecvStream, SendStream};
use tokio::{
    sync::{Notify, mpsc, oneshot, watch},
    time::timeout,
};
use tracing::{debug, info, warn};

use super::{
    hub::{Counters, Hub},
    subscription::Subscription,
    upstream::Upstream,
    wire::{self, Incoming, MessageReader, SessionError},
};
use millrace_transport::Connection;

/// How long a peer may take for its SETUP.
const SETUP_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a connection may outlive its control stream.
const CLOSE_GRACE: Duration = Duration::from_millis(250);

/// A session with a publisher, a subscriber, another relay, or all of them at once.
pub struct Session {
    id: u64,
    pub hub: Arc<Hub>,
    pub connection: Arc<Connection>,
    /// The peer is the configured upstream relay, and we are the QUIC client.
    pub is_upstream: bool,
    pub since: Instant,
    state: Mutex<State>,
    next_request: AtomicU64,
    next_owner: AtomicU64,
    /// The peer's SETUP has come.
    ready: watch::Sender<bool>,
    aliases_changed: Notify,
    drain: Notify,
    going_away: AtomicBool,
    peer_going_away: AtomicBool,
}

#[derive(Default)]
struct State {
    seen_requests: RequestIds,
    /// What the peer subscribed to, by the ID of its SUBSCRIBE or of our PUBLISH.
    subscriptions: HashMap<u64, Arc<Subscription>>,
    /// Whom streams of the data plane belong to, by their tag there.
    owners: HashMap<u64, Owner>,
    /// Aliases that we gave out.
    aliases: HashMap<u64, TrackName>,
    /// Tracks that the peer publishes, by the alias that it gave out.
    upstreams: HashMap<u64, Arc<Upstream>>,
    /// Our FETCH requests that wait for their data stream.
    fetches: HashMap<u64, oneshot::Sender<(RecvStream, BytesMut)>>,
    /// Namespaces that the peer publishes.
    published: Vec<Namespace>,
    watched_namespaces: Vec<Namespace>,
    watched_tracks: Vec<Namespace>,
}

enum Owner {
    Subscription(Arc<Subscription>),
    /// A FETCH response.
    Response(mpsc::UnboundedSender<Event>),
}

/// What a session does, for the operator.
#[derive(Clone, Copy, Debug, Default)]
pub struct Roles {
    pub publisher: bool,
    pub subscriber: bool,
    /// Subscriptions and FETCH responses under way.
    pub subscriptions: u64,
    /// Tracks that the peer feeds.
    pub publications: u64,
}

/// Request IDs that were used, kept short: all below `next` were, and those in `ahead`.
#[derive(Default)]
struct RequestIds {
    next: u64,
    ahead: BTreeSet<u64>,
}

impl RequestIds {
    /// Requests that may be missing between others: streams arrive in any order, but not in any number.
    const MAX_AHEAD: usize = 1 << 16;

    /// Takes the index of a request (its ID without the parity bit); `false` for a repeated one.
    fn take(&mut self, index: u64) -> bool {
        if index < self.next || self.ahead.len() >= Self::MAX_AHEAD || !self.ahead.insert(index) {
            return false;
        }
        while self.ahead.remove(&self.next) {
            self.next += 1;
        }
        true
    }
}

impl Session {
    pub fn new(hub: Arc<Hub>, connection: Arc<Connection>, is_upstream: bool) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Relaxed);
        connection.set_session(id as u32);
        Arc::new(Self {
            id,
            hub,
            connection,
            is_upstream,
            since: Instant::now(),
            state: Mutex::default(),
            // Client request IDs are even, server's odd.
            next_request: AtomicU64::new(u64::from(!is_upstream)),
            next_owner: AtomicU64::new(1),
            ready: watch::Sender::new(false),
            aliases_changed: Notify::new(),
            drain: Notify::new(),
            going_away: AtomicBool::new(false),
            peer_going_away: AtomicBool::new(false),
        })
    }

    pub fn id(&self) -> u64 {
        self.id
    }

    /// Runs the session to its end, and closes the connection.
    pub async fn run(self: Arc<Self>) {
        let (control_sender, control_receiver) = mpsc::channel(1);
        let result = tokio::select! {
            result = self.control(control_receiver) => result,
            result = self.accept_requests() => result,
            result = self.accept_streams(control_sender) => result,
            result = self.accept_datagrams() => result,
            result = self.follow_streams() => result,
            result = self.attach(), if self.is_upstream => result,
        };
        if let Err(error) = result {
            self.fail(error);
        }
        self.end();
    }

    /// Closes the connection because of `error`.
    fn fail(&self, error: SessionError) {
        match error {
            SessionError::Violation { code, reason } => {
                Counters::count(&self.hub.counters.protocol_violations);
                warn!(session = self.id, %code, reason, "closing the session");
                self.connection.quic.close(wire::var(code.0), reason.as_bytes());
            }
            SessionError::Lost(reason) => debug!(session = self.id, reason, "session over"),
        }
    }

    fn end(&self) {
        self.connection.quic.close(wire::var(code::Session::NO_ERROR.0), b"");
        let now = Instant::now();
        let subscriptions: Vec<_> = self.state.lock().subscriptions.drain().collect();
        for (_, subscription) in subscriptions {
            subscription.track.unsubscribe(&subscription, now);
        }
    }

    /// Closes the session from our side.
    pub fn close(&self, code: code::Session, reason: &str) {
        self.connection.quic.close(wire::var(code.0), reason.as_bytes());
    }

    /// Tells the peer to go away; new requests are refused from now on.
    pub fn start_drain(&self) {
        self.going_away.store(true, Relaxed);
        self.drain.notify_one();
    }

    /// Whether nothing is under way any more.
    pub fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.subscriptions.is_empty() && state.owners.is_empty() && state.upstreams.is_empty()
    }

    pub fn roles(&self) -> Roles {
        let state = self.state.lock();
        Roles {
            publisher: !state.published.is_empty() || !state.upstreams.is_empty(),
            subscriber: !state.owners.is_empty(),
            subscriptions: state.owners.len() as u64,
            publications: state.upstreams.len() as u64,
        }
    }

    fn peer_goes_away(&self) -> bool {
        self.peer_going_away.load(Relaxed)
    }

    fn next_owner(&self) -> u64 {
        self.next_owner.fetch_add(1, Relaxed)
    }

    async fn control(self: &Arc<Self>, mut peer: mpsc::Receiver<MessageReader>) -> Result<(), SessionError> {
        let mut send = self.connection.quic.open_uni().await?;
        let implementation = Some(concat!("millrace/", env!("CARGO_PKG_VERSION")).to_owned());
        wire::send(&mut send, Setup { implementation, ..Setup::default() }).await?;
        self.connection.start();
        let mut reader = self.read_setup(&mut peer).await?;
        loop {
            tokio::select! {
                incoming = reader.next() => match incoming? {
                    Incoming::Finished | Incoming::Reset if self.is_closing().await => {
                        return Err(SessionError::Lost("closed by the peer".into()));
                    }
                    incoming => self.on_control(incoming)?,
                },
                second = peer.recv() => if second.is_some() {
                    return Err(SessionError::violation("a second control stream"));
                },
                () = self.drain.notified() => {
                    let goaway = GoAway { uri: String::new(), timeout: 0, request_id: Some(self.unprocessed_request()) };
                    wire::send(&mut send, goaway).await?;
                }
            }
        }
    }

    async fn read_setup(
        &self,
        peer: &mut mpsc::Receiver<MessageReader>,
    ) -> Result<MessageReader, SessionError> {
        let setup = async {
            let mut reader = peer.recv().await.ok_or_else(|| SessionError::Lost("closed".into()))?;
            match reader.next().await? {
                Incoming::Message(Message::Setup(setup)) => Ok((reader, setup)),
                _ => Err(SessionError::violation("the control stream does not begin with SETUP")),
            }
        };
        let late = |_| SessionError::Violation {
            code: code::Session::CONTROL_MESSAGE_TIMEOUT,
            reason: "no SETUP in time".into(),
        };
        let (reader, setup) = timeout(SETUP_TIMEOUT, setup).await.map_err(late)??;
        if self.is_upstream && (setup.path.is_some() || setup.authority.is_some()) {
            return Err(SessionError::Violation {
                code: code::Session::INVALID_PATH,
                reason: "a server sent a path or an authority".into(),
            });
        }
        info!(
            session = self.id,
            remote = %self.connection.quic.remote_address(),
            implementation = setup.implementation.as_deref().unwrap_or("unknown"),
            "session established"
        );
        self.ready.send_replace(true);
        Ok(reader)
    }

    fn on_control(&self, incoming: Incoming) -> Result<(), SessionError> {
        match incoming {
            Incoming::Message(Message::GoAway(goaway)) => {
                if !self.is_upstream && !goaway.uri.is_empty() {
                    return Err(SessionError::violation("a client sent a GOAWAY with a URI"));
                }
                if self.peer_going_away.swap(true, Relaxed) {
                    return Err(SessionError::violation("a second GOAWAY"));
                }
                info!(session = self.id, "the peer goes away");
                Ok(())
            }
            Incoming::Message(message) => {
                Err(SessionError::violation(format!("{} on the control stream", message.name())))
            }
            Incoming::Finished | Incoming::Reset => {
                Err(SessionError::violation("the control stream was closed"))
            }
        }
    }

    /// Peers that close the connection may close its streams a moment earlier.
    async fn is_closing(&self) -> bool {
        timeout(CLOSE_GRACE, self.connection.quic.closed()).await.is_ok()
    }

    /// Waits for the peer's SETUP, before which nothing it sends is looked at.
    async fn until_ready(&self) -> Result<(), SessionError> {
        let mut ready = self.ready.subscribe();
        ready.wait_for(|ready| *ready).await.map(drop).map_err(|_| SessionError::Lost("closed".into()))
    }

    async fn accept_requests(self: &Arc<Self>) -> Result<(), SessionError> {
        loop {
            let (send, recv) = self.connection.quic.accept_bi().await?;
            let session = Arc::clone(self);
            tokio::spawn(async move {
                if let Err(error) = session.serve(send, recv).await {
                    session.fail(error);
                }
            });
        }
    }

    /// Takes the first message of a request stream to whoever serves it.
    async fn serve(self: &Arc<Self>, send: SendStream, recv: RecvStream) -> Result<(), SessionError> {
        self.until_ready().await?;
        let mut reader = MessageReader::new(recv, BytesMut::new());
        let message = match reader.next().await? {
            Incoming::Message(message) => message,
            Incoming::Finished => return Err(SessionError::violation("an empty request stream")),
            Incoming::Reset => return Ok(()),
        };
        if !message.opens_request() {
            return Err(SessionError::violation(format!("{} opens a request stream", message.name())));
        }
        self.check_request_id(&message)?;
        Counters::count(&self.hub.counters.requests);
        debug!(session = self.id, request = ?message, "request");
        if self.going_away.load(Relaxed) {
            return self.refuse(send, code::Request::GOING_AWAY, "the relay is going away").await;
        }
        match message {
            Message::Subscribe(subscribe) => self.serve_subscribe(subscribe, send, reader).await,
            Message::Publish(publish) => self.serve_publish(publish, send, reader).await,
            Message::Fetch(fetch) => self.serve_fetch(fetch, send, reader).await,
            Message::TrackStatus(status) => self.serve_track_status(status, send).await,
            Message::PublishNamespace(publish) => self.serve_publish_namespace(publish, send, reader).await,
            Message::SubscribeNamespace(watch) => self.serve_subscribe_namespace(watch, send, reader).await,
            Message::SubscribeTracks(watch) => self.serve_subscribe_tracks(watch, send, reader).await,
            other => Err(SessionError::violation(format!("{} opens a request stream", other.name()))),
        }
    }

    /// Checks the request ID of a message that uses one up.
    fn check_request_id(&self, message: &Message) -> Result<(), SessionError> {
        let Some(id) = message.request_id() else { return Ok(()) };
        let theirs = u64::from(self.is_upstream);
        if id % 2 == theirs && self.state.lock().seen_requests.take(id / 2) {
            return Ok(());
        }
        Err(SessionError::Violation {
            code: code::Session::INVALID_REQUEST_ID,
            reason: format!("request ID {id} of {} is repeated or of the wrong side", message.name()),
        })
    }

    /// The smallest request ID of the peer that was not processed.
    fn unprocessed_request(&self) -> u64 {
        let state = self.state.lock();
        let index = state.seen_requests.ahead.last().map_or(state.seen_requests.next, |last| last + 1);
        index * 2 + u64::from(self.is_upstream)
    }

    fn next_request_id(&self) -> u64 {
        self.next_request.fetch_add(2, Relaxed)
    }

    /// Answers with REQUEST_ERROR.
    async fn refuse(
        &self,
        send: SendStream,
        code: code::Request,
        reason: impl Into<String>,
    ) -> Result<(), SessionError> {
        self.refuse_with(send, RequestError::new(code, reason)).await
    }

    async fn refuse_with(&self, mut send: SendStream, error: RequestError) -> Result<(), SessionError> {
        Counters::count(&self.hub.counters.request_errors);
        debug!(session = self.id, ?error, "request refused");
        wire::send_last(&mut send, error).await;
        Ok(())
    }

    /// Routes what happens to streams of the data plane to their owners.
    async fn follow_streams(&self) -> Result<(), SessionError> {
        loop {
            for event in self.connection.events().await {
                self.on_stream_event(event);
            }
        }
    }

    fn on_stream_event(&self, event: Event) {
        match self.state.lock().owners.get(&event.owner) {
            Some(Owner::Subscription(subscription)) => subscription.on_event(&event),
            Some(Owner::Response(response)) => drop(response.send(event)), // being given up
            None => {}
        }
    }
}
