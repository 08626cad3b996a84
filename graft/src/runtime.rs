//! The runtime of grafts for TCP: it loads grafts into the kernel, applies rules to connections, and changes both while
//! connections are open.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    hash::{BuildHasher as _, Hasher as _, RandomState},
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Instant,
};

use millrace_graft_kernel as kernel;
use millrace_graft_kernel::{
    ChangeCounts, CongestionProgram, PinDirectory, SelectedEventKind, SelectionMaps, SocketChange,
    SocketPrograms, Tcp, TcpOutcome, Timing,
};
use millrace_graft_proto::{
    measure::PathReport,
    select::kind::{ClassLesson, Kinds, Saw, number_of},
};
use millrace_kernel::clock;

pub use self::agreement::{AgreementSession, ComparedStatements, NegotiationEnds};
use self::{
    selection::{RuntimeSelection, SelectionOrder, SelectionWorld},
    warm::Warm,
};
use crate::{
    Agree, CarriedFlow, Error, GraftPool, Learned, LoadRefusal, PoolGraft, RuleSetting, Settings,
    SideSetting,
    agreements::PeerAgreements,
    identity::hex,
    paths::Monitor,
    settings,
    status::{self, PeerExplanation, Status},
};

pub(crate) mod agreement;
mod selection;
mod warm;

/// File that lists the congestion controls that TCP has at present.
const CONTROLS: &str = "/proc/sys/net/ipv4/tcp_available_congestion_control";
const DEFAULT_CONTROL: &str = "/proc/sys/net/ipv4/tcp_congestion_control";

/// A graft that is loaded in the kernel.
struct LoadedGraft {
    graft: PoolGraft,
    values: BTreeMap<String, u64>,
    control: CongestionProgram,
    /// True if the settings load the graft. A graft that was loaded on request is kept when the settings are reloaded.
    by_settings: bool,
}

/// The result of changing live connections from one graft to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwapResult {
    /// Number of live connections that were changed to the new graft.
    pub changed: ChangeCounts,
    /// Time that the change of all sockets took, in microseconds.
    pub walk_us: u64,
}

/// A runtime of congestion controls. Dropping it removes everything from the kernel, unless it was started with
/// `persist`.
///
/// [`Self::start_after`] loads the grafts and sets the rules before the first connection can match one. The caller then
/// calls [`Self::tick`] about once a second and [`Self::learn`] more often. [`Self::apply`] replaces the settings,
/// completely or not at all, while [`Self::load`], [`Self::unload`] and [`Self::swap`] change one graft on request. A
/// connection that uses a graft keeps it until it closes, even if the graft is unloaded. [`Self::revision`] grows when
/// rules that were agreed with peers may have changed, so that the caller negotiates them with the peers again. Between
/// calls, every active rule in the kernel names a loaded graft. A rule whose graft a peer has yet to send matches no
/// connection.
pub struct GraftRuntime {
    settings: Settings,
    pool: GraftPool,
    tcp: Tcp,
    sockets: SocketPrograms,
    loaded: BTreeMap<String, LoadedGraft>,
    monitor: Monitor,
    cgroup: PathBuf,
    since: Instant,
    agreements: PeerAgreements,
    revision: u64,
    /// Directory where BPF links are pinned, so that the programs stay attached when the runtime ends.
    pins: Option<PinDirectory>,
    warm: Warm,
    /// State of the rules with `select`. For connections that match such a rule, a model chooses the congestion control
    /// or the carrier.
    selection: RuntimeSelection,
    /// Peers with a broker, and whether a carrier to each is ready ("warm").
    carriers: BTreeMap<IpAddr, bool>,
    /// True if cgroups that rules name were added or removed, and the rules in the kernel were not updated yet.
    has_news: bool,
    kinds: Kinds,
    /// Connections that have ended and that the tunnel broker has yet to learn of. `None` while no broker runs.
    lessons: Option<Vec<ClassLesson>>,
}

