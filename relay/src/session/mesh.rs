//! A session with a relay of the cluster that this relay has connected to. Both relays announce their routes to each
//! other, with hop path and cost (draft-lcurley-moq-cluster-01).
//!
//! The relay that accepted the connection needs no code here. It answers SUBSCRIBE_NAMESPACE and PUBLISH_NAMESPACE of
//! this relay as it does for any peer that has sent HOP_ID.

use std::{collections::HashMap, sync::Arc};

use millrace_moq::{
    Message, Namespace, Parameters,
    message::{PublishNamespace, RequestError, RequestUpdate},
};
use millrace_relay_cluster::{Announcement, Neighbour};
use millrace_transport::Health;
use parking_lot::Mutex;
use tokio::{
    sync::{Semaphore, watch},
    task::JoinSet,
    time::Instant,
};
use tracing::{debug, info, warn};

use super::{
    ask::{NamespaceChange, PeerNamespaces, ask},
    context::SessionContext,
};
use crate::{
    hub::{HubPublisher, OperatorCounters, RoutePublication},
    wire::{self, IncomingMessage, RequestStream, SessionError},
};

/// The most PUBLISH_NAMESPACE requests that wait for their answers at the same time.
const AT_ONCE: usize = 64;

/// Exchanges routes with the peer `relay` until the session is over.
pub async fn run(context: &Arc<SessionContext>, relay: &Arc<dyn HubPublisher>) -> Result<(), SessionError> {
    context.until_ready().await?;
    let Some(hop) = context.hop() else {
        warn!(
            session = context.id(),
            "the peer speaks no cluster extension (no HOP_ID in its SETUP): no routes are exchanged with it"
        );
        return std::future::pending().await;
    };
    info!(session = context.id(), hop = %hop.id, cost = context.link_cost(), "exchanging routes with a relay of the cluster");
    let _registration = context.hub().register_relay(relay);
    tokio::select! {
        result = learn(context) => result,
        result = announce(context) => result,
        never = watch_health(context) => match never {},
    }
}

/// Marks the peer, a relay of the cluster or a publisher, as suspect while it does not answer, and once its session is
/// about to end ([`SessionContext::is_ending`]). Routes of a suspect peer are used only if there is no other.
pub async fn watch_health(context: &SessionContext) -> std::convert::Infallible {
    let mut health = context.connection().watch();
    loop {
        tokio::select! {
            changed = health.changed() => {
                let is_dead = changed == Health::Dead;
                let session = context.id();
                match (context.is_relay(), is_dead) {
                    (true, true) => warn!(session, "a relay of the cluster does not answer: routes through other relays are preferred"),
                    (true, false) => info!(session, "the relay of the cluster answers again"),
                    (false, true) => warn!(session, "a publisher does not answer: its tracks come from other relays of the cluster that have them"),
                    (false, false) => info!(session, "the publisher answers again"),
                }
                if is_dead {
                    context.hub().doubt(session);
                }
                // The peer of a session that is about to end stays suspect even if it answers.
                context.hub().set_suspect(context.id(), is_dead || context.is_ending());
            }
            _ = context.until_peer_goes_away() => {
                context.hub().set_suspect(context.id(), true);
                return std::future::pending().await;
            }
        }
    }
}

/// The routes that a peer has announced, by their namespaces.
type PeerRoutes = HashMap<Namespace, RoutePublication>;

/// Receives the peer's routes, and adds them to the route table. The peer is asked for the namespaces that it may
/// announce here and for no others, so that its rules need not allow this relay more than that.
async fn learn(context: &Arc<SessionContext>) -> Result<(), SessionError> {
    let prefixes = context.terms().map(|terms| terms.prefixes()).unwrap_or_default();
    let routes: Arc<Mutex<PeerRoutes>> = Arc::default();
    let mut lists = JoinSet::new();
    for prefix in prefixes {
        let context = Arc::clone(context);
        let routes = Arc::clone(&routes);
        lists.spawn(async move { learn_below(&context, prefix, &routes).await });
    }
    match lists.join_next().await {
        Some(ended) => ended.unwrap_or_else(|error| Err(SessionError::Lost(error.to_string()))),
        None => std::future::pending().await,
    }
}

