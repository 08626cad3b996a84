//! Connects the relay to relays that discovery finds, and keeps this relay's own record in the store.

use std::{cmp::Reverse, path::Path, sync::Arc, time::Duration};

use anyhow::Context as _;
use millrace_daemon::pem;
use millrace_moq::{Namespace, code, message::RequestError};
use millrace_relay::{
    ClusterPeer, LookedUpPeers, NamespaceDirectory, UpstreamRelay,
    status::{ClusterDiscoveryStatus, LookupStatus, RegisteredRelay},
};
use millrace_relay_discovery::{
    Discovery, DiscoveryState, EtcdConfig, EtcdDirectory, EtcdDiscovery, EtcdUser, HttpClient, ListDiscovery,
    ListPlace, LookupError, LookupLimits, RelayRecord,
};
use rustls::{ClientConfig, sign::SingleCertAndKey};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
    time,
};

use crate::{
    access,
    config::{
        ClusterConfig, DISCOVERY, DiscoveryConfig, DiscoveryStore, LookupConfig, SYSTEM_ROOTS, UpstreamConfig,
    },
    random,
};

/// Longest time that a relay waits at shutdown for the store to remove its record.
const WITHDRAWAL: Duration = Duration::from_secs(3);
/// Largest number of looked-up namespaces that are kept in memory, of those that exist and of those that do not.
const MAX_LOOKED_UP: usize = 10_000;
/// Time from one look at how full the relay is to the next.
const LOOKS: Duration = Duration::from_secs(5);
/// The parts of `max-sessions`, in percent, from which on a relay's record says that it is full, and below which it
/// does not say so any more.
const FULL: (usize, usize) = (95, 85);

/// The prepared connection to the discovery store, which is not yet started.
pub struct RelayDiscovery {
    config: DiscoveryConfig,
    discovery: Discovery,
    lookup: Option<(Arc<EtcdDirectory>, mpsc::Receiver<Namespace>)>,
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
            publishes: false,
            full: false,
            cost: cluster.and_then(|cluster| cluster.cost),
        });
        let (own, watched) = watch::channel(record);
        let mut lookup = None;
        let discovery = match &config.store {
            DiscoveryStore::Etcd { endpoints, prefix, lease, user } => {
                let user = user.as_ref().map(|(name, file)| {
                    let password =
                        std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
                    anyhow::Ok(EtcdUser { name: name.clone(), password: password.trim_end().to_owned() })
                });
                let user = user.transpose().context("password-file").context(DISCOVERY)?;
                let etcd =
                    EtcdConfig { endpoints: endpoints.clone(), prefix: prefix.clone(), user, lease: *lease };
                let mut discovery = EtcdDiscovery::new(client, etcd, watched);
                if let Some(LookupConfig { rate, .. }) = config.lookup {
                    let limits = LookupLimits { entries: MAX_LOOKED_UP, per_second: rate };
                    let (directory, appeared);
                    (discovery, directory, appeared) = discovery.with_directory(limits);
                    lookup = Some((directory, appeared));
                }
                Discovery::Etcd(discovery)
            }
            DiscoveryStore::List { place, interval } => Discovery::List(ListDiscovery {
                place: place.clone(),
                interval: *interval,
                client,
                own: config.url.clone(),
            }),
        };
        Ok(Some(Self { config, discovery, lookup, upstream: upstream.cloned(), own }))
    }

    /// Starts discovery, and connects `relay` to the relays that are found.
    pub fn start(self, relay: &Arc<millrace_relay::Server>) -> RunningDiscovery {
        let Self { config, discovery, lookup, upstream, own } = self;
        relay.set_discovery(describe(&config, &DiscoveryState::default()));
        let (etcd, mut appeared) = lookup.unzip();
        if let Some(etcd) = etcd {
            relay.set_directory(Arc::new(RelayDirectory {
                etcd,
                config: config.clone(),
                upstream: upstream.clone(),
                own: own.clone(),
            }));
        }
        // The task holds a weak reference, so that it does not keep a dropped relay alive.
        let relay = Arc::downgrade(relay);
        let (sender, mut found) = watch::channel(DiscoveryState::default());
        let kept = found.clone();
        let record = own.clone();
        let task = tokio::spawn(async move {
            let follow = async {
                while found.changed().await.is_ok() {
                    // The state is cloned, because the borrowed value would block the sender while the relay applies
                    // it.
                    let state = found.borrow_and_update().clone();
                    let Some(relay) = relay.upgrade() else { return };
                    relay.set_discovery(describe(&config, &state));
                    // Relays that look up namespaces connect to each other on demand.
                    if config.lookup.is_none() {
                        let dialed = state.relays.iter().filter(|one| one.is_dialed_by(config.url.as_ref()));
                        relay.set_found_peers(&peers(&config, upstream.as_ref(), dialed));
                    }
                }
            };
            let appear = async {
                let Some(appeared) = &mut appeared else { return };
                while let (Some(namespace), Some(relay)) = (appeared.recv().await, relay.upgrade()) {
                    relay.note_registered(&namespace);
                }
            };
            let note_full = async {
                while config.lookup.is_some() {
                    time::sleep(LOOKS).await;
                    let Some(relay) = relay.upgrade() else { return };
                    let (open, most) = relay.session_count();
                    record.send_if_modified(|own| own.as_mut().is_some_and(|own| note_full(own, open, most)));
                }
            };
            tokio::join!(discovery.run(sender), follow, appear, note_full);
        });
        RunningDiscovery { own, found: kept, task }
    }
}

