//! The send side of one unidirectional stream, whose bytes are read from a source.

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::ranges::Ranges;

use super::{
    policy::DropReason,
    queues::QueuePosition,
    source::{Source, SourceEnd, SourceExtent},
    types::{Label, Priority, StreamKey},
};

/// The parameters of a stream to be opened.
pub struct NewStream {
    /// The source of the stream's bytes.
    pub source: Arc<dyn Source>,
    /// The priority, which determines when the stream is sent among the other streams and datagrams.
    pub priority: Priority,
    /// The caller's number for the stream's owner, a subscription. Owners of the same priority level send in turn, and
    /// streams are counted per owner.
    pub owner: u64,
    /// OBJECT_DELIVERY_TIMEOUT: the stream is reset if an object has not been sent this long after its first byte
    /// arrived.
    pub object_timeout: Option<Duration>,
    /// SUBGROUP_DELIVERY_TIMEOUT: the stream is reset if some of it is not acknowledged this long after its FIN
    /// arrived.
    pub subgroup_timeout: Option<Duration>,
    /// Longest time for which bytes may wait to be sent, after which the receiver cannot use them.
    pub max_delay: Option<Duration>,
    /// The part of the stream that consists of past objects, which the subscriber requested.
    pub asked: AskedRange,
    /// The stream's track and group, for packet traces.
    pub label: Label,
}

/// The part of a stream that consists of past objects, published before the subscriber asked for them. Bytes of
/// requested past objects never count as late. While some of them wait to be sent, no data of the same owner counts as
/// late.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AskedRange {
    /// No part is requested past objects: all objects of the stream are new.
    #[default]
    Nothing,
    /// The bytes that the source has when the stream is opened belong to requested past objects, and later ones to new
    /// objects.
    Present,
    /// The whole stream consists of past objects that the subscriber requested.
    All,
}

impl NewStream {
    /// Returns the offset before which all bytes belong to requested past objects.
    fn asked_bytes(&self) -> u64 {
        match self.asked {
            AskedRange::Nothing => 0,
            AskedRange::Present => self.source.extent().len,
            AskedRange::All => u64::MAX,
        }
    }
}

/// The first data, by stream offset, that a stream has to send.
#[derive(Clone, Copy, Debug)]
pub struct StreamHead {
    /// Time when the object that contains the data was received, if known.
    pub received_at: Option<Instant>,
    /// True if the data was sent before and lost.
    pub is_repair: bool,
    /// True if the data belongs to past objects that the subscriber requested.
    pub is_asked: bool,
}

/// A unidirectional stream over a [`Source`]. Each of its bytes is acknowledged, in flight, or part of a hole. Holes
/// (bytes to be sent) are the lost ranges and everything from `sent` on.
///
/// A stream is *sending* until all of it is acknowledged, or *reset*. A RESET_STREAM frame has to be sent, and sent
/// again if it is lost. A reset stream never returns to sending. The data to send and three limits of the peer
/// determine the scheduler's queue of a stream. These are the number of streams, and the flow control limits of the
/// stream and the connection.
pub struct PlaneStream {
    pub owner: u64,
    pub priority: Priority,
    pub label: Label,
    /// The QUIC stream ID; `None` before the stream is first sent.
    pub id: Option<u64>,
    pub queue: SchedulerQueue,
    /// Time at which the stream is reset if it has not ended: the end of its delivery timeout, or of the time in which
    /// a stream that is to be dropped may finish its current object.
    pub deadline: Option<Instant>,
    /// The peer's flow control limit for this stream, bytes.
    pub credit: u64,
    /// True if the kernel offload may send on the stream as well.
    pub delegated: bool,
    pub max_delay: Option<Duration>,
    /// Offset before which all bytes belong to requested past objects.
    asked: u64,
    state: SendState,
    /// Offset after the last byte that was ever sent. It counts against the peer's flow control limits, and is the
    /// final size of a reset stream.
    sent: u64,
}

