//! Requests about namespaces: PUBLISH_NAMESPACE, SUBSCRIBE_NAMESPACE, SUBSCRIBE_TRACKS.

mod claim;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use bytes::BytesMut;
use millrace_moq::{
    Message, Namespace, Parameters, TrackName, code,
    message::{
        NamespaceDone, NamespaceFound, PublishNamespace, PublishSkipped, RequestError, RequestOk,
        SubscribeNamespace, SubscribeTracks,
    },
    param::Scope,
};
use parking_lot::Mutex;
use tokio::time::Instant as Clock;
use tracing::{debug, info};

use self::claim::{Claim, Claims};
use super::{
    context::Context, filters::without_range_filters, publish::Publications, rights::request_error,
    subscribe::Subscriptions, uses::Kind,
};
use crate::{
    access::{
        grant::{Action, Resource},
        rights::Rights,
    },
    hub::{NamespaceEvent, Publisher},
    live::LiveTrack,
    wire::{self, Answers, Incoming, RequestStream, SessionError},
};

/// How long a subscriber may take to grant a request stream for a PUBLISH before PUBLISH_SKIPPED.
const STREAM_CREDIT_TIMEOUT: Duration = Duration::from_millis(500);

/// What the peer of one session publishes and watches.
pub struct Namespaces {
    context: Arc<Context>,
    /// The peer, as those find it who look for what it publishes.
    publisher: Arc<dyn Publisher>,
    publications: Arc<Publications>,
    subscriptions: Arc<Subscriptions>,
    /// How many requests publish each.
    published: Mutex<HashMap<Namespace, usize>>,
    watched: Arc<Claims>,
    watched_tracks: Arc<Claims>,
}

impl Namespaces {
    pub fn new(
        context: Arc<Context>,
        publisher: Arc<dyn Publisher>,
        publications: Arc<Publications>,
        subscriptions: Arc<Subscriptions>,
    ) -> Arc<Self> {
        Arc::new(Self {
            context,
            publisher,
            publications,
            subscriptions,
            published: Mutex::default(),
            watched: Arc::default(),
            watched_tracks: Arc::default(),
        })
    }

    /// Whether the peer publishes any namespace.
    pub fn is_publisher(&self) -> bool {
        !self.published.lock().is_empty()
    }

    /// Serves PUBLISH_NAMESPACE until it is withdrawn.
    pub async fn serve_publish(
        &self,
        publish: PublishNamespace,
        mut stream: RequestStream,
        rights: &Arc<Rights>,
    ) -> Result<(), SessionError> {
        let PublishNamespace { namespace, .. } = publish;
        let session = self.context.id();
        let _publishing = self.context.authority().publishing(&namespace, rights);
        let _use = self.context.uses().begin(Kind::Subscription);
        // Before the answer: after it, everybody finds the publisher.
        let publication = self.context.hub().publish(namespace.clone(), &self.publisher, false);
        self.context.hub().subscribe_existing(&namespace, &self.publisher, || self.pace()).await;
        wire::send(&mut stream.send, RequestOk::default()).await?;
        info!(session, namespace = %namespace.typed(), "namespace published");
        *self.published.lock().entry(namespace.clone()).or_default() += 1;
        let result = self.until_withdrawn(&mut stream).await;
        self.forget(&namespace);
        drop(publication);
        info!(session, namespace = %namespace.typed(), "namespace withdrawn");
        let _ = stream.send.finish(); // stopped or reset by the peer
        result
    }

    /// When the peer may cause as much work as one more request does.
    fn pace(&self) -> Clock {
        self.context.authority().reserve(1).into()
    }

    fn forget(&self, namespace: &Namespace) {
        let mut published = self.published.lock();
        if let Some(requests) = published.get_mut(namespace) {
            *requests -= 1;
            if *requests == 0 {
                published.remove(namespace);
            }
        }
    }

    /// Answers updates until the peer closes the request in either direction.
    async fn until_withdrawn(&self, stream: &mut RequestStream) -> Result<(), SessionError> {
        let RequestStream { send, reader } = stream;
        let mut stopped = std::pin::pin!(send.stopped());
        let mut reading = true;
        loop {
            tokio::select! {
                incoming = reader.next(), if reading => match incoming {
                    Ok(Incoming::Message(Message::RequestUpdate(update))) => {
                        self.context.check_request_id(&update.into())?;
                        wire::send(send, RequestOk::default()).await?;
                    }
                    Ok(Incoming::Message(message)) => {
                        let reason = format!("{} after PUBLISH_NAMESPACE", message.name());
                        return Err(SessionError::violation(reason));
                    }
                    Ok(Incoming::GoAway(_)) => {} // the peer's own request: it moves it
                    Ok(Incoming::Finished) if !self.context.draft().fin_cancels() => reading = false,
                    Ok(Incoming::Finished | Incoming::Reset) | Err(SessionError::Lost(_)) => return Ok(()),
                    Err(violation) => return Err(violation),
                },
                _ = &mut stopped => return Ok(()),
            }
        }
    }

