//! Peers whose hosts have sessions with this one for applications that ask for them: a pool of ports, which is the same at both ends.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use millrace_graft_kernel::joint::{Ends, Protocol};
use nix::unistd::{Gid, Group, Uid, User};
use ring::hmac;
use serde::Deserialize;

use super::super::keys::Cipher;
use super::paths::{self, Division, Paths};
use super::{CANONICAL, RawProtocol, Session, read_key};
use crate::Error;

/// Of a pool: one for the daemons' own words, and one for either end to open.
const PORTS_MIN: usize = 3;
/// Of what the library puts into a datagram. Without a setting it fits wherever IPv6 does, which wants packets of 1280 bytes to.
const DATAGRAM_MIN: usize = 64;
const DATAGRAM_MAX: usize = 1500;
const DATAGRAM_DEFAULT: usize = 1200;
const SESSIONS_PER_USER: usize = 8;

/// Another host, and who may have sessions with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub name: String,
    /// The pool. The first one is the daemons' own.
    pub ends: Vec<Ends>,
    pub cipher: Option<Cipher>,
    /// On the wire.
    pub protocol: Protocol,
    pub users: BTreeSet<u32>,
    pub groups: BTreeSet<u32>,
    pub sessions_per_user: usize,
    /// Bytes that the library puts into one.
    pub datagram_bytes: usize,
    paths: Option<Paths>,
    key: [u8; 16],
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Raw {
    name: String,
    local: IpAddr,
    remote: IpAddr,
    key_file: PathBuf,
    ports: String,
    #[serde(default)]
    users: Vec<String>,
    #[serde(default)]
    groups: Vec<String>,
    sessions_per_user: Option<usize>,
    datagram_bytes: Option<usize>,
    cipher: Option<Cipher>,
    #[serde(default)]
    clear: bool,
    #[serde(default)]
    protocol: RawProtocol,
    /// Of each session of the pool.
    #[serde(default)]
    path: Vec<paths::Path>,
    paths: Option<Division>,
}

impl Peer {
    /// Root, and those whom the settings name.
    pub fn allows(&self, user: u32, groups: &[u32]) -> bool {
        user == 0 || self.users.contains(&user) || groups.iter().any(|group| self.groups.contains(group))
    }

    /// Of the daemons' own words.
    pub fn control(&self) -> Option<Ends> {
        self.ends.first().copied()
    }

    /// Of the pool, for applications, and whether this end opens it: of each two one does, so that both never open the same.
    pub fn seats(&self) -> impl Iterator<Item = (Ends, bool)> {
        let seats = self.ends.iter().skip(1).enumerate();
        seats.map(|(at, ends)| (*ends, (at % 2 == 0) == (ends.local.ip() < ends.remote.ip())))
    }

    /// Of a session of the pool, in status and log.
    pub fn session_name(&self, ends: &Ends) -> String {
        format!("{}/{}", self.name, ends.local.port())
    }

    /// As if the settings had a `[[session]]` for each port.
    pub(super) fn sessions(&self) -> impl Iterator<Item = Session> {
        self.ends.iter().map(|ends| Session {
            name: self.session_name(ends),
            ends: *ends,
            key: derive(&self.key, ends),
            graft: CANONICAL.to_owned(),
            cipher: self.cipher,
            protocol: self.protocol,
            when: Vec::new(),
            paths: self.paths.clone(),
        })
    }
}

impl Raw {
    pub(super) fn checked(self, directory: &Path) -> Result<Peer, Error> {
        let wrong = |message: String| Error::Settings(format!("peer {}: {message}", self.name));
        if self.name.is_empty() || self.name.contains('/') {
            return Err(wrong("its name has at least one character, and no slash".to_owned()));
        }
        if self.local.is_ipv4() != self.remote.is_ipv4() {
            return Err(wrong("local and remote are of different families".to_owned()));
        }
        if self.local == self.remote {
            return Err(wrong("local and remote are the same address".to_owned()));
        }
        if self.clear && self.cipher.is_some() {
            return Err(wrong("clear and cipher exclude each other".to_owned()));
        }
        let datagram_bytes = self.datagram_bytes.unwrap_or(DATAGRAM_DEFAULT);
        if !(DATAGRAM_MIN..=DATAGRAM_MAX).contains(&datagram_bytes) {
            return Err(wrong(format!("datagram-bytes is from {DATAGRAM_MIN} to {DATAGRAM_MAX}")));
        }
        let pool = ports(&self.ports).map_err(&wrong)?;
        let with = |port| Ends {
            local: SocketAddr::new(self.local, port),
            remote: SocketAddr::new(self.remote, port),
        };
        let own = with(*pool.start());
        let ends = pool.map(with);
        let users = self.users.iter().map(|name| user(name)).collect::<Result<_, _>>().map_err(&wrong)?;
        let groups = self.groups.iter().map(|name| group(name)).collect::<Result<_, _>>().map_err(&wrong)?;
        let cipher = (!self.clear).then(|| self.cipher.unwrap_or_default());
        let sessions_per_user = self.sessions_per_user.unwrap_or(SESSIONS_PER_USER);
        let (ends, key) = (ends.collect(), read_key(directory, &self.key_file)?);
        let paths = Paths::checked(self.path, self.paths, &own).map_err(&wrong)?;
        let name = self.name;
        let protocol = self.protocol.into();
        Ok(Peer {
            name,
            ends,
            cipher,
            protocol,
            users,
            groups,
            sessions_per_user,
            datagram_bytes,
            paths,
            key,
        })
    }
}