/// The scheduler's queue that a stream is in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SchedulerQueue {
    /// The stream is in no queue, because it has nothing to send, or because the kernel offload is about to open it.
    #[default]
    None,
    /// The stream has a frame to send, and no limit prevents it.
    Ready,
    /// The stream has bytes, but gets no ID before the peer allows more streams.
    Unopened,
    /// The stream has bytes, but the connection's flow control credit is used up.
    Blocked,
    /// The stream has bytes, but the peer's flow control limit for the stream is reached.
    Starved,
}

/// Send state of a [`PlaneStream`]. It begins as `Sending`. Only [`PlaneStream::reset`] changes it to `Reset`, which is
/// final.
enum SendState {
    /// Bytes are read from the source, sent, and sent again if they are lost, until all of them are acknowledged.
    Sending(SendingState),
    /// The source was dropped. RESET_STREAM with this error code is sent, and sent again if it is lost. `owed` is true
    /// while the frame waits to be sent.
    Reset { code: u64, owed: bool },
}

struct SendingState {
    source: Arc<dyn Source>,
    object_timeout: Option<Duration>,
    subgroup_timeout: Option<Duration>,
    extent: SourceExtent,
    /// Ranges of bytes that were sent and declared lost, and are to be sent again.
    lost: Ranges,
    /// Offset before which all bytes are acknowledged.
    acked: u64,
    /// Ranges of acknowledged bytes after the first unacknowledged byte.
    acked_beyond: Ranges,
    fin: Fin,
    given_up: Option<GivenUp>,
}

/// The end of a stream that is dropped because data waits for too long or too much of it waits. Only bytes up to `at`,
/// the end of an object, are still sent. Then the stream is reset.
#[derive(Clone, Copy, Debug)]
struct GivenUp {
    at: u64,
    reason: DropReason,
}

/// State of a stream's FIN. It is `Owed` even before the source has ended, and is sent only after that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fin {
    /// FIN was not sent yet, or the frame with it was lost.
    Owed,
    /// A frame with FIN was sent.
    Sent,
    /// The peer has acknowledged FIN, and thus knows the stream's final size.
    Acked { size: u64 },
}

/// The kind of data that a stream has to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamNeed {
    Nothing,
    /// Frames that consume no flow control credit: retransmissions, FIN alone, RESET_STREAM.
    Repair,
    /// Bytes that are sent for the first time.
    Fresh,
    /// The stream needs more flow control credit (MAX_STREAM_DATA) from the peer.
    Credit,
}

/// The content of one STREAM or RESET_STREAM frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamChunk {
    Bytes { offset: u64, len: u64, fin: bool, fresh: bool },
    Reset { code: u64, size: u64 },
}

impl PlaneStream {
    /// Creates the state of a new stream. `credit` is the peer's flow control limit for the stream, bytes.
    pub fn new(new: NewStream, credit: u64) -> Self {
        let asked = new.asked_bytes();
        let sending = SendingState {
            source: new.source,
            object_timeout: new.object_timeout,
            subgroup_timeout: new.subgroup_timeout,
            extent: SourceExtent { len: 0, end: SourceEnd::Open },
            lost: Ranges::default(),
            acked: 0,
            acked_beyond: Ranges::default(),
            fin: Fin::Owed,
            given_up: None,
        };
        Self {
            owner: new.owner,
            priority: new.priority,
            label: new.label,
            id: None,
            queue: SchedulerQueue::None,
            deadline: None,
            credit,
            delegated: false,
            max_delay: new.max_delay,
            asked,
            state: SendState::Sending(sending),
            sent: 0,
        }
    }

    /// Sets the source and the properties of a stream that the kernel offload has opened.
    pub fn adopt(&mut self, new: NewStream) {
        self.priority = new.priority;
        self.label = new.label;
        self.max_delay = new.max_delay;
        self.asked = new.asked_bytes();
        if let SendState::Sending(sending) = &mut self.state {
            sending.source = new.source;
            sending.object_timeout = new.object_timeout;
            sending.subgroup_timeout = new.subgroup_timeout;
            sending.source.acknowledged(sending.acked);
        }
    }

