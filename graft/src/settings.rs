//! The settings of a daemon: TOML, read as a whole. `docs/graft.md` has all keys.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    sync::Arc,
};

use millrace_base::settings::Reader;
use millrace_graft_kernel as kernel;
use millrace_graft_kernel::{RULES, hook::Lead};
use millrace_graft_proto::select::{
    model::{self, Model},
    profile::Profile,
};
use millrace_kernel::prefix::{ParseError, Prefix};
use serde::{Deserialize, Serialize};

pub use self::{
    agreement::{Agreement, Fetch, Peer, Trust},
    carry::{Carry, Connect, Kind, Pool, QuicCongestion, Tier},
    gateway::Gateway,
    probe::Probe,
    purpose::Purpose,
    who::{Cgroup, Who},
};
use crate::{Error, identity::Key};

mod agreement;
mod carry;
mod gateway;
pub mod probe;
mod purpose;
mod who;

/// Of a congestion control's name.
const CONGESTION_MAX: usize = 15;
/// More than that is 4 GB/s and 34 Gbit/s, which SO_MAX_PACING_RATE cannot say to a BPF program.
const PACING_MAX_MBIT: u32 = 34_000;
const BUFFER_MAX_KIB: u32 = 1 << 20;
const WINDOW_MAX: u32 = 10_000;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// Directories, besides what is compiled in.
    pub pool: Vec<PathBuf>,
    /// If there are any, grafts from directories are signed by one of them.
    pub trusted_keys: Vec<Key>,
    /// Whose sockets; `None`: all of this host, the root of version 2.
    pub cgroup: Option<PathBuf>,
    pub load: Vec<Load>,
    pub rules: Vec<Rule>,
    /// Sorted by their round trips.
    pub classes: Vec<Class>,
    /// With whom, by TLS.
    pub agreement: Option<Agreement>,
    /// Paths that are probed again and again.
    pub probes: Vec<Probe>,
    /// What is carried for applications.
    pub carry: Option<Carry>,
    /// What is carried for hosts behind this one.
    pub gateway: Option<Gateway>,
    /// What rules that select go by.
    pub model: Option<Arc<Model>>,
    /// A file in which what is learned outlasts a runtime.
    pub learned: Option<PathBuf>,
    /// What connections are for.
    pub purposes: Vec<Purpose>,
}

/// A graft that is loaded whether or not a rule uses it.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Load {
    pub graft: String,
    #[serde(default)]
    pub parameters: BTreeMap<String, u64>,
}

/// Whom a rule asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agree {
    /// It holds whatever the peer has.
    Nobody,
    /// By TCP options.
    Options,
    /// By TCP options, and only who is bound by an agreement.
    Bound,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Side {
    Client,
    Server,
}

/// Connections, and what this host's side of them gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    pub name: String,
    pub side: Side,
    pub ports: Vec<RangeInclusive<u16>>,
    pub peers: Vec<Prefix>,
    /// Of a client.
    pub who: Who,
    pub agree: Agree,
    pub tier: Tier,
    pub connect: Connect,
    /// Addresses of this host at which peers reach its servers, besides those that their carriers come to.
    pub addresses: Vec<IpAddr>,
    /// Of the pool.
    pub graft: Option<String>,
    /// Of the pool: what the peer's side is to use, if it is to be bound.
    pub peer_graft: Option<String>,
    /// Of the kernel.
    pub congestion: Option<String>,
    pub pacing_mbit: Option<u32>,
    pub send_buffer_kib: Option<u32>,
    pub receive_buffer_kib: Option<u32>,
    pub initial_window: Option<u32>,
    /// The congestion control is what the model chooses for each path.
    pub select: Option<Select>,
}

/// What a model is to know of a rule's connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Select {
    /// `None`: what is known of them, or usual.
    pub profile: Option<Profile>,
    /// That is expected of one.
    pub size_kib: Option<u32>,
}

