//! The state of one session of an application, from the first message about it until both hosts have released it.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    time::{Duration, Instant},
};

use millrace_graft::packet::{
    FunctionService, PacketRuntime,
    choose::{ChoiceRefusal, Offer},
};
use millrace_graft_kernel::packet::SessionEnds;
use millrace_messages::{ChangeOrigin, SessionRefusal, Want};
use tracing::warn;

use super::{peer_message::PeerMessage, quality::Quality};

/// Pause before an unanswered message is sent again. It doubles from `AGAIN` up to `AGAIN_MOST`.
pub const AGAIN: Duration = Duration::from_millis(100);
const AGAIN_MOST: Duration = Duration::from_secs(1);
/// Silence after which the peer's daemon counts as ended or unreachable.
pub const SILENCE: Duration = Duration::from_secs(10);
/// Maximum length in characters of the reason for a refusal or for the end of a session, as it is sent to the other
/// daemon.
const REASON_MAX: usize = 160;

/// A session of an application, as one of its two hosts sees it: it is being opened, open, or ending.
///
/// The session broker adds it when an application of this host asks for a session, or when `Open` of the other daemon
/// arrives. [`SessionStage`] has the states, which only the broker changes. [`Self::begin`] is called once, after both
/// hosts have changed to the graft and before the application uses the socket. The broker removes the session after its
/// end, and when the other host refuses it. Until then the session's pooled socket belongs to it alone: no other
/// session has the same `ends`. At most one message and one `Finish` wait for an answer, and both are repeated until
/// they get it. A message about the session's next step replaces the one before it.
pub struct ClientSession {
    pub peer: usize,
    pub ends: SessionEnds,
    pub service: String,
    pub stage: SessionStage,
    /// True if an application on this host has requested the session, false if the peer's has.
    pub is_own: bool,
    /// Connection of the application here, or `None` once it has disconnected.
    pub client: Option<u64>,
    pub user: u32,
    /// Name of the graft that the session uses, or to which it is changing.
    pub graft: String,
    pub want: Want,
    /// True if the application's client library, and not the graft, puts the session's messages in order, beginning
    /// with the first message.
    pub in_order: bool,
    /// Time at which the application requested the session.
    pub since: Instant,
    /// Message that the other daemon has not answered yet.
    pub said: Option<PendingMessage>,
    /// The message `Finish`, kept until the other daemon has answered it.
    pub finish: Option<PendingMessage>,
    /// Number of messages that the application on this host has sent, known once it has finished sending.
    pub sent: Option<u32>,
    /// True once the application on this host was told that the application on the other host has finished sending.
    pub has_told_finish: bool,
    /// Originator of the change of the graft (application, daemon or other host), while the change is in progress.
    pub changing: Option<ChangeOrigin>,
    /// True if the other host has asked for reports on the datagrams that arrive at this host.
    pub is_asked: bool,
    pub quality: Quality,
}

/// State of a session. On the host that opens it, the states are `Asking`, `Waiting`, `Swapping`, `Going` and `Open`.
/// On the host that accepts it, the state is `Swapping` until the message `Go` arrives, and then `Open`. Messages of
/// the other daemon and events of the runtime change the state. Every state can change to `Ending`, and a session that
/// is not open after `PATIENCE` ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionStage {
    /// The message `Open` was sent to the other daemon, which has not answered it yet.
    Asking,
    /// The other daemon has accepted the session. The pooled socket changes to the session's graft as soon as it has no
    /// other change in progress.
    Waiting,
    /// The pooled socket of this host changes to the session's graft. On the host that accepts the session, the boolean
    /// is true once the socket has changed.
    Swapping(bool),
    /// The message `Go` was sent to the other daemon, and its answer `Ready` is awaited.
    Going,
    /// The session is open: the applications at both ends use it.
    Open,
    /// The session is over. Until this time, applications can still read datagrams that have arrived.
    Ending(Instant),
}

/// A message that is repeated until it is answered or withdrawn.
pub struct PendingMessage {
    say: PeerMessage,
    pub next: Instant,
    pause: Duration,
}

impl PendingMessage {
    pub fn new(say: PeerMessage) -> Self {
        Self { say, next: Instant::now(), pause: AGAIN }
    }

