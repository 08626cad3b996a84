//! Sessions in the kernel, and how their lists of functions change while datagrams pass.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use millrace_graft_kernel::joint::{self, Ends, Joint, Joints, Reason, Room, Tick};
use millrace_kernel::clock;

use self::hearing::Hearing;
use self::hops::Hops;
use self::live::{CLOCK, LAST_WORDS, LastWords, Live, Sealed};
use self::places::{Place, check_pacing};
use super::agenda::Agenda;
use super::agree::{Agreement, Since, Why, Word};
use super::budget::measure;
use super::function::Service;
use super::losses::Losses;
use super::settings::{Graft, Session, Settings};
use super::versions::Version;
use super::{Change, Status};
use crate::Error;

/// Between two looks at budgets.
const LOOK: Duration = Duration::from_secs(1);
/// Between two greetings of an end that does not answer.
const GREETINGS: Duration = Duration::from_secs(1);
/// Between first words of sessions, so that many of them are no burst; and no more than so often an end is greeted.
const SPREAD: Duration = Duration::from_millis(1);

/// What has happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Both ends use it. `took`: since the proposal, if it was this end's. `cut`: the change of this end, until packets get
    /// the other list. Where the session has begun anew, `Counted` follows.
    Swapped { session: String, graft: String, took: Option<Duration>, cut: Duration, change: Change },
    /// What was lost by that.
    Counted { session: String, losses: Losses },
    /// A rule of its settings wants another graft for it, for this reason.
    Ruled { session: String, graft: String, why: String },
    /// The session keeps the graft that it has.
    NotSwapped { session: String, graft: String, why: Why },
    /// The graft that takes its place, or none: the session goes on, over its budget.
    OverBudget { session: String, graft: String, joint: Joint, ns: u64, fallback: Option<String> },
    /// Somebody had detached it, or the interface was made anew; with why it could not be attached again.
    Detached { interface: String, error: Option<String> },
    /// A sealed session has keys, and passes datagrams; or, if it had some before, it has others.
    Keys { session: String },
    /// A full window of the session has refused a datagram, and there is room now, as [`Runtime::tell_room`] asks for.
    Room { ends: Ends },
    /// A router or a host says by ICMP what becomes of packets of IP protocol 253; the words name who.
    Refused { session: String, why: String },
    /// The other end was started anew: this one begins anew, too, with the graft that its settings name.
    Restarted { session: String },
}

/// What is known of a session, for who has lent it to an application.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Seen {
    pub graft: String,
    /// Datagrams pass: it is in clear, or has keys.
    pub is_open: bool,
    /// Nothing is under way that would keep it from changing its graft.
    pub is_idle: bool,
    pub trouble: Option<String>,
}

/// Of an application's datagrams: those that left, those that came, and those that could not leave for want of room.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    pub sent: u64,
    pub delivered: u64,
    pub refused: u64,
}

/// All of it is taken back when this is dropped. To be used in one network namespace.
pub struct Runtime {
    joints: Joints,
    /// Functions in the kernel: of the settings, and what sessions still use.
    loaded: Vec<Version>,
    settings: Settings,
    places: Vec<Place>,
    live: BTreeMap<Ends, Live>,
    /// Those whose settings have rules.
    ruled: Vec<Ends>,
    /// Those that have several paths.
    pathed: Vec<Ends>,
    hops: Hops,
    /// What ICMP says of packets between two addresses.
    hearings: BTreeMap<(IpAddr, IpAddr), Hearing>,
    agenda: Agenda,
    /// What happened between two steps.
    pending: Vec<Event>,
    since: Instant,
    /// Bytes in the kernel.
    memory: u64,
    /// As the other ends are told.
    started: Since,
    looked: Duration,
    looked_at_rules: Duration,
    looked_at_paths: Duration,
}

impl Runtime {
    /// # Errors
    /// Something of the settings cannot be had, or a graft is over its budget before it is used. Nothing is left then.
    pub fn start(settings: Settings) -> Result<Self, Error> {
        check_pacing(&settings)?;
        paths::check(&settings)?;
        let mut joints = Joints::load_for(with_trials(settings.room))?;
        let mut loaded = Vec::new();
        versions::load(&mut joints, &mut loaded, &settings)?;
        for graft in settings.grafts.values() {
            check_budget(&mut joints, graft)?;
        }
        let (since, looked) = (Instant::now(), Duration::ZERO);
        let mut runtime = Self {
            joints,
            loaded,
            places: Vec::new(),
            live: BTreeMap::new(),
            ruled: ruled::of(&settings),
            pathed: paths::of(&settings),
            hops: Hops::default(),
            hearings: BTreeMap::new(),
            agenda: Agenda::default(),
            pending: Vec::new(),
            since,
            started: Since::new(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()),
            looked,
            looked_at_rules: Duration::ZERO,
            looked_at_paths: Duration::ZERO,
            memory: settings.memory()?,
            settings: settings.clone(),
        };
        for session in settings.sessions {
            runtime.open(session)?;
        }
        for name in settings.interfaces {
            let place = Place::new(&mut runtime.joints, &name, settings.mode)?;
            runtime.places.push(place);
        }
        Ok(runtime)
    }

