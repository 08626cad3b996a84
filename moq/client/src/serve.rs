//! The publisher's side of a session. It answers the peer's requests for a broadcast and sends its objects.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use millrace_moq::data::{FetchEncoder, FetchItem, FetchObject, RangeEnd};
use millrace_moq::data::{encode_fetch_header, encode_object_header};
use millrace_moq::message::{
    FetchKind, FetchOk, FetchRequest, Publish, PublishDone, PublishNamespace, RequestError, RequestOk,
    RequestUpdate, Subscribe, SubscribeOk, TrackStatus,
};
use millrace_moq::param::Scope;
use millrace_moq::{
    Draft, Filter, GroupOrder, Location, Message, ObjectDatagram, Parameters, Properties, Status,
    SubgroupHeader, SubgroupId, code,
};
use millrace_webtransport::SendStream;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::broadcast::{Broadcast, BroadcastEvent, BroadcastTrack, DatagramObject, Subgroup};
use crate::session::{Error, Handler, Session, SessionRequest, reset, violation};

/// Longest time that the end of a subscription waits until the peer has acknowledged all streams.
const DRAIN: Duration = Duration::from_secs(10);
/// Longest time that a joining FETCH waits for the SUBSCRIBE that it refers to, which may arrive later than the FETCH.
const JOIN_WAIT: Duration = Duration::from_secs(2);
/// The object ID that stands for the end of a group in ranges of locations. It is the largest object ID that every peer
/// can represent.
const LAST_OBJECT: u64 = (1 << 62) - 1;

/// A server of one broadcast on one session.
///
/// ```no_run
/// use std::sync::Arc;
/// use millrace_client::{broadcast::Broadcast, serve::BroadcastServer, session::{Remote, Session}};
///
/// # async fn example(remote: Remote, broadcast: Arc<Broadcast>) -> Result<(), Box<dyn std::error::Error>> {
/// let session = Session::connect(&remote).await?;
/// let server = BroadcastServer::new(Arc::clone(&session), broadcast);
/// // The namespace stays announced until the request is dropped.
/// let _announced = server.announce().await?;
/// // Requests of the peer are answered until the session ends.
/// Err(session.run(server).await.into())
/// # }
/// ```
pub struct BroadcastServer {
    session: Arc<Session>,
    broadcast: Arc<Broadcast>,
    next_alias: AtomicU64,
    /// Established subscriptions by request ID, for joining FETCHes.
    joinable: watch::Sender<HashMap<u64, Joinable>>,
}

#[derive(Clone)]
struct Joinable {
    track: Arc<BroadcastTrack>,
    joining: Option<Location>,
    forward: bool,
}

impl BroadcastServer {
    /// Makes a server. It has to be passed to [`Session::run`].
    pub fn new(session: Arc<Session>, broadcast: Arc<Broadcast>) -> Arc<Self> {
        let joinable = watch::Sender::new(HashMap::new());
        Arc::new(Self { session, broadcast, next_alias: AtomicU64::new(0), joinable })
    }

    /// Announces the namespace with PUBLISH_NAMESPACE. The namespace stays announced until the returned request is
    /// dropped.
    pub async fn announce(&self) -> Result<SessionRequest, Error> {
        let message = PublishNamespace {
            request_id: self.session.next_request_id(),
            namespace: self.broadcast.namespace().clone(),
            parameters: Parameters::default(),
        };
        let mut request = self.session.request(message).await?;
        match request.answer().await? {
            Message::RequestOk(ok) => ok.check(self.session.draft(), Scope::NAMESPACE_OK)?,
            _ => return Err(violation("an answer that PUBLISH_NAMESPACE does not allow")),
        }
        Ok(request)
    }

