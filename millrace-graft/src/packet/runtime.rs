//! Sessions in the kernel, and how their lists of functions change while datagrams pass.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use millrace_bpf::clock;
use millrace_bpf::graft::joint::{self, Ends, Joint, Joints, Reason, Tick};
use millrace_bpf::xdp::Mode;
use nix::net::if_::if_nametoindex;
use ring::rand::{SecureRandom as _, SystemRandom};

use super::agree::{Act, Agreement, Since, Why, Word};
use super::budget::{Meter, measure};
use super::function::Service;
use super::keys::{self, Cipher, Secret};
use super::settings::{Graft, Session, Settings};
use super::{SessionStatus, Status};
use crate::Error;

/// Between two looks at budgets.
const LOOK: Duration = Duration::from_secs(1);
/// A session that has sent nothing for so long says what it has sent, a few times; where it waits for acknowledgements, until
/// they come, each time after twice as long.
const PAUSE: Duration = Duration::from_millis(100);
const LAST_WORDS: u32 = 5;
/// Between two looks at that.
const CLOCK: Duration = Duration::from_millis(20);

/// What has happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Both ends use it. `took`: since the proposal, if it was this end's. `cut`: the change of this end, until packets get
    /// the other list.
    Swapped { session: String, graft: String, took: Option<Duration>, cut: Duration },
    /// The session keeps the graft that it has.
    NotSwapped { session: String, graft: String, why: Why },
    /// The graft that takes its place, or none: the session goes on, over its budget.
    OverBudget { session: String, graft: String, joint: Joint, ns: u64, fallback: Option<String> },
    /// Somebody had detached it, or the interface was made anew; with why it could not be attached again.
    Detached { interface: String, error: Option<String> },
    /// A sealed session has keys, and passes datagrams; or, if it had some before, it has others.
    Keys { session: String },
    /// The other end was started anew: this one begins anew, too, with the graft that its settings name.
    Restarted { session: String },
}

struct Live {
    session: Session,
    agreement: Agreement,
    meter: Meter,
    proposed: Option<Duration>,
    wanted: Option<String>,
    cut: Duration,
    /// Over its budget, or could not be swapped.
    trouble: Option<String>,
    said: LastWords,
    /// When the other end was started, if it has said so.
    peer: Option<Since>,
    /// Why the latest word could not be sent. It is lost, as others are.
    mute: Option<String>,
    swaps: u64,
    swaps_failed: u64,
    sealed: Option<Sealed>,
}

struct Sealed {
    cipher: Cipher,
    secret: Secret,
    agreement: keys::Agreement,
    /// What the other end seals with, if that is something else.
    other: Option<u8>,
}

/// What was said about the packets that were sent last.
#[derive(Default)]
struct LastWords {
    next: u32,
    acked: u32,
    at_ns: u64,
    count: u32,
}

impl LastWords {
    /// As long as nothing is heard: two round trips, and longer each time, as RFC 8085 has it.
    fn patience(&self, tick: &Tick, is_waiting: bool) -> Duration {
        match tick.round_trip {
            Some(round_trip) if is_waiting => (2 * round_trip).max(CLOCK) * (1 << self.count.min(5)),
            _ => PAUSE,
        }
    }
}

struct Place {
    name: String,
    index: i32,
    mode: Mode,
}

/// All of it is taken back when this is dropped. To be used in one network namespace.
pub struct Runtime {
    joints: Joints,
    settings: Settings,
    places: Vec<Place>,
    live: BTreeMap<Ends, Live>,
    since: Instant,
    /// As the other ends are told.
    started: Since,
    looked: Duration,
}

impl Runtime {
    /// # Errors
    /// Something of the settings cannot be had, or a graft is over its budget before it is used. Nothing is left then.
    pub fn start(settings: Settings) -> Result<Self, Error> {
        let mut joints = Joints::load()?;
        load(&mut joints, &settings)?;
        for graft in settings.grafts.values() {
            check_budget(&mut joints, graft)?;
        }
        let (since, looked) = (Instant::now(), Duration::ZERO);
        let mut runtime = Self {
            joints,
            places: Vec::new(),
            live: BTreeMap::new(),
            since,
            started: Since::new(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()),
            looked,
            settings: settings.clone(),
        };
        for session in settings.sessions {
            runtime.open(session)?;
        }
        for name in settings.interfaces {
            let (index, mode) = attach(&mut runtime.joints, &name, settings.mode)?;
            runtime.places.push(Place { name, index, mode });
        }
        Ok(runtime)
    }