    /// Other settings, all or nothing: sessions come and go, and change their grafts as [`swap`](Self::swap) does. Where a function has
    /// come in another version, or a graft has another list, sessions change to that.
    pub fn apply(&mut self, settings: Settings) -> Result<(), Error> {
        let applied = self.try_apply(settings);
        self.unload_unused();
        applied
    }

    fn try_apply(&mut self, settings: Settings) -> Result<(), Error> {
        let old = &self.settings;
        if settings.interfaces != old.interfaces || settings.mode != old.mode {
            return Err(Error::Settings("interface and mode do not change while it runs".to_owned()));
        }
        if settings.room != old.room {
            return Err(Error::Settings("sessions and memory-mib do not change while it runs".to_owned()));
        }
        versions::check_parameters(old, &settings)?;
        check_pacing(&settings)?;
        paths::check(&settings)?;
        versions::load(&mut self.joints, &mut self.loaded, &settings)?;
        for graft in settings.grafts.values().filter(|graft| old.grafts.get(&graft.name) != Some(*graft)) {
            check_budget(&mut self.joints, graft)?;
        }
        let mut changes = Vec::new();
        let before: BTreeMap<_, _> = old.sessions.iter().map(|before| (before.ends, &before.graft)).collect();
        for session in &settings.sessions {
            if let Some(live) = self.live.get(&session.ends) {
                // What a command has changed stays.
                let is_new = before.get(&session.ends).is_some_and(|before| **before != session.graft);
                let change = live.becomes(session, &settings, is_new && live.graft.name != session.graft)?;
                changes.extend(change.map(|graft| (session.ends, graft)));
            }
        }
        let stay: BTreeSet<_> = settings.sessions.iter().map(|session| session.ends).collect();
        let gone: Vec<_> = self.live.keys().copied().filter(|ends| !stay.contains(ends)).collect();
        for ends in gone {
            self.live.remove(&ends);
            self.plan(&ends);
            self.joints.close(&ends)?;
        }
        self.stop_hearing();
        self.memory = settings.memory()?;
        self.ruled = ruled::of(&settings);
        self.pathed = paths::of(&settings);
        if self.pathed.is_empty() {
            self.hops = Hops::default();
        }
        self.settings = settings;
        for session in &self.settings.sessions {
            self.live.entry(session.ends).and_modify(|live| live.take_rules(session));
        }
        for (ends, live) in &mut self.live {
            if let Some(graft) = live.refreshed(&self.settings) {
                self.joints.set_budget(ends, graft.budget_ns)?;
            }
        }
        for (ends, graft) in changes {
            let anew = graft.anew;
            self.propose(ends, &graft, anew)?;
        }
        for session in self.settings.sessions.clone() {
            if !self.live.contains_key(&session.ends) {
                self.open(session)?;
            }
        }
        Ok(())
    }

    /// Has both ends of a session change to another graft. [`step`](Self::step) says how it ended.
    pub fn swap(&mut self, session: &str, graft: &str) -> Result<(), Error> {
        self.change(session, graft, false)
    }

    /// The same, and the session begins anew: what is under way is lost, and counted.
    pub fn swap_anew(&mut self, session: &str, graft: &str) -> Result<(), Error> {
        self.change(session, graft, true)
    }

    fn change(&mut self, session: &str, graft: &str, anew: bool) -> Result<(), Error> {
        let found = self.live.iter().find(|(_, live)| live.session.name == session);
        let known =
            || self.live.values().map(|live| live.session.name.as_str()).collect::<Vec<_>>().join(", ");
        let (ends, live) =
            found.ok_or_else(|| Error::NoSession { name: session.to_owned(), known: known() })?;
        if live.agreement.next().is_some() {
            return Err(Error::Busy(session.to_owned()));
        }
        let (ends, graft) = (*ends, self.settings.graft(graft)?.clone());
        let anew = anew || graft.anew;
        self.live.entry(ends).and_modify(|live| live.ruled.overrule());
        self.propose(ends, &graft, anew)
    }

