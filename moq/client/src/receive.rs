//! The subscriber's side of a session: hands data streams and datagrams to who asked for them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_moq::message::{Fetch, FetchKind, PublishDone, Subscribe, SubscribeOk};
use millrace_moq::property::TrackProperties;
use millrace_moq::{
    Datagram, Filter, GroupOrder, Location, Message, Parameters, StreamHeader, TrackName, code,
};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};

use crate::object::{Object, ObjectStream};
use crate::session::{DataStream, Error, Handler, Request, Session, reset_of, violation};
use crate::stats::{Figures, Order};

/// How long a stream waits for the answer that tells whose it is.
const ALIAS_WAIT: Duration = Duration::from_secs(5);
/// How long the stream of a fill may take to begin.
const FILL_WAIT: Duration = Duration::from_secs(10);

/// How long streams may take that PUBLISH_DONE has counted but that do not come: they were reset before
/// their header, or are still on the way.
const STRAGGLERS: Duration = Duration::from_secs(2);

/// What a track's queue hears.
#[derive(Debug)]
pub enum Step {
    Opened { group: u64, stream: u64 },
    Object { object: Object, stream: u64 },
    Closed { group: u64, stream: u64 },
    Datagram(Object),
}

/// Who gets a track's objects.
#[derive(Clone)]
pub enum Sink {
    /// Counts them where they arrive.
    Figures(Arc<Mutex<Figures>>),
    /// Passes them on. Bounded: a slow reader holds back the track's streams.
    Queue(mpsc::Sender<Step>),
}

#[derive(Clone)]
struct Entry {
    sink: Sink,
    streams: watch::Sender<Streams>,
}

/// The data streams of a subscription so far.
#[derive(Clone, Copy, Debug, Default)]
struct Streams {
    begun: u64,
    ended: u64,
}

type Fetches = HashMap<u64, (GroupOrder, oneshot::Sender<ObjectStream>)>;

/// Receives on one session.
pub struct Receiver {
    session: Arc<Session>,
    /// By track alias.
    tracks: watch::Sender<HashMap<u64, Entry>>,
    /// By request ID.
    fetches: Mutex<Fetches>,
}

/// An established subscription. Dropping it leaves its track to end by itself.
pub struct Subscription {
    pub request_id: u64,
    pub ok: SubscribeOk,
    request: Request,
    streams: watch::Receiver<Streams>,
    /// What came before it, if it has asked for that and there was something.
    fill: Option<oneshot::Receiver<ObjectStream>>,
    /// Streams that are not of subgroups: that of the fill.
    others: u64,
}

impl Subscription {
    /// Waits for the end of the track, and for the streams that belong to it.
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
            // A stream that has begun may take its time; one that has not may never come.
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

    /// Ends the subscription.
    pub fn cancel(&mut self) {
        self.request.cancel();
    }
}

impl Receiver {
    pub fn new(session: Arc<Session>) -> Arc<Self> {
        let tracks = watch::Sender::new(HashMap::new());
        Arc::new(Self { session, tracks, fetches: Mutex::new(Fetches::new()) })
    }

    pub fn session(&self) -> &Session {
        &self.session
    }

    pub async fn subscribe(
        &self,
        track: TrackName,
        parameters: Parameters,
        sink: Sink,
    ) -> Result<Subscription, Error> {
        let request_id = self.session.next_request_id();
        let fill = parameters.fill.as_ref().map(|fill| {
            let (sender, stream) = oneshot::channel();
            // The stream may come before the answer.
            self.fetches.lock().insert(request_id, (fill.group_order.unwrap_or_default(), sender));
            stream
        });
        let asked = async {
            let mut request = self.session.request(Subscribe { request_id, track, parameters }).await?;
            match request.answer().await? {
                Message::SubscribeOk(ok) => Ok((request, ok)),
                _ => Err(violation("an answer that SUBSCRIBE does not have")),
            }
        };
        let (mut request, ok) = asked.await.inspect_err(|_| drop(self.fetches.lock().remove(&request_id)))?;
        // Of nothing there is no stream.
        let fill = fill.filter(|_| ok.parameters.largest_object.is_some());
        if TrackProperties::parse(&ok.properties)?.unsupported.is_some() {
            request.cancel();
            return Err(Error::Cancelled);
        }
        let (counter, streams) = watch::channel(Streams::default());
        self.tracks.send_modify(|tracks| {
            tracks.insert(ok.track_alias, Entry { sink, streams: counter });
        });
        let others = fill.is_some().into();
        Ok(Subscription { request_id, ok, request, streams, fill, others })
    }

