//! What all requests of one session have in common.

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
    Draft, Message, code,
    message::{self, GoAway, RequestError},
    param::Assignment,
    tracks::{account::Account, malformed::Malformed},
};
use millrace_transport::Connection;
use millrace_webtransport::{RecvStream, SendStream, Tunnel};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tracing::{debug, info, warn};

use super::{
    dialect::Dialect,
    quotas::Quotas,
    request_ids::RequestIds,
    rights::{Admitted, Authority},
    tasks::Tasks,
    uses::Uses,
};
use crate::{
    access::Access,
    hub::{Counters, Hub, Requester},
    incomplete::{Held, Incomplete},
    live::LiveTrack,
    outbox::Outbox,
    wire::{self, Answers, GoAways, MessageReader, SessionError},
};

/// The peer, what it may use, and the tasks that end with its session.
pub struct Context {
    id: u64,
    hub: Arc<Hub>,
    connection: Arc<Connection>,
    uses: Arc<Uses>,
    /// The peer is the configured upstream relay, and we are the QUIC client.
    is_upstream: bool,
    /// What it speaks.
    draft: Draft,
    /// What its streams lie in, if that is a session of WebTransport.
    tunnel: Option<Tunnel>,
    since: Instant,
    dialect: OnceLock<Dialect>,
    knows_switching_sets: AtomicBool,
    /// Of its SETUP; 0 for any number.
    max_request_updates: AtomicU64,
    setup: watch::Sender<Setup>,
    quotas: Quotas,
    incomplete: Arc<Incomplete>,
    authority: Authority,
    tasks: Tasks,
    /// IDs that the peer has used.
    seen_requests: Mutex<RequestIds>,
    next_request: AtomicU64,
    next_owner: AtomicU64,
    drain: Notify,
    /// What the peer is told with GOAWAY.
    goaway: OnceLock<(String, Duration)>,
    going_away: AtomicBool,
    /// Where the peer wants us to go on, once its GOAWAY has come.
    peer_goes_away: watch::Sender<Option<String>>,
    attached: AtomicBool,
}

/// The peer's SETUP, before which nothing else that it sends is looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Setup {
    Awaited,
    Received,
    /// The session ended before.
    Missed,
}