    /// Other settings, all or nothing: sessions come and go, and change their grafts as [`swap`](Self::swap) does.
    pub fn apply(&mut self, settings: Settings) -> Result<(), Error> {
        let old = &self.settings;
        if settings.interfaces != old.interfaces || settings.mode != old.mode {
            return Err(Error::Settings("interface and mode do not change while it runs".to_owned()));
        }
        let identities =
            |settings: &Settings| settings.functions.iter().map(|it| it.identity).collect::<Vec<_>>();
        if settings.parameters != old.parameters || identities(&settings) != identities(old) {
            return Err(Error::Settings("functions and parameters do not change while it runs".to_owned()));
        }
        load(&mut self.joints, &settings)?;
        for graft in settings.grafts.values().filter(|graft| old.grafts.get(&graft.name) != Some(*graft)) {
            check_budget(&mut self.joints, graft)?;
        }
        for session in &settings.sessions {
            if let Some(live) = self.live.get(&session.ends) {
                live.can_become(session, &settings, self.is_wanted(session))?;
            }
        }
        let gone: Vec<_> = self.live.keys().copied().collect();
        for ends in gone.iter().filter(|ends| settings.sessions.iter().all(|session| session.ends != **ends))
        {
            self.live.remove(ends);
            self.joints.close(ends)?;
        }
        let (known, changed): (Vec<_>, Vec<_>) =
            settings.sessions.iter().cloned().partition(|session| !self.is_wanted(session));
        self.settings = settings;
        for session in changed {
            self.propose(session.ends, &session.graft)?;
        }
        for session in known {
            if !self.live.contains_key(&session.ends) {
                self.open(session)?;
            }
        }
        Ok(())
    }

    /// Whether settings now name another graft for a session than before. What a command has changed stays.
    fn is_wanted(&self, session: &Session) -> bool {
        let before = self.settings.sessions.iter().find(|before| before.ends == session.ends);
        let Some(live) = self.live.get(&session.ends) else { return false };
        before.is_some_and(|before| before.graft != session.graft) && live.session.graft != session.graft
    }

    /// Has both ends of a session change to another graft. [`step`](Self::step) says how it ended.
    pub fn swap(&mut self, session: &str, graft: &str) -> Result<(), Error> {
        let found = self.live.iter().find(|(_, live)| live.session.name == session);
        let known =
            || self.live.values().map(|live| live.session.name.as_str()).collect::<Vec<_>>().join(", ");
        let (ends, live) =
            found.ok_or_else(|| Error::NoSession { name: session.to_owned(), known: known() })?;
        if live.agreement.next().is_some() {
            return Err(Error::Busy(session.to_owned()));
        }
        self.propose(*ends, graft)
    }

    /// Waits for something to do, no longer than `patience`, and does it.
    pub fn step(&mut self, patience: Duration) -> Result<Vec<Event>, Error> {
        let mut events = Vec::new();
        let due = self.live.values().filter_map(Live::next).min();
        let patience = due.map_or(patience, |due| patience.min(due.saturating_sub(self.now())));
        for heard in self.joints.words(patience.max(Duration::from_millis(1)))? {
            let Some(word) = Word::decode(heard.kind, heard.number) else { continue };
            if let Word::Hello(since) = word {
                self.greeted(&heard.ends, since, &mut events)?;
                continue;
            }
            let is_known = word.list().is_some_and(|list| self.graft_of(list).is_some());
            let now = self.now();
            let acts = self.live.get_mut(&heard.ends).map(|live| live.agreement.hear(now, word, is_known));
            self.act(&heard.ends, acts.unwrap_or_default(), &mut events)?;
        }
        self.hear_keys(&mut events)?;
        let ends: Vec<_> = self.live.keys().copied().collect();
        for ends in ends {
            let now = self.now();
            let acts = self.live.get_mut(&ends).map(|live| live.agreement.tick(now)).unwrap_or_default();
            self.act(&ends, acts, &mut events)?;
            self.tick_keys(&ends, &mut events)?;
        }
        for tick in self.joints.ticks()? {
            self.say_last(&tick);
        }
        if self.now() >= self.looked + LOOK {
            self.looked = self.now();
            self.greet_strangers();
            self.look_at_keys()?;
            self.look_at_budgets(&mut events)?;
            self.look_at_places(&mut events);
        }
        Ok(events)
    }