/// Paths with a round trip of at least so much.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Class {
    pub name: String,
    pub min_rtt_us: u32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Raw {
    #[serde(default)]
    pool: Vec<PathBuf>,
    #[serde(default)]
    trusted_keys: Vec<String>,
    cgroup: Option<PathBuf>,
    #[serde(default)]
    load: Vec<Load>,
    #[serde(default)]
    rule: Vec<RawRule>,
    class: Option<Vec<Class>>,
    agreement: Option<agreement::Raw>,
    #[serde(default)]
    peer: Vec<agreement::RawPeer>,
    #[serde(default)]
    fetch: Vec<agreement::RawFetch>,
    #[serde(default)]
    probe: Vec<probe::Raw>,
    carry: Option<carry::Raw>,
    gateway: Option<gateway::Raw>,
    model: Option<PathBuf>,
    learned: Option<PathBuf>,
    #[serde(default)]
    profile: Vec<purpose::Raw>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawRule {
    name: String,
    side: Side,
    port: Vec<Port>,
    peer: Option<Vec<String>>,
    command: Option<String>,
    cgroup: Option<PathBuf>,
    agree: Option<RawAgree>,
    #[serde(default)]
    tier: Tier,
    connect: Option<Connect>,
    #[serde(default)]
    addresses: Vec<IpAddr>,
    graft: Option<String>,
    peer_graft: Option<String>,
    congestion: Option<String>,
    pacing_mbit: Option<u32>,
    send_buffer_kib: Option<u32>,
    receive_buffer_kib: Option<u32>,
    initial_window: Option<u32>,
    select: Option<purpose::RawSelect>,
    size_kib: Option<u32>,
}

/// `true`, `false`, `"bound"`.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "agree is true, false or \"bound\"")]
enum RawAgree {
    Whether(bool),
    How(Bound),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Bound {
    Bound,
}

impl From<&Option<RawAgree>> for Agree {
    fn from(raw: &Option<RawAgree>) -> Self {
        match raw {
            Some(RawAgree::Whether(false)) => Self::Nobody,
            None | Some(RawAgree::Whether(true)) => Self::Options,
            Some(RawAgree::How(Bound::Bound)) => Self::Bound,
        }
    }
}

/// `443`, `"8000-8100"`.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "is 1 to 65535, or a range such as \"8000-8100\"")]
enum Port {
    Number(u16),
    Text(String),
}

impl Port {
    fn range(&self) -> Option<RangeInclusive<u16>> {
        let range = match self {
            Self::Number(number) => *number..=*number,
            Self::Text(text) => {
                let (first, last) = text.split_once('-').unwrap_or((text, text));
                first.trim().parse().ok()?..=last.trim().parse().ok()?
            }
        };
        (!range.is_empty() && *range.start() > 0).then_some(range)
    }
}

impl Settings {
    /// # Errors
    /// Everything that is wrong.
    pub fn parse(text: &str) -> Result<Self, Error> {
        Self::parse_in(text, "settings", Path::new(""))
    }

    /// What it names is relative to it.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let file = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse_in(&text, &file, path.parent().unwrap_or(Path::new(""))),
            Err(error) => Err(Error::File { path: file, message: error.to_string() }),
        }
    }

    fn parse_in(text: &str, file: &str, directory: &Path) -> Result<Self, Error> {
        let settings = |reader: &mut Reader<'_>, raw| Self::from_raw(reader, raw, directory);
        Ok(Reader::file(text, "the settings are", file, settings).map_err(crate::left::advise)?)
    }

    /// Checks what was read, all parts before the whole.
    fn from_raw(reader: &mut Reader<'_>, raw: Raw, directory: &Path) -> Option<Self> {
        let keys = reader.each("trusted-keys", raw.trusted_keys, |key| {
            key.parse().map_err(|error| format!("trusted-keys: {key:?} {error}"))
        });
        let mut classes = raw.class.unwrap_or_else(default_classes);
        classes.sort_by_key(|class| class.min_rtt_us);
        let carry = reader.check("carry", raw.carry.map(carry::Raw::checked).transpose());
        let peers = reader.each("peer", raw.peer, agreement::RawPeer::checked);
        let fetch = reader.each("fetch", raw.fetch, agreement::RawFetch::checked);
        let agreement = match (&carry, peers, fetch) {
            (Some(carry), Some(peers), Some(fetch)) => {
                let carry_hears = carry.as_ref().map(|carry| carry.listen.is_some());
                let agreement = Agreement::of(raw.agreement, peers, fetch, carry_hears, directory);
                reader.check("agreement", agreement)
            }
            _ => None,
        };
        let rules = reader.each("rule", raw.rule, RawRule::checked);
        let probes = reader.check("probe", probe::check_count(&raw.probe));
        let probes = probes.and(reader.each("probe", raw.probe, probe::unlike_others()));
        let gateway = reader.check("gateway", raw.gateway.map(gateway::Raw::checked).transpose());
        let model = raw.model.map(|path| model(&directory.join(path))).transpose();
        let model = reader.check("model", model);
        let learned = raw.learned.map(|path| learned(&directory.join(path))).transpose();
        let learned = reader.check("learned", learned);
        let purposes = reader.check("profile", purpose::all(raw.profile));
        let agreement = agreement?;
        let settings = Self {
            pool: raw.pool.iter().map(|path| directory.join(path)).chain(fetched_to(&agreement)).collect(),
            trusted_keys: keys?,
            cgroup: raw.cgroup,
            load: raw.load,
            rules: rules?,
            classes,
            agreement,
            probes: probes?,
            carry: carry?,
            gateway: gateway?,
            model: model?,
            learned: learned?,
            purposes: purposes?,
        };
        settings.check(reader);
        Some(settings)
    }

    /// Notes what is wrong between parts.
    fn check(&self, reader: &mut Reader<'_>) {
        for (key, done) in [
            ("rule", self.check_rules()),
            ("agreement", self.check_agreement()),
            ("rule", self.check_select()),
            ("carry", self.check_carry()),
            ("gateway", self.check_networks()),
            ("class", self.check_classes()),
        ] {
            reader.check(key, done);
        }
    }

    fn check_rules(&self) -> Result<(), String> {
        let mut names = BTreeSet::new();
        if let Some(rule) = self.rules.iter().find(|rule| !names.insert(&rule.name)) {
            return Err(format!("two rules are called {}", rule.name));
        }
        let mut grafts = BTreeSet::new();
        if let Some(load) = self.load.iter().find(|load| !grafts.insert(&load.graft)) {
            return Err(format!("graft {} is loaded twice", load.graft));
        }
        let places: usize = self.rules.iter().map(|rule| rule.ports.len() * rule.peers.len()).sum();
        let room = RULES - self.own_rules().len();
        if places > room {
            return Err(format!(
                "the rules have {places} pairs of a port and a peer: there is room for {room}"
            ));
        }
        Ok(())
    }

    fn check_classes(&self) -> Result<(), String> {
        match self.classes.first() {
            Some(class) if class.min_rtt_us == 0 => Ok(()),
            _ => Err("one class has min-rtt-us = 0".to_owned()),
        }
    }

    fn check_agreement(&self) -> Result<(), String> {
        let bound = self.rules.iter().find(|rule| rule.agree == Agree::Bound);
        let Some(agreement) = &self.agreement else {
            return match bound {
                Some(rule) => {
                    Err(format!("rule {}: agree = \"bound\" wants a [[peer]] and an [agreement]", rule.name))
                }
                None => Ok(()),
            };
        };
        if !agreement.fetch.is_empty() && self.trusted_keys.is_empty() {
            return Err(
                "fetch wants trusted-keys: what comes from a peer is signed by one of them".to_owned()
            );
        }
        Ok(())
    }

    fn check_select(&self) -> Result<(), String> {
        let missing = self.rules.iter().find(|rule| rule.select.is_some()).filter(|_| self.model.is_none());
        match missing {
            Some(rule) => Err(format!("rule {}: select wants a model", rule.name)),
            None => Ok(()),
        }
    }

    fn check_carry(&self) -> Result<(), String> {
        let mut addresses = BTreeSet::new();
        for peer in self.agreement.iter().flat_map(|it| &it.peers) {
            if let Some(address) = peer.all_addresses().find(|address| !addresses.insert(*address)) {
                return Err(format!("peer {}: another peer has the address {address}", peer.name));
            }
        }
        let mut carried = self.rules.iter().filter(|rule| rule.tier != Tier::InPlace);
        match (&self.carry, &self.agreement, carried.next()) {
            (None, _, Some(rule)) => {
                Err(format!("rule {}: tier = \"{}\" wants [carry]", rule.name, rule.tier.name()))
            }
            (Some(_), None, _) => Err("[carry] wants an [agreement] with this host's key".to_owned()),
            _ => Ok(()),
        }
    }

    /// Whose an address is has one answer.
    fn check_networks(&self) -> Result<(), String> {
        if self.gateway.is_some() && self.carry.is_none() {
            return Err("[gateway] wants [carry], and an [agreement] with this host's key".to_owned());
        }
        let own = self.gateway.iter().flat_map(|it| &it.networks).map(|network| (None, *network));
        let mut known: Vec<(Option<&str>, Prefix)> = own.collect();
        for peer in self.agreement.iter().flat_map(|it| &it.peers) {
            for network in &peer.networks {
                let other = known.iter().find(|(_, other)| gateway::overlap(*other, *network));
                match other {
                    Some((None, _)) => {
                        return Err(format!("peer {}: {network} is also behind this host", peer.name));
                    }
                    Some((Some(other), _)) => {
                        return Err(format!("peer {}: {network} is also behind peer {other}", peer.name));
                    }
                    None => known.push((Some(&peer.name), *network)),
                }
            }
        }
        let (places, room) = (known.len(), kernel::gateway::PREFIXES / 2);
        match places > room {
            true => Err(format!("there are {places} networks behind hosts: there is room for {room}")),
            false => Ok(()),
        }
    }

    /// Behind these interfaces of this host, too, are hosts whose connections are carried.
    ///
    /// # Errors
    /// There is no gateway although there are interfaces, or a gateway without any.
    pub fn behind(&mut self, interfaces: &[String]) -> Result<(), Error> {
        match &mut self.gateway {
            Some(gateway) => gateway.add(interfaces).map_err(Error::Settings)?,
            None if interfaces.is_empty() => return Ok(()),
            None => {
                let wants = "--interface wants [gateway] with networks in the settings: what is behind it";
                return Err(Error::Settings(wants.to_owned()));
            }
        }
        match self.gateway.iter().any(|gateway| gateway.interfaces.is_empty()) {
            true => Err(Error::Settings("gateway: interface names none, nor does --interface".to_owned())),
            false => Ok(()),
        }
    }

    /// For the control connections themselves, so that it is known whether options come through to each peer.
    pub(crate) fn own_rules(&self) -> Vec<kernel::Rule> {
        let Some(agreement) = &self.agreement else { return Vec::new() };
        let rule = |side, port| kernel::Rule {
            side,
            peer: kernel::everybody(),
            ports: port..=port,
            caller: kernel::Caller::default(),
            agree: true,
            bound: false,
            choice: 0,
            graft: [0; 4],
            settings: kernel::Settings::default(),
        };
        let called: BTreeSet<u16> =
            agreement.peers.iter().filter_map(|peer| Some(peer.address?.port())).collect();
        let clients = called.into_iter().map(|port| rule(kernel::Side::Client, port));
        let server = agreement.listen.map(|at| rule(kernel::Side::Server, at.port()));
        clients.chain(server).collect()
    }

    /// Whom the rules are for, as things are now.
    /// Looks which cgroups of rules are there. Returns whether any has come or gone: who is told of rules is to be told again.
    pub(crate) fn follow_cgroups(&self) -> bool {
        self.rules.iter().fold(false, |is_new, rule| rule.who.follow() | is_new)
    }

    /// That a rule names, by its id.
    pub(crate) fn cgroup_of(&self, id: u64) -> Option<&Cgroup> {
        self.cgroups().find(|cgroup| cgroup.id() == Some(id))
    }

    pub(crate) fn cgroups(&self) -> impl Iterator<Item = &Cgroup> {
        self.rules.iter().filter_map(|rule| rule.who.cgroup.as_ref())
    }

    /// For the hook of this host: what is carried, or may be, and what is not since a rule in place comes first.
    pub fn leads(&self) -> Vec<Lead> {
        let clients: Vec<_> =
            self.rules.iter().enumerate().filter(|(_, rule)| rule.side == Side::Client).collect();
        let last = clients.iter().rposition(|(_, rule)| rule.tier != Tier::InPlace).map_or(0, |at| at + 1);
        clients.iter().take(last).flat_map(|(index, rule)| rule.leads(*index)).collect()
    }

    /// Rules of this side whose connections are carried, or may be.
    pub fn carried(&self, side: Side) -> impl Iterator<Item = &Rule> {
        self.rules.iter().filter(move |rule| rule.tier != Tier::InPlace && rule.side == side)
    }

    /// The first of these that one to or from this server's port and peer falls under; `None` of who connects: it is not known.
    pub(crate) fn carried_by(
        &self,
        side: Side,
        (port, peer): (u16, IpAddr),
        command: Option<&str>,
        cgroup: Option<u64>,
    ) -> Option<&Rule> {
        self.carried(side).find(|rule| rule.is_for(port, peer) && rule.who.has(command, cgroup))
    }

    /// One that is to come from a peer.
    pub fn fetches(&self, graft: &str) -> bool {
        self.agreement.as_ref().is_some_and(|it| it.fetch.iter().any(|fetch| fetch.graft == graft))
    }

    /// Grafts that have to be there, with the values that are set for them.
    pub fn needed(&self) -> BTreeMap<String, BTreeMap<String, u64>> {
        let used = self.rules.iter().filter_map(|rule| Some((rule.graft.clone()?, BTreeMap::new())));
        let mut needed: BTreeMap<_, _> = used.collect();
        needed.extend(self.load.iter().map(|load| (load.graft.clone(), load.parameters.clone())));
        needed
    }
}

