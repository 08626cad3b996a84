//! Choices for rules with `select`. A model chooses the congestion control or carrier for the connections of each path.
//! Choices improve with the measured costs of ended connections.
//!
//! The code has no access to the kernel: its caller passes the host's state ([`SelectionWorld`]), and writes the
//! returned changes ([`SelectionOrder`]).

mod records;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use millrace_graft_kernel::{
    CHOICES, CandidateChoice, PathCandidates, SelectedEvent, SelectedEventKind, covers,
};
use millrace_graft_proto::select::{
    candidates::{CARRIED, CARRIED_WARM},
    features::{Feature, Features},
    kind::{Expected, Kinds},
    model::Model,
    online::{ConnectionOutcome, DecisionReason, Online},
};

pub use self::records::ConnectionRecord;
use self::records::ConnectionRecords;
use crate::{
    CarriedFlow, Learned, RuleSetting, SelectedFlow, Settings, SideSetting,
    learned::{self, LearnedEntry},
    paths::PeerPath,
    settings::{Tier, place_number as number},
    status::{self, CandidateStatus},
};

/// Factor by which the remembered best transfer rate of a peer is multiplied at each new measurement, so that it ages.
const FADING: f64 = 0.99;
/// Largest number of the model's choices that are remembered by serial number, for connections that may still refer to
/// them.
const MADE_MAX: usize = 2 * CHOICES;

/// Address of a peer, and number of a leaf of the model's decision tree.
type SelectionKey = (IpAddr, u32);
/// Index of a rule in the kernel's list, and address of a peer.
pub type SelectionPlace = (usize, IpAddr);

/// A congestion control or carrier, chosen for a rule and a peer, that the caller writes to the kernel or removes
/// there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SelectionOrder {
    Choose { peer: IpAddr, rule: u32, choice: PathCandidates },
    Forget { peer: IpAddr, rule: u32 },
}

/// One choice: the candidate (congestion control or carrier) that the connections of a rule use on the path to a peer.
#[derive(Clone, Debug, PartialEq)]
pub struct SelectionResult {
    pub rule: String,
    pub peer: IpAddr,
    pub tier: Tier,
    pub expected: Expected,
    pub features: Features,
    pub way: Vec<String>,
    pub leaf: u32,
    pub usual: Option<f64>,
    /// The candidate (congestion control or carrier) that the model prefers on this path.
    pub learned: String,
    /// Share of similar cases in the model's training data in which the preferred congestion control or carrier was the
    /// best one.
    pub right: f64,
    pub candidate: String,
    pub why: DecisionReason,
    /// A different candidate (congestion control or carrier) that one connection is permitted to try, if any.
    pub other: Option<String>,
    /// Generation of the model that made the choice. Connection costs are measured for each leaf of a model's decision
    /// tree, so they are not valid for another model.
    generation: u32,
}

impl SelectionResult {
    fn key(&self) -> SelectionKey {
        (self.peer, self.leaf)
    }

    fn is_like(&self, other: &Self) -> bool {
        let essence =
            |it: &Self| (it.leaf, it.learned.clone(), it.candidate.clone(), it.why, it.rule.clone(), it.tier);
        essence(self) == essence(other)
    }
}

struct CurrentSelection {
    made: Arc<SelectionResult>,
    choice: PathCandidates,
}

/// The state of the host on which choices depend.
pub struct SelectionWorld<'a> {
    pub settings: &'a Settings,
    /// Reports whether TCP has a congestion control of this name.
    pub controls: &'a dyn Fn(&str) -> bool,
    /// Peers with a broker, and whether a carrier to each is ready ("warm").
    pub carriers: &'a BTreeMap<IpAddr, bool>,
    /// Statistics of past connections, from which the traffic profile and size of new connections are predicted.
    pub kinds: &'a Kinds,
    /// Returns a random number between 0 and 1, new for each call.
    pub chance: &'a dyn Fn() -> f64,
    /// Reports whether no connection has used the permission to try another candidate (congestion control or carrier)
    /// yet.
    pub is_granted: &'a dyn Fn(IpAddr, u32) -> bool,
}