    /// Returns the stream's position in the scheduler's queues.
    pub fn place(&self, key: StreamKey) -> QueuePosition {
        QueuePosition { priority: self.priority, owner: self.owner, key }
    }

    /// Updates how many bytes the source has, and returns whether and how the source has ended. Returns `None` once the
    /// stream is reset.
    pub fn refresh(&mut self) -> Option<SourceEnd> {
        let SendState::Sending(sending) = &mut self.state else { return None };
        sending.extent = sending.extent();
        Some(sending.extent.end)
    }

    /// Abandons the stream: bytes that were not sent yet are dropped. An object that has begun is still sent to its end
    /// if it is the stream's first, or if at least half of it was sent. Lost bytes before that object's end are still
    /// sent again. Returns whether any byte is still to be acknowledged.
    pub fn give_up(&mut self, reason: DropReason) -> bool {
        let sent = self.sent;
        let SendState::Sending(sending) = &mut self.state else { return false };
        // The stream has to end with a whole object, because the receiver cannot use a part of one.
        let at = match sending.source.object_at(sent) {
            Some(object) if object.start < sent && sent < object.end => {
                let is_half = sent - object.start >= object.end - sent;
                if object.start == 0 || is_half { object.end } else { object.start }
            }
            _ => sent,
        };
        sending.given_up = Some(GivenUp { at, reason });
        sending.lost.remove(at..u64::MAX);
        sending.extent = sending.extent();
        sending.acked < at
    }

    /// Returns the reason why the stream is dropped after its current object, or `None` if it is not to be dropped.
    pub fn given_up(&self) -> Option<DropReason> {
        match &self.state {
            SendState::Sending(sending) => Some(sending.given_up?.reason),
            SendState::Reset { .. } => None,
        }
    }

    /// Returns whether a stream that is to be dropped can be reset, because all bytes of its last object are
    /// acknowledged.
    pub fn is_over(&self) -> bool {
        match &self.state {
            SendState::Sending(sending) => {
                let done = sending.given_up.is_some_and(|given_up| sending.acked >= given_up.at);
                done && !sending.is_complete()
            }
            SendState::Reset { .. } => false,
        }
    }

    /// Returns the stream's SUBGROUP_DELIVERY_TIMEOUT, if it has one.
    pub fn subgroup_timeout(&self) -> Option<Duration> {
        match &self.state {
            SendState::Sending(sending) => sending.subgroup_timeout,
            SendState::Reset { .. } => None,
        }
    }

    /// Returns whether the stream is being reset.
    pub fn is_reset(&self) -> bool {
        matches!(self.state, SendState::Reset { .. })
    }

    /// Drops the source. From now on only RESET_STREAM is sent.
    pub fn reset(&mut self, code: u64) {
        self.state = SendState::Reset { code, owed: true };
    }

    /// Returns the kind of data to send next.
    pub fn need(&self) -> StreamNeed {
        match &self.state {
            // RESET_STREAM needs the final size, which is unknown while the kernel offload may still send on the
            // stream.
            SendState::Reset { owed: true, .. } if !self.delegated => StreamNeed::Repair,
            SendState::Reset { .. } => StreamNeed::Nothing,
            SendState::Sending(sending) => sending.need(self.sent, self.credit),
        }
    }

    /// Returns the next frame's content, at most `room` bytes: first bytes to be retransmitted, then at most `credit`
    /// new bytes.
    pub fn next(&self, room: u64, credit: u64) -> Option<StreamChunk> {
        match &self.state {
            SendState::Reset { code, owed } => {
                owed.then_some(StreamChunk::Reset { code: *code, size: self.sent })
            }
            SendState::Sending(sending) => {
                let fresh = credit.min(self.credit.saturating_sub(self.sent));
                sending.next(self.sent, room, fresh)
            }
        }
    }

    /// Returns whether the object at `offset` has been waiting for longer than its delivery timeout.
    pub fn is_late(&self, offset: u64, now: Instant) -> bool {
        let SendState::Sending(sending) = &self.state else { return false };
        let Some(timeout) = sending.object_timeout else { return false };
        sending
            .source
            .received_at(offset)
            .is_some_and(|received| now.saturating_duration_since(received) > timeout)
    }