/// As the kernel knows a rule by which something is chosen; 0 is none.
pub(crate) fn place_number(rule: usize) -> u32 {
    u32::try_from(rule + 1).unwrap_or_default()
}

fn model(path: &Path) -> Result<Arc<Model>, String> {
    let failed = |error: String| format!("model {}: {error}", path.display());
    let bytes = std::fs::metadata(path).map_err(|error| failed(error.to_string()))?.len();
    if bytes > model::BYTES_MAX as u64 {
        return Err(failed(format!("it has {bytes} bytes; a model has at most {}", model::BYTES_MAX)));
    }
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    Model::parse(&text).map(Arc::new).map_err(|error| failed(error.to_string()))
}

/// It need not be there, but where it is to be.
fn learned(path: &Path) -> Result<PathBuf, String> {
    let directory = path.parent().filter(|directory| *directory != Path::new("")).unwrap_or(Path::new("."));
    match directory.is_dir() {
        true => Ok(path.to_owned()),
        false => Err(format!("learned {}: there is no directory {}", path.display(), directory.display())),
    }
}

fn fetched_to(agreement: &Option<Agreement>) -> Option<PathBuf> {
    agreement.as_ref()?.fetch_to.clone()
}

/// As VTL has them.
pub fn default_classes() -> Vec<Class> {
    let class = |name: &str, min_rtt_us| Class { name: name.to_owned(), min_rtt_us };
    vec![class("lan", 0), class("terrestrial", 5_000), class("long-delay", 300_000)]
}

