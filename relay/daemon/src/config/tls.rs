//! Reads the settings of certificates, encryption, upstream relays and the cluster.

use std::{fmt, path::PathBuf};

use clap::ValueEnum;
use millrace_moq::{Draft, HopId};
use millrace_relay::{Origins, access::pattern::Pattern};
use millrace_relay_discovery::check_url;
use serde::Deserialize;
use toml::{
    Spanned,
    de::{DeValue, ValueDeserializer},
};
use url::Url;

use super::{
    ConfigCheck, ConfigFile, ConfigProblem, Settings,
    access::TextValue,
    discovery::{DISCOVERY, DiscoveryConfig, DiscoveryStore},
    repeated,
    values::{DraftNumber, RelayUrl, deserialize, name},
};

/// Drafts in the relay's order of preference: the newest first, except for draft-20. `@moq/net` 0.3.4 knows no draft
/// newer than draft-20. In draft-20 it writes LARGEST_OBJECT with a length that the draft does not have, and in older
/// drafts it omits LARGEST_OBJECT.
pub(super) const PREFERRED: [Draft; 5] = [Draft::D22, Draft::D21, Draft::D19, Draft::D18, Draft::D20];

/// The source of the relay's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants describe their fields")]
pub enum IdentityConfig {
    /// PEM files with the certificate chain and the private key, which are read again when they change.
    Files { cert: PathBuf, key: PathBuf },
    /// A self-signed certificate made at start-up. It is written to the file `out`, if set.
    SelfSigned { out: Option<PathBuf> },
}

impl fmt::Display for IdentityConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Files { cert, .. } => write!(f, "the certificate in {}", cert.display()),
            Self::SelfSigned { .. } => f.write_str("the self-signed certificate"),
        }
    }
}

/// The upstream relays, and the credentials for them and for relays of the cluster. The relay asks an upstream relay
/// for tracks without a publisher here.
#[derive(Clone, Debug)]
pub struct UpstreamConfig {
    /// URLs of upstream relays, the preferred one first; empty if the credentials are only for relays of the cluster.
    pub urls: Vec<Url>,
    /// PEM file of trusted root certificates; `None` if the certificates of upstream relays and of the cluster's relays
    /// are not verified.
    pub tls_root: Option<PathBuf>,
    /// File with this relay's token, which is read again for each connection.
    pub token: Option<PathBuf>,
    /// Files with this relay's certificate chain and key as a client.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// A TLS 1.3 cipher suite (RFC 8446, appendix B.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs, reason = "comments would be printed in the help, and the names say it")]
pub enum CipherSuite {
    Chacha20Poly1305,
    #[value(name = "aes-128-gcm")]
    Aes128Gcm,
    #[value(name = "aes-256-gcm")]
    Aes256Gcm,
}

deserialize!(chosen: CipherSuite);

/// File with the root certificates of Debian and Ubuntu, the default of `upstream-tls-root`.
pub const SYSTEM_ROOTS: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Settings of TLS for connections to upstream relays, as they were given.
pub(super) struct UpstreamTls {
    pub root: Option<PathBuf>,
    pub disable_verify: bool,
    pub cert: Option<PathBuf>,
    pub key: Option<PathBuf>,
}

impl ConfigCheck {
    pub(super) fn identity(
        &mut self,
        cert: Option<PathBuf>,
        key: Option<PathBuf>,
        self_signed: Option<bool>,
        out: Option<PathBuf>,
    ) -> IdentityConfig {
        if out.is_some() && (cert.is_some() || key.is_some()) {
            self.problem("tls-self-signed-out", "has no effect with tls-cert: no certificate is made");
        }
        match (cert, key) {
            (Some(cert), Some(key)) => {
                if self_signed == Some(true) {
                    self.problem(
                        "tls-self-signed",
                        "contradicts tls-cert: a certificate is read or made, not both",
                    );
                }
                return IdentityConfig::Files { cert, key };
            }
            (Some(_), None) => self.problem("tls-cert", "needs tls-key as well"),
            (None, Some(_)) => self.problem("tls-key", "needs tls-cert as well"),
            (None, None) if self_signed == Some(false) => {
                self.problem("tls-self-signed", "is off, so tls-cert and tls-key are needed");
            }
            (None, None) => {}
        }
        IdentityConfig::SelfSigned { out }
    }