/// Receives the peer's routes to namespaces below `prefix`.
async fn learn_below(
    context: &Arc<SessionContext>,
    prefix: Namespace,
    routes: &Mutex<PeerRoutes>,
) -> Result<(), SessionError> {
    let asked = prefix.typed().to_string();
    let mut namespaces = match PeerNamespaces::ask(context, prefix).await {
        Ok(namespaces) => namespaces,
        Err(refused) => {
            warn!(
                session = context.id(),
                prefix = asked,
                reason = refused.reason,
                "the relay of the cluster refused SUBSCRIBE_NAMESPACE, so its routes are unknown: its rules must let this relay subscribe to all that `namespaces` names here, or to everything (`**`) without `namespaces`"
            );
            return std::future::pending().await;
        }
    };
    loop {
        match namespaces.next().await? {
            NamespaceChange::Found(namespace, parameters) => {
                if let Some(announcement) = context.announcement_of(&parameters.unwrap_or_default())? {
                    take(context, &mut routes.lock(), namespace, announcement);
                }
            }
            NamespaceChange::Withdrawn(namespace) => drop(routes.lock().remove(&namespace)),
        }
    }
}

/// Adds or updates a route from a NAMESPACE message, if the peer may announce the namespace.
fn take(context: &SessionContext, routes: &mut PeerRoutes, namespace: Namespace, announcement: Announcement) {
    let hub = context.hub();
    let is_allowed = context.terms().is_none_or(|terms| terms.allow(&namespace)) && !namespace.is_forbidden();
    if !is_allowed || namespace.is_session_level() {
        OperatorCounters::count(&hub.counters.routes_refused);
        debug!(session = context.id(), namespace = %namespace.typed(), "ignoring a route: the relay of the cluster is not allowed to announce this namespace");
        return;
    }
    let session = context.id();
    let typed = namespace.typed().to_string();
    let taken = match routes.get(&namespace) {
        Some(route) => route.update(announcement),
        None => {
            let (route, taken) =
                hub.publish_route(namespace.clone(), session, announcement, context.link_cost());
            // The guard of a refused route is kept, since a later update of the route may be accepted. The number of
            // routes is bounded.
            if taken.is_ok() || routes.len() < hub.limits.max_routes {
                routes.insert(namespace, route);
            }
            taken
        }
    };
    if let Err(refused) = taken {
        debug!(session, namespace = typed, reason = %refused, "ignoring a route of a relay of the cluster");
    }
}

/// Returns the message parameters that announce a route with this hop path and cost.
pub fn parameters(announcement: &Announcement) -> Parameters {
    let route_cost = Some(announcement.cost).filter(|cost| *cost > 0);
    Parameters { hop_path: Some(announcement.path.clone()), route_cost, ..Parameters::default() }
}

/// Announces this relay's routes to the peer.
async fn announce(context: &Arc<SessionContext>) -> Result<(), SessionError> {
    let mut watch = context.hub().watch_routes(Namespace::default());
    let slots = Arc::new(Semaphore::new(AT_ONCE));
    // The namespaces that are announced to the peer, each with a sender of changes. Dropping the sender withdraws the
    // namespace.
    let mut announced: HashMap<Namespace, watch::Sender<Announcement>> = HashMap::new();
    loop {
        let namespace = watch.next(Instant::now).await;
        let neighbour: Neighbour = context.neighbour();
        let Some(announcement) = context.hub().announcement(&namespace, neighbour) else {
            announced.remove(&namespace);
            continue;
        };
        // If the peer refused or ended the earlier PUBLISH_NAMESPACE, this change sends a new one.
        if let Some(request) = announced.get(&namespace).filter(|request| !request.is_closed()) {
            request.send_if_modified(|said| {
                let is_news = *said != announcement;
                said.clone_from(&announcement);
                is_news
            });
            continue;
        }
        let (sender, changes) = watch::channel(announcement);
        announced.insert(namespace.clone(), sender);
        let request =
            Announcing { context: Arc::clone(context), namespace, changes, slots: Arc::clone(&slots) };
        context.spawn(request.run());
    }
}

