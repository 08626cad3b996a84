//! What a relay does at its upstream relay: publishes there what is published here, and learns what is
//! published there.

use std::{collections::HashMap, sync::Arc};

use millrace_proto::moq::{
    Message, Namespace, Parameters,
    message::{PublishNamespace, RequestError, SubscribeNamespace},
};
use tokio::task::JoinSet;
use tracing::info;

use super::{ask::ask, backups::AT_ONCE, context::Context, publish::Publications};
use crate::{
    hub::{NamespaceEvent, Publication, Publisher},
    live::LiveTrack,
    wire::{Incoming, RequestStream, SessionError},
};

/// Both directions, until the session is over. `publisher` is the upstream relay.
pub async fn run(
    context: &Context,
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

/// Subscribes to what comes from a session with the upstream relay that is being left. That goes on until this one has come
/// as far; what is refused here stays there to its end.
async fn take_over(context: &Context, publications: &Arc<Publications>) {
    let is_leaving = |track: &Arc<LiveTrack>| track.upstreams().iter().any(|upstream| upstream.is_leaving());
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
async fn announce_namespaces(context: &Context) -> Result<(), SessionError> {
    let mut watch = context.hub().watch_namespaces(Namespace::default());
    let mut announced: HashMap<Namespace, RequestStream> = HashMap::new();
    while let Some(event) = watch.events.recv().await {
        match event {
            NamespaceEvent::Published(namespace) => {
                if !context.hub().is_published_here(&namespace) {
                    continue; // the upstream's own
                }
                let publish = PublishNamespace {
                    request_id: context.next_request_id(),
                    namespace: namespace.clone(),
                    parameters: Parameters::default(),
                };
                match ask(context, publish).await {
                    Ok((request, _ok)) => drop(announced.insert(namespace, request)),
                    Err(refused) => info!(%namespace, reason = refused.reason, "not taken upstream"),
                }
            }
            NamespaceEvent::Done(namespace) => {
                if let Some(mut request) = announced.remove(&namespace) {
                    request.cancel();
                }
            }
        }
    }
    Err(SessionError::Lost("too many namespace changes at once".into()))
}
