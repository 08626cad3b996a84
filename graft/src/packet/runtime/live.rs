//! The state of an open session.

use std::time::Duration;

use millrace_graft_kernel::packet::{FunctionHook, PacketReason, SessionProgress, Tick};

use super::super::agree::{ListAgreement, Since};
use super::super::budget::BudgetMeter;
use super::super::keys::{self, AeadCipher, FrameKey, SessionSecret};
use super::super::losses::{Before, LossCount};
use super::super::settings::{GraftSetting, SessionSetting, Settings};
use super::super::versions::moves;
use super::super::when::RuleWatch;
use super::super::{SessionChange, SessionStatus};
use super::paths::SessionRoutes;
use crate::Error;

/// Silence after which a session announces the number of its latest packet again, up to `ANNOUNCEMENTS_MAX` times. A
/// session that waits for acknowledgements repeats the announcement until they arrive, with a pause that doubles.
const PAUSE: Duration = Duration::from_millis(100);
pub(super) const ANNOUNCEMENTS_MAX: u32 = 5;
/// Interval at which a session's timer checks whether nothing was sent for `PAUSE`.
pub(super) const CLOCK: Duration = Duration::from_millis(20);

/// The state of one session that is open in the kernel, from the runtime's `open` until the settings name it no more.
///
/// Several state machines move independently: the agreement about the function list ([`ListAgreement`]), the agreement
/// about keys ([`keys::KeyAgreement`], once the daemons have connected), the greeting, and the count of lost datagrams.
/// The greeting is repeated until the other end's start time (`peer`) is known. A later start time shows that the other
/// end was restarted. The runtime then calls [`Self::begin`], which forgets changes and counts in progress.
/// [`Self::next`] is the earliest time at which one of the four has to be called, and the runtime schedules it after
/// each change. A graft is `next` from its acceptance until both ends send with it, then `graft`, and after its
/// replacement `before`.
pub(super) struct LiveSession {
    pub session: SessionSetting,
    /// The latest graft (list of packet functions) on which both ends have agreed.
    pub graft: GraftSetting,
    /// The graft (list of packet functions) that replaces the field `graft`, from its acceptance at this end until both
    /// ends send with it.
    pub next: Option<GraftSetting>,
    /// The graft (list of packet functions) that was replaced last, while packets that were sent with it may be in
    /// flight.
    pub before: Option<GraftSetting>,
    pub agreement: ListAgreement,
    pub meter: BudgetMeter,
    /// Time at which this end has proposed another graft (list of packet functions), while the change is in progress.
    pub proposed: Option<Duration>,
    /// Name of the graft (list of packet functions) that this end has proposed.
    pub wanted: Option<String>,
    /// Time that the kernel took for this end's latest switch to another list of functions.
    pub cut: Duration,
    /// Kind of the pending change of the session's graft (list of packet functions): whether it keeps the session's
    /// state. If no change is pending, this is the kind of the latest one.
    pub change: SessionChange,
    /// The count of lost datagrams after the latest restart of the session.
    pub count: Option<LossCount>,
    /// True once the lost datagrams were reported in an event.
    pub is_counted: bool,
    /// Counters of datagrams at the time when the session was opened or last restarted.
    pub begun: Before,
    /// Problem of the session: its graft (list of packet functions) exceeds its time budget, or could not be changed.
    pub trouble: Option<String>,
    /// The latest announcements of the session's last packet number.
    pub said: LastAnnouncements,
    /// Start time of the other end, if it has reported that.
    pub peer: Option<Since>,
    /// Time of the next greeting, while the other end has not answered.
    pub greeting: Duration,
    /// Time of the latest greeting. If the other end could not open that greeting, it gets another one.
    pub greeted: Duration,
    /// True if the other end has to be greeted once more, although it has already answered.
    pub owes_greeting: bool,
    /// Reason why the latest message could not be sent. It is not handled as an error, since messages are repeated.
    pub mute: Option<String>,
    pub swaps: u64,
    pub swaps_failed: u64,
    pub lost_sent: u64,
    pub lost_received: u64,
    pub keying: Keying,
    pub ruled: Ruled,
    /// Paths, if the session has several.
    pub routes: Option<SessionRoutes>,
}

/// The state of a session's keys.
pub(super) struct Keying {
    /// Cipher of the session, or `None` for an unencrypted session, which only has the key that authenticates packet
    /// trailers.
    pub cipher: Option<AeadCipher>,
    /// The key for authenticating packet trailers that this end has generated. Both ends use the key of the end with
    /// the lower address or port.
    pub frames: FrameKey,
    /// The key agreement with the other daemon, or `None` if the daemons have not connected yet.
    pub line: Option<LiveLine>,
    /// True if the other end uses another cipher, or does not encrypt although this end does.
    pub is_unlike: bool,
}