impl RawRule {
    fn checked(self) -> Result<Rule, String> {
        let name = self.name.clone();
        self.try_checked().map_err(|error| format!("rule {name}: {error}"))
    }

    fn try_checked(self) -> Result<Rule, String> {
        let within = |what: &str, value: Option<u32>, most: u32| match value {
            Some(value) if !(1..=most).contains(&value) => Err(format!("{what} is from 1 to {most}")),
            _ => Ok(()),
        };
        within("pacing-mbit", self.pacing_mbit, PACING_MAX_MBIT)?;
        within("send-buffer-kib", self.send_buffer_kib, BUFFER_MAX_KIB)?;
        within("receive-buffer-kib", self.receive_buffer_kib, BUFFER_MAX_KIB)?;
        within("initial-window", self.initial_window, WINDOW_MAX)?;
        if self.graft.is_some() && self.congestion.is_some() {
            return Err("graft and congestion are one or the other".to_owned());
        }
        if self.select.is_some() && (self.graft.is_some() || self.congestion.is_some()) {
            return Err("select and graft or congestion are one or the other".to_owned());
        }
        if self.select.is_some() && Agree::from(&self.agree) != Agree::Nobody {
            return Err("select wants agree = false".to_owned());
        }
        if self.size_kib.is_some() && self.select.is_none() {
            return Err("size-kib wants select".to_owned());
        }
        if self.congestion.as_ref().is_some_and(|name| name.is_empty() || name.len() > CONGESTION_MAX) {
            return Err(format!("congestion is 1 to {CONGESTION_MAX} bytes"));
        }
        let ports: Option<Vec<_>> = self.port.iter().map(Port::range).collect();
        let peers = self.peer.unwrap_or_else(|| vec!["::/0".to_owned()]);
        let peers: Result<Vec<Prefix>, _> =
            peers.iter().map(|peer| peer.parse().map_err(|error: ParseError| error.to_string())).collect();
        let (ports, peers) = (ports.ok_or("port is 1 to 65535, or a range such as \"8000-8100\"")?, peers?);
        if ports.is_empty() || peers.is_empty() {
            return Err("port and peer are not empty".to_owned());
        }
        let agree = Agree::from(&self.agree);
        if self.peer_graft.is_some() && agree != Agree::Bound {
            return Err("peer-graft wants agree = \"bound\"".to_owned());
        }
        if self.connect.is_some() && (self.tier == Tier::InPlace || self.side != Side::Client) {
            return Err("connect wants side = \"client\" and tier = \"carried\" or \"chosen\"".to_owned());
        }
        if !self.addresses.is_empty() && (self.tier == Tier::InPlace || self.side != Side::Server) {
            return Err("addresses wants side = \"server\" and tier = \"carried\" or \"chosen\"".to_owned());
        }
        if self.tier == Tier::Chosen && self.select.is_none() && self.side == Side::Client {
            return Err("tier = \"chosen\" wants select".to_owned());
        }
        let who = Who::checked(self.command, self.cgroup)?;
        if !who.is_anybody() && self.side == Side::Server {
            return Err("command and cgroup want side = \"client\": who accepts a connection is not known when it comes".to_owned());
        }
        Ok(Rule {
            name: self.name,
            side: self.side,
            ports,
            peers,
            who,
            agree,
            tier: self.tier,
            connect: self.connect.unwrap_or_default(),
            addresses: self.addresses,
            graft: self.graft,
            peer_graft: self.peer_graft,
            congestion: self.congestion,
            pacing_mbit: self.pacing_mbit,
            send_buffer_kib: self.send_buffer_kib,
            receive_buffer_kib: self.receive_buffer_kib,
            initial_window: self.initial_window,
            select: self.select.map(|it| Select { profile: it.profile(), size_kib: self.size_kib }),
        })
    }
}

