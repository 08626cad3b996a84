//! Filling packets: which frame comes next, and what follows from having written it.

use std::time::Instant;

use super::{Cause, Content, Downstream, Event, EventKind, Level, NewDatagram, Sent, StreamKey};
use crate::{
    frame,
    plane::{
        recovery::BASE_MTU,
        stream::{Chunk, Queue, Stream},
    },
    varint,
};

/// A STREAM frame gets at least this much room, bytes; a smaller rest of a packet stays empty.
const MIN_ROOM: usize = 32;

impl Downstream {
    /// Appends the frames of one packet to `out`, at most `room` bytes: what is left of [`Self::mtu`]. Only a packet that probes
    /// whether the path takes larger ones is as much longer than that. `None` when there is nothing to send, or
    /// nothing may be sent before an acknowledgement, more credit or [`Self::timeout`].
    ///
    /// Pass the content on to [`Self::on_sent`], or to [`Self::on_not_sent`].
    pub fn poll_frames(&mut self, now: Instant, room: usize, out: &mut Vec<u8>) -> Option<Content> {
        self.review_superseded(now);
        let content = self.poll(now, room, out);
        if content.is_none() {
            self.watch_backlog(now);
        }
        content
    }

    fn poll(&mut self, now: Instant, room: usize, out: &mut Vec<u8>) -> Option<Content> {
        let probing = self.recovery.probes() > 0;
        self.paced_until = None;
        if !probing {
            if !self.has_work() {
                self.on_app_limited();
                return None;
            }
            if !self.recovery.window_open(self.outstanding.bytes) {
                self.app_limited = false;
                return None;
            }
            if self.config.pacing
                && let Err(at) = self.pacer.ready(now, self.recovery.pacing_rate())
            {
                self.paced_until = Some(at);
                return None;
            }
        }
        let mtu_probe = self.recovery.mtu_probe(now, self.outstanding.bytes).filter(|_| !probing);
        // A probe for a timeout has to arrive even if the path's MTU has shrunk (RFC 9000, section 14.4).
        let size = if probing {
            BASE_MTU.min(self.recovery.mtu())
        } else {
            mtu_probe.unwrap_or(self.recovery.mtu())
        };
        let room = (room + size as usize).saturating_sub(self.mtu());
        let (start, mut content) = (out.len(), Content::default());
        self.fill(now, room, out, &mut content);
        if content.0.is_empty() && probing && room > 0 {
            frame::write_ping(out);
            content.0.push(Sent::Ping);
        }
        if content.0.is_empty() {
            self.on_app_limited();
            return None;
        }
        if mtu_probe.is_some() {
            frame::write_padding(room.saturating_sub(out.len() - start), out);
        }
        Some(content)
    }

    fn on_app_limited(&mut self) {
        self.app_limited = true;
        self.recovery.on_app_limited();
    }

    /// The packet was sent, or is about to be. `size` is its UDP payload, bytes.
    pub fn on_sent(&mut self, now: Instant, number: u64, size: usize, content: Content) {
        self.pacer.on_sent(size as u64);
        self.recovery.on_sent(now, number, size, content);
    }

    /// The packet will not be sent: its content is owed again.
    pub fn on_not_sent(&mut self, content: Content) {
        self.lose(&content);
    }

    /// The QUIC stack sent a packet. `size` is its UDP payload, bytes.
    pub fn on_stack_sent(&mut self, now: Instant, number: u64, size: usize, ack_eliciting: bool) {
        self.recovery.on_stack_sent(now, number, size, ack_eliciting);
    }

    /// Whether [`Self::poll_frames`] would have something to send if window and pacing allow it.
    pub fn has_work(&self) -> bool {
        !self.ready.is_empty() || !self.datagrams.is_empty() || self.recovery.probes() > 0
    }

    fn fill(&mut self, now: Instant, room: usize, out: &mut Vec<u8>, content: &mut Content) {
        let end = out.len() + room;
        loop {
            let left = end - out.len();
            let stream = self.ready.first();
            let datagram = self.datagrams.level();
            let more = match (stream, datagram) {
                (None, None) => false,
                (Some((level, key)), other) if self.stream_goes_first(level, other) => {
                    self.write_stream(now, key, left, out, content)
                }
                (_, _) => self.write_datagram(now, left, out, content),
            };
            if !more {
                return;
            }
        }
    }

    fn stream_goes_first(&self, level: Level, datagram: Option<Level>) -> bool {
        datagram.is_none_or(|datagram| level < datagram || (level == datagram && !self.datagrams_turn))
    }

