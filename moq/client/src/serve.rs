//! The publisher's side of a session: answers what a relay (or a subscriber) asks of a broadcast.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use millrace_moq::data::{FetchEncoder, FetchItem, FetchObject, RangeEnd};
use millrace_moq::data::{encode_fetch_header, encode_object_header};
use millrace_moq::message::{
    Fetch, FetchKind, FetchOk, Publish, PublishDone, PublishNamespace, RequestError, RequestOk,
    RequestUpdate, Subscribe, SubscribeOk, TrackStatus,
};
use millrace_moq::param::Scope;
use millrace_moq::{
    Datagram, Draft, Filter, GroupOrder, Location, Message, Parameters, Properties, Status, SubgroupHeader,
    SubgroupId, code,
};
use millrace_webtransport::SendStream;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::broadcast::{Broadcast, DatagramObject, Event, Subgroup, Track};
use crate::session::{Error, Handler, Request, Session, reset, violation};

/// How long the end of a subscription waits for what was sent to be acknowledged.
const DRAIN: Duration = Duration::from_secs(10);
/// How long a joining FETCH waits for the subscription that it names, which may overtake it.
const JOIN_WAIT: Duration = Duration::from_secs(2);
/// The last object of a group, whichever it is: the largest ID that every peer can hold.
const LAST_OBJECT: u64 = (1 << 62) - 1;

/// Serves one broadcast on one session.
pub struct Server {
    session: Arc<Session>,
    broadcast: Arc<Broadcast>,
    next_alias: AtomicU64,
    /// Established subscriptions by request ID, for joining FETCHes.
    joinable: watch::Sender<HashMap<u64, Joinable>>,
}

#[derive(Clone)]
struct Joinable {
    track: Arc<Track>,
    joining: Option<Location>,
    forward: bool,
}

impl Server {
    pub fn new(session: Arc<Session>, broadcast: Arc<Broadcast>) -> Arc<Self> {
        let joinable = watch::Sender::new(HashMap::new());
        Arc::new(Self { session, broadcast, next_alias: AtomicU64::new(0), joinable })
    }

    /// Announces the namespace until the broadcast is over or the peer refuses.
    pub async fn announce(&self) -> Result<Request, Error> {
        let message = PublishNamespace {
            request_id: self.session.next_request_id(),
            namespace: self.broadcast.namespace().clone(),
            parameters: Parameters::default(),
        };
        let mut request = self.session.request(message).await?;
        match request.answer().await? {
            Message::RequestOk(ok) => ok.check(self.session.draft(), Scope::NAMESPACE_OK)?,
            _ => return Err(violation("an answer that PUBLISH_NAMESPACE does not have")),
        }
        Ok(request)
    }

