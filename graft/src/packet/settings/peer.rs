//! Peers: hosts that have sessions with this one, for applications that request them. Each peer has a pool of ports,
//! which is the same at both ends.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use millrace_graft_kernel::packet::SessionEnds;
use nix::unistd::{Gid, Group, Uid, User};
use serde::Deserialize;

use super::super::keys::AeadCipher;
use super::paths::{self, Division, PathSettings};
use super::{CANONICAL, SessionSetting};
use crate::Error;
use crate::identity::PeerTrust;

/// Smallest number of ports if a peer has a pool: one for the connection between the daemons, and for each end one on
/// which it opens sessions. A range of a single port, which the daemons use, means that the peer has no pool.
const PORTS_MIN: usize = 3;
/// Number of bytes that the library may put into a datagram. The default fits every IPv6 path, whose packets may have
/// 1280 bytes.
const DATAGRAM_MIN: usize = 64;
const DATAGRAM_MAX: usize = 1500;
const DATAGRAM_DEFAULT: usize = 1200;
const SESSIONS_PER_USER: usize = 8;

/// A peer: another host, and the users of this host that may have sessions with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerSetting {
    /// Name of the peer.
    pub name: String,
    /// Key or certificate by which the peer's daemon is authenticated.
    pub trust: PeerTrust,
    /// Addresses and ports of the connection between the two daemons.
    pub daemons: SessionEnds,
    /// Addresses and ports of the sessions that applications can have with the peer.
    pub ends: Vec<SessionEnds>,
    /// Cipher of the sessions, or `None` if they are in clear.
    pub cipher: Option<AeadCipher>,
    /// Users that may open sessions with the peer.
    pub users: BTreeSet<u32>,
    /// Groups whose members may open sessions with the peer.
    pub groups: BTreeSet<u32>,
    /// Largest number of concurrent sessions of one user.
    pub sessions_per_user: usize,
    /// Largest number of bytes that the library puts into a datagram.
    pub datagram_bytes: usize,
    paths: Option<PathSettings>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RawSessionPeer {
    /// Address of this host.
    local: IpAddr,
    /// Address of the peer.
    remote: IpAddr,
    /// Range of ports, the same at both ends. The daemons use the first port for UDP. Each end opens sessions on every
    /// second of the other ports.
    ports: String,
    /// Users that may have sessions, by name or number. Root always may.
    #[serde(default)]
    users: Vec<String>,
    /// Groups whose members may have sessions, by name or number. The connecting process must be a member.
    #[serde(default)]
    groups: Vec<String>,
    /// Largest number of concurrent sessions of one user, 8 by default.
    sessions_per_user: Option<usize>,
    /// Number of bytes that the library puts into one datagram, 1200 by default. The datagram has to be 60 to 80 bytes
    /// smaller than the packets of the path.
    datagram_bytes: Option<usize>,
    /// Cipher of applications' sessions with the peer, as for `cipher` of a session.
    cipher: Option<AeadCipher>,
    /// True if applications' sessions with the peer are not encrypted, as for `clear` of a session.
    #[serde(default)]
    clear: bool,
    /// Paths of each of applications' sessions with the peer.
    #[serde(default)]
    path: Vec<paths::PathSetting>,
    /// How packets are divided among paths, as for `paths` of a session.
    paths: Option<Division>,
}

impl PeerSetting {
    /// Reports whether a user may have sessions: root may, and so may users and groups that the settings name.
    pub fn allows(&self, user: u32, groups: &[u32]) -> bool {
        user == 0 || self.users.contains(&user) || groups.iter().any(|group| self.groups.contains(group))
    }

    /// Reports whether the peer has a pool, so that applications can have sessions with it.
    pub fn has_pool(&self) -> bool {
        !self.ends.is_empty()
    }

    /// Returns the addresses and ports of the pool, and whether this end opens sessions on each. Ports alternate
    /// between the ends, so both never open the same session.
    pub fn pooled_sockets(&self) -> impl Iterator<Item = (SessionEnds, bool)> {
        self.ends
            .iter()
            .enumerate()
            .map(|(at, ends)| (*ends, (at % 2 == 0) == (ends.local.ip() < ends.remote.ip())))
    }

    /// Returns the name of an application's session in the status and the log: the peer's name and the local port.
    pub fn session_name(&self, ends: &SessionEnds) -> String {
        format!("{}/{}", self.name, ends.local.port())
    }

    /// Returns the pooled sessions, as if the settings had one `[[session]]` for each port.
    pub(super) fn sessions(&self) -> impl Iterator<Item = SessionSetting> {
        self.ends.iter().map(|ends| SessionSetting {
            name: self.session_name(ends),
            ends: *ends,
            peer: self.name.clone(),
            graft: CANONICAL.to_owned(),
            cipher: self.cipher,
            when: Vec::new(),
            paths: self.paths.clone(),
        })
    }
}