/// Limit of ended connections that the tunnel broker has yet to learn of. It takes them ten times a second.
const LESSONS_MAX: usize = 8192;

impl GraftRuntime {
    /// Loads the grafts and rules of the settings.
    ///
    /// # Errors
    /// Fails if a graft or a rule of the settings cannot be used. In that case nothing is left in the kernel.
    pub fn start(settings: Settings) -> Result<Self, Error> {
        Self::start_after(settings, None, false, None)
    }

    /// Replaces an earlier runtime that has left its links in `pins`. With `persist`, the links of this runtime stay
    /// when it ends for any reason. `shared` has the maps of the earlier runtime's choices, if the hooks of a tunnel
    /// broker still use them.
    ///
    /// # Errors
    /// Fails as [`start`](Self::start) does, or if links cannot be pinned in `pins`.
    pub fn start_after(
        settings: Settings,
        pins: Option<&PinDirectory>,
        persist: bool,
        shared: Option<&SelectionMaps>,
    ) -> Result<Self, Error> {
        let kept = pins.filter(|_| persist);
        kept.map_or(Ok(()), PinDirectory::create)?;
        let pool = GraftPool::read(&settings.pool, &settings.trusted_keys)?;
        let cgroup = settings.top_cgroup()?;
        let mut tcp = Tcp::load(shared)?;
        // The maps may have the choices of the earlier runtime, with its serial numbers.
        tcp.forget_choices()?;
        let sockets = SocketPrograms::load()?;
        let mut loaded = BTreeMap::new();
        for (name, values) in present(&settings, &pool) {
            loaded.insert(name.clone(), LoadedGraft::load_next_to(pool.find(&name)?, values, pins)?);
        }
        check_known(&settings, &pool)?;
        // The rules are set before the BPF program is attached, so that the program applies them to the first
        // connection.
        tcp.set_rules(&places(&settings, &loaded))?;
        tcp.attach(&cgroup)?;
        // The call of `attach` above has replaced the BPF program of an earlier runtime. Grafts of that runtime that
        // are not needed any more are removed here.
        pins.map(PinDirectory::clean);
        if let Some(pins) = kept {
            pins.create()?;
            tcp.keep(pins)?;
            loaded.values_mut().try_for_each(|it: &mut LoadedGraft| it.control.keep(pins))?;
        }
        let mut warm = Warm::default();
        warm.prepare(&pool, &settings.pool);
        let monitor = Monitor::new(settings.classes.clone());
        let mut agreements = PeerAgreements::default();
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
            selection: RuntimeSelection::new(&plain()),
            carriers: BTreeMap::new(),
            has_news: false,
            kinds: Kinds::default(),
            lessons: None,
        })
    }

    /// Applies new settings completely or not at all: all steps that can fail come before the first change.
    pub fn apply(&mut self, settings: Settings) -> Result<(), Error> {
        self.settings.can_become(&settings)?;
        let pool = GraftPool::read(&settings.pool, &settings.trusted_keys)?;
        check_known(&settings, &pool)?;
        let needed = present(&settings, &pool);
        let mut fresh = BTreeMap::new();
        let mut changed = Vec::new();
        for (name, values) in &needed {
            let graft = pool.find(name)?;
            match self.loaded.get(name) {
                None => {
                    fresh.insert(name.clone(), LoadedGraft::new(graft, values.clone(), true)?);
                }
                Some(loaded) if loaded.is(graft, values) => {}
                Some(loaded) => {
                    loaded.can_become(graft, values)?;
                    changed.push((name.clone(), graft.clone(), values.clone()));
                }
            }
        }
        // Every check has passed, so the settings are applied from here on.
        for (name, graft, values) in changed {
            if let Some(loaded) = self.loaded.get_mut(&name) {
                loaded.become_other(graft, values)?;
            }
        }
        if let Some(pins) = &self.pins {
            fresh.values_mut().try_for_each(|loaded| loaded.control.keep(pins))?;
        }
        self.loaded.append(&mut fresh);
        // The model chooses congestion controls and carriers again in the next update.
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

    /// Loads a graft that the settings do not load, for example on an operator's request.
    pub fn load(&mut self, name: &str, values: BTreeMap<String, u64>) -> Result<Timing, Error> {
        self.read_pool()?;
        if self.loaded.contains_key(name) {
            return Err(Error::Loaded(name.to_owned()));
        }
        let mut loaded = LoadedGraft::new(self.pool.find(name)?, values, false)?;
        self.pins.as_ref().map_or(Ok(()), |pins| loaded.control.keep(pins))?;
        let timing = loaded.control.timing();
        self.loaded.insert(name.to_owned(), loaded);
        Ok(timing)
    }

    /// Unloads a graft. Connections that use it keep it until they close.
    pub fn unload(&mut self, name: &str) -> Result<(), Error> {
        if !self.loaded.contains_key(name) {
            return Err(Error::NotLoaded(name.to_owned()));
        }
        // A graft that a rule uses cannot be unloaded.
        if let Some(rule) = self.settings.rules.iter().find(|rule| rule.graft.as_deref() == Some(name)) {
            return Err(Error::Used { name: name.to_owned(), user: format!("rule {}", rule.name) });
        }
        if let (Some(mut loaded), Some(pins)) = (self.loaded.remove(name), &self.pins) {
            loaded.control.let_go(pins);
        }
        Ok(())
    }

    /// Changes live connections of this network namespace from one graft to another, which is loaded if necessary. If
    /// both names are the same, the graft is loaded again from its present files, with these parameter values.
    pub fn swap(&mut self, from: &str, to: &str, values: BTreeMap<String, u64>) -> Result<SwapResult, Error> {
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
        Ok(SwapResult { changed, walk_us: start.elapsed().as_micros().try_into().unwrap_or(u64::MAX) })
    }

    /// Reads this host's sockets and the files in the grafts' directories. It has to be called about once a second.
    pub fn tick(&mut self) -> Result<(), Error> {
        self.warm.look(&self.settings.pool, &self.settings.trusted_keys);
        self.take_events()?;
        let sockets = self.sockets.read()?;
        // Connections whose end was not reported are detected by their missing sockets.
        if self.selection.has_live() {
            let live: HashSet<u64> = sockets.iter().map(|socket| socket.cookie).collect();
            let lost = self
                .tcp
                .outcomes()?
                .iter()
                .find(|(it, _)| *it == TcpOutcome::EventLost)
                .map_or(0, |(_, count)| *count);
            self.selection.prune(|cookie| live.contains(&cookie), lost);
        }
        self.monitor.update(sockets, now_s());
        self.follow_cgroups()?;
        if self.selects() {
            let paths = self.monitor.paths();
            self.choose(&paths, true)?;
        }
        Ok(())
    }

    /// Evaluates connections that have ended since the last call, so that the choice of congestion control or carrier
    /// for new connections improves. The call costs little if no connection has ended.
    pub fn learn(&mut self) -> Result<(), Error> {
        let peers = self.take_events()?;
        let paths: Vec<_> = peers.into_iter().filter_map(|peer| self.monitor.path_to(peer)).collect();
        if paths.is_empty() { Ok(()) } else { self.choose(&paths, false) }
    }

    /// Reports whether the settings have a rule with `select`, for which a model chooses the congestion control or
    /// carrier.
    pub fn selects(&self) -> bool {
        self.settings.rules.iter().any(|rule| rule.select.is_some())
    }

    /// Records events of connections that the kernel has reported. Returns the peers of connections that have ended.
    fn take_events(&mut self) -> Result<BTreeSet<IpAddr>, Error> {
        let mut peers = BTreeSet::new();
        for event in self.tcp.take_events()? {
            if event.what == SelectedEventKind::Ended {
                let peer = event.remote.ip();
                if let Some(rate) = event.socket.delivery_rate {
                    self.selection.note_mbit(peer, rate as f64 * 8.0 / 1e6);
                }
                self.monitor.note_ended(event.socket.clone(), now_s());
                peers.insert(peer);
            }
            if let Some(flow) = self.selection.note(&event, &self.settings) {
                let peer = number_of(flow.remote.ip());
                self.kinds.note(flow.kind(), peer, flow.passed());
                if let Some(lessons) = self.lessons.as_mut().filter(|lessons| lessons.len() < LESSONS_MAX) {
                    lessons.push(ClassLesson { kind: flow.kind(), seen: Saw::Flow(peer, flow.passed()) });
                }
            }
        }
        Ok(peers)
    }

    /// Updates the rules in the kernel after cgroups that rules name were added or removed.
    fn follow_cgroups(&mut self) -> Result<(), Error> {
        // If an update of the rules in the kernel fails, the next call tries again.
        self.has_news |= self.settings.follow_cgroups();
        if self.has_news {
            self.tcp.set_rules(&places(&self.settings, &self.loaded))?;
            self.has_news = false;
            self.revision += 1;
        }
        Ok(())
    }

    /// Makes the model choose the congestion control or carrier for each of these paths, and writes the choices to the
    /// kernel. Existing connections keep their settings.
    fn choose(&mut self, paths: &[status::PeerPath], is_all: bool) -> Result<(), Error> {
        // Any process may load or unload congestion controls, so their list is read each time.
        let there = std::fs::read_to_string(CONTROLS).unwrap_or_default();
        let tcp = &self.tcp;
        let world = SelectionWorld {
            settings: &self.settings,
            controls: &|control| there.split_whitespace().any(|known| known == control),
            carriers: &self.carriers,
            kinds: &self.kinds,
            chance: &chance,
            is_granted: &|peer, rule| tcp.is_granted(peer, rule).unwrap_or(true),
        };
        let mut done = Ok(());
        for order in self.selection.choose(&world, paths, is_all) {
            let carried_out = match order {
                SelectionOrder::Choose { peer, rule, choice } => {
                    self.tcp.choose(peer, rule, &choice).inspect_err(|_| self.selection.undo(peer, rule))
                }
                SelectionOrder::Forget { peer, rule } => self.tcp.choose_no_more(peer, rule),
            };
            // If one choice cannot be written to the kernel, the others are still written.
            done = done.and(carried_out);
        }
        Ok(done?)
    }

    /// Records the broker's events about redirected connections.
    pub fn note_carried(&mut self, all: impl IntoIterator<Item = CarriedFlow>) {
        all.into_iter().for_each(|carried| self.selection.note_carried(carried, &self.settings));
    }

    /// Forgets all redirected connections and all carriers, because the broker has ended.
    pub fn forget_carried(&mut self) {
        self.selection.forget_carried();
        self.carriers.clear();
        self.lessons = None;
    }

    /// Returns connections that have ended, from which the broker learns how new ones will be used: with `is_first` all
    /// that are remembered, and otherwise those that have ended since the last call.
    pub fn take_lessons(&mut self, is_first: bool) -> Vec<ClassLesson> {
        let latest = self.lessons.replace(Vec::new()).unwrap_or_default();
        if is_first { self.kinds.lessons() } else { latest }
    }

    /// Learns how new connections will be used, from redirected connections that have ended.
    pub fn teach(&mut self, lessons: Vec<ClassLesson>) {
        lessons.into_iter().for_each(|lesson| self.kinds.teach(lesson));
    }

    /// Sets the peers with a broker, and whether a carrier to each is ready ("warm").
    pub fn set_carriers(&mut self, carriers: BTreeMap<IpAddr, bool>) {
        self.carriers = carriers;
    }

    /// Returns the kernel's maps with the model's choices, which the hooks of a broker use, too.
    pub fn share(&mut self) -> Result<SelectionMaps, Error> {
        Ok(self.tcp.share()?)
    }

    /// Returns why a connection uses its congestion control or carrier, or `None` if the connection is unknown or
    /// forgotten.
    pub fn explain_connection(
        &mut self,
        ends: [SocketAddr; 2],
    ) -> Result<Option<status::GraftConnectionStatus>, Error> {
        self.learn()?;
        Ok(self.selection.connection(ends, clock::monotonic_ns()))
    }

    /// Returns everything that this runtime has learned about connections.
    pub fn learned(&self) -> Learned {
        let mut learned = Learned::from_kinds(&self.kinds, &self.settings);
        self.selection.remember(&mut learned);
        learned
    }

    /// Restores what an earlier runtime has learned, as far as it is valid under these settings.
    pub fn recall(&mut self, learned: &Learned) {
        learned.teach(&mut self.kinds, &self.settings);
        self.selection.recall(learned, &self.settings);
    }

    /// Records the result of a path probe.
    pub fn note_probe(&mut self, peer: IpAddr, report: PathReport) {
        self.monitor.note_probe(peer, report, clock::monotonic_ns() / 1_000_000_000);
    }

    /// Returns the known traffic classes (role, port, command and cgroup of connections) with their predicted purposes,
    /// the latest first.
    fn all_purposes(&self) -> Vec<status::PurposeStatus> {
        let of = |kind| status::PurposeStatus::from_kind(kind, &self.settings.expected(kind, &self.kinds));
        self.kinds.iter().map(of).collect()
    }

    /// Returns the predicted purposes (traffic profile and size) of connections with a peer, by rule.
    fn purposes(&self, peer: IpAddr) -> Vec<status::PurposeStatus> {
        let is_for = |rule: &&RuleSetting| rule.peers.iter().any(|prefix| kernel::covers(*prefix, peer));
        let matters = |rule: &&RuleSetting| rule.select.is_some() || rule.tier != settings::Tier::InPlace;
        let rules = self.settings.rules.iter().filter(is_for).filter(matters);
        rules
            .map(|rule| status::PurposeStatus::from_rule(rule, &self.settings.expected_of(rule, &self.kinds)))
            .collect()
    }

    /// Returns the present status.
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

    /// Returns the settings in force.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns the paths to peers that were measured.
    pub fn paths(&self) -> Vec<status::PeerPath> {
        self.monitor.paths()
    }

    /// Explains which graft the connections with a peer use, and why.
    pub fn explain_peer(&mut self, peer: IpAddr) -> Result<PeerExplanation, Error> {
        let known = self.tcp.peer(peer)?;
        let path = self.monitor.path_to(peer);
        let agreement = self.agreements.status_of(peer, clock::monotonic_ns());
        let chosen = self.selection.chosen_for_peer(peer);
        let purposes = self.purposes(peer);
        let Some(known) = known else {
            let reason = "no connection with this peer that matches a rule is known".to_owned();
            return Ok(PeerExplanation {
                peer: peer.to_string(),
                reason,
                path,
                agreement,
                chosen,
                purposes,
                ..PeerExplanation::default()
            });
        };
        let age_ns = clock::monotonic_ns().saturating_sub(known.time_ns);
        Ok(PeerExplanation {
            peer: peer.to_string(),
            outcome: Some(known.outcome.name().to_owned()),
            reason: reason(known.outcome).to_owned(),
            rule: self.rule_at(known.rule),
            // A graft hash of four zero bytes means that the peer uses no graft.
            peer_graft: (known.graft != [0; 4]).then(|| self.name_of(known.graft)),
            agreed: known.agreed,
            age_s: Some(age_ns as f64 / 1e9),
            path,
            agreement,
            chosen,
            purposes,
            ..PeerExplanation::default()
        })
    }

    fn read_pool(&mut self) -> Result<(), Error> {
        self.pool = GraftPool::read(&self.settings.pool, &self.settings.trusted_keys)?;
        Ok(())
    }

    /// Returns the problems that need the operator's attention.
    pub fn trouble(&self) -> Vec<String> {
        let not_by_link = self.loaded.values().filter(|loaded| !loaded.control.is_by_link());
        let mut trouble: Vec<_> = not_by_link
            .map(|loaded| {
                let name = loaded.control.name();
                format!("{name} stays in the kernel if this process is killed, until it is started again: the kernel is older than 6.4")
            })
            .collect();
        let unusable = self.pool.unusable.iter();
        trouble.extend(unusable.map(|(path, message)| format!("{path}: {message}")));
        trouble
    }

    /// Returns the name of the rule that has this index in the kernel. The kernel has one rule for each pair of a port
    /// and a peer, followed by the rules for connections between this host's daemon and its peers' daemons.
    fn rule_at(&self, index: u32) -> Option<String> {
        let rules = self.settings.rules.iter();
        let mut names = rules.flat_map(|rule| vec![&rule.name; rule.ports.len() * rule.peers.len()]);
        let own = (index as usize) < kernel::RULES;
        names.nth(index as usize).cloned().or_else(|| own.then(|| "(control connections)".to_owned()))
    }

    /// Reports whether a rule is inactive because a peer has not sent the rule's graft yet.
    fn waits(&self, rule: &RuleSetting) -> bool {
        waits(rule, &self.settings, &self.loaded)
    }

    fn rule_status(&self, rule: &RuleSetting) -> status::RuleStatus {
        let waits = self.waits(rule);
        status::RuleStatus { waits, ..rule_status(rule, &self.loaded) }
    }

    fn name_of(&self, start: [u8; 4]) -> String {
        match self.pool.iter().find(|graft| graft.identity.start() == start) {
            Some(graft) => format!("{} ({})", hex(&start), graft.manifest.name),
            None => hex(&start),
        }
    }
}

