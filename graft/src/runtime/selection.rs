//! Rules that have a model choose: by what the connections of each path go, and what is learned from what comes of them.
//!
//! It knows no kernel: it is told what there is, and says what is to be written ([`Order`]).

mod records;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use millrace_graft_kernel::{Arm, CHOICES, Choice, Told, What, covers};
use millrace_graft_proto::select::{
    arms::{CARRIED, CARRIED_WARM},
    features::{Feature, Features},
    kind::{Expected, Kinds},
    model::Model,
    online::{Online, Outcome, Why},
};

pub use self::records::Record;
use self::records::Records;
use crate::{
    Carried, Flow, Learned, Rule, Settings, Side,
    learned::{self, At},
    paths::Path,
    settings::{Tier, place_number as number},
    status::{self, Tried},
};

/// What one connection adds to what is known of a path's rate is forgotten by so much with each that follows.
const FADING: f64 = 0.99;
/// Choices that connections may still be told of, by their serials.
const MADE_MAX: usize = 2 * CHOICES;

/// A path, and a leaf of the model.
type Key = (IpAddr, u32);
/// The index of a rule, and a peer.
pub type Place = (usize, IpAddr);

/// What is to be written for the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    Choose { peer: IpAddr, rule: u32, choice: Choice },
    Forget { peer: IpAddr, rule: u32 },
}

/// What was chosen at one time for the connections of one rule over one path.
#[derive(Clone, Debug, PartialEq)]
pub struct Made {
    pub rule: String,
    pub peer: IpAddr,
    pub tier: Tier,
    pub expected: Expected,
    pub features: Features,
    pub way: Vec<String>,
    pub leaf: u32,
    pub usual: Option<f64>,
    /// The model's.
    pub learned: String,
    /// Share of the cases like this in the training for which that was right.
    pub right: f64,
    pub arm: String,
    pub why: Why,
    /// That one connection was to try.
    pub other: Option<String>,
    /// Of the model: what is learned of one's leaves says nothing of another's.
    generation: u32,
}

impl Made {
    fn key(&self) -> Key {
        (self.peer, self.leaf)
    }

    fn is_like(&self, other: &Self) -> bool {
        let essence =
            |it: &Self| (it.leaf, it.learned.clone(), it.arm.clone(), it.why, it.rule.clone(), it.tier);
        essence(self) == essence(other)
    }
}

struct Current {
    made: Arc<Made>,
    choice: Choice,
}

/// What is there to choose from.
pub struct World<'a> {
    pub settings: &'a Settings,
    /// Congestion controls that TCP has.
    pub controls: &'a dyn Fn(&str) -> bool,
    /// Peers with a broker, and whether a carrier to it is warm.
    pub carriers: &'a BTreeMap<IpAddr, bool>,
    /// What connections are for, as far as earlier ones have shown.
    pub kinds: &'a Kinds,
    /// Evenly from 0 to 1, anew each time.
    pub chance: &'a dyn Fn() -> f64,
    /// Whether a grant still waits for a connection.
    pub is_granted: &'a dyn Fn(IpAddr, u32) -> bool,
}

pub struct Selection {
    online: Online<Key>,
    /// TCP as it is here.
    plain: String,
    model: Option<Arc<Model>>,
    /// By which that is known again.
    identity: Option<String>,
    generation: u32,
    current: BTreeMap<Place, Current>,
    made: BTreeMap<u32, Arc<Made>>,
    next_serial: u32,
    /// The best that was seen of late, Mbit/s.
    rates: BTreeMap<IpAddr, f64>,
    records: Records,
}