    /// Pushes `track` to the peer with PUBLISH, and serves it until the track ends.
    pub async fn publish(self: Arc<Self>, track: Arc<BroadcastTrack>) -> Result<(), Error> {
        let request_id = self.session.next_request_id();
        let track_alias = self.next_alias.fetch_add(1, Ordering::Relaxed);
        let message = Publish {
            request_id,
            track: track.name().clone(),
            track_alias,
            parameters: Parameters { largest_object: track.largest(), ..Parameters::default() },
            properties: track.properties().clone(),
        };
        let mut request = self.session.request(message).await?;
        let parameters = match request.answer().await? {
            Message::RequestOk(ok) => {
                ok.check(self.session.draft(), Scope::PUBLISH_OK)?;
                ok.parameters
            }
            _ => return Err(violation("an answer that PUBLISH does not allow")),
        };
        let subscription = ServedSubscription::new(&self, request_id, track_alias, track, &parameters);
        if !subscription.window.forward {
            subscription.log_forwarding();
        }
        subscription.run(request, None).await
    }

    /// Returns the largest group ID that the relay has of any track of the broadcast. Only Millrace relays are asked,
    /// because not all other relays support TRACK_STATUS.
    pub async fn largest_group(&self) -> Option<u64> {
        if !self.session.is_with_millrace().await {
            return None;
        }
        let mut largest = None;
        for track in self.broadcast.tracks() {
            // The relay answers with REQUEST_ERROR if it does not have the track.
            let known = self.ask_largest(&track).await.ok().flatten();
            largest = largest.max(known.map(|known| known.group));
        }
        largest
    }

    async fn ask_largest(&self, track: &BroadcastTrack) -> Result<Option<Location>, Error> {
        let request_id = self.session.next_request_id();
        let parameters = Parameters::default();
        let message = TrackStatus { request_id, track: track.name().clone(), parameters };
        match self.session.request(message).await?.answer().await? {
            Message::RequestOk(ok) => Ok(ok.parameters.largest_object),
            _ => Err(violation("an answer that TRACK_STATUS does not allow")),
        }
    }

    /// Waits until the peer has subscribed to a track of the broadcast.
    pub async fn subscribed(&self) {
        // `wait_for` cannot fail, because the channel's sender is in `self`.
        let _ = self.joinable.subscribe().wait_for(|all| !all.is_empty()).await;
    }

    /// Waits until no subscription of the peer is left. A subscription lasts until its last objects are acknowledged.
    pub async fn idle(&self) {
        // `wait_for` cannot fail, because the channel's sender is in `self`.
        let _ = self.joinable.subscribe().wait_for(|all| all.is_empty()).await;
    }

    async fn subscribe(
        self: Arc<Self>,
        message: Subscribe,
        mut request: SessionRequest,
    ) -> Result<(), Error> {
        let Some(track) = self.broadcast.get(&message.track) else {
            return request.refuse(code::Request::DOES_NOT_EXIST, "no such track").await;
        };
        let track_alias = self.next_alias.fetch_add(1, Ordering::Relaxed);
        let subscription = ServedSubscription::new(
            &self,
            message.request_id,
            track_alias,
            track.clone(),
            &message.parameters,
        );
        let parameters = Parameters { largest_object: subscription.joining, ..Parameters::default() };
        let properties = properties_for(&track, &message.parameters);
        request.send(SubscribeOk { track_alias, parameters, properties }).await?;
        let fill = message.parameters.fill.map(|fill| (message.request_id, *fill));
        subscription.run(request, fill).await
    }

    async fn track_status(&self, message: TrackStatus, mut request: SessionRequest) -> Result<(), Error> {
        let Some(track) = self.broadcast.get(&message.track) else {
            return request.refuse(code::Request::DOES_NOT_EXIST, "no such track").await;
        };
        let parameters = Parameters { largest_object: track.largest(), ..Parameters::default() };
        let properties = properties_for(&track, &message.parameters);
        request.send(RequestOk { parameters, properties }).await?;
        request.finish();
        Ok(())
    }

