//! Fills packets: selects the next frame, writes it, and updates the state.

use std::time::Instant;

use super::{
    Cause, Downstream, DownstreamEvent, EventKind, NewDatagram, PacketContent, PriorityLevel, SentFrame,
    StreamKey,
};
use crate::{
    frame,
    plane::{
        recovery::BASE_MTU,
        stream::{PlaneStream, SchedulerQueue, StreamChunk},
    },
    varint,
};

/// Smallest space in a packet for a STREAM frame, bytes. If less is left, the packet is sent without a further frame.
const MIN_ROOM: usize = 32;

impl Downstream {
    /// Appends the frames of one packet to `out`, at most `room` bytes: [`Self::mtu`] minus the packet's header and
    /// tag. Only a packet that probes a larger MTU is longer. Returns `None` if there is nothing to send, or if nothing
    /// may be sent before an acknowledgement or more credit arrives, or before [`Self::timeout`].
    ///
    /// The caller passes the content on to [`Self::on_sent`], or to [`Self::on_not_sent`].
    pub fn poll_frames(&mut self, now: Instant, room: usize, out: &mut Vec<u8>) -> Option<PacketContent> {
        self.review_superseded(now);
        let content = self.poll(now, room, out);
        if content.is_none() {
            self.watch_backlog(now);
        }
        content
    }

    fn poll(&mut self, now: Instant, room: usize, out: &mut Vec<u8>) -> Option<PacketContent> {
        // A packet sent because of a probe timeout ignores congestion window and pacing (RFC 9002, section 7.5).
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
        // A packet sent because of a probe timeout is small, so that it arrives even if the path's MTU has shrunk (RFC
        // 9000, section 14.4).
        let size = if probing {
            BASE_MTU.min(self.recovery.mtu())
        } else {
            mtu_probe.unwrap_or(self.recovery.mtu())
        };
        let room = (room + size as usize).saturating_sub(self.mtu());
        let start = out.len();
        let mut content = PacketContent::default();
        self.fill(now, room, out, &mut content);
        // A probe has to be ack-eliciting, so it is a PING if there is no data to send (RFC 9002, section 6.2.4).
        if content.0.is_empty() && probing && room > 0 {
            frame::write_ping(out);
            content.0.push(SentFrame::Ping);
        }
        if content.0.is_empty() {
            self.on_app_limited();
            return None;
        }
        // A probe of the MTU is padded to the size that it tests (RFC 9000, section 14.4).
        if mtu_probe.is_some() {
            frame::write_padding(room.saturating_sub(out.len() - start), out);
        }
        Some(content)
    }

    fn on_app_limited(&mut self) {
        self.app_limited = true;
        self.recovery.on_app_limited();
    }

    /// Notes that the packet was sent, or is about to be sent. `size` is its UDP payload, bytes.
    pub fn on_sent(&mut self, now: Instant, number: u64, size: usize, content: PacketContent) {
        self.pacer.on_sent(size as u64);
        self.recovery.on_sent(now, number, size, content);
    }

    /// Notes that the packet will not be sent, so its content has to be sent in another packet.
    pub fn on_not_sent(&mut self, content: PacketContent) {
        self.lose(&content);
    }

    /// Notes that the QUIC stack sent a packet. `size` is its UDP payload, bytes.
    pub fn on_stack_sent(&mut self, now: Instant, number: u64, size: usize, ack_eliciting: bool) {
        self.recovery.on_stack_sent(now, number, size, ack_eliciting);
    }

    /// Returns whether [`Self::poll_frames`] has something to send as soon as window and pacing allow it.
    pub fn has_work(&self) -> bool {
        !self.ready.is_empty() || !self.datagrams.is_empty() || self.recovery.probes() > 0
    }

    fn fill(&mut self, now: Instant, room: usize, out: &mut Vec<u8>, content: &mut PacketContent) {
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

    fn stream_goes_first(&self, level: PriorityLevel, datagram: Option<PriorityLevel>) -> bool {
        datagram.is_none_or(|datagram| level < datagram || (level == datagram && !self.datagrams_turn))
    }

    /// Writes the first waiting datagram. Returns whether more frames may fit into the packet.
    fn write_datagram(
        &mut self,
        now: Instant,
        room: usize,
        out: &mut Vec<u8>,
        content: &mut PacketContent,
    ) -> bool {
        let Some(first) = self.datagrams.first() else { return false };
        let expired = first.is_expired(now);
        let late = first.is_late(now);
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
            content.0.push(SentFrame::Datagram { label });
            self.stats.datagrams_sent += 1;
        }
        true
    }

    /// Writes one frame of the first ready stream. Returns whether more frames may fit into the packet.
    fn write_stream(
        &mut self,
        now: Instant,
        key: StreamKey,
        room: usize,
        out: &mut Vec<u8>,
        content: &mut PacketContent,
    ) -> bool {
        if room < MIN_ROOM {
            return false;
        }
        // The stream may have moved to another queue because one of the peer's limits is reached.
        self.place(key);
        let Some(stream) = self.streams.get(key).filter(|stream| stream.queue == SchedulerQueue::Ready)
        else {
            return true;
        };
        // Streams get IDs in the order in which they are sent: a larger ID would open all smaller ones (RFC 9000,
        // section 3.2).
        let id = stream.id.unwrap_or_else(|| self.stream_id(self.next_stream));
        let credit = self.data_credit();
        let Some(chunk) = stream.next(room as u64, credit) else { return false };
        let written = match chunk {
            StreamChunk::Reset { code, size } => {
                let code = self.binding.to_wire(code);
                write_reset(id, code, size, room, out).map(|()| chunk)
            }
            StreamChunk::Bytes { offset, len, .. } => {
                // A STREAM frame that has FIN and no bytes carries no object, so no delivery timeout applies to it.
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

    fn record(&mut self, key: StreamKey, id: u64, chunk: &StreamChunk, content: &mut PacketContent) {
        let Some(stream) = self.streams.get_mut(key) else { return };
        stream.on_sent(chunk);
        // Subscriptions of the same priority level send in turn, one frame each.
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
            self.events.push_back(DownstreamEvent { key, owner, kind: EventKind::Opened });
        }
        content.0.push(match *chunk {
            StreamChunk::Reset { .. } => SentFrame::Reset { key },
            StreamChunk::Bytes { offset, len, fin, fresh } => {
                if fresh {
                    self.data_sent += len;
                    self.stats.stream_bytes += len;
                } else {
                    self.stats.retransmitted_bytes += len;
                }
                SentFrame::Bytes { key, offset, len: len as u16, fin, again: !fresh }
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

/// Appends a STREAM frame with as much of `chunk` as fits into `room` bytes, and returns the appended part. Returns
/// `None` if the source has evicted the bytes.
fn write_bytes(
    stream: &PlaneStream,
    id: u64,
    chunk: StreamChunk,
    room: usize,
    out: &mut Vec<u8>,
) -> Option<StreamChunk> {
    let StreamChunk::Bytes { offset, len, fin, fresh } = chunk else { return None };
    let space = room.saturating_sub(frame::stream_overhead(id, offset, room)) as u64;
    // The overhead is computed for the largest possible Length value, `room`. So the header and `space` bytes of stream
    // data always fit into the packet.
    let mut chunk = StreamChunk::Bytes { offset, len: len.min(space), fin: fin && len <= space, fresh };
    let start = out.len();
    loop {
        let StreamChunk::Bytes { len, fin, .. } = chunk else { return None };
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
        chunk = StreamChunk::Bytes { offset, len: read, fin: false, fresh };
    }
}
