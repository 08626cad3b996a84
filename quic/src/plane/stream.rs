//! The send side of one unidirectional stream over bytes that it does not own.

use std::{
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::ranges::Ranges;

use super::{
    policy::Reason,
    queues::Place,
    source::{End, Extent, Source},
    types::{Label, Priority, StreamKey},
};

/// A stream to be opened.
pub struct NewStream {
    pub source: Arc<dyn Source>,
    pub priority: Priority,
    /// The caller's number of whoever the stream belongs to. Owners of the same level take turns, and streams are
    /// counted per owner.
    pub owner: u64,
    /// OBJECT_DELIVERY_TIMEOUT: the stream is reset if an object has not been sent this long after its first byte
    /// arrived.
    pub object_timeout: Option<Duration>,
    /// SUBGROUP_DELIVERY_TIMEOUT: the stream is reset if not all is acknowledged this long after its FIN arrived.
    pub subgroup_timeout: Option<Duration>,
    /// How long bytes may wait: later than that they may as well not come.
    pub max_delay: Option<Duration>,
    pub asked: Asked,
    pub label: Label,
}

/// How much of a stream the receiver asked for from the past. That is never late, and as long as it has to be sent
/// nothing of its owner is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Asked {
    #[default]
    Nothing,
    /// What is there when the stream is opened.
    Present,
    All,
}

impl NewStream {
    /// Bytes before this were asked for from the past.
    fn asked_bytes(&self) -> u64 {
        match self.asked {
            Asked::Nothing => 0,
            Asked::Present => self.source.extent().len,
            Asked::All => u64::MAX,
        }
    }
}

/// What a stream has to send first.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// When the object that it is of was received, where that is known.
    pub received_at: Option<Instant>,
    /// It was sent before, and lost.
    pub is_repair: bool,
    pub is_asked: bool,
}

/// A unidirectional stream over a [`Source`]. Each of its bytes is acknowledged, in flight, or part of a hole: the
/// lost ranges and everything from `sent` on.
pub struct Stream {
    pub owner: u64,
    pub priority: Priority,
    pub label: Label,
    /// The QUIC stream ID; none before the stream is first sent.
    pub id: Option<u64>,
    pub queue: Queue,
    /// When the subgroup's delivery timeout expires.
    pub deadline: Option<Instant>,
    /// The peer's limit of this stream, bytes.
    pub credit: u64,
    /// The offload may send on it as well.
    pub delegated: bool,
    pub max_delay: Option<Duration>,
    /// Bytes before this were asked for from the past.
    asked: u64,
    state: State,
    /// End of what was ever sent. It counts against credit and is the final size of a reset.
    sent: u64,
}

/// Where the scheduler keeps the stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Queue {
    /// Nothing to send, or nothing that the peer's limit of the stream allows.
    #[default]
    None,
    Ready,
    /// Has bytes, but gets no ID before the peer allows more streams.
    Unopened,
    /// Has bytes, but the connection's credit is used up.
    Blocked,
    /// Has bytes, but the peer's limit of the stream is reached.
    Starved,
}

enum State {
    Sending(Sending),
    Reset { code: u64, owed: bool },
}

struct Sending {
    source: Arc<dyn Source>,
    object_timeout: Option<Duration>,
    subgroup_timeout: Option<Duration>,
    extent: Extent,
    lost: Ranges,
    /// Everything before this offset is acknowledged.
    acked: u64,
    acked_beyond: Ranges,
    fin: Fin,
    given_up: Option<GivenUp>,
}

/// Where a stream ends that is given up: an object's end.
#[derive(Clone, Copy, Debug)]
struct GivenUp {
    at: u64,
    reason: Reason,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fin {
    Owed,
    Sent,
    Acked { size: u64 },
}

/// What a stream has to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    Nothing,
    /// Frames that consume no credit: retransmissions, FIN alone, RESET_STREAM.
    Repair,
    /// Bytes for the first time.
    Fresh,
    /// The peer's leave to send more.
    Credit,
}

/// The content of one frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunk {
    Bytes { offset: u64, len: u64, fin: bool, fresh: bool },
    Reset { code: u64, size: u64 },
}

impl Stream {
    pub fn new(new: NewStream, credit: u64) -> Self {
        let asked = new.asked_bytes();
        let sending = Sending {
            source: new.source,
            object_timeout: new.object_timeout,
            subgroup_timeout: new.subgroup_timeout,
            extent: Extent { len: 0, end: End::Open },
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
            queue: Queue::None,
            deadline: None,
            credit,
            delegated: false,
            max_delay: new.max_delay,
            asked,
            state: State::Sending(sending),
            sent: 0,
        }
    }