    /// Returns the data to send at the lowest offset, or `None` if the stream has nothing to send, or only a reset.
    pub fn head(&self) -> Option<StreamHead> {
        let SendState::Sending(sending) = &self.state else { return None };
        let hole = sending.hole().map(|hole| hole.start);
        let fresh = (self.sent < sending.extent.len).then_some(self.sent);
        let fin = sending.owes_fin_alone(self.sent).then_some(self.sent);
        let offset = hole.into_iter().chain(fresh).chain(fin).min()?;
        // A STREAM frame that has FIN and no bytes carries no object that could be late.
        let has_object = offset < sending.extent.len;
        Some(StreamHead {
            received_at: has_object.then(|| sending.source.received_at(offset)).flatten(),
            is_repair: hole == Some(offset),
            is_asked: offset < self.asked,
        })
    }

    /// Returns the time when the stream's newest object arrived, if known.
    pub fn newest_at(&self) -> Option<Instant> {
        match &self.state {
            SendState::Sending(sending) => sending.source.received_at(sending.extent.len.checked_sub(1)?),
            SendState::Reset { .. } => None,
        }
    }

    /// Returns the stream's OBJECT_DELIVERY_TIMEOUT, if it has one.
    pub fn object_timeout(&self) -> Option<Duration> {
        match &self.state {
            SendState::Sending(sending) => sending.object_timeout,
            SendState::Reset { .. } => None,
        }
    }

    /// Copies bytes of the source, and returns how many. Returns 0 if the source has evicted them.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> usize {
        match &self.state {
            SendState::Sending(sending) => sending.source.read(offset, buf),
            SendState::Reset { .. } => 0,
        }
    }

    /// Notes that a frame with this content was sent.
    pub fn on_sent(&mut self, chunk: &StreamChunk) {
        match (&mut self.state, *chunk) {
            (SendState::Reset { owed, .. }, StreamChunk::Reset { .. }) => *owed = false,
            (SendState::Sending(sending), StreamChunk::Bytes { offset, len, fin, .. }) => {
                sending.lost.remove(offset..offset + len);
                self.sent = self.sent.max(offset + len);
                if fin && sending.fin == Fin::Owed {
                    sending.fin = Fin::Sent;
                }
            }
            _ => {}
        }
    }

    /// Notes that the kernel offload sent `range`, which the source may not have yet. Bytes that were skipped before
    /// the range become a hole. Returns how many bytes count against the connection's credit, including skipped ones.
    pub fn on_offloaded_sent(&mut self, range: Range<u64>, fin: bool) -> u64 {
        let before = self.sent;
        self.sent = before.max(range.end);
        if let SendState::Sending(sending) = &mut self.state {
            sending.lost.insert(before..range.start.max(before));
            sending.lost.remove(range);
            if fin && sending.fin == Fin::Owed {
                sending.fin = Fin::Sent;
            }
        }
        self.sent - before
    }

    /// Returns whether the source is open, and all its bytes were sent and are not known to be lost.
    pub fn is_caught_up(&self) -> bool {
        match &self.state {
            SendState::Sending(sending) => {
                let is_open = sending.given_up.is_none() && !sending.is_complete();
                is_open && sending.lost.is_empty() && self.sent == sending.extent.len
            }
            SendState::Reset { .. } => false,
        }
    }

    /// Notes acknowledged bytes. Returns whether everything is acknowledged now, including FIN.
    pub fn on_acked(&mut self, range: Range<u64>, fin: bool) -> bool {
        let SendState::Sending(sending) = &mut self.state else { return false };
        sending.lost.remove(range.clone());
        let end = range.end;
        sending.acknowledge(range);
        if fin {
            sending.fin = Fin::Acked { size: end };
        }
        // The stream is complete if all bytes before the acknowledged FIN are acknowledged as well.
        sending.fin == Fin::Acked { size: sending.acked }
    }

    /// Notes that a frame was lost. Its unacknowledged bytes have to be sent again.
    pub fn on_lost(&mut self, range: Range<u64>, fin: bool) {
        let SendState::Sending(sending) = &mut self.state else { return };
        let end = sending.given_up.map_or(range.end, |given_up| given_up.at.min(range.end));
        // The lost bytes may have been sent twice, and the peer may have acknowledged the other copy already.
        let unacked = range.start.max(sending.acked)..end;
        for gap in sending.acked_beyond.gaps(unacked) {
            sending.lost.insert(gap);
        }
        if fin && sending.fin == Fin::Sent {
            sending.fin = Fin::Owed;
        }
    }

    /// Notes that the RESET_STREAM was lost, so it has to be sent again.
    pub fn on_reset_lost(&mut self) {
        if let SendState::Reset { owed, .. } = &mut self.state {
            *owed = true;
        }
    }

    /// Returns the error code of the RESET_STREAM that was sent.
    pub fn reset_code(&self) -> Option<u64> {
        match self.state {
            SendState::Reset { code, .. } => Some(code),
            SendState::Sending(_) => None,
        }
    }

    /// Returns whether everything was sent, including FIN, and nothing is known to be lost.
    pub fn is_sent(&self) -> bool {
        match &self.state {
            SendState::Sending(sending) => sending.fin != Fin::Owed && !self.owes(sending),
            SendState::Reset { .. } => true,
        }
    }

    /// Returns whether the source has evicted bytes that are still to be sent.
    pub fn lost_its_source(&self) -> bool {
        match &self.state {
            SendState::Sending(sending) => sending.source.is_evicted() && self.owes(sending),
            SendState::Reset { .. } => false,
        }
    }

    fn owes(&self, sending: &SendingState) -> bool {
        let SourceExtent { len, end } = sending.extent();
        end == SourceEnd::Open || self.sent < len || sending.lost.total() > 0
    }

    /// Returns the number of bytes that wait to be sent: new bytes and lost ones.
    pub fn pending(&self) -> u64 {
        match &self.state {
            SendState::Sending(sending) => {
                sending.lost.total() + sending.extent.len.saturating_sub(self.sent)
            }
            SendState::Reset { .. } => 0,
        }
    }
}