    /// Waits for something to do, no longer than `patience`, and does it.
    pub fn step(&mut self, patience: Duration) -> Result<Vec<Event>, Error> {
        let mut events = std::mem::take(&mut self.pending);
        let patience = if events.is_empty() { patience } else { Duration::ZERO };
        let patience =
            self.agenda.next().map_or(patience, |due| patience.min(due.saturating_sub(self.now())));
        let words = self.joints.words(patience.max(Duration::from_millis(1)))?;
        events.extend(self.joints.room_for().into_iter().map(|ends| Event::Room { ends }));
        // First, as what is answered may need them.
        let mut due = self.hear_keys(&mut events)?;
        for heard in words {
            let Some(word) = Word::decode(heard.kind, heard.number) else { continue };
            due.push(heard.ends);
            if let Word::Hello(since) = word {
                self.greeted(&heard.ends, since, &mut events)?;
                continue;
            }
            if self.hear_losses(&heard.ends, word) || self.hear_paths(&heard.ends, word)? {
                continue;
            }
            let is_known = word.list().is_some_and(|list| self.graft_of(list).is_some());
            let now = self.now();
            let acts = self.live.get_mut(&heard.ends).map(|live| live.agreement.hear(now, word, is_known));
            self.act(&heard.ends, acts.unwrap_or_default(), &mut events)?;
        }
        due.extend(self.agenda.take(self.now()));
        for ends in due {
            self.tick(&ends, &mut events)?;
        }
        for tick in self.joints.ticks()? {
            self.say_last(&tick);
        }
        self.look_at_rules(&mut events)?;
        self.look_at_paths()?;
        if self.now() >= self.looked + LOOK {
            self.looked = self.now();
            let active = self.joints.active();
            self.look_at_keys(&active)?;
            self.look_at_budgets(&active, &mut events)?;
            self.look_at_places(&mut events);
            self.look_at_hearings(&mut events);
        }
        Ok(events)
    }

    /// Does what a session's time has come for, or what has been heard of it asks for.
    fn tick(&mut self, ends: &Ends, events: &mut Vec<Event>) -> Result<(), Error> {
        let now = self.now();
        let acts = self.live.get_mut(ends).map(|live| live.agreement.tick(now)).unwrap_or_default();
        self.act(ends, acts, events)?;
        self.tick_losses(ends, events);
        self.tick_keys(ends, events)?;
        self.greet(ends);
        self.plan(ends);
        Ok(())
    }

    /// When it is to be looked at next, after whatever has changed.
    fn plan(&mut self, ends: &Ends) {
        self.agenda.put(*ends, self.live.get(ends).and_then(Live::next));
    }

    pub fn status(&mut self) -> Result<Status, Error> {
        let mut status = Status {
            uptime_s: self.since.elapsed().as_secs_f64(),
            sessions_max: self.settings.room.sessions,
            memory_bytes: self.memory,
            ..Status::default()
        };
        for place in &self.places {
            status.interfaces.insert(place.name.clone(), place.mode.to_string());
            if !self.joints.is_attached(place.index) {
                status.trouble.push(format!("interface {}: not attached", place.name));
            }
        }
        status.trouble.extend(check_pacing(&self.settings).err().map(|error| error.to_string()));
        status.trouble.extend(self.unheard());
        for (ends, live) in &self.live {
            let counts = self.joints.counts(ends)?;
            let mut session = live.status(&counts, &self.joints.progress(ends)?);
            if let Some(routes) = &live.routes {
                session.paths = routes.status(&self.joints.path_counts(ends)?);
            }
            let unheard = live.unheard(&counts);
            let heard = self.heard(ends, live, &counts);
            for trouble in live.trouble.iter().chain(&live.mute).chain(&unheard).chain(&heard) {
                status.trouble.push(format!("session {}: {trouble}", session.name));
            }
            if is_out_of_step(&counts) {
                status.trouble.push(format!(
                    "session {}: what comes is of an epoch, of numbers or of a list that are not taken here: both ends need the same functions and `parity`; \
                     if they have them, start both anew",
                    session.name
                ));
            }
            status.sessions.push(session);
        }
        Ok(status)
    }

    /// `None`: there is no such session. The kernel is not asked.
    pub fn see(&self, ends: &Ends) -> Option<Seen> {
        let live = self.live.get(ends)?;
        let trouble = live.trouble.clone().or_else(|| live.unheard(&[]));
        Some(Seen {
            graft: live.graft.name.clone(),
            is_open: live.is_open(),
            is_idle: live.agreement.next().is_none(),
            trouble: trouble.or_else(|| live.mute.clone()),
        })
    }