    /// What the stream carries, which the offload has opened.
    pub fn adopt(&mut self, new: NewStream) {
        self.priority = new.priority;
        self.label = new.label;
        self.max_delay = new.max_delay;
        self.asked = new.asked_bytes();
        if let State::Sending(sending) = &mut self.state {
            sending.source = new.source;
            sending.object_timeout = new.object_timeout;
            sending.subgroup_timeout = new.subgroup_timeout;
            sending.source.acknowledged(sending.acked);
        }
    }

    pub fn place(&self, key: StreamKey) -> Place {
        Place { priority: self.priority, owner: self.owner, key }
    }

    /// Looks at the source again and returns how it ends; `None` once the stream is reset.
    pub fn refresh(&mut self) -> Option<End> {
        let State::Sending(sending) = &mut self.state else { return None };
        sending.extent = sending.extent();
        Some(sending.extent.end)
    }

    /// Gives up what was not sent yet. What has begun is still sent to its end if it is the stream's first object, or if at
    /// least half of it was sent, and what was lost is repaired. Returns whether anything of that is left to be done.
    pub fn give_up(&mut self, reason: Reason) -> bool {
        let sent = self.sent;
        let State::Sending(sending) = &mut self.state else { return false };
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

    /// Why the stream was given up, if it was.
    pub fn given_up(&self) -> Option<Reason> {
        match &self.state {
            State::Sending(sending) => Some(sending.given_up?.reason),
            State::Reset { .. } => None,
        }
    }

    /// Whether all has come that was to come of a stream that was given up.
    pub fn is_over(&self) -> bool {
        match &self.state {
            State::Sending(sending) => {
                let done = sending.given_up.is_some_and(|given_up| sending.acked >= given_up.at);
                done && !sending.is_complete()
            }
            State::Reset { .. } => false,
        }
    }

    pub fn subgroup_timeout(&self) -> Option<Duration> {
        match &self.state {
            State::Sending(sending) => sending.subgroup_timeout,
            State::Reset { .. } => None,
        }
    }

    pub fn is_reset(&self) -> bool {
        matches!(self.state, State::Reset { .. })
    }

    /// Drops the source: from here on only RESET_STREAM is owed.
    pub fn reset(&mut self, code: u64) {
        self.state = State::Reset { code, owed: true };
    }

    pub fn need(&self) -> Need {
        match &self.state {
            // The final size is known once the offload sends no more.
            State::Reset { owed: true, .. } if !self.delegated => Need::Repair,
            State::Reset { .. } => Need::Nothing,
            State::Sending(sending) => sending.need(self.sent, self.credit),
        }
    }

    /// The next frame's content, at most `room` bytes: retransmissions first, then at most `credit` new bytes.
    pub fn next(&self, room: u64, credit: u64) -> Option<Chunk> {
        match &self.state {
            State::Reset { code, owed } => owed.then_some(Chunk::Reset { code: *code, size: self.sent }),
            State::Sending(sending) => {
                let fresh = credit.min(self.credit.saturating_sub(self.sent));
                sending.next(self.sent, room, fresh)
            }
        }
    }

    /// Whether the object at `offset` has been waiting for longer than its delivery timeout.
    pub fn is_late(&self, offset: u64, now: Instant) -> bool {
        let State::Sending(sending) = &self.state else { return false };
        let Some(timeout) = sending.object_timeout else { return false };
        sending
            .source
            .received_at(offset)
            .is_some_and(|received| now.saturating_duration_since(received) > timeout)
    }

    /// What it has to send first; `None` if it has nothing to send, or a reset.
    pub fn head(&self) -> Option<Head> {
        let State::Sending(sending) = &self.state else { return None };
        let hole = sending.hole().map(|hole| hole.start);
        let fresh = (self.sent < sending.extent.len).then_some(self.sent);
        let fin = sending.owes_fin_alone(self.sent).then_some(self.sent);
        let offset = hole.into_iter().chain(fresh).chain(fin).min()?;
        // FIN alone carries no object that could be late.
        let has_object = offset < sending.extent.len;
        Some(Head {
            received_at: has_object.then(|| sending.source.received_at(offset)).flatten(),
            is_repair: hole == Some(offset),
            is_asked: offset < self.asked,
        })
    }

    /// When the newest of its objects came, where that is known.
    pub fn newest_at(&self) -> Option<Instant> {
        match &self.state {
            State::Sending(sending) => sending.source.received_at(sending.extent.len.checked_sub(1)?),
            State::Reset { .. } => None,
        }
    }

    /// OBJECT_DELIVERY_TIMEOUT.
    pub fn object_timeout(&self) -> Option<Duration> {
        match &self.state {
            State::Sending(sending) => sending.object_timeout,
            State::Reset { .. } => None,
        }
    }

    /// Copies source bytes; 0 when they are gone.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> usize {
        match &self.state {
            State::Sending(sending) => sending.source.read(offset, buf),
            State::Reset { .. } => 0,
        }
    }