    pub(super) fn web(&mut self, webtransport: bool, given: Option<Vec<String>>) -> Option<Origins> {
        if !webtransport && given.is_some() {
            self.problem("web-origin", "has no effect without webtransport");
        }
        // An origin has a scheme, host and port only, so its serialization equals the text (RFC 6454, section 6.2).
        let is_origin =
            |text: &str| Url::parse(text).is_ok_and(|url| url.origin().ascii_serialization() == text);
        for origin in given.iter().flatten().filter(|origin| !is_origin(origin)) {
            self.problem("web-origin", format!("{origin:?} is no origin, such as https://example.org"));
        }
        webtransport.then(|| given.map_or(Origins::Any, Origins::Only))
    }

    /// Returns the given drafts in the relay's order of preference.
    pub(super) fn drafts(&mut self, given: Option<Vec<DraftNumber>>) -> Vec<Draft> {
        let Some(given) = given else { return PREFERRED.to_vec() };
        if given.is_empty() {
            self.problem("drafts", "needs at least one draft");
        }
        if let Some(DraftNumber(twice)) = repeated(&given) {
            self.problem("drafts", format!("{} is given twice", twice.number()));
        }
        PREFERRED.into_iter().filter(|draft| given.contains(&DraftNumber(*draft))).collect()
    }

    pub(super) fn cipher_suites(&mut self, given: Option<Vec<CipherSuite>>) -> Vec<CipherSuite> {
        let suites = given.unwrap_or_else(|| CipherSuite::value_variants().to_vec());
        if suites.is_empty() {
            self.problem("cipher-suites", "needs at least one suite");
        }
        if let Some(twice) = repeated(&suites) {
            self.problem("cipher-suites", format!("{} is given twice", name(&twice)));
        }
        suites
    }

    pub(super) fn upstream(
        &mut self,
        urls: Option<Vec<RelayUrl>>,
        tls: UpstreamTls,
        token: Option<PathBuf>,
        has_peers: bool,
    ) -> Option<UpstreamConfig> {
        let UpstreamTls { root, disable_verify, cert, key } = tls;
        let connects = urls.is_some() || has_peers;
        if root.is_some() && disable_verify {
            self.problem("upstream-tls-root", "has no effect with upstream-tls-disable-verify");
        }
        if !connects && root.is_some() {
            self.problem("upstream-tls-root", "needs upstream or cluster-peer as well");
        }
        if !connects && disable_verify {
            self.problem("upstream-tls-disable-verify", "needs upstream or cluster-peer as well");
        }
        if cert.is_some() != key.is_some() {
            let given = if cert.is_some() { "upstream-tls-cert" } else { "upstream-tls-key" };
            self.problem(given, "upstream-tls-cert and upstream-tls-key need each other");
        }
        for (name, given) in [("upstream-token", token.is_some()), ("upstream-tls-cert", cert.is_some())] {
            if !connects && given {
                self.problem(name, "needs upstream or cluster-peer as well");
            }
        }
        let tls_root = (!disable_verify).then(|| root.unwrap_or_else(|| SYSTEM_ROOTS.into()));
        if !connects {
            return None;
        }
        let is_given = urls.is_some();
        let urls: Vec<_> = urls.unwrap_or_default().into_iter().map(|url| url.0).collect();
        if urls.is_empty() && is_given {
            self.problem("upstream", "needs at least one relay, or is left out");
        }
        if let Some(twice) = urls.iter().enumerate().find(|(at, url)| urls[..*at].contains(url)) {
            self.problem("upstream", format!("{} is given twice", twice.1.authority()));
        }
        Some(UpstreamConfig { urls, tls_root, token, identity: cert.zip(key) })
    }
}

/// The TOML key of the `[[peer]]` tables, which set costs and namespaces for single relays. Only the settings file can
/// have these tables.
pub const PEER: &str = "peer";

const ROUTES: usize = 10_000;

/// The settings of the cluster that the relay is in.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    /// The relay's hop ID in the cluster; `None` if a random one is chosen at each start.
    pub hop: Option<HopId>,
    /// Cost of receiving from this relay, which it announces to its peers.
    pub cost: Option<u64>,
    /// Relays of the cluster that the settings name.
    pub peers: Vec<PeerConfig>,
    /// The discovery store that lists further relays of the cluster.
    pub discovery: Option<DiscoveryConfig>,
    /// Largest number of namespaces for which one session may announce routes.
    pub max_routes: usize,
}