    async fn fetch(&self, message: FetchRequest, mut request: SessionRequest) -> Result<(), Error> {
        let order = message.parameters.group_order.unwrap_or_default();
        let (track, start, last) = match self.fetch_range(message.kind).await {
            Ok(range) => range,
            Err((code, reason)) => return request.refuse(code, reason).await,
        };
        let Some(largest) = track.largest().filter(|largest| start <= *largest) else {
            return request.refuse(code::Request::INVALID_RANGE, "the track has no objects yet").await;
        };
        let last = last.min(largest);
        let end_of_track = track.is_ended() && last >= largest;
        let parameters = Parameters::default();
        let properties = properties_for(&track, &message.parameters);
        request.send(FetchOk { end_of_track, last, parameters, properties }).await?;
        request.finish();

        let past = PastObjects { request_id: message.request_id, order, start, last };
        let mut stream = self.session.streams().open_uni().await?;
        past.write(&track, self.session.draft(), &mut stream).await
    }

    /// Returns the track of a FETCH, and the first and last location of the FETCH, or the error code and reason with
    /// which to refuse it.
    async fn fetch_range(
        &self,
        kind: FetchKind,
    ) -> Result<(Arc<BroadcastTrack>, Location, Location), (code::Request, &'static str)> {
        let (subscription, first_group): (u64, Box<dyn Fn(u64) -> u64 + Send>) = match kind {
            FetchKind::Standalone { track, range } => {
                let track = self.broadcast.get(&track);
                let track = track.ok_or((code::Request::DOES_NOT_EXIST, "no such track"))?;
                let largest = track.largest();
                let start = range.start(largest);
                let last = range.end().or(largest).unwrap_or_default();
                return match range.end().is_some() && last < start {
                    true => Err((code::Request::INVALID_RANGE, "the range ends before it starts")),
                    false => Ok((track, start, last)),
                };
            }
            FetchKind::RelativeJoining { subscription, groups_back } => {
                (subscription, Box::new(move |joining| joining.saturating_sub(groups_back)))
            }
            FetchKind::AbsoluteJoining { subscription, first_group } => {
                (subscription, Box::new(move |_| first_group))
            }
        };
        let mut joinable = self.joinable.subscribe();
        let found = tokio::time::timeout(JOIN_WAIT, joinable.wait_for(|all| all.contains_key(&subscription)));
        let found = match found.await {
            Ok(Ok(all)) => all.get(&subscription).cloned(),
            _ => None,
        };
        let found = found.ok_or((code::Request::INVALID_JOINING_REQUEST_ID, "no such subscription"))?;
        let joining = found.joining.filter(|_| found.forward);
        let joining = joining.ok_or((code::Request::INVALID_RANGE, "nothing to join"))?;
        Ok((found.track, Location::new(first_group(joining.group), 0), joining))
    }
}

/// Returns the track's properties, or none if the request's `parameters` decline them (INCLUDE_PROPERTIES).
fn properties_for(track: &BroadcastTrack, parameters: &Parameters) -> Properties {
    match parameters.include_properties {
        Some(false) => Properties::default(),
        Some(true) | None => track.properties().clone(),
    }
}

/// Reports whether a message has range filters. A peer must not send any, because we do not send MAX_FILTER_RANGES.
fn has_range_filters(message: &Message) -> bool {
    let parameters = match message {
        Message::Subscribe(message) => &message.parameters,
        Message::Fetch(message) => &message.parameters,
        _ => return false,
    };
    parameters.has_range_filters()
}

impl Handler for BroadcastServer {
    async fn request(self: Arc<Self>, message: Message, mut request: SessionRequest) -> Result<(), Error> {
        if has_range_filters(&message) {
            return request
                .refuse(code::Request::INVALID_FILTER, "this publisher does not support range filters")
                .await;
        }
        match message {
            Message::Subscribe(message) => self.subscribe(message, request).await,
            Message::Fetch(message) => self.fetch(message, request).await,
            Message::TrackStatus(message) => self.track_status(message, request).await,
            _ => request.refuse(code::Request::NOT_SUPPORTED, "this publisher accepts no such request").await,
        }
    }
}

/// Objects that exist already, sent on one stream: a FETCH response, or a fill (objects from before a subscription).
#[derive(Clone, Copy)]
struct PastObjects {
    request_id: u64,
    order: GroupOrder,
    start: Location,
    last: Location,
}