/// A PUBLISH_NAMESPACE request that announces a route to the peer.
struct Announcing {
    context: Arc<SessionContext>,
    namespace: Namespace,
    /// The hop path and the cost that are announced to the peer. When its sender is dropped, the namespace is
    /// withdrawn.
    changes: watch::Receiver<Announcement>,
    slots: Arc<Semaphore>,
}

impl Announcing {
    async fn run(mut self) -> Result<(), SessionError> {
        let (mut request, mut said) = match self.publish().await {
            Ok(published) => published,
            Err(refused) => {
                debug!(
                    session = self.context.id(),
                    namespace = %self.namespace.typed(),
                    reason = refused.reason,
                    "a relay of the cluster refused a route"
                );
                return Ok(());
            }
        };
        let mut awaited = false;
        loop {
            let incoming = tokio::select! {
                incoming = request.reader.next() => incoming?,
                // Only one REQUEST_UPDATE may be unanswered at a time. Changes in the meantime go into the next update.
                changed = self.changes.changed(), if !awaited => {
                    if changed.is_err() {
                        request.cancel();
                        return Ok(());
                    }
                    let next = self.changes.borrow_and_update().clone();
                    awaited = self.update(&mut request, &said, &next).await?;
                    said = next;
                    continue;
                }
            };
            match incoming {
                IncomingMessage::GoAway(_) => {
                    // If the peer refuses the new PUBLISH_NAMESPACE, the old request stays.
                    if let Ok((moved, again)) = self.publish().await {
                        request.cancel();
                        (request, said, awaited) = (moved, again, false);
                    }
                }
                IncomingMessage::Message(Message::RequestOk(_)) if awaited => awaited = false,
                // REQUEST_ERROR also ends the request. The next change of the route sends a new PUBLISH_NAMESPACE.
                IncomingMessage::Message(Message::RequestError(_)) if awaited => return Ok(()),
                IncomingMessage::Message(other) => {
                    return Err(SessionError::misplaced(&other, "for a published namespace"));
                }
                IncomingMessage::Finished | IncomingMessage::Reset => return Ok(()),
            }
        }
    }

    /// Sends PUBLISH_NAMESPACE with the route's current hop path and cost.
    async fn publish(&mut self) -> Result<(RequestStream, Announcement), RequestError> {
        let _slot = self.slots.acquire().await;
        let said = self.changes.borrow_and_update().clone();
        let request_id = self.context.next_request_id();
        let message =
            PublishNamespace { request_id, namespace: self.namespace.clone(), parameters: parameters(&said) };
        let (request, _ok) = ask(&self.context, message).await?;
        Ok((request, said))
    }

    /// Sends the changed parameters in REQUEST_UPDATE. Returns false if nothing has changed, so that no update was
    /// sent.
    async fn update(
        &self,
        request: &mut RequestStream,
        said: &Announcement,
        next: &Announcement,
    ) -> Result<bool, SessionError> {
        let hop_path = Some(&next.path).filter(|path| **path != said.path).cloned();
        // A parameter that is missing in a REQUEST_UPDATE keeps its value.
        let route_cost = Some(next.cost).filter(|cost| *cost != said.cost);
        if hop_path.is_none() && route_cost.is_none() {
            return Ok(false);
        }
        let parameters = Parameters { hop_path, route_cost, ..Parameters::default() };
        let request_id = self.context.next_request_id();
        wire::send(&mut request.send, RequestUpdate { request_id, parameters }).await?;
        Ok(true)
    }
}
