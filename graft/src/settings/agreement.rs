//! With whom this host agrees by TLS, and how it knows them.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use millrace_graft_kernel as kernel;
use millrace_graft_proto::judge::{self, Wants};
use millrace_kernel::prefix::Prefix;
use serde::Deserialize;

use super::gateway::networks;
use crate::Identity;

/// With whom this host may agree at once.
const PEERS_MAX: usize = 256;
/// Where a peer's broker is called, each with carriers of its own.
const WAYS_MAX: usize = 4;
const INTERVAL_S: u64 = 10;
const INTERVAL_MAX_S: u64 = 3600;

#[derive(Clone, Debug, PartialEq)]
pub struct Agreement {
    /// Where peers call; `None`: this host only calls.
    pub listen: Option<SocketAddr>,
    /// This host's private key, PEM.
    pub key: PathBuf,
    /// What an authority says of it, PEM; without, peers know it by its key.
    pub certificate: Option<PathBuf>,
    /// Whose certificates of peers count.
    pub authority: Option<PathBuf>,
    /// After which the caller offers again, as news for the other that it is there.
    pub interval: Duration,
    /// Whether peers may have the grafts of the pool.
    pub give: bool,
    pub fetch: Vec<Fetch>,
    /// Where grafts lie that peers gave.
    pub fetch_to: Option<PathBuf>,
    pub peers: Vec<Peer>,
}

/// A graft that is taken from a peer who has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetch {
    pub graft: String,
    pub identity: Identity,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Peer {
    pub name: String,
    /// Where it is called; `None`: it calls.
    pub address: Option<SocketAddr>,
    pub trust: Trust,
    pub wants: Wants,
    /// Whether the path to it is probed, where it is called.
    pub probe: bool,
    /// Where its broker is called, each for itself, in order of preference; none: it calls.
    pub carry: Vec<SocketAddr>,
    /// That its key stands for, besides those of `carry`.
    pub addresses: Vec<IpAddr>,
    /// Behind it, if it is a gateway: its key stands for all addresses of these.
    pub networks: Vec<Prefix>,
}

impl Peer {
    /// Whether the address is in a network behind it.
    pub fn has_behind(&self, address: IpAddr) -> bool {
        self.networks.iter().any(|network| kernel::covers(*network, address))
    }

    /// Reports whether the settings say that its host has this address.
    pub fn is_at(&self, address: IpAddr) -> bool {
        let called = self.address.map(|at| at.ip());
        called == Some(address) || self.all_addresses().any(|at| at == address)
    }

    /// Of its host, as far as the settings know.
    pub fn all_addresses(&self) -> impl Iterator<Item = IpAddr> {
        let mut all = Vec::new();
        for address in self.carry.iter().map(SocketAddr::ip).chain(self.addresses.iter().copied()) {
            if !all.contains(&address) {
                all.push(address);
            }
        }
        all.into_iter()
    }
}

