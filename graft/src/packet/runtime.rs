//! The runtime of datagram sessions: it opens sessions in the kernel, and changes their lists of functions while
//! datagrams pass.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use millrace_graft_kernel::packet::{
    self, FunctionHook, PacketHooks, PacketReason, SessionEnds, SessionRoom, Tick,
};
use millrace_kernel::clock;

use self::hops::Hops;
use self::live::{ANNOUNCEMENTS_MAX, CLOCK, Keying, LastAnnouncements, LiveSession};
use self::places::{RuntimeInterface, check_pacing};
use super::agenda::SessionAgenda;
use super::agree::{ListAgreement, ListMessage, ListRefusal, Since};
use super::budget::measure;
use super::function::FunctionService;
use super::keys::{Exported, PeerKeyMessage};
use super::losses::PacketLosses;
use super::settings::{GraftSetting, SessionSetting, Settings};
use super::versions::FunctionVersion;
use super::{SessionChange, Status};
use crate::Error;

/// Interval at which the sessions' time budgets and keys, and the interfaces, are checked.
const LOOK: Duration = Duration::from_secs(1);
/// Interval at which a session's greeting (its first message) is repeated while the other end has not answered.
const GREETINGS: Duration = Duration::from_secs(1);
/// Time between the first messages of one session and of the next, so that many sessions cause no burst. It also limits
/// the rate of the greetings of all sessions together.
const SPREAD: Duration = Duration::from_millis(1);

/// An event of a session or of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants describe their fields")]
pub enum PacketEvent {
    /// Both ends use the new graft (list of packet functions). `took` is the time since the proposal, if this end has
    /// proposed the change. `cut` is the time that the kernel took to switch to the new function list at this end. If
    /// the session has restarted, `Counted` follows.
    Swapped { session: String, graft: String, took: Option<Duration>, cut: Duration, change: SessionChange },
    /// Number of datagrams that were lost because a change of the graft (list of packet functions) restarted the
    /// session without its state.
    Counted { session: String, losses: PacketLosses },
    /// A rule of the settings requests another graft (list of packet functions) for the session, for the reason `why`.
    Ruled { session: String, graft: String, why: String },
    /// A change of the session's graft (list of packet functions) failed, and the session keeps its previous graft.
    NotSwapped { session: String, graft: String, why: ListRefusal },
    /// The session's graft (list of packet functions) takes more time per packet than its budget allows. The graft
    /// `fallback` replaces it; if that is `None`, the session keeps its graft.
    OverBudget { session: String, graft: String, hook: FunctionHook, ns: u64, fallback: Option<String> },
    /// The programs were detached by another process, or the interface was created again. `error` says why attaching
    /// them again failed, or is `None` if they are attached again.
    Detached { interface: String, error: Option<String> },
    /// A session got its first keys and now passes datagrams, or its keys were renewed.
    Keys { session: String },
    /// The flow-control window of a session has free space again, after a full one refused a datagram.
    /// [`PacketRuntime::tell_room`] requests this event.
    Room { ends: SessionEnds },
    /// The other end was restarted. This end restarts the session with the graft of its settings.
    Restarted { session: String },
}

/// The state of a session that the broker (the local proxy) needs before it assigns the session to an application.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SessionView {
    /// Name of the session's graft (list of packet functions).
    pub graft: String,
    /// True if the session passes datagrams. A sealed session then has keys.
    pub is_open: bool,
    /// True if no change of the session's graft is in progress.
    pub is_idle: bool,
    /// A problem of the session, as text, or `None`.
    pub trouble: Option<String>,
}

/// Numbers of the application's datagrams that were sent, that arrived, and that a full flow-control window refused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SessionTraffic {
    /// Number of datagrams that were sent.
    pub sent: u64,
    /// Number of datagrams that have arrived.
    pub delivered: u64,
    /// Number of datagrams that a full flow-control window refused.
    pub refused: u64,
}

