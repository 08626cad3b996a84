//! Received packets: frames for the data plane are removed, and quinn gets the rest.

use std::{ops::Range, sync::atomic::Ordering, time::Duration};

use bytes::BytesMut;
use millrace_quic::{
    ack,
    frame::{self, Direction, Frame},
    received::{self, ReceivedStreams, RepeatedFrame, TakenPart},
};

use super::{Contents, OpenedArrival, SharedConnection, SharedState};
use crate::stack::AckTimes;

/// An ACK frame of the largest possible packet number, which makes quinn close the connection with PROTOCOL_VIOLATION.
pub(super) const UNSENT: &[u8] = &[0x02, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0];

impl SharedConnection {
    /// Starts to track received streams once quinn considers the handshake complete, and thus processes every opened
    /// packet.
    pub fn on_established(&self) {
        let mut state = self.state.lock();
        if state.offload.is_some() && state.streams.is_none() {
            state.streams = Some(ReceivedStreams::new(self.max_streams));
        }
    }

    /// Processes a decrypted packet for connection ID `id`, sealed with keys of `generation`. Removes the data plane's
    /// frames from `payload`, rewrites quinn's frames, and sends data that may be sent now. A packet that was received
    /// before has no effect, and quinn drops it.
    pub fn on_received(
        &self,
        arrival: OpenedArrival,
        generation: u16,
        number: u64,
        id: &[u8],
        payload: &mut BytesMut,
    ) {
        let now = arrival.now;
        let news = {
            let mut guard = self.state.lock();
            let state = &mut *guard;
            if !state.received.insert(number) {
                self.counters.replayed_packets.add(1);
                return;
            }
            let mut arrived = now;
            if let Some(offload) = &mut state.offload {
                state.unseen = !offload.on_received(number, generation, id);
                arrived = offload.arrival(now, arrival.end);
            }
            let contents = self.walk(state, AckTimes { now, arrived }, payload);
            state.learn_ack(arrival.size, &contents);
            if contents.ack.is_some() {
                self.tell(state, now);
                self.set_trap(&state.numbers, &mut state.traps);
            }
            // The peer violates the protocol, but quinn would accept the original packet. So quinn gets an invalid
            // frame instead, and closes the connection.
            if contents.lies {
                *payload = BytesMut::from(UNSENT);
            } else if !contents.repeats.is_empty() {
                *payload = BytesMut::from(&*received::cut(payload, &contents.repeats));
                self.counters.stream_frames_cut.add(contents.repeats.len() as u64);
            }
            let mut news = contents.any;
            if self.open.load(Ordering::Relaxed) && state.top_up(payload) {
                self.counters.credit_grants.add(1);
                news = true;
            }
            if state.plane.downstream.has_events() {
                self.events.notify_one();
            }
            if news {
                self.arm(state, now);
            }
            news
        };
        if news {
            self.transmit_now(now);
        }
    }

    pub(super) fn walk(&self, state: &mut SharedState, times: AckTimes, payload: &mut [u8]) -> Contents {
        let mut contents = Contents::default();
        let mut at = 0;
        // Malformed frames stay unchanged, so that quinn closes the connection because of them.
        while let Ok(Some((range, frame))) = frame::next(payload, at) {
            at = range.end;
            contents.others |= !matches!(frame, Frame::Ack(_) | Frame::Padding);
            match frame {
                Frame::Ack(ack) => {
                    contents.ack = Some(ack.delay);
                    if let Some(rewritten) = self.on_ack(state, times, &ack, range.len()) {
                        payload[range].copy_from_slice(rewritten);
                        contents.lies |= state.traps.catch(&state.ack.ranges);
                    }
                }
                Frame::MaxData(limit) => state.on_max_data(limit, &mut payload[range]),
                Frame::MaxStreams(Direction::Unidirectional, limit) => {
                    state.plane.downstream.on_max_streams_uni(limit);
                }
                // A frame for a stream that was never opened is left to quinn, which closes the connection because of
                // it.
                Frame::MaxStreamData { id, limit } if state.plane.downstream.owns(id) => {
                    state.know_stream(times.now, id);
                    if state.on_max_stream_data(id, limit) {
                        self.consume(&mut payload[range]);
                    }
                }
                Frame::StopSending { id, code } if state.plane.downstream.owns(id) => {
                    state.know_stream(times.now, id);
                    if state.plane.downstream.on_stop_sending(id, code).is_ok() {
                        self.consume(&mut payload[range]);
                    }
                }
                Frame::Stream(stream) => {
                    state.take_stream(&stream, range, &mut contents);
                    continue;
                }
                Frame::ResetStream { id, .. } => {
                    state.streams.iter_mut().for_each(|streams| streams.reset(id));
                    continue;
                }
                Frame::PathResponse(response) => state.plane.path.on_response(response),
                Frame::ConnectionClose { .. } | Frame::ApplicationClose { .. } => {
                    self.close();
                    continue;
                }
                _ => continue,
            }
            contents.any = true;
        }
        contents
    }

    fn consume(&self, frame: &mut [u8]) {
        frame::blank(frame);
        self.counters.stream_frames_consumed.add(1);
    }

    /// Processes an ACK frame of `len` bytes. Returns the frame that quinn gets instead, or `None` if the frame stays
    /// unchanged.
    fn on_ack<'a>(
        &self,
        state: &'a mut SharedState,
        times: AckTimes,
        ack: &ack::AckFrame<'_>,
        len: usize,
    ) -> Option<&'a [u8]> {
        if ack.largest >= state.numbers.peek().1 {
            // The frame acknowledges a number that no sender has used. This number is larger than any of quinn's, so
            // quinn closes the connection.
            self.counters.acks_refused.add(1);
            return None;
        }
        let exponent = state.stack.ack_delay_exponent();
        state.ack.delay = Duration::from_micros(ack.delay.saturating_mul(1 << exponent));
        state.ack.ranges.clear();
        state.ack.ranges.extend(ack.ranges());
        state.ack.ecn = ack.ecn_counts();
        if state.acknowledge(times) {
            state.acked = state.acked.max(ack.largest + 1);
        } else {
            // The frame acknowledges a skipped number. If quinn skipped that number, quinn detects it in the rewritten
            // frame.
            self.counters.acks_refused.add(1);
        }
        let latest_rtt = state.plane.downstream.latest_rtt();
        Some(state.stack.rewrite_ack(times, ack, len, latest_rtt, &self.counters))
    }
}

impl SharedState {
    /// Notes a STREAM frame at the range `at` of its payload. If bytes arrive twice, the kernel offload forwards the
    /// first ones. quinn has to deliver the same bytes as the offload, but would choose by offsets and lengths. So the
    /// repeated bytes are removed from the packet before quinn reads it.
    fn take_stream(&mut self, frame: &frame::StreamFrame<'_>, at: Range<usize>, contents: &mut Contents) {
        let Self { streams: Some(streams), offload, unseen, .. } = self else { return };
        let start = frame.offset;
        let end = frame.offset + frame.data.len() as u64;
        let from = match streams.take(frame) {
            TakenPart::All => start,
            TakenPart::Part(part) => {
                let from = part.first().unwrap_or(end);
                contents.repeats.push(RepeatedFrame::new(at, frame, part));
                from
            }
            TakenPart::TooMuch => {
                contents.lies = true;
                return;
            }
        };
        if *unseen && (from < end || frame.fin) {
            offload.iter().for_each(|offload| offload.leave(frame.id, &(from..end), frame.fin));
        }
    }
}