/// The state of all rules with `select`, for whose connections a model chooses the congestion control or carrier.
pub struct RuntimeSelection {
    online: Online<SelectionKey>,
    /// Default congestion control of this host.
    plain: String,
    model: Option<Arc<Model>>,
    /// SHA-256 of the model.
    identity: Option<String>,
    /// Number of models that were used so far.
    generation: u32,
    /// The chosen congestion control or carrier that the kernel has for each rule and peer.
    current: BTreeMap<SelectionPlace, CurrentSelection>,
    /// Choices of a congestion control or carrier by serial number, for connections that still refer to them.
    made: BTreeMap<u32, Arc<SelectionResult>>,
    next_serial: u32,
    /// Best recent rate of transfers with each peer, in Mbit/s.
    rates: BTreeMap<IpAddr, f64>,
    records: ConnectionRecords,
}

impl RuntimeSelection {
    pub fn new(plain: &str) -> Self {
        Self {
            online: Online::new(plain, CHOICES),
            plain: plain.to_owned(),
            model: None,
            identity: None,
            generation: 0,
            current: BTreeMap::new(),
            made: BTreeMap::new(),
            next_serial: 1,
            rates: BTreeMap::new(),
            records: ConnectionRecords::default(),
        }
    }

    /// Applies new settings. Measured costs are kept if the model is the same, and the model chooses again for all
    /// rules and peers.
    pub fn renew(&mut self, settings: &Settings) {
        if !is_same(self.model.as_ref(), settings.model.as_ref()) {
            self.online = Online::new(self.plain.clone(), CHOICES);
            self.generation = self.generation.wrapping_add(1);
            self.identity = settings.model.as_deref().and_then(learned::identity);
        }
        // An equal model is also replaced by the new object: the next comparison then compares the object with itself,
        // which is cheap.
        self.model.clone_from(&settings.model);
        self.current.clear();
    }

    /// Copies the measured costs and the best rate of each path to `learned`, the state that the next runtime reads.
    pub fn remember(&self, learned: &mut Learned) {
        let known = self.online.learned_places().into_iter();
        learned.places = known.map(|((peer, leaf), known)| LearnedEntry { peer, leaf, known }).collect();
        learned.rates = self.rates.iter().map(|(peer, rate)| (*peer, *rate)).collect();
        learned.model.clone_from(&self.identity);
    }

    /// Restores the costs and rates that an earlier runtime has measured. Costs are restored only if that runtime used
    /// the same model.
    pub fn recall(&mut self, learned: &Learned, settings: &Settings) {
        self.renew(settings);
        let rates = learned.rates.iter().filter(|(_, mbit)| mbit.is_finite() && *mbit > 0.0);
        rates.take(CHOICES).for_each(|(peer, mbit)| self.note_mbit(*peer, *mbit));
        let Some(model) = self.model.as_deref() else { return };
        if learned.model.is_some() && learned.model == self.identity {
            let known = learned.places.iter().map(|at| ((at.peer, at.leaf), at.known.clone()));
            self.online.recall(known, &model.candidates);
        }
    }

    /// Forgets a chosen congestion control or carrier that could not be written to the kernel, so that the next update
    /// chooses again.
    pub fn undo(&mut self, peer: IpAddr, rule: u32) {
        self.current.retain(|(index, other), _| (number(*index), *other) != (rule, peer));
    }

    /// Chooses a congestion control or carrier for each of these paths, the most recently used first, until the
    /// kernel's map is full. If `is_all` is set, choices for other paths are removed.
    pub fn choose(
        &mut self,
        world: &SelectionWorld<'_>,
        paths: &[PeerPath],
        is_all: bool,
    ) -> Vec<SelectionOrder> {
        if !is_same(self.model.as_ref(), world.settings.model.as_ref()) {
            self.renew(world.settings);
        }
        let mut latest: Vec<&PeerPath> = paths.iter().collect();
        latest.sort_by_key(|path| path.idle_s);
        let rules = &world.settings.rules;
        let selects = |rule: &RuleSetting| rule.select.map(|_| world.settings.expected_of(rule, world.kinds));
        let expected: Vec<_> = rules.iter().map(selects).collect();
        let mut orders = Vec::new();
        let mut kept = BTreeSet::new();
        for path in latest {
            for ((index, rule), expected) in rules.iter().enumerate().zip(&expected) {
                let Some(expected) = expected else { continue };
                let is_for = rule.peers.iter().any(|peer| covers(*peer, path.peer));
                let is_new = !self.current.contains_key(&(index, path.peer));
                let has_room =
                    if is_all { kept.len() < CHOICES } else { self.current.len() < CHOICES || !is_new };
                if is_for && has_room && self.look(world, index, rule, expected, path, &mut orders) {
                    kept.insert((index, path.peer));
                }
            }
        }
        if is_all {
            self.forget_but(&kept, &mut orders);
        }
        orders
    }