/// A runtime of packet grafts (lists of packet functions that process datagrams in the kernel). Dropping it removes
/// everything from the kernel. It belongs to the network namespace in which it was started.
///
/// [`Self::start`] opens the sessions of the settings. They pass no datagrams before the daemons of both ends have
/// connected ([`Self::connected`]) and agreed on keys. The caller then calls [`Self::step`] in a loop. It handles all
/// messages of the other ends and all time-outs, and returns what has happened. [`Self::swap`] and [`Self::apply`] only
/// start to change a session's graft, and the event of a later `step` tells the result. A session has at most one
/// change in progress, and another one is refused ([`Error::Busy`]). Between calls, each session has a graft that both
/// ends use or are changing to, and its next time-out is scheduled.
pub struct PacketRuntime {
    hooks: PacketHooks,
    /// Functions in the kernel: those of the settings, and those of earlier settings that sessions still use.
    loaded: Vec<FunctionVersion>,
    settings: Settings,
    places: Vec<RuntimeInterface>,
    live: BTreeMap<SessionEnds, LiveSession>,
    /// Sessions with rules that choose the graft (list of packet functions) by the round-trip time.
    ruled: Vec<SessionEnds>,
    /// Sessions that have several paths.
    pathed: Vec<SessionEnds>,
    hops: Hops,
    agenda: SessionAgenda,
    /// Secret from the TLS exporter of the latest connection to each peer.
    lines: BTreeMap<String, Exported>,
    key_messages: Vec<(String, PeerKeyMessage)>,
    /// Events that happened between two calls of [`step`](Self::step).
    pending: Vec<PacketEvent>,
    since: Instant,
    /// Kernel memory that all sessions take, in bytes.
    memory: u64,
    /// Start time of this runtime, as greetings report it to the other ends.
    started: Since,
    looked: Duration,
    looked_at_rules: Duration,
    looked_at_paths: Duration,
}

impl PacketRuntime {
    /// Loads the functions and opens the sessions of the settings.
    ///
    /// # Errors
    /// Fails if something in the settings cannot be used, or if a graft exceeds its time budget in a test run. Nothing
    /// is left in the kernel then.
    pub fn start(settings: Settings) -> Result<Self, Error> {
        check_pacing(&settings)?;
        paths::check(&settings)?;
        let mut hooks = PacketHooks::load_for(with_trials(settings.room))?;
        let mut loaded = Vec::new();
        versions::load(&mut hooks, &mut loaded, &settings)?;
        // The processing times of grafts (lists of packet functions) are measured before any session exists.
        for graft in settings.grafts.values() {
            check_budget(&mut hooks, graft)?;
        }
        let since = Instant::now();
        let looked = Duration::ZERO;
        let mut runtime = Self {
            hooks,
            loaded,
            places: Vec::new(),
            live: BTreeMap::new(),
            ruled: ruled::list_ends(&settings),
            pathed: paths::list_ends(&settings),
            hops: Hops::default(),
            agenda: SessionAgenda::default(),
            lines: BTreeMap::new(),
            key_messages: Vec::new(),
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
            let place = RuntimeInterface::new(&mut runtime.hooks, &name, settings.mode)?;
            runtime.places.push(place);
        }
        Ok(runtime)
    }

    /// Replaces the settings completely, or leaves them unchanged if that fails. Opens new sessions, and closes those
    /// that the settings no longer name. A session's graft is changed as by [`swap`](Self::swap) if the settings name
    /// another one, if its function list differs, or if a function has another version.
    pub fn apply(&mut self, settings: Settings) -> Result<(), Error> {
        let applied = self.try_apply(settings);
        self.unload_unused();
        applied
    }

