//! Sections of the settings file for packet grafts: interfaces, grafts as lists of functions, sessions, and peers with
//! the ports for sessions that applications request.

mod paths;
pub mod peer;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{self, PathBuf};
use std::time::Duration;

use millrace_base::settings::SettingsReader;
use millrace_graft_kernel::packet::{
    self, FunctionList, KEPT_BYTES, LIST_MAX, SEALED_BYTES, SESSIONS_MAX, SessionEnds, SessionRoom,
};
use millrace_kernel::xdp::XdpMode;
use ring::digest::{SHA256, digest};
use serde::Deserialize;

use super::function::{FunctionPool, FunctionService};
use super::keys::AeadCipher;
use super::versions::FunctionVersion;
use super::when::When;
use crate::Error;
use crate::identity::{PeerTrust, SignatureKey};

pub use paths::{PathSetting, PathSettings};
pub use peer::PeerSetting;

/// Name of the graft that only adds the trailer of a session to datagrams. Sessions that no application uses at present
/// have it, so the graft exists if there are peers.
pub const CANONICAL: &str = "canonical";

/// Values of parameters, by function and name of the parameter.
pub type FunctionParameters = BTreeMap<String, BTreeMap<String, u64>>;

/// The settings of packet grafts: lists of functions that process the datagrams of sessions in the kernel.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Interfaces through which the datagrams of sessions pass.
    pub interfaces: Vec<String>,
    /// Mode in which XDP is attached.
    pub mode: XdpMode,
    /// Values of functions' parameters, by function and parameter.
    pub parameters: FunctionParameters,
    /// Grafts (lists of packet functions) by name.
    pub grafts: BTreeMap<String, GraftSetting>,
    /// Sessions of the settings, including those for each port of a peer's pool, which applications use on request.
    pub sessions: Vec<SessionSetting>,
    /// Largest numbers of sessions that may exist at the same time. The kernel memory for this many sessions is
    /// allocated at the start.
    pub room: SessionRoom,
    /// Peers whose daemons negotiate sessions and session keys with this one.
    pub peers: Vec<PeerSetting>,
    /// Key of this host, which is needed only if there are peers.
    pub host_key: Option<HostKey>,
    /// The known functions: those of the pool directories, and those that are compiled in.
    pub functions: FunctionPool,
}

/// A graft: a list of functions in the settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraftSetting {
    /// Name of the graft.
    pub name: String,
    /// Functions in the order in which they run.
    pub functions: Vec<FunctionVersion>,
    /// The list of functions in the form in which it is loaded into the kernel.
    pub list: FunctionList,
    /// Services that the graft's functions provide together.
    pub services: BTreeSet<FunctionService>,
    /// Time in ns that each hook may take for a packet, or 0 for no limit.
    pub budget_ns: u32,
    /// Name of the graft (list of packet functions) that replaces this one when it exceeds its time budget.
    pub fallback: Option<String>,
    /// True if sessions that change to this graft restart without their state, and lose packets in flight.
    pub anew: bool,
}

/// A session for datagrams between two addresses and ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionSetting {
    /// Name of the session.
    pub name: String,
    /// Addresses and ports of the session's datagrams.
    pub ends: SessionEnds,
    /// Name of the peer at the other end.
    pub peer: String,
    /// Name of the graft (list of packet functions) with which the session begins.
    pub graft: String,
    /// Cipher of the session, or `None` if the settings have `clear`.
    pub cipher: Option<AeadCipher>,
    /// Rules that choose other grafts (lists of packet functions) by the round-trip time, from the shortest time to the
    /// longest.
    pub when: Vec<When>,
    /// The paths of the session, if it has several.
    pub paths: Option<PathSettings>,
}

const MIB: u64 = 1 << 20;

/// Default and limits of the age at which session keys are renewed, in seconds.
const RENEW_S: u64 = 600;
const RENEW_LEAST_S: u64 = 5;
const RENEW_MOST_S: u64 = 86_400;

/// The identity that this host shows to its peers, whose daemons check it by TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostKey {
    /// Path of this host's private key, in PEM format.
    pub key: PathBuf,
    /// Path of the key's certificate, in PEM format. Without one, peers know this host by its key.
    pub certificate: Option<PathBuf>,
    /// Path of the authority that signs certificates of peers, in PEM format.
    pub authority: Option<PathBuf>,
    /// Lifetime of session keys. After it, both daemons open a new TLS connection and agree on new keys.
    pub renew: Duration,
}

