//! Connects the relay to relays that discovery finds, and keeps this relay's own record in the store.

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::Context as _;
use millrace_daemon::pem;
use millrace_relay::{ClusterPeer, UpstreamRelay, status::ClusterDiscoveryStatus};
use millrace_relay_discovery::{
    Discovery, DiscoveryState, EtcdConfig, EtcdDiscovery, HttpClient, ListDiscovery, ListPlace, RelayRecord,
};
use rustls::{ClientConfig, sign::SingleCertAndKey};
use tokio::{sync::watch, task::JoinHandle, time};

use crate::{
    access,
    config::{ClusterConfig, DISCOVERY, DiscoveryConfig, DiscoveryStore, SYSTEM_ROOTS, UpstreamConfig},
    random,
};

/// Longest time that a relay waits at shutdown for the store to remove its record.
const WITHDRAWAL: Duration = Duration::from_secs(3);

/// The prepared connection to the discovery store, which is not yet started.
pub struct RelayDiscovery {
    config: DiscoveryConfig,
    discovery: Discovery,
    upstream: Option<UpstreamConfig>,
    /// This relay's record in the store; `None` if the relay registers none, or has withdrawn it.
    own: watch::Sender<Option<RelayRecord>>,
}

/// A running discovery. Dropping it leaves this relay's record in the store until its lease expires.
pub struct RunningDiscovery {
    own: watch::Sender<Option<RelayRecord>>,
    found: watch::Receiver<DiscoveryState>,
    task: JoinHandle<()>,
}

impl Drop for RunningDiscovery {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl RunningDiscovery {
    /// Marks this relay's record as draining, so that other relays no longer connect to this relay.
    pub fn drain(&self) {
        self.own.send_if_modified(|own| {
            own.as_mut().is_some_and(|own| !std::mem::replace(&mut own.draining, true))
        });
    }

    /// Withdraws this relay's record, and waits for the store's answer. Without an answer, the record ends with its
    /// lease.
    pub async fn end(&self) {
        self.own.send_replace(None);
        let mut found = self.found.clone();
        // Errors are ignored: neither a time-out nor a stopped discovery task may delay the relay's shutdown.
        let _ = time::timeout(WITHDRAWAL, found.wait_for(|state| !state.is_registered)).await;
    }
}

impl RelayDiscovery {
    /// Prepares discovery, and reads the TLS files that the settings name. Returns `None` without `[discovery]`.
    ///
    /// # Errors
    /// Fails if a file cannot be read or used.
    pub fn read(
        cluster: Option<&ClusterConfig>,
        upstream: Option<&UpstreamConfig>,
    ) -> anyhow::Result<Option<Self>> {
        let Some(config) = cluster.and_then(|cluster| cluster.discovery.clone()) else { return Ok(None) };
        let client = HttpClient::new(Arc::new(tls(&config).context(DISCOVERY)?));
        let record = config.url.clone().map(|url| RelayRecord {
            url,
            region: config.region.clone(),
            // A record without a run number is read as run 0, so no run has this number.
            run: random::number().max(1),
            draining: false,
        });
        let (own, watched) = watch::channel(record);
        let discovery = match &config.store {
            DiscoveryStore::Etcd { endpoints, prefix, lease } => {
                let etcd = EtcdConfig { endpoints: endpoints.clone(), prefix: prefix.clone(), lease: *lease };
                Discovery::Etcd(EtcdDiscovery::new(client, etcd, watched))
            }
            DiscoveryStore::List { place, interval } => Discovery::List(ListDiscovery {
                place: place.clone(),
                interval: *interval,
                client,
                own: config.url.clone(),
            }),
        };
        Ok(Some(Self { config, discovery, upstream: upstream.cloned(), own }))
    }

    /// Starts discovery, and connects `relay` to the relays that are found.
    pub fn start(self, relay: &Arc<millrace_relay::Server>) -> RunningDiscovery {
        let Self { config, discovery, upstream, own } = self;
        relay.set_discovery(describe(&config, &DiscoveryState::default()));
        // The task holds a weak reference, so that it does not keep a dropped relay alive.
        let relay = Arc::downgrade(relay);
        let (sender, mut found) = watch::channel(DiscoveryState::default());
        let kept = found.clone();
        let task = tokio::spawn(async move {
            let follow = async {
                while found.changed().await.is_ok() {
                    // The state is cloned, because the borrowed value would block the sender while the relay applies
                    // it.
                    let state = found.borrow_and_update().clone();
                    let Some(relay) = relay.upgrade() else { return };
                    relay.set_discovery(describe(&config, &state));
                    relay.set_found_peers(&peers(&config, upstream.as_ref(), &state));
                }
            };
            tokio::join!(discovery.run(sender), follow);
        });
        RunningDiscovery { own, found: kept, task }
    }
}

/// Returns the found relays that this one connects to.
fn peers(
    config: &DiscoveryConfig,
    upstream: Option<&UpstreamConfig>,
    state: &DiscoveryState,
) -> Vec<ClusterPeer> {
    let token = upstream.and_then(|upstream| upstream.token.clone()).map(access::token_file);
    let dialed = state.relays.iter().filter(|relay| relay.is_dialed_by(config.url.as_ref()));
    let peer = |relay: &RelayRecord| {
        // A relay without a region counts as near, so clusters that name no regions have no additional cost.
        let is_far = matches!((&relay.region, &config.region), (Some(its), Some(own)) if its != own);
        ClusterPeer {
            upstream: UpstreamRelay { url: relay.url.clone(), token: token.clone() },
            cost: is_far.then_some(config.region_cost),
            namespaces: config.namespaces.clone(),
        }
    };
    dialed.map(peer).collect()
}

fn describe(config: &DiscoveryConfig, state: &DiscoveryState) -> ClusterDiscoveryStatus {
    ClusterDiscoveryStatus {
        store: match &config.store {
            DiscoveryStore::Etcd { .. } => "etcd".to_owned(),
            DiscoveryStore::List { place: ListPlace::File(path), .. } => path.display().to_string(),
            // Show only the host, since the path may contain a secret.
            DiscoveryStore::List { place: ListPlace::Url(url), .. } => url.authority().to_owned(),
        },
        found: state.relays.len() as u64,
        registered: state.is_registered,
        error: state.error().unwrap_or_default().to_owned(),
        failures: state.failures,
    }
}

/// Returns the TLS settings for the store's server: trusted root certificates, and this relay's certificate as a
/// client.
fn tls(config: &DiscoveryConfig) -> anyhow::Result<ClientConfig> {
    // A store without https shows no certificate, so a host without system root certificates can use it.
    let is_plain = match &config.store {
        DiscoveryStore::Etcd { endpoints, .. } => endpoints.iter().all(|url| url.scheme() == "http"),
        DiscoveryStore::List { place: ListPlace::Url(url), .. } => url.scheme() == "http",
        DiscoveryStore::List { place: ListPlace::File(_), .. } => true,
    };
    let roots = match &config.tls_root {
        Some(path) => pem::roots(path).context("tls-root")?,
        None if is_plain => rustls::RootCertStore::empty(),
        None => pem::roots(Path::new(SYSTEM_ROOTS)).context("tls-root")?,
    };
    let builder = ClientConfig::builder_with_provider(rustls::crypto::ring::default_provider().into());
    let builder = builder.with_safe_default_protocol_versions()?.with_root_certificates(roots);
    Ok(match &config.identity {
        None => builder.with_no_client_auth(),
        Some((cert, key)) => {
            let shown = pem::pair(cert, key).context("tls-cert")?;
            builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(shown)))
        }
    })
}
