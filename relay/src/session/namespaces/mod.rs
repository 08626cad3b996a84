//! Requests about namespaces: PUBLISH_NAMESPACE, SUBSCRIBE_NAMESPACE, SUBSCRIBE_TRACKS.

mod claim;
mod watched;

use std::{
    collections::HashMap,
    sync::{Arc, OnceLock},
    time::Duration,
};

use bytes::BytesMut;
use millrace_moq::{
    Message, Namespace, Parameters, TrackName, code,
    message::{
        PublishNamespace, PublishSkipped, RequestError, RequestOk, SubscribeNamespace, SubscribeTracks,
    },
    param::Scope,
};
use millrace_relay_cluster::{Announcement, AnnouncementRefusal};
use parking_lot::Mutex;
use tokio::time::Instant as Clock;
use tracing::{debug, info};

use self::{
    claim::{PrefixClaim, PrefixClaims},
    watched::WatchedNamespace,
};
use super::{
    context::SessionContext, filters::without_range_filters, mesh, publish::Publications,
    rights::request_error, subscribe::Subscriptions, uses::UseKind,
};
use crate::{
    hub::{HubPublisher, RelayRegistration},
    live::LiveTrack,
    wire::{self, Answers, IncomingMessage, RequestStream, SessionError},
};
use millrace_access::{
    grant::{Action, Resource},
    rights::Rights,
};

/// How long the relay waits for the peer to admit a request stream for a PUBLISH, before it sends PUBLISH_SKIPPED
/// instead.
const STREAM_CREDIT_TIMEOUT: Duration = Duration::from_millis(500);

/// The namespaces and tracks that the peer of one session publishes and watches.
pub struct SessionNamespaces {
    context: Arc<SessionContext>,
    /// The handle by which the hub, the state that all sessions share, sends requests to the peer as a publisher.
    publisher: Arc<dyn HubPublisher>,
    publications: Arc<Publications>,
    subscriptions: Arc<Subscriptions>,
    /// The namespaces that the peer publishes, and the number of its requests for each.
    published: Mutex<HashMap<Namespace, usize>>,
    watched: Arc<PrefixClaims>,
    watched_tracks: Arc<PrefixClaims>,
    /// The registration of the peer as a relay of the cluster. `None` until the peer has announced a route.
    relay: OnceLock<RelayRegistration>,
    /// Set once the relay watches whether the peer, a publisher, answers.
    watching: OnceLock<()>,
}