    pub fn on_sent(&mut self, chunk: &Chunk) {
        match (&mut self.state, *chunk) {
            (State::Reset { owed, .. }, Chunk::Reset { .. }) => *owed = false,
            (State::Sending(sending), Chunk::Bytes { offset, len, fin, .. }) => {
                sending.lost.remove(offset..offset + len);
                self.sent = self.sent.max(offset + len);
                if fin && sending.fin == Fin::Owed {
                    sending.fin = Fin::Sent;
                }
            }
            _ => {}
        }
    }

    /// The offload sent `range`, which the source may not have yet. What it skipped before that is a hole from now
    /// on. Returns how many bytes count against the connection's credit, skipped ones included.
    pub fn on_offloaded_sent(&mut self, range: Range<u64>, fin: bool) -> u64 {
        let before = self.sent;
        self.sent = before.max(range.end);
        if let State::Sending(sending) = &mut self.state {
            sending.lost.insert(before..range.start.max(before));
            sending.lost.remove(range);
            if fin && sending.fin == Fin::Owed {
                sending.fin = Fin::Sent;
            }
        }
        self.sent - before
    }

    /// Whether the source is open, and all that it has was sent and is not known to be lost.
    pub fn is_caught_up(&self) -> bool {
        match &self.state {
            State::Sending(sending) => {
                let is_open = sending.given_up.is_none() && !sending.is_complete();
                is_open && sending.lost.is_empty() && self.sent == sending.extent.len
            }
            State::Reset { .. } => false,
        }
    }

    /// Returns whether everything is acknowledged now, FIN included.
    pub fn on_acked(&mut self, range: Range<u64>, fin: bool) -> bool {
        let State::Sending(sending) = &mut self.state else { return false };
        sending.lost.remove(range.clone());
        let end = range.end;
        sending.acknowledge(range);
        if fin {
            sending.fin = Fin::Acked { size: end };
        }
        sending.fin == Fin::Acked { size: sending.acked }
    }

    pub fn on_lost(&mut self, range: Range<u64>, fin: bool) {
        let State::Sending(sending) = &mut self.state else { return };
        let end = sending.given_up.map_or(range.end, |given_up| given_up.at.min(range.end));
        let unacked = range.start.max(sending.acked)..end;
        for gap in sending.acked_beyond.gaps(unacked) {
            sending.lost.insert(gap);
        }
        if fin && sending.fin == Fin::Sent {
            sending.fin = Fin::Owed;
        }
    }

    pub fn on_reset_lost(&mut self) {
        if let State::Reset { owed, .. } = &mut self.state {
            *owed = true;
        }
    }

    /// The code of the RESET_STREAM that was sent.
    pub fn reset_code(&self) -> Option<u64> {
        match self.state {
            State::Reset { code, .. } => Some(code),
            State::Sending(_) => None,
        }
    }

    /// Whether everything has been sent, FIN included, and nothing of it is known to be lost.
    pub fn is_sent(&self) -> bool {
        match &self.state {
            State::Sending(sending) => sending.fin != Fin::Owed && !self.owes(sending),
            State::Reset { .. } => true,
        }
    }

    /// Whether the source has lost bytes while some are still owed.
    pub fn lost_its_source(&self) -> bool {
        match &self.state {
            State::Sending(sending) => sending.source.is_evicted() && self.owes(sending),
            State::Reset { .. } => false,
        }
    }

    fn owes(&self, sending: &Sending) -> bool {
        let Extent { len, end } = sending.extent();
        end == End::Open || self.sent < len || sending.lost.total() > 0
    }

