//! Grafts in the kernel, rules for connections, and how both change while traffic goes on.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    hash::{BuildHasher as _, Hasher as _, RandomState},
    net::{IpAddr, SocketAddr},
    path::{Path as FilePath, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use millrace_graft_kernel as kernel;
use millrace_graft_kernel::{Change, Changed, Control, Outcome, Pins, Shared, Sockets, Tcp, Timing, What};
use millrace_graft_proto::{
    measure::Report,
    select::kind::{Kinds, number_of},
};
use millrace_kernel::clock;

pub use self::agreement::{Own, Session};
use self::{
    selection::{Order, Selection, World},
    warm::Warm,
};
use crate::{
    Agree, Carried, Error, Graft, Learned, Pool, Refusal, Rule, Settings, Side,
    agreements::Agreements,
    identity::hex,
    paths::Monitor,
    settings,
    status::{self, Status, Why},
};

pub(crate) mod agreement;
mod selection;
mod warm;

/// Congestion controls that TCP has now.
const CONTROLS: &str = "/proc/sys/net/ipv4/tcp_available_congestion_control";
const DEFAULT_CONTROL: &str = "/proc/sys/net/ipv4/tcp_congestion_control";

/// A graft that was loaded.
struct Loaded {
    graft: Graft,
    values: BTreeMap<String, u64>,
    control: Control,
    /// By the settings; else on request, which survives a reload.
    by_settings: bool,
}

/// What a swap has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swapped {
    /// Live connections that use the new one.
    pub changed: Changed,
    /// From the first live connection to the last, with the walk over the others.
    pub walk_us: u64,
}

/// All of it is taken back when this is dropped.
pub struct Runtime {
    settings: Settings,
    pool: Pool,
    tcp: Tcp,
    sockets: Sockets,
    loaded: BTreeMap<String, Loaded>,
    monitor: Monitor,
    cgroup: PathBuf,
    since: Instant,
    agreements: Agreements,
    revision: u64,
    /// Where links stay when this ends.
    pins: Option<Pins>,
    warm: Warm,
    /// Of rules that have the model choose.
    selection: Selection,
    /// Peers with a broker, and whether a carrier to it is warm.
    carriers: BTreeMap<IpAddr, bool>,
    /// Cgroups of rules have come or gone, and the kernel does not know yet.
    has_news: bool,
    kinds: Arc<Mutex<Kinds>>,
}

impl Runtime {
    /// # Errors
    /// A graft or a rule of the settings cannot be had; nothing is left then.
    pub fn start(settings: Settings) -> Result<Self, Error> {
        Self::start_after(settings, None, false)
    }

    /// In the place of what an earlier one left in `pins`. `persist`: what this one does stays there when it ends, however it does.
    ///
    /// # Errors
    /// As [`start`](Self::start); or nothing can stay there.
    pub fn start_after(settings: Settings, pins: Option<&Pins>, persist: bool) -> Result<Self, Error> {
        let kept = pins.filter(|_| persist);
        kept.map_or(Ok(()), Pins::create)?;
        let pool = Pool::read(&settings.pool, &settings.trusted_keys)?;
        let cgroup = settings.cgroup.clone().or_else(root_cgroup).ok_or_else(|| {
            Error::Settings("cgroup is missing: no cgroup of version 2 is mounted here".to_owned())
        })?;
        let (mut tcp, sockets) = (Tcp::load()?, Sockets::load()?);
        let mut loaded = BTreeMap::new();
        for (name, values) in present(&settings, &pool) {
            loaded.insert(name.clone(), Loaded::after(pool.find(&name)?, values, pins)?);
        }
        known(&settings, &pool)?;
        tcp.set_rules(&places(&settings, &loaded))?;
        tcp.attach(&cgroup)?;
        // The program that acted until now, and grafts that are not wanted any more.
        pins.map(Pins::clean);
        if let Some(pins) = kept {
            pins.create()?;
            tcp.keep(pins)?;
            loaded.values_mut().try_for_each(|it: &mut Loaded| it.control.keep(pins))?;
        }
        let mut warm = Warm::default();
        warm.prepare(&pool, &settings.pool);
        let monitor = Monitor::new(settings.classes.clone());
        let mut agreements = Agreements::default();
        agreements.set_peers(peers(&settings), clock::monotonic_ns());
        let since = Instant::now();
        let pins = kept.cloned();
        Ok(Self {
            settings,
            pool,
            tcp,
            sockets,
            loaded,
            monitor,
            cgroup,
            since,
            agreements,
            revision: 1,
            pins,
            warm,
            selection: Selection::new(&plain()),
            carriers: BTreeMap::new(),
            has_news: false,
            kinds: Arc::default(),
        })
    }