impl RawSessionPeer {
    pub(super) fn checked(self, name: String, trust: PeerTrust) -> Result<PeerSetting, Error> {
        let wrong = |message: String| Error::Settings(format!("peer {name}: {message}"));
        if name.is_empty() || name.contains('/') {
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
        let with = |port| SessionEnds {
            local: SocketAddr::new(self.local, port),
            remote: SocketAddr::new(self.remote, port),
        };
        // The first port is used by the daemons.
        let daemons = with(*pool.start());
        let ends = pool.skip(1).map(with).collect();
        let users = self.users.iter().map(|name| user(name)).collect::<Result<_, _>>().map_err(&wrong)?;
        let groups = self.groups.iter().map(|name| group(name)).collect::<Result<_, _>>().map_err(&wrong)?;
        let cipher = (!self.clear).then(|| self.cipher.unwrap_or_default());
        let sessions_per_user = self.sessions_per_user.unwrap_or(SESSIONS_PER_USER);
        let paths = PathSettings::checked(self.path, self.paths, &daemons).map_err(&wrong)?;
        Ok(PeerSetting {
            name,
            trust,
            daemons,
            ends,
            cipher,
            users,
            groups,
            sessions_per_user,
            datagram_bytes,
            paths,
        })
    }
}

fn ports(text: &str) -> Result<std::ops::RangeInclusive<u16>, String> {
    let wrong = || {
        format!(
            "ports {text:?} is no range of at least {PORTS_MIN} ports, such as \"41000-41008\": the first one is the daemons' own, and \
             of the others either end opens every second one. Without sessions for applications it is the first one alone"
        )
    };
    let port = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(wrong);
    let (first, last) = match text.split_once('-') {
        Some((first, last)) => (port(first)?, port(last)?),
        None => (port(text)?, port(text)?),
    };
    match (first..=last).len() {
        1 | PORTS_MIN.. => Ok(first..=last),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<PeerSetting, String> {
        let mut table: toml::Table = toml::from_str(text).map_err(|error| error.to_string())?;
        let mut take = |key: &str| table.remove(key).and_then(|value| value.as_str().map(str::to_owned));
        let name = take("name");
        let key = take("key");
        let host = take("host");
        let raw: RawSessionPeer = table.try_into().map_err(|error| error.to_string())?;
        raw.checked(name.expect("a name"), PeerTrust::from_settings(key, host)?)
            .map_err(|error| error.to_string())
    }

    const KEY: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    fn peer(local: &str, remote: &str, more: &str) -> String {
        format!(
            "name = \"station\"\nlocal = \"{local}\"\nremote = \"{remote}\"\nkey = \"{KEY}\"\nports = \"41000-41008\"\n{more}"
        )
    }

    #[test]
    fn peers_open_alternate_ports_of_a_shared_session_pool() {
        let near = parse(&peer("10.0.0.9", "10.0.0.10", "")).expect("a peer");
        let far = parse(&peer("10.0.0.10", "10.0.0.9", "")).expect("a peer");
        assert_eq!(near.daemons.local.port(), 41000);
        let opens = |peer: &PeerSetting| {
            let own = peer.pooled_sockets().filter(|(_, is_own)| *is_own);
            own.map(|(ends, _)| ends.local.port()).collect::<Vec<_>>()
        };
        assert_eq!(opens(&near), [41001, 41003, 41005, 41007]);
        assert_eq!(opens(&far), [41002, 41004, 41006, 41008]);
        assert!(near.sessions().all(|session| session.peer == "station") && near.sessions().count() == 8);
        let without = parse(&peer("10.0.0.9", "10.0.0.10", "").replace("41000-41008", "41000"));
        assert!(without.is_ok_and(|peer| !peer.has_pool() && peer.daemons == near.daemons));
    }

    #[test]
    fn root_and_named_users_may_open_sessions() {
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
    fn invalid_peers_are_refused() {
        let text = peer("10.0.0.1", "10.0.0.2", "");
        let table = [
            ("41000-41008", "41000-41001", "no range of at least 3 ports"),
            ("41000-41008", "0-9", "no range of at least 3 ports"),
            ("41000-41008", "9-1", "no range of at least 3 ports"),
            ("41000-41008", "65530-65536", "no range of at least 3 ports"),
            ("\"10.0.0.2\"", "\"::1\"", "different families"),
            ("\"10.0.0.2\"", "\"10.0.0.1\"", "the same address"),
            (KEY, "none", "key is a SHA-256"),
            ("key = ", "host = \"a\"\nkey = ", "one of key and host"),
            ("\"station\"", "\"sta/tion\"", "no slash"),
            ("key = ", "users = [\"no such user\"]\nkey = ", "there is no user no such user"),
            ("key = ", "groups = [\"no such group\"]\nkey = ", "there is no group no such group"),
            ("key = ", "datagram-bytes = 9000\nkey = ", "datagram-bytes is from 64 to 1500"),
            ("key = ", "clear = true\ncipher = \"aes-128-gcm\"\nkey = ", "exclude each other"),
        ];
        for (from, to, wanted) in table {
            let text = text.replacen(from, to, 1);
            let error = parse(&text).expect_err(wanted);
            assert!(error.contains(wanted), "{error}");
        }
    }
}