    fn try_apply(&mut self, settings: Settings) -> Result<(), Error> {
        let old = &self.settings;
        if settings.interfaces != old.interfaces || settings.mode != old.mode {
            return Err(Error::Settings("interface and mode cannot change while the daemon runs".to_owned()));
        }
        if settings.room != old.room {
            return Err(Error::Settings(
                "max-sessions and memory-mib cannot change while the daemon runs".to_owned(),
            ));
        }
        versions::check_parameters(old, &settings)?;
        check_pacing(&settings)?;
        paths::check(&settings)?;
        versions::load(&mut self.hooks, &mut self.loaded, &settings)?;
        for graft in settings.grafts.values().filter(|graft| old.grafts.get(&graft.name) != Some(*graft)) {
            check_budget(&mut self.hooks, graft)?;
        }
        // Every check that can refuse the new settings comes before this line, so that a refused reload leaves all
        // sessions unchanged.
        let mut changes = Vec::new();
        let before: BTreeMap<_, _> = old.sessions.iter().map(|before| (before.ends, &before.graft)).collect();
        for session in &settings.sessions {
            if let Some(live) = self.live.get(&session.ends) {
                // A graft (list of packet functions) that an operator's command has chosen stays, unless the settings
                // now name another graft for the session than before.
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
            self.hooks.close(&ends)?;
        }
        self.memory = settings.memory()?;
        self.ruled = ruled::list_ends(&settings);
        self.pathed = paths::list_ends(&settings);
        if self.pathed.is_empty() {
            self.hops = Hops::default();
        }
        self.settings = settings;
        for session in &self.settings.sessions {
            self.live.entry(session.ends).and_modify(|live| live.take_rules(session));
        }
        for (ends, live) in &mut self.live {
            if let Some(graft) = live.refreshed(&self.settings) {
                self.hooks.set_budget(ends, graft.budget_ns)?;
            }
        }
        // Changes of sessions' grafts (lists of packet functions) are proposed to the other ends only now, when the new
        // settings are in force.
        for (ends, graft) in changes {
            let anew = graft.anew;
            self.propose(ends, &graft, anew)?;
        }
        // New sessions are opened last, since closing others frees the map entries that new ones need.
        for session in self.settings.sessions.clone() {
            if !self.live.contains_key(&session.ends) {
                self.open(session)?;
            }
        }
        Ok(())
    }

    /// Starts to change both ends of a session to another graft (list of packet functions). [`step`](Self::step)
    /// returns the result as an event.
    pub fn swap(&mut self, session: &str, graft: &str) -> Result<(), Error> {
        self.change(session, graft, false)
    }

    /// Starts to change both ends of a session to another graft (list of packet functions), and restarts the session
    /// without its state. Packets in flight are lost and counted.
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
        let ends = *ends;
        let graft = self.settings.graft(graft)?.clone();
        let anew = anew || graft.anew;
        // The graft that an operator's command names takes precedence over the rules that choose a graft by round-trip
        // time.
        self.live.entry(ends).and_modify(|live| live.ruled.overrule());
        self.propose(ends, &graft, anew)
    }

    /// Waits at most `patience` for messages or time-outs, handles them, and returns the events to report.
    pub fn step(&mut self, patience: Duration) -> Result<Vec<PacketEvent>, Error> {
        let mut events = std::mem::take(&mut self.pending);
        // Events that are already pending must be returned without a delay.
        let patience = if events.is_empty() { patience } else { Duration::ZERO };
        let patience =
            self.agenda.next().map_or(patience, |due| patience.min(due.saturating_sub(self.now())));
        let messages = self.hooks.receive_messages(patience.max(Duration::from_millis(1)))?;
        events.extend(self.hooks.room_for().into_iter().map(|ends| PacketEvent::Room { ends }));
        let mut due = Vec::new();
        for heard in messages {
            let Some(message) = ListMessage::decode(heard.kind, heard.number) else { continue };
            due.push(heard.ends);
            if let ListMessage::Hello(since) = message {
                self.greeted(&heard.ends, since, &mut events)?;
                continue;
            }
            if self.hear_losses(&heard.ends, message) || self.hear_paths(&heard.ends, message)? {
                continue;
            }
            let is_known = message.list().is_some_and(|list| self.graft_of(list).is_some());
            let now = self.now();
            let acts =
                self.live.get_mut(&heard.ends).map(|live| live.agreement.on_message(now, message, is_known));
            self.act(&heard.ends, acts.unwrap_or_default(), &mut events)?;
        }
        // Further time-outs may have expired while messages were handled.
        due.extend(self.agenda.take(self.now()));
        for ends in due {
            self.tick(&ends, &mut events)?;
        }
        for tick in self.hooks.ticks()? {
            self.say_last(&tick);
        }
        self.look_at_rules(&mut events)?;
        self.look_at_paths()?;
        if self.now() >= self.looked + LOOK {
            self.looked = self.now();
            let active = self.hooks.active();
            self.look_at_keys(&active)?;
            self.look_at_budgets(&active, &mut events)?;
            self.look_at_places(&mut events);
        }
        Ok(events)
    }

    /// Handles the session's time-outs that have expired, and the messages that have arrived for it.
    fn tick(&mut self, ends: &SessionEnds, events: &mut Vec<PacketEvent>) -> Result<(), Error> {
        let now = self.now();
        let acts = self.live.get_mut(ends).map(|live| live.agreement.tick(now)).unwrap_or_default();
        self.act(ends, acts, events)?;
        self.tick_losses(ends, events);
        self.tick_keys(ends)?;
        self.greet(ends);
        self.plan(ends);
        Ok(())
    }