    /// Other settings, all or nothing: what can fail comes before what changes.
    pub fn apply(&mut self, settings: Settings) -> Result<(), Error> {
        let cgroup = settings.cgroup.clone().or_else(root_cgroup);
        if cgroup.as_ref() != Some(&self.cgroup) {
            return Err(Error::Settings("cgroup does not change while it runs".to_owned()));
        }
        // What is carried would be cut off.
        if let (Some(old), Some(new)) = (&self.settings.carry, &settings.carry)
            && old != new
        {
            return Err(Error::Settings("[carry] does not change while it runs: start it anew".to_owned()));
        }
        if self.settings.carry.is_some()
            && settings.carry.is_some()
            && self.settings.gateway != settings.gateway
        {
            return Err(Error::Settings("[gateway] does not change while it runs: start it anew".to_owned()));
        }
        let pool = Pool::read(&settings.pool, &settings.trusted_keys)?;
        known(&settings, &pool)?;
        let needed = present(&settings, &pool);
        let mut fresh = BTreeMap::new();
        let mut changed = Vec::new();
        for (name, values) in &needed {
            let graft = pool.find(name)?;
            match self.loaded.get(name) {
                None => {
                    fresh.insert(name.clone(), Loaded::new(graft, values.clone(), true)?);
                }
                Some(loaded) if loaded.is(graft, values) => {}
                Some(loaded) => {
                    loaded.can_become(graft, values)?;
                    changed.push((name.clone(), graft.clone(), values.clone()));
                }
            }
        }
        for (name, graft, values) in changed {
            if let Some(loaded) = self.loaded.get_mut(&name) {
                loaded.become_other(graft, values)?;
            }
        }
        if let Some(pins) = &self.pins {
            fresh.values_mut().try_for_each(|loaded| loaded.control.keep(pins))?;
        }
        self.loaded.append(&mut fresh);
        // The next look chooses anew.
        self.tcp.set_rules(&places(&settings, &self.loaded))?;
        self.tcp.forget_choices()?;
        self.selection.renew(&settings);
        let pins = &self.pins;
        self.loaded.retain(|name, loaded| {
            let stays = needed.contains_key(name) || !loaded.by_settings;
            if let Some(pins) = pins.as_ref().filter(|_| !stays) {
                loaded.control.let_go(pins);
            }
            stays
        });
        for (name, loaded) in &mut self.loaded {
            loaded.by_settings |= needed.contains_key(name);
        }
        self.warm.prepare(&pool, &settings.pool);
        self.monitor.set_classes(settings.classes.clone());
        self.agreements.set_peers(peers(&settings), clock::monotonic_ns());
        (self.settings, self.pool) = (settings, pool);
        self.revision += 1;
        Ok(())
    }

    /// One more.
    pub fn load(&mut self, name: &str, values: BTreeMap<String, u64>) -> Result<Timing, Error> {
        self.read_pool()?;
        if self.loaded.contains_key(name) {
            return Err(Error::Loaded(name.to_owned()));
        }
        let mut loaded = Loaded::new(self.pool.find(name)?, values, false)?;
        self.pins.as_ref().map_or(Ok(()), |pins| loaded.control.keep(pins))?;
        let timing = loaded.control.timing();
        self.loaded.insert(name.to_owned(), loaded);
        Ok(timing)
    }

    /// Connections that use it keep it until they close.
    pub fn unload(&mut self, name: &str) -> Result<(), Error> {
        if !self.loaded.contains_key(name) {
            return Err(Error::NotLoaded(name.to_owned()));
        }
        if let Some(rule) = self.settings.rules.iter().find(|rule| rule.graft.as_deref() == Some(name)) {
            return Err(Error::Used { name: name.to_owned(), user: format!("rule {}", rule.name) });
        }
        if let (Some(mut loaded), Some(pins)) = (self.loaded.remove(name), &self.pins) {
            loaded.control.let_go(pins);
        }
        Ok(())
    }