impl SessionNamespaces {
    pub fn new(
        context: Arc<SessionContext>,
        publisher: Arc<dyn HubPublisher>,
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
            relay: OnceLock::new(),
            watching: OnceLock::new(),
        })
    }

    /// Reports whether the peer publishes any namespace.
    pub fn is_publisher(&self) -> bool {
        !self.published.lock().is_empty()
    }

    /// Serves PUBLISH_NAMESPACE until the peer withdraws the namespace.
    pub async fn serve_publish(
        &self,
        publish: PublishNamespace,
        mut stream: RequestStream,
        rights: &Arc<Rights>,
    ) -> Result<(), SessionError> {
        let announcement = self.context.announcement_of(&publish.parameters)?;
        let PublishNamespace { namespace, .. } = publish;
        let session = self.context.id();
        if let Some(announcement) = announcement.clone().filter(is_of_another) {
            return self.serve_route(namespace, announcement, stream, rights).await;
        }
        let _publishing = self.context.authority().publishing(&namespace, rights);
        let _use = self.context.uses().begin(UseKind::Subscription);
        // The namespace is registered before the answer is sent: once the peer has the answer, subscribers can find its
        // tracks.
        let path = announcement.map(|announcement| announcement.path);
        let publication = self.context.hub().publish_by(namespace.clone(), &self.publisher, false, path);
        if self.context.hub().is_in_cluster && !self.context.is_relay() {
            // Another relay of the cluster may have a second publisher, which is used while this one does not answer.
            self.watching.get_or_init(|| self.watch_health());
        }
        self.context.hub().subscribe_existing(&namespace, &self.publisher, || self.pace()).await;
        wire::send(&mut stream.send, RequestOk::default()).await?;
        info!(session, namespace = %namespace.typed(), "the session's peer published a namespace");
        *self.published.lock().entry(namespace.clone()).or_default() += 1;
        let result = self.until_withdrawn(&mut stream, |_| Ok(())).await;
        self.forget(&namespace);
        drop(publication);
        info!(session, namespace = %namespace.typed(), "the session's peer withdrew a namespace");
        let _ = stream.send.finish(); // An error means that the peer has stopped or reset the stream.
        result
    }

    /// Serves PUBLISH_NAMESPACE of a relay that announces another endpoint's namespace, until the relay withdraws it.
    async fn serve_route(
        &self,
        namespace: Namespace,
        announcement: Announcement,
        mut stream: RequestStream,
        rights: &Arc<Rights>,
    ) -> Result<(), SessionError> {
        let _publishing = self.context.authority().publishing(&namespace, rights);
        let _use = self.context.uses().begin(UseKind::Subscription);
        self.begin_routes();
        let session = self.context.id();
        let hub = self.context.hub();
        let cost = self.context.link_cost();
        let mut said = announcement.clone();
        let (route, taken) = hub.publish_route(namespace.clone(), session, announcement, cost);
        // The guard of a route that was refused as a loop is kept, because an update may give the route a usable hop
        // path.
        if taken == Err(AnnouncementRefusal::TooMany) {
            let reason = "the relay announces more namespaces than cluster-routes allows";
            let refusal = RequestError::new(code::Request::EXCESSIVE_LOAD, reason);
            return self.context.refuse(stream.send, refusal).await;
        }
        wire::send(&mut stream.send, RequestOk::default()).await?;
        debug!(session, namespace = %namespace.typed(), path = %said.path, "the session's peer announced a route");
        let change = |parameters: &Parameters| {
            said.path = parameters.hop_path.clone().unwrap_or_else(|| said.path.clone());
            said.cost = parameters.route_cost.unwrap_or(said.cost);
            let _ = route.update(said.clone()); // A hop path that contains this relay withdraws the route.
            Ok(())
        };
        let result = self.until_withdrawn(&mut stream, change).await;
        drop(route);
        debug!(session, namespace = %namespace.typed(), "a route of the session's peer has ended");
        let _ = stream.send.finish(); // An error means that the peer has stopped or reset the stream.
        result
    }

    /// Registers the peer as a relay, and watches whether it answers. Routes of a silent relay are used only if there
    /// is no other route.
    fn begin_routes(&self) {
        if self.context.is_relay() && self.relay.get().is_none() && self.context.terms().is_some() {
            return; // `mesh::run` registers and watches the relays that this relay has connected to.
        }
        self.relay.get_or_init(|| {
            self.context.set_announces_routes();
            self.watch_health();
            self.context.hub().register_relay(&self.publisher)
        });
    }

    fn watch_health(&self) {
        let context = Arc::clone(&self.context);
        self.context.spawn(async move { match mesh::watch_health(&context).await {} });
    }

    /// Returns the time at which the request budgets of the peer admit one more request.
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

    /// Answers REQUEST_UPDATEs until the peer ends its request, by closing or stopping either direction of the stream.
    async fn until_withdrawn(
        &self,
        stream: &mut RequestStream,
        mut change: impl FnMut(&Parameters) -> Result<(), SessionError>,
    ) -> Result<(), SessionError> {
        let RequestStream { send, reader } = stream;
        let mut stopped = std::pin::pin!(send.stopped());
        // False once the peer has sent FIN, in drafts in which FIN does not withdraw the namespace.
        let mut reading = true;
        loop {
            tokio::select! {
                incoming = reader.next(), if reading => match incoming {
                    Ok(IncomingMessage::Message(Message::RequestUpdate(update))) => {
                        // Only members of the cluster may send a route's hop path and cost.
                        if self.context.hop().is_none() && says_route(&update.parameters) {
                            return Err(SessionError::violation("HOP_PATH or ROUTE_COST without HOP_ID in SETUP"));
                        }
                        change(&update.parameters)?;
                        self.context.check_request_id(&update.into())?;
                        wire::send(send, RequestOk::default()).await?;
                    }
                    Ok(IncomingMessage::Message(message)) => return Err(SessionError::misplaced(&message, "after PUBLISH_NAMESPACE")),
                    // GOAWAY on the stream of the peer's request has no effect here: the peer sends the request again
                    // in another session.
                    Ok(IncomingMessage::GoAway(_)) => {}
                    Ok(IncomingMessage::Finished) if !self.context.draft().fin_cancels() => reading = false,
                    Ok(IncomingMessage::Finished | IncomingMessage::Reset) | Err(SessionError::Lost(_)) => return Ok(()),
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
        if self.context.hop().is_none() {
            self.context.hub().want(claim.prefix());
        }
        let RequestStream { mut send, mut reader } = stream;
        wire::send(&mut send, RequestOk::default()).await?;
        let mut watched = WatchedNamespace::new(&self.context, claim);
        let mut stopped = std::pin::pin!(send.stopped());
        // False once the peer has ended its direction of the stream, so that no further message arrives.
        let mut reading = true;
        loop {
            tokio::select! {
                change = watched.next(|| self.pace()) => match change {
                    Some(change) if rights.permit(Action::SubscribeNamespace, &change.about()) => {
                        watched.tell(change, &mut send).await?;
                    }
                    // A change of a namespace that the peer has no right to watch is not reported to the peer.
                    Some(_) => {}
                    None => return overloaded(send),
                },
                incoming = reader.next(), if reading => match self.next_prefix(incoming)? {
                    NextChange::Same(_) => wire::send(&mut send, RequestOk::default()).await?,
                    NextChange::Prefix(prefix, _) => match move_to(&mut watched.claim, prefix, rights) {
                        Ok(()) => {
                            wire::send(&mut send, RequestOk::default()).await?;
                            watched.begin_again();
                        }
                        Err(error) => return self.context.refuse(send, error).await,
                    },
                    NextChange::Nothing => {}
                    NextChange::ReadAll => reading = false,
                    NextChange::Refused(error) => return self.context.refuse(send, error).await,
                    NextChange::Over => break,
                },
                _ = &mut stopped => break,
            }
        }
        let _ = send.finish(); // The peer has cancelled the request.
        Ok(())
    }

    /// Returns how a message of the peer changes its request.
    fn next_prefix(
        &self,
        incoming: Result<IncomingMessage, SessionError>,
    ) -> Result<NextChange, SessionError> {
        match incoming {
            Ok(IncomingMessage::Message(Message::RequestUpdate(update))) => {
                let mut parameters = update.parameters.clone();
                parameters.check(self.context.draft(), Scope::UPDATE_PREFIX)?;
                self.context.check_request_id(&update.into())?;
                if let Err(refused) = without_range_filters(&parameters) {
                    return Ok(NextChange::Refused(refused));
                }
                Ok(match parameters.track_namespace_prefix.take() {
                    Some(prefix) => NextChange::Prefix(prefix, parameters.forward),
                    None => NextChange::Same(parameters.forward),
                })
            }
            Ok(IncomingMessage::Message(message)) => {
                Err(SessionError::misplaced(&message, "after SUBSCRIBE_NAMESPACE"))
            }
            // Whether a FIN of the peer cancels its request depends on the draft.
            Ok(IncomingMessage::GoAway(_)) => Ok(NextChange::Nothing),
            Ok(IncomingMessage::Finished) if !self.context.draft().fin_cancels() => Ok(NextChange::ReadAll),
            Ok(IncomingMessage::Finished | IncomingMessage::Reset) | Err(SessionError::Lost(_)) => {
                Ok(NextChange::Over)
            }
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
        // False once the peer has ended its direction of the stream, so that no further message arrives.
        let mut reading = true;
        loop {
            tokio::select! {
                track = watch.next(|| self.pace()) => match track {
                    Some(track) => self.offer(track, rights, &asked, claim.prefix(), &mut send).await?,
                    None => return overloaded(send),
                },
                incoming = reader.next(), if reading => match self.next_prefix(incoming)? {
                    NextChange::Same(forward) => {
                        asked = forwarding(&asked, forward);
                        wire::send(&mut send, RequestOk::default()).await?;
                    }
                    NextChange::Prefix(prefix, forward) => match move_to(&mut claim, prefix, rights) {
                        Ok(()) => {
                            asked = forwarding(&asked, forward);
                            wire::send(&mut send, RequestOk::default()).await?;
                            // The new watch first lists the present tracks below the new prefix.
                            watch = self.context.hub().watch_tracks(claim.prefix().clone());
                        }
                        Err(error) => return self.context.refuse(send, error).await,
                    },
                    NextChange::Nothing => {}
                    NextChange::ReadAll => reading = false,
                    NextChange::Refused(error) => return self.context.refuse(send, error).await,
                    NextChange::Over => break,
                },
                _ = &mut stopped => break,
            }
        }
        let _ = send.finish(); // The peer has cancelled the request.
        Ok(())
    }

    /// Sends PUBLISH for `track` to the subscriber. Sends PUBLISH_SKIPPED if the subscriber's stream limit does not
    /// admit a request stream.
    async fn offer(
        &self,
        track: Arc<LiveTrack>,
        rights: &Rights,
        asked: &Arc<Parameters>,
        prefix: &Namespace,
        send: &mut Answers,
    ) -> Result<(), SessionError> {
        // A track that the peer publishes itself is not sent back to it.
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
            let subscriptions = Arc::clone(&self.subscriptions);
            let asked = Arc::clone(asked);
            let context = Arc::clone(&self.context);
            self.context.spawn(async move {
                let publish = |stream| subscriptions.publish(track, part, &asked, stream, &rights);
                context.within(&rights, stream, publish).await
            });
            return Ok(());
        }
        let name = track.name();
        debug!(session = self.context.id(), track = %name.typed(), "cannot open a request stream to publish a track to the session's peer");
        let suffix = name.namespace().suffix_after(prefix).unwrap_or_default();
        if let Ok(suffix) = TrackName::new(suffix, name.name().clone()) {
            wire::send(send, PublishSkipped { suffix }).await?;
        }
        Ok(())
    }
}

/// A change that the peer makes to its SUBSCRIBE_NAMESPACE or SUBSCRIBE_TRACKS.
enum NextChange {
    /// A REQUEST_UPDATE that keeps the prefix. Contains the value of FORWARD for later tracks, if the update has one.
    Same(Option<bool>),
    Prefix(Namespace, Option<bool>),
    /// A REQUEST_UPDATE that the relay refuses, which also ends the request.
    Refused(RequestError),
    /// A message that does not change the request.
    Nothing,
    /// The peer has ended its direction of the stream, so no update will come.
    ReadAll,
    Over,
}

/// Returns the parameters of PUBLISH for later tracks, after an update with the value `forward`.
fn forwarding(asked: &Arc<Parameters>, forward: Option<bool>) -> Arc<Parameters> {
    match forward {
        None => Arc::clone(asked),
        forward => Arc::new(Parameters { forward, ..Parameters::clone(asked) }),
    }
}

/// Reports whether the announced namespace belongs to another endpoint than the peer: the announced hop path has more
/// than one hop.
fn is_of_another(announcement: &Announcement) -> bool {
    announcement.path.hops().len() > 1
}

fn says_route(parameters: &Parameters) -> bool {
    parameters.hop_path.is_some() || parameters.route_cost.is_some()
}

/// Replaces the watched prefix, if the peer has the right to watch the new one.
fn move_to(claim: &mut PrefixClaim, prefix: Namespace, rights: &Rights) -> Result<(), RequestError> {
    rights.move_to(Resource::namespace(&prefix)).map_err(request_error)?;
    claim.move_to(prefix)
}

/// Resets our direction of the request stream, because the peer reads messages more slowly than namespaces change
/// (draft-22, "SUBSCRIBE_NAMESPACE").
fn overloaded(mut send: Answers) -> Result<(), SessionError> {
    let _ = send.reset(wire::var(code::Reset::EXCESSIVE_LOAD.0)); // An error means that the peer has stopped the stream.
    Ok(())
}