    /// Schedules the session's next time-out. It must be called after each change of the session's state.
    fn plan(&mut self, ends: &SessionEnds) {
        self.agenda.put(*ends, self.live.get(ends).and_then(LiveSession::next));
    }

    /// Returns the present status.
    pub fn status(&mut self) -> Result<Status, Error> {
        let mut status = Status {
            uptime_s: self.since.elapsed().as_secs_f64(),
            sessions_max: self.settings.room.sessions,
            memory_bytes: self.memory,
            ..Status::default()
        };
        for place in &self.places {
            status.interfaces.insert(place.name.clone(), place.mode.to_string());
            if !self.hooks.is_attached(place.index) {
                status.trouble.push(format!("interface {}: not attached", place.name));
            }
        }
        status.trouble.extend(check_pacing(&self.settings).err().map(|error| error.to_string()));
        for (ends, live) in &self.live {
            let counts = self.hooks.counts(ends)?;
            let mut session = live.status(&counts, &self.hooks.progress(ends)?);
            if let Some(routes) = &live.routes {
                session.paths = routes.status(&self.hooks.path_counts(ends)?);
            }
            // A peer whose daemon is not connected is reported once, and not for each of its sessions.
            let unheard = live.keying.line.as_ref().and_then(|_| live.unheard(&counts));
            for trouble in live.trouble.iter().chain(&live.mute).chain(&unheard) {
                status.trouble.push(format!("session {}: {trouble}", session.name));
            }
            if is_out_of_step(&counts) {
                status.trouble.push(format!(
                    "session {}: packets come with an epoch, numbers or a list that this end does not accept: both ends need the same functions and `parity`. \
                     If they have them, restart both daemons",
                    session.name
                ));
            }
            status.sessions.push(session);
        }
        Ok(status)
    }

    /// Returns the state of a session, or `None` if it does not exist. This does not read from the kernel.
    pub fn see(&self, ends: &SessionEnds) -> Option<SessionView> {
        let live = self.live.get(ends)?;
        let trouble = live.trouble.clone().or_else(|| live.unheard(&[]));
        Some(SessionView {
            graft: live.graft.name.clone(),
            is_open: live.is_open(),
            is_idle: live.agreement.next().is_none(),
            trouble: trouble.or_else(|| live.mute.clone()),
        })
    }

    /// Returns the datagram counts of a session, or `None` if it does not exist. They are read from the kernel.
    pub fn traffic(&mut self, ends: &SessionEnds) -> Result<Option<SessionTraffic>, Error> {
        if !self.live.contains_key(ends) {
            return Ok(None);
        }
        let counts = self.hooks.counts(ends)?;
        let sum = |wanted: &[PacketReason]| {
            counts.iter().filter(|(reason, _)| wanted.contains(reason)).map(|(_, count)| count).sum()
        };
        Ok(Some(SessionTraffic {
            sent: sum(&[PacketReason::Sent]),
            delivered: sum(&[PacketReason::Delivered, PacketReason::Recovered]),
            refused: sum(&[PacketReason::WindowFull, PacketReason::TooFast]),
        }))
    }

    /// Returns the number of sent datagrams that are not acknowledged, or `None` if no function of the graft
    /// acknowledges packets.
    pub fn under_way(&self, ends: &SessionEnds) -> Result<Option<u32>, Error> {
        if !self.live.contains_key(ends) {
            return Ok(None);
        }
        let known = self.hooks.progress(ends)?;
        Ok(known.round_trip.map(|_| known.next.wrapping_sub(known.delivered)))
    }

    /// Makes [`step`](Self::step) report when the flow-control window of a session that has refused a datagram has free
    /// space again.
    pub fn tell_room(&mut self, ends: &SessionEnds) -> Result<(), Error> {
        Ok(self.hooks.tell_room(ends)?)
    }

    /// Returns descriptors of the sealing programs. A process that holds these descriptors keeps sessions sealed until
    /// it closes them, even after this runtime has ended.
    pub fn egress(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.hooks.egress()
    }

    fn now(&self) -> Duration {
        self.since.elapsed()
    }

