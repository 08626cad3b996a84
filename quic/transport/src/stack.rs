//! The QUIC stack's view of the connection: its own packet numbers, and its part of the credit.

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
    // Reused from ACK to ACK.
    virtuals: Vec<RangeInclusive<u64>>,
    rewritten: Vec<u8>,
}

/// The times when an acknowledgement was read and when it arrived.
#[derive(Clone, Copy)]
pub(crate) struct AckTimes {
    pub now: Instant,
    /// When it arrived. It may have waited before it was read.
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

    /// Takes the peer's transport parameters; returns whether they are the first.
    pub fn set_peer(&mut self, peer: PeerParams) -> bool {
        if self.peer.is_some() {
            return false;
        }
        self.credit = CreditSplit::new(peer.initial_max_data);
        self.peer = Some(peer);
        true
    }

    /// The peer's transport parameters with the stack's part of the credit.
    pub fn cap(&self, encoded: &[u8]) -> Result<Vec<u8>, MalformedParams> {
        params::cap_initial_max_data(encoded, self.credit.granted())
    }

    /// The peer's ACK Delay Exponent.
    pub fn ack_delay_exponent(&self) -> u32 {
        self.peer.unwrap_or_default().ack_delay_exponent
    }

    /// Connection credit that is not the stack's.
    pub fn other_credit(&self) -> u64 {
        self.credit.rest()
    }

    /// The stack seals a packet with the keys of `generation` and its own number: returns the number for the wire.
    pub fn draw(
        &mut self,
        now: Instant,
        generation: u16,
        number: u64,
        numbers: &NumberAllocator,
        counters: &SeamCounters,
    ) -> u64 {
        // quinn leaves numbers out to catch peers that acknowledge what they did not receive. So does the
        // wire, and the peer's ACK ranges stay what quinn's would be.
        while self.map.next() < number {
            self.map.push(numbers.skip(), None);
            counters.skipped_numbers.add(1);
        }
        // quinn never goes back to old keys. If it did, the peer would drop the packet and quinn repeat it.
        let wire = numbers.draw_in(generation).unwrap_or_else(|_| numbers.skip());
        self.map.push(wire, Some(now));
        wire
    }

    /// The stack sends a STREAM frame.
    pub fn on_stream_frame(&mut self, frame: &frame::StreamFrame<'_>) {
        self.credit.on_sent(frame.id, frame.offset..frame.offset + frame.data.len() as u64);
    }

    /// Puts what the stack may know of a MAX_DATA frame in its place.
    pub fn on_max_data(&mut self, limit: u64, frame: &mut [u8]) {
        self.credit.on_max_data(limit);
        write_max_data(self.credit.granted(), frame);
    }

    /// Rewrites an ACK frame of `len` bytes to the stack's own numbers; `latest_rtt`: of the other senders' packets.
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
                // Said again, an acknowledgement tells quinn nothing. Without it the packet would look like
                // a probe of the path, and a peer that moved would not be followed (RFC 9000, section 9.1).
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

    /// Tells the stack about more connection credit when it has used half of what it had, as far as `take` gives it
    /// some; returns whether it did.
    pub fn top_up(&mut self, take: impl FnOnce(u64) -> u64, payload: &mut BytesMut) -> bool {
        let Some(limit) = self.credit.top_up(take) else { return false };
        // In front: behind the last frame it could become that frame's data.
        let mut frame = Vec::with_capacity(9 + payload.len());
        frame::write_max_data(limit, &mut frame);
        frame.extend_from_slice(payload);
        *payload = BytesMut::from(frame.as_slice());
        true
    }
}

/// Microseconds by which an acknowledgement came late for quinn's newest packet, because it was sent for a
/// later one of the data plane, or was read late: `round_trip` is what it would have been otherwise.
fn excess_delay(now: Instant, sent: Option<Instant>, round_trip: Duration) -> u64 {
    let waited = sent.map_or(Duration::ZERO, |sent| now.saturating_duration_since(sent));
    u64::try_from(waited.saturating_sub(round_trip).as_micros()).unwrap_or(0)
}

/// Puts another limit into a MAX_DATA frame, in as many bytes. It is not above the one that was there, so
/// it fits.
fn write_max_data(limit: u64, frame: &mut [u8]) {
    frame::blank(frame);
    let len = frame.len();
    let width = [8, 4, 2, 1].into_iter().find(|width| *width < len).unwrap_or(0);
    if varint::fill(limit, &mut frame[1..1 + width]) {
        frame[0] = frame::MAX_DATA as u8;
    }
}