    pub fn status(&mut self) -> Result<Status, Error> {
        let mut status = Status { uptime_s: self.since.elapsed().as_secs_f64(), ..Status::default() };
        for place in &self.places {
            status.interfaces.insert(place.name.clone(), place.mode.to_string());
            if !self.joints.is_attached(place.index) {
                status.trouble.push(format!("interface {}: not attached", place.name));
            }
        }
        for (ends, live) in &self.live {
            let counts = self.joints.counts(ends)?;
            let session = live.status(&counts, &self.settings);
            let keyless = live.sealed.as_ref().and_then(Sealed::trouble);
            for trouble in live.trouble.iter().chain(&live.mute).chain(&keyless) {
                status.trouble.push(format!("session {}: {trouble}", session.name));
            }
            if is_out_of_step(&counts) {
                status.trouble.push(format!(
                    "session {}: what comes is of an epoch or of numbers that are not taken here: start both ends anew",
                    session.name
                ));
            }
            status.sessions.push(session);
        }
        Ok(status)
    }

    fn now(&self) -> Duration {
        self.since.elapsed()
    }

    fn graft_of(&self, list: u16) -> Option<&Graft> {
        self.settings.grafts.values().find(|graft| graft.list.id == list)
    }

    fn open(&mut self, session: Session) -> Result<(), Error> {
        let graft = self.settings.graft(&session.graft)?;
        let Session { ends, key, .. } = session;
        let sealed = session.cipher.map(|cipher| Sealed::new(cipher, &session, self.now())).transpose()?;
        let (list, budget_ns) = (graft.list.clone(), graft.budget_ns);
        match &sealed {
            None => self.joints.open(joint::Session { ends, key, list, budget_ns })?,
            Some(Sealed { secret, .. }) => {
                let key = secret.frame_key();
                self.joints.open_sealed(joint::Session { ends, key, list, budget_ns }, secret.word_key())?;
            }
        }
        if needs_clock(graft) {
            self.joints.set_clock(&ends, CLOCK)?;
        }
        let agreement = Agreement::new(graft.list.id, ends.local < ends.remote);
        let (meter, said) = (Meter::default(), LastWords::default());
        let live = Live {
            session,
            agreement,
            meter,
            said,
            proposed: None,
            wanted: None,
            cut: Duration::ZERO,
            trouble: None,
            peer: None,
            mute: None,
            swaps: 0,
            swaps_failed: 0,
            sealed,
        };
        self.live.insert(ends, live);
        Ok(())
    }