fn ports(text: &str) -> Result<std::ops::RangeInclusive<u16>, String> {
    let wrong = || {
        format!(
            "ports {text:?} is no range of at least {PORTS_MIN} ports, such as \"41000-41008\": the first one is the daemons' own, and \
             of the others either end opens every second one"
        )
    };
    let (first, last) = text.split_once('-').ok_or_else(wrong)?;
    let port = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(wrong);
    let (first, last) = (port(first)?, port(last)?);
    match (first..=last).len() {
        PORTS_MIN.. => Ok(first..=last),
        _ => Err(wrong()),
    }
}

fn user(name: &str) -> Result<u32, String> {
    let found = User::from_name(name).map_err(|error| format!("user {name}: {error}"))?;
    let known = found.map(|user| user.uid).or_else(|| name.parse().ok().map(Uid::from_raw));
    known.map(Uid::as_raw).ok_or_else(|| format!("there is no user {name}"))
}

fn group(name: &str) -> Result<u32, String> {
    let found = Group::from_name(name).map_err(|error| format!("group {name}: {error}"))?;
    let known = found.map(|group| group.gid).or_else(|| name.parse().ok().map(Gid::from_raw));
    known.map(Gid::as_raw).ok_or_else(|| format!("there is no group {name}"))
}

/// Each session of a pool has a key of its own, the same at both ends.
fn derive(key: &[u8; 16], ends: &Ends) -> [u8; 16] {
    let (one, other) = (ends.local.min(ends.remote), ends.local.max(ends.remote));
    let key = hmac::Key::new(hmac::HMAC_SHA256, key);
    let tag = hmac::sign(&key, format!("millrace pool {one} {other}").as_bytes());
    tag.as_ref().first_chunk().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Peer, String> {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::write(directory.path().join("key"), "00112233445566778899aabbccddeeff\n").expect("a key");
        let raw: Raw = toml::from_str(text).map_err(|error| error.to_string())?;
        raw.checked(directory.path()).map_err(|error| error.to_string())
    }

    fn peer(local: &str, remote: &str, more: &str) -> String {
        format!(
            "name = \"station\"\nlocal = \"{local}\"\nremote = \"{remote}\"\nkey-file = \"key\"\nports = \"41000-41008\"\n{more}"
        )
    }

    #[test]
    fn both_ends_have_the_same_pool_and_open_other_halves_of_it() {
        let near = parse(&peer("10.0.0.9", "10.0.0.10", "")).expect("a peer");
        let far = parse(&peer("10.0.0.10", "10.0.0.9", "")).expect("a peer");
        assert_eq!(near.control().map(|ends| ends.local.port()), Some(41000));
        let opens = |peer: &Peer| {
            let own = peer.seats().filter(|(_, is_own)| *is_own);
            own.map(|(ends, _)| ends.local.port()).collect::<Vec<_>>()
        };
        assert_eq!(opens(&near), [41001, 41003, 41005, 41007]);
        assert_eq!(opens(&far), [41002, 41004, 41006, 41008]);
        let keys = |peer: &Peer| peer.sessions().map(|session| session.key).collect::<Vec<_>>();
        assert_eq!(keys(&near), keys(&far));
        assert_eq!(keys(&near).into_iter().collect::<BTreeSet<_>>().len(), 9, "a key for each");
    }

    #[test]
    fn root_and_who_is_named_may() {
        let nobody = user("nobody").expect("nobody");
        let table = [
            ("", nobody, &[][..], false),
            ("", 0, &[], true),
            ("users = [\"nobody\"]", nobody, &[], true),
            ("users = [\"12345\"]", 12345, &[], true),
            ("users = [\"nobody\"]", 1, &[nobody], false),
            ("groups = [\"0\"]", nobody, &[7, 0], true),
            ("groups = [\"root\"]", nobody, &[7], false),
        ];
        for (line, user, groups, want) in table {
            let peer = parse(&peer("10.0.0.1", "10.0.0.2", line)).expect(line);
            assert_eq!(peer.allows(user, groups), want, "{line} {user} {groups:?}");
        }
    }

    #[test]
    fn what_is_wrong_is_said() {
        let text = peer("10.0.0.1", "10.0.0.2", "");
        let table = [
            ("41000-41008", "41000-41001", "no range of at least 3 ports"),
            ("41000-41008", "41000", "no range of at least 3 ports"),
            ("41000-41008", "0-9", "no range of at least 3 ports"),
            ("41000-41008", "9-1", "no range of at least 3 ports"),
            ("41000-41008", "65530-65536", "no range of at least 3 ports"),
            ("\"10.0.0.2\"", "\"::1\"", "different families"),
            ("\"10.0.0.2\"", "\"10.0.0.1\"", "the same address"),
            ("\"key\"", "\"none\"", "No such file"),
            ("\"station\"", "\"sta/tion\"", "no slash"),
            ("key-file", "users = [\"no such user\"]\nkey-file", "there is no user no such user"),
            ("key-file", "groups = [\"no such group\"]\nkey-file", "there is no group no such group"),
            ("key-file", "datagram-bytes = 9000\nkey-file", "datagram-bytes is from 64 to 1500"),
            ("key-file", "clear = true\ncipher = \"aes-128-gcm\"\nkey-file", "exclude each other"),
        ];
        for (from, to, wanted) in table {
            let text = text.replacen(from, to, 1);
            let error = parse(&text).expect_err(wanted);
            assert!(error.contains(wanted), "{error}");
        }
    }
}
