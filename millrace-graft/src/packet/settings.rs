//! Interfaces, grafts as lists of functions, sessions, and peers with pools of them, as TOML.

pub mod peer;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use millrace_bpf::graft::joint::{Ends, LIST_MAX, List};
use millrace_bpf::xdp::Mode;
use ring::digest::{SHA256, digest};
use serde::Deserialize;

use super::function::{Functions, Service};
use super::keys::Cipher;
use super::versions::Version;
use crate::Error;
use crate::identity::Key;

pub use peer::Peer;

/// Framing alone: what sessions of a pool have while nobody uses them. It is there where there are peers.
pub const CANONICAL: &str = "canonical";

#[derive(Clone, Debug)]
pub struct Settings {
    pub interfaces: Vec<String>,
    pub mode: Mode,
    /// By function.
    pub parameters: BTreeMap<String, BTreeMap<String, u64>>,
    pub grafts: BTreeMap<String, Graft>,
    /// Those of pools, too.
    pub sessions: Vec<Session>,
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
}

/// Sessions that can keep what they have sent: `KEPT_SESSIONS` of `bpf/joint_kept.h`.
const KEEPING_SESSIONS: usize = 16;

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
    parameters: BTreeMap<String, BTreeMap<String, u64>>,
    graft: Vec<RawGraft>,
    #[serde(default)]
    session: Vec<RawSession>,
    #[serde(default)]
    peer: Vec<peer::Raw>,
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
}

impl Settings {
    /// What it names is relative to it.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let error = |message: String| Error::File { path: path.display().to_string(), message };
        let text = std::fs::read_to_string(path).map_err(|source| error(source.to_string()))?;
        Self::parse(&text, path.parent().unwrap_or(Path::new(""))).map_err(|message| match message {
            Error::Settings(message) => error(message),
            other => other,
        })
    }

    /// # Errors
    /// The first thing that is wrong.
    pub fn parse(text: &str, directory: &Path) -> Result<Self, Error> {
        let raw: Raw =
            toml::from_str(text).map_err(|error| Error::Settings(error.to_string().trim_end().to_owned()))?;
        let keys = raw.trusted_keys.iter().map(|key| {
            key.parse().map_err(|error| Error::Settings(format!("trusted-keys: {key:?} {error}")))
        });
        let keys: Vec<Key> = keys.collect::<Result<_, _>>()?;
        let pool: Vec<_> = raw.pool.iter().map(|path| directory.join(path)).collect();
        let functions = Functions::read(&pool, &keys)?;
        let mut grafts = BTreeMap::new();
        for graft in raw.graft {
            let name = graft.name.clone();
            if grafts.insert(name.clone(), graft.checked(&functions)?).is_some() {
                return Err(Error::Settings(format!("two grafts are called {name}")));
            }
        }
        let peers =
            raw.peer.into_iter().map(|peer| peer.checked(directory)).collect::<Result<Vec<_>, _>>()?;
        if !peers.is_empty() {
            add_canonical(&mut grafts, &functions)?;
        }
        let sessions = raw.session.into_iter().map(|session| session.checked(directory));
        let pools = peers.iter().flat_map(Peer::sessions).map(Ok);
        let settings = Self {
            interfaces: raw.interface,
            mode: match raw.mode {
                RawMode::Auto => Mode::Auto,
                RawMode::Native => Mode::Native,
                RawMode::Generic => Mode::Generic,
            },
            parameters: raw.parameters,
            grafts,
            sessions: sessions.chain(pools).collect::<Result<_, _>>()?,
            peers,
            functions,
        };
        settings.check()?;
        Ok(settings)
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
        let keeping = self.grafts.values().find(|graft| graft.keeps());
        if let Some(graft) = keeping.filter(|_| self.sessions.len() > KEEPING_SESSIONS) {
            return wrong(format!(
                "{} sessions, and graft {} keeps what it has sent: it can for {KEEPING_SESSIONS}",
                self.sessions.len(),
                graft.name
            ));
        }
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
        }
        Ok(())
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