impl LoadedGraft {
    fn new(graft: &PoolGraft, values: BTreeMap<String, u64>, by_settings: bool) -> Result<Self, Error> {
        let wanted = graft.values(&values)?;
        let control =
            CongestionProgram::register(&graft.image, &wanted).map_err(|error| refused(graft, error))?;
        Ok(Self { graft: graft.clone(), values, control, by_settings })
    }

    /// Loads a graft and replaces what an earlier runtime has left of it in the kernel.
    fn load_next_to(
        graft: &PoolGraft,
        values: BTreeMap<String, u64>,
        pins: Option<&PinDirectory>,
    ) -> Result<Self, Error> {
        let Some(pins) = pins else { return Self::new(graft, values, true) };
        let wanted = graft.values(&values)?;
        let control = CongestionProgram::take_over(&graft.image, &wanted, pins);
        let control = control.map_err(|error| refused(graft, error))?;
        Ok(Self { graft: graft.clone(), values, control, by_settings: true })
    }

    fn is(&self, graft: &PoolGraft, values: &BTreeMap<String, u64>) -> bool {
        self.graft.identity == graft.identity && self.values == *values
    }

    fn can_become(&self, graft: &PoolGraft, values: &BTreeMap<String, u64>) -> Result<(), Error> {
        // Sockets refer to a congestion control by its name, so a graft can only be replaced by one with the same name.
        if graft.congestion != self.control.name() {
            let other = graft.congestion.clone();
            let own = self.control.name().to_owned();
            return Err(graft.error(kernel::Error::OtherName(other, own).to_string()));
        }
        let wanted = graft.values(values)?;
        CongestionProgram::verify(&graft.image, &wanted).map_err(|error| refused(graft, error))?;
        Ok(())
    }