    /// `None`: there is no such session. It takes a look into the kernel.
    pub fn traffic(&mut self, ends: &Ends) -> Result<Option<Traffic>, Error> {
        if !self.live.contains_key(ends) {
            return Ok(None);
        }
        let counts = self.joints.counts(ends)?;
        let sum = |wanted: &[Reason]| {
            counts.iter().filter(|(reason, _)| wanted.contains(reason)).map(|(_, count)| count).sum()
        };
        Ok(Some(Traffic {
            sent: sum(&[Reason::Sent]),
            delivered: sum(&[Reason::Delivered, Reason::Recovered]),
            refused: sum(&[Reason::WindowFull, Reason::TooFast]),
        }))
    }

    /// Datagrams that have been sent and are not acknowledged; `None`: nobody says so.
    pub fn under_way(&self, ends: &Ends) -> Result<Option<u32>, Error> {
        if !self.live.contains_key(ends) {
            return Ok(None);
        }
        let known = self.joints.progress(ends)?;
        Ok(known.round_trip.map(|_| known.next.wrapping_sub(known.delivered)))
    }

    /// Has [`step`](Self::step) say when there is room for a datagram of the session that was refused.
    pub fn tell_room(&mut self, ends: &Ends) -> Result<(), Error> {
        Ok(self.joints.tell_room(ends)?)
    }

    /// What has to be kept for sessions to be sealed a moment longer than this is there.
    pub fn egress(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.joints.egress()
    }

    fn now(&self) -> Duration {
        self.since.elapsed()
    }

    fn graft_of(&self, list: u16) -> Option<&Graft> {
        self.settings.grafts.values().find(|graft| graft.list.id == list)
    }

    fn open(&mut self, session: Session) -> Result<(), Error> {
        let graft = self.settings.graft(&session.graft)?.clone();
        let Session { ends, key, protocol, .. } = session;
        let first = self.now() + SPREAD * self.live.len() as u32;
        let sealed = session.cipher.map(|cipher| Sealed::new(cipher, &session, first)).transpose()?;
        let (list, budget_ns) = (graft.list.clone(), graft.budget_ns);
        match &sealed {
            None => self.joints.open(joint::Session { ends, key, list, budget_ns, protocol })?,
            Some(Sealed { secret, .. }) => {
                let key = secret.frame_key();
                let session = joint::Session { ends, key, list, budget_ns, protocol };
                self.joints.open_sealed(session, secret.word_key())?;
            }
        }
        if needs_clock(&graft) {
            self.joints.set_clock(&ends, CLOCK)?;
        }
        let agreement = Agreement::new(graft.list.id, ends.local < ends.remote, sealed::random()?);
        let live = Live { greeting: first, ..Live::new(session, graft, agreement, sealed) };
        self.live.insert(ends, live);
        self.begin_paths(&ends)?;
        self.hear(&ends, protocol);
        self.plan(&ends);
        Ok(())
    }

    /// Until the other end has answered. One that comes later greets first.
    fn greet(&mut self, ends: &Ends) {
        let (now, pause) = (self.now(), GREETINGS.max(SPREAD * self.live.len() as u32));
        let Some(live) = self.live.get_mut(ends).filter(|live| live.greets().is_some_and(|at| at <= now))
        else {
            return;
        };
        live.greeting = now + pause;
        self.say(ends, Word::Hello(self.started));
    }

    fn say(&mut self, ends: &Ends, word: Word) {
        let (kind, number) = word.encode();
        self.send(ends, joint::Word::Says(kind, number));
    }

    fn send(&mut self, ends: &Ends, word: joint::Word) {
        let error = self.joints.say(ends, word).err().map(|error| error.to_string());
        self.live.entry(*ends).and_modify(|live| live.mute = error);
    }

    fn greeted(&mut self, ends: &Ends, since: Since, events: &mut Vec<Event>) -> Result<(), Error> {
        let Some(live) = self.live.get_mut(ends) else { return Ok(()) };
        let known = live.peer;
        if known.is_some_and(|known| !since.is_later_than(known)) {
            return Ok(());
        }
        live.peer = Some(since);
        if known.is_some() {
            let session = live.session.name.clone();
            let wanted = self.settings.sessions.iter().find(|session| session.ends == *ends);
            let graft = self.settings.graft(wanted.map_or("", |session| &session.graft))?.clone();
            live.agreement.begin(graft.list.id);
            live.begin(graft.clone());
            live.routes.iter_mut().for_each(paths::Routes::begin_anew);
            self.joints.pause(ends)?;
            let totals = self.totals(ends)?;
            self.live.entry(*ends).and_modify(|live| live.begun = totals);
            self.joints.replace(ends, &graft.list, 0)?;
            self.joints.resume(ends)?;
            self.joints.set_budget(ends, graft.budget_ns)?;
            events.push(Event::Restarted { session });
        }
        self.say(ends, Word::Hello(self.started));
        Ok(())
    }