    /// Live connections of this network namespace go from one graft to another, which is loaded if it was not. The same
    /// name twice: what its files are now, with these values.
    pub fn swap(&mut self, from: &str, to: &str, values: BTreeMap<String, u64>) -> Result<Swapped, Error> {
        self.read_pool()?;
        let old = self.loaded.get_mut(from).ok_or_else(|| Error::NotLoaded(from.to_owned()))?;
        let from = old.control.name().to_owned();
        if old.graft.manifest.name == to {
            old.become_other(self.pool.find(to)?.clone(), values)?;
            self.tcp.set_rules(&places(&self.settings, &self.loaded))?;
            self.revision += 1;
        } else if !self.loaded.contains_key(to) {
            self.load(to, values)?;
        } else if !values.is_empty() {
            return Err(Error::Loaded(to.to_owned()));
        }
        let to = self.loaded.get(to).ok_or_else(|| Error::NotLoaded(to.to_owned()))?.control.name();
        let start = Instant::now();
        let changed = self.sockets.set(&everybody(&from, to))?;
        Ok(Swapped { changed, walk_us: start.elapsed().as_micros().try_into().unwrap_or(u64::MAX) })
    }

    /// Looks at the sockets, and at the pool's files.
    pub fn tick(&mut self) -> Result<(), Error> {
        self.warm.look(&self.settings.pool, &self.settings.trusted_keys);
        self.hear()?;
        let sockets = self.sockets.read()?;
        if self.selection.has_live() {
            let live: HashSet<u64> = sockets.iter().map(|socket| socket.cookie).collect();
            let untold = self
                .tcp
                .outcomes()?
                .iter()
                .find(|(it, _)| *it == Outcome::Untold)
                .map_or(0, |(_, count)| *count);
            self.selection.prune(|cookie| live.contains(&cookie), untold);
        }
        self.monitor.update(sockets, now_s());
        self.follow_cgroups()?;
        if self.selects() {
            let paths = self.monitor.paths();
            self.choose(&paths, true)?;
        }
        Ok(())
    }

    /// What has come of connections since, so that those that follow have it. Little is done where nothing has.
    pub fn learn(&mut self) -> Result<(), Error> {
        let peers = self.hear()?;
        let paths: Vec<_> = peers.into_iter().filter_map(|peer| self.monitor.path_to(peer)).collect();
        if paths.is_empty() { Ok(()) } else { self.choose(&paths, false) }
    }

    /// Whether a rule has the model choose.
    pub fn selects(&self) -> bool {
        self.settings.rules.iter().any(|rule| rule.select.is_some())
    }

    /// Peers with whom connections have ended.
    fn hear(&mut self) -> Result<BTreeSet<IpAddr>, Error> {
        let mut peers = BTreeSet::new();
        for told in self.tcp.take_told()? {
            if told.what == What::Ended {
                let peer = told.remote.ip();
                if let Some(rate) = told.socket.delivery_rate {
                    self.selection.note_mbit(peer, rate as f64 * 8.0 / 1e6);
                }
                self.monitor.note_ended(told.socket.clone(), now_s());
                peers.insert(peer);
            }
            if let Some(flow) = self.selection.note(&told, &self.settings) {
                lock(&self.kinds).note(flow.kind(), number_of(flow.remote.ip()), flow.passed());
            }
        }
        Ok(peers)
    }

    /// Those that rules name and that have come or gone.
    fn follow_cgroups(&mut self) -> Result<(), Error> {
        self.has_news |= self.settings.follow_cgroups();
        if self.has_news {
            self.tcp.set_rules(&places(&self.settings, &self.loaded))?;
            self.has_news = false;
            self.revision += 1;
        }
        Ok(())
    }

    /// Connections that are there keep what they have.
    fn choose(&mut self, paths: &[status::Path], is_all: bool) -> Result<(), Error> {
        let there = std::fs::read_to_string(CONTROLS).unwrap_or_default();
        let (tcp, kinds) = (&self.tcp, lock(&self.kinds));
        let world = World {
            settings: &self.settings,
            controls: &|control| there.split_whitespace().any(|known| known == control),
            carriers: &self.carriers,
            kinds: &kinds,
            chance: &chance,
            is_granted: &|peer, rule| tcp.is_granted(peer, rule).unwrap_or(true),
        };
        let mut done = Ok(());
        for order in self.selection.choose(&world, paths, is_all) {
            let carried_out = match order {
                Order::Choose { peer, rule, choice } => {
                    self.tcp.choose(peer, rule, &choice).inspect_err(|_| self.selection.undo(peer, rule))
                }
                Order::Forget { peer, rule } => self.tcp.choose_no_more(peer, rule),
            };
            done = done.and(carried_out);
        }
        Ok(done?)
    }

