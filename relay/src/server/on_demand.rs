//! Sessions on demand: the relay connects to another one when somebody asks for a namespace that the other one has
//! registered in a store.
//!
//! What the store says is a hint. A namespace is used once the other relay has announced it in its session, and
//! [`ClusterPeer::namespaces`] says which it may announce.

use std::{
    collections::{HashMap, HashSet},
    pin::Pin,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use millrace_moq::{Namespace, code, message::RequestError};
use millrace_relay_status as status;
use parking_lot::Mutex;
use tokio::{sync::mpsc, task::JoinSet, time};
use tracing::{debug, info};

use super::{Server, ServerShared, peers::KeptPeer};
use crate::{
    ClusterPeer, NamespaceDirectory,
    hub::{NamespaceSeeker, SubscribeAnswer},
    session::PeerTerms,
};

/// The most relays that are tried for one request, the nearest first.
const MAX_TRIED: usize = 3;
/// The longest time from the connection to another relay until it has announced the namespace that it is wanted for.
const ANNOUNCEMENT: Duration = Duration::from_secs(3);
/// How long a relay is not tried again for a namespace that it did not announce.
const REST: Duration = Duration::from_secs(5);
/// The most namespaces whose attempts are remembered.
const MAX_REMEMBERED: usize = 1000;

/// The store that the relay looks up namespaces in, and its attempts to find them.
#[derive(Default)]
pub struct Demands {
    directory: OnceLock<StoreLink>,
    tried: Mutex<HashMap<Namespace, LookupAttempts>>,
    /// Namespaces that are looked for without a request that waits.
    wanted: Mutex<HashSet<Namespace>>,
}

struct StoreLink {
    directory: Arc<dyn NamespaceDirectory>,
    /// Relays to begin a session with.
    demanded: mpsc::UnboundedSender<Arc<KeptPeer>>,
}

/// The relays that were tried last for a namespace, by their host, each with the outcome.
struct LookupAttempts {
    at: Instant,
    outcomes: Vec<(String, AttemptOutcome)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum AttemptOutcome {
    Announced,
    /// The relay cannot be used, for this reason.
    Failed(String),
}

impl Demands {
    /// Returns the reason why the relay is not tried, because it failed a moment ago.
    fn failed_lately(&self, namespace: &Namespace, host: &str) -> Option<String> {
        let tried = self.tried.lock();
        let attempts = tried.get(namespace).filter(|attempts| attempts.at.elapsed() < REST)?;
        let outcome = attempts.outcomes.iter().find(|(other, _)| other == host);
        match outcome {
            Some((_, AttemptOutcome::Failed(reason))) => Some(reason.clone()),
            _ => None,
        }
    }

    fn note(&self, namespace: &Namespace, outcomes: Vec<(String, AttemptOutcome)>) {
        let mut tried = self.tried.lock();
        if tried.len() >= MAX_REMEMBERED && !tried.contains_key(namespace) {
            let oldest =
                tried.iter().min_by_key(|(_, attempts)| attempts.at).map(|(namespace, _)| namespace.clone());
            oldest.and_then(|oldest| tried.remove(&oldest));
        }
        tried.insert(namespace.clone(), LookupAttempts { at: Instant::now(), outcomes });
    }
}

impl Server {
    /// Registers the namespaces of this relay's publishers in `directory`, and looks up those of other relays there.
    /// The relay connects to other relays on demand, if [`RelayCluster::on_demand`](crate::RelayCluster::on_demand)
    /// says for how long. Has an effect once.
    pub fn set_directory(&self, directory: Arc<dyn NamespaceDirectory>) {
        let (demanded, mut peers) = mpsc::unbounded_channel();
        let link = StoreLink { directory: Arc::clone(&directory), demanded };
        let shared = Arc::clone(&self.shared);
        if shared.demands.directory.set(link).is_err() {
            return;
        }
        let seeker = Arc::downgrade(&(Arc::clone(&shared) as Arc<dyn NamespaceSeeker>));
        shared.hub.set_seeker(seeker);
        let mut tasks = self.tasks.lock();
        let hub = Arc::clone(&shared.hub);
        tasks.spawn(async move {
            let mut watch = hub.watch_routes(Namespace::default());
            loop {
                let namespace = watch.next(time::Instant::now).await;
                directory.set_published(&namespace, hub.is_published_here(&namespace));
            }
        });
        tasks.spawn(async move {
            // Dropping the set of tasks aborts them.
            let mut sessions = JoinSet::new();
            while let Some(peer) = peers.recv().await {
                while sessions.try_join_next().is_some() {} // removes tasks that have ended
                sessions.spawn(Arc::clone(&shared).keep_peer(peer));
            }
        });
    }

    /// Tells the relay that a namespace that it has looked up in vain is registered now.
    pub fn note_registered(&self, namespace: &Namespace) {
        self.shared.hub.wake_waiting(namespace);
    }
}

impl ServerShared {
    /// Describes what the store says of a namespace, and the last attempts to reach it. Returns `None` if this relay
    /// looks up no namespaces.
    pub(super) fn describe_lookup(&self, namespace: &Namespace) -> Option<status::NamespaceLookupStatus> {
        let link = self.demands.directory.get()?;
        let registered = link.directory.recall(namespace);
        let tried = self.demands.tried.lock();
        let attempts = tried.get(namespace);
        let outcome = |(host, outcome): &(String, AttemptOutcome)| status::TriedRelay {
            host: host.clone(),
            failure: match outcome {
                AttemptOutcome::Announced => String::new(),
                AttemptOutcome::Failed(reason) => reason.clone(),
            },
        };
        Some(status::NamespaceLookupStatus {
            known: registered.is_some(),
            registered: registered.unwrap_or_default(),
            tried: attempts.iter().flat_map(|attempts| attempts.outcomes.iter().map(outcome)).collect(),
            tried_s: attempts.map_or(0, |attempts| attempts.at.elapsed().as_secs()),
        })
    }

    pub(super) fn lookup_status(&self) -> Option<status::LookupStatus> {
        self.demands.directory.get().map(|link| link.directory.status())
    }

    async fn find_relay(&self, namespace: &Namespace) -> SubscribeAnswer {
        let Some(link) = self.demands.directory.get() else { return Ok(()) };
        let relays = link.directory.lookup(namespace).await?;
        let mut outcomes = Vec::new();
        for relay in relays.iter().take(MAX_TRIED) {
            let host = relay.upstream.url.authority().to_owned();
            let failure = match self.demands.failed_lately(namespace, &host) {
                None => self.reach_relay(link, relay, namespace).await.err(),
                lately => lately,
            };
            let Some(failure) = failure else {
                outcomes.push((host, AttemptOutcome::Announced));
                self.demands.note(namespace, outcomes);
                return Ok(());
            };
            debug!(host, namespace = %namespace.typed(), failure, "a relay that has registered a namespace cannot be used for it");
            outcomes.push((host, AttemptOutcome::Failed(failure)));
        }
        let Some((host, AttemptOutcome::Failed(failure))) = outcomes.last().cloned() else {
            return Err(self.hub.absent());
        };
        // Failures that were only repeated do not begin the rest anew.
        if outcomes.iter().any(|(host, _)| self.demands.failed_lately(namespace, host).is_none()) {
            self.demands.note(namespace, outcomes);
        }
        let reason = format!("{host} has registered this namespace, and cannot be used: {failure}");
        Err(RequestError::new(code::Request::DOES_NOT_EXIST, reason))
    }

    /// Waits until a relay has announced the namespace or a prefix of it. Begins a session with it if there is none.
    async fn reach_relay(
        &self,
        link: &StoreLink,
        relay: &ClusterPeer,
        namespace: &Namespace,
    ) -> Result<(), String> {
        let terms = PeerTerms { cost: relay.cost, namespaces: relay.namespaces.clone() };
        if !namespace.prefixes().any(|prefix| terms.allow(&prefix)) {
            return Err("namespaces in [discovery] does not allow it to announce this one".to_owned());
        }
        let announced = self.hub.await_publisher(namespace);
        let (peer, is_new) = self.peers.demand(relay).ok_or("too many sessions with other relays")?;
        if self.hub.has_publisher(namespace) {
            return Ok(());
        }
        if is_new {
            info!(host = relay.upstream.url.authority(), namespace = %namespace.typed(), "connecting to a relay of the cluster, which has a namespace that is asked for");
            let _ = link.demanded.send(peer.clone()); // fails only if the relay ends
        }
        tokio::select! {
            () = announced => Ok(()),
            failure = peer.failure() => Err(failure),
            () = time::sleep(ANNOUNCEMENT) => {
                Err(format!("it has not announced the namespace within {} s", ANNOUNCEMENT.as_secs()))
            }
        }
    }
}

impl NamespaceSeeker for ServerShared {
    fn seek(self: Arc<Self>, namespace: Namespace) -> Pin<Box<dyn Future<Output = SubscribeAnswer> + Send>> {
        Box::pin(async move { self.find_relay(&namespace).await })
    }

    fn want(self: Arc<Self>, namespace: Namespace) {
        if !self.demands.wanted.lock().insert(namespace.clone()) {
            return;
        }
        tokio::spawn(async move {
            let _ = self.find_relay(&namespace).await; // The attempts are noted, and nobody waits for the answer.
            self.demands.wanted.lock().remove(&namespace);
        });
    }
}
