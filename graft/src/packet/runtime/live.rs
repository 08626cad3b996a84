//! What is known of a session while it is open.

use std::time::Duration;

use millrace_graft_kernel::joint::{Joint, Progress, Protocol, Reason, Tick};

use super::super::agree::{Agreement, Since};
use super::super::budget::Meter;
use super::super::keys::{self, Cipher, Secret};
use super::super::losses::{Before, Count};
use super::super::settings::{Graft, Session, Settings};
use super::super::versions::moves;
use super::super::when::Watch;
use super::super::{Change, SessionStatus};
use super::paths::Routes;
use crate::Error;

/// A session that has sent nothing for so long says what it has sent, a few times; where it waits for acknowledgements, until
/// they come, each time after twice as long.
const PAUSE: Duration = Duration::from_millis(100);
pub(super) const LAST_WORDS: u32 = 5;
/// Between two looks at that.
pub(super) const CLOCK: Duration = Duration::from_millis(20);

pub(super) struct Live {
    pub session: Session,
    /// That both ends have agreed on last.
    pub graft: Graft,
    /// That takes its place, from when it is taken here until both ends send by it.
    pub next: Option<Graft>,
    /// In whose place `graft` came, as long as its packets may be under way.
    pub before: Option<Graft>,
    pub agreement: Agreement,
    pub meter: Meter,
    pub proposed: Option<Duration>,
    pub wanted: Option<String>,
    pub cut: Duration,
    /// How `next` comes in the place of `graft`; then how it came.
    pub change: Change,
    /// What was lost since it began anew.
    pub count: Option<Count>,
    pub is_counted: bool,
    /// What had been counted then, or when it was opened.
    pub begun: Before,
    /// Over its budget, or could not be swapped.
    pub trouble: Option<String>,
    pub said: LastWords,
    /// When the other end was started, if it has said so.
    pub peer: Option<Since>,
    /// When it is greeted next, until then.
    pub greeting: Duration,
    /// Why the latest word could not be sent. It is lost, as others are.
    pub mute: Option<String>,
    pub swaps: u64,
    pub swaps_failed: u64,
    pub lost_sent: u64,
    pub lost_received: u64,
    pub sealed: Option<Sealed>,
    pub ruled: Ruled,
    /// If it has several paths.
    pub routes: Option<Routes>,
}

pub(super) struct Sealed {
    pub cipher: Cipher,
    pub secret: Secret,
    pub agreement: keys::Agreement,
    /// What the other end seals with, if that is something else.
    pub other: Option<u8>,
}

/// What rules by the round trip have said of it.
#[derive(Default)]
pub(super) struct Ruled {
    pub watch: Watch,
    /// As it was looked at last: what has come there since is what a round trip is known by.
    pub seen: (u32, u32),
    pub due: Option<Due>,
}

/// A change that is to be, and has not come about yet.
pub(super) struct Due {
    pub graft: String,
    pub why: String,
    pub next: Duration,
}

/// What was said about the packets that were sent last.
#[derive(Default)]
pub(super) struct LastWords {
    pub next: u32,
    pub acked: u32,
    pub at_ns: u64,
    pub count: u32,
}

impl LastWords {
    /// As long as nothing is heard: two round trips, and longer each time, as RFC 8085 has it.
    pub fn patience(&self, tick: &Tick, is_waiting: bool) -> Duration {
        match tick.round_trip {
            Some(round_trip) if is_waiting => (2 * round_trip).max(CLOCK) * (1 << self.count.min(5)),
            _ => PAUSE,
        }
    }
}

impl Live {
    pub fn new(session: Session, graft: Graft, agreement: Agreement, sealed: Option<Sealed>) -> Self {
        Self {
            session,
            graft,
            next: None,
            before: None,
            agreement,
            meter: Meter::default(),
            proposed: None,
            wanted: None,
            cut: Duration::ZERO,
            change: Change::default(),
            count: None,
            is_counted: false,
            begun: Before::default(),
            trouble: None,
            said: LastWords::default(),
            peer: None,
            greeting: Duration::ZERO,
            mute: None,
            swaps: 0,
            swaps_failed: 0,
            lost_sent: 0,
            lost_received: 0,
            sealed,
            ruled: Ruled::default(),
            routes: None,
        }
    }

    /// With this graft, since the other end was started anew.
    pub fn begin(&mut self, graft: Graft) {
        self.graft = graft;
        (self.next, self.before, self.count) = (None, None, None);
        (self.proposed, self.trouble, self.said) = (None, None, LastWords::default());
        self.ruled = Ruled::default();
    }

