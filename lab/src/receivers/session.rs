//! One subscriber: a connection with quinn's state machine, and the part of MoQ that one subscription needs.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use bytes::BytesMut;
use millrace_client::payload::Stamp;
use millrace_moq::{
    DecodeError, Draft, Location, Message, ObjectDatagram, Parameters, TrackName,
    message::{SetupOptions, Subscribe},
};
use quinn::{Dir, StreamId, VarInt, crypto::rustls::HandshakeData};
use quinn_proto::{Connection, ConnectionHandle, Event, ReadError, StreamEvent};

use super::{
    incoming::IncomingStream,
    sequence::{Sequence, SequenceCounts},
};

/// Time that SUBSCRIBE may wait for a publisher, ms.
const RENDEZVOUS_MS: u64 = 60_000;
/// Longest wait for streams that PUBLISH_DONE has counted but that have not arrived.
const STRAGGLERS: Duration = Duration::from_secs(2);

/// The track to subscribe to if there is one, and the path and authority for SETUP.
#[derive(Debug)]
pub struct Wish {
    /// Whether a session subscribes as soon as it is connected.
    pub at_once: bool,
    pub track: Option<TrackName>,
    /// Path and query for SETUP.
    pub path: String,
    /// Authority that SETUP contains.
    pub authority: String,
}

/// One subscriber.
///
/// The owner drives `connection`, and calls [`ReceiverSession::on_event`] for each of its events. The session
/// subscribes once it is connected. It has ended when `ended` is set.
pub struct ReceiverSession {
    pub connection: Box<Connection>,
    pub handle: ConnectionHandle,
    /// MoQ draft that was negotiated by ALPN.
    draft: Draft,
    /// Index of the socket that the session sends from. Packets that arrive at another socket are dropped.
    pub socket: usize,
    /// Whether quinn's endpoint has dropped its state of the connection.
    pub is_drained: bool,
    /// Whether the session's handshake still counts towards the limit of handshakes at the same time.
    pub is_new: bool,
    /// Time when the connection's next timer fires.
    pub deadline: Option<Instant>,
    began: Instant,
    request: Option<StreamId>,
    answers: BytesMut,
    is_subscribed: bool,
    streams: Vec<(StreamId, IncomingStream)>,
    /// Number of object streams (those that carry the track's objects) that have ended.
    streams_ended: u64,
    /// Time when the publisher ended the track, and the number of streams that the publisher opened.
    done: Option<(Instant, u64)>,
    pub ended: Option<ReceiverEnd>,
    sequence: Sequence,
    /// Number of objects in the track, if a stamp (number and time of sending) in an object contains it; else 0.
    total: u64,
    has_objects: bool,
    /// Time of the session's last move to another address; `None` once an object has arrived at that address.
    moved: Option<Instant>,
}

/// Reason why a session has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReceiverEnd {
    /// The track is over.
    Whole,
    /// The session ended before its track, for this reason.
    Early(String),
    /// All sessions were stopped by [`ReceiverControl::stop`] or by the time limit.
    Stopped,
}

/// An event of a session, which its owner counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ReceiverEvent {
    Connected,
    Subscribed,
    /// The first object arrived. The value is the time since the session's first packet.
    FirstObject(Duration),
    /// The first object after a move to another address arrived. The value is the time since the move.
    Resumed(Duration),
    /// An object with a time stamp arrived. The value is its latency from the publisher.
    Latency(Duration),
    /// A stream was reset, or ended inside an object.
    Cut,
}

/// The current time by two clocks.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    pub instant: Instant,
    /// Time of the clock that the publisher's stamps use.
    pub monotonic: Duration,
}

impl ReceiverSession {
    pub fn new(connection: Connection, handle: ConnectionHandle, socket: usize, now: Instant) -> Self {
        Self {
            connection: Box::new(connection),
            handle,
            draft: Draft::NEWEST,
            socket,
            is_drained: false,
            is_new: true,
            deadline: None,
            began: now,
            request: None,
            answers: BytesMut::new(),
            is_subscribed: false,
            streams: Vec::new(),
            streams_ended: 0,
            done: None,
            ended: None,
            sequence: Sequence::default(),
            total: 0,
            has_objects: false,
            moved: None,
        }
    }

