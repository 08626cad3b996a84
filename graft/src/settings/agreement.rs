//! Settings of agreements by TLS: the peers, and how they are authenticated.

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
use crate::{
    ObjectIdentity,
    identity::PeerTrust,
    packet::{HostKey, settings::peer},
};

/// Limit of peers in the settings.
const PEERS_MAX: usize = 256;
/// Limit of addresses of a peer's broker. This host opens carriers (connections for tunnels) to each address.
const WAYS_MAX: usize = 4;
const INTERVAL_S: u64 = 10;
const INTERVAL_MAX_S: u64 = 3600;

/// The settings of agreements with peers.
#[derive(Clone, Debug, PartialEq)]
pub struct AgreementSettings {
    /// Address at which peers connect to this host, or `None` if this host only connects to them.
    pub listen: Option<SocketAddr>,
    /// Path of this host's private key, in PEM format.
    pub key: PathBuf,
    /// Path of this host's certificate from an authority, in PEM format. Without one, peers know this host by its key.
    pub certificate: Option<PathBuf>,
    /// Path of the authority that signs certificates of peers, in PEM format.
    pub authority: Option<PathBuf>,
    /// Interval at which the connecting end repeats its offer, to show that it still runs.
    pub interval: Duration,
    /// True if peers may fetch grafts of this host's pool.
    pub give: bool,
    /// Grafts that are fetched from peers.
    pub fetch: Vec<GraftFetch>,
    /// Directory in which grafts from peers are stored.
    pub fetch_to: Option<PathBuf>,
    /// The peers of agreements and carriers.
    pub peers: Vec<AgreementPeer>,
}

/// A graft that is fetched from peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraftFetch {
    /// Name of the graft.
    pub graft: String,
    /// SHA-256 that the graft's object file must have.
    pub identity: ObjectIdentity,
}

/// A peer with which this host may have an agreement.
#[derive(Clone, Debug, PartialEq)]
pub struct AgreementPeer {
    /// Name of the peer.
    pub name: String,
    /// Address at which this host connects to the peer, or `None` if the peer connects to this host.
    pub address: Option<SocketAddr>,
    /// Identity by which the peer is authenticated.
    pub trust: PeerTrust,
    /// Requirements that the peer's host has to meet.
    pub wants: Wants,
    /// True if the path to the peer is probed, which applies only if this host connects.
    pub probe: bool,
    /// Addresses of the peer's broker, in order of preference. This host opens carriers (connections for tunnels) to
    /// each of them. If there are none, the peer opens the carriers to this host.
    pub carry: Vec<SocketAddr>,
    /// Addresses that clients on the peer's host may have, in addition to the addresses of its broker (`carry`). The
    /// peer's key authorizes connections from these addresses.
    pub addresses: Vec<IpAddr>,
    /// Networks behind the peer, if it is a gateway. The peer's key authorizes connections of clients with any of their
    /// addresses.
    pub networks: Vec<Prefix>,
    /// True if the settings have addresses for datagram sessions with the peer (`[peer.sessions]`).
    pub has_sessions: bool,
}

impl AgreementPeer {
    /// Reports whether the address is in a network behind the peer.
    pub fn has_behind(&self, address: IpAddr) -> bool {
        self.networks.iter().any(|network| kernel::covers(*network, address))
    }

    /// Reports whether the settings name this address as one of the peer's own host.
    pub fn is_at(&self, address: IpAddr) -> bool {
        let called = self.address.map(|at| at.ip());
        called == Some(address) || self.all_addresses().any(|at| at == address)
    }

    /// Reports whether this host connects to the peer.
    fn is_called(&self) -> bool {
        self.address.is_some() || !self.carry.is_empty()
    }