    pub fn next(&self) -> Option<Duration> {
        let keys = self.sealed.as_ref().and_then(|sealed| sealed.agreement.next());
        let count = self.count.as_ref().map(Count::next);
        self.agreement.next().into_iter().chain(keys).chain(count).chain(self.greets()).min()
    }

    /// As long as the other end is not known, and can hear it.
    pub fn greets(&self) -> Option<Duration> {
        (self.peer.is_none() && self.is_open()).then_some(self.greeting)
    }

    /// Why the other end has not been heard of yet, as far as that can be told. Anybody may send by another protocol: that is a guess.
    pub fn unheard(&self, counts: &[(Reason, u64)]) -> Option<String> {
        let protocol = self.session.protocol;
        let some = |wanted: Reason| counts.iter().any(|(reason, count)| *reason == wanted && *count > 0);
        let is_heard = match self.sealed {
            Some(_) => self.is_open(),
            // Its words may be among what a full path loses.
            None => self.peer.is_some() || some(Reason::LetIn),
        };
        if is_heard {
            return None;
        }
        let by_another = some(Reason::OtherProtocol);
        let has_other_cipher = self.sealed.as_ref().is_some_and(|sealed| sealed.other.is_some());
        let is_in = if self.sealed.is_some() { "has it in clear" } else { "has it sealed" };
        let path = match protocol {
            Protocol::Udp => "",
            Protocol::Ip253 => "; or the path does not let IP protocol 253 through",
        };
        let why = match (has_other_cipher, by_another) {
            (true, _) => "the other end has another cipher".to_owned(),
            (_, true) => {
                format!(
                    "what comes does not come by protocol = \"{protocol}\", which has to be the same at both ends"
                )
            }
            _ => format!("the other end is not there, has another key, or {is_in}{path}"),
        };
        Some(match self.sealed {
            Some(_) => format!("nothing passes, since there are no keys yet: {why}"),
            None => format!("the other end is not heard: {why}"),
        })
    }

    /// Whether datagrams can pass.
    pub fn is_open(&self) -> bool {
        self.sealed.as_ref().is_none_or(|sealed| sealed.agreement.has_keys())
    }

    /// Grafts whose functions it uses.
    pub fn grafts(&self) -> impl Iterator<Item = &Graft> {
        [Some(&self.graft), self.next.as_ref(), self.before.as_ref()].into_iter().flatten()
    }

    /// What it has to change to by other settings, which name another graft for it (`is_wanted`) or have another list for the one
    /// that it has.
    ///
    /// # Errors
    /// It cannot.
    pub fn becomes(
        &self,
        session: &Session,
        settings: &Settings,
        is_wanted: bool,
    ) -> Result<Option<Graft>, Error> {
        let name = &session.name;
        if self.session.key != session.key
            || self.session.name != *name
            || self.session.cipher != session.cipher
            || self.session.protocol != session.protocol
            || self.session.paths != session.paths
        {
            return Err(Error::Settings(format!(
                "session {name}: its name, key, cipher, protocol and paths do not change while it runs"
            )));
        }
        let wanted = if is_wanted { &session.graft } else { &self.graft.name };
        let used = || Error::Used { name: wanted.clone(), user: format!("session {name}") };
        let graft = settings.grafts.get(wanted).ok_or_else(used)?;
        if graft.list.id == self.agreement.list() {
            return Ok(None);
        }
        if self.agreement.next().is_some() {
            return Err(Error::Busy(name.clone()));
        }
        self.check_way_to(graft, graft.anew)?;
        Ok(Some(graft.clone()))
    }

    /// Whether its functions can go on with what they know.
    pub fn check_way_to(&self, graft: &Graft, anew: bool) -> Result<(), Error> {
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

    /// Takes what is not of the list from settings that are new; returns the graft if that has changed.
    pub fn refreshed(&mut self, settings: &Settings) -> Option<&Graft> {
        let graft = settings.grafts.get(&self.graft.name)?;
        if graft.list != self.graft.list || *graft == self.graft {
            return None;
        }
        self.graft = graft.clone();
        Some(&self.graft)
    }

    pub fn status(&self, counts: &[(Reason, u64)], progress: &Progress) -> SessionStatus {
        let packets = counts.iter().filter(|(_, count)| *count > 0);
        let means = Joint::ALL.into_iter().zip(self.meter.mean);
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
            protocol: self.session.protocol.name().to_owned(),
            sealed: self.sealed.as_ref().map_or("clear", |sealed| sealed.cipher.name()).to_owned(),
            has_keys: self.sealed.is_some() && self.is_open(),
            packets: packets.map(|(reason, count)| (reason.name().to_owned(), *count)).collect(),
            budget_ns: self.graft.budget_ns,
            mean_ns: means.filter_map(|(joint, mean)| Some((joint.name().to_owned(), mean?))).collect(),
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
