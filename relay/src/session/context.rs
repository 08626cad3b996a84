//! State that all requests of one session share.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use bytes::BytesMut;
use millrace_logging::short;
use millrace_moq::{
    Draft, HopId, Message, Namespace, Parameters, RequestIds, code,
    incomplete::{HeldIncomplete, IncompleteBytes},
    message::{self, GoAway, RequestError},
    param::Assignment,
    tracks::{account::Account, malformed::TrackMalformed},
};
use millrace_relay_cluster::{Announcement, Neighbour};
use millrace_transport::{Connection, Outbox};
use millrace_webtransport::{RecvStream, SendStream, Tunnel};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tracing::{debug, info, warn};

use super::{
    dialect::Dialect,
    quotas::Quotas,
    rights::{Admitted, SessionRights, request_error},
    tasks::Tasks,
    uses::Uses,
};
use crate::{
    hub::{Hub, OperatorCounters, Requester},
    live::LiveTrack,
    wire::{self, Answers, GoAways, MessageReader, SessionError},
};
use millrace_access::{Access, AccessRefusal, pattern::Pattern, policy::RightHolder, rights::Rights};

/// The peer, its rights and quotas, and the tasks that end with its session.
pub struct SessionContext {
    id: u64,
    hub: Arc<Hub>,
    connection: Arc<Connection>,
    uses: Arc<Uses>,
    /// The side that opened the connection, and the kind of the peer: a client, the upstream relay or a relay of the
    /// cluster.
    link: SessionLinkEnd,
    /// The peer's hop ID and cost, if both relays are members of the cluster.
    hop: OnceLock<PeerHop>,
    /// True if the peer is the other process of a takeover.
    is_link: AtomicBool,
    /// True once the peer has announced a namespace of another endpoint, so it acts as a relay.
    announces_routes: AtomicBool,
    /// The draft that the peer speaks.
    draft: Draft,
    /// The WebTransport session that the streams belong to. `None` over plain QUIC.
    tunnel: Option<Tunnel>,
    since: Instant,
    dialect: OnceLock<Dialect>,
    knows_switching_sets: AtomicBool,
    /// The peer's limit of unanswered REQUEST_UPDATEs per request (MAX_REQUEST_UPDATES). 0 means no limit.
    max_request_updates: AtomicU64,
    setup: watch::Sender<ReceivedSetup>,
    quotas: Quotas,
    incomplete: Arc<IncompleteBytes>,
    authority: SessionRights,
    tasks: Tasks,
    /// The request IDs that the peer has used.
    seen_requests: Mutex<RequestIds>,
    next_request: AtomicU64,
    next_owner: AtomicU64,
    drain: Notify,
    /// URI and timeout of the GOAWAY that is sent to the peer.
    goaway: OnceLock<(String, Duration)>,
    going_away: AtomicBool,
    /// The new session URI from the peer's GOAWAY. `None` until GOAWAY has arrived.
    peer_goes_away: watch::Sender<Option<String>>,
    attached: AtomicBool,
}

/// The side that opened the session's QUIC connection. If it was this relay, also the kind of the peer.
pub enum SessionLinkEnd {
    /// A client opened the connection.
    Accepted,
    /// This relay opened the connection to its upstream relay.
    Upstream,
    /// This relay opened the connection to a relay of the cluster.
    Peer(Arc<PeerTerms>),
}

/// The settings for a peer that is a relay of the cluster.
#[derive(Clone, Debug)]
pub struct PeerTerms {
    /// The cost of receiving from the peer. `None`: the cost that the peer announces.
    pub cost: Option<u64>,
    /// Patterns of the namespaces that the peer may announce. Empty: it may announce all.
    pub namespaces: Vec<Pattern>,
}

impl PeerTerms {
    pub fn allow(&self, namespace: &Namespace) -> bool {
        self.namespaces.is_empty() || self.namespaces.iter().any(|pattern| pattern.matches(namespace))
    }