    /// Serves SUBSCRIBE_NAMESPACE until the peer cancels it.
    pub async fn serve_subscribe(
        &self,
        subscribe: SubscribeNamespace,
        stream: RequestStream,
        rights: &Arc<Rights>,
    ) -> Result<(), SessionError> {
        let claim = match self.watched.claim(subscribe.prefix).await {
            Ok(claim) => claim,
            Err(error) => return self.context.refuse(stream.send, error).await,
        };
        let RequestStream { mut send, mut reader } = stream;
        wire::send(&mut send, RequestOk::default()).await?;
        let mut watched = Watched { claim, announced: HashSet::new() };
        let mut watch = self.context.hub().watch_namespaces(watched.claim.prefix().clone());
        let mut stopped = std::pin::pin!(send.stopped());
        let mut reading = true;
        loop {
            tokio::select! {
                event = watch.next(|| self.pace()) => match event {
                    Some(event) if rights.permit(Action::SubscribeNamespace, &about(&event)) => {
                        watched.tell(event, &mut send).await?;
                    }
                    Some(_) => {}
                    None => return overloaded(send),
                },
                incoming = reader.next(), if reading => match self.next_prefix(incoming)? {
                    Next::Same(_) => wire::send(&mut send, RequestOk::default()).await?,
                    Next::Prefix(prefix, _) => match move_to(&mut watched.claim, prefix, rights) {
                        Ok(()) => {
                            wire::send(&mut send, RequestOk::default()).await?;
                            watched.announced.clear();
                            watch = self.context.hub().watch_namespaces(watched.claim.prefix().clone());
                        }
                        Err(error) => return self.context.refuse(send, error).await,
                    },
                    Next::Nothing => {}
                    Next::ReadAll => reading = false,
                    Next::Refused(error) => return self.context.refuse(send, error).await,
                    Next::Over => break,
                },
                _ = &mut stopped => break,
            }
        }
        let _ = send.finish(); // the peer cancelled
        Ok(())
    }

    /// What a message asks for.
    fn next_prefix(&self, incoming: Result<Incoming, SessionError>) -> Result<Next, SessionError> {
        match incoming {
            Ok(Incoming::Message(Message::RequestUpdate(update))) => {
                let mut parameters = update.parameters.clone();
                parameters.check(self.context.draft(), Scope::UPDATE_PREFIX)?;
                self.context.check_request_id(&update.into())?;
                if let Err(refused) = without_range_filters(&parameters) {
                    return Ok(Next::Refused(refused));
                }
                Ok(match parameters.track_namespace_prefix.take() {
                    Some(prefix) => Next::Prefix(prefix, parameters.forward),
                    None => Next::Same(parameters.forward),
                })
            }
            Ok(Incoming::Message(message)) => {
                Err(SessionError::violation(format!("{} after SUBSCRIBE_NAMESPACE", message.name())))
            }
            Ok(Incoming::GoAway(_)) => Ok(Next::Nothing),
            Ok(Incoming::Finished) if !self.context.draft().fin_cancels() => Ok(Next::ReadAll),
            Ok(Incoming::Finished | Incoming::Reset) | Err(SessionError::Lost(_)) => Ok(Next::Over),
            Err(violation) => Err(violation),
        }
    }

    /// Serves SUBSCRIBE_TRACKS until the peer cancels it.
    pub async fn serve_subscribe_tracks(
        &self,
        subscribe: SubscribeTracks,
        stream: RequestStream,
        rights: &Arc<Rights>,
    ) -> Result<(), SessionError> {
        let mut claim = match self.watched_tracks.claim(subscribe.prefix).await {
            Ok(claim) => claim,
            Err(error) => return self.context.refuse(stream.send, error).await,
        };
        let RequestStream { mut send, mut reader } = stream;
        let mut asked = Arc::new(subscribe.parameters);
        wire::send(&mut send, RequestOk::default()).await?;
        let mut watch = self.context.hub().watch_tracks(claim.prefix().clone());
        let mut stopped = std::pin::pin!(send.stopped());
        let mut reading = true;
        loop {
            tokio::select! {
                track = watch.next(|| self.pace()) => match track {
                    Some(track) => self.offer(track, rights, &asked, claim.prefix(), &mut send).await?,
                    None => return overloaded(send),
                },
                incoming = reader.next(), if reading => match self.next_prefix(incoming)? {
                    Next::Same(forward) => {
                        asked = forwarding(&asked, forward);
                        wire::send(&mut send, RequestOk::default()).await?;
                    }
                    Next::Prefix(prefix, forward) => match move_to(&mut claim, prefix, rights) {
                        Ok(()) => {
                            asked = forwarding(&asked, forward);
                            wire::send(&mut send, RequestOk::default()).await?;
                            watch = self.context.hub().watch_tracks(claim.prefix().clone());
                        }
                        Err(error) => return self.context.refuse(send, error).await,
                    },
                    Next::Nothing => {}
                    Next::ReadAll => reading = false,
                    Next::Refused(error) => return self.context.refuse(send, error).await,
                    Next::Over => break,
                },
                _ = &mut stopped => break,
            }
        }
        let _ = send.finish(); // the peer cancelled
        Ok(())
    }