impl SendingState {
    /// Returns how many bytes the source has, and whether it has ended. Of a stream that is to be dropped, only the
    /// bytes up to the end of its last object count.
    fn extent(&self) -> SourceExtent {
        let extent = self.source.extent();
        match self.given_up {
            // A stream that is dropped by the drop policy gets no FIN. It is reset once its last object is
            // acknowledged.
            Some(GivenUp { at, .. }) if at < extent.len => SourceExtent { len: at, end: SourceEnd::Open },
            _ => extent,
        }
    }

    fn need(&self, sent: u64, credit: u64) -> StreamNeed {
        if self.hole().is_some() || self.owes_fin_alone(sent) {
            StreamNeed::Repair
        } else if sent < self.extent.len.min(credit) {
            StreamNeed::Fresh
        } else if sent < self.extent.len {
            StreamNeed::Credit
        } else {
            StreamNeed::Nothing
        }
    }

    /// Returns the first lost range, as far as the source has its bytes.
    fn hole(&self) -> Option<Range<u64>> {
        let hole = self.lost.first().filter(|hole| hole.start < self.extent.len)?;
        Some(hole.start..hole.end.min(self.extent.len))
    }

    fn owes_fin_alone(&self, sent: u64) -> bool {
        self.fin == Fin::Owed && sent == self.extent.len && self.is_complete()
    }

    fn is_complete(&self) -> bool {
        matches!(self.extent.end, SourceEnd::Fin { .. })
    }

