//! Requests of the peer about tracks: SUBSCRIBE, PUBLISH, TRACK_STATUS.

use std::{
    collections::hash_map::Entry,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_proto::{
    moq::{
        Location, Message, Parameters, TrackName, code,
        message::{
            Publish, PublishDone, RequestError, RequestOk, RequestUpdate, Subscribe, SubscribeOk, TrackStatus,
        },
        vi64,
    },
    relay::filter::{OutOfRange, Window},
};
use quinn::SendStream;
use tokio::{
    sync::mpsc,
    time::{Instant as Clock, sleep, timeout},
};
use tracing::debug;

use super::Session;
use crate::{
    live::{Ended, LiveTrack},
    outbox::Outbox,
    subscription::{Options, Subscription},
    upstream::{Ask, Upstream},
    wire::{self, Incoming, MessageReader, SessionError},
};

/// How long the streams of a subscription that ended may take to be delivered before PUBLISH_DONE.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a subscription that ended looks whether its datagrams have left.
const DATAGRAM_LOOKS: Duration = Duration::from_millis(10);
/// How long datagrams may be behind the PUBLISH_DONE of their publisher.
const LATE_DATAGRAMS: Duration = Duration::from_millis(100);
/// How long announced streams may take to arrive after a publisher's PUBLISH_DONE.
const LATE_STREAMS: Duration = Duration::from_secs(2);

impl Session {
    pub(super) async fn serve_subscribe(
        self: &Arc<Self>,
        subscribe: Subscribe,
        send: SendStream,
        reader: MessageReader,
    ) -> Result<(), SessionError> {
        let Subscribe { request_id, track: name, parameters } = subscribe;
        let rendezvous = Duration::from_millis(parameters.rendezvous_timeout.unwrap_or(0));
        if self.is_subscribed(&name) {
            return self.refuse(send, code::Request::DUPLICATE_SUBSCRIPTION, "already subscribed").await;
        }
        let track = match self.established(&name, rendezvous, parameters.new_group_request).await {
            Ok(track) => track,
            Err(error) => return self.refuse_with(send, error).await,
        };
        let largest = track.data.largest();
        let window = match Window::resolve(parameters.filter.as_ref(), largest) {
            Ok(window) => window,
            Err(error) => return self.refuse(send, code::Request::INVALID_RANGE, error.to_string()).await,
        };
        let options = Options::new(&parameters, window, &track);
        let subscription = self.add_subscription(request_id, track, options, largest);
        let ok = SubscribeOk {
            track_alias: subscription.alias,
            parameters: Parameters { largest_object: largest, ..Parameters::default() },
            properties: subscription.track.data.properties(),
        };
        self.run_subscription(request_id, subscription, Some(ok.into()), send, reader).await
    }

    /// The track of this name with an established upstream subscription.
    async fn established(
        self: &Arc<Self>,
        name: &TrackName,
        rendezvous: Duration,
        new_group: Option<u64>,
    ) -> Result<Arc<LiveTrack>, RequestError> {
        if rendezvous.is_zero() {
            self.hub.check_known(name, self)?;
        }
        let track = self.hub.track(name, Instant::now())?;
        match new_group {
            Some(group) if track.is_established() => track.request_group(group),
            Some(group) => track.expect_group(group),
            None => {}
        }
        self.hub.ensure_upstream(&track, self, rendezvous).await?;
        Ok(track)
    }

    pub(super) fn is_subscribed(&self, name: &TrackName) -> bool {
        self.state.lock().subscriptions.values().any(|subscription| subscription.track.name() == name)
    }

    /// Registers a subscription under an alias of its own.
    pub(super) fn add_subscription(
        &self,
        request_id: u64,
        track: Arc<LiveTrack>,
        options: Options,
        joining: Option<Location>,
    ) -> Arc<Subscription> {
        let mut state = self.state.lock();
        let wanted = track.upstreams().first().map_or(0, |upstream| upstream.alias);
        let alias = free_alias(wanted, |alias| state.aliases.contains_key(&alias));
        state.aliases.insert(alias, track.name().clone());
        let connection = Arc::clone(&self.connection);
        let owner = self.next_owner();
        let subscription = Arc::new(Subscription::new(track, connection, alias, owner, options, joining));
        state.subscriptions.insert(request_id, Arc::clone(&subscription));
        state.owners.insert(owner, super::Owner::Subscription(Arc::clone(&subscription)));
        subscription
    }

    pub(super) fn remove_subscription(&self, request_id: u64, subscription: &Arc<Subscription>) {
        subscription.track.unsubscribe(subscription, Instant::now());
        subscription.cancel(code::Reset::CANCELLED);
        self.connection.transmit_now();
        let mut state = self.state.lock();
        state.subscriptions.remove(&request_id);
        state.owners.remove(&subscription.owner);
        self.connection.downstream().forget_owner(subscription.owner);
        state.aliases.remove(&subscription.alias);
    }

    /// Answers, feeds the subscription until it ends on either side, and says PUBLISH_DONE.
    pub(super) async fn run_subscription(
        self: &Arc<Self>,
        request_id: u64,
        subscription: Arc<Subscription>,
        ok: Option<Message>,
        mut send: SendStream,
        mut reader: MessageReader,
    ) -> Result<(), SessionError> {
        let result: Result<_, SessionError> = async {
            if let Some(ok) = ok {
                wire::send(&mut send, ok).await?;
            }
            // The alias should be known before the first object comes.
            self.connection.control_sent().await;
            self.feed(&subscription);
            self.follow_subscription(&subscription, &mut send, &mut reader).await
        }
        .await;
        self.remove_subscription(request_id, &subscription);
        match result {
            Ok(Some(ended)) => {
                let done = PublishDone {
                    code: ended.code,
                    stream_count: subscription.stream_count(),
                    reason: ended.reason,
                };
                wire::send_last(&mut send, done).await;
                Ok(())
            }
            Ok(None) => {
                let _ = send.reset(wire::var(code::Reset::CANCELLED.0)); // may be closed already
                reader.stop(code::Reset::CANCELLED.0);
                Ok(())
            }
            Err(SessionError::Lost(reason)) => {
                debug!(session = self.id(), request_id, reason, "subscription stream lost");
                Ok(())
            }
            Err(violation) => Err(violation),
        }
    }

    pub(super) fn feed(&self, subscription: &Arc<Subscription>) {
        let mut outbox = Outbox::default();
        subscription.track.subscribe(Arc::clone(subscription), Instant::now(), &mut outbox);
        outbox.flush();
    }

    /// Until the subscription ended and its streams did (how it ended), or the subscriber left (`None`).
    pub(super) async fn follow_subscription(
        self: &Arc<Self>,
        subscription: &Arc<Subscription>,
        send: &mut SendStream,
        reader: &mut MessageReader,
    ) -> Result<Option<Ended>, SessionError> {
        let mut stopped = std::pin::pin!(send.stopped());
        let mut reading = true;
        let (mut deadline, mut past_end) = (None, None);
        loop {
            if let Some(ended) = subscription.drained() {
                return Ok(Some(ended));
            }
            if deadline.is_none() && subscription.ended().is_some() {
                deadline = Some(Clock::now() + DRAIN_TIMEOUT);
            }
            if past_end.is_none() && subscription.is_past_end() {
                past_end = Some(Clock::now() + LATE_STREAMS);
            }
            tokio::select! {
                incoming = reader.next(), if reading => match incoming? {
                    Incoming::Message(Message::RequestUpdate(update)) => {
                        match self.update_subscription(subscription, update)? {
                            Ok(ok) => wire::send(send, ok).await?,
                            Err(refused) => {
                                wire::send(send, refused).await?;
                                let ended = Ended::new(code::Done::UPDATE_FAILED, "REQUEST_UPDATE failed");
                                return Ok(Some(ended));
                            }
                        }
                    }
                    // Not a reset: those who still say this take it for a failure of the session.
                    Incoming::Message(Message::Unsubscribe(_)) => {
                        return Ok(Some(Ended::new(code::Done::SUBSCRIPTION_ENDED, "unsubscribed")));
                    }
                    Incoming::Message(message) => {
                        return Err(SessionError::violation(format!("{} in a subscription", message.name())));
                    }
                    // Nothing more to ask for; the subscription goes on.
                    Incoming::Finished => reading = false,
                    Incoming::Reset => return Ok(None),
                },
                _ = &mut stopped => return Ok(None),
                () = subscription.changed.notified() => {}
                () = sleep(DATAGRAM_LOOKS), if subscription.ended().is_some() => {}
                () = sleep_until(past_end), if subscription.is_past_end() => {
                    let reason = "the last group asked for is over";
                    subscription.end(Ended::new(code::Done::SUBSCRIPTION_ENDED, reason));
                }
                () = sleep_until(deadline) => {
                    subscription.cancel(code::Reset::TOO_FAR_BEHIND);
                    return Ok(subscription.ended());
                }
            }
        }
    }

    /// Applies REQUEST_UPDATE to a subscription; the answer is REQUEST_OK or REQUEST_ERROR.
    fn update_subscription(
        &self,
        subscription: &Arc<Subscription>,
        update: RequestUpdate,
    ) -> Result<Result<RequestOk, RequestError>, SessionError> {
        let parameters = update.parameters.clone();
        self.check_request_id(&update.into())?;
        let track = &subscription.track;
        let largest = track.data.largest();
        let mut options = subscription.options();
        if let Some(filter) = &parameters.filter {
            match Window::resolve(Some(filter), largest) {
                Ok(window) => options.window = window,
                Err(error) => {
                    return Ok(Err(RequestError::new(code::Request::INVALID_RANGE, error.to_string())));
                }
            }
        }
        options.apply(&parameters, track);
        self.change_subscription(subscription, options, largest);
        if let Some(group) = parameters.new_group_request {
            track.request_group(group);
        }
        Ok(Ok(RequestOk {
            parameters: Parameters { largest_object: largest, ..Parameters::default() },
            ..RequestOk::default()
        }))
    }

    /// The subscriber accepted our PUBLISH with these parameters.
    pub(super) fn accept_publish(
        &self,
        subscription: &Arc<Subscription>,
        parameters: &Parameters,
    ) -> Result<(), OutOfRange> {
        let largest = subscription.track.data.largest();
        let mut options = subscription.options();
        if let Some(filter) = &parameters.filter {
            options.window = Window::resolve(Some(filter), largest)?;
        }
        options.apply(parameters, &subscription.track);
        self.change_subscription(subscription, options, largest);
        Ok(())
    }

    /// Changes a subscription, and sends what that makes possible.
    fn change_subscription(
        &self,
        subscription: &Arc<Subscription>,
        options: Options,
        largest: Option<Location>,
    ) {
        subscription.update(options, largest);
        let mut outbox = Outbox::default();
        outbox.transmit(&self.connection, Instant::now());
        subscription.track.offer_cached(subscription, Instant::now(), &mut outbox);
        outbox.flush();
    }

    pub(super) async fn serve_track_status(
        self: &Arc<Self>,
        status: TrackStatus,
        mut send: SendStream,
    ) -> Result<(), SessionError> {
        let track = match self.established(&status.track, Duration::ZERO, None).await {
            Ok(track) => track,
            Err(error) => return self.refuse_with(send, error).await,
        };
        let ok = RequestOk {
            parameters: Parameters { largest_object: track.data.largest(), ..Parameters::default() },
            properties: track.data.properties(),
        };
        wire::send_last(&mut send, ok).await;
        Ok(())
    }

    /// The peer publishes a track to us: an upstream subscription that it began.
    pub(super) async fn serve_publish(
        self: &Arc<Self>,
        publish: Publish,
        mut send: SendStream,
        mut reader: MessageReader,
    ) -> Result<(), SessionError> {
        let track = match self.hub.track(&publish.track, Instant::now()) {
            Ok(track) => track,
            Err(error) => return self.refuse_with(send, error).await,
        };
        if self.publishes(&track) {
            return self.refuse(send, code::Request::DUPLICATE_SUBSCRIPTION, "already published").await;
        }
        track.prepare(self.id());
        let unsupported = track.data.set_properties(publish.properties)?;
        if let Some(kind) = unsupported {
            let reason = format!("mandatory track property {kind:#x}");
            return self.refuse(send, code::Request::UNSUPPORTED_EXTENSION, reason).await;
        }
        if let Some(largest) = publish.parameters.largest_object {
            track.data.saw_largest(largest);
        }
        let (upstream, asks) = Upstream::new(self.id(), Arc::clone(&track), publish.track_alias, false);
        self.add_upstream(&upstream)?;
        // Media is wanted before the first subscriber comes: the cache serves it at once.
        let parameters = Parameters { forward: Some(true), ..Parameters::default() };
        let result = match wire::send(&mut send, RequestOk { parameters, ..RequestOk::default() }).await {
            Ok(()) => self.follow_upstream(&upstream, &mut send, &mut reader, asks).await,
            Err(error) => Err(error),
        };
        self.finish_upstream(&upstream, result, send, reader).await
    }

    pub(super) fn publishes(&self, track: &Arc<LiveTrack>) -> bool {
        self.state.lock().upstreams.values().any(|upstream| Arc::ptr_eq(&upstream.track, track))
    }

    /// Registers a publisher's track under the alias that it gave.
    pub(super) fn add_upstream(&self, upstream: &Arc<Upstream>) -> Result<(), SessionError> {
        match self.state.lock().upstreams.entry(upstream.alias) {
            Entry::Occupied(_) => {
                return Err(SessionError::Violation {
                    code: code::Session::DUPLICATE_TRACK_ALIAS,
                    reason: format!("track alias {} is in use", upstream.alias),
                });
            }
            Entry::Vacant(entry) => entry.insert(Arc::clone(upstream)),
        };
        self.aliases_changed.notify_waiters();
        let first = !upstream.track.is_established();
        upstream.track.add_upstream(Arc::clone(upstream));
        if first {
            self.hub.track_established(&upstream.track);
        }
        Ok(())
    }

    /// Follows an upstream subscription until the publisher ends it or nobody needs it any more (`None`).
    pub(super) async fn follow_upstream(
        self: &Arc<Self>,
        upstream: &Arc<Upstream>,
        send: &mut SendStream,
        reader: &mut MessageReader,
        mut asks: mpsc::UnboundedReceiver<Ask>,
    ) -> Result<Option<PublishDone>, SessionError> {
        loop {
            tokio::select! {
                incoming = reader.next() => match incoming? {
                    Incoming::Message(Message::PublishDone(done)) => return Ok(Some(done)),
                    Incoming::Message(Message::RequestOk(ok)) => {
                        if let Some(largest) = ok.parameters.largest_object {
                            upstream.track.data.saw_largest(largest);
                        }
                    }
                    Incoming::Message(Message::RequestError(error)) => {
                        debug!(session = self.id(), ?error, "REQUEST_UPDATE refused upstream");
                    }
                    Incoming::Message(Message::RequestUpdate(update)) => {
                        self.check_request_id(&update.into())?;
                        wire::send(send, RequestOk::default()).await?;
                    }
                    Incoming::Message(message) => {
                        return Err(SessionError::violation(format!("{} from a publisher", message.name())));
                    }
                    Incoming::Finished | Incoming::Reset => return Ok(Some(PublishDone {
                        code: code::Done::INTERNAL_ERROR,
                        stream_count: 0,
                        reason: "the publisher closed the subscription".into(),
                    })),
                },
                ask = asks.recv() => match ask {
                    Some(Ask::NewGroup(group)) => {
                        let parameters =
                            Parameters { new_group_request: Some(group), ..Parameters::default() };
                        let request_id = self.next_request_id();
                        wire::send(send, RequestUpdate { request_id, parameters }).await?;
                    }
                    Some(Ask::Cancel) | None => return Ok(None),
                },
            }
        }
    }

    /// Takes an upstream subscription down, after what it announced has arrived.
    pub(super) async fn finish_upstream(
        self: &Arc<Self>,
        upstream: &Arc<Upstream>,
        result: Result<Option<PublishDone>, SessionError>,
        mut send: SendStream,
        mut reader: MessageReader,
    ) -> Result<(), SessionError> {
        let ended = match &result {
            Ok(Some(done)) => {
                let all_here = upstream.has_seen_all(done.stream_count);
                let _ = timeout(LATE_STREAMS, all_here).await; // some were reset before their header
                if upstream.has_datagrams() {
                    sleep(LATE_DATAGRAMS).await;
                }
                let _ = send.finish(); // the publisher may have stopped it
                Ended::new(done.code, done.reason.clone())
            }
            Ok(None) => {
                let _ = send.reset(wire::var(code::Reset::CANCELLED.0)); // may be finished
                reader.stop(code::Reset::CANCELLED.0);
                let ended = Ended::new(code::Done::TRACK_ENDED, "the relay unsubscribed");
                Ended { paused: true, ..ended }
            }
            Err(_) => {
                let _ = timeout(LATE_STREAMS, upstream.has_seen_all(0)).await; // readers see the loss too
                Ended::new(code::Done::INTERNAL_ERROR, "the publisher is gone")
            }
        };
        self.state.lock().upstreams.remove(&upstream.alias);
        upstream.track.remove_upstream(upstream, &ended, Instant::now());
        match result {
            Err(SessionError::Violation { code, reason }) => Err(SessionError::Violation { code, reason }),
            _ => Ok(()),
        }
    }
}

impl Options {
    pub fn new(parameters: &Parameters, window: Window, track: &LiveTrack) -> Self {
        let properties = track.data.parsed_properties();
        let mut options = Self {
            window,
            forward: true,
            priority: 128,
            order: properties.group_order.unwrap_or_default(),
            object_timeout: duration(properties.object_delivery_timeout),
            subgroup_timeout: duration(properties.subgroup_delivery_timeout),
        };
        options.apply(parameters, track);
        options
    }

    /// Takes over what `parameters` say, but for the filter.
    fn apply(&mut self, parameters: &Parameters, track: &LiveTrack) {
        let properties = track.data.parsed_properties();
        self.forward = parameters.forward.unwrap_or(self.forward);
        self.priority = parameters.subscriber_priority.unwrap_or(self.priority);
        self.order = parameters.group_order.unwrap_or(self.order);
        if parameters.object_delivery_timeout.is_some() {
            let publisher = properties.object_delivery_timeout;
            self.object_timeout = smaller(publisher, parameters.object_delivery_timeout);
        }
        if parameters.subgroup_delivery_timeout.is_some() {
            let publisher = properties.subgroup_delivery_timeout;
            self.subgroup_timeout = smaller(publisher, parameters.subgroup_delivery_timeout);
        }
    }
}

fn duration(millis: Option<u64>) -> Option<Duration> {
    millis.filter(|millis| *millis > 0).map(Duration::from_millis)
}

/// The smaller of two delivery timeouts in milliseconds, where 0 means none.
fn smaller(one: Option<u64>, other: Option<u64>) -> Option<Duration> {
    match (duration(one), duration(other)) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

/// An unused alias, `wanted` if it is free, else one that takes as many bytes where there is one.
fn free_alias(wanted: u64, used: impl Fn(u64) -> bool) -> u64 {
    let same_len = |alias: &u64| vi64::len(*alias) == vi64::len(wanted);
    let near = std::iter::once(wanted).chain((0..=127).filter(same_len));
    near.chain(0..).find(|alias| !used(*alias)).unwrap_or(wanted)
}

async fn sleep_until(deadline: Option<Clock>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