/// Notes in a relay's record whether it has nearly as many sessions as it may have. Returns true if that is new.
fn note_full(own: &mut RelayRecord, open: usize, most: usize) -> bool {
    let from = if own.full { FULL.1 } else { FULL.0 };
    let is_full = open * 100 >= most * from;
    std::mem::replace(&mut own.full, is_full) != is_full
}

/// The namespaces of the cluster in etcd, for a relay that looks them up.
struct RelayDirectory {
    etcd: Arc<EtcdDirectory>,
    config: DiscoveryConfig,
    upstream: Option<UpstreamConfig>,
    own: watch::Sender<Option<RelayRecord>>,
}

impl NamespaceDirectory for RelayDirectory {
    fn lookup<'a>(&'a self, namespace: &'a Namespace) -> LookedUpPeers<'a> {
        Box::pin(async {
            let mut found = self.etcd.lookup(namespace).await.map_err(|error| {
                let code = match error {
                    LookupError::Store(_) => code::Request::INTERNAL_ERROR,
                    LookupError::TooMany => code::Request::EXCESSIVE_LOAD,
                };
                RequestError::new(code, error.to_string())
            })?;
            // The relay with the longest prefix of the namespace has the publisher that is meant.
            found.sort_by_key(|(registered, relay)| {
                let rank = relay.rank(self.config.region.as_deref(), self.config.region_cost);
                (Reverse(registered.fields().len()), rank)
            });
            Ok(peers(&self.config, self.upstream.as_ref(), found.iter().map(|(_, relay)| relay)))
        })
    }

    fn set_published(&self, namespace: &Namespace, is_published: bool) {
        self.own.send_if_modified(|own| {
            is_published && own.as_mut().is_some_and(|own| !std::mem::replace(&mut own.publishes, true))
        });
        self.etcd.set_published(namespace, is_published);
    }

    fn recall(&self, namespace: &Namespace) -> Option<Vec<RegisteredRelay>> {
        let known = self.etcd.recall(namespace)?.into_iter();
        let described = known.map(|(key, usable)| RegisteredRelay {
            host: key.relay,
            namespace: key.namespace.typed().to_string(),
            usable,
        });
        Some(described.collect())
    }

    fn status(&self) -> LookupStatus {
        self.etcd.status()
    }
}

/// Returns the settings for sessions with these relays.
fn peers<'a>(
    config: &DiscoveryConfig,
    upstream: Option<&UpstreamConfig>,
    relays: impl Iterator<Item = &'a RelayRecord>,
) -> Vec<ClusterPeer> {
    let token = upstream.and_then(|upstream| upstream.token.clone()).map(access::token_file);
    let peer = |relay: &RelayRecord| {
        // A relay without a region counts as near, so clusters that name no regions have no additional cost.
        let is_far = matches!((&relay.region, &config.region), (Some(its), Some(own)) if its != own);
        ClusterPeer {
            upstream: UpstreamRelay { url: relay.url.clone(), token: token.clone() },
            cost: is_far.then_some(config.region_cost),
            namespaces: config.namespaces.clone(),
        }
    };
    relays.map(peer).collect()
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
        lookup: None, // the relay's status adds it
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