    /// Lets go of a subscription that is over; its sink hears no more.
    pub fn forget(&self, subscription: Subscription) {
        self.tracks.send_modify(|tracks| {
            tracks.remove(&subscription.ok.track_alias);
        });
    }

    /// Asks for objects that are there already.
    pub async fn fetch(&self, kind: FetchKind, order: GroupOrder) -> Result<ObjectStream, Error> {
        let request_id = self.session.next_request_id();
        let (sender, stream) = oneshot::channel();
        // The stream may come before the answer.
        self.fetches.lock().insert(request_id, (order, sender));
        let parameters = Parameters { group_order: Some(order), ..Parameters::default() };
        let mut request = self.session.request(Fetch { request_id, kind, parameters }).await?;
        let answer = request.answer().await;
        match answer {
            Ok(Message::FetchOk(_)) => {
                stream.await.map(|objects| objects.answering(request)).map_err(|_| Error::Cancelled)
            }
            other => {
                self.fetches.lock().remove(&request_id);
                other?;
                Err(violation("an answer that FETCH does not have"))
            }
        }
    }

    /// With this, `parameters` of a subscription ask for what is to come, and where the draft has it so also for what was before, from
    /// `groups_back` groups before the current one on: [`Receiver::join`] gives that.
    pub fn joining(&self, groups_back: u64, parameters: Parameters) -> Parameters {
        let fill = Parameters {
            filter: Some(Filter::Relative(groups_back.saturating_add(1))),
            group_order: Some(GroupOrder::Ascending),
            ..Parameters::default()
        };
        let fill = self.session.draft().has_fills().then(|| Box::new(fill));
        Parameters { filter: parameters.filter.or(Some(Filter::NextObject)), fill, ..parameters }
    }

    /// What came before a subscription that is [`Receiver::joining`], from `groups_back` groups before the current one on.
    /// `None` if there was nothing: then the subscription has everything.
    pub async fn join(
        &self,
        subscription: &mut Subscription,
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
            Sink::Figures(figures) => count(figures, &mut objects).await,
            Sink::Queue(queue) => pass_on(queue, header.group, id, &mut objects).await,
        };
        entry.streams.send_modify(|streams| streams.ended += 1);
        result
    }
}

impl Handler for Receiver {
    async fn stream(self: Arc<Self>, header: StreamHeader, mut stream: DataStream) -> Result<(), Error> {
        match header {
            StreamHeader::Subgroup(header) => self.subgroup(header, stream).await,
            StreamHeader::Fetch { request_id } => {
                let fetch = self.fetches.lock().remove(&request_id);
                match fetch {
                    // Whoever waited may have given up meanwhile.
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

    fn datagram(&self, datagram: Datagram) {
        let tracks = self.tracks.borrow();
        // Before its alias is known, a datagram may be dropped (draft-22, "Datagrams").
        match tracks.get(&datagram.alias).map(|entry| &entry.sink) {
            Some(Sink::Figures(figures)) if datagram.status.is_none() => {
                figures.lock().object(&datagram.payload, &mut Order::default());
            }
            Some(Sink::Queue(queue)) if datagram.status.is_none() => {
                let location = Location::new(datagram.group, datagram.object);
                let object = Object { location, payload: datagram.payload };
                // A full queue drops it, as a full socket would.
                let _ = queue.try_send(Step::Datagram(object));
            }
            _ => {}
        }
    }
}

async fn count(figures: &Mutex<Figures>, objects: &mut ObjectStream) -> Result<(), Error> {
    let mut order = Order::default();
    loop {
        match objects.next().await {
            Ok(Some(object)) => figures.lock().object(&object.payload, &mut order),
            Ok(None) => {
                figures.lock().stream(false);
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
    queue: &mpsc::Sender<Step>,
    group: u64,
    stream: u64,
    objects: &mut ObjectStream,
) -> Result<(), Error> {
    // Sends fail when the track's reader has gone: then nobody needs the rest.
    if queue.send(Step::Opened { group, stream }).await.is_err() {
        return Ok(());
    }
    let result = loop {
        match objects.next().await {
            Ok(Some(object)) => {
                if queue.send(Step::Object { object, stream }).await.is_err() {
                    return Ok(());
                }
            }
            Ok(None) => break Ok(()),
            Err(error) => break reset_of(error),
        }
    };
    let _ = queue.send(Step::Closed { group, stream }).await;
    result
}
