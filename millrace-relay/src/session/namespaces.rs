//! Requests of the peer about namespaces: PUBLISH_NAMESPACE, SUBSCRIBE_NAMESPACE, SUBSCRIBE_TRACKS.

use std::{sync::Arc, time::Duration};

use millrace_proto::moq::{
    Message, Namespace, TrackName, code,
    message::{
        NamespaceDone, NamespaceFound, PublishBlocked, PublishNamespace, RequestError, RequestOk,
        RequestUpdate, SubscribeNamespace, SubscribeTracks,
    },
};
use quinn::SendStream;
use tracing::{debug, info};

use super::{Session, State};
use crate::{
    hub::NamespaceEvent,
    live::LiveTrack,
    wire::{self, Incoming, MessageReader, SessionError},
};

/// How long a subscriber may take to grant a request stream for a PUBLISH before PUBLISH_BLOCKED.
const STREAM_CREDIT_TIMEOUT: Duration = Duration::from_millis(500);

impl Session {
    pub(super) async fn serve_publish_namespace(
        self: &Arc<Self>,
        publish: PublishNamespace,
        mut send: SendStream,
        mut reader: MessageReader,
    ) -> Result<(), SessionError> {
        let PublishNamespace { namespace, .. } = publish;
        if namespace.is_forbidden() {
            return self.refuse(send, code::Request::UNAUTHORIZED, "a reserved namespace").await;
        }
        // Before the answer: after it, everybody finds the publisher.
        let publication = self.hub.publish(namespace.clone(), self, false);
        wire::send(&mut send, RequestOk::default()).await?;
        info!(session = self.id(), %namespace, "namespace published");
        self.state.lock().published.push(namespace.clone());
        let result = self.until_withdrawn(&mut send, &mut reader).await;
        self.state.lock().published.retain(|other| *other != namespace);
        drop(publication);
        info!(session = self.id(), %namespace, "namespace withdrawn");
        let _ = send.finish(); // stopped or reset by the peer
        result
    }

    /// Answers updates until the peer closes the request in either direction.
    async fn until_withdrawn(
        &self,
        send: &mut SendStream,
        reader: &mut MessageReader,
    ) -> Result<(), SessionError> {
        let mut stopped = std::pin::pin!(send.stopped());
        loop {
            tokio::select! {
                incoming = reader.next() => match incoming {
                    Ok(Incoming::Message(Message::RequestUpdate(update))) => {
                        self.check_request_id(&update.into())?;
                        wire::send(send, RequestOk::default()).await?;
                    }
                    Ok(Incoming::Message(message)) => {
                        let reason = format!("{} after PUBLISH_NAMESPACE", message.name());
                        return Err(SessionError::violation(reason));
                    }
                    Ok(Incoming::Finished | Incoming::Reset) | Err(SessionError::Lost(_)) => return Ok(()),
                    Err(violation) => return Err(violation),
                },
                _ = &mut stopped => return Ok(()),
            }
        }
    }

    pub(super) async fn serve_subscribe_namespace(
        self: &Arc<Self>,
        subscribe: SubscribeNamespace,
        mut send: SendStream,
        mut reader: MessageReader,
    ) -> Result<(), SessionError> {
        let claim = match Claim::new(self, subscribe.prefix, |state| &mut state.watched_namespaces) {
            Ok(claim) => claim,
            Err(error) => return self.refuse_with(send, error).await,
        };
        wire::send(&mut send, RequestOk::default()).await?;
        let mut watched = Watched { claim, announced: Vec::new() };
        let mut watch = self.hub.watch_namespaces(watched.claim.prefix.clone());
        let mut stopped = std::pin::pin!(send.stopped());
        loop {
            tokio::select! {
                event = watch.events.recv() => match event {
                    Some(event) => watched.tell(event, &mut send).await?,
                    None => {
                        // The peer reads too slowly to keep up with the changes (draft-18, 10.19).
                        let _ = send.reset(wire::var(code::Reset::EXCESSIVE_LOAD.0)); // may be stopped
                        return Ok(());
                    }
                },
                incoming = reader.next() => match self.next_prefix(incoming)? {
                    Some(prefix) => match watched.claim.move_to(prefix) {
                        Ok(()) => {
                            wire::send(&mut send, RequestOk::default()).await?;
                            watched.announced.clear();
                            watch = self.hub.watch_namespaces(watched.claim.prefix.clone());
                        }
                        Err(error) => return self.refuse_with(send, error).await,
                    },
                    None => break,
                },
                _ = &mut stopped => break,
            }
        }
        let _ = send.finish(); // the peer cancelled
        Ok(())
    }

    /// The new prefix that a message asks for; `None` when the request is over.
    fn next_prefix(
        &self,
        incoming: Result<Incoming, SessionError>,
    ) -> Result<Option<Namespace>, SessionError> {
        match incoming {
            Ok(Incoming::Message(Message::RequestUpdate(update))) => {
                let RequestUpdate { parameters, .. } = update.clone();
                self.check_request_id(&update.into())?;
                let unchanged = || SessionError::violation("an update without a namespace prefix");
                parameters.track_namespace_prefix.map(Some).ok_or_else(unchanged)
            }
            Ok(Incoming::Message(message)) => {
                Err(SessionError::violation(format!("{} after SUBSCRIBE_NAMESPACE", message.name())))
            }
            Ok(Incoming::Finished | Incoming::Reset) | Err(SessionError::Lost(_)) => Ok(None),
            Err(violation) => Err(violation),
        }
    }