    fn next(&self, sent: u64, room: u64, fresh_limit: u64) -> Option<StreamChunk> {
        let (offset, len, fresh) = match self.hole() {
            Some(hole) => (hole.start, (hole.end - hole.start).min(room), false),
            None => (sent, self.extent.len.saturating_sub(sent).min(fresh_limit).min(room), true),
        };
        let fin = self.is_complete() && offset + len == self.extent.len;
        let alone = len == 0 && self.owes_fin_alone(sent);
        (len > 0 || alone).then_some(StreamChunk::Bytes { offset, len, fin, fresh })
    }

    fn acknowledge(&mut self, range: Range<u64>) {
        if range.start > self.acked {
            return self.acked_beyond.insert(range);
        }
        self.acked = self.acked.max(range.end);
        while let Some(next) = self.acked_beyond.first()
            && next.start <= self.acked
        {
            self.acked = self.acked.max(next.end);
            self.acked_beyond.remove(next);
        }
        self.source.acknowledged(self.acked);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plane::source::mem::Mem;

    fn stream(len: u64) -> (Arc<Mem>, PlaneStream) {
        let now = Instant::now();
        let source = Mem::new(1);
        source.push(len, now);
        let mut stream = PlaneStream::new(
            NewStream {
                source: source.clone(),
                priority: Priority::default(),
                owner: 0,
                object_timeout: None,
                subgroup_timeout: None,
                max_delay: None,
                asked: AskedRange::Nothing,
                label: Label::default(),
            },
            u64::MAX,
        );
        stream.refresh();
        (source, stream)
    }

    /// Sends everything that can be sent now, in STREAM frames of at most `room` bytes. Returns (offset, length, FIN)
    /// of each chunk.
    fn drain(stream: &mut PlaneStream, room: u64) -> Vec<(u64, u64, bool)> {
        std::iter::from_fn(|| {
            let chunk = stream.next(room, u64::MAX)?;
            stream.on_sent(&chunk);
            match chunk {
                StreamChunk::Bytes { offset, len, fin, .. } => Some((offset, len, fin)),
                StreamChunk::Reset { .. } => None,
            }
        })
        .collect()
    }

    #[test]
    fn acknowledged_bytes_are_never_declared_lost() {
        let (_, mut stream) = stream(400);
        assert_eq!(drain(&mut stream, 150), [(0, 150, false), (150, 150, false), (300, 100, false)]);
        stream.on_acked(100..200, false);
        stream.on_lost(0..300, false);
        assert_eq!(drain(&mut stream, 1000), [(0, 100, false), (200, 100, false)]);
        stream.on_acked(0..100, false);
        stream.on_lost(0..200, false);
        assert_eq!(stream.need(), StreamNeed::Nothing);
    }

    #[test]
    fn late_acknowledgement_of_lost_bytes_cancels_their_retransmission() {
        let (_, mut stream) = stream(300);
        drain(&mut stream, 300);
        stream.on_lost(0..300, false);
        stream.on_acked(100..200, false);
        assert_eq!(stream.pending(), 200);
        assert_eq!(drain(&mut stream, 1000), [(0, 100, false), (200, 100, false)]);
    }

    #[test]
    fn offload_may_send_bytes_before_the_source_has_them() {
        let (source, mut stream) = stream(100);
        assert_eq!(drain(&mut stream, 1000), [(0, 100, false)]);
        assert!(stream.is_caught_up());
        assert_eq!(stream.on_offloaded_sent(150..200, true), 100, "skipped bytes count as well");
        assert_eq!(stream.on_offloaded_sent(180..200, true), 0);
        assert_eq!(stream.need(), StreamNeed::Nothing, "the hole is not there yet");
        source.push(50, Instant::now());
        stream.refresh();
        assert_eq!(drain(&mut stream, 1000), [(100, 50, false)]);
        stream.on_lost(170..200, true);
        assert_eq!(stream.need(), StreamNeed::Nothing);
        assert!(!stream.on_acked(0..150, false) && !stream.on_acked(150..180, false));
        source.push(50, Instant::now());
        source.finish(SourceEnd::Fin { at: Instant::now() });
        stream.refresh();
        assert_eq!(drain(&mut stream, 1000), [(180, 20, true)]);
        assert!(stream.on_acked(180..200, true));
    }

    #[test]
    fn bytes_may_be_acknowledged_before_the_source_has_them() {
        let (_, mut stream) = stream(100);
        drain(&mut stream, 100);
        stream.on_offloaded_sent(100..200, true);
        assert!(!stream.on_acked(100..200, true));
        assert!(stream.on_acked(0..100, false));
    }

    #[test]
    fn reset_of_an_offloaded_stream_waits_until_the_offload_returns_it() {
        let (_, mut stream) = stream(100);
        drain(&mut stream, 100);
        stream.delegated = true;
        stream.reset(7);
        assert_eq!(stream.need(), StreamNeed::Nothing);
        assert_eq!(stream.on_offloaded_sent(100..150, false), 50);
        stream.delegated = false;
        assert_eq!(stream.next(1000, 0), Some(StreamChunk::Reset { code: 7, size: 150 }));
    }

    /// Drops a stream of four objects of 100 bytes after `sent` bytes were sent and the range `lost` was lost. Returns
    /// the bytes (offset, length, FIN) that are sent afterwards.
    fn given_up(sent: u64, lost: Option<Range<u64>>) -> (PlaneStream, Vec<(u64, u64, bool)>) {
        let (source, mut stream) = stream(100);
        (0..3).for_each(|_| source.push(100, Instant::now()));
        stream.refresh();
        let chunk = stream.next(sent, u64::MAX).expect("fresh");
        stream.on_sent(&chunk);
        lost.into_iter().for_each(|lost| stream.on_lost(lost, false));
        stream.give_up(DropReason::Late);
        let rest = drain(&mut stream, 1000);
        (stream, rest)
    }

    #[test]
    fn abandoned_stream_finishes_its_first_or_half_sent_object() {
        assert_eq!(given_up(10, None).1, [(10, 90, false)], "the first object");
        assert_eq!(given_up(149, None).1, Vec::new());
        assert_eq!(given_up(150, None).1, [(150, 50, false)]);
        assert_eq!(given_up(200, None).1, Vec::new(), "between two objects");
        assert_eq!(
            given_up(149, Some(50..149)).1,
            [(50, 50, false)],
            "only bytes of a finished object are repaired"
        );
        let (mut stream, _) = given_up(149, None);
        assert!(!stream.is_over() && !stream.is_caught_up());
        stream.on_lost(0..149, false);
        assert_eq!(stream.pending(), 100, "bytes of an unfinished object are not repaired");
        stream.on_acked(0..100, false);
        assert!(stream.is_over());
        stream.reset(7);
        assert_eq!(stream.next(1000, 0), Some(StreamChunk::Reset { code: 7, size: 149 }));
    }

    #[test]
    fn stream_abandoned_in_its_last_object_ends_with_fin() {
        let (source, mut stream) = stream(100);
        let chunk = stream.next(60, u64::MAX).expect("fresh");
        stream.on_sent(&chunk);
        assert!(stream.give_up(DropReason::Late));
        source.finish(SourceEnd::Fin { at: Instant::now() });
        assert!(matches!(stream.refresh(), Some(SourceEnd::Fin { .. })));
        assert_eq!(drain(&mut stream, 1000), [(60, 40, true)]);
        assert!(stream.on_acked(0..100, true));
    }

    #[test]
    fn fin_is_sent_with_the_last_byte_or_alone_and_resent_when_lost() {
        let (source, mut stream) = stream(100);
        source.finish(SourceEnd::Fin { at: Instant::now() });
        stream.refresh();
        assert_eq!(drain(&mut stream, 60), [(0, 60, false), (60, 40, true)]);
        assert!(!stream.on_acked(0..60, false));
        stream.on_lost(60..100, true);
        assert_eq!(drain(&mut stream, 60), [(60, 40, true)]);
        assert!(!stream.on_acked(60..100, false), "the bytes were acknowledged, but not the FIN");
        stream.on_lost(60..100, true);
        assert_eq!(drain(&mut stream, 60), [(100, 0, true)]);
        assert!(stream.on_acked(100..100, true));
    }
}