    fn forget_but(&mut self, kept: &BTreeSet<SelectionPlace>, orders: &mut Vec<SelectionOrder>) {
        let mut forgotten = Vec::new();
        self.current.retain(|place, _| {
            let stays = kept.contains(place);
            if !stays {
                forgotten.push(SelectionOrder::Forget { peer: place.1, rule: number(place.0) });
            }
            stays
        });
        // Removed choices are written first, to free entries of the kernel's map for new ones.
        orders.splice(0..0, forgotten);
        let chosen = kept.iter().map(|(_, peer)| *peer);
        let peers: BTreeSet<_> = chosen.chain(self.online.keys().map(|(peer, _)| *peer)).collect();
        self.rates.retain(|peer, _| peers.contains(peer));
    }

    /// Chooses the congestion control or carrier for one rule and path. Returns false if none can be chosen.
    fn look(
        &mut self,
        world: &SelectionWorld<'_>,
        index: usize,
        rule: &RuleSetting,
        expected: &Expected,
        path: &PeerPath,
        orders: &mut Vec<SelectionOrder>,
    ) -> bool {
        let place = (index, path.peer);
        // While no connection has used the permission to try another congestion control or carrier, no further
        // permission is given.
        let granted = self.current.get(&place).is_some_and(|current| current.choice.grant.is_some());
        let waits = granted && (world.is_granted)(path.peer, number(index));
        let Some((made, choice)) = self.plan(world, rule, expected, path, !waits) else { return false };
        if let Some(current) = self.current.get(&place)
            && current.made.is_like(&made)
            && choice.grant.is_none()
        {
            return true;
        }
        let serial = self.next_serial;
        // Serial number 0 stands for no choice.
        self.next_serial = self.next_serial.checked_add(1).unwrap_or(1);
        let made = Arc::new(made);
        let choice = PathCandidates { serial, ..choice };
        self.made.insert(serial, made.clone());
        while self.made.len() > MADE_MAX {
            self.made.pop_first();
        }
        orders.push(SelectionOrder::Choose { peer: path.peer, rule: number(index), choice: choice.clone() });
        self.current.insert(place, CurrentSelection { made, choice });
        true
    }

    fn plan(
        &mut self,
        world: &SelectionWorld<'_>,
        rule: &RuleSetting,
        expected: &Expected,
        path: &PeerPath,
        may_try: bool,
    ) -> Option<(SelectionResult, PathCandidates)> {
        let model = self.model.clone()?;
        // Only rules with `tier = "chosen"` may use a carrier.
        let carrier = world.carriers.get(&path.peer).filter(|_| carries(rule));
        let rate = self.rates.get(&path.peer).copied();
        let features = path
            .features()
            .for_profile(expected.profile)
            .with(Feature::Size, expected.size_kib.map(f64::from))
            .carrying(carrier.is_some(), carrier == Some(&true));
        let can = |candidate: &str| match candidate {
            CARRIED_WARM => carrier == Some(&true),
            candidate => !candidate.starts_with(CARRIED) && (world.controls)(candidate),
        };
        let decision = model.decide(&features, can);
        let rank = decision.rank?;
        let names = decision.leaf.ranking.iter().map(|rank| rank.candidate.as_str());
        let ranked: Vec<&str> = names.filter(|name| can(name)).collect();
        let key = (path.peer, decision.leaf.number);
        let (choice, other) = self.online.plan(&key, &ranked, (world.chance)(), may_try);
        // A tunnelled connection also gets a congestion control, in case the broker does not tunnel it.
        let in_place = ranked.iter().copied().find(|candidate| !candidate.starts_with(CARRIED));
        let candidate = |name: &str| CandidateChoice {
            congestion: match name.starts_with(CARRIED) {
                true => in_place.and_then(|name| other_than(name, &self.plain)),
                false => other_than(name, &self.plain),
            },
            carried: name.starts_with(CARRIED),
        };
        let grant = other.map(candidate);
        let kernel = PathCandidates { serial: 0, candidate: candidate(choice.candidate), grant };
        let made = SelectionResult {
            rule: rule.name.clone(),
            peer: path.peer,
            tier: rule.tier,
            expected: expected.clone(),
            features: rate.map_or(features.clone(), |rate| with_rate(features, rate)),
            way: decision.words.clone(),
            leaf: decision.leaf.number,
            usual: decision.leaf.usual,
            learned: rank.candidate.clone(),
            right: rank.right,
            candidate: choice.candidate.to_owned(),
            why: choice.why,
            other: other.map(str::to_owned),
            generation: self.generation,
        };
        Some((made, kernel))
    }