impl PastObjects {
    /// Returns the last location of the range that lies in a group before `oldest`.
    fn last_before(self, oldest: u64) -> Option<Location> {
        let group = oldest.checked_sub(1).filter(|group| self.start.group <= *group)?;
        Some(Location::new(group, LAST_OBJECT).min(self.last))
    }

    /// Writes the objects of the range that the track's history still has. Ranges that were dropped from the history
    /// are marked in the FETCH response as unknown, not as nonexistent.
    async fn write(self, track: &BroadcastTrack, draft: Draft, stream: &mut SendStream) -> Result<(), Error> {
        let Self { request_id, order, start, last } = self;
        let objects = track.range(start, last, order);
        let forgotten = track.oldest_group().and_then(|oldest| self.last_before(oldest));
        let mut encoder = FetchEncoder::new(draft, order);
        let mut out = Vec::new();
        encode_fetch_header(request_id, &mut out);
        let unknown = |last| FetchItem::Range { last, end: RangeEnd::Unknown };
        // Groups that were dropped from the track's history are older than the groups in it. In the FETCH response, the
        // range of the dropped groups comes first in ascending order, and last in descending order.
        if let (Some(last), GroupOrder::Ascending) = (forgotten, order) {
            encoder.encode(&unknown(last), &mut out);
        }
        for object in objects {
            let item = FetchItem::Object(FetchObject {
                location: object.location,
                subgroup: object.subgroup,
                priority: object.priority,
                properties: Bytes::new(),
                payload_len: object.payload.len() as u64,
            });
            encoder.encode(&item, &mut out);
            let header = Bytes::from(std::mem::take(&mut out));
            stream.write_all_chunks(&mut [header, object.payload.clone()]).await?;
        }
        if let (Some(_), GroupOrder::Descending) = (forgotten, order) {
            encoder.encode(&unknown(start), &mut out);
        }
        stream.write_all(&out).await?;
        // Finishing fails only if the peer has stopped the stream.
        let _ = stream.finish();
        Ok(())
    }
}

/// The range of objects that a subscription forwards. REQUEST_UPDATE changes it.
#[derive(Clone, Copy, Debug)]
struct ObjectWindow {
    start: Location,
    /// The last location that the subscription forwards. The largest possible object ID means the end of the group.
    end: Option<Location>,
    forward: bool,
}

impl ObjectWindow {
    /// Reports whether a group comes after the last group that the subscription forwards.
    fn is_past(&self, group: u64) -> bool {
        self.end.is_some_and(|end| group > end.group)
    }

    /// Returns the object IDs of a group that the subscription forwards.
    fn objects(&self, group: u64) -> std::ops::RangeInclusive<u64> {
        let first = if group == self.start.group { self.start.object } else { 0 };
        let last = self.end.filter(|end| end.group == group).map_or(u64::MAX, |end| end.object);
        first..=last
    }
}

/// One subscription to a track, requested by either side.
///
/// `run` owns the request stream and starts one `SubgroupSender` task for each subgroup. A subscription ends in one of
/// two ways:
///
/// * The track or the filter ends: `end` waits until all streams are finished, sends PUBLISH_DONE with their number,
///   and waits for acknowledgements.
/// * The peer cancels or breaks the protocol: the sender of `stop` is dropped, and every writer resets its stream.
///
/// An update that pauses or resumes forwarding replaces `stop`, which resets the streams of earlier writers only. As
/// long as the subscription lasts, it is in [`BroadcastServer::joinable`], where a joining FETCH finds its joining
/// location.
struct ServedSubscription {
    server: Arc<BroadcastServer>,
    request_id: u64,
    alias: u64,
    track: Arc<BroadcastTrack>,
    window: ObjectWindow,
    /// The subscription's location filter, from which `window` (the range of forwarded objects) was computed.
    filter: Option<Filter>,
    /// The track's largest location at the time when this subscription began to forward (the joining location).
    joining: Option<Location>,
}

/// Counts of a subscription's data streams.
struct SentStreams {
    /// Number of streams opened so far, which PUBLISH_DONE reports.
    opened: AtomicU64,
    /// Number of streams that have not ended.
    open: watch::Sender<usize>,
}