    fn graft_of(&self, list: u16) -> Option<&GraftSetting> {
        self.settings.grafts.values().find(|graft| graft.list.id == list)
    }

    fn open(&mut self, session: SessionSetting) -> Result<(), Error> {
        let graft = self.settings.graft(&session.graft)?.clone();
        let SessionSetting { ends, cipher, .. } = session;
        let first = self.now() + SPREAD * self.live.len() as u32;
        let key = sealed::random()?;
        let list = graft.list.clone();
        let budget_ns = graft.budget_ns;
        let opened = packet::FunctionSession { ends, key, list, budget_ns };
        match cipher {
            // A session without encryption waits for the key that authenticates packet trailers.
            None => {
                self.hooks.open(opened)?;
                self.hooks.hold(&ends)?;
            }
            Some(_) => self.hooks.open_sealed(opened)?,
        }
        let mut keying = Keying::new(cipher, key);
        if let Some(exported) = self.lines.get(&session.peer) {
            keying.connect(&ends, exported, first)?;
        }
        if needs_clock(&graft) {
            self.hooks.set_clock(&ends, CLOCK)?;
        }
        // Comparing the addresses makes the proposals of exactly one end win.
        let agreement = ListAgreement::new(graft.list.id, ends.local < ends.remote, sealed::random()?);
        let live = LiveSession { greeting: first, ..LiveSession::new(session, graft, agreement, keying) };
        self.live.insert(ends, live);
        self.begin_paths(&ends)?;
        self.plan(&ends);
        Ok(())
    }

    /// Greets the other end, if it has not answered yet. The end that starts later sends the first greeting that can be
    /// answered.
    fn greet(&mut self, ends: &SessionEnds) {
        let now = self.now();
        let pause = GREETINGS.max(SPREAD * self.live.len() as u32);
        let Some(live) = self.live.get_mut(ends).filter(|live| live.greets().is_some_and(|at| at <= now))
        else {
            return;
        };
        live.greeting = now + pause;
        self.say_hello(ends);
    }

    fn say_hello(&mut self, ends: &SessionEnds) {
        let now = self.now();
        let said = |live: &mut LiveSession| (live.greeted, live.owes_greeting) = (now, false);
        self.live.entry(*ends).and_modify(said);
        self.say(ends, ListMessage::Hello(self.started));
    }

    fn say(&mut self, ends: &SessionEnds, message: ListMessage) {
        let (kind, number) = message.encode();
        self.send(ends, packet::TalkMessage::Says(kind, number));
    }

    fn send(&mut self, ends: &SessionEnds, message: packet::TalkMessage) {
        let error = self.hooks.say(ends, message).err().map(|error| error.to_string());
        self.live.entry(*ends).and_modify(|live| live.mute = error);
    }

    fn greeted(
        &mut self,
        ends: &SessionEnds,
        since: Since,
        events: &mut Vec<PacketEvent>,
    ) -> Result<(), Error> {
        let now = self.now();
        let Some(live) = self.live.get_mut(ends) else { return Ok(()) };
        let known = live.peer;
        if known.is_some_and(|known| !since.is_later_than(known)) {
            // The other end repeats its greeting because this end's greeting was lost.
            if known == Some(since) && now >= live.greeted + GREETINGS / 2 {
                self.say_hello(ends);
            }
            return Ok(());
        }
        live.peer = Some(since);
        // If a greeting states a later start time than the previous greetings, the other end's daemon has restarted.
        if known.is_some() {
            let session = live.session.name.clone();
            let wanted = self.settings.sessions.iter().find(|session| session.ends == *ends);
            let graft = self.settings.graft(wanted.map_or("", |session| &session.graft))?.clone();
            live.agreement.begin(graft.list.id);
            live.begin(graft.clone());
            live.routes.iter_mut().for_each(paths::SessionRoutes::begin_anew);
            // No packet may pass between reading the counters and installing the new function list.
            self.hooks.pause(ends)?;
            let totals = self.totals(ends)?;
            self.live.entry(*ends).and_modify(|live| live.begun = totals);
            self.hooks.replace(ends, &graft.list, 0)?;
            self.hooks.resume(ends)?;
            self.hooks.set_budget(ends, graft.budget_ns)?;
            events.push(PacketEvent::Restarted { session });
        }
        // If the other end cannot open a greeting yet, this end sends it later.
        match self.live.get_mut(ends) {
            Some(live) if !live.is_open() => live.owe_greeting(now),
            _ => self.say_hello(ends),
        }
        Ok(())
    }