    /// Handles a kernel event about a connection that is not tunnelled. Returns the connection if it has ended.
    pub fn note(&mut self, event: &SelectedEvent, settings: &Settings) -> Option<SelectedFlow> {
        let index = event.rule.wrapping_sub(1) as usize;
        // The settings may have changed since the connection began, so its rule's index may not exist any more.
        let rule = settings.rules.get(index);
        let made = self.made.get(&event.serial).cloned();
        let candidate = event.congestion.clone().unwrap_or_else(|| self.plain.clone());
        let is_granted = |made: &Arc<SelectionResult>| made.other.as_ref() == Some(&candidate);
        let is_tried = event.explored && made.as_ref().is_some_and(is_granted);
        let missed = !is_tried && made.as_ref().is_some_and(|made| made.candidate.starts_with(CARRIED));
        let side = if event.side == millrace_graft_kernel::RuleSide::Client {
            SideSetting::Client
        } else {
            SideSetting::Server
        };
        let server = if side == SideSetting::Client { event.remote } else { event.local };
        match event.what {
            SelectedEventKind::Began => self.records.begin(
                event.cookie,
                ConnectionRecord {
                    local: event.local,
                    remote: event.remote,
                    side,
                    rule: rule?.name.clone(),
                    why: records::choice_reason(made.as_deref(), is_tried, missed),
                    candidate,
                    purpose: made.as_ref().map(|made| status::PurposeStatus::from(&made.expected)),
                    made,
                    began_ns: event.time_ns.saturating_sub(nanoseconds(event.duration)),
                    carried: false,
                    carrier: None,
                    is_elsewhere: event.is_elsewhere,
                    unseen: false,
                    ended: None,
                },
            ),
            SelectedEventKind::Ended => {
                let flow = SelectedFlow {
                    side,
                    local: event.local,
                    remote: event.remote,
                    cgroup: rule.and_then(|rule| rule.process.caller().cgroup),
                    command: event.command.clone(),
                    port: server.port(),
                    sent: event.sent,
                    received: event.received,
                    duration: event.duration,
                    turns: None,
                    busy: event.busy,
                    heard: event.heard,
                    candidate,
                };
                // A connection that began before the model had chosen for its path used plain TCP. Its cost is stored
                // for the leaf of the model's decision tree to which the connection's path belongs now.
                let now = || self.current.get(&(index, flow.remote.ip())).map(|current| current.made.clone());
                let made = made.or_else(now);
                let judges_received =
                    made.as_ref().map_or_else(|| rule.is_some_and(carries), |made| made.tier == Tier::Chosen);
                self.end(event.cookie, &flow, made, judges_received);
                return Some(flow);
            }
        }
        None
    }