impl Context {
    pub fn new(
        hub: Arc<Hub>,
        access: &Arc<Access>,
        connection: Arc<Connection>,
        is_upstream: bool,
        tunnel: Option<Tunnel>,
    ) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Relaxed);
        connection.set_session(id as u32);
        let agreed = match &tunnel {
            Some(tunnel) => Draft::of_protocol(&tunnel.asked.protocol),
            None => connection.protocol().and_then(|protocol| Draft::of_alpn(&protocol)),
        };
        Arc::new(Self {
            id,
            hub,
            uses: Uses::new(Arc::clone(&connection), is_upstream),
            connection,
            is_upstream,
            // Nothing else is offered, but where nothing is.
            draft: agreed.unwrap_or(Draft::D18),
            tunnel,
            since: Instant::now(),
            dialect: OnceLock::new(),
            knows_switching_sets: AtomicBool::new(false),
            max_request_updates: AtomicU64::new(0),
            setup: watch::Sender::new(Setup::Awaited),
            quotas: if is_upstream { Quotas::of_upstream() } else { Quotas::default() },
            incomplete: Arc::default(),
            authority: Authority::new(access),
            tasks: Tasks::new(),
            seen_requests: Mutex::default(),
            // Client request IDs are even, server's odd.
            next_request: AtomicU64::new(u64::from(!is_upstream)),
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

    /// Uses that the session makes of the relay.
    pub fn uses(&self) -> &Arc<Uses> {
        &self.uses
    }

    /// What the peer speaks.
    pub fn draft(&self) -> Draft {
        self.draft
    }

    /// How the peer reads its draft, once its SETUP is there.
    pub fn dialect(&self) -> Dialect {
        self.dialect.get().copied().unwrap_or_default()
    }

    /// Whether the peer's SETUP, once it is there, has said so.
    pub fn knows_switching_sets(&self) -> bool {
        self.knows_switching_sets.load(Relaxed)
    }

    /// How many updates of a request of ours may wait for their answers.
    pub fn max_request_updates(&self) -> u64 {
        match self.max_request_updates.load(Relaxed) {
            0 => u64::MAX,
            most => most,
        }
    }

    pub fn is_upstream(&self) -> bool {
        self.is_upstream
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

    /// Counts what a stream of the peer holds that is not complete.
    pub fn incomplete(&self) -> Held {
        self.incomplete.stream()
    }

    /// Reads a request stream, of which `buffer` was read before.
    pub fn request_reader(&self, recv: RecvStream, buffer: BytesMut) -> MessageReader {
        MessageReader::new(self.draft, recv, buffer, self.incomplete(), GoAways::on_request(self.is_upstream))
    }

    /// Our direction of a stream.
    pub fn answers(&self, send: SendStream) -> Answers {
        Answers::new(self.draft, send)
    }

    /// Reads the peer's control stream, of which `buffer` was read before.
    pub fn control_reader(&self, recv: RecvStream, buffer: BytesMut) -> MessageReader {
        MessageReader::new(self.draft, recv, buffer, self.incomplete(), GoAways::on_control(self.is_upstream))
    }

    /// What the peer's groups take up in the cache.
    pub fn account(&self) -> &Arc<Account> {
        self.authority.account()
    }

    /// What the peer may do.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// The session, as publishers are chosen for it.
    pub fn requester(&self) -> Requester {
        Requester { session: self.id, is_upstream: self.is_upstream }
    }

    /// Whether a request of the peer may be served. Asked before any state is made for it. The inner error is what the
    /// request is refused with.
    ///
    /// # Errors
    /// What to close the session with.
    pub fn admit(&self, message: &Message) -> Result<Result<Admitted, RequestError>, SessionError> {
        let admitted = self.authority.request(message)?;
        if self.going_away.load(Relaxed) {
            return Ok(Err(RequestError::new(code::Request::GOING_AWAY, "the relay is going away")));
        }
        Ok(admitted)
    }

    /// Runs `work` until it or the session is over; its failure closes the session. Returns `false` if the session is
    /// over already.
    pub fn spawn(
        self: &Arc<Self>,
        work: impl Future<Output = Result<(), SessionError>> + Send + 'static,
    ) -> bool {
        let context = Arc::clone(self);
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
                Counters::count(&self.hub.counters.protocol_violations);
                warn!(session = self.id, %code, reason, "closing the session");
                self.close(code, &reason);
            }
            SessionError::Refused { code, reason } => {
                info!(session = self.id, %code, reason, "closing the session");
                self.close(code, &reason);
            }
            SessionError::Lost(reason) => debug!(session = self.id, reason, "a stream is lost"),
        }
    }

    /// Logs that the session has ended by itself, and of what: `reason`, unless the connection knows better.
    pub fn is_over(&self, reason: &str) {
        let closed = self.connection.quic.close_reason().map(|closed| match closed {
            quinn::ConnectionError::LocallyClosed => "closed by this relay".to_owned(),
            quinn::ConnectionError::TimedOut => "nothing came for the idle time-out".to_owned(),
            closed => closed.to_string(),
        });
        info!(
            session = self.id,
            remote = %self.connection.quic.remote_address(),
            seconds = self.age().as_secs(),
            reason = short(closed.as_deref().unwrap_or(reason)),
            "session over"
        );
    }

    /// Closes the connection.
    pub fn close(&self, code: code::Session, reason: &str) {
        match &self.tunnel {
            Some(tunnel) => tunnel.close(&self.connection.quic, code.0, reason),
            None => self.connection.quic.close(wire::var(code.0), reason.as_bytes()),
        }
    }

    /// Closes the connection, and lets the session's tasks go.
    pub fn end(&self) {
        self.close(code::Session::NO_ERROR, "");
        self.set_setup(Setup::Missed);
        self.tasks.end();
    }

    /// The peer's SETUP is there, and what it means by its requests is known.
    pub fn set_ready(&self, setup: &message::Setup) {
        let _ = self.dialect.set(Dialect::of(setup)); // said once
        let knows = setup.switching_algorithms.contains(&Assignment::ALGORITHM);
        self.knows_switching_sets.store(knows, Relaxed);
        self.max_request_updates.store(setup.max_request_updates.unwrap_or(0), Relaxed);
        self.set_setup(Setup::Received);
    }

    fn set_setup(&self, to: Setup) {
        self.setup.send_if_modified(|setup| {
            let awaited = *setup == Setup::Awaited;
            if awaited {
                *setup = to;
            }
            awaited
        });
    }

    /// Waits for the peer's SETUP.
    ///
    /// # Errors
    /// The session ended first.
    pub async fn until_ready(&self) -> Result<(), SessionError> {
        let mut setup = self.setup.subscribe();
        match setup.wait_for(|setup| *setup != Setup::Awaited).await.as_deref() {
            Ok(Setup::Received) => Ok(()),
            _ => Err(SessionError::Lost("closed before SETUP".into())),
        }
    }

    /// Tells the peer to go away, to `uri` if that is not empty, within `timeout`; new requests are refused from now on.
    pub fn start_drain(&self, uri: &str, timeout: Duration) {
        // Servers do not move.
        let uri = if self.is_upstream { "" } else { uri };
        let _ = self.goaway.set((uri.to_owned(), timeout)); // said once
        self.going_away.store(true, Relaxed);
        self.drain.notify_one();
    }

    /// Waits for [`Self::start_drain`], and returns what to say.
    pub async fn until_drain(&self) -> GoAway {
        self.drain.notified().await;
        let (uri, timeout) = self.goaway.get().cloned().unwrap_or_default();
        let timeout = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        GoAway { uri, timeout, request_id: Some(self.unprocessed_request()) }
    }

    pub fn peer_goes_away(&self) -> bool {
        self.peer_goes_away.borrow().is_some()
    }

    /// All that came from earlier sessions with the upstream relay comes from this one, as far as it can.
    pub fn set_attached(&self) {
        self.attached.store(true, Relaxed);
    }

    pub fn is_attached(&self) -> bool {
        self.attached.load(Relaxed)
    }

    /// GOAWAY has come on the control stream, with this URI.
    pub fn set_peer_goes_away(&self, uri: String) {
        self.peer_goes_away.send_replace(Some(uri));
    }

    /// Waits for GOAWAY, and returns its URI: empty for the same one as before.
    pub async fn until_peer_goes_away(&self) -> String {
        let mut goaway = self.peer_goes_away.subscribe();
        let uri = goaway.wait_for(|goaway| goaway.is_some()).await;
        uri.ok().and_then(|uri| uri.clone()).unwrap_or_default() // the sender is in `self`
    }

    /// Checks the request ID of a message that uses one up.
    ///
    /// # Errors
    /// It was used before, or is one of ours.
    pub fn check_request_id(&self, message: &Message) -> Result<(), SessionError> {
        let Some(id) = message.request_id() else { return Ok(()) };
        let theirs = u64::from(self.is_upstream);
        if id % 2 == theirs && self.seen_requests.lock().take(id / 2) {
            return Ok(());
        }
        Err(SessionError::Violation {
            code: code::Session::INVALID_REQUEST_ID,
            reason: format!("request ID {id} of {} is repeated or of the wrong side", message.name()),
        })
    }

    /// Whether the peer has used a request ID, or never will: it is one of ours.
    pub fn has_seen(&self, id: u64) -> bool {
        id % 2 != u64::from(self.is_upstream) || self.seen_requests.lock().contains(id / 2)
    }

    /// The smallest request ID of the peer that was not processed.
    fn unprocessed_request(&self) -> u64 {
        self.seen_requests.lock().first_unseen() * 2 + u64::from(self.is_upstream)
    }

    /// For a request of ours.
    pub fn next_request_id(&self) -> u64 {
        self.next_request.fetch_add(2, Relaxed)
    }

    /// A tag for streams of the data plane.
    pub fn next_owner(&self) -> u64 {
        self.next_owner.fetch_add(1, Relaxed)
    }

    /// What the peer has sent shows that a track is malformed, which ends it.
    pub fn malformed(&self, track: &LiveTrack, malformed: Malformed) {
        let now = Instant::now();
        Counters::count(&self.hub.counters.malformed_tracks);
        warn!(session = self.id, track = %track.name().typed(), reason = %malformed, "a malformed track");
        track.fail(malformed, now, &mut Outbox::default());
    }

    /// Answers with REQUEST_ERROR.
    pub async fn refuse(&self, mut send: Answers, error: RequestError) -> Result<(), SessionError> {
        Counters::count(&self.hub.counters.request_errors);
        debug!(session = self.id, ?error, "request refused");
        wire::send_last(&mut send, error).await;
        Ok(())
    }
}