/// How a peer is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// The SHA-256 of its public key (SubjectPublicKeyInfo).
    Key(Identity),
    /// A name in a certificate of the authority.
    Host(String),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Raw {
    listen: Option<String>,
    key: PathBuf,
    certificate: Option<PathBuf>,
    authority: Option<PathBuf>,
    interval_s: Option<u64>,
    #[serde(default)]
    give: bool,
    fetch_to: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct RawPeer {
    name: String,
    address: Option<String>,
    key: Option<String>,
    host: Option<String>,
    #[serde(default)]
    min_cpus: u32,
    #[serde(default)]
    min_memory_mib: u64,
    min_kernel: Option<String>,
    probe: Option<bool>,
    #[serde(default)]
    carry: Vec<String>,
    #[serde(default)]
    addresses: Vec<IpAddr>,
    #[serde(default)]
    networks: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct RawFetch {
    graft: String,
    sha256: String,
}

impl Agreement {
    /// `carry_hears`: whether carriers of peers come in; `None`: there are to be none.
    pub(super) fn of(
        raw: Option<Raw>,
        peers: Vec<Peer>,
        fetch: Vec<Fetch>,
        carry_hears: Option<bool>,
        directory: &Path,
    ) -> Result<Option<Self>, String> {
        let Some(raw) = raw else {
            return match (peers.first(), fetch.first()) {
                (None, None) => Ok(None),
                _ => Err("[[peer]] and [[fetch]] want an [agreement] with this host's key".to_owned()),
            };
        };
        raw.with(peers, fetch, carry_hears, directory).map(Some)
    }

    /// By its name.
    pub fn peer(&self, name: &str) -> Option<&Peer> {
        self.peers.iter().find(|peer| peer.name == name)
    }
}

impl Raw {
    fn with(
        self,
        peers: Vec<Peer>,
        fetch: Vec<Fetch>,
        carry_hears: Option<bool>,
        directory: &Path,
    ) -> Result<Agreement, String> {
        let listen = self.listen.map(|text| address("agreement: listen", &text)).transpose()?;
        let interval_s = self.interval_s.unwrap_or(INTERVAL_S);
        if !(1..=INTERVAL_MAX_S).contains(&interval_s) {
            return Err(format!("agreement: interval-s is from 1 to {INTERVAL_MAX_S}"));
        }
        let hears = listen.is_some() || carry_hears == Some(true);
        check_peers(&peers, hears, self.authority.is_some())?;
        if let Some(peer) = peers.iter().find(|peer| !peer.carry.is_empty() && carry_hears.is_none()) {
            return Err(format!("peer {}: carry wants [carry]", peer.name));
        }
        if !fetch.is_empty() && self.fetch_to.is_none() {
            return Err("[[fetch]] wants fetch-to in [agreement]: a directory for what comes".to_owned());
        }
        Ok(Agreement {
            listen,
            key: directory.join(self.key),
            certificate: self.certificate.map(|path| directory.join(path)),
            authority: self.authority.map(|path| directory.join(path)),
            interval: Duration::from_secs(interval_s),
            give: self.give,
            fetch,
            fetch_to: self.fetch_to.map(|path| directory.join(path)),
            peers,
        })
    }
}

fn check_peers(peers: &[Peer], hears: bool, has_authority: bool) -> Result<(), String> {
    if peers.len() > PEERS_MAX {
        return Err(format!("{} peers are more than {PEERS_MAX}", peers.len()));
    }
    let (mut names, mut keys) = (BTreeSet::new(), BTreeSet::new());
    for peer in peers {
        let name = &peer.name;
        if !names.insert(name) {
            return Err(format!("two peers are called {name}"));
        }
        if !keys.insert(format!("{:?}", peer.trust)) {
            return Err(format!("peer {name}: another peer has the same key or host"));
        }
        if peer.address.is_none() && peer.carry.is_empty() && !hears {
            return Err(format!("peer {name}: without address it calls, which wants listen in [agreement]"));
        }
        if matches!(peer.trust, Trust::Host(_)) && !has_authority {
            return Err(format!("peer {name}: host wants authority in [agreement]"));
        }
    }
    Ok(())
}

impl RawPeer {
    pub(super) fn checked(self) -> Result<Peer, String> {
        let name = self.name.clone();
        self.try_checked().map_err(|error| format!("peer {name}: {error}"))
    }

    fn try_checked(self) -> Result<Peer, String> {
        if self.name.is_empty() || self.name.len() > 64 {
            return Err("name is 1 to 64 bytes".to_owned());
        }
        let trust = match (self.key, self.host) {
            (Some(key), None) => {
                Trust::Key(key.parse().map_err(|_| "key is a SHA-256: `millrace graft key FILE` says it")?)
            }
            (None, Some(host)) if !host.is_empty() => Trust::Host(host),
            _ => return Err("one of key and host says how it is known".to_owned()),
        };
        let kernel = |text: String| {
            judge::kernel(&text).ok_or_else(|| format!("min-kernel {text:?} is such as \"6.1\""))
        };
        Ok(Peer {
            name: self.name,
            address: self.address.map(|text| address("address", &text)).transpose()?,
            trust,
            wants: Wants {
                cpus: self.min_cpus,
                memory_mib: self.min_memory_mib,
                kernel: self.min_kernel.map(kernel).transpose()?,
            },
            probe: self.probe.unwrap_or(true),
            carry: carry(self.carry)?,
            addresses: self.addresses,
            networks: networks(&self.networks)?,
        })
    }
}

fn carry(texts: Vec<String>) -> Result<Vec<SocketAddr>, String> {
    if texts.len() > WAYS_MAX {
        return Err(format!("carry names {} addresses: there may be {WAYS_MAX}", texts.len()));
    }
    let all: Vec<_> = texts.iter().map(|text| address("carry", text)).collect::<Result<_, _>>()?;
    match all.iter().enumerate().find(|(at, it)| all[..*at].contains(it)) {
        Some((_, twice)) => Err(format!("carry names {twice} twice")),
        None => Ok(all),
    }
}

impl RawFetch {
    pub(super) fn checked(self) -> Result<Fetch, String> {
        let identity =
            self.sha256.parse().map_err(|error| format!("fetch {}: sha256 {error}", self.graft))?;
        Ok(Fetch { graft: self.graft, identity })
    }
}

pub(super) fn address(what: &str, text: &str) -> Result<SocketAddr, String> {
    let address: Option<SocketAddr> = text.parse().ok();
    address.filter(|it| it.port() != 0).ok_or_else(|| {
        format!("{what} {text:?} is an address and a port: \"192.0.2.1:9187\", \"[2001:db8::1]:9187\"")
    })
}

#[cfg(test)]
mod tests {
    use crate::Settings;

    const OURS: &str = "[agreement]\nkey = \"host.key\"\nlisten = \"0.0.0.0:9187\"\n";

    fn peer(rest: &str) -> String {
        format!("[[peer]]\nname = \"b\"\n{rest}\n")
    }

    #[test]
    fn peers_are_read() {
        let key = "ab".repeat(32);
        let text = format!(
            "{OURS}{}min-kernel = \"6.4\"\nprobe = false\n",
            peer(&format!("address = \"192.0.2.1:9000\"\nkey = \"{key}\""))
        );
        let settings = Settings::parse(&text).expect("settings");
        let ports: Vec<_> = settings.own_rules().iter().map(|rule| *rule.ports.start()).collect();
        assert_eq!(ports, [9000, 9187]);
        let agreement = settings.agreement.expect("an agreement");
        let peer = agreement.peer("b").expect("a peer");
        assert_eq!(peer.wants.kernel, Some([6, 4]));
        assert!(!peer.probe && !agreement.give);
        assert_eq!(agreement.interval.as_secs(), 10);
    }

    #[test]
    fn what_is_wrong_is_said() {
        let key = format!("key = \"{}\"", "ab".repeat(32));
        let fetch = format!("[[fetch]]\ngraft = \"a\"\nsha256 = \"{}\"\n", "ab".repeat(32));
        let table = [
            (peer(&key), "want an [agreement]"),
            (format!("{OURS}{}", peer("")), "peer b: one of key and host"),
            (format!("{OURS}{}", peer("key = \"ab\"")), "peer b: key is a SHA-256"),
            (format!("{OURS}{}", peer("host = \"b.example\"")), "peer b: host wants authority"),
            (format!("{OURS}{}{}", peer(&key), peer(&key)), "two peers are called b"),
            (
                format!("{OURS}{}{}", peer(&key), peer(&key).replace("\"b\"", "\"c\"")),
                "peer c: another peer has the same key",
            ),
            (
                format!("{}{}", OURS.replace("listen", "# listen"), peer(&key)),
                "peer b: without address it calls",
            ),
            (OURS.replace("9187", "0"), "agreement: listen \"0.0.0.0:0\" is an address and a port"),
            (format!("{OURS}interval-s = 0\n"), "interval-s is from 1"),
            (format!("{OURS}{fetch}"), "wants fetch-to"),
            (format!("{OURS}fetch-to = \"d\"\n{fetch}"), "fetch wants trusted-keys"),
            (format!("{OURS}{}min-kernel = \"new\"\n", peer(&key)), "min-kernel \"new\""),
        ];
        for (text, wanted) in table {
            let error = Settings::parse(&text).expect_err(wanted).to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}