    /// Handles an event of the connection.
    pub fn on_event(&mut self, event: Event, wish: &Wish, now: Now, tell: &mut dyn FnMut(ReceiverEvent)) {
        let done = match event {
            Event::Connected => {
                tell(ReceiverEvent::Connected);
                self.draft = agreed_draft(&self.connection).unwrap_or(self.draft);
                self.ask(wish, now.instant)
            }
            Event::ConnectionLost { reason } => {
                self.end(ReceiverEnd::Early(reason.to_string()));
                Ok(())
            }
            Event::Stream(StreamEvent::Opened { dir: Dir::Uni }) => self.accept(now, tell),
            Event::Stream(StreamEvent::Readable { id }) if Some(id) == self.request => {
                self.read_answers(id, now.instant, tell)
            }
            Event::Stream(StreamEvent::Readable { id }) => self.read(id, now, tell),
            Event::DatagramReceived => self.read_datagrams(now, tell),
            _ => Ok(()),
        };
        if let Err(error) = done {
            self.close(now.instant, ReceiverEnd::Early(error.to_string()));
        }
    }

    /// Sends SETUP, and SUBSCRIBE if that is wanted at once.
    fn ask(&mut self, wish: &Wish, now: Instant) -> Result<()> {
        let setup = SetupOptions {
            path: Some(wish.path.clone()),
            authority: Some(wish.authority.clone()),
            implementation: Some("millrace-lab lab receivers".to_owned()),
            ..SetupOptions::default()
        };
        self.write(Dir::Uni, setup.into())?;
        if wish.at_once {
            let began = self.began;
            self.subscribe(wish, now)?;
            // The time to the first object includes the handshake.
            self.began = began;
        }
        Ok(())
    }

    /// Sends SUBSCRIBE if there is a track to subscribe to.
    pub fn subscribe(&mut self, wish: &Wish, now: Instant) -> Result<()> {
        let Some(track) = wish.track.clone() else { return Ok(()) };
        self.began = now;
        let parameters = Parameters { rendezvous_timeout: Some(RENDEZVOUS_MS), ..Parameters::default() };
        let subscribe = Subscribe { request_id: 0, track, parameters };
        self.request = Some(self.write(Dir::Bi, subscribe.into())?);
        Ok(())
    }

    /// Opens a stream that starts with a message.
    fn write(&mut self, direction: Dir, message: Message) -> Result<StreamId> {
        let mut bytes = Vec::new();
        message.encode(self.draft, &mut bytes)?;
        let Some(id) = self.connection.streams().open(direction) else {
            bail!("the relay allows no stream to send {}", message.name());
        };
        let written = self.connection.send_stream(id).write(&bytes)?;
        if written < bytes.len() {
            bail!("the relay gives no credit to send {}", message.name());
        }
        Ok(id)
    }

    fn read_answers(
        &mut self,
        id: StreamId,
        now: Instant,
        tell: &mut dyn FnMut(ReceiverEvent),
    ) -> Result<()> {
        // After PUBLISH_DONE, further data on the subscription's stream are ignored.
        if self.done.is_some() {
            return Ok(());
        }
        let Self { connection, answers, .. } = self;
        let end = read_stream(connection, id, |bytes| {
            answers.extend_from_slice(bytes);
            Ok(())
        })?;
        while let Some(message) = Message::decode(self.draft, &mut self.answers)? {
            match message {
                Message::SubscribeOk(_) if !self.is_subscribed => {
                    self.is_subscribed = true;
                    tell(ReceiverEvent::Subscribed);
                }
                Message::RequestError(error) => {
                    bail!("the relay refused the subscription: {} {}", error.code, error.reason)
                }
                Message::PublishDone(done) => self.done = Some((now, done.stream_count)),
                _ => {}
            }
        }
        if end != StreamEnd::Open && self.done.is_none() {
            bail!("the relay ended the request");
        }
        Ok(())
    }

    fn accept(&mut self, now: Now, tell: &mut dyn FnMut(ReceiverEvent)) -> Result<()> {
        while let Some(id) = self.connection.streams().accept(Dir::Uni) {
            self.streams.push((id, IncomingStream::default()));
            self.read(id, now, tell)?;
        }
        Ok(())
    }

    fn read(&mut self, id: StreamId, now: Now, tell: &mut dyn FnMut(ReceiverEvent)) -> Result<()> {
        let Some(place) = self.streams.iter().position(|(known, _)| *known == id) else { return Ok(()) };
        let (_, mut incoming) = self.streams.swap_remove(place);
        let mut came = Vec::new();
        let take = |bytes: &[u8]| incoming.take(bytes, |at, stamp| came.push((at, stamp)));
        let end = read_stream(&mut self.connection, id, take)?;
        // Reading borrows the connection, so objects are recorded afterwards.
        came.into_iter().for_each(|(at, stamp)| self.object(at, stamp, now, tell));
        if end == StreamEnd::Open {
            self.streams.push((id, incoming));
        } else if incoming.is_media() {
            self.streams_ended += 1;
            if end == StreamEnd::Reset || !incoming.is_whole() {
                tell(ReceiverEvent::Cut);
            }
        }
        Ok(())
    }