    /// Publishes `track` to the subscriber, or says PUBLISH_SKIPPED if it gives us no request stream.
    async fn offer(
        &self,
        track: Arc<LiveTrack>,
        rights: &Rights,
        asked: &Arc<Parameters>,
        prefix: &Namespace,
        send: &mut Answers,
    ) -> Result<(), SessionError> {
        if self.publications.contains(&track) {
            return Ok(());
        }
        let Some(part) = self.subscriptions.first_part(track.name()) else { return Ok(()) };
        let Ok(rights) = rights.derive(Action::Subscribe, Resource::track(track.name())) else {
            return Ok(());
        };
        let open = self.context.connection().streams().open_bi();
        if let Ok(streams) = tokio::time::timeout(STREAM_CREDIT_TIMEOUT, open).await {
            let (send, recv) = streams?;
            let reader = self.context.request_reader(recv, BytesMut::new());
            let stream = RequestStream { send: self.context.answers(send), reader };
            let (subscriptions, asked) = (Arc::clone(&self.subscriptions), Arc::clone(asked));
            let context = Arc::clone(&self.context);
            self.context.spawn(async move {
                let publish = |stream| subscriptions.publish((track, part), &asked, stream, &rights);
                context.within(&rights, stream, publish).await
            });
            return Ok(());
        }
        let name = track.name();
        debug!(session = self.context.id(), track = %name.typed(), "no request stream for PUBLISH");
        let suffix = name.namespace().suffix_after(prefix).unwrap_or_default();
        if let Ok(suffix) = TrackName::new(suffix, name.name().clone()) {
            wire::send(send, PublishSkipped { suffix }).await?;
        }
        Ok(())
    }
}

/// What a subscriber of namespaces or tracks wants next.
enum Next {
    /// An update that leaves the prefix as it is; whether later tracks are to be forwarded, if it says so.
    Same(Option<bool>),
    Prefix(Namespace, Option<bool>),
    /// An update that fails, and the request with it.
    Refused(RequestError),
    /// It moves the request itself.
    Nothing,
    /// No update will come.
    ReadAll,
    Over,
}

/// What is asked for of later tracks, once `forward` has been said.
fn forwarding(asked: &Arc<Parameters>, forward: Option<bool>) -> Arc<Parameters> {
    match forward {
        None => Arc::clone(asked),
        forward => Arc::new(Parameters { forward, ..Parameters::clone(asked) }),
    }
}

/// What a change is about.
fn about(event: &NamespaceEvent) -> Resource {
    let (NamespaceEvent::Published(namespace) | NamespaceEvent::Done(namespace)) = event;
    Resource::namespace(namespace)
}

/// Watches another prefix from now on, if that is allowed.
fn move_to(claim: &mut Claim, prefix: Namespace, rights: &Rights) -> Result<(), RequestError> {
    rights.move_to(Resource::namespace(&prefix)).map_err(request_error)?;
    claim.move_to(prefix)
}

/// The peer reads too slowly to keep up with the changes (draft-22, "SUBSCRIBE_NAMESPACE").
fn overloaded(mut send: Answers) -> Result<(), SessionError> {
    let _ = send.reset(wire::var(code::Reset::EXCESSIVE_LOAD.0)); // may be stopped
    Ok(())
}

/// A SUBSCRIBE_NAMESPACE and what it has been told.
struct Watched {
    claim: Claim,
    announced: HashSet<Namespace>,
}

impl Watched {
    /// Passes on a change, never NAMESPACE_DONE without NAMESPACE.
    async fn tell(&mut self, event: NamespaceEvent, send: &mut Answers) -> Result<(), SessionError> {
        let (NamespaceEvent::Published(namespace) | NamespaceEvent::Done(namespace)) = &event;
        let Some(suffix) = namespace.suffix_after(self.claim.prefix()) else { return Ok(()) };
        match &event {
            NamespaceEvent::Published(namespace) if self.announced.insert(namespace.clone()) => {
                wire::send(send, NamespaceFound { suffix }).await?;
            }
            NamespaceEvent::Done(namespace) if self.announced.remove(namespace) => {
                wire::send(send, NamespaceDone { suffix }).await?;
            }
            _ => {}
        }
        Ok(())
    }
}