    pub fn due_message(&mut self, now: Instant) -> Option<&PeerMessage> {
        if now < self.next {
            return None;
        }
        self.next = now + self.pause;
        self.pause = (2 * self.pause).min(AGAIN_MOST);
        Some(&self.say)
    }
}

pub type Denied = (SessionRefusal, String);

pub fn denied(refused: &ChoiceRefusal) -> Denied {
    let why = match refused {
        ChoiceRefusal::Redundant(_) => SessionRefusal::Redundant,
        ChoiceRefusal::Impossible(_) => SessionRefusal::Impossible,
    };
    (why, refused.to_string())
}

impl ClientSession {
    /// Creates the state of a session that the other host opens.
    pub fn offered(peer: usize, ends: SessionEnds, service: String, client: u64, user: u32) -> Self {
        Self {
            peer,
            ends,
            service,
            stage: SessionStage::Swapping(false),
            is_own: false,
            client: Some(client),
            user,
            graft: String::new(),
            want: Want::default(),
            in_order: false,
            since: Instant::now(),
            said: None,
            finish: None,
            sent: None,
            has_told_finish: false,
            changing: None,
            is_asked: false,
            quality: Quality::default(),
        }
    }

    /// Starts to measure the session's loss, delay and throughput. Both hosts have restarted the graft, and no
    /// application has sent anything yet.
    pub fn begin(&mut self, runtime: &mut PacketRuntime) {
        if let (Some(seen), Ok(Some(traffic))) = (runtime.see(&self.ends), runtime.traffic(&self.ends)) {
            self.quality.begin(&traffic);
            self.graft = seen.graft;
        }
        if let Err(error) = runtime.tell_room(&self.ends) {
            warn!("an application will not be told when it can send again: {error}");
        }
    }

    pub fn services(&self, offers: &[Offer]) -> Vec<String> {
        let found = offers.iter().find(|offer| offer.graft == self.graft);
        let of_graft = found.into_iter().flat_map(|offer| &offer.services).copied();
        let all: BTreeSet<_> = of_graft.chain(self.in_order.then_some(FunctionService::Order)).collect();
        all.into_iter().map(|service| service.name().to_owned()).collect()
    }

    pub fn may_adapt(&self) -> bool {
        self.want.adapt && self.changing.is_none()
    }
}

/// Adds a session under its ID. The other daemon also chooses random IDs, and may send one that another session here
/// already has.
///
/// # Errors
/// A session with this ID exists already, and is not changed.
pub fn insert(
    sessions: &mut BTreeMap<u64, ClientSession>,
    id: u64,
    session: ClientSession,
) -> Result<(), Denied> {
    match sessions.entry(id) {
        Entry::Vacant(place) => {
            place.insert(session);
            Ok(())
        }
        Entry::Occupied(_) => {
            Err((SessionRefusal::Malformed, "another session already has this number".to_owned()))
        }
    }
}

/// Reports whether the application's client library has to put messages in order with this graft.
pub fn waits(want: &Want, offer: &Offer) -> bool {
    want.services.contains(FunctionService::Order.name()) && !offer.services.contains(&FunctionService::Order)
}

pub fn short(reason: &str) -> String {
    reason.chars().take(REASON_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A malicious peer could answer our `Open` with an `Open` of the same session ID. If that were accepted, a
    /// listening application of another user on this host could end our application's session.
    #[test]
    fn session_id_in_use_is_refused() {
        let ends = |port| SessionEnds {
            local: ([192, 0, 2, 1], port).into(),
            remote: ([192, 0, 2, 2], port).into(),
        };
        let mut sessions = BTreeMap::new();
        let own =
            ClientSession { is_own: true, ..ClientSession::offered(0, ends(1), "own".to_owned(), 7, 1000) };
        insert(&mut sessions, 5, own).unwrap();
        for peer in [0, 1] {
            let theirs = ClientSession::offered(peer, ends(2), "theirs".to_owned(), 8, 1001);
            assert_eq!(insert(&mut sessions, 5, theirs).unwrap_err().0, SessionRefusal::Malformed);
            let kept = sessions.get(&5).unwrap();
            assert!(kept.is_own && kept.client == Some(7) && kept.user == 1000 && kept.ends == ends(1));
        }
    }
}