/// The section `[sessions]` of the settings file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct RawPacketSettings {
    /// Interfaces through which the sessions' datagrams pass.
    interface: Vec<String>,
    /// Mode of XDP: `auto`, `native` or `generic`. If the gate is attached to the interface first, its mode is used.
    #[serde(default)]
    mode: RawMode,
    /// Directories with functions of your own: objects, each with a manifest.
    #[serde(default)]
    pool: Vec<PathBuf>,
    /// Values of functions' parameters, by function, such as `retry_us = 20000`.
    #[serde(default)]
    parameters: FunctionParameters,
    /// Largest number of sessions, 1 to 16,384, and 64 by default. Memory for all of them is allocated at the start.
    #[serde(default = "default_sessions")]
    max_sessions: u32,
    /// Memory in MiB for packets that functions keep (`repair`, `partial`, `gobackn`, `fec`): 2.3 MiB for each session.
    /// The default, 37, is enough for 16 sessions.
    #[serde(default = "default_memory_mib")]
    memory_mib: u32,
    /// Seconds after which sessions get new keys, 600 by default.
    renew_s: Option<u64>,
}

/// The sections of the settings file that are about sessions.
pub(crate) struct Sections {
    pub table: RawPacketSettings,
    pub grafts: Vec<RawGraft>,
    pub sessions: Vec<RawSession>,
    /// Peers by name, with their keys, and with their `[peer.sessions]` if they have one.
    pub peers: Vec<(String, PeerTrust, Option<peer::RawSessionPeer>)>,
    /// The key of this host. The lifetime of session keys is copied into it later, from the section `[sessions]`.
    pub host_key: Option<HostKey>,
}

fn default_sessions() -> u32 {
    SessionRoom::default().sessions
}