impl ServedSubscription {
    fn new(
        server: &Arc<BroadcastServer>,
        request_id: u64,
        alias: u64,
        track: Arc<BroadcastTrack>,
        parameters: &Parameters,
    ) -> Self {
        let largest = track.largest();
        let window = ObjectWindow {
            // A subscription without a filter starts with the group that is being published.
            start: match parameters.filter {
                Some(filter) => filter.start(largest),
                None => Location::new(largest.map_or(0, |largest| largest.group), 0),
            },
            end: parameters.filter.and_then(|filter| filter.end()),
            forward: parameters.forward.unwrap_or(true),
        };
        let subscription = Self {
            server: server.clone(),
            request_id,
            alias,
            track,
            window,
            filter: parameters.filter,
            joining: largest,
        };
        subscription.register();
        subscription
    }

    /// Stores the subscription's current state in [`BroadcastServer::joinable`], where a joining FETCH finds it.
    fn register(&self) {
        let joinable =
            Joinable { track: self.track.clone(), joining: self.joining, forward: self.window.forward };
        self.server.joinable.send_modify(|all| {
            all.insert(self.request_id, joinable);
        });
    }

    /// Serves the subscription until it ends. `fill` has the request ID and parameters for objects from before the
    /// subscription, if they are requested.
    async fn run(
        mut self,
        mut request: SessionRequest,
        fill: Option<(u64, Parameters)>,
    ) -> Result<(), Error> {
        let result = self.deliver(&mut request, fill).await;
        self.server.joinable.send_modify(|all| {
            all.remove(&self.request_id);
        });
        result
    }

    async fn deliver(
        &mut self,
        request: &mut SessionRequest,
        fill: Option<(u64, Parameters)>,
    ) -> Result<(), Error> {
        let streams = Arc::new(SentStreams { opened: AtomicU64::new(0), open: watch::Sender::new(0) });
        let mut writers = JoinSet::new();
        let mut stop = watch::Sender::new(());
        if let Some((request_id, fill)) = fill {
            writers.spawn(self.fill(request_id, &fill, self.joining, &streams, &stop));
        }
        match self.pump(request, &streams, &mut writers, &mut stop).await {
            Ok(code) => self.end(request, code, &streams, &mut writers).await,
            Err(error) => {
                // Aborting the writers would drop their streams, which quinn finishes as if they were complete.
                // Dropping `stop` makes the writers reset the streams instead.
                writers.detach_all();
                Err(error)
            }
        }
    }

    /// Starts a task for each new subgroup, which sends the subgroup, until the subscription ends. Returns the status
    /// code for PUBLISH_DONE.
    async fn pump(
        &mut self,
        request: &mut SessionRequest,
        streams: &Arc<SentStreams>,
        writers: &mut JoinSet<()>,
        stop: &mut watch::Sender<()>,
    ) -> Result<code::Done, Error> {
        let mut listener = self.track.listen(Some(self.window.start.group));
        let mut peer_speaks = true;
        let stopped = request.stopped();
        tokio::pin!(stopped);
        loop {
            tokio::select! {
                event = listener.events.recv() => match event {
                    Some(BroadcastEvent::Subgroup(subgroup)) => {
                        let Some(subgroup) = subgroup.upgrade() else { continue };
                        let is_past = self.window.is_past(subgroup.group);
                        if is_past && self.server.session.draft().ends_with_its_filter() {
                            return Ok(code::Done::SUBSCRIPTION_ENDED);
                        }
                        if self.window.forward && !is_past && subgroup.group >= self.window.start.group {
                            streams.open.send_modify(|open| *open += 1);
                            writers.spawn(self.writer(streams.clone(), stop).run(subgroup));
                        }
                    }
                    Some(BroadcastEvent::Datagram(datagram)) => {
                        if let Some(datagram) = datagram.upgrade() {
                            self.send_datagram(&datagram);
                        }
                    }
                    Some(BroadcastEvent::End) | None => return Ok(code::Done::TRACK_ENDED),
                },
                message = request.next(), if peer_speaks => match message? {
                    Some(Message::RequestUpdate(update)) => {
                        if update.parameters.has_range_filters() {
                            let reason = "this publisher does not support range filters";
                            request.send(RequestError::new(code::Request::INVALID_FILTER, reason)).await?;
                            return Ok(code::Done::UPDATE_FAILED);
                        }
                        let fill = update.parameters.fill.clone().map(|fill| (update.request_id, fill));
                        let largest = self.track.largest();
                        if self.update(update, request).await? {
                            // Dropping the old sender `stop` makes the tasks that hold its receivers reset their
                            // streams.
                            *stop = watch::Sender::new(());
                            listener = self.track.listen(Some(self.window.start.group));
                        }
                        if let Some((request_id, fill)) = fill {
                            writers.spawn(self.fill(request_id, &fill, largest, streams, stop));
                        }
                    }
                    Some(Message::Unsubscribe(_)) => return Err(Error::Cancelled),
                    Some(_) => return Err(violation("a message that a subscription does not allow")),
                    None => peer_speaks = false,
                },
                () = &mut stopped => return Err(Error::Cancelled),
                Some(_) = writers.join_next(), if !writers.is_empty() => {}
            }
        }
    }

