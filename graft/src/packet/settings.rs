//! Interfaces, grafts as lists of functions, sessions, and peers with pools of them, as TOML.

mod paths;
pub mod peer;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{self, PathBuf};
use std::time::Duration;

use millrace_base::settings::Reader;
use millrace_graft_kernel::joint::{
    self, Ends, KEPT_BYTES, LIST_MAX, List, Protocol, Room, SEALED_BYTES, SESSIONS_MAX,
};
use millrace_kernel::xdp::Mode;
use ring::digest::{SHA256, digest};
use serde::Deserialize;

use super::function::{Functions, Service};
use super::keys::Cipher;
use super::versions::Version;
use super::when::When;
use crate::Error;
use crate::identity::Key;

pub use paths::{Path, Paths};
pub use peer::Peer;

/// Framing alone: what sessions of a pool have while nobody uses them. It is there where there are peers.
pub const CANONICAL: &str = "canonical";

/// Values by function and name.
pub type Parameters = BTreeMap<String, BTreeMap<String, u64>>;

#[derive(Clone, Debug)]
pub struct Settings {
    pub interfaces: Vec<String>,
    pub mode: Mode,
    pub parameters: Parameters,
    pub grafts: BTreeMap<String, Graft>,
    /// Those of pools, too.
    pub sessions: Vec<Session>,
    /// At the same time: as many have their memory from the start.
    pub room: Room,
    pub peers: Vec<Peer>,
    pub functions: Functions,
}

/// A list of functions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Graft {
    pub name: String,
    pub functions: Vec<Version>,
    /// The same, as the kernel knows them.
    pub list: List,
    pub services: BTreeSet<Service>,
    /// Of the joint that takes longest; 0: none.
    pub budget_ns: u32,
    /// What takes its place when it is over its budget.
    pub fallback: Option<String>,
    /// Sessions that change to it begin anew, and lose what is under way.
    pub anew: bool,
}

/// Datagrams between two addresses and ports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    pub name: String,
    pub ends: Ends,
    pub key: [u8; 16],
    pub graft: String,
    /// `None`: by the operator's word, its payloads are in clear.
    pub cipher: Option<Cipher>,
    /// On the wire.
    pub protocol: Protocol,
    /// Other grafts by the round trip, from the shortest to the longest.
    pub when: Vec<When>,
    /// If it has several.
    pub paths: Option<Paths>,
}

const MIB: u64 = 1 << 20;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Raw {
    interface: Vec<String>,
    #[serde(default)]
    mode: RawMode,
    #[serde(default)]
    pool: Vec<PathBuf>,
    #[serde(default)]
    trusted_keys: Vec<String>,
    #[serde(default)]
    parameters: Parameters,
    #[serde(default = "default_sessions")]
    sessions: u32,
    #[serde(default = "default_memory_mib")]
    memory_mib: u32,
    graft: Vec<RawGraft>,
    #[serde(default)]
    session: Vec<RawSession>,
    #[serde(default)]
    peer: Vec<peer::Raw>,
}

fn default_sessions() -> u32 {
    Room::default().sessions
}