    /// Without it, nobody would notice that the last packets before a pause were lost.
    fn say_last(&mut self, tick: &Tick) {
        let Some(live) = self.live.get_mut(&tick.ends) else { return };
        let is_waiting = tick.acked != tick.next && live.graft.services.contains(&Service::FlowControl);
        if live.said.next != tick.next || live.said.acked != tick.acked {
            live.said = LastWords { next: tick.next, acked: tick.acked, at_ns: 0, count: 0 };
        }
        let now_ns = clock::monotonic_ns();
        let silent_since = tick.sent_ns.max(live.said.at_ns);
        let silent = Duration::from_nanos(now_ns.saturating_sub(silent_since));
        let is_idle = tick.sent_ns > 0 && silent > live.said.patience(tick, is_waiting);
        if is_idle && (is_waiting || live.said.count < LAST_WORDS) {
            live.said.count += 1;
            live.said.at_ns = now_ns;
            self.send(&tick.ends, joint::Word::Last(tick.next));
        }
    }

    fn look_at_budgets(&mut self, active: &[Ends], events: &mut Vec<Event>) -> Result<(), Error> {
        for &ends in active {
            let times = self.joints.times(&ends)?;
            let Some(live) = self.live.get_mut(&ends) else { continue };
            let graft = live.graft.clone();
            let Some((joint, ns)) = live.meter.look(times, graft.budget_ns) else { continue };
            if live.agreement.next().is_some() {
                continue;
            }
            let (session, fallback) = (live.session.name.clone(), graft.fallback.clone());
            let words = format!(
                "graft {} takes {ns} ns for a packet at {}, and its budget is {}",
                graft.name,
                joint.name(),
                graft.budget_ns
            );
            let is_new = live.trouble.as_ref() != Some(&words) && live.trouble.is_none();
            live.trouble = Some(words);
            let graft = graft.name.clone();
            if is_new {
                events.push(Event::OverBudget { session, graft, joint, ns, fallback: fallback.clone() });
            }
            if let Some(fallback) = fallback.and_then(|name| self.settings.grafts.get(&name).cloned()) {
                let anew = fallback.anew;
                if let Err(error) = self.propose(ends, &fallback, anew) {
                    self.live.entry(ends).and_modify(|live| live.trouble = Some(error.to_string()));
                }
            }
        }
        Ok(())
    }
}

/// A list is tried with two sessions, beside those of the settings.
fn with_trials(room: Room) -> Room {
    Room { sessions: room.sessions + 2, ..room }
}

/// Whether it has to say what was sent last, which the other end cannot know if it was lost.
fn needs_clock(graft: &Graft) -> bool {
    let needing = [Service::Reliability, Service::PartialReliability, Service::FlowControl];
    needing.iter().any(|service| graft.services.contains(service))
}

/// One end was started anew, and the other was not.
fn is_out_of_step(counts: &[(Reason, u64)]) -> bool {
    let count =
        |wanted: Reason| counts.iter().find(|(reason, _)| *reason == wanted).map_or(0, |(_, count)| *count);
    let refused = count(Reason::Stale) + count(Reason::Old);
    refused > 0 && count(Reason::Delivered) == 0
}

fn check_budget(joints: &mut Joints, graft: &Graft) -> Result<(), Error> {
    let times = measure(joints, &graft.list)?;
    let worst = Joint::ALL.into_iter().zip(times).max_by_key(|(_, time)| *time);
    match worst {
        Some((joint, time)) if graft.budget_ns > 0 && time.as_nanos() > graft.budget_ns.into() => {
            Err(Error::Budget {
                graft: graft.name.clone(),
                joint: joint.name(),
                ns: u64::try_from(time.as_nanos()).unwrap_or(u64::MAX),
                budget_ns: graft.budget_ns,
            })
        }
        _ => Ok(()),
    }
}

mod change;
mod hearing;
mod hops;
mod live;
mod paths;
mod places;
mod ruled;
mod sealed;
#[cfg(test)]
mod tests;
mod versions;
