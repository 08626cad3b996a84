//! The subscriber's side of a session. It passes each data stream and datagram to the subscription or FETCH that it
//! belongs to.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_moq::message::{FetchKind, FetchRequest, PublishDone, Subscribe, SubscribeOk};
use millrace_moq::property::TrackProperties;
use millrace_moq::{
    Filter, GroupOrder, Location, Message, ObjectDatagram, Parameters, StreamHeader, TrackName, code,
};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};

use crate::object::{ObjectStream, ReceivedObject};
use crate::session::{DataStream, Error, Handler, Session, SessionRequest, reset_of, violation};
use crate::stats::{ObjectFigures, StreamOrder};

/// Longest time that a data stream waits for the response (SUBSCRIBE_OK) that defines its track alias.
const ALIAS_WAIT: Duration = Duration::from_secs(5);
/// Longest time to wait for the data stream of a fill (FILL_PARAMETERS), which carries the objects from before the
/// subscription.
const FILL_WAIT: Duration = Duration::from_secs(10);

/// Time to wait for streams that PUBLISH_DONE counts but that have not arrived. Such streams were reset before their
/// header arrived, or are delayed.
const STRAGGLERS: Duration = Duration::from_secs(2);

/// An event in the queue ([`ObjectSink::Queue`]) that passes a track's objects to their reader.
#[derive(Debug)]
pub enum TrackEvent {
    /// A subgroup stream has begun.
    Opened {
        /// The group ID.
        group: u64,
        /// The QUIC stream ID.
        stream: u64,
    },
    /// An object has arrived.
    Object {
        /// The object.
        object: ReceivedObject,
        /// The QUIC stream ID.
        stream: u64,
    },
    /// A subgroup stream has ended.
    Closed {
        /// The group ID.
        group: u64,
        /// The QUIC stream ID.
        stream: u64,
    },
    /// An object arrived as a datagram.
    Datagram(ReceivedObject),
}

/// The destination of the objects of a track.
#[derive(Clone)]
pub enum ObjectSink {
    /// Statistics that count the objects as they arrive. The payloads are not kept.
    Figures(Arc<Mutex<ObjectFigures>>),
    /// A bounded queue. If its reader is slow, flow control blocks the track's streams.
    Queue(mpsc::Sender<TrackEvent>),
}

#[derive(Clone)]
struct SinkEntry {
    sink: ObjectSink,
    /// `ReceivedTrack::session` when the subscription began; 0 for a queue.
    session: u64,
    streams: watch::Sender<SubscriptionStreams>,
}

/// Counts of a subscription's data streams: those that have begun, and those of them that have ended.
#[derive(Clone, Copy, Debug, Default)]
struct SubscriptionStreams {
    begun: u64,
    ended: u64,
}

type Fetches = HashMap<u64, (GroupOrder, oneshot::Sender<ObjectStream>)>;

/// A receiver of the objects of one session.
///
/// ```no_run
/// use millrace_client::receive::{ObjectReceiver, ObjectSink, TrackEvent};
/// use millrace_client::session::{Remote, Session};
/// use millrace_moq::{Namespace, Parameters, TrackName};
///
/// # async fn example(remote: Remote) -> Result<(), Box<dyn std::error::Error>> {
/// let session = Session::connect(&remote).await?;
/// let receiver = ObjectReceiver::new(session.clone());
/// // The session must run while it is used.
/// let running = tokio::spawn(session.run(receiver.clone()));
/// let (queue, mut steps) = tokio::sync::mpsc::channel(64);
/// let track = TrackName::new(Namespace::from_path("live/clock")?, "seconds")?;
/// let subscription = receiver.subscribe(track, Parameters::default(), ObjectSink::Queue(queue)).await?;
/// while let Some(step) = steps.recv().await {
///     if let TrackEvent::Object { object, .. } = step {
///         println!("{:?}: {} bytes", object.location, object.payload.len());
///     }
/// }
/// # drop((running, subscription));
/// # Ok(())
/// # }
/// ```
pub struct ObjectReceiver {
    session: Arc<Session>,
    /// The sink to which the objects of each track go, by track alias.
    tracks: watch::Sender<HashMap<u64, SinkEntry>>,
    /// The FETCH requests whose data stream has not arrived yet, by request ID.
    fetches: Mutex<Fetches>,
}