fn default_memory_mib() -> u32 {
    (u64::from(Room::default().keepers) * KEPT_BYTES).div_ceil(MIB) as u32
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
struct RawGraft {
    name: String,
    functions: Vec<String>,
    #[serde(default)]
    budget_ns: u32,
    fallback: Option<String>,
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
struct RawSession {
    name: String,
    local: SocketAddr,
    remote: SocketAddr,
    key_file: PathBuf,
    graft: String,
    cipher: Option<Cipher>,
    #[serde(default)]
    clear: bool,
    #[serde(default)]
    protocol: RawProtocol,
    #[serde(default)]
    when: Vec<RawWhen>,
    #[serde(default)]
    path: Vec<Path>,
    paths: Option<paths::Division>,
}

/// What is on the wire.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
enum RawProtocol {
    #[default]
    #[serde(rename = "udp")]
    Udp,
    #[serde(rename = "253")]
    Ip253,
}

impl From<RawProtocol> for Protocol {
    fn from(raw: RawProtocol) -> Self {
        match raw {
            RawProtocol::Udp => Self::Udp,
            RawProtocol::Ip253 => Self::Ip253,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawWhen {
    rtt_ms: u32,
    until_rtt_ms: Option<u32>,
    #[serde(default = "hold_ms")]
    for_ms: u32,
    graft: String,
}

fn hold_ms() -> u32 {
    1000
}

impl Settings {
    /// What it names is relative to it.
    pub fn read(path: &path::Path) -> Result<Self, Error> {
        let file = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse_in(&text, &file, path.parent().unwrap_or(path::Path::new(""))),
            Err(error) => Err(Error::File { path: file, message: error.to_string() }),
        }
    }

    /// # Errors
    /// Everything that is wrong.
    pub fn parse(text: &str, directory: &path::Path) -> Result<Self, Error> {
        Self::parse_in(text, "settings", directory)
    }

    fn parse_in(text: &str, file: &str, directory: &path::Path) -> Result<Self, Error> {
        let settings = |reader: &mut Reader<'_>, raw| Self::from_raw(reader, raw, directory);
        Ok(Reader::file(text, "the settings are", file, settings).map_err(crate::left::advise)?)
    }

    /// Checks what was read, all parts before the whole.
    fn from_raw(reader: &mut Reader<'_>, raw: Raw, directory: &path::Path) -> Option<Self> {
        let keys: Option<Vec<Key>> = reader.each("trusted-keys", raw.trusted_keys, |key| {
            key.parse().map_err(|error| format!("trusted-keys: {key:?} {error}"))
        });
        let pool: Vec<_> = raw.pool.iter().map(|path| directory.join(path)).collect();
        let functions = reader.check("pool", Functions::read(&pool, &keys?))?;
        let mut grafts = BTreeMap::new();
        let each = reader.each("graft", raw.graft, |graft| {
            let name = graft.name.clone();
            let graft = graft.checked(&functions, &raw.parameters).map_err(Error::into_words)?;
            match grafts.insert(name.clone(), graft) {
                None => Ok(()),
                Some(_) => Err(format!("two grafts are called {name}")),
            }
        });
        let peers = reader.each("peer", raw.peer, |peer| peer.checked(directory).map_err(Error::into_words));
        let sessions =
            reader.each("session", raw.session, |it| it.checked(directory).map_err(Error::into_words));
        let room = reader.check("sessions", room(raw.sessions, raw.memory_mib).map_err(Error::into_words));
        let (peers, mut sessions) = each.and(peers).zip(sessions)?;
        if !peers.is_empty() {
            reader.check("graft", add_canonical(&mut grafts, &functions).map_err(Error::into_words))?;
        }
        sessions.extend(peers.iter().flat_map(Peer::sessions));
        let settings = Self {
            interfaces: raw.interface,
            mode: match raw.mode {
                RawMode::Auto => Mode::Auto,
                RawMode::Native => Mode::Native,
                RawMode::Generic => Mode::Generic,
            },
            parameters: raw.parameters,
            grafts,
            sessions,
            room: room?,
            peers,
            functions,
        };
        reader.check("", settings.check().map_err(Error::into_words))?;
        Some(settings)
    }

    fn check(&self) -> Result<(), Error> {
        let wrong = |message: String| Err(Error::Settings(message));
        if self.interfaces.is_empty() {
            return wrong("interface names at least one".to_owned());
        }
        let mut known = BTreeSet::new();
        if let Some(twice) = self.peers.iter().find(|peer| !known.insert(&peer.name)) {
            return wrong(format!("two peers are called {}", twice.name));
        }
        for name in self.parameters.keys() {
            self.functions.find(name)?;
        }
        let mut ids = BTreeMap::new();
        for graft in self.grafts.values() {
            // The same list under two names is one list; another one with the same start of its digest cannot be told from it.
            if let Some(other) = ids.insert(graft.list.id, &graft.list)
                && *other != graft.list
            {
                return wrong(format!(
                    "graft {} has the identifier of another one: change their order",
                    graft.name
                ));
            }
            self.check_fallback(graft)?;
            self.check_window(graft)?;
        }
        self.check_room()?;
        let (mut names, mut ends) = (BTreeSet::new(), BTreeSet::new());
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

    /// Without the round trip there would be no way back.
    fn check_when(&self, session: &Session) -> Result<(), Error> {
        let wrong = |message: String| Err(Error::Settings(format!("session {}: {message}", session.name)));
        for pair in session.when.windows(2) {
            if pair[1].rtt <= pair[0].rtt || pair[1].until <= pair[0].until {
                return wrong(
                    "[[session.when]] are in the order of their rtt-ms, and of their until-rtt-ms".to_owned(),
                );
            }
        }
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
        let (have, room) = (self.sessions.len(), self.room);
        if have > room.sessions as usize {
            return wrong(format!(
                "{have} sessions are more than sessions = {}: set sessions = {have}",
                room.sessions
            ));
        }
        match self.grafts.values().find(|graft| graft.keeps()) {
            Some(graft) if have > room.keepers as usize => {
                let mib = (have as u64 * KEPT_BYTES).div_ceil(MIB);
                wrong(format!(
                    "{have} sessions, and graft {} keeps what it has sent: {:.1} MiB for each, {mib} MiB in all; memory-mib has room for {}: set memory-mib = {mib}",
                    graft.name,
                    KEPT_BYTES as f64 / MIB as f64,
                    room.keepers
                ))
            }
            _ => Ok(()),
        }
    }

    /// Bytes that they take in the kernel, but for what the kernel itself adds.
    pub fn memory(&self) -> Result<u64, Error> {
        let failed = |name: &str| {
            let name = name.to_owned();
            move |error: millrace_graft_kernel::Error| Error::Graft { name, message: error.to_string() }
        };
        let sealed = self.sessions.iter().filter(|session| session.cipher.is_some()).count() as u64;
        let base = joint::base_bytes(&self.room, sealed > 0).map_err(failed("joints"))?;
        let versions = self.grafts.values().flat_map(|graft| &graft.functions);
        let mut bytes = base + sealed * SEALED_BYTES;
        for name in versions.map(|version| &version.name).collect::<BTreeSet<_>>() {
            let mut function = self.functions.find(name)?.open(&BTreeMap::new())?;
            bytes += function.bytes(&self.room).map_err(failed(name))?;
        }
        Ok(bytes)
    }

    /// What a graft's function works with; `None`: the graft is without it.
    pub fn parameter(&self, graft: &Graft, function: &str, parameter: &str) -> Option<u64> {
        graft.functions.iter().find(|version| version.name == function)?;
        let set = self.parameters.get(function).and_then(|values| values.get(parameter)).copied();
        set.or_else(|| self.functions.find(function).ok()?.default_of(parameter))
    }

    /// An acknowledgement has to come before a window is full.
    fn check_window(&self, graft: &Graft) -> Result<(), Error> {
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

    fn check_fallback(&self, graft: &Graft) -> Result<(), Error> {
        let Some(name) = &graft.fallback else { return Ok(()) };
        let other = self.graft(name)?;
        match graft.services.iter().find(|service| !other.services.contains(service)) {
            Some(service) => Err(Error::Settings(format!(
                "graft {}: its fallback {name} does not have the service {service:?}",
                graft.name
            ))),
            None => Ok(()),
        }
    }

    pub fn graft(&self, name: &str) -> Result<&Graft, Error> {
        let known = || self.grafts.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        self.grafts.get(name).ok_or_else(|| Error::Unknown { name: name.to_owned(), known: known() })
    }
}

fn room(sessions: u32, memory_mib: u32) -> Result<Room, Error> {
    if !(1..=SESSIONS_MAX).contains(&sessions) {
        return Err(Error::Settings(format!("sessions is from 1 to {SESSIONS_MAX}, not {sessions}")));
    }
    let keepers = u64::from(memory_mib) * MIB / KEPT_BYTES;
    Ok(Room { sessions, keepers: keepers.min(sessions.into()) as u32 })
}

impl Graft {
    /// What was sent, to send it again or to make other packets of it.
    fn keeps(&self) -> bool {
        let keeping = [Service::Reliability, Service::PartialReliability, Service::Recovery];
        keeping.iter().any(|service| self.services.contains(service))
    }

    /// Of its functions.
    pub fn names(&self) -> Vec<String> {
        self.functions.iter().map(|function| function.name.clone()).collect()
    }

    /// The round trip.
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
    fn checked(self, functions: &Functions, parameters: &Parameters) -> Result<Graft, Error> {
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
            identities.extend(function.shared_values(parameters.get(name)).into_bytes());
            versions.push(function.version());
        }
        let id = match digest(&SHA256, &identities).as_ref() {
            [high, low, ..] => u16::from_be_bytes([*high, *low]),
            _ => 0,
        };
        Ok(Graft {
            list: List { functions: versions.iter().map(|version| version.key.clone()).collect(), id },
            functions: versions,
            name: self.name,
            services,
            budget_ns: self.budget_ns,
            fallback: self.fallback,
            anew: self.swap == RawSwap::Stateless,
        })
    }
}

fn add_canonical(grafts: &mut BTreeMap<String, Graft>, functions: &Functions) -> Result<(), Error> {
    let raw = RawGraft {
        name: CANONICAL.to_owned(),
        functions: Vec::new(),
        budget_ns: 0,
        fallback: None,
        swap: RawSwap::Stateful,
    };
    match grafts.insert(CANONICAL.to_owned(), raw.checked(functions, &Parameters::new())?) {
        Some(other) if !other.functions.is_empty() => Err(Error::Settings(format!(
            "graft {CANONICAL} is framing alone where there are peers: give this one another name"
        ))),
        _ => Ok(()),
    }
}

fn read_key(directory: &path::Path, file: &path::Path) -> Result<[u8; 16], Error> {
    let path = directory.join(file);
    let error = |message: String| Error::File { path: path.display().to_string(), message };
    let text = std::fs::read_to_string(&path).map_err(|source| error(source.to_string()))?;
    hex(text.trim()).ok_or_else(|| {
        error("it is a key: 32 hexadecimal digits, such as `openssl rand -hex 16` makes".to_owned())
    })
}

impl RawSession {
    fn checked(self, directory: &path::Path) -> Result<Session, Error> {
        let key = read_key(directory, &self.key_file)?;
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
        let ends = Ends { local: self.local, remote: self.remote };
        let cipher = (!self.clear).then(|| self.cipher.unwrap_or_default());
        let when = self.when.into_iter().map(|when| when.checked(&self.name)).collect::<Result<_, _>>()?;
        let protocol = self.protocol.into();
        let paths = Paths::checked(self.path, self.paths, &ends)
            .map_err(|message| Error::Settings(format!("session {}: {message}", self.name)))?;
        Ok(Session { name: self.name, ends, key, graft: self.graft, cipher, protocol, when, paths })
    }
}

fn hex(text: &str) -> Option<[u8; 16]> {
    if text.len() != 32 || !text.is_ascii() {
        return None;
    }
    let mut key = [0; 16];
    for (at, byte) in key.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(key)
}

#[cfg(test)]
mod tests;