fn default_memory_mib() -> u32 {
    (u64::from(SessionRoom::default().storing_sessions) * KEPT_BYTES).div_ceil(MIB) as u32
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum RawMode {
    #[default]
    Auto,
    Native,
    Generic,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct RawGraft {
    /// Name of the graft, a list of packet functions.
    name: String,
    /// Names of the graft's functions, in the order in which they run.
    functions: Vec<String>,
    /// Time in nanoseconds that a hook may take for a packet; 0 for no limit. A graft that takes longer in a test run
    /// is refused at the start.
    #[serde(default)]
    budget_ns: u32,
    /// Name of the graft (list of packet functions) that a session changes to when this one exceeds its `budget-ns`.
    /// That graft has to provide the same services.
    fallback: Option<String>,
    /// How sessions change to this graft: `"stateful"`, the default, keeps their state, and `"stateless"` restarts
    /// them.
    #[serde(default)]
    swap: RawSwap,
}

#[derive(Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum RawSwap {
    #[default]
    Stateful,
    Stateless,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct RawSession {
    /// Name of the session.
    name: String,
    /// Address and port of this host.
    local: SocketAddr,
    /// Address and port of the other host.
    remote: SocketAddr,
    /// Name of the peer at the other end.
    peer: String,
    /// Name of the graft (list of packet functions) with which the session begins.
    graft: String,
    /// Cipher of the session: `chacha20-poly1305`, the default, or `aes-128-gcm`. It must be the same at both ends.
    cipher: Option<AeadCipher>,
    /// True for a session that is not encrypted. Source address, ports, length and packet number are still
    /// authenticated, but payloads can be read and changed on the path.
    #[serde(default)]
    clear: bool,
    /// Rules that choose other grafts (lists of packet functions) by the round-trip time.
    #[serde(default)]
    when: Vec<RawWhen>,
    /// The session's paths, two to four, which are used at the same time.
    #[serde(default)]
    path: Vec<PathSetting>,
    /// How packets are divided among paths: `spread`, the default, or `redundant`, which sends every packet on all
    /// paths.
    paths: Option<paths::Division>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct RawWhen {
    /// Round-trip time in milliseconds from which the rule's graft (list of packet functions) is used.
    rtt_ms: u32,
    /// Round-trip time in milliseconds below which the session stops using the rule's graft again. Default: four fifths
    /// of `rtt-ms`.
    until_rtt_ms: Option<u32>,
    /// Milliseconds for which the round-trip time has to stay above `rtt-ms`, or below `until-rtt-ms`, before the graft
    /// changes, 1000 by default.
    #[serde(default = "hold_ms")]
    for_ms: u32,
    /// Name of the graft (list of packet functions) that the rule chooses.
    graft: String,
}

fn hold_ms() -> u32 {
    1000
}

impl Settings {
    /// Checks the parsed sections of the settings file: first each section, and then whether the sections are
    /// consistent.
    pub(crate) fn from_raw(
        reader: &mut SettingsReader,
        raw: Sections,
        keys: &[SignatureKey],
        directory: &path::Path,
    ) -> Option<Self> {
        let Sections { table, grafts: lists, sessions, peers, host_key } = raw;
        let pool: Vec<_> = table.pool.iter().map(|path| directory.join(path)).collect();
        let functions = reader.check("sessions.pool", FunctionPool::read(&pool, keys))?;
        let mut grafts = BTreeMap::new();
        let each = reader.read_each("graft", lists, |graft| {
            let name = graft.name.clone();
            let graft = graft.checked(&functions, &table.parameters).map_err(Error::into_words)?;
            match grafts.insert(name.clone(), graft) {
                None => Ok(()),
                Some(_) => Err(format!("two grafts are called {name}")),
            }
        });
        let peers = reader.read_each("peer", peers, |(name, trust, raw)| {
            raw.map(|raw| raw.checked(name, trust)).transpose().map_err(Error::into_words)
        });
        let sessions = reader.read_each("session", sessions, |it| it.checked().map_err(Error::into_words));
        let room = room(table.max_sessions, table.memory_mib).map_err(Error::into_words);
        let room = reader.check("sessions.max-sessions", room);
        let renew = reader.check("sessions.renew-s", renew(table.renew_s));
        let (peers, mut sessions) = each.and(peers).zip(sessions)?;
        let peers: Vec<_> = peers.into_iter().flatten().collect();
        if peers.iter().any(PeerSetting::has_pool) {
            reader.check("graft", add_canonical(&mut grafts, &functions).map_err(Error::into_words))?;
        }
        sessions.extend(peers.iter().flat_map(PeerSetting::sessions));
        let settings = Self {
            interfaces: table.interface,
            mode: match table.mode {
                RawMode::Auto => XdpMode::Auto,
                RawMode::Native => XdpMode::Native,
                RawMode::Generic => XdpMode::Generic,
            },
            parameters: table.parameters,
            grafts,
            sessions,
            room: room?,
            peers,
            host_key: renew.and_then(|renew| Some(HostKey { renew, ..host_key? })),
            functions,
        };
        reader.check("", settings.check().map_err(Error::into_words))?;
        Some(settings)
    }

    fn check(&self) -> Result<(), Error> {
        let wrong = |message: String| Err(Error::Settings(message));
        if self.interfaces.is_empty() {
            return wrong("interface has to name at least one interface".to_owned());
        }
        let mut known = BTreeSet::new();
        if let Some(twice) = self.peers.iter().find(|peer| !known.insert(&peer.name)) {
            return wrong(format!("two peers are called {}", twice.name));
        }
        self.check_trust()?;
        for name in self.parameters.keys() {
            self.functions.find(name)?;
        }
        let mut ids = BTreeMap::new();
        for graft in self.grafts.values() {
            // Grafts with the same list of functions share one list in the kernel. Two different lists whose hashes
            // begin with the same 16 bits cannot be distinguished, so they are refused.
            if let Some(other) = ids.insert(graft.list.id, &graft.list)
                && *other != graft.list
            {
                return wrong(format!(
                    "graft {} gets the same identifier as another graft: change the order of their functions",
                    graft.name
                ));
            }
            self.check_fallback(graft)?;
            self.check_window(graft)?;
        }
        self.check_room()?;
        let mut names = BTreeSet::new();
        let mut ends = BTreeSet::new();
        for session in &self.sessions {
            if !names.insert(&session.name) {
                return wrong(format!("two sessions are called {}", session.name));
            }
            if !ends.insert(session.ends) {
                return wrong(format!("session {} has the addresses and ports of another one", session.name));
            }
            self.graft(&session.graft)
                .map_err(|error| Error::Settings(format!("session {}: {error}", session.name)))?;
            self.check_when(session)?;
        }
        self.check_paths()
    }

    fn check_trust(&self) -> Result<(), Error> {
        let has_authority = self.host_key.as_ref().is_some_and(|key| key.authority.is_some());
        let by_name = self.peers.iter().find(|peer| matches!(peer.trust, PeerTrust::Host(_)));
        match by_name.filter(|_| !has_authority) {
            Some(peer) => {
                Err(Error::Settings(format!("peer {}: host needs authority in [agreement]", peer.name)))
            }
            None => self.check_peers(),
        }
    }

    fn check_peers(&self) -> Result<(), Error> {
        let mut lines = BTreeSet::new();
        if let Some(peer) = self.peers.iter().find(|peer| !lines.insert(peer.daemons.local)) {
            return Err(Error::Settings(format!(
                "peer {}: {} is another peer's, too: the first of ports is the daemons' own",
                peer.name, peer.daemons.local
            )));
        }
        for session in &self.sessions {
            if !self.peers.iter().any(|peer| peer.name == session.peer) {
                let peer = &session.peer;
                let session = &session.name;
                return Err(Error::Settings(format!("session {session}: there is no [[peer]] {peer}")));
            }
            if let Some(peer) = self.peers.iter().find(|peer| peer.daemons == session.ends) {
                let name = &session.name;
                return Err(Error::Settings(format!(
                    "session {name} uses the port that is reserved for the daemons: the first of the ports of peer {}",
                    peer.name
                )));
            }
        }
        Ok(())
    }

    /// Checks the rules by round-trip time. Each graft that a rule chooses needs a packet function that measures the
    /// round-trip time, or the session could not change back.
    fn check_when(&self, session: &SessionSetting) -> Result<(), Error> {
        let wrong = |message: String| Err(Error::Settings(format!("session {}: {message}", session.name)));
        for pair in session.when.windows(2) {
            if pair[1].rtt <= pair[0].rtt || pair[1].until <= pair[0].until {
                return wrong(
                    "[[session.when]] are in the order of their rtt-ms, and of their until-rtt-ms".to_owned(),
                );
            }
        }
        // Below the first rule's round-trip time the session uses its own graft, so that graft also has to measure the
        // round-trip time.
        let own = (!session.when.is_empty()).then_some(&session.graft);
        for name in session.when.iter().map(|when| &when.graft).chain(own) {
            match self.graft(name) {
                Err(error) => return wrong(format!("[[session.when]]: {error}")),
                Ok(graft) if !graft.measures() => {
                    return wrong(format!(
                        "[[session.when]] needs grafts that know the round trip, and {name} does not have the function acknowledge"
                    ));
                }
                Ok(_) => {}
            }
        }
        Ok(())
    }

    fn check_room(&self) -> Result<(), Error> {
        let wrong = |message: String| Err(Error::Settings(message));
        let have = self.sessions.len();
        let room = self.room;
        if have > room.sessions as usize {
            return wrong(format!(
                "{have} sessions are more than max-sessions = {}: set max-sessions = {have}",
                room.sessions
            ));
        }
        // A session may change to any graft (list of packet functions) in the settings. If a function of one of them
        // stores packets, every session needs memory for packets.
        match self.grafts.values().find(|graft| graft.keeps()) {
            Some(graft) if have > room.storing_sessions as usize => {
                let mib = (have as u64 * KEPT_BYTES).div_ceil(MIB);
                wrong(format!(
                    "{have} sessions, and graft {} keeps what it has sent: {:.1} MiB for each, {mib} MiB in all; memory-mib has room for {}: set memory-mib = {mib}",
                    graft.name,
                    KEPT_BYTES as f64 / MIB as f64,
                    room.storing_sessions
                ))
            }
            _ => Ok(()),
        }
    }

    /// Returns the bytes of kernel memory that all sessions and loaded functions take, without the kernel's overhead
    /// for maps and programs.
    pub fn memory(&self) -> Result<u64, Error> {
        let failed = |name: &str| {
            let name = name.to_owned();
            move |error: millrace_graft_kernel::Error| Error::Graft { name, message: error.to_string() }
        };
        // A sealed session takes additional memory for its keys.
        let sealed = self.sessions.iter().filter(|session| session.cipher.is_some()).count() as u64;
        let base = packet::base_bytes(&self.room, sealed > 0).map_err(failed("hooks"))?;
        let versions = self.grafts.values().flat_map(|graft| &graft.functions);
        let mut bytes = base + sealed * SEALED_BYTES;
        // A packet function is loaded only once, however many grafts (function lists) use it.
        for name in versions.map(|version| &version.name).collect::<BTreeSet<_>>() {
            let mut function = self.functions.find(name)?.open(&BTreeMap::new())?;
            bytes += function.bytes(&self.room).map_err(failed(name))?;
        }
        Ok(bytes)
    }

    /// Returns the value of a function's parameter in a graft (list of packet functions), or `None` if the graft does
    /// not have the function.
    pub fn parameter(&self, graft: &GraftSetting, function: &str, parameter: &str) -> Option<u64> {
        graft.functions.iter().find(|version| version.name == function)?;
        let set = self.parameters.get(function).and_then(|values| values.get(parameter)).copied();
        set.or_else(|| self.functions.find(function).ok()?.default_of(parameter))
    }

    /// Checks that the receiver sends an acknowledgement before the sender's window is full.
    fn check_window(&self, graft: &GraftSetting) -> Result<(), Error> {
        let value = |function, parameter| self.parameter(graft, function, parameter);
        match (value("acknowledge", "every"), value("window", "packets")) {
            (Some(every), Some(packets)) if every > packets => Err(Error::Settings(format!(
                "graft {}: a window of {packets} packets would be full before {every} are acknowledged: acknowledge.every is no more \
                 than window.packets",
                graft.name
            ))),
            _ => Ok(()),
        }
    }

    fn check_fallback(&self, graft: &GraftSetting) -> Result<(), Error> {
        let Some(name) = &graft.fallback else { return Ok(()) };
        let other = self.graft(name)?;
        // Applications were promised the services of the graft, so the graft that replaces it (`fallback`) has to
        // provide all of them.
        match graft.services.iter().find(|service| !other.services.contains(service)) {
            Some(service) => Err(Error::Settings(format!(
                "graft {}: its fallback {name} does not have the service {service:?}",
                graft.name
            ))),
            None => Ok(()),
        }
    }

    /// Returns the graft (list of packet functions) of this name.
    ///
    /// # Errors
    /// Fails if the settings have no graft of this name. The error text lists the names of the grafts that exist.
    pub fn graft(&self, name: &str) -> Result<&GraftSetting, Error> {
        let known = || self.grafts.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        self.grafts.get(name).ok_or_else(|| Error::Unknown { name: name.to_owned(), known: known() })
    }
}

fn renew(seconds: Option<u64>) -> Result<Duration, String> {
    let seconds = seconds.unwrap_or(RENEW_S);
    match (RENEW_LEAST_S..=RENEW_MOST_S).contains(&seconds) {
        true => Ok(Duration::from_secs(seconds)),
        false => Err(format!("sessions: renew-s is from {RENEW_LEAST_S} to {RENEW_MOST_S}")),
    }
}

fn room(sessions: u32, memory_mib: u32) -> Result<SessionRoom, Error> {
    if !(1..=SESSIONS_MAX).contains(&sessions) {
        return Err(Error::Settings(format!("max-sessions is from 1 to {SESSIONS_MAX}, not {sessions}")));
    }
    let storing_sessions = u64::from(memory_mib) * MIB / KEPT_BYTES;
    Ok(SessionRoom { sessions, storing_sessions: storing_sessions.min(sessions.into()) as u32 })
}

impl GraftSetting {
    /// Reports whether a function of the graft stores packets, to retransmit them or to compute other packets from
    /// them.
    fn keeps(&self) -> bool {
        let keeping =
            [FunctionService::Reliability, FunctionService::PartialReliability, FunctionService::Recovery];
        keeping.iter().any(|service| self.services.contains(service))
    }

    /// Returns the names of the packet functions in the graft's list.
    pub fn names(&self) -> Vec<String> {
        self.functions.iter().map(|function| function.name.clone()).collect()
    }

    /// Reports whether a function of the graft measures the round-trip time.
    fn measures(&self) -> bool {
        self.has("acknowledge")
    }

    fn has(&self, name: &str) -> bool {
        self.functions.iter().any(|function| function.name == name)
    }
}

impl RawWhen {
    fn checked(self, session: &str) -> Result<When, Error> {
        let ms = |ms: u32| Duration::from_millis(ms.into());
        // If `until-rtt-ms` is missing, it is four fifths of `rtt-ms`.
        let until = self.until_rtt_ms.unwrap_or(self.rtt_ms - self.rtt_ms.div_ceil(5));
        if self.rtt_ms == 0 || until >= self.rtt_ms {
            return Err(Error::Settings(format!(
                "session {session}: [[session.when]]: until-rtt-ms, {until}, is less than rtt-ms, {}",
                self.rtt_ms
            )));
        }
        Ok(When { graft: self.graft, rtt: ms(self.rtt_ms), until: ms(until), hold: ms(self.for_ms) })
    }
}

impl RawGraft {
    fn checked(
        self,
        functions: &FunctionPool,
        parameters: &FunctionParameters,
    ) -> Result<GraftSetting, Error> {
        let wrong = |message: String| Error::Settings(format!("graft {}: {message}", self.name));
        if self.functions.len() > LIST_MAX {
            return Err(wrong(format!("it has more than {LIST_MAX} functions")));
        }
        let mut services = BTreeSet::new();
        let mut identities = Vec::new();
        let mut versions = Vec::new();
        for (at, name) in self.functions.iter().enumerate() {
            let function = functions.find(name)?;
            let before = &self.functions[..at];
            if before.contains(name) {
                return Err(wrong(format!("function {name} is in it twice")));
            }
            if let Some(missing) = function.manifest.needs.iter().find(|needed| !before.contains(needed)) {
                return Err(wrong(format!("function {name} needs {missing} in front of it")));
            }
            let behind = &self.functions[at + 1..];
            if let Some(missing) = function.manifest.wants.iter().find(|wanted| !behind.contains(wanted)) {
                return Err(wrong(format!("function {name} needs {missing} behind it")));
            }
            services.extend(&function.manifest.services);
            identities.extend(function.identity.to_string().into_bytes());
            // The ID of a function list includes the parameters on which both ends need to agree.
            identities.extend(function.shared_values(parameters.get(name)).into_bytes());
            versions.push(function.version());
        }
        // The trailer of a packet has space for 16 bits of the hash of its function list. `check` refuses lists whose
        // 16 bits are equal.
        let id = match digest(&SHA256, &identities).as_ref() {
            [high, low, ..] => u16::from_be_bytes([*high, *low]),
            _ => 0,
        };
        Ok(GraftSetting {
            list: FunctionList {
                functions: versions.iter().map(|version| version.key.clone()).collect(),
                id,
            },
            functions: versions,
            name: self.name,
            services,
            budget_ns: self.budget_ns,
            fallback: self.fallback,
            anew: self.swap == RawSwap::Stateless,
        })
    }
}

fn add_canonical(grafts: &mut BTreeMap<String, GraftSetting>, functions: &FunctionPool) -> Result<(), Error> {
    let raw = RawGraft {
        name: CANONICAL.to_owned(),
        functions: Vec::new(),
        budget_ns: 0,
        fallback: None,
        swap: RawSwap::Stateful,
    };
    match grafts.insert(CANONICAL.to_owned(), raw.checked(functions, &FunctionParameters::new())?) {
        Some(other) if !other.functions.is_empty() => Err(Error::Settings(format!(
            "graft {CANONICAL} is framing alone where there are peers: give this one another name"
        ))),
        _ => Ok(()),
    }
}

impl RawSession {
    fn checked(self) -> Result<SessionSetting, Error> {
        if self.local.is_ipv4() != self.remote.is_ipv4() {
            return Err(Error::Settings(format!(
                "session {}: local and remote are of different families",
                self.name
            )));
        }
        if self.clear && self.cipher.is_some() {
            return Err(Error::Settings(format!(
                "session {}: clear and cipher exclude each other",
                self.name
            )));
        }
        let ends = SessionEnds { local: self.local, remote: self.remote };
        let cipher = (!self.clear).then(|| self.cipher.unwrap_or_default());
        let when = self.when.into_iter().map(|when| when.checked(&self.name)).collect::<Result<_, _>>()?;
        let paths = PathSettings::checked(self.path, self.paths, &ends)
            .map_err(|message| Error::Settings(format!("session {}: {message}", self.name)))?;
        Ok(SessionSetting { name: self.name, ends, peer: self.peer, graft: self.graft, cipher, when, paths })
    }
}

#[cfg(test)]
mod tests;