    /// Returns the shortest prefixes that together cover all namespaces that the peer may announce.
    pub fn prefixes(&self) -> Vec<Namespace> {
        if self.namespaces.is_empty() {
            return vec![Namespace::default()];
        }
        let mut all: Vec<_> = self.namespaces.iter().map(Pattern::prefix).collect();
        all.sort_by_key(|prefix| prefix.fields().len());
        let mut shortest: Vec<Namespace> = Vec::new();
        for prefix in all {
            if !shortest.iter().any(|known| known.is_prefix_of(&prefix)) {
                shortest.push(prefix);
            }
        }
        shortest
    }
}

/// The hop ID and the cost in a peer's SETUP (draft-lcurley-moq-cluster).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerHop {
    pub id: HopId,
    /// The value of the SETUP option RELAY_COST: the cost that the peer announces for receiving from it.
    pub cost: Option<u64>,
}

/// The cost of a link without a configured or announced cost. With it, the cheapest path is the one with the fewest
/// links.
const LINK_COST: u64 = 1;

/// Whether the peer's SETUP has arrived. Other messages of the peer are processed only after SETUP.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReceivedSetup {
    Awaited,
    Received,
    /// The session ended before the peer's SETUP arrived.
    Missed,
}

impl SessionContext {
    pub fn new(
        hub: Arc<Hub>,
        access: &Arc<Access>,
        connection: Arc<Connection>,
        link: SessionLinkEnd,
        tunnel: Option<Tunnel>,
    ) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Relaxed);
        connection.set_session(id as u32);
        let agreed = match &tunnel {
            Some(tunnel) => Draft::from_protocol(&tunnel.asked.protocol),
            None => connection.protocol().and_then(|protocol| Draft::from_alpn(&protocol)),
        };
        let is_dialed = !matches!(link, SessionLinkEnd::Accepted);
        let quotas = match is_dialed {
            true => Quotas::for_upstream(id),
            false => Quotas::new(id, hub.limits.offloaded_tracks),
        };
        Arc::new(Self {
            id,
            hub,
            uses: Uses::new(Arc::clone(&connection), is_dialed),
            connection,
            link,
            hop: OnceLock::new(),
            is_link: AtomicBool::new(false),
            announces_routes: AtomicBool::new(false),
            // Without ALPN, which happens only if the relay offers none, draft 18 is assumed.
            draft: agreed.unwrap_or(Draft::D18),
            tunnel,
            since: Instant::now(),
            dialect: OnceLock::new(),
            knows_switching_sets: AtomicBool::new(false),
            max_request_updates: AtomicU64::new(0),
            setup: watch::Sender::new(ReceivedSetup::Awaited),
            quotas,
            incomplete: Arc::default(),
            authority: SessionRights::new(access),
            tasks: Tasks::new(),
            seen_requests: Mutex::default(),
            // Request IDs of the QUIC client are even, those of the server odd.
            next_request: AtomicU64::new(u64::from(!is_dialed)),
            next_owner: AtomicU64::new(1),
            drain: Notify::new(),
            goaway: OnceLock::new(),
            going_away: AtomicBool::new(false),
            peer_goes_away: watch::Sender::new(None),
            attached: AtomicBool::new(false),
        })
    }

    pub fn id(&self) -> u64 {
        self.id
    }

    pub fn hub(&self) -> &Arc<Hub> {
        &self.hub
    }

    pub fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// Returns the counts of the session's open requests. They decide how much forwarding in the kernel is worth to the
    /// session.
    pub fn uses(&self) -> &Arc<Uses> {
        &self.uses
    }

    /// Returns the draft that the peer speaks.
    pub fn draft(&self) -> Draft {
        self.draft
    }

    /// Returns the peer's dialect: how its implementation deviates from the draft. It is known once the peer's SETUP
    /// has arrived.
    pub fn dialect(&self) -> Dialect {
        self.dialect.get().copied().unwrap_or_default()
    }

    /// Reports whether the peer supports switching sets. False until its SETUP has arrived.
    pub fn knows_switching_sets(&self) -> bool {
        self.knows_switching_sets.load(Relaxed)
    }

    /// Returns how many REQUEST_UPDATEs of one request may wait for their answers.
    pub fn max_request_updates(&self) -> u64 {
        match self.max_request_updates.load(Relaxed) {
            0 => u64::MAX,
            most => most,
        }
    }

    /// Reports whether the peer is the configured upstream relay.
    pub fn is_upstream(&self) -> bool {
        matches!(self.link, SessionLinkEnd::Upstream)
    }

    /// Reports whether this relay opened the connection.
    pub fn is_dialed(&self) -> bool {
        !matches!(self.link, SessionLinkEnd::Accepted)
    }

    /// Returns the settings for the peer, if it is a relay of the cluster that we have connected to.
    pub fn terms(&self) -> Option<&Arc<PeerTerms>> {
        match &self.link {
            SessionLinkEnd::Peer(terms) => Some(terms),
            _ => None,
        }
    }

    /// Returns the peer's hop ID and cost, if it is a member of the cluster. Announcements in both directions then have
    /// a hop path and a cost.
    pub fn hop(&self) -> Option<PeerHop> {
        self.hop.get().copied()
    }

    /// Returns the peer's session ID and hop ID, which decide by which routes its requests are served.
    pub fn neighbour(&self) -> Neighbour {
        self.requester().neighbour()
    }

    /// Reports whether the peer is a relay of the cluster.
    pub fn is_relay(&self) -> bool {
        self.terms().is_some() || self.is_link() || self.announces_routes.load(Relaxed)
    }

    /// Marks the peer as the other process of a takeover. Has to be called before the session runs.
    pub fn set_link(&self) {
        self.is_link.store(true, Relaxed);
    }

    pub fn is_link(&self) -> bool {
        self.is_link.load(Relaxed)
    }

    /// Records that the peer has announced a namespace of another endpoint, so that it acts as a relay.
    pub fn set_announces_routes(&self) {
        self.announces_routes.store(true, Relaxed);
    }

    /// Returns the cost of receiving from the peer. A configured cost takes precedence over the announced one.
    pub fn link_cost(&self) -> u64 {
        let told = self.hop().and_then(|hop| hop.cost);
        self.terms().and_then(|terms| terms.cost).or(told).unwrap_or(LINK_COST)
    }

    /// Returns the hop path and the cost in a namespace announcement of the peer. Returns `None` if the peer is not a
    /// member of our cluster.
    ///
    /// # Errors
    /// Returns an error if a member of the cluster omits the hop path, or another peer sends one.
    pub fn announcement_of(&self, parameters: &Parameters) -> Result<Option<Announcement>, SessionError> {
        match (self.hop(), &parameters.hop_path) {
            (Some(_), Some(path)) => {
                let cost = parameters.route_cost.unwrap_or(0);
                Ok(Some(Announcement { path: path.clone(), cost }))
            }
            (Some(_), None) => Err(SessionError::violation("a namespace without HOP_PATH")),
            (None, None) if parameters.route_cost.is_none() => Ok(None),
            (None, _) => Err(SessionError::violation("HOP_PATH or ROUTE_COST without HOP_ID in SETUP")),
        }
    }

    /// Returns the owner of the tracks that the peer publishes under `rights`.
    pub fn owner(&self, rights: &Rights) -> RightHolder {
        if self.is_relay() { RightHolder::Cluster } else { rights.identity() }
    }

    pub fn tunnel(&self) -> Option<&Tunnel> {
        self.tunnel.as_ref()
    }

    pub fn age(&self) -> Duration {
        self.since.elapsed()
    }

    pub fn quotas(&self) -> &Quotas {
        &self.quotas
    }

    /// Returns a counter for the incomplete messages that a stream of the peer holds.
    pub fn incomplete(&self) -> HeldIncomplete {
        self.incomplete.stream()
    }

    /// Returns a reader for a request stream. `buffer` contains bytes that were read already.
    pub fn request_reader(&self, recv: RecvStream, buffer: BytesMut) -> MessageReader {
        MessageReader::new(self.draft, recv, buffer, self.incomplete(), GoAways::on_request(self.is_dialed()))
    }

    /// Returns a writer for our direction of a request stream.
    pub fn answers(&self, send: SendStream) -> Answers {
        Answers::new(self.draft, send)
    }

    /// Returns a reader for the peer's control stream. `buffer` contains bytes that were read already.
    pub fn control_reader(&self, recv: RecvStream, buffer: BytesMut) -> MessageReader {
        MessageReader::new(self.draft, recv, buffer, self.incomplete(), GoAways::on_control(self.is_dialed()))
    }

    /// Returns the account that the peer's groups in the cache are counted against.
    pub fn account(&self) -> &Arc<Account> {
        self.authority.account()
    }

    /// Returns the peer's identity, its access rights and its use of the request budgets.
    pub fn authority(&self) -> &SessionRights {
        &self.authority
    }

    /// Returns this session as a requester, which decides which publishers may serve it.
    pub fn requester(&self) -> Requester {
        let hop = self.hop().map_or(HopId::UNNAMED, |hop| hop.id);
        Requester { session: self.id, is_upstream: self.is_upstream(), is_relay: self.is_relay(), hop }
    }

    /// Decides whether a request of the peer may be served, before any state is created for it. An error in the inner
    /// `Result` is the answer that refuses the request.
    ///
    /// # Errors
    /// Returns an error if the session has to be closed.
    pub fn admit(&self, message: &Message) -> Result<Result<Admitted, RequestError>, SessionError> {
        // A request counts against the session's request budget even if it is refused afterwards.
        let admitted = self.authority.request(message)?;
        let published = match message {
            Message::PublishNamespace(publish) => Some(&publish.namespace),
            Message::Publish(publish) => Some(publish.track.namespace()),
            _ => None,
        };
        // A relay of the cluster may publish only the namespaces that the settings allow for it.
        if let (Some(terms), Some(namespace)) = (self.terms(), published)
            && !terms.allow(namespace)
        {
            OperatorCounters::count(&self.hub.counters.routes_refused);
            return Ok(Err(request_error(AccessRefusal::NotAllowed)));
        }
        if self.going_away.load(Relaxed) {
            return Ok(Err(RequestError::new(code::Request::GOING_AWAY, "the relay is going away")));
        }
        Ok(admitted)
    }

    /// Runs `work` until it ends or the session is over. A failure of `work` closes the session. Returns false if the
    /// session is already over.
    pub fn spawn(
        self: &Arc<Self>,
        work: impl Future<Output = Result<(), SessionError>> + Send + 'static,
    ) -> bool {
        let context = Arc::clone(self);
        // Without the box the task would have room for `work` twice: before and after it is first polled.
        let work = Box::pin(work);
        self.tasks.spawn(async move {
            if let Err(error) = work.await {
                context.fail(error);
            }
        })
    }

    /// Closes the connection because of `error`.
    pub fn fail(&self, error: SessionError) {
        match error {
            SessionError::Violation { code, reason } => {
                OperatorCounters::count(&self.hub.counters.protocol_violations);
                warn!(session = self.id, %code, reason, "closing the session: the peer violated the protocol");
                self.close(code, &reason);
            }
            SessionError::Refused { code, reason } => {
                info!(session = self.id, %code, reason, "closing the session: this relay does not serve the session's peer (why: `reason`)");
                self.close(code, &reason);
            }
            SessionError::Lost(reason) => {
                debug!(session = self.id, reason, "a stream of the session ended early")
            }
        }
    }

    /// Logs the end of the session, with the close reason of the connection or else `reason`.
    pub fn is_over(&self, reason: &str) {
        let closed = self.connection.quic.close_reason().map(|closed| match closed {
            quinn::ConnectionError::LocallyClosed => "closed by this relay".to_owned(),
            quinn::ConnectionError::TimedOut => "no packet arrived within the idle timeout".to_owned(),
            closed => closed.to_string(),
        });
        info!(
            session = self.id,
            remote = %self.connection.quic.remote_address(),
            seconds = self.age().as_secs(),
            reason = short(closed.as_deref().unwrap_or(reason)),
            "MoQ session ended"
        );
    }

    /// Closes the connection.
    pub fn close(&self, code: code::Session, reason: &str) {
        match &self.tunnel {
            Some(tunnel) => tunnel.close(&self.connection.quic, code.0, reason),
            None => self.connection.quic.close(wire::var(code.0), reason.as_bytes()),
        }
    }

    /// Closes the connection and ends the session's tasks.
    pub fn end(&self) {
        self.close(code::Session::NO_ERROR, "");
        self.set_setup(ReceivedSetup::Missed);
        self.tasks.end();
    }

    /// Stores the options of the peer's SETUP. They decide how its requests are read.
    pub fn set_ready(&self, setup: &message::SetupOptions) {
        let _ = self.dialect.set(Dialect::from_setup(setup)); // SETUP arrives only once, so no earlier value is replaced.
        let knows = setup.switching_algorithms.contains(&Assignment::ALGORITHM);
        self.knows_switching_sets.store(knows, Relaxed);
        if let Some(id) = setup.hop_id.filter(|_| self.is_in_cluster()) {
            let _ = self.hop.set(PeerHop { id, cost: setup.relay_cost }); // SETUP arrives only once, so no earlier value is replaced.
        }
        self.max_request_updates.store(setup.max_request_updates.unwrap_or(0), Relaxed);
        self.set_setup(ReceivedSetup::Received);
    }

    /// Reports whether this relay's SETUP to the peer contains its hop ID.
    pub fn is_in_cluster(&self) -> bool {
        !self.is_upstream() && self.hub.hop().is_some() && (self.hub.is_in_cluster || self.is_link())
    }

    fn set_setup(&self, to: ReceivedSetup) {
        self.setup.send_if_modified(|setup| {
            let awaited = *setup == ReceivedSetup::Awaited;
            if awaited {
                *setup = to;
            }
            awaited
        });
    }

    /// Waits for the peer's SETUP.
    ///
    /// # Errors
    /// Returns an error if the session ended first.
    pub async fn until_ready(&self) -> Result<(), SessionError> {
        let mut setup = self.setup.subscribe();
        match setup.wait_for(|setup| *setup != ReceivedSetup::Awaited).await.as_deref() {
            Ok(ReceivedSetup::Received) => Ok(()),
            _ => Err(SessionError::Lost("closed before SETUP".into())),
        }
    }

    /// Sends GOAWAY with `uri` and `timeout`, and refuses new requests from now on. An empty `uri` means the present
    /// one. Tracks of a client move to other sources as soon as there are any.
    pub fn start_drain(&self, uri: &str, timeout: Duration) {
        // A client may not send a URI in GOAWAY (draft-18, "GOAWAY").
        let uri = if self.is_dialed() { "" } else { uri };
        let _ = self.goaway.set((uri.to_owned(), timeout)); // Later calls do not change the GOAWAY.
        self.going_away.store(true, Relaxed);
        self.drain.notify_one();
        if !self.is_relay() {
            self.hub().set_suspect(self.id(), true);
        }
    }

    /// Waits for [`Self::start_drain`], and returns the GOAWAY to send.
    pub async fn until_drain(&self) -> GoAway {
        self.drain.notified().await;
        let (uri, timeout) = self.goaway.get().cloned().unwrap_or_default();
        let timeout = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        GoAway { uri, timeout, request_id: Some(self.unprocessed_request()) }
    }

    pub fn peer_goes_away(&self) -> bool {
        self.peer_goes_away.borrow().is_some()
    }

    /// Reports whether tracks should leave this session: its peer has sent GOAWAY, or is a client that this relay has
    /// sent away.
    pub fn is_ending(&self) -> bool {
        self.peer_goes_away() || !self.is_relay() && self.going_away.load(Relaxed)
    }

    /// Records that this session has taken over the tracks of earlier sessions with the upstream relay.
    pub fn set_attached(&self) {
        self.attached.store(true, Relaxed);
    }

    pub fn is_attached(&self) -> bool {
        self.attached.load(Relaxed)
    }

    /// Stores the URI of a GOAWAY that arrived on the control stream.
    pub fn set_peer_goes_away(&self, uri: String) {
        self.peer_goes_away.send_replace(Some(uri));
    }

    /// Waits for the peer's GOAWAY, and returns its URI. An empty URI means the present one.
    pub async fn until_peer_goes_away(&self) -> String {
        let mut goaway = self.peer_goes_away.subscribe();
        let uri = goaway.wait_for(|goaway| goaway.is_some()).await;
        uri.ok().and_then(|uri| uri.clone()).unwrap_or_default() // The sender is in `self`, so waiting cannot fail.
    }

    /// Checks the request ID of a message that opens a request or updates one.
    ///
    /// # Errors
    /// Returns an error if the ID was used before, or has the parity of this relay's own IDs.
    pub fn check_request_id(&self, message: &Message) -> Result<(), SessionError> {
        // One side's request IDs are all even and the other's all odd, so `id / 2` numbers them without gaps.
        let Some(id) = message.request_id() else { return Ok(()) };
        let theirs = u64::from(self.is_dialed());
        if id % 2 == theirs && self.seen_requests.lock().take(id / 2) {
            return Ok(());
        }
        Err(SessionError::Violation {
            code: code::Session::INVALID_REQUEST_ID,
            reason: format!("request ID {id} of {} is repeated or of the wrong side", message.name()),
        })
    }

    /// Reports whether the peer has used a request ID, or can never use it because it is one of ours.
    pub fn has_seen(&self, id: u64) -> bool {
        id % 2 != u64::from(self.is_dialed()) || self.seen_requests.lock().contains(id / 2)
    }

    /// Returns the smallest of the peer's request IDs that the peer has not used.
    fn unprocessed_request(&self) -> u64 {
        self.seen_requests.lock().first_unseen() * 2 + u64::from(self.is_dialed())
    }

    /// Returns the request ID of the next request that this relay sends.
    pub fn next_request_id(&self) -> u64 {
        self.next_request.fetch_add(2, Relaxed)
    }

    /// Returns a new number for a subscription or FETCH response. The transport's events about the streams that it
    /// sends media on contain the number, so that they reach the subscription or response.
    pub fn next_owner(&self) -> u64 {
        self.next_owner.fetch_add(1, Relaxed)
    }

    /// Ends a track for all its subscribers and publishers, because the peer has sent malformed objects of the track.
    pub fn malformed(&self, track: &LiveTrack, malformed: TrackMalformed) {
        let now = Instant::now();
        OperatorCounters::count(&self.hub.counters.malformed_tracks);
        warn!(session = self.id, track = %track.name().typed(), reason = %malformed, "the session's peer sent a malformed track: its subscriptions end");
        track.fail(malformed, now, &mut Outbox::default());
    }

    /// Answers a request with REQUEST_ERROR, and ends the stream.
    pub async fn refuse(&self, mut send: Answers, error: RequestError) -> Result<(), SessionError> {
        OperatorCounters::count(&self.hub.counters.request_errors);
        debug!(session = self.id, ?error, "refused a request of the session's peer");
        wire::send_last(&mut send, error).await;
        Ok(())
    }
}