    /// What a broker has told.
    pub fn note_carried(&mut self, all: impl IntoIterator<Item = Carried>) {
        all.into_iter().for_each(|carried| self.selection.note_carried(carried, &self.settings));
    }

    /// It carries no more.
    pub fn forget_carried(&mut self) {
        self.selection.forget_carried();
    }

    /// Peers with a broker, and whether a carrier to it is warm.
    pub fn set_carriers(&mut self, carriers: BTreeMap<IpAddr, bool>) {
        self.carriers = carriers;
    }

    /// For hooks that choose with it.
    pub fn share(&mut self) -> Result<Shared, Error> {
        Ok(self.tcp.share()?)
    }

    /// Why a connection goes as it does; `None`: it is not known, or not any more.
    pub fn why_connection(&mut self, ends: [SocketAddr; 2]) -> Result<Option<status::Connection>, Error> {
        self.learn()?;
        Ok(self.selection.connection(ends, clock::monotonic_ns()))
    }

    /// All that was learned of connections.
    pub fn learned(&self) -> Learned {
        let mut learned = Learned::of(&lock(&self.kinds), &self.settings);
        self.selection.remember(&mut learned);
        learned
    }

    /// What the one before this has learned, as far as it holds under these settings.
    pub fn recall(&mut self, learned: &Learned) {
        learned.teach(&mut lock(&self.kinds), &self.settings);
        self.selection.recall(learned, &self.settings);
    }

    /// What a probe has found out.
    pub fn note_probe(&mut self, peer: IpAddr, report: Report) {
        self.monitor.note_probe(peer, report, clock::monotonic_ns() / 1_000_000_000);
    }

    /// What connections are for, as far as earlier ones have shown. Whoever sees them end writes to it.
    pub fn kinds(&self) -> Arc<Mutex<Kinds>> {
        self.kinds.clone()
    }

    /// What is known of kinds, the latest first.
    fn all_purposes(&self) -> Vec<status::Purpose> {
        let kinds = lock(&self.kinds);
        let of = |kind| status::Purpose::of_kind(kind, &self.settings.expected(kind, &kinds));
        kinds.iter().map(of).collect()
    }

    /// Of rules that a peer's connections may fall under: what these are for.
    fn purposes(&self, peer: IpAddr) -> Vec<status::Purpose> {
        let kinds = lock(&self.kinds);
        let is_for = |rule: &&Rule| rule.peers.iter().any(|prefix| kernel::covers(*prefix, peer));
        let matters = |rule: &&Rule| rule.select.is_some() || rule.tier != settings::Tier::InPlace;
        let rules = self.settings.rules.iter().filter(is_for).filter(matters);
        rules.map(|rule| status::Purpose::of(rule, &self.settings.expected_of(rule, &kinds))).collect()
    }

    /// Paths that are to be probed again and again.
    pub fn probes(&self) -> &[settings::Probe] {
        &self.settings.probes
    }