    /// Bytes in holes.
    pub fn pending(&self) -> u64 {
        match &self.state {
            State::Sending(sending) => sending.lost.total() + sending.extent.len.saturating_sub(self.sent),
            State::Reset { .. } => 0,
        }
    }
}

impl Sending {
    /// Of the source, up to where it is given up.
    fn extent(&self) -> Extent {
        let extent = self.source.extent();
        match self.given_up {
            Some(GivenUp { at, .. }) if at < extent.len => Extent { len: at, end: End::Open },
            _ => extent,
        }
    }

    fn need(&self, sent: u64, credit: u64) -> Need {
        if self.hole().is_some() || self.owes_fin_alone(sent) {
            Need::Repair
        } else if sent < self.extent.len.min(credit) {
            Need::Fresh
        } else if sent < self.extent.len {
            Need::Credit
        } else {
            Need::Nothing
        }
    }

    /// The first hole among what was sent, as far as the source can fill it.
    fn hole(&self) -> Option<Range<u64>> {
        let hole = self.lost.first().filter(|hole| hole.start < self.extent.len)?;
        Some(hole.start..hole.end.min(self.extent.len))
    }

    fn owes_fin_alone(&self, sent: u64) -> bool {
        self.fin == Fin::Owed && sent == self.extent.len && self.is_complete()
    }

    fn is_complete(&self) -> bool {
        matches!(self.extent.end, End::Fin { .. })
    }