impl Rule {
    /// For the kernel, one for each pair of a port and a peer.
    pub(crate) fn places(&self, congestion: Option<String>, graft: [u8; 4]) -> Vec<kernel::Rule> {
        let kib = |kib: Option<u32>| kib.and_then(|kib| i32::try_from(u64::from(kib) * 1024 / 2).ok());
        let settings = kernel::Settings {
            congestion,
            pacing: self.pacing_mbit.map(|mbit| mbit * 125_000),
            // The kernel doubles what it is given.
            send_buffer: kib(self.send_buffer_kib),
            receive_buffer: kib(self.receive_buffer_kib),
            window: self.initial_window.and_then(|packets| i32::try_from(packets).ok()),
        };
        let side = match self.side {
            Side::Client => kernel::Side::Client,
            Side::Server => kernel::Side::Server,
        };
        let caller = self.who.caller();
        let pairs =
            self.peers.iter().flat_map(|peer| self.ports.iter().map(move |ports| (*peer, ports.clone())));
        pairs
            .map(|(peer, ports)| kernel::Rule {
                side,
                peer,
                ports,
                caller: caller.clone(),
                agree: self.agree != Agree::Nobody,
                bound: self.agree == Agree::Bound,
                choice: 0,
                graft,
                settings: settings.clone(),
            })
            .collect()
    }
}