    /// Writes the first datagram; returns whether the packet may take more.
    fn write_datagram(
        &mut self,
        now: Instant,
        room: usize,
        out: &mut Vec<u8>,
        content: &mut Content,
    ) -> bool {
        let Some(first) = self.datagrams.first() else { return false };
        let (expired, late) = (first.is_expired(now), first.is_late(now));
        let fits = datagram_size(&first.payload) <= room;
        if !expired && !late && !fits && !content.0.is_empty() {
            return false;
        }
        let Some(NewDatagram { payload, label, .. }) = self.datagrams.pop() else { return false };
        self.datagrams_turn = false;
        if expired {
            self.stats.datagrams_expired += 1;
        } else if late {
            self.stats.datagrams_late += 1;
        } else if !fits {
            self.stats.datagrams_too_large += 1;
        } else {
            frame::write_datagram(&payload, out);
            content.0.push(Sent::Datagram { label });
            self.stats.datagrams_sent += 1;
        }
        true
    }

    /// Writes one frame of the first ready stream; returns whether the packet may take more.
    fn write_stream(
        &mut self,
        now: Instant,
        key: StreamKey,
        room: usize,
        out: &mut Vec<u8>,
        content: &mut Content,
    ) -> bool {
        if room < MIN_ROOM {
            return false;
        }
        // The peer's limits may have moved the stream to another queue.
        self.place(key);
        let Some(stream) = self.streams.get(key).filter(|stream| stream.queue == Queue::Ready) else {
            return true;
        };
        let id = stream.id.unwrap_or_else(|| self.stream_id(self.next_stream));
        let credit = self.data_credit();
        let Some(chunk) = stream.next(room as u64, credit) else { return false };
        let written = match chunk {
            Chunk::Reset { code, size } => {
                let code = self.binding.to_wire(code);
                write_reset(id, code, size, room, out).map(|()| chunk)
            }
            Chunk::Bytes { offset, len, .. } => {
                // A frame with FIN alone carries no object that could be late.
                if len > 0 && stream.is_late(offset, now) {
                    self.begin_reset(key, self.config.reset_codes.late, Cause::ObjectTimeout);
                    return true;
                }
                match write_bytes(stream, id, chunk, room, out) {
                    Some(chunk) => Some(chunk),
                    None => {
                        self.begin_reset(key, self.config.reset_codes.behind, Cause::Evicted);
                        return true;
                    }
                }
            }
        };
        let Some(chunk) = written else { return false };
        self.record(key, id, &chunk, content);
        true
    }

    fn record(&mut self, key: StreamKey, id: u64, chunk: &Chunk, content: &mut Content) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        stream.on_sent(chunk);
        self.ready.rotate(stream.place(key));
        self.datagrams_turn = true;
        if stream.id.is_none() {
            stream.id = Some(id);
            let owner = stream.owner;
            self.next_stream += 1;
            self.by_id.insert(id, key);
            if let Some(owner) = self.owners.get_mut(&owner) {
                owner.owned.opened += 1;
            }
            self.stats.streams_opened += 1;
            self.events.push_back(Event { key, owner, kind: EventKind::Opened });
        }
        content.0.push(match *chunk {
            Chunk::Reset { .. } => Sent::Reset { key },
            Chunk::Bytes { offset, len, fin, fresh } => {
                if fresh {
                    self.data_sent += len;
                    self.stats.stream_bytes += len;
                } else {
                    self.stats.retransmitted_bytes += len;
                }
                Sent::Bytes { key, offset, len: len as u16, fin, again: !fresh }
            }
        });
        self.place(key);
    }

    pub(super) fn stream_id(&self, index: u64) -> u64 {
        index << 2 | 0x2 | u64::from(self.peer.is_server)
    }
}

pub(super) fn datagram_size(payload: &[u8]) -> usize {
    1 + varint::len(payload.len() as u64) + payload.len()
}

fn write_reset(id: u64, code: u64, size: u64, room: usize, out: &mut Vec<u8>) -> Option<()> {
    let len = 1 + varint::len(id) + varint::len(code) + varint::len(size);
    (len <= room).then(|| frame::write_reset_stream(id, code, size, out))
}

/// Appends a STREAM frame with as much of `chunk` as fits into `room`, and returns that part. `None` if the source no
/// longer has the bytes.
fn write_bytes(stream: &Stream, id: u64, chunk: Chunk, room: usize, out: &mut Vec<u8>) -> Option<Chunk> {
    let Chunk::Bytes { offset, len, fin, fresh } = chunk else { return None };
    let space = room.saturating_sub(frame::stream_overhead(id, offset, room)) as u64;
    let mut chunk = Chunk::Bytes { offset, len: len.min(space), fin: fin && len <= space, fresh };
    let start = out.len();
    loop {
        let Chunk::Bytes { len, fin, .. } = chunk else { return None };
        frame::write_stream_header(id, offset, len as usize, fin, out);
        let data = out.len();
        out.resize(data + len as usize, 0);
        let read = match len {
            0 => 0,
            _ => stream.read(offset, out.get_mut(data..)?) as u64,
        };
        if read == len {
            return Some(chunk);
        }
        out.truncate(start);
        if read == 0 {
            return None;
        }
        chunk = Chunk::Bytes { offset, len: read, fin: false, fresh };
    }
}