    pub fn status(&mut self) -> Result<Status, Error> {
        self.learn()?;
        let sockets = self.sockets.read()?;
        let using = |name: &str| sockets.iter().filter(|socket| socket.congestion == name).count() as u64;
        let outcomes =
            self.tcp.outcomes()?.into_iter().map(|(outcome, count)| (outcome.name().to_owned(), count));
        Ok(Status {
            uptime_s: self.since.elapsed().as_secs_f64(),
            cgroup: self.cgroup.display().to_string(),
            loaded: self.loaded.values().map(|it| it.status(using(it.control.name()))).collect(),
            rules: self.settings.rules.iter().map(|rule| self.rule_status(rule)).collect(),
            outcomes: outcomes.collect(),
            unusable: self.pool.unusable.clone(),
            paths: self.monitor.paths(),
            trouble: self.trouble(),
            peers: self.agreements.status(clock::monotonic_ns()),
            negotiations: self.agreements.negotiations(),
            downgrades: self.agreements.downgrades(),
            selection: self.selects().then(|| self.selection.status()),
            purposes: self.all_purposes(),
            ..Status::default()
        })
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Whose sockets.
    pub fn cgroup(&self) -> &FilePath {
        &self.cgroup
    }

    pub fn paths(&self) -> Vec<status::Path> {
        self.monitor.paths()
    }

    /// Of a path with this least round trip.
    pub fn class_of(&self, rtt_min_us: u32) -> String {
        self.monitor.class_of(rtt_min_us)
    }

    pub fn why(&mut self, peer: IpAddr) -> Result<Why, Error> {
        let known = self.tcp.peer(peer)?;
        let path = self.monitor.path_to(peer);
        let agreement = self.agreements.status_of(peer, clock::monotonic_ns());
        let chosen = self.selection.of_peer(peer);
        let purposes = self.purposes(peer);
        let Some(known) = known else {
            let reason = "no connection with it was made that a rule fits, or that was long ago".to_owned();
            return Ok(Why {
                peer: peer.to_string(),
                reason,
                path,
                agreement,
                chosen,
                purposes,
                ..Why::default()
            });
        };
        let age_ns = clock::monotonic_ns().saturating_sub(known.time_ns);
        Ok(Why {
            peer: peer.to_string(),
            outcome: Some(known.outcome.name().to_owned()),
            reason: reason(known.outcome).to_owned(),
            rule: self.rule_at(known.rule),
            peer_graft: (known.graft != [0; 4]).then(|| self.name_of(known.graft)),
            agreed: known.agreed,
            age_s: Some(age_ns as f64 / 1e9),
            path,
            agreement,
            chosen,
            purposes,
            ..Why::default()
        })
    }

    fn read_pool(&mut self) -> Result<(), Error> {
        self.pool = Pool::read(&self.settings.pool, &self.settings.trusted_keys)?;
        Ok(())
    }

    /// What is not as it should be.
    pub fn trouble(&self) -> Vec<String> {
        let not_by_link = self.loaded.values().filter(|loaded| !loaded.control.is_by_link());
        let mut trouble: Vec<_> = not_by_link
            .map(|loaded| {
                let name = loaded.control.name();
                format!("{name} would stay if this process were killed, until it is started again: the kernel is before 6.4")
            })
            .collect();
        let unusable = self.pool.unusable.iter();
        trouble.extend(unusable.map(|(path, message)| format!("{path}: {message}")));
        trouble
    }

    /// Rules are one for each pair of a port and a peer in the kernel; this host's own come behind them.
    fn rule_at(&self, index: u32) -> Option<String> {
        let rules = self.settings.rules.iter();
        let mut names = rules.flat_map(|rule| vec![&rule.name; rule.ports.len() * rule.peers.len()]);
        let own = (index as usize) < kernel::RULES;
        names.nth(index as usize).cloned().or_else(|| own.then(|| "(control connections)".to_owned()))
    }

    /// Whether a rule's graft is to come from a peer and has not.
    fn waits(&self, rule: &Rule) -> bool {
        waits(rule, &self.settings, &self.loaded)
    }

    fn rule_status(&self, rule: &Rule) -> status::Rule {
        let waits = self.waits(rule);
        status::Rule { waits, ..rule_status(rule, &self.loaded) }
    }

    fn name_of(&self, start: [u8; 4]) -> String {
        match self.pool.iter().find(|graft| graft.identity.start() == start) {
            Some(graft) => format!("{} ({})", hex(&start), graft.manifest.name),
            None => hex(&start),
        }
    }
}

impl Loaded {
    fn new(graft: &Graft, values: BTreeMap<String, u64>, by_settings: bool) -> Result<Self, Error> {
        let wanted = graft.values(&values)?;
        let control = Control::register(&graft.image, &wanted).map_err(|error| refused(graft, error))?;
        Ok(Self { graft: graft.clone(), values, control, by_settings })
    }

    /// In the place of what was left of it.
    fn after(graft: &Graft, values: BTreeMap<String, u64>, pins: Option<&Pins>) -> Result<Self, Error> {
        let Some(pins) = pins else { return Self::new(graft, values, true) };
        let wanted = graft.values(&values)?;
        let control = Control::take_over(&graft.image, &wanted, pins);
        let control = control.map_err(|error| refused(graft, error))?;
        Ok(Self { graft: graft.clone(), values, control, by_settings: true })
    }