/// An established subscription. Dropping it does not end the subscription, which lasts until the track ends.
pub struct EstablishedSubscription {
    /// The request ID of the SUBSCRIBE.
    pub request_id: u64,
    /// The publisher's response to the SUBSCRIBE.
    pub ok: SubscribeOk,
    request: SessionRequest,
    streams: watch::Receiver<SubscriptionStreams>,
    /// The data stream of the fill (objects from before the subscription), if the subscription asked for it and such
    /// objects exist.
    fill: Option<oneshot::Receiver<ObjectStream>>,
    /// Number of the subscription's data streams that are not subgroups: 1 if the publisher sends a fill (a stream of
    /// the objects from before the subscription), or else 0.
    others: u64,
}

impl EstablishedSubscription {
    /// Waits for PUBLISH_DONE, and for the end of all data streams of the subscription.
    pub async fn done(&mut self) -> Result<PublishDone, Error> {
        let done = loop {
            match self.request.next().await? {
                Some(Message::PublishDone(done)) => break done,
                Some(Message::GoAway(_) | Message::PublishStateNotify(_)) => {}
                Some(_) => return Err(violation("a message that a subscription does not allow")),
                None => return Err(Error::Cancelled),
            }
        };
        loop {
            let streams = *self.streams.borrow_and_update();
            if streams.ended >= done.stream_count.saturating_sub(self.others) {
                break;
            }
            let changed = self.streams.changed();
            // There is no time limit while a stream that has begun has not ended. A stream that has not begun may never
            // arrive, so for such streams there is a limit.
            let is_quiet = match streams.begun > streams.ended {
                true => changed.await.is_err(),
                false => !matches!(tokio::time::timeout(STRAGGLERS, changed).await, Ok(Ok(()))),
            };
            if is_quiet {
                break;
            }
        }
        Ok(done)
    }

    /// Cancels the subscription.
    pub fn cancel(&mut self) {
        self.request.cancel();
    }
}

impl ObjectReceiver {
    /// Makes a receiver. It has to be passed to [`Session::run`].
    pub fn new(session: Arc<Session>) -> Arc<Self> {
        let tracks = watch::Sender::new(HashMap::new());
        Arc::new(Self { session, tracks, fetches: Mutex::new(Fetches::new()) })
    }

    /// Returns the session.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Subscribes to `track` and waits for the publisher's response. The track's objects go to `sink`.
    pub async fn subscribe(
        &self,
        track: TrackName,
        parameters: Parameters,
        sink: ObjectSink,
    ) -> Result<EstablishedSubscription, Error> {
        let request_id = self.session.next_request_id();
        let fill = parameters.fill.as_ref().map(|fill| {
            let (sender, stream) = oneshot::channel();
            // The data stream of the fill (objects from before the subscription) may arrive before the response to
            // SUBSCRIBE. It is therefore registered before the SUBSCRIBE is sent.
            self.fetches.lock().insert(request_id, (fill.group_order.unwrap_or_default(), sender));
            stream
        });
        let asked = async {
            let mut request = self.session.request(Subscribe { request_id, track, parameters }).await?;
            match request.answer().await? {
                Message::SubscribeOk(ok) => Ok((request, ok)),
                _ => Err(violation("an answer that SUBSCRIBE does not allow")),
            }
        };
        let (mut request, ok) = asked.await.inspect_err(|_| drop(self.fetches.lock().remove(&request_id)))?;
        // If the track has no objects yet, the publisher opens no data stream for objects from before the subscription
        // (the fill).
        let fill = fill.filter(|_| ok.parameters.largest_object.is_some());
        if TrackProperties::parse(&ok.properties)?.unsupported.is_some() {
            request.cancel();
            return Err(Error::Cancelled);
        }
        let (counter, streams) = watch::channel(SubscriptionStreams::default());
        let session = match &sink {
            ObjectSink::Figures(figures) => figures.lock().received.session,
            ObjectSink::Queue(_) => 0,
        };
        self.tracks.send_modify(|tracks| {
            tracks.insert(ok.track_alias, SinkEntry { sink, session, streams: counter });
        });
        let others = fill.is_some().into();
        Ok(EstablishedSubscription { request_id, ok, request, streams, fill, others })
    }