    fn read_datagrams(&mut self, now: Now, tell: &mut dyn FnMut(ReceiverEvent)) -> Result<()> {
        while let Some(bytes) = self.connection.datagrams().recv() {
            if let Some(datagram) = ObjectDatagram::decode(bytes)? {
                let stamp = millrace_client::payload::check(&datagram.payload).ok();
                self.object(Location::new(datagram.group, datagram.object), stamp, now, tell);
            }
        }
        Ok(())
    }

    /// Records an object. If the publisher numbers its objects, the number identifies an object. Then missing objects
    /// at the end of a group are noticed too.
    fn object(&mut self, at: Location, stamp: Option<Stamp>, now: Now, tell: &mut dyn FnMut(ReceiverEvent)) {
        if !std::mem::replace(&mut self.has_objects, true) {
            tell(ReceiverEvent::FirstObject(now.instant.saturating_duration_since(self.began)));
        }
        if let Some(moved) = self.moved.take() {
            tell(ReceiverEvent::Resumed(now.instant.saturating_duration_since(moved)));
        }
        match stamp {
            Some(stamp) => {
                self.total = stamp.total;
                self.sequence.insert(Location::new(0, stamp.sequence));
                tell(ReceiverEvent::Latency(now.monotonic.saturating_sub(stamp.sent)));
            }
            None => self.sequence.insert(at),
        }
    }

    /// Moves the session to another socket, like a host that changes networks.
    pub fn move_to(&mut self, socket: usize, now: Instant) {
        self.socket = socket;
        self.moved = Some(now);
        self.connection.local_address_changed();
    }

    /// Ends the session if the track is over, and all its streams have arrived or the wait for them is over.
    pub fn end_if_done(&mut self, now: Instant) {
        let Some((at, streams)) = self.done else { return };
        let open = self.streams.iter().filter(|(_, incoming)| incoming.is_media()).count();
        let is_all_there = open == 0 && self.streams_ended >= streams;
        if is_all_there || now.saturating_duration_since(at) > STRAGGLERS {
            self.close(now, ReceiverEnd::Whole);
        }
    }

    /// Closes the connection.
    pub fn close(&mut self, now: Instant, why: ReceiverEnd) {
        self.connection.close(now, VarInt::from_u32(0), bytes::Bytes::new());
        self.end(why);
    }

    fn end(&mut self, why: ReceiverEnd) {
        self.ended.get_or_insert(why);
    }

    /// Reports whether the session is connected and has not ended.
    pub fn is_up(&self) -> bool {
        self.request.is_some() && self.ended.is_none()
    }

    /// Reports whether the publisher has ended the track.
    pub fn is_done(&self) -> bool {
        self.done.is_some()
    }

    /// Reports whether the session has moved to another address and has received no object since then.
    pub fn waits_for_media(&self) -> bool {
        self.moved.is_some()
    }

    /// Returns the counts of objects that arrived, and of missing ones if the track was received to its end.
    pub fn into_counts(self) -> SequenceCounts {
        let is_whole = self.ended == Some(ReceiverEnd::Whole) && self.total > 0;
        self.sequence.finish(is_whole.then(|| Location::new(0, self.total)))
    }
}

/// Returns the MoQ draft that both ends have agreed on.
fn agreed_draft(connection: &Connection) -> Option<Draft> {
    let data = connection.crypto_session().handshake_data()?.downcast::<HandshakeData>().ok()?;
    Draft::from_alpn(&data.protocol?)
}

/// State of a stream after reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamEnd {
    Open,
    Fin,
    Reset,
}

/// Reads the bytes of a stream that have arrived.
fn read_stream(
    connection: &mut Connection,
    id: StreamId,
    mut take: impl FnMut(&[u8]) -> std::result::Result<(), DecodeError>,
) -> Result<StreamEnd> {
    let mut stream = connection.recv_stream(id);
    let mut chunks = stream.read(true)?;
    let end = loop {
        match chunks.next(usize::MAX) {
            Ok(Some(chunk)) => take(&chunk.bytes)?,
            Ok(None) => break StreamEnd::Fin,
            Err(ReadError::Blocked) => break StreamEnd::Open,
            Err(ReadError::Reset(_)) => break StreamEnd::Reset,
        }
    };
    // The result (whether packets are to be sent) is ignored, since the session's owner checks that anyway.
    let _ = chunks.finalize();
    Ok(end)
}
