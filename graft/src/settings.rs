//! The settings file of the daemon, in TOML. `docs/reference/settings.md` has all keys.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    sync::Arc,
};

use millrace_base::{file, settings::SettingsReader};
use millrace_graft_kernel as kernel;
use millrace_graft_kernel::{RULES, hook::RedirectRule};
use millrace_graft_proto::select::{
    model::{self, Model},
    profile::TrafficProfile,
};
use millrace_kernel::prefix::{ParseError, Prefix};
use serde::{Deserialize, Serialize};

pub use self::{
    agreement::{AgreementPeer, AgreementSettings, GraftFetch},
    carry::{CarrierKind, CarrySettings, Connect, PoolSettings, QuicCongestion, Tier},
    gateway::GatewaySettings,
    probe::ProbeSettings,
    process_condition::{CgroupSetting, ProcessCondition},
    purpose::PurposeSettings,
};
use crate::{
    Error,
    identity::{PeerTrust, SignatureKey},
    packet::{self, settings as packets},
};

mod agreement;
mod carry;
mod gateway;
pub mod probe;
mod process_condition;
mod purpose;

/// Longest name of a congestion control in the kernel, in bytes.
const CONGESTION_MAX: usize = 15;
/// Upper limit of the pacing rate: 4 GB/s or 34 Gbit/s is the highest value of SO_MAX_PACING_RATE that a BPF program
/// can set.
const PACING_MAX_MBIT: u32 = 34_000;
const BUFFER_MAX_KIB: u32 = 1 << 20;
const WINDOW_MAX: u32 = 10_000;

/// The settings of grafts for TCP.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// Directories of grafts, in addition to those that are compiled in.
    pub pool: Vec<PathBuf>,
    /// Each graft from a directory has to be signed by one of these keys. Without keys no signature is needed.
    pub trusted_keys: Vec<SignatureKey>,
    /// Cgroup to whose sockets the rules apply. `None` is the root of cgroup version 2, which means all sockets of this
    /// host.
    pub cgroup: Option<PathBuf>,
    /// Grafts that are loaded even if no rule uses them.
    pub load: Vec<LoadSetting>,
    /// Rules in the order in which they are tried.
    pub rules: Vec<RuleSetting>,
    /// Classes of paths, sorted by round-trip time.
    pub classes: Vec<PathClass>,
    /// Agreements with peers by TLS.
    pub agreement: Option<AgreementSettings>,
    /// Paths that are probed at regular intervals.
    pub probes: Vec<ProbeSettings>,
    /// Carriers for connections of this host's applications.
    pub carry: Option<CarrySettings>,
    /// Carriers for connections of hosts behind this gateway.
    pub gateway: Option<GatewaySettings>,
    /// Model that chooses the congestion control or carrier for rules with `select`.
    pub model: Option<Arc<Model>>,
    /// File that stores measured costs, rates and traffic patterns of connections for the next runtime.
    pub learned: Option<PathBuf>,
    /// Purposes of connections (traffic profile and expected size) that the operator has set.
    pub purposes: Vec<PurposeSettings>,
}

/// A graft that is loaded even if no rule uses it.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct LoadSetting {
    /// Name of the graft in the pool.
    pub graft: String,
    /// Values of the graft's parameters, by name.
    #[serde(default)]
    pub parameters: BTreeMap<String, u64>,
}

/// The kind of agreement that a peer needs so that a rule applies to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agree {
    /// The rule applies to every peer, without an agreement.
    Nobody,
    /// The rule applies to peers that agree by TCP options.
    Options,
    /// The rule applies to peers that agree by TCP options and have an agreement over TLS on the rule.
    Bound,
}

/// The role of this host in a connection: client or server.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum SideSetting {
    /// This host connects to a server.
    Client,
    /// This host accepts the connection.
    Server,
}