    pub(super) async fn serve_subscribe_tracks(
        self: &Arc<Self>,
        subscribe: SubscribeTracks,
        mut send: SendStream,
        mut reader: MessageReader,
    ) -> Result<(), SessionError> {
        let mut claim = match Claim::new(self, subscribe.prefix, |state| &mut state.watched_tracks) {
            Ok(claim) => claim,
            Err(error) => return self.refuse_with(send, error).await,
        };
        let forward = subscribe.parameters.forward.unwrap_or(true);
        wire::send(&mut send, RequestOk::default()).await?;
        let mut watch = self.hub.watch_tracks(claim.prefix.clone());
        let mut stopped = std::pin::pin!(send.stopped());
        loop {
            tokio::select! {
                track = watch.events.recv() => match track {
                    Some(track) => self.offer_track(track, forward, &claim.prefix, &mut send).await?,
                    None => {
                        let _ = send.reset(wire::var(code::Reset::EXCESSIVE_LOAD.0)); // may be stopped
                        return Ok(());
                    }
                },
                incoming = reader.next() => match self.next_prefix(incoming)? {
                    Some(prefix) => match claim.move_to(prefix) {
                        Ok(()) => {
                            wire::send(&mut send, RequestOk::default()).await?;
                            watch = self.hub.watch_tracks(claim.prefix.clone());
                        }
                        Err(error) => return self.refuse_with(send, error).await,
                    },
                    None => break,
                },
                _ = &mut stopped => break,
            }
        }
        let _ = send.finish(); // the peer cancelled
        Ok(())
    }

    /// Publishes `track` to the subscriber, or says PUBLISH_BLOCKED if it gives us no request stream.
    async fn offer_track(
        self: &Arc<Self>,
        track: Arc<LiveTrack>,
        forward: bool,
        prefix: &Namespace,
        send: &mut SendStream,
    ) -> Result<(), SessionError> {
        if self.publishes(&track) || self.is_subscribed(track.name()) {
            return Ok(());
        }
        match tokio::time::timeout(STREAM_CREDIT_TIMEOUT, self.connection.quic.open_bi()).await {
            Ok(streams) => {
                let (request, answers) = streams?;
                let session = Arc::clone(self);
                tokio::spawn(async move {
                    if let Err(error) = session.publish_to(track, forward, request, answers).await {
                        session.fail(error);
                    }
                });
            }
            Err(_) => {
                let name = track.name();
                debug!(session = self.id(), track = %name, "no request stream for PUBLISH");
                let suffix = name.namespace().suffix_after(prefix).unwrap_or_default();
                if let Ok(suffix) = TrackName::new(suffix, name.name().clone()) {
                    wire::send(send, PublishBlocked { suffix }).await?;
                }
            }
        }
        Ok(())
    }
}

/// A prefix that the peer watches. Within a session, those of one kind must not overlap.
struct Claim {
    session: Arc<Session>,
    prefix: Namespace,
    list: fn(&mut State) -> &mut Vec<Namespace>,
}

impl Claim {
    fn new(
        session: &Arc<Session>,
        prefix: Namespace,
        list: fn(&mut State) -> &mut Vec<Namespace>,
    ) -> Result<Self, RequestError> {
        claim(list(&mut session.state.lock()), &prefix)?;
        Ok(Self { session: Arc::clone(session), prefix, list })
    }

    fn move_to(&mut self, prefix: Namespace) -> Result<(), RequestError> {
        let mut state = self.session.state.lock();
        let list = (self.list)(&mut state);
        list.retain(|other| *other != self.prefix);
        let claimed = claim(list, &prefix);
        match claimed {
            Ok(()) => self.prefix = prefix,
            Err(_) => list.push(self.prefix.clone()),
        }
        claimed
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        (self.list)(&mut self.session.state.lock()).retain(|other| *other != self.prefix);
    }
}

fn claim(list: &mut Vec<Namespace>, prefix: &Namespace) -> Result<(), RequestError> {
    if list.iter().any(|other| other.overlaps(prefix)) {
        let reason = "the prefix overlaps with another of this session";
        return Err(RequestError::new(code::Request::PREFIX_OVERLAP, reason));
    }
    list.push(prefix.clone());
    Ok(())
}

/// A SUBSCRIBE_NAMESPACE and what it has been told.
struct Watched {
    claim: Claim,
    announced: Vec<Namespace>,
}

impl Watched {
    /// Passes on a change, never NAMESPACE_DONE without NAMESPACE.
    async fn tell(&mut self, event: NamespaceEvent, send: &mut SendStream) -> Result<(), SessionError> {
        let (NamespaceEvent::Published(namespace) | NamespaceEvent::Done(namespace)) = &event;
        let Some(suffix) = namespace.suffix_after(&self.claim.prefix) else { return Ok(()) };
        let known = self.announced.contains(namespace);
        match event {
            NamespaceEvent::Published(namespace) if !known => {
                self.announced.push(namespace);
                wire::send(send, NamespaceFound { suffix }).await?;
            }
            NamespaceEvent::Done(namespace) if known => {
                self.announced.retain(|other| *other != namespace);
                wire::send(send, NamespaceDone { suffix }).await?;
            }
            _ => {}
        }
        Ok(())
    }
}