    fn writer(&self, streams: Arc<SentStreams>, stop: &watch::Sender<()>) -> SubgroupSender {
        SubgroupSender {
            session: Arc::clone(&self.server.session),
            streams,
            alias: self.alias,
            window: self.window,
            stop: stop.subscribe(),
        }
    }

    /// Returns a future that writes the requested objects from before the subscription, up to the location `largest`.
    /// The future does nothing if no such objects exist, or if the subscription does not forward.
    fn fill(
        &self,
        request_id: u64,
        fill: &Parameters,
        largest: Option<Location>,
        streams: &Arc<SentStreams>,
        stop: &watch::Sender<()>,
    ) -> impl Future<Output = ()> + Send + use<> {
        let largest = largest.filter(|_| self.window.forward);
        let range = fill.filter.or(self.filter).unwrap_or(Filter::All);
        let start = range.start(largest);
        let order = fill.group_order.unwrap_or_default();
        let past = largest.map(|largest| PastObjects {
            request_id,
            order,
            start,
            last: range.end().unwrap_or(largest).min(largest),
        });
        let past = past.filter(|past| past.start <= past.last);
        let session = Arc::clone(&self.server.session);
        let track = Arc::clone(&self.track);
        let streams = Arc::clone(streams);
        let mut stop = stop.subscribe();
        // The stream is counted before it is opened, so that PUBLISH_DONE waits for it.
        streams.open.send_modify(|open| *open += usize::from(past.is_some()));
        async move {
            let Some(past) = past else { return };
            if let Ok(mut stream) = session.streams().open_uni().await {
                streams.opened.fetch_add(1, Ordering::Relaxed);
                let written = tokio::select! {
                    written = past.write(&track, session.draft(), &mut stream) => written,
                    // The channel `stop` carries no value: it only reports that its sender was dropped.
                    _ = stop.changed() => Err(Error::Cancelled),
                };
                if written.is_err() {
                    reset(&mut stream, code::Reset::CANCELLED);
                }
            }
            streams.open.send_modify(|open| *open -= 1);
        }
    }

    /// Applies a REQUEST_UPDATE and answers it. Returns whether forwarding was paused or resumed.
    async fn update(&mut self, update: RequestUpdate, request: &mut SessionRequest) -> Result<bool, Error> {
        update.parameters.check(self.server.session.draft(), Scope::UPDATE_SUBSCRIPTION)?;
        let largest = self.track.largest();
        let forward = update.parameters.forward.unwrap_or(self.window.forward);
        let switched = forward != self.window.forward;
        if let Some(filter) = update.parameters.filter {
            self.window.start = filter.start(largest);
            self.window.end = filter.end();
            self.filter = Some(filter);
        }
        if switched && forward {
            // After a pause, the subscription continues after the track's largest location. Objects published during
            // the pause can be requested with FETCH.
            self.window.start = self.window.start.max(Filter::NextObject.start(largest));
            self.joining = largest;
        }
        self.window.forward = forward;
        if switched {
            self.log_forwarding();
        }
        self.register();
        let parameters = Parameters { largest_object: largest, ..Parameters::default() };
        request.send(RequestOk { parameters, ..RequestOk::default() }).await?;
        Ok(switched)
    }