/// A rule: the connections that it matches, and what it sets for them at this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleSetting {
    /// Name of the rule.
    pub name: String,
    /// Role of this host in the rule's connections: client or server.
    pub side: SideSetting,
    /// Ports of the servers that the rule matches.
    pub ports: Vec<RangeInclusive<u16>>,
    /// Addresses of the peers that the rule matches.
    pub peers: Vec<Prefix>,
    /// Condition on the process that connects. Only rules of clients have one.
    pub process: ProcessCondition,
    /// The kind of agreement that a peer needs so that the rule applies to it.
    pub agree: Agree,
    /// How connections reach the peer: directly (`in-place`), or tunnelled by a carrier.
    pub tier: Tier,
    /// The moment at which connect() of a tunnelled connection returns.
    pub connect: Connect,
    /// Addresses at which peers reach this host's tunnelled servers, in addition to the addresses to which the peers'
    /// brokers connect.
    pub addresses: Vec<IpAddr>,
    /// Name of the graft in the pool that this host uses to send on the connection.
    pub graft: Option<String>,
    /// Name of the graft that the peer has to use to send on the connection, if the rule requires an agreement over
    /// TLS.
    pub peer_graft: Option<String>,
    /// Name of the congestion control in the kernel that this host uses to send on the connection.
    pub congestion: Option<String>,
    /// Upper limit of the sending rate, in Mbit/s.
    pub pacing_mbit: Option<u32>,
    /// Size of the send buffer in KiB.
    pub send_buffer_kib: Option<u32>,
    /// Size of the receive buffer in KiB.
    pub receive_buffer_kib: Option<u32>,
    /// Initial congestion window in packets.
    pub initial_window: Option<u32>,
    /// Facts about the rule's connections for the model that chooses their congestion control or carrier. `None` if no
    /// model chooses for the rule.
    pub select: Option<Select>,
}

/// Facts about a rule's connections, for the model that chooses their congestion control or carrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Select {
    /// Traffic profile of the connections, or `None` if it is learned or predicted from the port.
    pub profile: Option<TrafficProfile>,
    /// Expected size of a connection in KiB.
    pub size_kib: Option<u32>,
}

/// A class of paths with similar smallest round-trip times.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PathClass {
    /// Name of the class of paths.
    pub name: String,
    /// Smallest round-trip time of the class's paths, in microseconds. Default classes: `lan` from 0, `terrestrial`
    /// from 5000, `long-delay` from 300000.
    pub min_rtt_us: u32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawGraftSettings {
    /// Directories with grafts. Relative paths start at the settings file.
    #[serde(default)]
    pool: Vec<PathBuf>,
    /// Public keys (ed25519), 64 hexadecimal digits each. If there is any key, grafts from directories have to be
    /// signed by one of them.
    #[serde(default)]
    trusted_keys: Vec<String>,
    /// Directory of cgroup version 2 to whose sockets the rules apply. Default: all sockets of the host. A reload does
    /// not change it.
    cgroup: Option<PathBuf>,
    /// Grafts that are loaded even if no rule uses them.
    #[serde(default)]
    load: Vec<LoadSetting>,
    /// Rules. The first rule that matches a connection applies. The kernel's table has 64 entries: one for each pair of
    /// a port and a peer, and one for each port of the connections between daemons.
    #[serde(default)]
    rule: Vec<RawRule>,
    /// Classes of paths by their smallest round-trip time.
    class: Option<Vec<PathClass>>,
    /// Agreements with peers by TLS.
    agreement: Option<agreement::RawAgreement>,
    /// Peers of agreements and carriers.
    #[serde(default)]
    peer: Vec<agreement::RawPeer>,
    /// Grafts that are fetched from peers.
    #[serde(default)]
    fetch: Vec<agreement::RawFetch>,
    /// Paths that are probed at regular intervals, at most 64.
    #[serde(default)]
    probe: Vec<probe::RawProbe>,
    /// Carriers for connections of applications of this host.
    carry: Option<carry::RawCarry>,
    /// Carriers for connections of hosts behind this gateway.
    gateway: Option<gateway::RawGateway>,
    /// File with the model that chooses the congestion control or carrier for rules with `select`, as `millrace-lab
    /// train` makes it.
    model: Option<PathBuf>,
    /// File that keeps the measured costs, rates and traffic patterns of connections across restarts of the daemon.
    /// Without it they are lost.
    learned: Option<PathBuf>,
    /// Purposes of connections (traffic profile and expected size) that you know in advance, at most 64.
    #[serde(default)]
    profile: Vec<purpose::RawPurpose>,
    /// Settings of functions on datagrams, and of sessions for applications.
    sessions: Option<packets::RawPacketSettings>,
    /// Grafts for sessions: lists of functions on datagrams.
    #[serde(default)]
    graft: Vec<packets::RawGraft>,
    /// Sessions between fixed addresses and ports.
    #[serde(default)]
    session: Vec<packets::RawSession>,
}

/// The settings of a daemon, which consists of a part for TCP and a part for sessions of datagrams.
#[derive(Clone, Debug)]
pub struct DaemonSettings {
    /// Settings of the daemon's part for TCP: grafts, rules, agreements and tunnelled connections.
    pub in_place: Settings,
    /// Settings of the daemon's part for sessions of datagrams, or `None` if the file has no `[sessions]`.
    pub sessions: Option<packet::Settings>,
}

