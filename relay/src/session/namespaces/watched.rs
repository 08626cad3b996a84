//! Answers a SUBSCRIBE_NAMESPACE with namespaces, and with their routes if the peer is in the cluster.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use millrace_access::grant::Resource;
use millrace_moq::{
    Namespace,
    message::{NamespaceDone, NamespaceFound},
};
use millrace_relay_cluster::Announcement;
use tokio::time::Instant;

use super::claim::PrefixClaim;
use crate::{
    hub::{NamespaceEvent, NamespaceWatch, RouteWatch},
    session::{context::SessionContext, mesh},
    wire::{self, Answers, SessionError},
};

/// A SUBSCRIBE_NAMESPACE, and the namespaces that were reported to its peer.
pub struct WatchedNamespace {
    context: Arc<SessionContext>,
    pub claim: PrefixClaim,
    source: ChangeSource,
}

enum ChangeSource {
    /// The peer has sent no HOP_ID in SETUP, so namespaces are reported to it without routes.
    Namespaces { watch: NamespaceWatch<NamespaceEvent>, told: HashSet<Namespace> },
    /// The peer has sent HOP_ID in SETUP, so namespaces are reported to it with the hop path and cost of their routes.
    Routes { watch: RouteWatch, told: HashMap<Namespace, Announcement> },
}

/// A change that may have to be reported to the peer.
pub enum NamespaceChange {
    Event(NamespaceEvent),
    /// The routes to this namespace may have changed, so the hop path and cost for the peer may differ.
    Routes(Namespace),
}

impl NamespaceChange {
    /// Returns the changed namespace as the resource that the peer needs the right to watch.
    pub fn about(&self) -> Resource {
        let (Self::Event(NamespaceEvent::Published(namespace) | NamespaceEvent::Done(namespace))
        | Self::Routes(namespace)) = self;
        Resource::namespace(namespace)
    }
}

impl ChangeSource {
    fn new(context: &SessionContext, prefix: &Namespace) -> Self {
        let hub = context.hub();
        match context.hop() {
            Some(_) => Self::Routes { watch: hub.watch_routes(prefix.clone()), told: HashMap::new() },
            None => Self::Namespaces { watch: hub.watch_namespaces(prefix.clone()), told: HashSet::new() },
        }
    }
}

impl WatchedNamespace {
    pub fn new(context: &Arc<SessionContext>, claim: PrefixClaim) -> Self {
        let source = ChangeSource::new(context, claim.prefix());
        Self { context: Arc::clone(context), claim, source }
    }

    /// Starts over with a new prefix: all namespaces below it will be sent to the peer.
    pub fn begin_again(&mut self) {
        self.source = ChangeSource::new(&self.context, self.claim.prefix());
    }

    /// Returns the next change that may have to be reported to the peer. Returns `None` if the peer reads too slowly.
    /// Cancel safe.
    pub async fn next(&mut self, pace: impl Fn() -> Instant) -> Option<NamespaceChange> {
        match &mut self.source {
            ChangeSource::Namespaces { watch, .. } => watch.next(pace).await.map(NamespaceChange::Event),
            ChangeSource::Routes { watch, .. } => Some(NamespaceChange::Routes(watch.next(pace).await)),
        }
    }

    /// Sends a change to the peer. NAMESPACE_DONE is sent only for a namespace that was reported to the peer.
    pub async fn tell(&mut self, change: NamespaceChange, send: &mut Answers) -> Result<(), SessionError> {
        let suffix = |namespace: &Namespace| namespace.suffix_after(self.claim.prefix());
        match (change, &mut self.source) {
            (
                NamespaceChange::Event(NamespaceEvent::Published(namespace)),
                ChangeSource::Namespaces { told, .. },
            ) => {
                if let Some(suffix) = suffix(&namespace).filter(|_| told.insert(namespace)) {
                    wire::send(send, NamespaceFound { suffix, parameters: None }).await?;
                }
            }
            (
                NamespaceChange::Event(NamespaceEvent::Done(namespace)),
                ChangeSource::Namespaces { told, .. },
            ) => {
                if let Some(suffix) = suffix(&namespace).filter(|_| told.remove(&namespace)) {
                    wire::send(send, NamespaceDone { suffix }).await?;
                }
            }
            (NamespaceChange::Routes(namespace), ChangeSource::Routes { told, .. }) => {
                let Some(suffix) = suffix(&namespace) else { return Ok(()) };
                let neighbour = self.context.neighbour();
                match self.context.hub().announcement(&namespace, neighbour) {
                    // A watch reports each change of routes. A message is sent only if the hop path or the cost for
                    // this peer differs.
                    Some(route) if told.get(&namespace) != Some(&route) => {
                        let parameters = Some(mesh::parameters(&route));
                        told.insert(namespace, route);
                        wire::send(send, NamespaceFound { suffix, parameters }).await?;
                    }
                    None if told.remove(&namespace).is_some() => {
                        wire::send(send, NamespaceDone { suffix }).await?;
                    }
                    _ => {}
                }
            }
            _ => {}
        }
        Ok(())
    }
}