/// The key agreement of one session, on the connection between the two daemons.
pub(super) struct LiveLine {
    /// The session's secret from the present connection, or from the latest one.
    pub secret: SessionSecret,
    pub agreement: keys::KeyAgreement,
}

/// The state of a session's rules that choose a graft (list of packet functions) by the round-trip time.
#[derive(Default)]
pub(super) struct Ruled {
    pub watch: RuleWatch,
    /// Numbers of acknowledged and delivered packets at the latest check. If both are unchanged, the measured
    /// round-trip time is outdated.
    pub seen: (u32, u32),
    pub due: Option<DueChange>,
}

/// A change to another graft (list of packet functions) that a rule requests and that was not made yet.
pub(super) struct DueChange {
    pub graft: String,
    pub why: String,
    pub next: Duration,
}

/// The latest announcements of the number of a session's last packet.
#[derive(Default)]
pub(super) struct LastAnnouncements {
    pub next: u32,
    pub acked: u32,
    pub at_ns: u64,
    pub count: u32,
}

impl LastAnnouncements {
    /// Returns how long to wait for an answer: two round trips, and twice as long after each repetition (RFC 8085).
    pub fn patience(&self, tick: &Tick, is_waiting: bool) -> Duration {
        match tick.round_trip {
            // The exponent is bounded, so the pause grows to at most 32 times the first one.
            Some(round_trip) if is_waiting => (2 * round_trip).max(CLOCK) * (1 << self.count.min(5)),
            _ => PAUSE,
        }
    }
}

impl LiveSession {
    pub fn new(
        session: SessionSetting,
        graft: GraftSetting,
        agreement: ListAgreement,
        keying: Keying,
    ) -> Self {
        Self {
            session,
            graft,
            next: None,
            before: None,
            agreement,
            meter: BudgetMeter::default(),
            proposed: None,
            wanted: None,
            cut: Duration::ZERO,
            change: SessionChange::default(),
            count: None,
            is_counted: false,
            begun: Before::default(),
            trouble: None,
            said: LastAnnouncements::default(),
            peer: None,
            greeting: Duration::ZERO,
            greeted: Duration::ZERO,
            owes_greeting: false,
            mute: None,
            swaps: 0,
            swaps_failed: 0,
            lost_sent: 0,
            lost_received: 0,
            keying,
            ruled: Ruled::default(),
            routes: None,
        }
    }

    /// Restarts the session with this graft (list of packet functions), after the other end was restarted.
    pub fn begin(&mut self, graft: GraftSetting) {
        self.graft = graft;
        // Changes of the graft and counts of lost datagrams from before the restart of the other end do not apply any
        // more.
        (self.next, self.before, self.count) = (None, None, None);
        (self.proposed, self.trouble, self.said) = (None, None, LastAnnouncements::default());
        self.ruled = Ruled::default();
    }

    pub fn next(&self) -> Option<Duration> {
        let keys = self.keying.line.as_ref().and_then(|line| line.agreement.next());
        let count = self.count.as_ref().map(LossCount::next);
        // The session wakes up at the earliest time of its list agreement, key agreement, loss count and greeting.
        self.agreement.next().into_iter().chain(keys).chain(count).chain(self.greets()).min()
    }

    /// Returns the time of the next greeting, if the other end has not answered yet and can open a greeting.
    pub fn greets(&self) -> Option<Duration> {
        ((self.peer.is_none() || self.owes_greeting) && self.is_open()).then_some(self.greeting)
    }

    /// Schedules another greeting, for an end that could not open the earlier one because it had no keys.
    pub fn owe_greeting(&mut self, now: Duration) {
        (self.owes_greeting, self.greeting) = (true, now);
    }

    /// Returns why nothing has arrived from the other end yet, as far as that is known.
    pub fn unheard(&self, counts: &[(PacketReason, u64)]) -> Option<String> {
        let peer = &self.session.peer;
        let some =
            |wanted: PacketReason| counts.iter().any(|(reason, count)| *reason == wanted && *count > 0);
        // The possible reasons are checked in the order in which a session starts: connection of the daemons, cipher,
        // keys, and then packets.
        if self.keying.line.is_none() {
            return Some(format!("nothing passes, since the daemon of peer {peer} is not connected yet"));
        }
        if self.keying.is_unlike {
            let here = self.keying.cipher.map_or("in clear", AeadCipher::name);
            return Some(format!(
                "nothing passes: the other end has another cipher than this one ({here}), or clear"
            ));
        }
        if !self.is_open() {
            return Some(format!(
                "nothing passes, since there are no keys yet: the daemon of peer {peer} does not have this session"
            ));
        }
        if self.peer.is_some() || some(PacketReason::LetIn) {
            return None;
        }
        Some("no packet has come from the other end: the path does not let its ports through".to_owned())
    }