    /// Handles an event of the broker about a redirected connection.
    pub fn note_carried(&mut self, carried: CarriedFlow, settings: &Settings) {
        match carried {
            CarriedFlow::Began(began) => {
                let remote = began.remote;
                let rule = match began.choice {
                    0 => settings.carried_by(
                        SideSetting::Client,
                        remote.port(),
                        remote.ip(),
                        began.command.as_deref(),
                        began.cgroup,
                    ),
                    number => settings.rules.get(number as usize - 1),
                };
                let made = self.made.get(&began.serial).filter(|_| began.choice > 0).cloned();
                let why = match began.choice {
                    0 => "rule",
                    _ => records::choice_reason(made.as_deref(), began.explored, false),
                };
                let record = ConnectionRecord {
                    local: began.local,
                    remote,
                    side: SideSetting::Client,
                    rule: rule.map(|rule| rule.name.clone()).unwrap_or_default(),
                    why,
                    candidate: CARRIED_WARM.to_owned(),
                    purpose: Some(status::PurposeStatus::from(&began.expected)),
                    made,
                    began_ns: began.began_ns,
                    carried: true,
                    carrier: began.carrier,
                    is_elsewhere: false,
                    unseen: false,
                    ended: None,
                };
                self.records.begin(began.id, record);
            }
            CarriedFlow::Ended { id, flow } => {
                let Some(record) = self.records.live(id) else { return };
                let made = record.made.clone();
                let is_ruled = record.why == "rule";
                match is_ruled {
                    true => self.records.end(id, &flow, None),
                    false => self.end(id, &flow, made, true),
                }
            }
        }
    }

    /// Forgets the redirected connections of a broker that has ended.
    pub fn forget_carried(&mut self) {
        self.records.forget_carried();
    }

    fn end(
        &mut self,
        id: u64,
        flow: &SelectedFlow,
        made: Option<Arc<SelectionResult>>,
        judges_received: bool,
    ) {
        let peer = flow.remote.ip();
        let rtt_ms = made.as_ref().and_then(|made| made.features.get(Feature::Rtt)).unwrap_or_default();
        let handshake = Duration::from_secs_f64(rtt_ms / 1e3);
        let cost = flow.cost(handshake, judges_received);
        if let Some((cost, bytes)) = cost {
            self.note_rate(peer, cost.saturating_sub(handshake), bytes);
        }
        let outcome = made.as_ref().zip(cost).and_then(|(made, (cost, bytes))| {
            let rate = self.rates.get(&peer).copied();
            let features = made.features.clone().with(Feature::Size, bytes as f64 / 1024.0);
            let features = rate.map_or(features.clone(), |rate| with_rate(features, rate));
            let ideal_ms = features.ideal_ms()?;
            let cost = cost.as_secs_f64() * 1e3 / ideal_ms;
            Some(ConnectionOutcome { cost, is_bad: cost > made.usual? })
        });
        // Costs of connections for which an earlier model chose are not valid for the present model.
        if let Some(made) = made.filter(|made| made.generation == self.generation) {
            self.online.passed(&made.key(), 1);
            if let Some(outcome) = outcome {
                self.online.report(&made.key(), &made.learned, &flow.candidate, outcome);
            }
        }
        self.records.end(id, flow, outcome);
    }

    /// Records the rate in Mbit/s that a transfer has achieved.
    fn note_rate(&mut self, peer: IpAddr, took: Duration, bytes: u64) {
        // The rate of a short transfer says little about the path, so it is ignored.
        const WORTH: u64 = 32 << 10;
        let mbit = bytes as f64 * 8.0 / 1e6 / took.as_secs_f64();
        if bytes >= WORTH && mbit.is_finite() {
            self.note_mbit(peer, mbit);
        }
    }

    pub fn note_mbit(&mut self, peer: IpAddr, mbit: f64) {
        if self.rates.len() >= CHOICES && !self.rates.contains_key(&peer) {
            return;
        }
        let best = self.rates.entry(peer).or_default();
        *best = (*best * FADING).max(mbit);
    }

    /// Removes connections whose end was not reported, if two successive lists of sockets do not contain them. A single
    /// list is not enough, because the kernel may still report the end. The lists do not contain connections of other
    /// network namespaces. Those are removed only if kernel reports were lost, which `lost` counts.
    pub fn prune(&mut self, is_live: impl Fn(u64) -> bool, lost: u64) {
        self.records.prune(is_live, lost);
    }

