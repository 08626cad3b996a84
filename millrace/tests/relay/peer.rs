//! Test setup: a relay in this process, and peers on unmodified quinn that send exactly the messages a test specifies.

use std::{collections::VecDeque, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use millrace_client::{
    session::{DataStream, Error, Handler, Remote, Session, SessionRequest},
    tls::CertificateTrust,
};
use millrace_moq::{
    Draft, Location, Message, Namespace, ObjectDatagram, ObjectParser, Parameters, Properties,
    Status as ObjectStatus, StreamHeader, SubgroupHeader, SubgroupId, TrackName, code,
    data::encode_object_header,
    message::{PublishDone, PublishNamespace, RequestError, Subscribe, SubscribeOk},
};
use millrace_relay_daemon::{
    config::{Config, Settings},
    server::{RelayIdentity, RunningServer},
    status::{Status, StatusSource},
};
use millrace_testkit::async_wait_until;
use millrace_webtransport::SendStream;
use tokio::{runtime::Handle, sync::mpsc, task::JoinHandle, time::timeout};

use super::site::{self, RelayHost, RelaySite, until_forwarded, wants_kernel, wants_web};

/// Time after which a wait fails. It is long, since the machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(180);
/// Time for which a test checks that no message or stream arrives.
pub const QUIET: Duration = Duration::from_millis(200);
/// Number of objects at the start of a stream that are published with a pause, so that the kernel forwards some of them
/// if kernel forwarding is on.
const PACED: usize = 20;

pub struct TestRelay {
    pub server: Arc<RunningServer>,
    pub addr: SocketAddr,
    _site: Arc<RelaySite>,
}

impl TestRelay {
    pub fn start() -> Self {
        Self::with(|_| {})
    }

    /// Starts a relay with changed settings.
    pub fn with(change: impl FnOnce(&mut Config)) -> Self {
        Self::at(|_, config| change(config))
    }

    /// Starts a relay with changed settings, which may depend on its host.
    pub fn at(change: impl FnOnce(RelayHost<'_>, &mut Config)) -> Self {
        site::log();
        let site = RelaySite::of_this_test();
        let host = site.host();
        let listen = SocketAddr::new(host.v4().into(), host.port(0));
        // How late media arrives depends on the machine's load, so the relay drops none for being late. Tests of late
        // media set `max_delay` themselves.
        let max_delay = Some("off".parse().unwrap());
        let listen = Some(vec![listen.into()]);
        let settings = Settings { listen, public: Some(true), max_delay, ..Settings::default() };
        let mut config = Config::new(settings, None).unwrap();
        // The linger time is how long the relay keeps a track whose publisher is gone. Tests of publishers that return
        // set it themselves.
        config.linger = Duration::ZERO;
        change(host, &mut config);
        let host = site.host_at(config.listen[0].ip()).unwrap_or(host);
        host.configure(&mut config);
        let identity = RelayIdentity::read(&config).unwrap();
        let runtime = Handle::current();
        let server = host.enter(|| {
            let _inside = runtime.enter();
            Arc::new(RunningServer::start(config, identity).unwrap())
        });
        let addr = server.local_addrs()[0];
        Self { server, addr, _site: site }
    }

    /// Returns the URL with which peers and other relays connect to this relay.
    pub fn url(&self) -> url::Url {
        let scheme = if wants_web() { "https" } else { "moqt" };
        format!("{scheme}://{}", self.addr).parse().unwrap()
    }

    pub async fn peer(&self) -> TestPeer {
        TestPeer::connect(self.url()).await
    }

    /// Connects a peer that supports this draft only.
    pub async fn peer_of(&self, draft: Draft) -> TestPeer {
        let remote = Remote { drafts: vec![draft], ..Remote::new(self.url(), CertificateTrust::Anyone) };
        let peer = TestPeer::connect_to(&remote, quinn::EndpointConfig::default()).await;
        assert_eq!(peer.session.draft(), draft);
        peer
    }

    pub fn status(&self) -> Status {
        self.server.status()
    }

    pub fn assert_forwarded(&self) {
        until_forwarded(|| self.status());
    }

    /// Waits until `wanted` is true of the relay's status, and returns it.
    pub async fn until(&self, what: &str, wanted: impl Fn(&Status) -> bool) -> Status {
        async_wait_until(what, || self.status(), wanted).await
    }

    /// If the relay forwards in the kernel, waits until the kernel may send to all peers. Until then only userspace
    /// sends to them.
    pub async fn until_ready(&self) {
        let is_ready =
            |status: &Status| status.sessions.iter().all(|session| session.kernel_ready != Some(false));
        self.until("the kernel may send", is_ready).await;
    }

    /// Waits until the largest object of the relay's only track is this one. The relay counts an object that the kernel
    /// forwards a moment after the subscribers have it.
    pub async fn until_largest(&self, at: Location) {
        let wanted = Some((at.group, at.object));
        self.until(&format!("largest {wanted:?}"), |status| status.tracks[0].largest == wanted).await;
    }
}

/// Collects all streams, datagrams and requests that the relay sends to this peer.
struct PeerTap {
    requests: mpsc::UnboundedSender<(Message, SessionRequest)>,
    streams: mpsc::UnboundedSender<(StreamHeader, DataStream)>,
    datagrams: mpsc::UnboundedSender<ObjectDatagram>,
}

impl Handler for PeerTap {
    async fn request(self: Arc<Self>, message: Message, request: SessionRequest) -> Result<(), Error> {
        let _ = self.requests.send((message, request)); // sending fails only after the test has ended
        Ok(())
    }

    async fn stream(self: Arc<Self>, header: StreamHeader, stream: DataStream) -> Result<(), Error> {
        let _ = self.streams.send((header, stream)); // sending fails only after the test has ended
        Ok(())
    }

    fn datagram(&self, datagram: ObjectDatagram) {
        let _ = self.datagrams.send(datagram); // sending fails only after the test has ended
    }
}

pub struct TestPeer {
    pub session: Arc<Session>,
    pub requests: mpsc::UnboundedReceiver<(Message, SessionRequest)>,
    pub streams: mpsc::UnboundedReceiver<(StreamHeader, DataStream)>,
    pub datagrams: mpsc::UnboundedReceiver<ObjectDatagram>,
    /// Subgroups that arrived before the FETCH stream that was waited for.
    early: VecDeque<(SubgroupHeader, DataStream)>,
    running: JoinHandle<Error>,
}

impl TestPeer {
    pub async fn connect(url: url::Url) -> Self {
        Self::connect_from(url, quinn::EndpointConfig::default()).await
    }

    pub async fn connect_from(url: url::Url, endpoint: quinn::EndpointConfig) -> Self {
        Self::connect_to(&Remote::new(url, CertificateTrust::Anyone), endpoint).await
    }

    pub async fn connect_to(remote: &Remote, endpoint: quinn::EndpointConfig) -> Self {
        let mut remote = remote.clone();
        if wants_web() {
            remote.url = remote.url.as_str().replace("moqt:", "https:").parse().unwrap();
        }
        let session = Session::connect_from(&remote, endpoint).await.unwrap();
        let (requests, requests_out) = mpsc::unbounded_channel();
        let (streams, streams_out) = mpsc::unbounded_channel();
        let (datagrams, datagrams_out) = mpsc::unbounded_channel();
        let tap = Arc::new(PeerTap { requests, streams, datagrams });
        let running = tokio::spawn(Arc::clone(&session).run(tap));
        Self {
            session,
            requests: requests_out,
            streams: streams_out,
            datagrams: datagrams_out,
            early: VecDeque::new(),
            running,
        }
    }

    /// Returns the reason why the session ended.
    pub async fn ended(self) -> Error {
        timeout(PATIENCE, self.running).await.expect("the session ends").unwrap()
    }

    /// Announces a namespace for as long as the returned request lives.
    pub async fn publish_namespace(&self, namespace: &str) -> SessionRequest {
        let message = PublishNamespace {
            request_id: self.session.next_request_id(),
            namespace: Namespace::from_path(namespace).unwrap(),
            parameters: Parameters::default(),
        };
        let mut request = self.session.request(message).await.unwrap();
        assert!(matches!(patiently(request.answer()).await.unwrap(), Message::RequestOk(_)));
        request
    }

    pub async fn try_subscribe(
        &self,
        track: &TrackName,
        parameters: Parameters,
    ) -> Result<(SessionRequest, SubscribeOk), RequestError> {
        let request_id = self.session.next_request_id();
        let message = Subscribe { request_id, track: track.clone(), parameters };
        let mut request = self.session.request(message).await.unwrap();
        match patiently(request.answer()).await {
            Ok(Message::SubscribeOk(ok)) => Ok((request, ok)),
            Err(Error::Refused(refused)) => Err(refused),
            other => panic!("no answer to SUBSCRIBE: {other:?}"),
        }
    }

    pub async fn subscribe(&self, track: &TrackName) -> (SessionRequest, SubscribeOk) {
        self.try_subscribe(track, Parameters::default()).await.unwrap()
    }

    /// Receives the relay's SUBSCRIBE for `track`, and accepts it under `alias`.
    pub async fn accept_subscribe(&mut self, track: &TrackName, alias: u64) -> (SessionRequest, Subscribe) {
        self.accept_subscribe_with(track, alias, Parameters::default(), Properties::default()).await
    }

    pub async fn accept_subscribe_with(
        &mut self,
        track: &TrackName,
        track_alias: u64,
        parameters: Parameters,
        properties: Properties,
    ) -> (SessionRequest, Subscribe) {
        let (message, mut request) = patiently(self.requests.recv()).await.unwrap();
        let Message::Subscribe(subscribe) = message else { panic!("{message:?} instead of SUBSCRIBE") };
        assert_eq!(&subscribe.track, track);
        request.send(SubscribeOk { track_alias, parameters, properties }).await.unwrap();
        (request, subscribe)
    }

    /// Opens a subgroup stream.
    pub async fn subgroup(&self, header: SubgroupHeader) -> PublishedSubgroup {
        let mut stream = self.session.streams().open_uni().await.unwrap();
        let mut bytes = Vec::new();
        header.encode(&mut bytes);
        stream.write_all(&bytes).await.unwrap();
        PublishedSubgroup { stream, header, previous: None, written: 0 }
    }

    /// Returns the next data stream, which must be a subgroup's.
    pub async fn next_subgroup(&mut self) -> ReceivedSubgroup {
        let (header, stream) = match self.early.pop_front() {
            Some(early) => early,
            None => match patiently(self.streams.recv()).await.unwrap() {
                (StreamHeader::Subgroup(header), stream) => (header, stream),
                (other, _) => panic!("{other:?} instead of a subgroup"),
            },
        };
        ReceivedSubgroup {
            parser: ObjectParser::new(&header, stream.offset()),
            header,
            stream,
            bytes: Vec::new(),
        }
    }

    /// Returns the next stream with the objects of a FETCH, or with earlier objects of a subscription (a fill).
    pub async fn next_fetch(&mut self) -> DataStream {
        loop {
            match patiently(self.streams.recv()).await.unwrap() {
                (StreamHeader::Fetch { .. }, stream) => return stream,
                (StreamHeader::Subgroup(header), stream) => self.early.push_back((header, stream)),
                (other, _) => panic!("{other:?} instead of a FETCH stream"),
            }
        }
    }

    /// Checks that the relay sends no stream to this peer for a while.
    pub async fn expect_no_stream(&mut self) {
        if let Ok(Some((header, _))) = timeout(QUIET, self.streams.recv()).await {
            panic!("unexpected stream: {header:?}");
        }
    }
}

/// A subgroup stream of a publisher.
pub struct PublishedSubgroup {
    pub stream: SendStream,
    header: SubgroupHeader,
    previous: Option<u64>,
    written: usize,
}

impl PublishedSubgroup {
    /// Writes an object with the bytes of [`payload`].
    pub async fn object(&mut self, id: u64, len: usize) {
        let bytes = payload(self.header.group, id, len);
        self.write(id, ObjectStatus::Normal, &bytes).await;
    }

    pub async fn status(&mut self, id: u64, status: ObjectStatus) {
        self.write(id, status, &[]).await;
    }

    async fn write(&mut self, id: u64, status: ObjectStatus, payload: &[u8]) {
        let mut bytes = Vec::new();
        let properties = self.header.properties.then_some(&[][..]);
        encode_object_header(self.previous, id, properties, payload.len() as u64, status, &mut bytes);
        bytes.extend_from_slice(payload);
        if wants_kernel() && (1..PACED).contains(&self.written) {
            // Objects come at the pace of live media. Otherwise userspace would have sent all of them before it hands
            // the stream over to the kernel.
            // exact: this pause sets the publisher's sending rate
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.stream.write_all(&bytes).await.unwrap();
        self.previous = Some(id);
        self.written += 1;
    }

    pub fn finish(mut self) {
        self.stream.finish().unwrap();
    }

    pub fn reset(mut self, code: code::Reset) {
        self.stream.reset(quinn::VarInt::from_u64(code.0).unwrap()).unwrap();
    }
}

/// Returns bytes that identify their object.
pub fn payload(group: u64, object: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|n| (group.wrapping_mul(31) ^ object.wrapping_mul(7) ^ n) as u8).collect()
}

/// A subgroup stream at a subscriber.
pub struct ReceivedSubgroup {
    pub header: SubgroupHeader,
    parser: ObjectParser,
    stream: DataStream,
    bytes: Vec<u8>,
}

/// The way in which a stream ended.
#[derive(Debug, PartialEq, Eq)]
pub enum PeerStreamEnd {
    Fin,
    Reset,
}

impl ReceivedSubgroup {
    /// Reads to the end. Returns the objects' IDs and statuses, after checking each payload, and how the stream
    /// ended.
    pub async fn all(self) -> (Vec<u64>, PeerStreamEnd) {
        self.all_telling(|_| {}).await
    }

    /// Same as [`all`](Self::all). For each piece that arrives, `tell` is called with the number of objects that have
    /// begun.
    pub async fn all_telling(mut self, mut tell: impl FnMut(usize)) -> (Vec<u64>, PeerStreamEnd) {
        let mut found = Vec::new();
        let end = loop {
            match patiently(self.stream.chunk()).await {
                Ok(Some(chunk)) => {
                    let before = found.len();
                    self.take(&chunk, &mut found);
                    tell(found.len() - before);
                }
                Ok(None) => break PeerStreamEnd::Fin,
                Err(Error::Cancelled) => break PeerStreamEnd::Reset,
                Err(error) => panic!("the session ended: {error}"),
            }
        };
        (self.check(&found, &end), end)
    }

    /// Reads until `count` objects have arrived completely.
    pub async fn objects(&mut self, count: usize) -> Vec<u64> {
        let mut found = Vec::new();
        while found.len() < count || !self.parser.at_boundary() {
            let chunk = patiently(self.stream.chunk()).await.unwrap().expect("more objects");
            self.take(&chunk, &mut found);
        }
        self.check(&found, &PeerStreamEnd::Fin)
    }

    /// Reads until this number of bytes of the first object's payload has arrived.
    pub async fn bytes(&mut self, len: usize) {
        let mut found = Vec::new();
        while self.bytes.len() < len {
            let chunk =
                patiently(self.stream.chunk()).await.unwrap().expect("the object is shorter than expected");
            self.take(&chunk, &mut found);
        }
    }

    /// Reads until this number of bytes of objects has arrived, or the stream is reset. Checks that objects are
    /// well-formed, whatever their payloads are.
    pub async fn well_formed(&mut self, len: usize) {
        while self.bytes.len() < len {
            match patiently(self.stream.chunk()).await {
                Ok(chunk) => self.take(&chunk.expect("more bytes"), &mut Vec::new()),
                Err(Error::Cancelled) => return,
                Err(error) => panic!("the session ended: {error}"),
            }
        }
    }

    fn take(&mut self, chunk: &Bytes, found: &mut Vec<millrace_moq::ObjectStart>) {
        self.bytes.extend_from_slice(chunk);
        let mut rest = &chunk[..];
        while let Some(object) = self.parser.next(&mut rest).unwrap() {
            found.push(object);
        }
    }

    fn check(&self, found: &[millrace_moq::ObjectStart], end: &PeerStreamEnd) -> Vec<u64> {
        // The parser's offsets count from the stream's start, and `bytes` begins after the header.
        let base = self.parser.offset() - self.bytes.len() as u64;
        for object in found {
            let from = (object.payload - base) as usize;
            let expected = payload(self.header.group, object.id, object.payload_len as usize);
            let got = &self.bytes[from..(from + expected.len()).min(self.bytes.len())];
            assert!(expected.starts_with(got), "object {} is corrupted", object.id);
            assert!(
                *end == PeerStreamEnd::Reset || got.len() == expected.len(),
                "object {} is short",
                object.id
            );
        }
        found.iter().map(|object| object.id).collect()
    }

    pub fn stop(&mut self, code: code::Reset) {
        self.stream.stop(code);
    }
}

/// Waits for the end of a subscription.
pub async fn expect_done(request: &mut SessionRequest) -> PublishDone {
    match patiently(request.next()).await.unwrap() {
        Some(Message::PublishDone(done)) => done,
        other => panic!("{other:?} instead of PUBLISH_DONE"),
    }
}

pub async fn patiently<T>(future: impl Future<Output = T>) -> T {
    timeout(PATIENCE, future).await.expect("PUBLISH_DONE takes too long")
}

pub fn track(namespace: &str, name: &str) -> TrackName {
    TrackName::new(Namespace::from_path(namespace).unwrap(), name.to_owned()).unwrap()
}

/// Makes the header of subgroup 0 of a group.
pub fn header(alias: u64, group: u64) -> SubgroupHeader {
    SubgroupHeader {
        alias,
        group,
        subgroup: SubgroupId::Zero,
        priority: Some(128),
        properties: false,
        end_of_group: true,
        first_object: true,
    }
}

pub const fn at(group: u64, object: u64) -> Location {
    Location::new(group, object)
}

/// Connects a publisher that announces the namespace `live/cam`. Returns it with the name of the track `video` in this
/// namespace.
pub async fn with_publisher(relay: &TestRelay) -> (TestPeer, SessionRequest, TrackName) {
    publishing(relay.peer().await).await
}

/// Announces the namespace `live/cam` from `publisher`. Returns it with the name of the track `video` in this
/// namespace.
pub async fn publishing(publisher: TestPeer) -> (TestPeer, SessionRequest, TrackName) {
    publishing_in("live/cam", publisher).await
}

pub async fn publishing_in(path: &str, publisher: TestPeer) -> (TestPeer, SessionRequest, TrackName) {
    let namespace = publisher.publish_namespace(path).await;
    (publisher, namespace, track(path, "video"))
}

/// Two publishers of one track under the aliases 1 and 2, and a subscriber of the track.
pub struct Rivals {
    pub one: TestPeer,
    pub two: TestPeer,
    pub subscriber: TestPeer,
    pub requests: [SessionRequest; 5],
}

impl Rivals {
    pub async fn from_relay(relay: &TestRelay) -> Self {
        let (mut one, namespace, track) = with_publisher(relay).await;
        let mut two = relay.peer().await;
        let other_namespace = two.publish_namespace("live/cam").await;
        let subscriber = relay.peer().await;
        let ((request, _), (upstream, _), (other_upstream, _)) = tokio::join!(
            subscriber.subscribe(&track),
            one.accept_subscribe(&track, 1),
            two.accept_subscribe(&track, 2)
        );
        relay.until("both feed the track", |status| status.tracks[0].publishers == 2).await;
        let requests = [namespace, other_namespace, request, upstream, other_upstream];
        Self { one, two, subscriber, requests }
    }
}

/// Connects a subscriber of `track`. Returns its subscription, and the relay's subscription at the publisher.
pub async fn first_subscriber(
    relay: &TestRelay,
    publisher: &mut TestPeer,
    track: &TrackName,
    alias: u64,
) -> (TestPeer, SessionRequest, SubscribeOk, SessionRequest) {
    let subscriber = relay.peer().await;
    let subscribing = subscriber.subscribe(track);
    let accepting = publisher.accept_subscribe(track, alias);
    let ((request, ok), (upstream, _)) = tokio::join!(subscribing, accepting);
    relay.until_ready().await;
    (subscriber, request, ok, upstream)
}
