//! The settings of a daemon: TOML, read as a whole. `docs/graft.md` has all keys.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    sync::Arc,
};

use millrace_bpf::{
    gate::{ParseError, Prefix},
    graft::{self as kernel, RULES, hook::Lead},
};
use millrace_proto::graft::select::{
    model::{self, Model},
    profile::Profile,
};
use serde::{Deserialize, Serialize};

pub use self::{
    agreement::{Agreement, Fetch, Peer, Trust},
    carry::{Carry, Connect, Kind, Pool, Tier},
    probe::Probe,
};
use crate::{Error, identity::Key};

mod agreement;
mod carry;
mod one_or_more;
pub mod probe;

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
    /// What rules that select go by.
    pub model: Option<Arc<Model>>,
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
    pub agree: Agree,
    pub tier: Tier,
    pub connect: Connect,
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
    pub profile: Profile,
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
    model: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawRule {
    name: String,
    side: Side,
    port: Many<Port>,
    peer: Option<Many<String>>,
    agree: Option<RawAgree>,
    #[serde(default)]
    tier: Tier,
    connect: Option<Connect>,
    graft: Option<String>,
    peer_graft: Option<String>,
    congestion: Option<String>,
    pacing_mbit: Option<u32>,
    send_buffer_kib: Option<u32>,
    receive_buffer_kib: Option<u32>,
    initial_window: Option<u32>,
    select: Option<Profile>,
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

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Many<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> Many<T> {
    fn all(self) -> Vec<T> {
        match self {
            Self::One(one) => vec![one],
            Self::Many(many) => many,
        }
    }
}

/// `443`, `"8000-8100"`.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
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
    /// The first thing that is wrong.
    pub fn parse(text: &str) -> Result<Self, Error> {
        Self::parse_in(text, Path::new("")).map_err(Error::Settings)
    }

    /// What it names is relative to it.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let error = |message: String| Error::File { path: path.display().to_string(), message };
        let text = std::fs::read_to_string(path).map_err(|source| error(source.to_string()))?;
        Self::parse_in(&text, path.parent().unwrap_or(Path::new(""))).map_err(error)
    }

    fn parse_in(text: &str, directory: &Path) -> Result<Self, String> {
        let raw: Raw = toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())?;
        let keys = raw
            .trusted_keys
            .iter()
            .map(|key| key.parse().map_err(|error| format!("trusted-keys: {key:?} {error}")));
        let mut classes = raw.class.unwrap_or_else(default_classes);
        classes.sort_by_key(|class| class.min_rtt_us);
        let carry = raw.carry.map(carry::Raw::checked).transpose()?;
        let carry_hears = carry.as_ref().map(|carry| carry.listen.is_some());
        let agreement = Agreement::of(raw.agreement, raw.peer, raw.fetch, carry_hears, directory)?;
        let settings = Self {
            pool: raw.pool.iter().map(|path| directory.join(path)).chain(fetched_to(&agreement)).collect(),
            trusted_keys: keys.collect::<Result<_, _>>()?,
            cgroup: raw.cgroup,
            load: raw.load,
            rules: raw.rule.into_iter().map(RawRule::checked).collect::<Result<_, _>>()?,
            classes,
            agreement,
            probes: probe::all(raw.probe)?,
            carry,
            model: raw.model.map(|path| model(&directory.join(path))).transpose()?,
        };
        settings.check()?;
        Ok(settings)
    }

    fn check(&self) -> Result<(), String> {
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
        self.check_agreement()?;
        self.check_select()?;
        self.check_carry()?;
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

    /// What is chosen changes the list of rules, which ends what is bound to it.
    fn check_select(&self) -> Result<(), String> {
        let Some(rule) = self.rules.iter().find(|rule| rule.select.is_some()) else { return Ok(()) };
        if self.model.is_none() {
            return Err(format!("rule {}: select wants a model", rule.name));
        }
        match self.rules.iter().find(|rule| rule.agree == Agree::Bound) {
            Some(bound) => Err(format!(
                "rule {}: agree = \"bound\" does not go with select of rule {}",
                bound.name, rule.name
            )),
            None => Ok(()),
        }
    }

    /// Places for what a model chooses, besides those of the rules.
    pub(crate) fn room(&self) -> usize {
        let places: usize = self.rules.iter().map(|rule| rule.ports.len() * rule.peers.len()).sum();
        RULES.saturating_sub(places + self.own_rules().len())
    }

    fn check_carry(&self) -> Result<(), String> {
        let mut addresses = BTreeSet::new();
        for peer in self.agreement.iter().flat_map(|it| &it.peers) {
            if let Some(address) = peer.all_addresses().find(|address| !addresses.insert(*address)) {
                return Err(format!("peer {}: another peer has the address {address}", peer.name));
            }
        }
        let mut carried = self.rules.iter().filter(|rule| rule.tier == Tier::Carried);
        match (&self.carry, &self.agreement, carried.next()) {
            (None, _, Some(rule)) => Err(format!("rule {}: tier = \"carried\" wants [carry]", rule.name)),
            (Some(_), None, _) => Err("[carry] wants an [agreement] with this host's key".to_owned()),
            _ => Ok(()),
        }
    }

    /// For the control connections themselves, so that it is known whether options come through to each peer.
    pub(crate) fn own_rules(&self) -> Vec<kernel::Rule> {
        let Some(agreement) = &self.agreement else { return Vec::new() };
        let rule = |side, port| kernel::Rule {
            side,
            peer: kernel::everybody(),
            ports: port..=port,
            agree: true,
            bound: false,
            graft: [0; 4],
            settings: kernel::Settings::default(),
        };
        let called: BTreeSet<u16> =
            agreement.peers.iter().filter_map(|peer| Some(peer.address?.port())).collect();
        let clients = called.into_iter().map(|port| rule(kernel::Side::Client, port));
        let server = agreement.listen.map(|at| rule(kernel::Side::Server, at.port()));
        clients.chain(server).collect()
    }

    /// Rules of this side whose connections are carried.
    pub fn carried(&self, side: Side) -> impl Iterator<Item = &Rule> {
        self.rules.iter().filter(move |rule| rule.tier == Tier::Carried && rule.side == side)
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

fn model(path: &Path) -> Result<Arc<Model>, String> {
    let failed = |error: String| format!("model {}: {error}", path.display());
    let bytes = std::fs::metadata(path).map_err(|error| failed(error.to_string()))?.len();
    if bytes > model::BYTES_MAX as u64 {
        return Err(failed(format!("it has {bytes} bytes; a model has at most {}", model::BYTES_MAX)));
    }
    let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    Model::parse(&text).map(Arc::new).map_err(|error| failed(error.to_string()))
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
        let ports: Option<Vec<_>> = self.port.all().iter().map(Port::range).collect();
        let peers = self.peer.map_or_else(|| vec!["::/0".to_owned()], Many::all);
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
        if self.connect.is_some() && (self.tier, self.side) != (Tier::Carried, Side::Client) {
            return Err("connect wants side = \"client\" and tier = \"carried\"".to_owned());
        }
        Ok(Rule {
            name: self.name,
            side: self.side,
            ports,
            peers,
            agree,
            tier: self.tier,
            connect: self.connect.unwrap_or_default(),
            graft: self.graft,
            peer_graft: self.peer_graft,
            congestion: self.congestion,
            pacing_mbit: self.pacing_mbit,
            send_buffer_kib: self.send_buffer_kib,
            receive_buffer_kib: self.receive_buffer_kib,
            initial_window: self.initial_window,
            select: self.select.map(|profile| Select { profile, size_kib: self.size_kib }),
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
        let pairs =
            self.peers.iter().flat_map(|peer| self.ports.iter().map(move |ports| (*peer, ports.clone())));
        pairs
            .map(|(peer, ports)| kernel::Rule {
                side,
                peer,
                ports,
                agree: self.agree != Agree::Nobody,
                bound: self.agree == Agree::Bound,
                graft,
                settings: settings.clone(),
            })
            .collect()
    }
}

impl Rule {
    /// Pairs of a port and a peer that are led to the broker.
    pub fn leads(&self) -> impl Iterator<Item = Lead> {
        let strict = self.connect == Connect::Strict;
        let lead = move |peer: &Prefix, ports: &RangeInclusive<u16>| Lead {
            peer: *peer,
            ports: ports.clone(),
            strict,
        };
        self.peers.iter().flat_map(move |peer| self.ports.iter().map(move |ports| lead(peer, ports)))
    }

    /// Whether it is for this port and this peer.
    pub fn is_for(&self, port: u16, peer: IpAddr) -> bool {
        self.leads().any(|lead| lead.ports.contains(&port) && kernel::covers(lead.peer, peer))
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
            (rule.replace("client", "peer"), "unknown variant `peer`"),
            (format!("{rule}graft = \"a\"\ncongestion = \"b\"\n"), "one or the other"),
            (format!("{rule}congestion = \"sixteen-letters!\"\n"), "1 to 15 bytes"),
            (format!("{rule}peer = \"10.0.0.0/33\"\n"), "no address prefix"),
            (format!("{rule}initial-window = 0\n"), "initial-window is from 1"),
            (format!("{rule}select = \"loss\"\n"), "rule a: select wants agree = false"),
            (format!("{rule}agree = false\nselect = \"loss\"\n"), "rule a: select wants a model"),
            (format!("{rule}agree = false\nselect = \"fast\"\n"), "unknown variant `fast`"),
            (format!("{rule}select = \"loss\"\ngraft = \"a\"\n"), "select and graft or congestion"),
            (format!("{rule}size-kib = 1\n"), "size-kib wants select"),
            (format!("model = \"/nowhere/model.json\"\n{rule}"), "model /nowhere/model.json: No such file"),
            (format!("{rule}pace = 1\n"), "unknown field `pace`"),
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
        let peers = (0..65).map(|at| format!("\"10.0.{at}.0/24\"")).collect::<Vec<_>>().join(", ");
        let error = Settings::parse(&format!("{rule}peer = [{peers}]\n")).expect_err("too many");
        assert!(error.to_string().contains("65 pairs"), "{error}");
    }
}