/// A relay of the cluster that this one connects to.
#[derive(Clone, Debug)]
pub struct PeerConfig {
    /// URL of the peer.
    pub url: Url,
    /// Cost of receiving from the peer; `None` for the cost that it announces.
    pub cost: Option<u64>,
    /// Namespaces that the peer may announce; empty for all.
    pub namespaces: Vec<Pattern>,
}

/// A `[[peer]]` table of the settings file: the cost and the namespaces of one relay of the cluster.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PeerEntry {
    url: RelayUrl,
    cost: Option<u64>,
    #[serde(default)]
    namespaces: Vec<TextValue<Pattern>>,
}

impl ConfigCheck {
    /// Reads the `[[peer]]` tables.
    pub(super) fn peers(
        &mut self,
        file: &ConfigFile<'_>,
        value: Spanned<DeValue<'_>>,
        settings: &mut Settings,
    ) {
        let DeValue::Array(peers) = value.get_ref() else {
            return self.problem(PEER, "is a list of tables: [[peer]]");
        };
        for peer in peers.iter() {
            match PeerEntry::deserialize(ValueDeserializer::from(peer.clone())) {
                Ok(PeerEntry { url, cost, namespaces }) => settings.peer.push(PeerConfig {
                    url: url.0,
                    cost,
                    namespaces: namespaces.into_iter().map(|text| text.0).collect(),
                }),
                Err(error) => {
                    let line = file.text[..peer.span().start].matches('\n').count() + 1;
                    let place = format!("{}:{line}: {PEER}", file.name);
                    self.problems.push(ConfigProblem { place, message: error.message().to_owned() });
                }
            }
        }
    }

    pub(super) fn cluster(&mut self, settings: &mut Settings) -> Option<ClusterConfig> {
        let named = settings.cluster_peer.take().unwrap_or_default().into_iter();
        let named = named.map(|url| PeerConfig { url: url.0, cost: None, namespaces: Vec::new() });
        let peers: Vec<_> = named.chain(std::mem::take(&mut settings.peer)).collect();
        if let Some((_, twice)) =
            peers.iter().enumerate().find(|(at, peer)| peers[..*at].iter().any(|other| other.url == peer.url))
        {
            self.problem("cluster-peer", format!("{} is given twice", twice.url.authority()));
        }
        if let Some(hop) = settings.cluster_hop.filter(|hop| *hop == 0 || *hop > HopId::MAX.0) {
            self.problem("cluster-hop", format!("{hop} is not from 1 to {}", HopId::MAX.0));
        }
        let mut discovery = settings.discovery.take();
        let url = settings.cluster_url.take();
        let is_in = settings.cluster.unwrap_or(!peers.is_empty() || discovery.is_some());
        let given = [
            ("cluster-hop", settings.cluster_hop.is_some()),
            ("cluster-cost", settings.cluster_cost.is_some()),
            ("cluster-routes", settings.cluster_routes.is_some()),
            ("cluster-peer", !peers.is_empty()),
            ("cluster-url", url.is_some()),
            (DISCOVERY, discovery.is_some()),
        ];
        if !is_in {
            for (name, _) in given.into_iter().filter(|(_, given)| *given) {
                self.problem(name, "has no effect without cluster");
            }
            return None;
        }
        if let Some(Err(error)) = url.as_ref().map(|url| check_url(&url.0)) {
            self.problem("cluster-url", error.to_string());
        }
        match &mut discovery {
            Some(discovery) => discovery.url = url.map(|url| url.0),
            None if url.is_some() => self.problem("cluster-url", "has no effect without [discovery]"),
            None => {}
        }
        if let Some(DiscoveryConfig { store: DiscoveryStore::Etcd { .. }, url: None, .. }) = discovery {
            self.problem(
                "cluster-url",
                "etcd needs the URL of this relay for other relays: moqt://HOST:PORT",
            );
        }
        Some(ClusterConfig {
            hop: settings.cluster_hop.map(HopId),
            cost: settings.cluster_cost,
            max_routes: self.at_least_one("cluster-routes", settings.cluster_routes, ROUTES),
            peers,
            discovery,
        })
    }
}