impl Graft {
    /// What was sent, to send it again or to make other packets of it.
    fn keeps(&self) -> bool {
        let keeping = [Service::Reliability, Service::PartialReliability, Service::Recovery];
        keeping.iter().any(|service| self.services.contains(service))
    }
}

impl RawGraft {
    fn checked(self, functions: &Functions) -> Result<Graft, Error> {
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
    match grafts.insert(CANONICAL.to_owned(), raw.checked(functions)?) {
        Some(other) if !other.functions.is_empty() => Err(Error::Settings(format!(
            "graft {CANONICAL} is framing alone where there are peers: give this one another name"
        ))),
        _ => Ok(()),
    }
}

fn read_key(directory: &Path, file: &Path) -> Result<[u8; 16], Error> {
    let path = directory.join(file);
    let error = |message: String| Error::File { path: path.display().to_string(), message };
    let text = std::fs::read_to_string(&path).map_err(|source| error(source.to_string()))?;
    hex(text.trim()).ok_or_else(|| {
        error("it is a key: 32 hexadecimal digits, such as `openssl rand -hex 16` makes".to_owned())
    })
}

impl RawSession {
    fn checked(self, directory: &Path) -> Result<Session, Error> {
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
        Ok(Session { name: self.name, ends, key, graft: self.graft, cipher })
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
mod tests {
    use super::*;

    const TEXT: &str = r#"
        interface = ["eth0"]
        [parameters.repair]
        retry_us = 20000
        [[graft]]
        name = "complete"
        functions = ["number", "repair"]
        [[graft]]
        name = "newest"
        functions = ["number", "order"]
        budget-ns = 5000
        fallback = "newest"
        [[session]]
        name = "telemetry"
        local = "10.0.0.1:7000"
        remote = "10.0.0.2:6000"
        key-file = "key"
        graft = "complete"
    "#;

    fn parse(text: &str) -> Result<Settings, String> {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::write(directory.path().join("key"), "00112233445566778899aabbccddeeff\n").expect("a key");
        std::fs::write(directory.path().join("bad"), "0011").expect("no key");
        Settings::parse(text, directory.path()).map_err(|error| error.to_string())
    }

    #[test]
    fn lists_have_identities_of_their_own() {
        let settings = parse(TEXT).expect("settings");
        let ids: BTreeSet<_> = settings.grafts.values().map(|graft| graft.list.id).collect();
        assert_eq!(ids.len(), 2);
        let services = [Service::Once, Service::Reliability, Service::PartialReliability];
        assert_eq!(settings.grafts["complete"].services, services.into());
        assert_eq!(settings.sessions[0].key[..3], [0, 0x11, 0x22]);
    }

    /// In clear is what is said to be.
    #[test]
    fn sessions_are_sealed() {
        let table = [
            ("", Some(Cipher::Chacha20Poly1305)),
            ("cipher = \"aes-128-gcm\"", Some(Cipher::Aes128Gcm)),
            ("cipher = \"chacha20-poly1305\"", Some(Cipher::Chacha20Poly1305)),
            ("clear = false", Some(Cipher::Chacha20Poly1305)),
            ("clear = true", None),
        ];
        for (line, want) in table {
            let settings = parse(&format!("{TEXT}{line}\n")).expect(line);
            assert_eq!(settings.sessions[0].cipher, want, "{line}");
        }
    }

    #[test]
    fn no_more_sessions_keep_packets_than_there_is_room_for() {
        let session = |port: usize| {
            format!(
                "[[session]]\nname = \"{port}\"\nlocal = \"10.0.0.1:7000\"\nremote = \"10.0.0.3:{port}\"\nkey-file = \"key\"\ngraft = \"newest\"\n"
            )
        };
        let more = |count: usize| TEXT.to_owned() + &(1..=count).map(session).collect::<String>();
        parse(&more(15)).expect("16 in all");
        let error = parse(&more(16)).expect_err("17");
        assert!(
            error.contains("17 sessions, and graft complete keeps what it has sent: it can for 16"),
            "{error}"
        );
        let without = more(16).replace("\"number\", \"repair\"", "\"number\"");
        parse(&without).expect("nothing is kept");
    }

    const PEER: &str = "[[peer]]\nname = \"station\"\nlocal = \"10.0.0.1\"\nremote = \"10.0.0.7\"\nkey-file = \"key\"\nports = \"41000-41008\"\n";

    #[test]
    fn peers_bring_sessions_with_framing_alone() {
        let settings = parse(&format!("{TEXT}\n{PEER}")).expect("settings");
        assert_eq!(settings.sessions.len(), 10);
        assert!(settings.sessions[1..].iter().all(|session| session.graft == CANONICAL));
        assert!(settings.grafts[CANONICAL].functions.is_empty());
        assert_eq!(settings.sessions[1].name, "station/41000");
        let table = [
            (format!("{TEXT}\n{PEER}{PEER}"), "two peers are called station"),
            (
                format!("{TEXT}\n{PEER}")
                    .replace("10.0.0.1:7000", "10.0.0.1:41001")
                    .replace("10.0.0.2:6000", "10.0.0.7:41001"),
                "session station/41001 has the addresses and ports of another one",
            ),
            (format!("{TEXT}\n{PEER}").replace("newest", CANONICAL), "give this one another name"),
            (format!("{TEXT}\n{PEER}").replace("41008", "41090"), "it can for 16"),
        ];
        for (text, wanted) in table {
            let error = parse(&text).expect_err(wanted);
            assert!(error.contains(wanted), "{error}");
        }
    }

    #[test]
    fn what_is_wrong_is_said() {
        let table = [
            ("[\"eth0\"]", "[]", "interface names at least one"),
            ("[\"number\", \"repair\"]", "[\"repair\"]", "function repair needs number in front of it"),
            ("[\"number\", \"repair\"]", "[\"repair\", \"number\"]", "repair needs number in front of it"),
            (
                "[\"number\", \"repair\"]",
                "[\"window\", \"number\", \"repair\"]",
                "function window needs acknowledge behind it",
            ),
            ("[\"number\", \"repair\"]", "[\"number\", \"number\"]", "number is in it twice"),
            (
                "[\"number\", \"repair\"]",
                "[\"seal\"]",
                "there is no function seal; there are: acknowledge, congestion, fec, gobackn, number, order, pace, partial, repair, window",
            ),
            ("fallback = \"newest\"", "fallback = \"complete\"", "does not have the service PartialOrder"),
            ("fallback = \"newest\"", "fallback = \"none\"", "there is no graft none"),
            ("name = \"newest\"", "name = \"complete\"", "two grafts are called complete"),
            ("graft = \"complete\"", "graft = \"some\"", "session telemetry: there is no graft some"),
            ("\"10.0.0.2:6000\"", "\"[::1]:6000\"", "different families"),
            ("\"10.0.0.2:6000\"", "\"10.0.0.2\"", "socket address"),
            ("key-file = \"key\"", "key-file = \"bad\"", "32 hexadecimal digits"),
            ("key-file = \"key\"", "key-file = \"none\"", "No such file"),
            (
                "key-file",
                "clear = true\ncipher = \"aes-128-gcm\"\nkey-file",
                "clear and cipher exclude each other",
            ),
            ("key-file", "cipher = \"rot13\"\nkey-file", "unknown variant `rot13`"),
            ("[parameters.repair]", "[parameters.mend]", "there is no function mend"),
            (
                "functions = [\"number\", \"repair\"]",
                "functions = [\"window\", \"number\", \"acknowledge\"]\n[parameters.window]\npackets = 2\n[parameters.acknowledge]\nevery = 3",
                "a window of 2 packets would be full before 3 are acknowledged",
            ),
        ];
        for (from, to, wanted) in table {
            let text = TEXT.replacen(from, to, 1);
            assert_ne!(text, TEXT, "{from}");
            let error = parse(&text).expect_err(wanted);
            assert!(error.contains(wanted), "{error}");
        }
    }
}