    /// Removes a subscription that has ended. Its sink receives no more objects.
    pub fn forget(&self, subscription: EstablishedSubscription) {
        self.tracks.send_modify(|tracks| {
            tracks.remove(&subscription.ok.track_alias);
        });
    }

    /// Sends a FETCH and returns the data stream of its objects.
    pub async fn fetch(&self, kind: FetchKind, order: GroupOrder) -> Result<ObjectStream, Error> {
        let request_id = self.session.next_request_id();
        let (sender, stream) = oneshot::channel();
        // The data stream of the response may arrive before FETCH_OK, so it is registered before the FETCH is sent.
        self.fetches.lock().insert(request_id, (order, sender));
        let parameters = Parameters { group_order: Some(order), ..Parameters::default() };
        let mut request = self.session.request(FetchRequest { request_id, kind, parameters }).await?;
        let answer = request.answer().await;
        match answer {
            Ok(Message::FetchOk(_)) => {
                stream.await.map(|objects| objects.answering(request)).map_err(|_| Error::Cancelled)
            }
            other => {
                self.fetches.lock().remove(&request_id);
                other?;
                Err(violation("an answer that FETCH does not allow"))
            }
        }
    }

    /// Returns `parameters` changed so that the subscription gets new objects only. In drafts that support fills, the
    /// parameters also request the earlier objects, from `groups_back` groups before the current group on.
    /// [`ObjectReceiver::join`] returns the earlier objects.
    pub fn joining(&self, groups_back: u64, parameters: Parameters) -> Parameters {
        let fill = Parameters {
            filter: Some(Filter::Relative(groups_back.saturating_add(1))),
            group_order: Some(GroupOrder::Ascending),
            ..Parameters::default()
        };
        let fill = self.session.draft().has_fills().then(|| Box::new(fill));
        Parameters { filter: parameters.filter.or(Some(Filter::NextObject)), fill, ..parameters }
    }

    /// Returns the stream of objects from before the subscription, which was made with [`ObjectReceiver::joining`]. The
    /// objects begin `groups_back` groups before the current group. Returns `None` if no such objects exist.
    pub async fn join(
        &self,
        subscription: &mut EstablishedSubscription,
        groups_back: u64,
    ) -> Result<Option<ObjectStream>, Error> {
        if subscription.ok.parameters.largest_object.is_none() {
            return Ok(None);
        }
        if self.session.draft().has_fills() {
            let Some(stream) = subscription.fill.take() else { return Ok(None) };
            let begun = tokio::time::timeout(FILL_WAIT, stream).await;
            return begun
                .map_or(Err(Error::Cancelled), |begun| begun.map(Some).map_err(|_| Error::Cancelled));
        }
        let kind = FetchKind::RelativeJoining { subscription: subscription.request_id, groups_back };
        self.fetch(kind, GroupOrder::Ascending).await.map(Some)
    }

