//! What a relay does at its upstream relay: publishes there what is published here, and learns what is
//! published there.

use std::{collections::HashMap, sync::Arc};

use millrace_moq::{
    Message, Namespace, Parameters,
    message::{PublishNamespace, RequestError, SubscribeNamespace},
};
use tokio::{sync::oneshot, task::JoinSet, time::Instant};
use tracing::info;

use super::{ask::ask, backups::AT_ONCE, context::Context, publish::Publications};
use crate::{
    hub::{NamespaceEvent, Publication, Publisher},
    live::LiveTrack,
    wire::{Incoming, RequestStream, SessionError},
};

/// Both directions, until the session is over. `publisher` is the upstream relay.
pub async fn run(
    context: &Arc<Context>,
    publisher: &Arc<dyn Publisher>,
    publications: &Arc<Publications>,
) -> Result<(), SessionError> {
    context.until_ready().await?;
    let _fallback = context.hub().publish(Namespace::default(), publisher, true);
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

/// Subscribes to what comes from a session with the upstream relay that is being left, and to what came from one that is
/// lost. The one goes on until this one has come as far, and what is refused here stays there to its end; subscribers of the other
/// wait for it.
async fn take_over(context: &Context, publications: &Arc<Publications>) {
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

/// Follows the upstream's namespaces, and publishes them here as the upstream's.
async fn mirror_namespaces(context: &Context, publisher: &Arc<dyn Publisher>) -> Result<(), SessionError> {
    let mut request = match subscribe_namespaces(context).await {
        Ok(request) => request,
        Err(refused) => {
            info!(session = context.id(), reason = refused.reason, "the upstream tells no namespaces");
            return std::future::pending().await;
        }
    };
    let mut mirrored: HashMap<Namespace, Publication> = HashMap::new();
    loop {
        match request.reader.next().await? {
            Incoming::Message(Message::Namespace(found)) => {
                // Our own announcements come back to us.
                if !mirrored.contains_key(&found.suffix) && !context.hub().is_published_here(&found.suffix) {
                    let publication = context.hub().publish(found.suffix.clone(), publisher, false);
                    context.hub().subscribe_existing(&found.suffix, publisher, Instant::now).await;
                    mirrored.insert(found.suffix, publication);
                }
            }
            Incoming::Message(Message::NamespaceDone(done)) => {
                mirrored.remove(&done.suffix);
            }
            Incoming::Message(other) => {
                return Err(SessionError::violation(format!("{} about namespaces", other.name())));
            }
            // It says all of them anew. Before that, what it has said stays.
            Incoming::GoAway(_) => {
                if let Ok(moved) = subscribe_namespaces(context).await {
                    request.cancel();
                    request = moved;
                }
            }
            Incoming::Finished | Incoming::Reset => return std::future::pending().await,
        }
    }
}

async fn subscribe_namespaces(context: &Context) -> Result<RequestStream, RequestError> {
    let request_id = context.next_request_id();
    let (prefix, parameters) = (Namespace::default(), Parameters::default());
    let (request, _ok) = ask(context, SubscribeNamespace { request_id, prefix, parameters }).await?;
    Ok(request)
}

/// Publishes at the upstream every namespace that others publish here.
async fn announce_namespaces(context: &Arc<Context>) -> Result<(), SessionError> {
    let mut watch = context.hub().watch_namespaces(Namespace::default());
    // Dropping one withdraws it.
    let mut announced: HashMap<Namespace, oneshot::Sender<()>> = HashMap::new();
    while let Some(event) = watch.next(Instant::now).await {
        match event {
            NamespaceEvent::Published(namespace) => {
                if !context.hub().is_published_here(&namespace) || announced.contains_key(&namespace) {
                    continue; // the upstream's own, or told twice
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
                        info!(namespace = %namespace.typed(), reason = refused.reason, "not taken upstream")
                    }
                }
            }
            NamespaceEvent::Done(namespace) => drop(announced.remove(&namespace)),
        }
    }
    Err(SessionError::Lost("too many namespace changes at once".into()))
}

async fn publish_namespace(context: &Context, namespace: &Namespace) -> Result<RequestStream, RequestError> {
    let request_id = context.next_request_id();
    let (namespace, parameters) = (namespace.clone(), Parameters::default());
    let (request, _ok) = ask(context, PublishNamespace { request_id, namespace, parameters }).await?;
    Ok(request)
}

/// A namespace that is published at the upstream.
struct Announced {
    context: Arc<Context>,
    namespace: Namespace,
    request: RequestStream,
}

impl Announced {
    /// Until it is withdrawn, or the upstream wants it no more.
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
                Incoming::GoAway(_) => {
                    // Refused: it stays where it is.
                    if let Ok(moved) = publish_namespace(&self.context, &self.namespace).await {
                        self.request.cancel();
                        self.request = moved;
                    }
                }
                Incoming::Message(other) => {
                    return Err(SessionError::violation(format!(
                        "{} about a namespace of ours",
                        other.name()
                    )));
                }
                Incoming::Finished | Incoming::Reset => return Ok(()),
            }
        }
    }
}