    fn is(&self, graft: &Graft, values: &BTreeMap<String, u64>) -> bool {
        self.graft.identity == graft.identity && self.values == *values
    }

    fn can_become(&self, graft: &Graft, values: &BTreeMap<String, u64>) -> Result<(), Error> {
        if graft.congestion != self.control.name() {
            let (other, own) = (graft.congestion.clone(), self.control.name().to_owned());
            return Err(graft.error(kernel::Error::OtherName(other, own).to_string()));
        }
        let wanted = graft.values(values)?;
        Control::verify(&graft.image, &wanted).map_err(|error| refused(graft, error))?;
        Ok(())
    }

    fn become_other(&mut self, graft: Graft, values: BTreeMap<String, u64>) -> Result<(), Error> {
        let wanted = graft.values(&values)?;
        self.control.replace(&graft.image, &wanted).map_err(|error| refused(&graft, error))?;
        (self.graft, self.values) = (graft, values);
        Ok(())
    }

    fn status(&self, connections: u64) -> status::Loaded {
        let Timing { open, load, attach, .. } = self.control.timing();
        let us = |time: std::time::Duration| time.as_micros().try_into().unwrap_or(u64::MAX);
        let mut parameters = self.graft.defaults.clone();
        parameters.extend(self.values.clone());
        status::Loaded {
            name: self.graft.manifest.name.clone(),
            congestion: self.control.name().to_owned(),
            identity: self.graft.identity.to_string(),
            parameters,
            by_link: self.control.is_by_link(),
            open_us: us(open),
            load_us: us(load),
            attach_us: us(attach),
            connections,
        }
    }
}

/// Whether the kernel would load it. Nothing is registered.
pub fn check(graft: &Graft, values: &BTreeMap<String, u64>) -> Result<Timing, Error> {
    let wanted = graft.values(values)?;
    Control::verify(&graft.image, &wanted).map_err(|error| refused(graft, error))
}

fn refused(graft: &Graft, error: kernel::Error) -> Error {
    match error.log() {
        Some(log) if !log.is_empty() => {
            Error::Refused { name: graft.manifest.name.clone(), refusal: Refusal::parse(log) }
        }
        _ => graft.error(error.to_string()),
    }
}

/// Grafts that are needed, but for those that are yet to come from a peer.
fn present(settings: &Settings, pool: &Pool) -> BTreeMap<String, BTreeMap<String, u64>> {
    let mut needed = settings.needed();
    // What the model may choose, as far as it is there.
    if let Some(model) =
        settings.model.as_ref().filter(|_| settings.rules.iter().any(|it| it.select.is_some()))
    {
        for graft in pool.iter().filter(|graft| model.arms.contains(&graft.congestion)) {
            needed.entry(graft.manifest.name.clone()).or_default();
        }
    }
    needed.retain(|name, _| !settings.fetches(name) || pool.find(name).is_ok());
    needed
}

/// What peers are to use has a name here, too.
fn known(settings: &Settings, pool: &Pool) -> Result<(), Error> {
    let mut wanted = settings.rules.iter().filter_map(|rule| rule.peer_graft.as_ref());
    wanted.try_for_each(|name| pool.find(name).map(drop))
}

fn peers(settings: &Settings) -> impl Iterator<Item = String> {
    settings.agreement.iter().flat_map(|it| &it.peers).map(|peer| peer.name.clone())
}

fn waits(rule: &Rule, settings: &Settings, loaded: &BTreeMap<String, Loaded>) -> bool {
    rule.graft.as_ref().is_some_and(|name| settings.fetches(name) && !loaded.contains_key(name))
}

fn places(settings: &Settings, loaded: &BTreeMap<String, Loaded>) -> Vec<kernel::Rule> {
    let place = |(at, rule): (usize, &Rule)| {
        let graft = rule.graft.as_ref().and_then(|name| loaded.get(name));
        let start = graft.map(|loaded| loaded.graft.identity.start()).unwrap_or_default();
        let mut places = rule.places(congestion(rule, loaded), start);
        // It keeps its place, and fits nothing.
        if waits(rule, settings, loaded) {
            places.iter_mut().for_each(|place| place.ports = 0..=0);
        }
        if rule.select.is_some() {
            places.iter_mut().for_each(|place| place.choice = settings::place_number(at));
        }
        places
    };
    settings.rules.iter().enumerate().flat_map(place).chain(settings.own_rules()).collect()
}

fn congestion(rule: &Rule, loaded: &BTreeMap<String, Loaded>) -> Option<String> {
    let graft = rule.graft.as_ref().and_then(|name| loaded.get(name));
    graft.map(|loaded| loaded.control.name().to_owned()).or_else(|| rule.congestion.clone())
}

fn rule_status(rule: &Rule, loaded: &BTreeMap<String, Loaded>) -> status::Rule {
    let port = |ports: &std::ops::RangeInclusive<u16>| match ports.start() == ports.end() {
        true => ports.start().to_string(),
        false => format!("{}-{}", ports.start(), ports.end()),
    };
    status::Rule {
        name: rule.name.clone(),
        side: if rule.side == Side::Client { "client" } else { "server" }.to_owned(),
        ports: rule.ports.iter().map(port).collect(),
        peers: rule.peers.iter().map(ToString::to_string).collect(),
        who: rule.who.words(),
        missing: rule.who.is_missing(),
        agree: rule.agree != Agree::Nobody,
        bound: rule.agree == Agree::Bound,
        waits: false,
        congestion: congestion(rule, loaded).or_else(|| rule.select.map(|_| "by the model".to_owned())),
    }
}

/// All connections that use `from`.
fn everybody(from: &str, to: &str) -> Change {
    let settings = kernel::Settings { congestion: Some(to.to_owned()), ..kernel::Settings::default() };
    // Every port is somebody's.
    let rule = kernel::Rule {
        side: kernel::Side::Server,
        peer: kernel::everybody(),
        ports: 0..=u16::MAX,
        caller: kernel::Caller::default(),
        agree: false,
        bound: false,
        choice: 0,
        graft: [0; 4],
        settings,
    };
    Change { rule, from: Some(from.to_owned()) }
}

fn reason(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Agreed => "both sides have agreed; each has set its own socket",
        Outcome::OneSided => "the rule asks nobody; this side has set its socket",
        Outcome::Absent => {
            "it did not answer: it has no grafts, no rule for this, SYN cookies, or the option was taken off; plain TCP"
        }
        Outcome::Stripped => {
            "it has answered before and did not now: the option was taken off on the way, or its rules changed; plain TCP"
        }
        Outcome::Refused => "it speaks another version; plain TCP",
        Outcome::Malformed => "its option is not as it should be; plain TCP",
        Outcome::Unconfirmed => "it offered nothing, or our answer did not reach it; plain TCP",
        Outcome::NoRoom => "TCP's own options left no room, as with MPTCP; plain TCP",
        Outcome::Cookies => "SYN cookies are in use, with which nothing is answered; plain TCP",
        Outcome::Answered => "it was answered",
        Outcome::NoCongestion => "the congestion control is not there; the socket keeps its own",
        Outcome::NotSet => "the kernel refused a setting",
        Outcome::Resent => {
            "the SYN had to be sent again, and went without the option: it was lost, or something on the way drops such SYNs; plain TCP"
        }
        Outcome::Withheld => {
            "nothing was offered, since a SYN with the option was lost on the way to it in the last ten minutes; plain TCP"
        }
        Outcome::Unbound => "the rule wants an agreement with it, and there is none in force; plain TCP",
        Outcome::Untold => "what came of it was not read in time",
        Outcome::NoMemory => "there was no memory for the socket's state; plain TCP",
    }
}

/// A panic of somebody who held it has left counts that are whole.
fn lock(kinds: &Mutex<Kinds>) -> MutexGuard<'_, Kinds> {
    kinds.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What sockets have unless somebody says otherwise.
fn plain() -> String {
    std::fs::read_to_string(DEFAULT_CONTROL)
        .map_or_else(|_| "cubic".to_owned(), |name| name.trim().to_owned())
}

/// Evenly from 0 to 1. Nobody outside is to foresee it, and it need not be more.
fn chance() -> f64 {
    let bits = RandomState::new().build_hasher().finish();
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

fn now_s() -> u64 {
    clock::monotonic_ns() / 1_000_000_000
}

/// Where version 2 is mounted.
fn root_cgroup() -> Option<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
    let mut fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let found = fields.find(|fields| fields.get(2) == Some(&"cgroup2"))?;
    found.get(1).map(|path| FilePath::new(path).to_owned())
}