    fn next(&self, sent: u64, room: u64, fresh_limit: u64) -> Option<Chunk> {
        let (offset, len, fresh) = match self.hole() {
            Some(hole) => (hole.start, (hole.end - hole.start).min(room), false),
            None => (sent, self.extent.len.saturating_sub(sent).min(fresh_limit).min(room), true),
        };
        let fin = self.is_complete() && offset + len == self.extent.len;
        let alone = len == 0 && self.owes_fin_alone(sent);
        (len > 0 || alone).then_some(Chunk::Bytes { offset, len, fin, fresh })
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

    fn stream(len: u64) -> (Arc<Mem>, Stream) {
        let now = Instant::now();
        let source = Mem::new(1);
        source.push(len, now);
        let mut stream = Stream::new(
            NewStream {
                source: source.clone(),
                priority: Priority::default(),
                owner: 0,
                object_timeout: None,
                subgroup_timeout: None,
                max_delay: None,
                asked: Asked::Nothing,
                label: Label::default(),
            },
            u64::MAX,
        );
        stream.refresh();
        (source, stream)
    }

    /// Takes all that is owed now, in chunks of at most `room`.
    fn drain(stream: &mut Stream, room: u64) -> Vec<(u64, u64, bool)> {
        std::iter::from_fn(|| {
            let chunk = stream.next(room, u64::MAX)?;
            stream.on_sent(&chunk);
            match chunk {
                Chunk::Bytes { offset, len, fin, .. } => Some((offset, len, fin)),
                Chunk::Reset { .. } => None,
            }
        })
        .collect()
    }

    #[test]
    fn what_is_acknowledged_is_never_lost() {
        let (_, mut stream) = stream(400);
        assert_eq!(drain(&mut stream, 150), [(0, 150, false), (150, 150, false), (300, 100, false)]);
        stream.on_acked(100..200, false);
        stream.on_lost(0..300, false);
        assert_eq!(drain(&mut stream, 1000), [(0, 100, false), (200, 100, false)]);
        stream.on_acked(0..100, false);
        stream.on_lost(0..200, false);
        assert_eq!(stream.need(), Need::Nothing);
    }

    #[test]
    fn a_late_acknowledgement_fills_the_hole() {
        let (_, mut stream) = stream(300);
        drain(&mut stream, 300);
        stream.on_lost(0..300, false);
        stream.on_acked(100..200, false);
        assert_eq!(stream.pending(), 200);
        assert_eq!(drain(&mut stream, 1000), [(0, 100, false), (200, 100, false)]);
    }

    #[test]
    fn what_the_offload_sent_may_be_ahead_of_the_source() {
        let (source, mut stream) = stream(100);
        assert_eq!(drain(&mut stream, 1000), [(0, 100, false)]);
        assert!(stream.is_caught_up());
        assert_eq!(stream.on_offloaded_sent(150..200, true), 100, "what is skipped counts as well");
        assert_eq!(stream.on_offloaded_sent(180..200, true), 0);
        assert_eq!(stream.need(), Need::Nothing, "the hole is not there yet");
        source.push(50, Instant::now());
        stream.refresh();
        assert_eq!(drain(&mut stream, 1000), [(100, 50, false)]);
        stream.on_lost(170..200, true);
        assert_eq!(stream.need(), Need::Nothing);
        assert!(!stream.on_acked(0..150, false) && !stream.on_acked(150..180, false));
        source.push(50, Instant::now());
        source.finish(End::Fin { at: Instant::now() });
        stream.refresh();
        assert_eq!(drain(&mut stream, 1000), [(180, 20, true)]);
        assert!(stream.on_acked(180..200, true));
    }

    #[test]
    fn all_can_be_acknowledged_before_the_source_has_it() {
        let (_, mut stream) = stream(100);
        drain(&mut stream, 100);
        stream.on_offloaded_sent(100..200, true);
        assert!(!stream.on_acked(100..200, true));
        assert!(stream.on_acked(0..100, false));
    }

    #[test]
    fn a_delegated_stream_is_reset_once_it_is_returned() {
        let (_, mut stream) = stream(100);
        drain(&mut stream, 100);
        stream.delegated = true;
        stream.reset(7);
        assert_eq!(stream.need(), Need::Nothing);
        assert_eq!(stream.on_offloaded_sent(100..150, false), 50);
        stream.delegated = false;
        assert_eq!(stream.next(1000, 0), Some(Chunk::Reset { code: 7, size: 150 }));
    }

    /// Of four objects of 100 bytes, of which `sent` bytes were sent and some of them lost: what is still sent.
    fn given_up(sent: u64, lost: Option<Range<u64>>) -> (Stream, Vec<(u64, u64, bool)>) {
        let (source, mut stream) = stream(100);
        (0..3).for_each(|_| source.push(100, Instant::now()));
        stream.refresh();
        let chunk = stream.next(sent, u64::MAX).expect("fresh");
        stream.on_sent(&chunk);
        lost.into_iter().for_each(|lost| stream.on_lost(lost, false));
        stream.give_up(Reason::Late);
        let rest = drain(&mut stream, 1000);
        (stream, rest)
    }

    #[test]
    fn what_has_begun_is_finished_if_it_is_the_first_or_half_there() {
        assert_eq!(given_up(10, None).1, [(10, 90, false)], "the first object");
        assert_eq!(given_up(149, None).1, Vec::new());
        assert_eq!(given_up(150, None).1, [(150, 50, false)]);
        assert_eq!(given_up(200, None).1, Vec::new(), "between two");
        assert_eq!(given_up(149, Some(50..149)).1, [(50, 50, false)], "repaired as far as it can be used");
        let (mut stream, _) = given_up(149, None);
        assert!(!stream.is_over() && !stream.is_caught_up());
        stream.on_lost(0..149, false);
        assert_eq!(stream.pending(), 100, "of what is not finished nothing is repaired");
        stream.on_acked(0..100, false);
        assert!(stream.is_over());
        stream.reset(7);
        assert_eq!(stream.next(1000, 0), Some(Chunk::Reset { code: 7, size: 149 }));
    }

    #[test]
    fn a_stream_that_is_given_up_at_its_end_ends_with_fin() {
        let (source, mut stream) = stream(100);
        let chunk = stream.next(60, u64::MAX).expect("fresh");
        stream.on_sent(&chunk);
        assert!(stream.give_up(Reason::Late));
        source.finish(End::Fin { at: Instant::now() });
        assert!(matches!(stream.refresh(), Some(End::Fin { .. })));
        assert_eq!(drain(&mut stream, 1000), [(60, 40, true)]);
        assert!(stream.on_acked(0..100, true));
    }

    #[test]
    fn fin_goes_with_the_last_byte_or_alone_and_again_when_lost() {
        let (source, mut stream) = stream(100);
        source.finish(End::Fin { at: Instant::now() });
        stream.refresh();
        assert_eq!(drain(&mut stream, 60), [(0, 60, false), (60, 40, true)]);
        assert!(!stream.on_acked(0..60, false));
        stream.on_lost(60..100, true);
        assert_eq!(drain(&mut stream, 60), [(60, 40, true)]);
        assert!(!stream.on_acked(60..100, false), "the bytes, by a frame from before FIN was known");
        stream.on_lost(60..100, true);
        assert_eq!(drain(&mut stream, 60), [(100, 0, true)]);
        assert!(stream.on_acked(100..100, true));
    }
}
