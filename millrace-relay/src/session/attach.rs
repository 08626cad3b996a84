//! What a relay does at its upstream relay: publishes there what is published here, and learns what is
//! published there.

use std::{collections::HashMap, sync::Arc};

use millrace_proto::moq::{
    Message, Namespace, Parameters, code,
    message::{PublishNamespace, SubscribeNamespace},
};
use tracing::info;

use super::{ask::ask, context::Context};
use crate::{
    hub::{NamespaceEvent, Publication, Publisher},
    wire::{self, Incoming, RequestStream, SessionError},
};

/// Both directions, until the session is over. `publisher` is the upstream relay.
pub async fn run(context: &Context, publisher: &Arc<dyn Publisher>) -> Result<(), SessionError> {
    context.until_ready().await?;
    let _fallback = context.hub().publish(Namespace::default(), publisher, true);
    tokio::select! {
        result = mirror_namespaces(context, publisher) => result,
        result = announce_namespaces(context) => result,
    }
}

/// Follows the upstream's namespaces, and publishes them here as the upstream's.
async fn mirror_namespaces(context: &Context, publisher: &Arc<dyn Publisher>) -> Result<(), SessionError> {
    let subscribe = SubscribeNamespace {
        request_id: context.next_request_id(),
        prefix: Namespace::default(),
        parameters: Parameters::default(),
    };
    let (mut request, _ok) = match ask(context, subscribe).await {
        Ok(answered) => answered,
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
                if !context.hub().is_published(&found.suffix, context.id()) {
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
            Incoming::Finished | Incoming::Reset => return std::future::pending().await,
        }
    }
}

/// Publishes at the upstream every namespace that others publish here.
async fn announce_namespaces(context: &Context) -> Result<(), SessionError> {
    let mut watch = context.hub().watch_namespaces(Namespace::default());
    let mut announced: HashMap<Namespace, RequestStream> = HashMap::new();
    while let Some(event) = watch.events.recv().await {
        match event {
            NamespaceEvent::Published(namespace) => {
                if !context.hub().is_published(&namespace, context.id()) {
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
                    let _ = request.send.reset(wire::var(code::Reset::CANCELLED.0)); // may be over
                    request.reader.stop(code::Reset::CANCELLED.0);
                }
            }
        }
    }
    Err(SessionError::Lost("too many namespace changes at once".into()))
}