    pub fn has_live(&self) -> bool {
        self.records.has_live()
    }

    /// Returns the congestion controls or carriers that are chosen at present for a peer's connections, by rule.
    pub fn chosen_for_peer(&self, peer: IpAddr) -> Vec<status::ChosenStatus> {
        let of_peer = self.current.iter().filter(|((_, other), _)| *other == peer);
        of_peer.map(|(_, current)| self.chosen(&current.made)).collect()
    }

    fn chosen(&self, made: &SelectionResult) -> status::ChosenStatus {
        let key = made.key();
        let (connections, explored) = self.online.counted(&key);
        let tried: Vec<CandidateStatus> =
            self.online.tried(&key).into_iter().map(CandidateStatus::from).collect();
        status::ChosenStatus {
            rule: made.rule.clone(),
            peer: Some(made.peer),
            candidate: made.candidate.clone(),
            why: name_of(made.why).to_owned(),
            profile: made.expected.profile.name().to_owned(),
            right: made.right,
            way: made.way.clone(),
            known: made.features.to_string(),
            connections,
            explored,
            gain: gain(&tried, &made.candidate, &self.plain),
            tried,
        }
    }

    /// Returns the status of a connection by its addresses, if it is live or has ended recently.
    pub fn connection(
        &self,
        ends: [std::net::SocketAddr; 2],
        now_ns: u64,
    ) -> Option<status::GraftConnectionStatus> {
        let record = self.records.find(ends)?;
        let chosen = record.made.as_deref().map(|made| self.chosen(made));
        let gain = chosen.as_ref().and_then(|chosen| gain(&chosen.tried, &record.candidate, &self.plain));
        Some(record.status(chosen, gain, &self.plain, now_ns))
    }

    pub fn status(&self) -> status::SelectionStatus {
        let all: Vec<_> = self.current.values().map(|current| self.chosen(&current.made)).collect();
        let gains: Vec<f64> = all
            .iter()
            .filter(|it| it.candidate != self.plain)
            .filter_map(|it| it.gain)
            .filter(|it| *it > 0.0)
            .collect();
        let mean = gains.iter().map(|gain| gain.ln()).sum::<f64>() / gains.len().max(1) as f64;
        let mut paths = all;
        paths.sort_by_key(|it| std::cmp::Reverse(it.connections));
        paths.truncate(status::SelectionStatus::PATHS_MAX);
        status::SelectionStatus {
            plain: self.plain.clone(),
            chosen: self.current.len() as u64,
            learned_places: self.online.places() as u64,
            gain_paths: gains.len() as u64,
            gain: (!gains.is_empty()).then(|| mean.exp()),
            paths,
            ..self.records.status()
        }
    }

    #[cfg(test)]
    fn serial_of(&self, place: SelectionPlace) -> u32 {
        self.current.get(&place).map_or(0, |current| current.choice.serial)
    }
}

/// Returns how many times as long plain TCP takes on a path as the congestion control or carrier `candidate` does.
fn gain(tried: &[CandidateStatus], candidate: &str, plain: &str) -> Option<f64> {
    let cost = |name: &str| tried.iter().find(|it| it.candidate == name)?.cost;
    Some(cost(plain)? / cost(candidate)?)
}

/// Reports whether two models are equal. Usually both are the same object.
fn is_same(one: Option<&Arc<Model>>, other: Option<&Arc<Model>>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other) || one == other,
        _ => one.is_none() && other.is_none(),
    }
}

fn carries(rule: &RuleSetting) -> bool {
    rule.tier == Tier::Chosen
}

fn other_than(name: &str, plain: &str) -> Option<String> {
    (name != plain).then(|| name.to_owned())
}

fn with_rate(features: Features, mbit: f64) -> Features {
    let best = features.get(Feature::Rate).unwrap_or_default().max(mbit);
    features.with(Feature::Rate, best)
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

pub fn name_of(why: DecisionReason) -> &'static str {
    match why {
        DecisionReason::Learned => "learned",
        DecisionReason::Doubted => "doubted",
        DecisionReason::Found => "found",
    }
}

#[cfg(test)]
mod tests;