    /// Until the other end has answered. One that comes later greets first.
    fn greet_strangers(&mut self) {
        let strangers = self.live.iter().filter(|(_, live)| live.peer.is_none() && live.is_open());
        let strangers: Vec<_> = strangers.map(|(ends, _)| *ends).collect();
        strangers.iter().for_each(|ends| self.say(ends, Word::Hello(self.started)));
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
            live.agreement = Agreement::new(graft.list.id, ends.local < ends.remote);
            live.session.graft = graft.name;
            (live.proposed, live.trouble, live.said) = (None, None, LastWords::default());
            self.joints.replace(ends, &graft.list, 0)?;
            self.joints.set_budget(ends, graft.budget_ns)?;
            events.push(Event::Restarted { session });
        }
        self.say(ends, Word::Hello(self.started));
        Ok(())
    }

    fn propose(&mut self, ends: Ends, graft: &str) -> Result<(), Error> {
        let list = self.settings.graft(graft)?.list.id;
        let (now, mut attempt) = (self.now(), [0; 2]);
        SystemRandom::new().fill(&mut attempt).map_err(|_| Error::NoRandom)?;
        let attempt = u16::from_ne_bytes(attempt);
        let Some(live) = self.live.get_mut(&ends) else { return Ok(()) };
        (live.proposed, live.wanted) = (Some(now), Some(graft.to_owned()));
        let acts = live.agreement.propose(now, list, attempt);
        self.act(&ends, acts, &mut Vec::new())
    }

    fn act(&mut self, ends: &Ends, acts: Vec<Act>, events: &mut Vec<Event>) -> Result<(), Error> {
        for act in acts {
            match act {
                Act::Accept(list) => {
                    if let Some(graft) = self.graft_of(list) {
                        let list = graft.list.clone();
                        self.joints.accept(ends, &list)?;
                    }
                }
                Act::Switch => {
                    let epoch = self.joints.epoch(ends)? ^ 1;
                    let start = Instant::now();
                    self.joints.switch(ends, epoch)?;
                    let cut = start.elapsed();
                    self.live.entry(*ends).and_modify(|live| live.cut = cut);
                }
                Act::Retire => {
                    let epoch = self.joints.epoch(ends)? ^ 1;
                    self.joints.retire(ends, epoch)?;
                }
                Act::Say(word) => self.say(ends, word),
                Act::Agreed(list) => self.agreed(ends, list, events)?,
                Act::Failed(list, why) => self.failed(ends, list, why, events),
            }
        }
        Ok(())
    }

    fn agreed(&mut self, ends: &Ends, list: u16, events: &mut Vec<Event>) -> Result<(), Error> {
        let now = self.now();
        let Some(graft) = self.graft_of(list).cloned() else { return Ok(()) };
        let Some(live) = self.live.get_mut(ends) else { return Ok(()) };
        let name = live.own_name_of(&graft, &self.settings);
        let took = live.proposed.take().map(|since| now.saturating_sub(since));
        (live.session.graft, live.trouble) = (name.clone(), None);
        live.swaps += 1;
        let session = live.session.name.clone();
        events.push(Event::Swapped { session, graft: name, took, cut: live.cut });
        self.joints.set_clock(ends, if needs_clock(&graft) { CLOCK } else { Duration::ZERO })?;
        Ok(self.joints.set_budget(ends, graft.budget_ns)?)
    }

    fn failed(&mut self, ends: &Ends, list: u16, why: Why, events: &mut Vec<Event>) {
        let name_of = |list| self.graft_of(list).map(|graft| graft.name.clone()).unwrap_or_default();
        let wanted = name_of(list);
        let Some(live) = self.live.get_mut(ends) else { return };
        live.proposed = None;
        live.swaps_failed += 1;
        live.trouble = Some(format!("it was not swapped to graft {wanted}: {}", why.text()));
        events.push(Event::NotSwapped { session: live.session.name.clone(), graft: wanted, why });
    }

    /// Without it, nobody would notice that the last packets before a pause were lost.
    fn say_last(&mut self, tick: &Tick) {
        let Some(live) = self.live.get_mut(&tick.ends) else { return };
        let graft = self.settings.grafts.get(&live.session.graft);
        let is_waiting = tick.acked != tick.next
            && graft.is_some_and(|graft| graft.services.contains(&Service::FlowControl));
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

    fn look_at_budgets(&mut self, events: &mut Vec<Event>) -> Result<(), Error> {
        let ends: Vec<_> = self.live.keys().copied().collect();
        for ends in ends {
            let mut times = [joint::Times::default(); 3];
            for (joint, times) in Joint::ALL.into_iter().zip(&mut times) {
                *times = self.joints.times(&ends, joint)?;
            }
            let Some(live) = self.live.get_mut(&ends) else { continue };
            let Some(graft) = self.settings.grafts.get(&live.session.graft) else { continue };
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
            if let Some(fallback) = fallback {
                self.propose(ends, &fallback)?;
            }
        }
        Ok(())
    }

    fn look_at_places(&mut self, events: &mut Vec<Event>) {
        let wanted = self.settings.mode;
        for place in &mut self.places {
            if self.joints.is_attached(place.index) {
                continue;
            }
            self.joints.detach_from(place.index);
            let error = match attach(&mut self.joints, &place.name, wanted) {
                Ok((index, mode)) => {
                    (place.index, place.mode) = (index, mode);
                    None
                }
                Err(error) => Some(error.to_string()),
            };
            events.push(Event::Detached { interface: place.name.clone(), error });
        }
    }
}