impl DaemonSettings {
    /// Reads a settings file. Relative paths in the file start at the file's directory.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or if its settings are not valid. The error lists all problems.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let file = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse_in(&text, &file, path.parent().unwrap_or(Path::new(""))),
            Err(error) => Err(Error::File { path: file, message: error.to_string() }),
        }
    }

    /// Parses settings whose relative paths start at this directory.
    ///
    /// # Errors
    /// The error lists all problems.
    pub fn parse(text: &str, directory: &Path) -> Result<Self, Error> {
        Self::parse_in(text, "settings", directory)
    }

    fn parse_in(text: &str, file: &str, directory: &Path) -> Result<Self, Error> {
        let settings = |reader: &mut SettingsReader, raw| Self::from_raw(reader, raw, directory);
        Ok(SettingsReader::file(text, "the settings are", file, settings).map_err(crate::left::advise)?)
    }

    /// Returns the settings of the part for sessions.
    ///
    /// # Errors
    /// Fails if the settings file has no `[sessions]`.
    pub fn into_sessions(self) -> Result<packet::Settings, Error> {
        self.sessions.ok_or_else(|| Error::Settings("the settings have no [sessions]".to_owned()))
    }

    /// Reports whether sessions need connections to the daemons of peers.
    pub fn wants_peers(&self) -> bool {
        self.sessions.as_ref().is_some_and(|sessions| !sessions.peers.is_empty())
    }

    /// Reports whether the settings tunnel connections.
    pub fn wants_tunnel(&self) -> bool {
        self.in_place.carry.is_some()
    }

    /// Reports whether the file has settings for the part for TCP. An empty file counts, too, since commands can load
    /// grafts into that part.
    pub fn wants_in_place(&self) -> bool {
        let Settings { agreement, cgroup, load, rules, probes, .. } = &self.in_place;
        let Settings { carry, gateway, model, learned, purposes, .. } = &self.in_place;
        let agrees = agreement.as_ref().is_some_and(|it| it.listen.is_some() || !it.peers.is_empty());
        let has_files = cgroup.is_some() || model.is_some() || learned.is_some();
        let has_lists = !(load.is_empty() && rules.is_empty() && probes.is_empty() && purposes.is_empty());
        self.sessions.is_none() || agrees || has_files || has_lists || carry.is_some() || gateway.is_some()
    }

    /// Checks the parsed settings: first each part, and then whether the parts are consistent.
    fn from_raw(reader: &mut SettingsReader, mut raw: RawGraftSettings, directory: &Path) -> Option<Self> {
        let keys = reader.read_each("trusted-keys", std::mem::take(&mut raw.trusted_keys), |key| {
            key.parse().map_err(|error| format!("trusted-keys: {key:?} {error}"))
        });
        let table = raw.sessions.take();
        let grafts = std::mem::take(&mut raw.graft);
        let sessions = std::mem::take(&mut raw.session);
        let peers: Vec<_> = raw.peer.iter().map(|peer| peer.sessions.clone()).collect();
        let is_empty = grafts.is_empty() && sessions.is_empty() && peers.iter().all(Option::is_none);
        if table.is_none() && !is_empty {
            let missing = "[[graft]], [[session]] and [peer.sessions] need [sessions] with its interface";
            reader.check("", Err::<(), _>(missing));
        }
        let keys = keys?;
        let (in_place, all) = Settings::from_raw(reader, raw, keys.clone(), directory)?;
        let sections = |table| packets::Sections {
            table,
            grafts,
            sessions,
            peers: all.into_iter().zip(peers).map(|((name, trust), raw)| (name, trust, raw)).collect(),
            host_key: in_place.agreement.as_ref().map(AgreementSettings::host_key),
        };
        let sessions = match table {
            Some(table) => Some(packet::Settings::from_raw(reader, sections(table), &keys, directory)?),
            None => None,
        };
        Some(Self { in_place, sessions })
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawRule {
    /// Name of the rule in the output of `status` and `why`.
    name: String,
    /// Side of the connection on which this host is. `client`: it connects, and `port` is the peer's port. `server`: it
    /// accepts, and `port` is its own port.
    side: SideSetting,
    /// Server ports: a port such as 443, a range such as `"8000-8100"`, or a list of ports and ranges.
    port: Vec<PortSetting>,
    /// Prefixes of peers, such as `"203.0.113.0/24"`. Default: every peer.
    peer: Option<Vec<String>>,
    /// Name of the thread that connects, as in `/proc/PID/comm`, at most 15 bytes. For rules with `side = "client"`.
    command: Option<String>,
    /// Directory of cgroup version 2: the rule matches connections of its processes, and of cgroups below it. For rules
    /// with `side = "client"`. The directory may be created and removed at any time; while it does not exist the rule
    /// matches nothing.
    cgroup: Option<PathBuf>,
    /// Peers to which the rule applies. `true`, the default: peers that agree by TCP options. `false`: all peers.
    /// `"bound"`: peers that have an agreement over TLS on this rule.
    agree: Option<RawAgree>,
    /// How connections reach the peer. `"in-place"`, the default, does not tunnel them, `"carried"` tunnels them where
    /// that is possible, and `"chosen"` lets the model decide.
    #[serde(default)]
    tier: Tier,
    /// When `connect()` of tunnelled clients returns: with `"early"`, the default, at once, and with `"strict"` after
    /// the server has answered.
    connect: Option<Connect>,
    /// Addresses of this host at which peers reach its tunnelled servers, in addition to the addresses to which the
    /// peers' brokers connect.
    #[serde(default)]
    addresses: Vec<IpAddr>,
    /// Name of a graft in the pool. It is loaded with the rule.
    graft: Option<String>,
    /// Name of the graft in the pool that the peer's side has to use, with `agree = "bound"`.
    peer_graft: Option<String>,
    /// Name of a congestion control of the kernel, such as `"bbr"`, instead of a graft.
    congestion: Option<String>,
    /// Upper limit of the sending rate in Mbit/s.
    pacing_mbit: Option<u32>,
    /// Size of the send buffer in KiB, up to `net.core.wmem_max`. The kernel then no longer adjusts the size itself.
    send_buffer_kib: Option<u32>,
    /// Size of the receive buffer in KiB, up to `net.core.rmem_max`. The kernel then no longer adjusts the size itself.
    receive_buffer_kib: Option<u32>,
    /// Number of packets that are sent before the first acknowledgement.
    initial_window: Option<u32>,
    /// Makes the model choose the congestion control or carrier for the path to each peer. The value is the
    /// connections' traffic profile, which states what delays matter, or `"learned"`. Needs `agree = false`.
    select: Option<purpose::RawSelect>,
    /// Expected size of a connection in KiB, for the model.
    size_kib: Option<u32>,
}

/// Value of `agree`: `true`, `false` or `"bound"`.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "agree is true, false or \"bound\"")]
enum RawAgree {
    Whether(bool),
    How(BoundWord),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum BoundWord {
    Bound,
}

impl From<&Option<RawAgree>> for Agree {
    fn from(raw: &Option<RawAgree>) -> Self {
        match raw {
            Some(RawAgree::Whether(false)) => Self::Nobody,
            None | Some(RawAgree::Whether(true)) => Self::Options,
            Some(RawAgree::How(BoundWord::Bound)) => Self::Bound,
        }
    }
}

/// A port or a range of ports: `443` or `"8000-8100"`.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "is 1 to 65535, or a range such as \"8000-8100\"")]
enum PortSetting {
    Number(u16),
    Text(String),
}

impl PortSetting {
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
    /// Fails if the settings are not valid. The error lists all problems.
    pub fn parse(text: &str) -> Result<Self, Error> {
        DaemonSettings::parse(text, Path::new("")).map(|whole| whole.in_place)
    }

    /// Reads a settings file. Relative paths in the file start at the file's directory.
    pub fn read(path: &Path) -> Result<Self, Error> {
        DaemonSettings::read(path).map(|whole| whole.in_place)
    }

    /// Checks the parsed settings: first each part, and then whether the parts are consistent. Also returns the name
    /// and the identity of each peer.
    fn from_raw(
        reader: &mut SettingsReader,
        raw: RawGraftSettings,
        keys: Vec<SignatureKey>,
        directory: &Path,
    ) -> Option<(Self, Vec<(String, PeerTrust)>)> {
        let mut classes = raw.class.unwrap_or_else(default_classes);
        classes.sort_by_key(|class| class.min_rtt_us);
        let carry = reader.check("carry", raw.carry.map(carry::RawCarry::checked).transpose());
        let peers = reader.read_each("peer", raw.peer, agreement::RawPeer::checked);
        let known = peers.iter().flatten().map(|peer| (peer.name.clone(), peer.trust.clone())).collect();
        let fetch = reader.read_each("fetch", raw.fetch, agreement::RawFetch::checked);
        let agreement = match (&carry, peers, fetch) {
            (Some(carry), Some(peers), Some(fetch)) => {
                let carry_hears = carry.as_ref().map(|carry| carry.listen.is_some());
                let agreement =
                    AgreementSettings::from_raw(raw.agreement, peers, fetch, carry_hears, directory);
                reader.check("agreement", agreement)
            }
            _ => None,
        };
        let rules = reader.read_each("rule", raw.rule, RawRule::checked);
        let probes = reader.check("probe", probe::check_count(&raw.probe));
        let probes = probes.and(reader.read_each("probe", raw.probe, probe::unlike_others()));
        let gateway = reader.check("gateway", raw.gateway.map(gateway::RawGateway::checked).transpose());
        let model = raw.model.map(|path| model(&directory.join(path))).transpose();
        let model = reader.check("model", model);
        let learned = raw.learned.map(|path| learned(&directory.join(path))).transpose();
        let learned = reader.check("learned", learned);
        let purposes = reader.check("profile", purpose::all(raw.profile));
        let agreement = agreement?;
        let settings = Self {
            pool: raw.pool.iter().map(|path| directory.join(path)).chain(fetched_to(&agreement)).collect(),
            trusted_keys: keys,
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
        Some((settings, known))
    }

    /// Reports parts of the settings that contradict each other.
    fn check(&self, reader: &mut SettingsReader) {
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
        // The kernel's table of rules also contains this host's own rules, for connections between the daemons.
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
            // Each round-trip time must belong to a class, so the first of the sorted classes begins at 0.
            Some(class) if class.min_rtt_us == 0 => Ok(()),
            _ => Err("one class needs min-rtt-us = 0".to_owned()),
        }
    }

    fn check_agreement(&self) -> Result<(), String> {
        let bound = self.rules.iter().find(|rule| rule.agree == Agree::Bound);
        let Some(agreement) = &self.agreement else {
            return match bound {
                Some(rule) => {
                    Err(format!("rule {}: agree = \"bound\" needs a [[peer]] and an [agreement]", rule.name))
                }
                None => Ok(()),
            };
        };
        if !agreement.fetch.is_empty() && self.trusted_keys.is_empty() {
            return Err(
                "fetch needs trusted-keys: grafts from a peer have to be signed by one of them".to_owned()
            );
        }
        Ok(())
    }

    fn check_select(&self) -> Result<(), String> {
        let missing = self.rules.iter().find(|rule| rule.select.is_some()).filter(|_| self.model.is_none());
        match missing {
            Some(rule) => Err(format!("rule {}: select needs a model", rule.name)),
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
                Err(format!("rule {}: tier = \"{}\" needs [carry]", rule.name, rule.tier.name()))
            }
            (Some(_), None, _) => Err("[carry] needs an [agreement] with this host's key".to_owned()),
            _ => Ok(()),
        }
    }

    /// Checks the networks behind gateways: no address may be behind two peers, or behind a peer and this host.
    fn check_networks(&self) -> Result<(), String> {
        if self.gateway.is_some() && self.carry.is_none() {
            return Err("[gateway] needs [carry], and an [agreement] with this host's key".to_owned());
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
        let places = known.len();
        let room = kernel::gateway::PREFIXES / 2;
        match places > room {
            true => Err(format!("there are {places} networks behind hosts: there is room for {room}")),
            false => Ok(()),
        }
    }

    /// Adds interfaces behind which there are hosts whose connections are tunnelled.
    ///
    /// # Errors
    /// Fails if interfaces are given but the settings have no [gateway], or if the gateway has no interfaces
    /// afterwards.
    pub fn add_gateway_interfaces(&mut self, interfaces: &[String]) -> Result<(), Error> {
        match &mut self.gateway {
            Some(gateway) => gateway.add(interfaces).map_err(Error::Settings)?,
            None if interfaces.is_empty() => return Ok(()),
            None => {
                let wants = "--interface needs [gateway] with networks in the settings: what is behind it";
                return Err(Error::Settings(wants.to_owned()));
            }
        }
        match self.gateway.iter().any(|gateway| gateway.interfaces.is_empty()) {
            true => Err(Error::Settings(
                "gateway: neither interface nor --interface names an interface".to_owned(),
            )),
            false => Ok(()),
        }
    }

    /// Returns rules for the TLS connections over which daemons negotiate agreements. These connections show whether
    /// TCP options pass on the path to each peer.
    pub(crate) fn own_rules(&self) -> Vec<kernel::TcpRule> {
        let Some(agreement) = &self.agreement else { return Vec::new() };
        let rule = |side, port| kernel::TcpRule {
            side,
            peer: kernel::everybody(),
            ports: port..=port,
            caller: kernel::CallerRule::default(),
            agree: true,
            bound: false,
            choice: 0,
            graft: [0; 4],
            settings: kernel::Settings::default(),
        };
        let called: BTreeSet<u16> =
            agreement.peers.iter().filter_map(|peer| Some(peer.address?.port())).collect();
        let clients = called.into_iter().map(|port| rule(kernel::RuleSide::Client, port));
        let server = agreement.listen.map(|at| rule(kernel::RuleSide::Server, at.port()));
        clients.chain(server).collect()
    }

    /// Returns the cgroup to whose sockets all rules apply: by default, the one at the top.
    ///
    /// # Errors
    /// No cgroup of version 2 is mounted here.
    pub fn top_cgroup(&self) -> Result<PathBuf, Error> {
        self.cgroup.clone().or_else(root_cgroup).ok_or_else(|| {
            Error::Settings("cgroup is missing: no cgroup of version 2 is mounted here".to_owned())
        })
    }

    /// Checks that a running daemon with these settings can change to the settings `new`.
    ///
    /// # Errors
    /// A setting has changed that cannot change while the daemon runs.
    pub fn can_become(&self, new: &Self) -> Result<(), Error> {
        let fixed = |what: &str| {
            let why = format!("{what} cannot change while the daemon runs: restart the daemon");
            Err(Error::Settings(why))
        };
        if self.top_cgroup()? != new.top_cgroup()? {
            return fixed("cgroup");
        }
        // Changed settings of [carry] would reset the tunnelled connections.
        let carry = self.carry.as_ref().zip(new.carry.as_ref());
        match carry {
            Some((old, new)) if old != new => fixed("[carry]"),
            Some(_) if self.gateway != new.gateway => fixed("[gateway]"),
            _ => Ok(()),
        }
    }

    /// Checks which cgroups of rules exist. Returns whether any was added or removed, after which the rules in the
    /// kernel have to be updated.
    pub fn follow_cgroups(&self) -> bool {
        self.rules.iter().fold(false, |is_new, rule| rule.process.follow() | is_new)
    }

    /// Returns the cgroup with this ID, if a rule names it.
    pub(crate) fn cgroup_of(&self, id: u64) -> Option<&CgroupSetting> {
        self.cgroups().find(|cgroup| cgroup.id() == Some(id))
    }

    pub(crate) fn cgroups(&self) -> impl Iterator<Item = &CgroupSetting> {
        self.rules.iter().filter_map(|rule| rule.process.cgroup.as_ref())
    }

    /// Returns the rules for the redirecting hook: those that tunnel connections or may do so, and rules before them,
    /// which exclude connections from redirection.
    pub fn redirect_rules(&self) -> Vec<RedirectRule> {
        let clients: Vec<_> =
            self.rules.iter().enumerate().filter(|(_, rule)| rule.side == SideSetting::Client).collect();
        // The hook does not need the rules that follow the last rule that may tunnel connections.
        let last = clients.iter().rposition(|(_, rule)| rule.tier != Tier::InPlace).map_or(0, |at| at + 1);
        clients.iter().take(last).flat_map(|(index, rule)| rule.rule_redirects(*index)).collect()
    }

    /// Returns the rules for which this host is `side` (client or server) and that tunnel connections or may do so.
    pub fn carried(&self, side: SideSetting) -> impl Iterator<Item = &RuleSetting> {
        self.rules.iter().filter(move |rule| rule.tier != Tier::InPlace && rule.side == side)
    }

    /// Returns the first rule that may tunnel a connection with this server port and peer. `None` stands for an unknown
    /// command or cgroup.
    pub(crate) fn carried_by(
        &self,
        side: SideSetting,
        port: u16,
        peer: IpAddr,
        command: Option<&str>,
        cgroup: Option<u64>,
    ) -> Option<&RuleSetting> {
        self.carried(side).find(|rule| rule.is_for(port, peer) && rule.process.has(command, cgroup))
    }

    /// Reports whether a graft has to be fetched from a peer.
    pub fn fetches(&self, graft: &str) -> bool {
        self.agreement.as_ref().is_some_and(|it| it.fetch.iter().any(|fetch| fetch.graft == graft))
    }

    /// Returns the grafts that have to be loaded, with the values of their parameters.
    pub fn needed(&self) -> BTreeMap<String, BTreeMap<String, u64>> {
        let used = self.rules.iter().filter_map(|rule| Some((rule.graft.clone()?, BTreeMap::new())));
        let mut needed: BTreeMap<_, _> = used.collect();
        needed.extend(self.load.iter().map(|load| (load.graft.clone(), load.parameters.clone())));
        needed
    }
}

/// Returns the directory where cgroup version 2 is mounted.
fn root_cgroup() -> Option<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
    let mut fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let found = fields.find(|fields| fields.get(2) == Some(&"cgroup2"))?;
    found.get(1).map(|path| Path::new(path).to_owned())
}

/// Returns the key of a rule in the kernel's map of congestion controls and carriers that the model chose. 0 stands for
/// no rule.
pub(crate) fn place_number(rule: usize) -> u32 {
    u32::try_from(rule + 1).unwrap_or_default()
}

fn model(path: &Path) -> Result<Arc<Model>, String> {
    let failed = |error: String| format!("model {}: {error}", path.display());
    let text = file::text(path, model::BYTES_MAX).map_err(|error| failed(error.to_string()))?;
    Model::parse(&text).map(Arc::new).map_err(|error| failed(error.to_string()))
}

/// Checks the path of the file for measured costs and rates. The file need not exist, but its directory must.
fn learned(path: &Path) -> Result<PathBuf, String> {
    let directory = path.parent().filter(|directory| *directory != Path::new("")).unwrap_or(Path::new("."));
    match directory.is_dir() {
        true => Ok(path.to_owned()),
        false => Err(format!("learned {}: there is no directory {}", path.display(), directory.display())),
    }
}

fn fetched_to(agreement: &Option<AgreementSettings>) -> Option<PathBuf> {
    agreement.as_ref()?.fetch_to.clone()
}

/// Returns the name of the class to which a path with this smallest round-trip time belongs. The classes are sorted.
pub fn class_of(classes: &[PathClass], rtt_min_us: u32) -> String {
    let class = classes.iter().rev().find(|class| class.min_rtt_us <= rtt_min_us);
    class.map(|class| class.name.clone()).unwrap_or_default()
}

/// Returns the default classes of paths by their smallest round-trip time: `lan`, `terrestrial` and `long-delay`.
pub fn default_classes() -> Vec<PathClass> {
    let class = |name: &str, min_rtt_us| PathClass { name: name.to_owned(), min_rtt_us };
    vec![class("lan", 0), class("terrestrial", 5_000), class("long-delay", 300_000)]
}

impl RawRule {
    fn checked(self) -> Result<RuleSetting, String> {
        let name = self.name.clone();
        self.try_checked().map_err(|error| format!("rule {name}: {error}"))
    }

    fn try_checked(self) -> Result<RuleSetting, String> {
        let within = |what: &str, value: Option<u32>, most: u32| match value {
            Some(value) if !(1..=most).contains(&value) => Err(format!("{what} is from 1 to {most}")),
            _ => Ok(()),
        };
        within("pacing-mbit", self.pacing_mbit, PACING_MAX_MBIT)?;
        within("send-buffer-kib", self.send_buffer_kib, BUFFER_MAX_KIB)?;
        within("receive-buffer-kib", self.receive_buffer_kib, BUFFER_MAX_KIB)?;
        within("initial-window", self.initial_window, WINDOW_MAX)?;
        if self.graft.is_some() && self.congestion.is_some() {
            return Err("graft and congestion exclude each other".to_owned());
        }
        if self.select.is_some() && (self.graft.is_some() || self.congestion.is_some()) {
            return Err("select excludes graft and congestion".to_owned());
        }
        if self.select.is_some() && Agree::from(&self.agree) != Agree::Nobody {
            return Err("select needs agree = false".to_owned());
        }
        if self.size_kib.is_some() && self.select.is_none() {
            return Err("size-kib needs select".to_owned());
        }
        if self.congestion.as_ref().is_some_and(|name| name.is_empty() || name.len() > CONGESTION_MAX) {
            return Err(format!("congestion is 1 to {CONGESTION_MAX} bytes"));
        }
        let ports: Option<Vec<_>> = self.port.iter().map(PortSetting::range).collect();
        // The prefix `::/0` means every peer, with IPv4 or IPv6.
        let peers = self.peer.unwrap_or_else(|| vec!["::/0".to_owned()]);
        let peers: Result<Vec<Prefix>, _> =
            peers.iter().map(|peer| peer.parse().map_err(|error: ParseError| error.to_string())).collect();
        let ports = ports.ok_or("port is 1 to 65535, or a range such as \"8000-8100\"")?;
        let peers = peers?;
        if ports.is_empty() || peers.is_empty() {
            return Err("port and peer must not be empty".to_owned());
        }
        let agree = Agree::from(&self.agree);
        if self.peer_graft.is_some() && agree != Agree::Bound {
            return Err("peer-graft needs agree = \"bound\"".to_owned());
        }
        if self.connect.is_some() && (self.tier == Tier::InPlace || self.side != SideSetting::Client) {
            return Err("connect needs side = \"client\" and tier = \"carried\" or \"chosen\"".to_owned());
        }
        if !self.addresses.is_empty() && (self.tier == Tier::InPlace || self.side != SideSetting::Server) {
            return Err("addresses needs side = \"server\" and tier = \"carried\" or \"chosen\"".to_owned());
        }
        if self.tier == Tier::Chosen && self.select.is_none() && self.side == SideSetting::Client {
            return Err("tier = \"chosen\" needs select".to_owned());
        }
        let process = ProcessCondition::checked(self.command, self.cgroup)?;
        if !process.is_anybody() && self.side == SideSetting::Server {
            return Err("command and cgroup need side = \"client\": who accepts a connection is not known when it comes".to_owned());
        }
        Ok(RuleSetting {
            name: self.name,
            side: self.side,
            ports,
            peers,
            process,
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

impl RuleSetting {
    /// Returns the rule as the kernel needs it, once for each pair of a port and a peer.
    pub(crate) fn places(&self, congestion: Option<String>, graft: [u8; 4]) -> Vec<kernel::TcpRule> {
        let kib = |kib: Option<u32>| kib.and_then(|kib| i32::try_from(u64::from(kib) * 1024 / 2).ok());
        let settings = kernel::Settings {
            congestion,
            pacing: self.pacing_mbit.map(|mbit| mbit * 125_000),
            // The kernel doubles the buffer size that a socket option sets, so half of it is passed.
            send_buffer: kib(self.send_buffer_kib),
            receive_buffer: kib(self.receive_buffer_kib),
            window: self.initial_window.and_then(|packets| i32::try_from(packets).ok()),
        };
        let side = match self.side {
            SideSetting::Client => kernel::RuleSide::Client,
            SideSetting::Server => kernel::RuleSide::Server,
        };
        let caller = self.process.caller();
        let pairs =
            self.peers.iter().flat_map(|peer| self.ports.iter().map(move |ports| (*peer, ports.clone())));
        pairs
            .map(|(peer, ports)| kernel::TcpRule {
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

impl RuleSetting {
    /// Returns the rule as the redirecting hook needs it, once for each pair of a port and a peer. `index` is the
    /// rule's position in the settings.
    fn rule_redirects(&self, index: usize) -> Vec<RedirectRule> {
        let strict = self.connect == Connect::Strict;
        let in_place = self.tier == Tier::InPlace;
        let choice = if self.tier == Tier::Chosen { place_number(index) } else { 0 };
        let caller = self.process.caller();
        let redirect = |peer: &Prefix, ports: &RangeInclusive<u16>| RedirectRule {
            peer: *peer,
            ports: ports.clone(),
            caller: caller.clone(),
            strict,
            choice,
            in_place,
        };
        self.peers.iter().flat_map(|peer| self.ports.iter().map(move |ports| redirect(peer, ports))).collect()
    }

    /// Reports whether the rule matches this server port and this peer.
    pub fn is_for(&self, port: u16, peer: IpAddr) -> bool {
        let has_port = self.ports.iter().any(|ports| ports.contains(&port));
        has_port && self.peers.iter().any(|prefix| kernel::covers(*prefix, peer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graft_rules_are_read() {
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
    fn invalid_settings_are_refused_with_every_problem() {
        let rule = "[[rule]]\nname = \"a\"\nside = \"client\"\nport = 80\n";
        assert!(Settings::parse(rule).is_ok());
        let table = [
            (rule.replace("80", "0"), "port is 1 to 65535"),
            (rule.replace("80", "\"9-8\""), "port is 1 to 65535"),
            (rule.replace("80", "[]"), "must not be empty"),
            (rule.replace("client", "peer"), "rule[0].side: is \"client\" or \"server\", not \"peer\""),
            (format!("{rule}graft = \"a\"\ncongestion = \"b\"\n"), "graft and congestion exclude each other"),
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
                "rule a: command and cgroup need side = \"client\"",
            ),
            (format!("{rule}select = \"loss\"\n"), "rule a: select needs agree = false"),
            (format!("{rule}agree = false\nselect = \"loss\"\n"), "rule a: select needs a model"),
            (format!("{rule}agree = false\nselect = \"fast\"\n"), "rule[0].select: is \"time\", "),
            (format!("{rule}select = \"loss\"\ngraft = \"a\"\n"), "select excludes graft and congestion"),
            (format!("{rule}size-kib = 1\n"), "size-kib needs select"),
            (format!("model = \"/nowhere/model.json\"\n{rule}"), "model /nowhere/model.json: No such file"),
            (
                format!("learned = \"/nowhere/l\"\n{rule}"),
                "learned /nowhere/l: there is no directory /nowhere",
            ),
            (format!("{rule}pace = 1\n"), "rule[0].pace: unknown key; known here: name, side"),
            (format!("{rule}agree = \"perhaps\"\n"), "agree is true, false or \"bound\""),
            (format!("{rule}agree = \"bound\"\n"), "rule a: agree = \"bound\" needs a [[peer]]"),
            (format!("{rule}peer-graft = \"b\"\n"), "rule a: peer-graft needs agree = \"bound\""),
            (format!("{rule}{rule}"), "two rules are called a"),
            (rule.replace("80", "[\"1-2\", 4]"), ""),
            ("[[load]]\ngraft = \"a\"\n".repeat(2), "loaded twice"),
            ("trusted-keys = [\"ab\"]".into(), "ed25519"),
            ("[[class]]\nname = \"far\"\nmin-rtt-us = 1\n".into(), "one class needs min-rtt-us = 0"),
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
        // Errors of parsing are listed before errors of checks.
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