    async fn subgroup(
        &self,
        header: millrace_moq::SubgroupHeader,
        mut stream: DataStream,
    ) -> Result<(), Error> {
        let mut tracks = self.tracks.subscribe();
        let found = tokio::time::timeout(ALIAS_WAIT, tracks.wait_for(|all| all.contains_key(&header.alias)));
        let entry = match found.await {
            Ok(Ok(all)) => all.get(&header.alias).cloned(),
            _ => None,
        };
        let Some(entry) = entry else {
            stream.stop(code::Reset::CANCELLED);
            return Ok(());
        };
        entry.streams.send_modify(|streams| streams.begun += 1);
        let id = stream.id();
        let mut objects = ObjectStream::subgroup(&header, stream);
        let result = match &entry.sink {
            ObjectSink::Figures(figures) => count(figures, entry.session, header.group, &mut objects).await,
            ObjectSink::Queue(queue) => pass_on(queue, header.group, id, &mut objects).await,
        };
        entry.streams.send_modify(|streams| streams.ended += 1);
        result
    }
}

impl Handler for ObjectReceiver {
    async fn stream(self: Arc<Self>, header: StreamHeader, mut stream: DataStream) -> Result<(), Error> {
        match header {
            StreamHeader::Subgroup(header) => self.subgroup(header, stream).await,
            StreamHeader::Fetch { request_id } => {
                let fetch = self.fetches.lock().remove(&request_id);
                match fetch {
                    // Passing on the data stream fails if the task that sent the FETCH was dropped before the stream
                    // arrived.
                    Some((order, waiting)) => {
                        let objects = ObjectStream::fetch(self.session.draft(), order, stream);
                        drop(waiting.send(objects));
                    }
                    None => stream.stop(code::Reset::CANCELLED),
                }
                Ok(())
            }
            StreamHeader::Setup | StreamHeader::Padding => Ok(()),
        }
    }

    fn datagram(&self, datagram: ObjectDatagram) {
        let tracks = self.tracks.borrow();
        // A receiver may drop a datagram that arrives before its track alias is known (draft-22, "Datagrams").
        match tracks.get(&datagram.alias).map(|entry| (&entry.sink, entry.session)) {
            Some((ObjectSink::Figures(figures), session)) if datagram.status.is_none() => {
                let mut figures = figures.lock();
                if figures.received.is_wanted(Location::new(datagram.group, datagram.object), session) {
                    figures.object(&datagram.payload, &mut StreamOrder::default());
                }
            }
            Some((ObjectSink::Queue(queue), _)) if datagram.status.is_none() => {
                let location = Location::new(datagram.group, datagram.object);
                let object = ReceivedObject { location, payload: datagram.payload };
                // If the queue is full, the object is dropped, as a full socket buffer drops datagrams.
                let _ = queue.try_send(TrackEvent::Datagram(object));
            }
            _ => {}
        }
    }
}

async fn count(
    figures: &Mutex<ObjectFigures>,
    session: u64,
    group: u64,
    objects: &mut ObjectStream,
) -> Result<(), Error> {
    let mut order = StreamOrder::default();
    figures.lock().received.begin(group);
    loop {
        match objects.next().await {
            Ok(Some(object)) => {
                let mut figures = figures.lock();
                if figures.received.is_wanted(object.location, session) {
                    figures.object(&object.payload, &mut order);
                }
            }
            Ok(None) => {
                let mut figures = figures.lock();
                figures.received.finish(group, session);
                figures.stream(false);
                return Ok(());
            }
            Err(error) => {
                figures.lock().stream(true);
                return reset_of(error);
            }
        }
    }
}

async fn pass_on(
    queue: &mpsc::Sender<TrackEvent>,
    group: u64,
    stream: u64,
    objects: &mut ObjectStream,
) -> Result<(), Error> {
    // The send to the track's queue fails if the queue's reader was dropped. The rest of the stream is not needed then.
    if queue.send(TrackEvent::Opened { group, stream }).await.is_err() {
        return Ok(());
    }
    let result = loop {
        match objects.next().await {
            Ok(Some(object)) => {
                if queue.send(TrackEvent::Object { object, stream }).await.is_err() {
                    return Ok(());
                }
            }
            Ok(None) => break Ok(()),
            Err(error) => break reset_of(error),
        }
    };
    let _ = queue.send(TrackEvent::Closed { group, stream }).await;
    result
}