    /// Sends the number of the latest packet again. Otherwise the loss of the last packets before a pause would not be
    /// noticed.
    fn say_last(&mut self, tick: &Tick) {
        let Some(live) = self.live.get_mut(&tick.ends) else { return };
        let is_waiting =
            tick.acked != tick.next && live.graft.services.contains(&FunctionService::FlowControl);
        if live.said.next != tick.next || live.said.acked != tick.acked {
            live.said = LastAnnouncements { next: tick.next, acked: tick.acked, at_ns: 0, count: 0 };
        }
        let now_ns = clock::monotonic_ns();
        let silent_since = tick.sent_ns.max(live.said.at_ns);
        let silent = Duration::from_nanos(now_ns.saturating_sub(silent_since));
        let is_idle = tick.sent_ns > 0 && silent > live.said.patience(tick, is_waiting);
        if is_idle && (is_waiting || live.said.count < ANNOUNCEMENTS_MAX) {
            live.said.count += 1;
            live.said.at_ns = now_ns;
            self.send(&tick.ends, packet::TalkMessage::Last(tick.next));
        }
    }

    fn look_at_budgets(
        &mut self,
        active: &[SessionEnds],
        events: &mut Vec<PacketEvent>,
    ) -> Result<(), Error> {
        for &ends in active {
            let times = self.hooks.times(&ends)?;
            let Some(live) = self.live.get_mut(&ends) else { continue };
            let graft = live.graft.clone();
            let Some((hook, ns)) = live.meter.look(times, graft.budget_ns) else { continue };
            // A change that is in progress may already replace the session's graft (list of packet functions).
            if live.agreement.next().is_some() {
                continue;
            }
            let session = live.session.name.clone();
            let fallback = graft.fallback.clone();
            let trouble = format!(
                "graft {} takes {ns} ns for a packet at {}, and its budget is {}",
                graft.name,
                hook.name(),
                graft.budget_ns
            );
            let is_new = live.trouble.as_ref() != Some(&trouble) && live.trouble.is_none();
            live.trouble = Some(trouble);
            let graft = graft.name.clone();
            if is_new {
                events.push(PacketEvent::OverBudget { session, graft, hook, ns, fallback: fallback.clone() });
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

/// Adds capacity for the two sessions in which the processing times of grafts (lists of packet functions) are measured.
fn with_trials(room: SessionRoom) -> SessionRoom {
    SessionRoom { sessions: room.sessions + 2, ..room }
}

/// Reports whether a session with this graft (list of packet functions) needs a timer by which the sender announces its
/// latest packet number. Otherwise the receiver would not notice the loss of the latest packet.
fn needs_clock(graft: &GraftSetting) -> bool {
    let needing =
        [FunctionService::Reliability, FunctionService::PartialReliability, FunctionService::FlowControl];
    needing.iter().any(|service| graft.services.contains(service))
}

/// Reports whether only one of the ends seems to have restarted: packets arrive, and none is delivered.
fn is_out_of_step(counts: &[(PacketReason, u64)]) -> bool {
    let count = |wanted: PacketReason| {
        counts.iter().find(|(reason, _)| *reason == wanted).map_or(0, |(_, count)| *count)
    };
    let refused = count(PacketReason::Stale) + count(PacketReason::Old);
    refused > 0 && count(PacketReason::Delivered) == 0
}

fn check_budget(hooks: &mut PacketHooks, graft: &GraftSetting) -> Result<(), Error> {
    let times = measure(hooks, &graft.list)?;
    let worst = FunctionHook::ALL.into_iter().zip(times).max_by_key(|(_, time)| *time);
    match worst {
        Some((hook, time)) if graft.budget_ns > 0 && time.as_nanos() > graft.budget_ns.into() => {
            Err(Error::Budget {
                graft: graft.name.clone(),
                hook: hook.name(),
                ns: u64::try_from(time.as_nanos()).unwrap_or(u64::MAX),
                budget_ns: graft.budget_ns,
            })
        }
        _ => Ok(()),
    }
}

mod change;
mod hops;
mod live;
mod paths;
mod places;
mod ruled;
mod sealed;
#[cfg(test)]
mod tests;
mod versions;