impl Selection {
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
            records: Records::default(),
        }
    }

    /// Other settings. What was learned holds as long as the model does; what was chosen is chosen anew.
    pub fn renew(&mut self, settings: &Settings) {
        if !is_same(self.model.as_ref(), settings.model.as_ref()) {
            self.online = Online::new(self.plain.clone(), CHOICES);
            self.generation = self.generation.wrapping_add(1);
            self.identity = settings.model.as_deref().and_then(learned::identity);
        }
        // Where it is the same, too: one that is shared need not be compared.
        self.model.clone_from(&settings.model);
        self.current.clear();
    }

    /// What is known, for the runtime that comes after this one.
    pub fn remember(&self, learned: &mut Learned) {
        let known = self.online.known().into_iter();
        learned.places = known.map(|((peer, leaf), known)| At { peer, leaf, known }).collect();
        learned.rates = self.rates.iter().map(|(peer, rate)| (*peer, *rate)).collect();
        learned.model.clone_from(&self.identity);
    }

    /// What one before has known. Leaves of another model are others.
    pub fn recall(&mut self, learned: &Learned, settings: &Settings) {
        self.renew(settings);
        let rates = learned.rates.iter().filter(|(_, mbit)| mbit.is_finite() && *mbit > 0.0);
        rates.take(CHOICES).for_each(|(peer, mbit)| self.note_mbit(*peer, *mbit));
        let Some(model) = self.model.as_deref() else { return };
        if learned.model.is_some() && learned.model == self.identity {
            let known = learned.places.iter().map(|at| ((at.peer, at.leaf), at.known.clone()));
            self.online.recall(known, &model.arms);
        }
    }

    /// An order could not be carried out: it is given again at the next look.
    pub fn undo(&mut self, peer: IpAddr, rule: u32) {
        self.current.retain(|(index, other), _| (number(*index), *other) != (rule, peer));
    }

    /// Looks at these paths, those that were used last first, as far as there is room. `is_all`: what is chosen for others is forgotten.
    pub fn choose(&mut self, world: &World<'_>, paths: &[Path], is_all: bool) -> Vec<Order> {
        if !is_same(self.model.as_ref(), world.settings.model.as_ref()) {
            self.renew(world.settings);
        }
        let mut latest: Vec<&Path> = paths.iter().collect();
        latest.sort_by_key(|path| path.idle_s);
        let rules = &world.settings.rules;
        let selects = |rule: &Rule| rule.select.map(|_| world.settings.expected_of(rule, world.kinds));
        let expected: Vec<_> = rules.iter().map(selects).collect();
        let (mut orders, mut kept) = (Vec::new(), BTreeSet::new());
        for path in latest {
            for ((index, rule), expected) in rules.iter().enumerate().zip(&expected) {
                let Some(expected) = expected else { continue };
                let is_for = rule.peers.iter().any(|peer| covers(*peer, path.peer));
                let is_new = !self.current.contains_key(&(index, path.peer));
                let has_room =
                    if is_all { kept.len() < CHOICES } else { self.current.len() < CHOICES || !is_new };
                if is_for && has_room && self.look(world, (index, rule, expected), path, &mut orders) {
                    kept.insert((index, path.peer));
                }
            }
        }
        if is_all {
            self.forget_but(&kept, &mut orders);
        }
        orders
    }

    fn forget_but(&mut self, kept: &BTreeSet<Place>, orders: &mut Vec<Order>) {
        let mut forgotten = Vec::new();
        self.current.retain(|place, _| {
            let stays = kept.contains(place);
            if !stays {
                forgotten.push(Order::Forget { peer: place.1, rule: number(place.0) });
            }
            stays
        });
        // Room is made before it is needed.
        orders.splice(0..0, forgotten);
        let chosen = kept.iter().map(|(_, peer)| *peer);
        let peers: BTreeSet<_> = chosen.chain(self.online.keys().map(|(peer, _)| *peer)).collect();
        self.rates.retain(|peer, _| peers.contains(peer));
    }

    /// Returns whether anything is chosen for it.
    fn look(
        &mut self,
        world: &World<'_>,
        (index, rule, expected): (usize, &Rule, &Expected),
        path: &Path,
        orders: &mut Vec<Order>,
    ) -> bool {
        let place = (index, path.peer);
        let granted = self.current.get(&place).is_some_and(|current| current.choice.grant.is_some());
        let waits = granted && (world.is_granted)(path.peer, number(index));
        let Some((made, choice)) = self.plan(world, (rule, expected), path, !waits) else { return false };
        if let Some(current) = self.current.get(&place)
            && current.made.is_like(&made)
            && choice.grant.is_none()
        {
            return true;
        }
        let serial = self.next_serial;
        self.next_serial = self.next_serial.checked_add(1).unwrap_or(1);
        let (made, choice) = (Arc::new(made), Choice { serial, ..choice });
        self.made.insert(serial, made.clone());
        while self.made.len() > MADE_MAX {
            self.made.pop_first();
        }
        orders.push(Order::Choose { peer: path.peer, rule: number(index), choice: choice.clone() });
        self.current.insert(place, Current { made, choice });
        true
    }

    fn plan(
        &mut self,
        world: &World<'_>,
        (rule, expected): (&Rule, &Expected),
        path: &Path,
        may_try: bool,
    ) -> Option<(Made, Choice)> {
        let model = self.model.clone()?;
        let carrier = world.carriers.get(&path.peer).filter(|_| carries(rule));
        let rate = self.rates.get(&path.peer).copied();
        let features = path
            .features()
            .for_profile(expected.profile)
            .with(Feature::Size, expected.size_kib.map(f64::from))
            .carrying(carrier.is_some(), carrier == Some(&true));
        let can = |arm: &str| match arm {
            CARRIED_WARM => carrier == Some(&true),
            arm => !arm.starts_with(CARRIED) && (world.controls)(arm),
        };
        let decision = model.decide(&features, can);
        let rank = decision.rank?;
        let ranked: Vec<&str> =
            decision.leaf.ranking.iter().map(|rank| rank.arm.as_str()).filter(|arm| can(arm)).collect();
        let key = (path.peer, decision.leaf.number);
        let (choice, other) = self.online.plan(&key, &ranked, (world.chance)(), may_try);
        let in_place = ranked.iter().copied().find(|arm| !arm.starts_with(CARRIED));
        let arm = |name: &str| Arm {
            congestion: match name.starts_with(CARRIED) {
                true => in_place.and_then(|name| other_than(name, &self.plain)),
                false => other_than(name, &self.plain),
            },
            carried: name.starts_with(CARRIED),
        };
        let kernel = Choice { serial: 0, arm: arm(choice.arm), grant: other.map(arm) };
        let made = Made {
            rule: rule.name.clone(),
            peer: path.peer,
            tier: rule.tier,
            expected: expected.clone(),
            features: rate.map_or(features.clone(), |rate| with_rate(features, rate)),
            way: decision.words.clone(),
            leaf: decision.leaf.number,
            usual: decision.leaf.usual,
            learned: rank.arm.clone(),
            right: rank.right,
            arm: choice.arm.to_owned(),
            why: choice.why,
            other: other.map(str::to_owned),
            generation: self.generation,
        };
        Some((made, kernel))
    }

    /// What the kernel has told of a connection in place. Returns it if it is over.
    pub fn note(&mut self, told: &Told, settings: &Settings) -> Option<Flow> {
        let index = told.rule.wrapping_sub(1) as usize;
        // Settings may be others by now than when it began.
        let rule = settings.rules.get(index);
        let made = self.made.get(&told.serial).cloned();
        let arm = told.congestion.clone().unwrap_or_else(|| self.plain.clone());
        let is_tried = told.explored && made.as_ref().is_some_and(|made| made.other.as_ref() == Some(&arm));
        let missed = !is_tried && made.as_ref().is_some_and(|made| made.arm.starts_with(CARRIED));
        let side = if told.side == millrace_graft_kernel::Side::Client { Side::Client } else { Side::Server };
        let server = if side == Side::Client { told.remote } else { told.local };
        match told.what {
            What::Began => self.records.begin(
                told.cookie,
                Record {
                    local: told.local,
                    remote: told.remote,
                    side,
                    rule: rule?.name.clone(),
                    why: records::why(made.as_deref(), is_tried, missed),
                    arm,
                    purpose: made.as_ref().map(|made| status::Purpose::from(&made.expected)),
                    made,
                    began_ns: told.time_ns.saturating_sub(nanoseconds(told.duration)),
                    carried: false,
                    carrier: None,
                    is_elsewhere: told.is_elsewhere,
                    unseen: false,
                    ended: None,
                },
            ),
            What::Ended => {
                let flow = Flow {
                    side,
                    local: told.local,
                    remote: told.remote,
                    cgroup: rule.and_then(|rule| rule.who.caller().cgroup),
                    command: told.command.clone(),
                    port: server.port(),
                    sent: told.sent,
                    received: told.received,
                    duration: told.duration,
                    turns: None,
                    busy: told.busy,
                    heard: told.heard,
                    arm,
                };
                // One that came before anything was chosen was plain, and that counts where the path leads now.
                let now = || self.current.get(&(index, flow.remote.ip())).map(|current| current.made.clone());
                let made = made.or_else(now);
                let judges_received =
                    made.as_ref().map_or_else(|| rule.is_some_and(carries), |made| made.tier == Tier::Chosen);
                self.end(told.cookie, &flow, made, judges_received);
                return Some(flow);
            }
        }
        None
    }

    /// What the broker has told of one that was led to it.
    pub fn note_carried(&mut self, carried: Carried, settings: &Settings) {
        match carried {
            Carried::Began {
                id,
                local,
                remote,
                choice,
                serial,
                explored,
                carrier,
                expected,
                command,
                cgroup,
                began_ns,
            } => {
                let rule = match choice {
                    0 => settings.carried_by(
                        Side::Client,
                        (remote.port(), remote.ip()),
                        command.as_deref(),
                        cgroup,
                    ),
                    number => settings.rules.get(number as usize - 1),
                };
                let made = self.made.get(&serial).filter(|_| choice > 0).cloned();
                let why = if choice == 0 { "rule" } else { records::why(made.as_deref(), explored, false) };
                let (rule, arm) =
                    (rule.map(|rule| rule.name.clone()).unwrap_or_default(), CARRIED_WARM.to_owned());
                let (side, carried, ended) = (Side::Client, true, None);
                self.records.begin(
                    id,
                    Record {
                        local,
                        remote,
                        side,
                        rule,
                        why,
                        arm,
                        purpose: Some(status::Purpose::from(&expected)),
                        made,
                        began_ns,
                        carried,
                        carrier,
                        is_elsewhere: false,
                        unseen: false,
                        ended,
                    },
                );
            }
            Carried::Ended { id, flow } => {
                let Some(record) = self.records.live(id) else { return };
                let (made, is_ruled) = (record.made.clone(), record.why == "rule");
                match is_ruled {
                    true => self.records.end(id, &flow, None),
                    false => self.end(id, &flow, made, true),
                }
            }
        }
    }

    /// The broker is gone, and what it carried.
    pub fn forget_carried(&mut self) {
        self.records.forget_carried();
    }

    fn end(&mut self, id: u64, flow: &Flow, made: Option<Arc<Made>>, judges_received: bool) {
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
            Some(Outcome { cost, is_bad: cost > made.usual? })
        });
        if let Some(made) = made.filter(|made| made.generation == self.generation) {
            self.online.passed(&made.key(), 1);
            if let Some(outcome) = outcome {
                self.online.report(&made.key(), &made.learned, &flow.arm, outcome);
            }
        }
        self.records.end(id, flow, outcome);
    }

    /// A rate that a transfer has shown, and which so is there.
    fn note_rate(&mut self, peer: IpAddr, took: Duration, bytes: u64) {
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

    /// Those that live, of which it was not told that they are over, are over all the same where two looks have not met them: what
    /// ends beside a look is told of after it. No look meets those of other network namespaces: they are forgotten when something
    /// was not told, which `untold` counts.
    pub fn prune(&mut self, lives: impl Fn(u64) -> bool, untold: u64) {
        self.records.prune(lives, untold);
    }

    pub fn has_live(&self) -> bool {
        self.records.has_live()
    }

    /// What is chosen for a peer's connections now.
    pub fn of_peer(&self, peer: IpAddr) -> Vec<status::Chosen> {
        let of_peer = self.current.iter().filter(|((_, other), _)| *other == peer);
        of_peer.map(|(_, current)| self.chosen(&current.made)).collect()
    }

    fn chosen(&self, made: &Made) -> status::Chosen {
        let key = made.key();
        let (connections, explored) = self.online.counted(&key);
        let tried: Vec<Tried> = self.online.tried(&key).into_iter().map(Tried::from).collect();
        status::Chosen {
            rule: made.rule.clone(),
            peer: Some(made.peer),
            arm: made.arm.clone(),
            why: name_of(made.why).to_owned(),
            profile: made.expected.profile.name().to_owned(),
            right: made.right,
            way: made.way.clone(),
            known: made.features.to_string(),
            connections,
            explored,
            gain: gain(&tried, &made.arm, &self.plain),
            tried,
        }
    }

    /// Of one connection by its ends, that lives or ended not long ago.
    pub fn connection(&self, ends: [std::net::SocketAddr; 2], now_ns: u64) -> Option<status::Connection> {
        let record = self.records.find(ends)?;
        let chosen = record.made.as_deref().map(|made| self.chosen(made));
        let gain = chosen.as_ref().and_then(|chosen| gain(&chosen.tried, &record.arm, &self.plain));
        Some(record.status(chosen, gain, &self.plain, now_ns))
    }

    pub fn status(&self) -> status::Selection {
        let all: Vec<_> = self.current.values().map(|current| self.chosen(&current.made)).collect();
        let gains: Vec<f64> = all
            .iter()
            .filter(|it| it.arm != self.plain)
            .filter_map(|it| it.gain)
            .filter(|it| *it > 0.0)
            .collect();
        let mean = gains.iter().map(|gain| gain.ln()).sum::<f64>() / gains.len().max(1) as f64;
        let mut paths = all;
        paths.sort_by_key(|it| std::cmp::Reverse(it.connections));
        paths.truncate(status::Selection::PATHS_MAX);
        status::Selection {
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
    fn serial_of(&self, place: Place) -> u32 {
        self.current.get(&place).map_or(0, |current| current.choice.serial)
    }
}

/// Of TCP as it is, by the arm's: how many times as long it takes.
fn gain(tried: &[Tried], arm: &str, plain: &str) -> Option<f64> {
    let cost = |name: &str| tried.iter().find(|it| it.arm == name)?.cost;
    Some(cost(plain)? / cost(arm)?)
}

/// As a rule they are one.
fn is_same(one: Option<&Arc<Model>>, other: Option<&Arc<Model>>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other) || one == other,
        _ => one.is_none() && other.is_none(),
    }
}

fn carries(rule: &Rule) -> bool {
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

pub fn name_of(why: Why) -> &'static str {
    match why {
        Why::Learned => "learned",
        Why::Doubted => "doubted",
        Why::Found => "found",
    }
}

#[cfg(test)]
mod tests;