    fn become_other(&mut self, graft: PoolGraft, values: BTreeMap<String, u64>) -> Result<(), Error> {
        let wanted = graft.values(&values)?;
        self.control.replace(&graft.image, &wanted).map_err(|error| refused(&graft, error))?;
        (self.graft, self.values) = (graft, values);
        Ok(())
    }

    fn status(&self, connections: u64) -> status::LoadedStatus {
        let Timing { open, load, attach, .. } = self.control.timing();
        let us = |time: std::time::Duration| time.as_micros().try_into().unwrap_or(u64::MAX);
        let mut parameters = self.graft.defaults.clone();
        parameters.extend(self.values.clone());
        status::LoadedStatus {
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

/// Checks whether the kernel accepts the graft's programs, without registering the graft as a congestion control.
pub fn check(graft: &PoolGraft, values: &BTreeMap<String, u64>) -> Result<Timing, Error> {
    let wanted = graft.values(values)?;
    CongestionProgram::verify(&graft.image, &wanted).map_err(|error| refused(graft, error))
}

fn refused(graft: &PoolGraft, error: kernel::Error) -> Error {
    match error.log() {
        Some(log) if !log.is_empty() => {
            Error::Refused { name: graft.manifest.name.clone(), refusal: LoadRefusal::parse(log) }
        }
        _ => graft.error(error.to_string()),
    }
}

/// Returns the grafts that have to be loaded now. Grafts that a peer has not sent yet are left out.
fn present(settings: &Settings, pool: &GraftPool) -> BTreeMap<String, BTreeMap<String, u64>> {
    let mut needed = settings.needed();
    // If the pool has grafts that the model may choose, they are loaded, too.
    if let Some(model) =
        settings.model.as_ref().filter(|_| settings.rules.iter().any(|it| it.select.is_some()))
    {
        for graft in pool.iter().filter(|graft| model.candidates.contains(&graft.congestion)) {
            needed.entry(graft.manifest.name.clone()).or_default();
        }
    }
    needed.retain(|name, _| !settings.fetches(name) || pool.find(name).is_ok());
    needed
}

/// Checks that the pool has each graft that a rule prescribes for the peer's direction of a connection (`peer-graft`).
fn check_known(settings: &Settings, pool: &GraftPool) -> Result<(), Error> {
    let mut wanted = settings.rules.iter().filter_map(|rule| rule.peer_graft.as_ref());
    wanted.try_for_each(|name| pool.find(name).map(drop))
}

fn peers(settings: &Settings) -> impl Iterator<Item = String> {
    settings.agreement.iter().flat_map(|it| &it.peers).map(|peer| peer.name.clone())
}

fn waits(rule: &RuleSetting, settings: &Settings, loaded: &BTreeMap<String, LoadedGraft>) -> bool {
    rule.graft.as_ref().is_some_and(|name| settings.fetches(name) && !loaded.contains_key(name))
}

fn places(settings: &Settings, loaded: &BTreeMap<String, LoadedGraft>) -> Vec<kernel::TcpRule> {
    let place = |(at, rule): (usize, &RuleSetting)| {
        let graft = rule.graft.as_ref().and_then(|name| loaded.get(name));
        let start = graft.map(|loaded| loaded.graft.identity.start()).unwrap_or_default();
        let mut places = rule.places(congestion(rule, loaded), start);
        // A rule whose graft a peer has not sent yet keeps its index, but matches no connection.
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

fn congestion(rule: &RuleSetting, loaded: &BTreeMap<String, LoadedGraft>) -> Option<String> {
    let graft = rule.graft.as_ref().and_then(|name| loaded.get(name));
    graft.map(|loaded| loaded.control.name().to_owned()).or_else(|| rule.congestion.clone())
}

fn rule_status(rule: &RuleSetting, loaded: &BTreeMap<String, LoadedGraft>) -> status::RuleStatus {
    let port = |ports: &std::ops::RangeInclusive<u16>| match ports.start() == ports.end() {
        true => ports.start().to_string(),
        false => format!("{}-{}", ports.start(), ports.end()),
    };
    status::RuleStatus {
        name: rule.name.clone(),
        side: if rule.side == SideSetting::Client { "client" } else { "server" }.to_owned(),
        ports: rule.ports.iter().map(port).collect(),
        peers: rule.peers.iter().map(ToString::to_string).collect(),
        process: rule.process.words(),
        missing: rule.process.is_missing(),
        agree: rule.agree != Agree::Nobody,
        bound: rule.agree == Agree::Bound,
        waits: false,
        congestion: congestion(rule, loaded).or_else(|| rule.select.map(|_| "by the model".to_owned())),
    }
}

/// Returns a change that makes all sockets with the congestion control `from` use the congestion control `to`.
fn everybody(from: &str, to: &str) -> SocketChange {
    let settings = kernel::Settings { congestion: Some(to.to_owned()), ..kernel::Settings::default() };
    // A rule for a server that names all ports and all peers matches each socket.
    let rule = kernel::TcpRule {
        side: kernel::RuleSide::Server,
        peer: kernel::everybody(),
        ports: 0..=u16::MAX,
        caller: kernel::CallerRule::default(),
        agree: false,
        bound: false,
        choice: 0,
        graft: [0; 4],
        settings,
    };
    SocketChange { rule, from: Some(from.to_owned()) }
}

fn reason(outcome: TcpOutcome) -> &'static str {
    match outcome {
        TcpOutcome::Agreed => "both sides have agreed, and each has set its own socket",
        TcpOutcome::OneSided => "the rule needs no agreement, and this side has set its socket",
        TcpOutcome::Absent => {
            "plain TCP, since the peer did not answer: it has no grafts, no rule for this connection or SYN cookies, or the option was removed on the way"
        }
        TcpOutcome::Stripped => {
            "plain TCP, since the peer has answered before and did not now: the option was removed on the way, or the peer's rules have changed"
        }
        TcpOutcome::Refused => "plain TCP, since the peer speaks another version",
        TcpOutcome::Malformed => "plain TCP, since the peer's option is malformed",
        TcpOutcome::Unconfirmed => {
            "plain TCP, since the peer offered nothing, or this host's answer did not reach it"
        }
        TcpOutcome::NoRoom => "plain TCP, since TCP's own options left no room, as with MPTCP",
        TcpOutcome::Cookies => "plain TCP, since this host uses SYN cookies and cannot answer the option",
        TcpOutcome::Answered => "this host has answered the peer's option",
        TcpOutcome::NoCongestion => "the congestion control does not exist here, so the socket keeps its own",
        TcpOutcome::NotSet => "the kernel refused a setting",
        TcpOutcome::Resent => {
            "plain TCP, since the SYN was repeated without the option: it was lost, or a middlebox drops such SYNs"
        }
        TcpOutcome::Withheld => {
            "plain TCP without an offer, since a SYN with the option to this peer was lost in the last ten minutes"
        }
        TcpOutcome::Unbound => {
            "plain TCP, since the rule needs an agreement with the peer, and none is in force"
        }
        TcpOutcome::EventLost => "the end of the connection was not read in time",
        TcpOutcome::NoMemory => "plain TCP, since there was no memory for the socket's state",
    }
}

/// Returns the host's default congestion control.
fn plain() -> String {
    std::fs::read_to_string(DEFAULT_CONTROL)
        .map_or_else(|_| "cubic".to_owned(), |name| name.trim().to_owned())
}

/// Returns a random number between 0 and 1 that other hosts cannot predict. It is not cryptographically secure.
fn chance() -> f64 {
    let bits = RandomState::new().build_hasher().finish();
    // An f64 has 53 bits for the fraction.
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

fn now_s() -> u64 {
    clock::monotonic_ns() / 1_000_000_000
}