    /// Logs whether the relay requests the track's objects. A Millrace relay pauses a subscription while another
    /// session publishes the same track.
    fn log_forwarding(&self) {
        let track = self.track.name().typed();
        match self.window.forward {
            true => tracing::info!(%track, "the relay asks for the objects of the track"),
            false => tracing::warn!(
                %track,
                "standing by: the relay asks for no objects of this track now, because another session publishes the \
                 track or the track has no subscriber"
            ),
        }
    }

    fn send_datagram(&self, object: &DatagramObject) {
        let passes = self.window.forward
            && object.location >= self.window.start
            && self.window.end.is_none_or(|end| object.location <= end);
        if !passes {
            return;
        }
        let datagram = ObjectDatagram {
            alias: self.alias,
            group: object.location.group,
            object: object.location.object,
            priority: Some(object.priority),
            end_of_group: false,
            properties: Bytes::new(),
            status: None,
            payload: object.payload.clone(),
        };
        let mut out = Vec::with_capacity(datagram.payload.len() + 32);
        datagram.encode(&mut out);
        // Sending fails if the datagram is too large for the path, or the session has ended. MoQ Transport allows
        // dropping such an object silently.
        if let Err(error) = self.server.session.streams().send_datagram(out.into()) {
            tracing::debug!(location = ?object.location, "dropped a datagram with an object: {error}");
        }
    }

    /// Sends PUBLISH_DONE once all streams are finished, and waits until the peer has acknowledged them.
    async fn end(
        &self,
        request: &mut SessionRequest,
        code: code::Done,
        streams: &SentStreams,
        writers: &mut JoinSet<()>,
    ) -> Result<(), Error> {
        let mut open = streams.open.subscribe();
        let all_closed = async {
            // `wait_for` cannot fail, because the channel's sender is in `streams`.
            let _ = open.wait_for(|open| *open == 0).await;
        };
        tokio::select! {
            () = all_closed => {}
            () = request.stopped() => return Err(Error::Cancelled),
        }
        let stream_count = streams.opened.load(Ordering::Relaxed);
        request.send(PublishDone { code, stream_count, reason: String::new() }).await?;
        request.finish();
        let drained = async {
            while writers.join_next().await.is_some() {}
            request.stopped().await;
        };
        if tokio::time::timeout(DRAIN, drained).await.is_err() {
            tracing::warn!(track = %self.track.name().typed(), "the relay has not acknowledged all objects of the track in time: some may be lost");
        }
        Ok(())
    }
}

/// A task that writes one subgroup to one stream.
struct SubgroupSender {
    session: Arc<Session>,
    streams: Arc<SentStreams>,
    alias: u64,
    window: ObjectWindow,
    stop: watch::Receiver<()>,
}

impl SubgroupSender {
    /// Writes the subgroup to a stream. Returns once the peer has acknowledged the stream, or the stream is reset.
    async fn run(mut self, subgroup: Arc<Subgroup>) {
        let mut stream = None;
        let mut stop = self.stop.clone();
        let result = tokio::select! {
            result = self.write(subgroup, &mut stream) => result,
            // The channel `stop` carries no value: it only reports that its sender was dropped.
            _ = stop.changed() => Err(code::Reset::CANCELLED),
        };
        let acknowledged = stream.as_mut().map(|stream: &mut SendStream| match result {
            Ok(()) => {
                // Finishing fails only if the peer has stopped the stream.
                let _ = stream.finish();
                Some(stream.stopped())
            }
            Err(code) => {
                reset(stream, code);
                None
            }
        });
        self.streams.open.send_modify(|open| *open -= 1);
        if let Some(Some(acknowledged)) = acknowledged {
            let _ = acknowledged.await;
        }
    }