    /// Returns the addresses of the peer's host: those of its broker, and those of its clients.
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

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct RawAgreement {
    /// Address and port at which this host accepts peers' TLS connections for agreements. Without it this host only
    /// connects to peers.
    listen: Option<String>,
    /// Private key of this host, PEM (PKCS#8: P-256, P-384, Ed25519), with a path relative to the settings file.
    key: PathBuf,
    /// Certificate of the key from an authority, PEM.
    certificate: Option<PathBuf>,
    /// Authority that signs certificates of peers, PEM.
    authority: Option<PathBuf>,
    /// Seconds after which the connecting host repeats its offer to renew an agreement, 10 by default. An agreement
    /// ends after three such intervals without a message.
    interval_s: Option<u64>,
    /// Whether peers may fetch the grafts of `pool`.
    #[serde(default)]
    give: bool,
    /// Directory in which grafts from peers are stored. It is a part of the pool.
    fetch_to: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct RawPeer {
    /// Name of the peer in the output of `status` and `why`.
    name: String,
    /// Address and port at which this host connects to the peer. Without it the peer connects to this host.
    address: Option<String>,
    /// Addresses and ports for sessions with the peer.
    pub(super) sessions: Option<peer::RawSessionPeer>,
    /// SHA-256 of the peer's public key, which `millrace graft key` prints on the peer's host.
    key: Option<String>,
    /// Name in the peer's certificate, which `authority` has to sign. It is used instead of `key`.
    host: Option<String>,
    /// Smallest number of CPUs. A peer with fewer is refused.
    #[serde(default)]
    min_cpus: u32,
    /// Smallest memory in MiB. A peer with less is refused.
    #[serde(default)]
    min_memory_mib: u64,
    /// Oldest kernel, such as `"6.1"`. A peer with an older one is refused.
    min_kernel: Option<String>,
    /// Whether this host probes the path to the peer when it connects: whether UDP passes, and up to
    /// which packet size. Default: true.
    probe: Option<bool>,
    /// Up to four addresses and ports of the peer's broker, in order of preference. If there are none, the peer opens
    /// the carriers (connections for tunnels) to this host.
    #[serde(default)]
    carry: Vec<String>,
    /// Addresses of the peer: connections to them are tunnelled, and its clients may have these addresses. Addresses
    /// in `carry` need not be repeated.
    #[serde(default)]
    addresses: Vec<IpAddr>,
    /// Networks behind the peer: connections to them are tunnelled, and its clients may have addresses in them.
    #[serde(default)]
    networks: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct RawFetch {
    /// Name of the graft.
    graft: String,
    /// SHA-256 that the graft's object file must have. The manifest has to be signed by one of `trusted-keys`.
    sha256: String,
}

impl AgreementSettings {
    /// Checks the settings of agreements. `carry_hears` is `None` if the settings have no `[carry]`, and otherwise true
    /// if this host listens for carriers that peers open.
    pub(super) fn from_raw(
        raw: Option<RawAgreement>,
        peers: Vec<AgreementPeer>,
        fetch: Vec<GraftFetch>,
        carry_hears: Option<bool>,
        directory: &Path,
    ) -> Result<Option<Self>, String> {
        let Some(raw) = raw else {
            return match (peers.first(), fetch.first()) {
                (None, None) => Ok(None),
                _ => Err("[[peer]] and [[fetch]] need an [agreement] with this host's key".to_owned()),
            };
        };
        raw.with(peers, fetch, carry_hears, directory).map(Some)
    }

    /// Returns the private key and the certificates by which peers authenticate this host. The lifetime of session keys
    /// is left at 0, since it is not among these settings.
    pub(super) fn host_key(&self) -> HostKey {
        HostKey {
            key: self.key.clone(),
            certificate: self.certificate.clone(),
            authority: self.authority.clone(),
            renew: Duration::ZERO,
        }
    }

    /// Returns the peer with this name.
    pub fn peer(&self, name: &str) -> Option<&AgreementPeer> {
        self.peers.iter().find(|peer| peer.name == name)
    }
}

impl RawAgreement {
    fn with(
        self,
        mut peers: Vec<AgreementPeer>,
        fetch: Vec<GraftFetch>,
        carry_hears: Option<bool>,
        directory: &Path,
    ) -> Result<AgreementSettings, String> {
        let listen = self.listen.map(|text| address("agreement: listen", &text)).transpose()?;
        let interval_s = self.interval_s.unwrap_or(INTERVAL_S);
        if !(1..=INTERVAL_MAX_S).contains(&interval_s) {
            return Err(format!("agreement: interval-s is from 1 to {INTERVAL_MAX_S}"));
        }
        let hears = listen.is_some() || carry_hears == Some(true);
        // A peer that the settings name only for datagram sessions is no peer for agreements, unless one of the hosts
        // connects to the other.
        peers.retain(|peer| hears || peer.is_called() || !peer.has_sessions);
        check_peers(&peers, hears, self.authority.is_some())?;
        if let Some(peer) = peers.iter().find(|peer| !peer.carry.is_empty() && carry_hears.is_none()) {
            return Err(format!("peer {}: carry needs [carry]", peer.name));
        }
        if !fetch.is_empty() && self.fetch_to.is_none() {
            return Err("[[fetch]] needs fetch-to in [agreement]: a directory for fetched grafts".to_owned());
        }
        Ok(AgreementSettings {
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

fn check_peers(peers: &[AgreementPeer], hears: bool, has_authority: bool) -> Result<(), String> {
    if peers.len() > PEERS_MAX {
        return Err(format!("the settings have {} peers, and the limit is {PEERS_MAX}", peers.len()));
    }
    let mut names = BTreeSet::new();
    let mut keys = BTreeSet::new();
    for peer in peers {
        let name = &peer.name;
        if !names.insert(name) {
            return Err(format!("two peers are called {name}"));
        }
        if !keys.insert(format!("{:?}", peer.trust)) {
            return Err(format!("peer {name}: another peer has the same key or host"));
        }
        if !peer.is_called() && !hears {
            return Err(format!(
                "peer {name}: a peer without address has to call this host, which needs listen in [agreement]"
            ));
        }
        if matches!(peer.trust, PeerTrust::Host(_)) && !has_authority {
            return Err(format!("peer {name}: host needs authority in [agreement]"));
        }
    }
    Ok(())
}

impl RawPeer {
    pub(super) fn checked(self) -> Result<AgreementPeer, String> {
        let name = self.name.clone();
        self.try_checked().map_err(|error| format!("peer {name}: {error}"))
    }

    fn try_checked(self) -> Result<AgreementPeer, String> {
        if self.name.is_empty() || self.name.len() > 64 {
            return Err("name is 1 to 64 bytes".to_owned());
        }
        let trust = PeerTrust::from_settings(self.key, self.host)?;
        let kernel = |text: String| {
            judge::kernel(&text)
                .ok_or_else(|| format!("min-kernel {text:?} is not a version such as \"6.1\""))
        };
        Ok(AgreementPeer {
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
            has_sessions: self.sessions.is_some(),
        })
    }
}

fn carry(texts: Vec<String>) -> Result<Vec<SocketAddr>, String> {
    if texts.len() > WAYS_MAX {
        return Err(format!("carry names {} addresses, and the limit is {WAYS_MAX}", texts.len()));
    }
    let all: Vec<_> = texts.iter().map(|text| address("carry", text)).collect::<Result<_, _>>()?;
    match all.iter().enumerate().find(|(at, it)| all[..*at].contains(it)) {
        Some((_, twice)) => Err(format!("carry names {twice} twice")),
        None => Ok(all),
    }
}

impl RawFetch {
    pub(super) fn checked(self) -> Result<GraftFetch, String> {
        let identity =
            self.sha256.parse().map_err(|error| format!("fetch {}: sha256 {error}", self.graft))?;
        Ok(GraftFetch { graft: self.graft, identity })
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
    fn agreement_peers_are_read() {
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
    fn invalid_agreements_are_refused() {
        let key = format!("key = \"{}\"", "ab".repeat(32));
        let fetch = format!("[[fetch]]\ngraft = \"a\"\nsha256 = \"{}\"\n", "ab".repeat(32));
        let table = [
            (peer(&key), "need an [agreement]"),
            (format!("{OURS}{}", peer("")), "peer b: one of key and host"),
            (format!("{OURS}{}", peer("key = \"ab\"")), "peer b: key is a SHA-256"),
            (format!("{OURS}{}", peer("host = \"b.example\"")), "peer b: host needs authority"),
            (format!("{OURS}{}{}", peer(&key), peer(&key)), "two peers are called b"),
            (
                format!("{OURS}{}{}", peer(&key), peer(&key).replace("\"b\"", "\"c\"")),
                "peer c: another peer has the same key",
            ),
            (
                format!("{}{}", OURS.replace("listen", "# listen"), peer(&key)),
                "peer b: a peer without address has to call this host, which needs listen",
            ),
            (OURS.replace("9187", "0"), "agreement: listen \"0.0.0.0:0\" is an address and a port"),
            (format!("{OURS}interval-s = 0\n"), "interval-s is from 1"),
            (format!("{OURS}{fetch}"), "needs fetch-to"),
            (format!("{OURS}fetch-to = \"d\"\n{fetch}"), "fetch needs trusted-keys"),
            (format!("{OURS}{}min-kernel = \"new\"\n", peer(&key)), "min-kernel \"new\""),
        ];
        for (text, wanted) in table {
            let error = Settings::parse(&text).expect_err(wanted).to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}