impl Live {
    fn next(&self) -> Option<Duration> {
        let keys = self.sealed.as_ref().and_then(|sealed| sealed.agreement.next());
        self.agreement.next().into_iter().chain(keys).min()
    }

    /// Whether datagrams can pass.
    fn is_open(&self) -> bool {
        self.sealed.as_ref().is_none_or(|sealed| sealed.agreement.has_keys())
    }

    fn can_become(&self, session: &Session, settings: &Settings, is_wanted: bool) -> Result<(), Error> {
        let name = &session.name;
        if self.session.key != session.key
            || self.session.name != *name
            || self.session.cipher != session.cipher
        {
            return Err(Error::Settings(format!(
                "session {name}: its name, key and cipher do not change while it runs"
            )));
        }
        if is_wanted && self.agreement.next().is_some() {
            return Err(Error::Busy(name.clone()));
        }
        let graft = &self.session.graft;
        if !is_wanted && settings.grafts.get(graft).is_none_or(|graft| graft.list.id != self.agreement.list())
        {
            return Err(Error::Used { name: graft.clone(), user: format!("session {name}") });
        }
        Ok(())
    }

    /// Two grafts may be the same list: the one that was proposed, or any.
    fn own_name_of(&self, graft: &Graft, settings: &Settings) -> String {
        let wanted = self.wanted.as_ref().and_then(|name| settings.grafts.get(name));
        wanted.filter(|wanted| wanted.list == graft.list).unwrap_or(graft).name.clone()
    }

    fn status(&self, counts: &[(Reason, u64)], settings: &Settings) -> SessionStatus {
        let graft = settings.grafts.get(&self.session.graft);
        let packets = counts.iter().filter(|(_, count)| *count > 0);
        let means = Joint::ALL.into_iter().zip(self.meter.mean);
        SessionStatus {
            name: self.session.name.clone(),
            local: self.session.ends.local.to_string(),
            remote: self.session.ends.remote.to_string(),
            graft: self.session.graft.clone(),
            functions: graft.map(|graft| graft.list.functions.clone()).unwrap_or_default(),
            sealed: self.sealed.as_ref().map_or("clear", |sealed| sealed.cipher.name()).to_owned(),
            has_keys: self.sealed.is_some() && self.is_open(),
            packets: packets.map(|(reason, count)| (reason.name().to_owned(), *count)).collect(),
            budget_ns: graft.map_or(0, |graft| graft.budget_ns),
            mean_ns: means.filter_map(|(joint, mean)| Some((joint.name().to_owned(), mean?))).collect(),
            over_budget: self.meter.over,
            swaps: self.swaps,
            swaps_failed: self.swaps_failed,
        }
    }
}

impl Why {
    pub fn text(self) -> &'static str {
        match self {
            Self::Refused => "the other end has no such list of the same functions",
            Self::Silent => "the other end does not answer",
            Self::Busy => "another swap is under way",
        }
    }
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

/// Functions that a graft names, and that are not there yet.
fn load(joints: &mut Joints, settings: &Settings) -> Result<(), Error> {
    let is_used = |name: &String| {
        settings.grafts.values().any(|graft| graft.list.functions.iter().any(|it| it == name))
    };
    for function in settings.functions.iter() {
        let name = &function.manifest.name;
        if !is_used(name) || joints.has(name) {
            continue;
        }
        let values = settings.parameters.get(name).cloned().unwrap_or_default();
        joints.add(function.open(&values)?).map_err(|error| function.refused(error))?;
    }
    Ok(())
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

fn attach(joints: &mut Joints, name: &str, mode: Mode) -> Result<(i32, Mode), Error> {
    let failed = |source| Error::Interface { name: name.to_owned(), source };
    let index = if_nametoindex(name).map_err(failed)?;
    let index = i32::try_from(index).map_err(|_| failed(nix::Error::ERANGE))?;
    Ok((index, joints.attach(index, mode)?))
}

mod sealed;
#[cfg(test)]
mod tests;