    async fn write(
        &mut self,
        subgroup: Arc<Subgroup>,
        stream: &mut Option<SendStream>,
    ) -> Result<(), code::Reset> {
        let mut changed = subgroup.changed();
        // While the writer waits for more data, it has only a weak reference to the subgroup, so that the track's
        // history can drop the subgroup.
        let weak = Arc::downgrade(&subgroup);
        drop(subgroup);
        let mut next = 0;
        let mut previous = None;
        loop {
            changed.borrow_and_update();
            // The track's history has dropped the subgroup, because the peer reads too slowly.
            let subgroup = weak.upgrade().ok_or(code::Reset::TOO_FAR_BEHIND)?;
            let (objects, ended) = subgroup.from(next);
            next += objects.len();
            let before = objects.len();
            let wanted = self.window.objects(subgroup.group);
            let skipped = objects.iter().take_while(|(id, _)| id < wanted.start()).count();
            let objects = &objects[skipped..];
            let count = objects.iter().take_while(|(id, _)| id <= wanted.end()).count();
            let ended = ended || count < objects.len();
            let objects = &objects[..count];
            if let Some((first_id, _)) = objects.first() {
                let mut chunks = Vec::with_capacity(2 * objects.len());
                if stream.is_none() {
                    let header = self.header(&subgroup, *first_id, skipped == 0 && next == before);
                    *stream = Some(self.open(subgroup.priority).await?);
                    chunks.push(header);
                }
                drop(subgroup);
                push_objects(objects, &mut previous, &mut chunks);
                if let Some(stream) = stream {
                    stream.write_all_chunks(&mut chunks).await.map_err(|_| code::Reset::CANCELLED)?;
                }
            } else {
                drop(subgroup);
            }
            if ended {
                return Ok(());
            }
            // `changed` fails if the subgroup was dropped. The next iteration of the loop detects that.
            let _ = changed.changed().await;
        }
    }

    fn header(&self, subgroup: &Subgroup, first_id: u64, is_first: bool) -> Bytes {
        let id = match subgroup.id {
            // The subgroup's ID is that of its first object. This stream begins with a later object, so the header has
            // to state the ID.
            SubgroupId::FirstObject if !is_first => {
                let (objects, _) = subgroup.from(0);
                SubgroupId::Explicit(objects.first().map_or(first_id, |(id, _)| *id))
            }
            id => id,
        };
        let mut out = Vec::new();
        SubgroupHeader {
            alias: self.alias,
            group: subgroup.group,
            subgroup: id,
            priority: Some(subgroup.priority),
            properties: false,
            end_of_group: false,
            first_object: is_first,
        }
        .encode(&mut out);
        out.into()
    }

    async fn open(&self, priority: u8) -> Result<SendStream, code::Reset> {
        let stream = self.session.streams().open_uni().await.map_err(|_| code::Reset::SESSION_CLOSED)?;
        self.streams.opened.fetch_add(1, Ordering::Relaxed);
        // quinn sends streams with higher priority numbers first. Control streams have priority 0, so data streams get
        // negative ones.
        let _ = stream.set_priority(-1 - i32::from(priority));
        Ok(stream)
    }
}

fn push_objects(objects: &[(u64, Bytes)], previous: &mut Option<u64>, chunks: &mut Vec<Bytes>) {
    for (id, payload) in objects {
        let mut header = Vec::with_capacity(16);
        encode_object_header(*previous, *id, None, payload.len() as u64, Status::Normal, &mut header);
        chunks.push(header.into());
        chunks.push(payload.clone());
        *previous = Some(*id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_range_of_a_fetch_ends_within_the_requested_range() {
        let past = PastObjects {
            request_id: 0,
            order: GroupOrder::Ascending,
            start: Location::new(5, 1),
            last: Location::new(7, 3),
        };
        for (oldest, expected) in [
            (0, None),
            (5, None),
            (6, Some(Location::new(5, LAST_OBJECT))),
            (8, Some(Location::new(7, 3))),
            (90, Some(Location::new(7, 3))),
        ] {
            assert_eq!(past.last_before(oldest), expected, "{oldest}");
        }
    }
}
