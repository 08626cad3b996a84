//! The session with the upstream relay: each relay announces its namespaces to the other.

use std::{collections::HashMap, sync::Arc};

use millrace_moq::{
    Namespace, Parameters,
    message::{PublishNamespace, RequestError},
};
use tokio::{sync::oneshot, task::JoinSet, time::Instant};
use tracing::info;

use super::{
    ask::{NamespaceChange, PeerNamespaces, ask},
    backups::AT_ONCE,
    context::SessionContext,
    publish::Publications,
};
use crate::{
    hub::{HubPublisher, NamespaceEvent, Publication},
    live::LiveTrack,
    wire::{IncomingMessage, RequestStream, SessionError},
};

/// Exchanges namespaces with the upstream relay `publisher` until the session is over.
pub async fn run(
    context: &Arc<SessionContext>,
    publisher: &Arc<dyn HubPublisher>,
    publications: &Arc<Publications>,
) -> Result<(), SessionError> {
    context.until_ready().await?;
    let _fallback = context.hub().publish(Namespace::default(), publisher, true);
    // The guard registers the upstream relay as a publisher of all namespaces that is used only where there is no other
    // publisher.
    let leave = async {
        context.until_peer_goes_away().await;
        publications.leave();
        std::future::pending().await
    };
    let take_over = async {
        take_over(context, publications).await;
        context.set_attached();
        std::future::pending().await
    };
    tokio::select! {
        result = mirror_namespaces(context, publisher) => result,
        result = announce_namespaces(context) => result,
        result = leave => result,
        result = take_over => result,
    }
}

/// Subscribes to the tracks that came from an earlier session with the upstream relay. An earlier session that is still
/// open keeps sending a track until this session has caught up. Tracks that the upstream relay refuses in this session
/// stay in the earlier session. If the earlier session was lost, subscribers wait for this session.
async fn take_over(context: &SessionContext, publications: &Arc<Publications>) {
    let now = std::time::Instant::now();
    let is_leaving = |track: &Arc<LiveTrack>| {
        track.upstreams().iter().any(|upstream| upstream.is_leaving())
            || track.subscription_count() > 0 && track.waits_for_upstream(now).is_some()
    };
    let mut asking = JoinSet::new();
    for track in context.hub().tracks().into_iter().filter(is_leaving) {
        if asking.len() >= AT_ONCE {
            asking.join_next().await;
        }
        let publications = Arc::clone(publications);
        asking.spawn(async move { publications.subscribe(track).await });
    }
    while asking.join_next().await.is_some() {}
}

/// Watches the upstream relay's namespaces, and announces them to this relay's clients.
async fn mirror_namespaces(
    context: &SessionContext,
    publisher: &Arc<dyn HubPublisher>,
) -> Result<(), SessionError> {
    let mut namespaces = match PeerNamespaces::ask(context, Namespace::default()).await {
        Ok(namespaces) => namespaces,
        Err(refused) => {
            info!(
                session = context.id(),
                reason = refused.reason,
                "the upstream relay refused to announce its namespaces: clients here do not see them"
            );
            return std::future::pending().await;
        }
    };
    let mut mirrored: HashMap<Namespace, Publication> = HashMap::new();
    loop {
        match namespaces.next().await? {
            NamespaceChange::Found(namespace, parameters) => {
                if parameters.is_some() {
                    return Err(SessionError::violation("parameters in NAMESPACE without HOP_ID in SETUP"));
                }
                // The upstream relay may announce this relay's own namespaces back to it.
                if !mirrored.contains_key(&namespace) && !context.hub().is_published_here(&namespace) {
                    let publication = context.hub().publish(namespace.clone(), publisher, false);
                    context.hub().subscribe_existing(&namespace, publisher, Instant::now).await;
                    mirrored.insert(namespace, publication);
                }
            }
            NamespaceChange::Withdrawn(namespace) => drop(mirrored.remove(&namespace)),
        }
    }
}

/// Publishes at the upstream relay each namespace that has a publisher at this relay.
async fn announce_namespaces(context: &Arc<SessionContext>) -> Result<(), SessionError> {
    let mut watch = context.hub().watch_namespaces(Namespace::default());
    // The namespaces that are published at the upstream relay, each with a sender. Dropping the sender withdraws the
    // namespace.
    let mut announced: HashMap<Namespace, oneshot::Sender<()>> = HashMap::new();
    while let Some(event) = watch.next(Instant::now).await {
        match event {
            NamespaceEvent::Published(namespace) => {
                if !context.hub().is_published_here(&namespace) || announced.contains_key(&namespace) {
                    continue; // Skips a namespace that came from the upstream relay itself, or that was listed twice.
                }
                match publish_namespace(context, &namespace).await {
                    Ok(request) => {
                        let (withdraw, withdrawn) = oneshot::channel();
                        let announced_one =
                            Announced { context: Arc::clone(context), namespace: namespace.clone(), request };
                        context.spawn(announced_one.keep(withdrawn));
                        announced.insert(namespace, withdraw);
                    }
                    Err(refused) => {
                        info!(namespace = %namespace.typed(), reason = refused.reason, "the upstream relay refused a namespace that is published at this relay")
                    }
                }
            }
            NamespaceEvent::Done(namespace) => drop(announced.remove(&namespace)),
        }
    }
    Err(SessionError::Lost("too many namespace changes at once".into()))
}

async fn publish_namespace(
    context: &SessionContext,
    namespace: &Namespace,
) -> Result<RequestStream, RequestError> {
    let request_id = context.next_request_id();
    let namespace = namespace.clone();
    let parameters = Parameters::default();
    let (request, _ok) = ask(context, PublishNamespace { request_id, namespace, parameters }).await?;
    Ok(request)
}

/// A PUBLISH_NAMESPACE request with which this relay has published a namespace at the upstream relay.
struct Announced {
    context: Arc<SessionContext>,
    namespace: Namespace,
    request: RequestStream,
}

impl Announced {
    /// Keeps the namespace published until its publisher withdraws it at this relay, or the upstream relay ends the
    /// request.
    async fn keep(mut self, mut withdrawn: oneshot::Receiver<()>) -> Result<(), SessionError> {
        loop {
            let incoming = tokio::select! {
                incoming = self.request.reader.next() => incoming?,
                _ = &mut withdrawn => {
                    self.request.cancel();
                    return Ok(());
                }
            };
            match incoming {
                IncomingMessage::GoAway(_) => {
                    // If the peer refuses the new PUBLISH_NAMESPACE, the namespace stays published by the old request.
                    if let Ok(moved) = publish_namespace(&self.context, &self.namespace).await {
                        self.request.cancel();
                        self.request = moved;
                    }
                }
                IncomingMessage::Message(other) => {
                    return Err(SessionError::misplaced(&other, "for a published namespace"));
                }
                IncomingMessage::Finished | IncomingMessage::Reset => return Ok(()),
            }
        }
    }
}