    /// Publishes `track` towards the peer without being asked, to its end.
    pub async fn publish(self: Arc<Self>, track: Arc<Track>) -> Result<(), Error> {
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
            _ => return Err(violation("an answer that PUBLISH does not have")),
        };
        let subscription = Subscription::new(&self, request_id, track_alias, track, &parameters);
        if !subscription.window.forward {
            subscription.log_forwarding();
        }
        subscription.run(request, None).await
    }

    /// Returns the largest group that a relay of ours still has of any of the broadcast's tracks; others are not asked, as not all
    /// of them know TRACK_STATUS.
    pub async fn largest_group(&self) -> Option<u64> {
        if !self.session.is_with_millrace().await {
            return None;
        }
        let mut largest = None;
        for track in self.broadcast.tracks() {
            // One that the relay does not know is refused.
            let known = self.ask_largest(&track).await.ok().flatten();
            largest = largest.max(known.map(|known| known.group));
        }
        largest
    }

    async fn ask_largest(&self, track: &Track) -> Result<Option<Location>, Error> {
        let request_id = self.session.next_request_id();
        let parameters = Parameters::default();
        let message = TrackStatus { request_id, track: track.name().clone(), parameters };
        match self.session.request(message).await?.answer().await? {
            Message::RequestOk(ok) => Ok(ok.parameters.largest_object),
            _ => Err(violation("an answer that TRACK_STATUS does not have")),
        }
    }

    /// Returns when there is a subscription.
    pub async fn subscribed(&self) {
        // The sender is in `self`, so this cannot fail.
        let _ = self.joinable.subscribe().wait_for(|all| !all.is_empty()).await;
    }

    /// Returns when there is no subscription, which for one that has ended means delivered too.
    pub async fn idle(&self) {
        // The sender is in `self`, so this cannot fail.
        let _ = self.joinable.subscribe().wait_for(|all| all.is_empty()).await;
    }

    async fn subscribe(self: Arc<Self>, message: Subscribe, mut request: Request) -> Result<(), Error> {
        let Some(track) = self.broadcast.get(&message.track) else {
            return request.refuse(code::Request::DOES_NOT_EXIST, "no such track").await;
        };
        let track_alias = self.next_alias.fetch_add(1, Ordering::Relaxed);
        let subscription =
            Subscription::new(&self, message.request_id, track_alias, track.clone(), &message.parameters);
        let parameters = Parameters { largest_object: subscription.joining, ..Parameters::default() };
        let properties = properties_for(&track, &message.parameters);
        request.send(SubscribeOk { track_alias, parameters, properties }).await?;
        let fill = message.parameters.fill.map(|fill| (message.request_id, *fill));
        subscription.run(request, fill).await
    }

    async fn track_status(&self, message: TrackStatus, mut request: Request) -> Result<(), Error> {
        let Some(track) = self.broadcast.get(&message.track) else {
            return request.refuse(code::Request::DOES_NOT_EXIST, "no such track").await;
        };
        let parameters = Parameters { largest_object: track.largest(), ..Parameters::default() };
        let properties = properties_for(&track, &message.parameters);
        request.send(RequestOk { parameters, properties }).await?;
        request.finish();
        Ok(())
    }

    async fn fetch(&self, message: Fetch, mut request: Request) -> Result<(), Error> {
        let order = message.parameters.group_order.unwrap_or_default();
        let (track, start, last) = match self.fetch_range(message.kind).await {
            Ok(range) => range,
            Err((code, reason)) => return request.refuse(code, reason).await,
        };
        let Some(largest) = track.largest().filter(|largest| start <= *largest) else {
            return request.refuse(code::Request::INVALID_RANGE, "nothing is there yet").await;
        };
        let last = last.min(largest);
        let end_of_track = track.is_ended() && last >= largest;
        let (parameters, properties) = (Parameters::default(), properties_for(&track, &message.parameters));
        request.send(FetchOk { end_of_track, last, parameters, properties }).await?;
        request.finish();

        let past = Past { request_id: message.request_id, order, start, last };
        let mut stream = self.session.streams().open_uni().await?;
        past.write(&track, self.session.draft(), &mut stream).await
    }

    /// The track and the range, both ends inclusive.
    async fn fetch_range(
        &self,
        kind: FetchKind,
    ) -> Result<(Arc<Track>, Location, Location), (code::Request, &'static str)> {
        let (subscription, first_group): (u64, Box<dyn Fn(u64) -> u64 + Send>) = match kind {
            FetchKind::Standalone { track, range } => {
                let track = self.broadcast.get(&track);
                let track = track.ok_or((code::Request::DOES_NOT_EXIST, "no such track"))?;
                let largest = track.largest();
                let (start, last) = (range.start(largest), range.end().or(largest).unwrap_or_default());
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

/// A track's properties for who asks with these parameters.
fn properties_for(track: &Track, parameters: &Parameters) -> Properties {
    match parameters.include_properties {
        Some(false) => Properties::default(),
        Some(true) | None => track.properties().clone(),
    }
}

/// Range filters are for whom we have said MAX_FILTER_RANGES to: nobody.
fn has_range_filters(message: &Message) -> bool {
    let parameters = match message {
        Message::Subscribe(message) => &message.parameters,
        Message::Fetch(message) => &message.parameters,
        _ => return false,
    };
    parameters.has_range_filters()
}

impl Handler for Server {
    async fn request(self: Arc<Self>, message: Message, mut request: Request) -> Result<(), Error> {
        if has_range_filters(&message) {
            return request
                .refuse(code::Request::INVALID_FILTER, "this publisher takes no range filters")
                .await;
        }
        match message {
            Message::Subscribe(message) => self.subscribe(message, request).await,
            Message::Fetch(message) => self.fetch(message, request).await,
            Message::TrackStatus(message) => self.track_status(message, request).await,
            _ => request.refuse(code::Request::NOT_SUPPORTED, "this publisher only publishes").await,
        }
    }
}

/// Objects that are there already, on one stream: a FETCH response, or a fill.
#[derive(Clone, Copy)]
struct Past {
    request_id: u64,
    order: GroupOrder,
    start: Location,
    last: Location,
}

impl Past {
    /// Writes what is held of the range. What history has no more of is unknown, not absent.
    async fn write(self, track: &Track, draft: Draft, stream: &mut SendStream) -> Result<(), Error> {
        let Self { request_id, order, start, last } = self;
        let objects = track.range(start, last, order);
        let forgotten = track.oldest_group().filter(|oldest| start.group < *oldest);
        let mut encoder = FetchEncoder::new(draft, order);
        let mut out = Vec::new();
        encode_fetch_header(request_id, &mut out);
        let unknown = |last| FetchItem::Range { last, end: RangeEnd::Unknown };
        if let (Some(oldest), GroupOrder::Ascending) = (forgotten, order) {
            encoder.encode(&unknown(Location::new(oldest - 1, LAST_OBJECT)), &mut out);
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
        // Fails only when the peer has stopped the stream.
        let _ = stream.finish();
        Ok(())
    }
}

/// What a subscription lets through; changed by REQUEST_UPDATE.
#[derive(Clone, Copy, Debug)]
struct Window {
    start: Location,
    /// Inclusive; the largest object ID is for all of its group.
    end: Option<Location>,
    forward: bool,
}

impl Window {
    /// Whether nothing of a group is let through any more.
    fn is_past(&self, group: u64) -> bool {
        self.end.is_some_and(|end| group > end.group)
    }

    /// Object IDs of a group that are let through.
    fn objects(&self, group: u64) -> std::ops::RangeInclusive<u64> {
        let first = if group == self.start.group { self.start.object } else { 0 };
        let last = self.end.filter(|end| end.group == group).map_or(u64::MAX, |end| end.object);
        first..=last
    }
}

/// One subscription to a track, from either side's request.
struct Subscription {
    server: Arc<Server>,
    request_id: u64,
    alias: u64,
    track: Arc<Track>,
    window: Window,
    /// What the window was made of.
    filter: Option<Filter>,
    /// The largest location when delivery began.
    joining: Option<Location>,
}

/// The data streams of a subscription.
struct Streams {
    /// Ever opened, for PUBLISH_DONE.
    opened: AtomicU64,
    /// Not finished yet.
    open: watch::Sender<usize>,
}

impl Subscription {
    fn new(
        server: &Arc<Server>,
        request_id: u64,
        alias: u64,
        track: Arc<Track>,
        parameters: &Parameters,
    ) -> Self {
        let largest = track.largest();
        let window = Window {
            // Without a filter, from the start of the group that is being published.
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

    /// Lets joining FETCHes find the subscription as it is now.
    fn register(&self) {
        let joinable =
            Joinable { track: self.track.clone(), joining: self.joining, forward: self.window.forward };
        self.server.joinable.send_modify(|all| {
            all.insert(self.request_id, joinable);
        });
    }

    /// `fill`: what is asked for of the past, in the name of a request.
    async fn run(mut self, mut request: Request, fill: Option<(u64, Parameters)>) -> Result<(), Error> {
        let result = self.deliver(&mut request, fill).await;
        self.server.joinable.send_modify(|all| {
            all.remove(&self.request_id);
        });
        result
    }

    async fn deliver(&mut self, request: &mut Request, fill: Option<(u64, Parameters)>) -> Result<(), Error> {
        let streams = Arc::new(Streams { opened: AtomicU64::new(0), open: watch::Sender::new(0) });
        let mut writers = JoinSet::new();
        let mut stop = watch::Sender::new(());
        if let Some((request_id, fill)) = fill {
            writers.spawn(self.fill(request_id, &fill, self.joining, (&streams, &stop)));
        }
        match self.pump(request, &streams, &mut writers, &mut stop).await {
            Ok(code) => self.end(request, code, &streams, &mut writers).await,
            Err(error) => {
                // Aborted, a writer's stream would end as if it were complete: dropping `stop` resets it.
                writers.detach_all();
                Err(error)
            }
        }
    }

    /// Starts a writer for each subgroup that comes, until the subscription is over.
    async fn pump(
        &mut self,
        request: &mut Request,
        streams: &Arc<Streams>,
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
                    Some(Event::Subgroup(subgroup)) => {
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
                    Some(Event::Datagram(datagram)) => {
                        if let Some(datagram) = datagram.upgrade() {
                            self.send_datagram(&datagram);
                        }
                    }
                    Some(Event::End) | None => return Ok(code::Done::TRACK_ENDED),
                },
                message = request.next(), if peer_speaks => match message? {
                    Some(Message::RequestUpdate(update)) => {
                        if update.parameters.has_range_filters() {
                            let reason = "this publisher takes no range filters";
                            request.send(RequestError::new(code::Request::INVALID_FILTER, reason)).await?;
                            return Ok(code::Done::UPDATE_FAILED);
                        }
                        let fill = update.parameters.fill.clone().map(|fill| (update.request_id, fill));
                        let largest = self.track.largest();
                        if self.update(update, request).await? {
                            // Dropping the old sender resets the streams of its writers.
                            *stop = watch::Sender::new(());
                            listener = self.track.listen(Some(self.window.start.group));
                        }
                        if let Some((request_id, fill)) = fill {
                            writers.spawn(self.fill(request_id, &fill, largest, (streams, stop)));
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

    fn writer(&self, streams: Arc<Streams>, stop: &watch::Sender<()>) -> Writer {
        Writer {
            session: Arc::clone(&self.server.session),
            streams,
            alias: self.alias,
            window: self.window,
            stop: stop.subscribe(),
        }
    }

    /// Writes what came up to `largest`, if there is something and the subscription forwards.
    fn fill(
        &self,
        request_id: u64,
        fill: &Parameters,
        largest: Option<Location>,
        (streams, stop): (&Arc<Streams>, &watch::Sender<()>),
    ) -> impl Future<Output = ()> + Send + use<> {
        let largest = largest.filter(|_| self.window.forward);
        let range = fill.filter.or(self.filter).unwrap_or(Filter::All);
        let (start, order) = (range.start(largest), fill.group_order.unwrap_or_default());
        let past = largest.map(|largest| Past {
            request_id,
            order,
            start,
            last: range.end().unwrap_or(largest).min(largest),
        });
        let past = past.filter(|past| past.start <= past.last);
        let (session, track) = (Arc::clone(&self.server.session), Arc::clone(&self.track));
        let (streams, mut stop) = (Arc::clone(streams), stop.subscribe());
        // From now on, so that PUBLISH_DONE waits for it.
        streams.open.send_modify(|open| *open += usize::from(past.is_some()));
        async move {
            let Some(past) = past else { return };
            if let Ok(mut stream) = session.streams().open_uni().await {
                streams.opened.fetch_add(1, Ordering::Relaxed);
                let written = tokio::select! {
                    written = past.write(&track, session.draft(), &mut stream) => written,
                    // Only ever closed.
                    _ = stop.changed() => Err(Error::Cancelled),
                };
                if written.is_err() {
                    reset(&mut stream, code::Reset::CANCELLED);
                }
            }
            streams.open.send_modify(|open| *open -= 1);
        }
    }

    /// Applies an update and answers it. Whether forwarding was switched on or off.
    async fn update(&mut self, update: RequestUpdate, request: &mut Request) -> Result<bool, Error> {
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
            // What was missed is for FETCH: the subscription goes on behind the joining location.
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

    /// Says what the relay has asked for. A relay of ours asks for no objects while another session publishes the track with other
    /// groups.
    fn log_forwarding(&self) {
        let track = self.track.name().typed();
        match self.window.forward {
            true => tracing::info!(%track, "the relay takes the objects of this track"),
            false => tracing::warn!(
                %track,
                "standing by: the relay takes no objects of this track for now, as another session publishes it or nobody \
                 wants it"
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
        let datagram = Datagram {
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
        // Too large for the path, or the session is over: the draft drops it without notice.
        if let Err(error) = self.server.session.streams().send_datagram(out.into()) {
            tracing::debug!(location = ?object.location, "datagram dropped: {error}");
        }
    }

    /// PUBLISH_DONE once all streams are closed, and then their delivery.
    async fn end(
        &self,
        request: &mut Request,
        code: code::Done,
        streams: &Streams,
        writers: &mut JoinSet<()>,
    ) -> Result<(), Error> {
        let mut open = streams.open.subscribe();
        let all_closed = async {
            // The sender is in `streams`, so this cannot fail.
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
            tracing::warn!(track = %self.track.name().typed(), "the peer has not acknowledged everything");
        }
        Ok(())
    }
}

/// Writes one subgroup to one stream.
struct Writer {
    session: Arc<Session>,
    streams: Arc<Streams>,
    alias: u64,
    window: Window,
    stop: watch::Receiver<()>,
}

impl Writer {
    /// Returns when the stream is acknowledged or given up.
    async fn run(mut self, subgroup: Arc<Subgroup>) {
        let mut stream = None;
        let mut stop = self.stop.clone();
        let result = tokio::select! {
            result = self.write(subgroup, &mut stream) => result,
            // Only ever closed.
            _ = stop.changed() => Err(code::Reset::CANCELLED),
        };
        let acknowledged = stream.as_mut().map(|stream: &mut SendStream| match result {
            Ok(()) => {
                // Fails only when the peer has stopped the stream.
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
        let weak = Arc::downgrade(&subgroup);
        drop(subgroup);
        let mut next = 0;
        let mut previous = None;
        loop {
            changed.borrow_and_update();
            // History has let go of a subgroup that the peer does not take.
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
            // An error means that the subgroup is gone, which the next turn finds.
            let _ = changed.changed().await;
        }
    }

    fn header(&self, subgroup: &Subgroup, first_id: u64, is_first: bool) -> Bytes {
        let id = match subgroup.id {
            // The first object on this stream is not the one that names the subgroup.
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
        // quinn sends higher first, and control streams are at 0.
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
