//! The QUIC stack's view of the connection, which it shares with other senders: its own packet numbers, and its part
//! of the flow control credit.

use std::{
    ops::RangeInclusive,
    time::{Duration, Instant},
};

use bytes::BytesMut;
use millrace_quic::{
    ack::{self, NumberMap},
    credit::CreditSplit,
    frame,
    params::{self, MalformedParams, PeerParams},
    varint,
};

use crate::{numbers::NumberAllocator, stats::SeamCounters};

pub(crate) struct QuinnStack {
    /// Maps the stack's packet numbers to those on the wire.
    map: NumberMap,
    credit: CreditSplit,
    peer: Option<PeerParams>,
    // Buffers that are reused for each ACK frame.
    virtuals: Vec<RangeInclusive<u64>>,
    rewritten: Vec<u8>,
}

/// The times at which an ACK frame arrived and at which it was read.
#[derive(Clone, Copy)]
pub(crate) struct AckTimes {
    pub now: Instant,
    /// Time when the frame arrived, which may be long before it was read.
    pub arrived: Instant,
}

impl QuinnStack {
    pub fn new() -> Self {
        Self {
            map: NumberMap::default(),
            credit: CreditSplit::new(0),
            peer: None,
            virtuals: Vec::new(),
            rewritten: Vec::new(),
        }
    }

    /// Stores the peer's transport parameters. Returns whether these are the first parameters that were stored.
    pub fn set_peer(&mut self, peer: PeerParams) -> bool {
        if self.peer.is_some() {
            return false;
        }
        self.credit = CreditSplit::new(peer.initial_max_data);
        self.peer = Some(peer);
        true
    }

    /// Returns the peer's transport parameters with only the stack's part of the connection credit.
    pub fn cap(&self, encoded: &[u8]) -> Result<Vec<u8>, MalformedParams> {
        params::cap_initial_max_data(encoded, self.credit.granted())
    }

    /// Returns the peer's ack_delay_exponent.
    pub fn ack_delay_exponent(&self) -> u32 {
        self.peer.unwrap_or_default().ack_delay_exponent
    }

    /// Returns the data plane's limit of connection credit, bytes.
    pub fn other_credit(&self) -> u64 {
        self.credit.rest()
    }

    /// Returns the packet number on the wire for the stack's packet `number`, which is sealed with the keys of
    /// `generation`.
    pub fn draw(
        &mut self,
        now: Instant,
        generation: u16,
        number: u64,
        numbers: &NumberAllocator,
        counters: &SeamCounters,
    ) -> u64 {
        // quinn skips numbers to detect peers that acknowledge packets they did not receive (RFC 9000, section 21.4).
        // For each number that quinn skips, a wire number is skipped, so that quinn still detects such peers.
        while self.map.next() < number {
            self.map.push(numbers.skip(), None);
            counters.skipped_numbers.add(1);
        }
        // quinn never returns to old keys. If it did, the peer would drop the packet, and quinn would send its contents
        // again.
        let wire = numbers.draw_in(generation).unwrap_or_else(|_| numbers.skip());
        self.map.push(wire, Some(now));
        wire
    }

    /// Notes that the stack sends a STREAM frame.
    pub fn on_stream_frame(&mut self, frame: &frame::StreamFrame<'_>) {
        self.credit.on_sent(frame.id, frame.offset..frame.offset + frame.data.len() as u64);
    }

    /// Replaces the limit in a MAX_DATA frame by the QUIC stack's part of that limit.
    pub fn on_max_data(&mut self, limit: u64, frame: &mut [u8]) {
        self.credit.on_max_data(limit);
        write_max_data(self.credit.granted(), frame);
    }

    /// Rewrites an ACK frame of `len` bytes from wire numbers to the QUIC stack's own packet numbers. `latest_rtt` is
    /// the newest round trip of other senders' packets.
    pub fn rewrite_ack(
        &mut self,
        times: AckTimes,
        ack: &ack::AckFrame<'_>,
        len: usize,
        latest_rtt: Duration,
        counters: &SeamCounters,
    ) -> &[u8] {
        ack.translate(&self.map, &mut self.virtuals);
        let mut delay = ack.delay;
        match self.virtuals.first().map(|range| *range.end()) {
            Some(largest) => {
                let sent = self.map.sent(largest);
                let news = self.map.on_acked(largest);
                if news { &counters.acks_for_quinn } else { &counters.acks_for_data_plane }.add(1);
                if news {
                    let since = |sent: Instant| times.arrived.saturating_duration_since(sent);
                    let is_own = self.map.translate(ack.largest..=ack.largest).is_some();
                    let round_trip = if is_own { sent.map_or(Duration::ZERO, since) } else { latest_rtt };
                    delay += excess_delay(times.now, sent, round_trip) >> self.ack_delay_exponent();
                }
            }
            None => {
                counters.acks_for_data_plane.add(1);
                // The frame acknowledges no packet of quinn, so quinn's last ACK is repeated, which has no effect.
                // Without any ACK frame the packet would look like a probing packet, and quinn would not follow a peer
                // that moved (RFC 9000, section 9.1).
                self.virtuals.extend(self.map.acked().map(|number| number..=number));
            }
        }
        ack.rewrite(len, &self.virtuals, delay.min(varint::MAX), &mut self.rewritten);
        if self.rewritten.len() > len {
            self.rewritten.clear();
        }
        self.rewritten.resize(len, 0);
        &self.rewritten
    }

    /// Adds a MAX_DATA frame to the payload once the stack has used half of its credit and `take`, which is asked for
    /// more credit, grants some. Returns whether a frame was added.
    pub fn top_up(&mut self, take: impl FnOnce(u64) -> u64, payload: &mut BytesMut) -> bool {
        let Some(limit) = self.credit.top_up(take) else { return false };
        // The frame is inserted at the front: appended to a STREAM frame without a Length field, it would become that
        // frame's data.
        let mut frame = Vec::with_capacity(9 + payload.len());
        frame::write_max_data(limit, &mut frame);
        frame.extend_from_slice(payload);
        *payload = BytesMut::from(frame.as_slice());
        true
    }
}

/// Returns by how many microseconds the acknowledgement of quinn's newest packet was late. It is late if the peer sent
/// it for a later packet of the data plane, or if it was read late. `round_trip` is the time that the acknowledgement
/// would have taken otherwise.
fn excess_delay(now: Instant, sent: Option<Instant>, round_trip: Duration) -> u64 {
    let waited = sent.map_or(Duration::ZERO, |sent| now.saturating_duration_since(sent));
    u64::try_from(waited.saturating_sub(round_trip).as_micros()).unwrap_or(0)
}

/// Overwrites a MAX_DATA frame with another limit, in the same number of bytes. The new limit fits, because it is not
/// larger than the original one.
fn write_max_data(limit: u64, frame: &mut [u8]) {
    frame::blank(frame);
    let len = frame.len();
    let width = [8, 4, 2, 1].into_iter().find(|width| *width < len).unwrap_or(0);
    if varint::fill(limit, &mut frame[1..1 + width]) {
        frame[0] = frame::MAX_DATA as u8;
    }
}