    /// Reports whether datagrams can pass.
    pub fn is_open(&self) -> bool {
        self.keying.line.as_ref().is_some_and(|line| line.agreement.has_keys())
    }

    /// Returns the grafts (lists of packet functions) whose functions the session uses at present.
    pub fn grafts(&self) -> impl Iterator<Item = &GraftSetting> {
        [Some(&self.graft), self.next.as_ref(), self.before.as_ref()].into_iter().flatten()
    }

    /// Returns the graft (list of packet functions) that the session has to change to under new settings: either they
    /// name another graft for the session (`is_wanted`), or they change the functions of its graft.
    ///
    /// # Errors
    /// The session cannot change to the new settings or to that graft.
    pub fn becomes(
        &self,
        session: &SessionSetting,
        settings: &Settings,
        is_wanted: bool,
    ) -> Result<Option<GraftSetting>, Error> {
        let name = &session.name;
        if self.session.peer != session.peer
            || self.session.name != *name
            || self.session.cipher != session.cipher
            || self.session.paths != session.paths
        {
            return Err(Error::Settings(format!(
                "session {name}: its name, peer, cipher and paths cannot change while the daemon runs"
            )));
        }
        let wanted = if is_wanted { &session.graft } else { &self.graft.name };
        let used = || Error::Used { name: wanted.clone(), user: format!("session {name}") };
        let graft = settings.grafts.get(wanted).ok_or_else(used)?;
        // If the list of functions is the same, no agreement with the other end is needed.
        if graft.list.id == self.agreement.list() {
            return Ok(None);
        }
        if self.agreement.next().is_some() {
            return Err(Error::Busy(name.clone()));
        }
        self.check_way_to(graft, graft.anew)?;
        Ok(Some(graft.clone()))
    }

    /// Checks that the functions of a graft (list of packet functions) can continue with the session's present state.
    pub fn check_way_to(&self, graft: &GraftSetting, anew: bool) -> Result<(), Error> {
        match moves(&self.graft.functions, &graft.functions) {
            Err(no) if !anew => Err(Error::NoState {
                session: self.session.name.clone(),
                function: no.name,
                from: no.from,
                to: no.to,
            }),
            _ => Ok(()),
        }
    }

    /// Applies new settings of the session's graft (list of packet functions), except for the list itself. Returns the
    /// graft if its settings have changed.
    pub fn refreshed(&mut self, settings: &Settings) -> Option<&GraftSetting> {
        let graft = settings.grafts.get(&self.graft.name)?;
        // A changed function list has to be agreed on with the other end, and is not handled here.
        if graft.list != self.graft.list || *graft == self.graft {
            return None;
        }
        self.graft = graft.clone();
        Some(&self.graft)
    }

    pub fn status(&self, counts: &[(PacketReason, u64)], progress: &SessionProgress) -> SessionStatus {
        let packets = counts.iter().filter(|(_, count)| *count > 0);
        let means = FunctionHook::ALL.into_iter().zip(self.meter.mean);
        SessionStatus {
            name: self.session.name.clone(),
            local: self.session.ends.local.to_string(),
            remote: self.session.ends.remote.to_string(),
            graft: self.graft.name.clone(),
            changing_to: self.next.as_ref().map(|next| next.name.clone()),
            round_trip_us: progress
                .round_trip
                .map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX)),
            functions: self.graft.names(),
            sealed: self.keying.cipher.map_or("clear", AeadCipher::name).to_owned(),
            has_keys: self.is_open(),
            packets: packets.map(|(reason, count)| (reason.name().to_owned(), *count)).collect(),
            budget_ns: self.graft.budget_ns,
            mean_ns: means.filter_map(|(hook, mean)| Some((hook.name().to_owned(), mean?))).collect(),
            over_budget: self.meter.over,
            swaps: self.swaps,
            swaps_failed: self.swaps_failed,
            changed: (self.swaps > 0 && self.next.is_none()).then(|| self.change.clone()),
            lost_sent: self.lost_sent,
            lost_received: self.lost_received,
            paths: Vec::new(),
        }
    }
}