impl Rule {
    /// Pairs of a port and a peer for the hook: whether they are led to the broker. `index`: of this rule.
    fn leads(&self, index: usize) -> Vec<Lead> {
        let (strict, in_place) = (self.connect == Connect::Strict, self.tier == Tier::InPlace);
        let choice = if self.tier == Tier::Chosen { place_number(index) } else { 0 };
        let caller = self.who.caller();
        let lead = |peer: &Prefix, ports: &RangeInclusive<u16>| Lead {
            peer: *peer,
            ports: ports.clone(),
            caller: caller.clone(),
            strict,
            choice,
            in_place,
        };
        self.peers.iter().flat_map(|peer| self.ports.iter().map(move |ports| lead(peer, ports))).collect()
    }

    /// Whether it is for this port and this peer.
    pub fn is_for(&self, port: u16, peer: IpAddr) -> bool {
        let has_port = self.ports.iter().any(|ports| ports.contains(&port));
        has_port && self.peers.iter().any(|prefix| kernel::covers(*prefix, peer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read() {
        let settings = Settings::parse(
            r#"
            [[load]]
            graft = "hybla"
            parameters = { rtt0_us = 30000 }
            [[rule]]
            name = "web"
            side = "server"
            port = [443, "8000-8100"]
            peer = ["10.0.0.0/8", "2001:db8::/32"]
            graft = "westwood"
            pacing-mbit = 8
            send-buffer-kib = 1024
            "#,
        )
        .expect("settings");
        assert_eq!(settings.needed().keys().collect::<Vec<_>>(), ["hybla", "westwood"]);
        let places = settings.rules[0].places(Some("mr_westwood".into()), [1; 4]);
        assert_eq!(places.len(), 4);
        assert!(places.iter().all(|place| place.agree && place.settings.pacing == Some(1_000_000)));
        assert_eq!(places[3].ports, 8000..=8100);
        assert_eq!(places[0].settings.send_buffer, Some(512 << 10));
    }

    #[test]
    fn what_is_wrong_is_said() {
        let rule = "[[rule]]\nname = \"a\"\nside = \"client\"\nport = 80\n";
        assert!(Settings::parse(rule).is_ok());
        let table = [
            (rule.replace("80", "0"), "port is 1 to 65535"),
            (rule.replace("80", "\"9-8\""), "port is 1 to 65535"),
            (rule.replace("80", "[]"), "not empty"),
            (rule.replace("client", "peer"), "rule[0].side: is \"client\" or \"server\", not \"peer\""),
            (format!("{rule}graft = \"a\"\ncongestion = \"b\"\n"), "one or the other"),
            (format!("{rule}congestion = \"sixteen-letters!\"\n"), "1 to 15 bytes"),
            (format!("{rule}peer = \"10.0.0.0/33\"\n"), "no address prefix"),
            (format!("{rule}initial-window = 0\n"), "initial-window is from 1"),
            (format!("{rule}command = \"rsync\"\ncgroup = \"/sys/fs/cgroup/a\"\n"), ""),
            (format!("{rule}command = \"sixteen-letters!\"\n"), "rule a: command is 1 to 15 bytes"),
            (format!("{rule}command = \"\"\n"), "rule a: command is 1 to 15 bytes"),
            (format!("{rule}cgroup = \"backup.slice\"\n"), "rule a: cgroup is the path of a directory"),
            (format!("{rule}cgroup = \"/a/../b\"\n"), "rule a: cgroup is the path of a directory"),
            (format!("{rule}cgroup = \"{}\"\n", "/a".repeat(16)), "rule a: cgroup lies more than 16"),
            (
                format!("{rule}command = \"nginx\"\n").replace("client", "server"),
                "rule a: command and cgroup want side = \"client\"",
            ),
            (format!("{rule}select = \"loss\"\n"), "rule a: select wants agree = false"),
            (format!("{rule}agree = false\nselect = \"loss\"\n"), "rule a: select wants a model"),
            (format!("{rule}agree = false\nselect = \"fast\"\n"), "rule[0].select: is \"time\", "),
            (format!("{rule}select = \"loss\"\ngraft = \"a\"\n"), "select and graft or congestion"),
            (format!("{rule}size-kib = 1\n"), "size-kib wants select"),
            (format!("model = \"/nowhere/model.json\"\n{rule}"), "model /nowhere/model.json: No such file"),
            (
                format!("learned = \"/nowhere/l\"\n{rule}"),
                "learned /nowhere/l: there is no directory /nowhere",
            ),
            (format!("{rule}pace = 1\n"), "rule[0].pace: unknown key; known here: name, side"),
            (format!("{rule}agree = \"perhaps\"\n"), "agree is true, false or \"bound\""),
            (format!("{rule}agree = \"bound\"\n"), "rule a: agree = \"bound\" wants a [[peer]]"),
            (format!("{rule}peer-graft = \"b\"\n"), "rule a: peer-graft wants agree = \"bound\""),
            (format!("{rule}{rule}"), "two rules are called a"),
            (rule.replace("80", "[\"1-2\", 4]"), ""),
            ("[[load]]\ngraft = \"a\"\n".repeat(2), "loaded twice"),
            ("trusted-keys = [\"ab\"]".into(), "ed25519"),
            ("[[class]]\nname = \"far\"\nmin-rtt-us = 1\n".into(), "one class has min-rtt-us = 0"),
        ];
        for (text, wanted) in table {
            match Settings::parse(&text) {
                Ok(_) => assert_eq!(wanted, "", "{text}"),
                Err(error) => {
                    assert!(!wanted.is_empty() && error.to_string().contains(wanted), "{text}: {error}")
                }
            }
        }
        let wrong = format!(
            "cgroop = \"/a\"\n{rule}initial-window = 0\n{}[[peer]]\nname = \"b\"\n",
            rule.replace("\"a\"", "\"b\"").replace("80", "\"9-8\"")
        );
        // What is read comes before what is checked.
        for (text, wanted) in [
            (
                wrong.clone() + "min-cpus = -1\n[[class]]\nname = 7\nmin-rtt-us = 0\n",
                [
                    "settings:1: cgroop: unknown key; did you mean `cgroup`?",
                    "settings:13: peer[0].min-cpus: is a number",
                    "settings:15: class[0].name: is text in quotes",
                ],
            ),
            (
                wrong.replace("cgroop", "cgroup"),
                [
                    "settings:2: rule a: initial-window is from 1",
                    "settings:7: rule b: port is 1",
                    "settings:11: peer b: one of key",
                ],
            ),
        ] {
            let error = Settings::parse(&text).expect_err("problems").to_string();
            assert!(wanted.iter().all(|wanted| error.contains(wanted)), "{error}");
        }
        let peers = (0..65).map(|at| format!("\"10.0.{at}.0/24\"")).collect::<Vec<_>>().join(", ");
        let error = Settings::parse(&format!("{rule}peer = [{peers}]\n")).expect_err("too many");
        assert!(error.to_string().contains("65 pairs"), "{error}");
    }
}
