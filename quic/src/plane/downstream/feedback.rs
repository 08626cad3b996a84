//! Feedback: the peer's acknowledgements and limits, changes of the path, and timeouts.

use std::time::{Duration, Instant};

use super::{
    AckRanges, Cause, Downstream, DownstreamEvent, EventKind, PacketContent, ProtocolViolation, SentFrame,
    StreamKey,
};
use crate::plane::{
    ecn,
    estimate::Estimate,
    pacing::Pacer,
    recovery::RecoveryOutcome,
    stream::{PlaneStream, SchedulerQueue},
};

/// Frames of the peer, and measurements of the path.
impl Downstream {
    /// Processes an ACK frame of the peer. Packet numbers in `ack` are those on the wire.
    pub fn on_ack(&mut self, now: Instant, ack: &AckRanges) -> Result<(), ProtocolViolation> {
        let mut outcome = std::mem::take(&mut self.outcome);
        let result = self.recovery.on_ack(now, ack, self.app_limited, &mut outcome);
        self.settle(outcome);
        self.pacer.set_mtu(self.recovery.mtu());
        Ok(result?)
    }

    /// Processes a MAX_DATA frame. `max` is the number of bytes that the data plane may send on the connection: the
    /// frame's value minus the QUIC stack's part.
    pub fn on_max_data(&mut self, max: u64) {
        // A MAX_DATA frame with a smaller value is older and is ignored (RFC 9000, section 4.1).
        if max <= self.peer.max_data {
            return;
        }
        self.peer.max_data = max;
        // All blocked streams become ready. Streams for which the new credit is not enough return to `blocked` later.
        for key in self.blocked.drain() {
            if let Some(stream) = self.streams.get_mut(key) {
                stream.queue = SchedulerQueue::None;
            }
            self.place(key);
        }
    }

    /// Moves up to `wanted` bytes of unused connection flow control credit from the data plane to the QUIC stack.
    /// Returns the number of bytes moved.
    pub fn take_max_data(&mut self, wanted: u64) -> u64 {
        let taken = wanted.min(self.data_credit());
        self.peer.max_data -= taken;
        taken
    }

    /// Processes a MAX_STREAM_DATA frame for stream `id`.
    pub fn on_max_stream_data(&mut self, id: u64, max: u64) -> Result<(), ProtocolViolation> {
        let Some(key) = self.find(id)? else { return Ok(()) };
        if let Some(stream) = self.streams.get_mut(key)
            && max > stream.credit
        {
            stream.credit = max;
            self.place(key);
        }
        Ok(())
    }

    /// Processes a MAX_STREAMS frame. `max` is the frame's value, which includes the QUIC stack's unidirectional
    /// streams.
    pub fn on_max_streams_uni(&mut self, max: u64) {
        // A MAX_STREAMS frame with a smaller value is older and is ignored (RFC 9000, section 4.6).
        if max <= self.peer.max_streams_uni {
            return;
        }
        self.peer.max_streams_uni = max;
        for _ in self.next_stream..max {
            let Some((_, key)) = self.unopened.first() else { return };
            if let Some(stream) = self.streams.get(key) {
                self.unopened.rotate(stream.place(key));
            }
            self.place(key);
        }
    }

    /// Processes a STOP_SENDING frame for stream `id`.
    pub fn on_stop_sending(&mut self, id: u64, code: u64) -> Result<(), ProtocolViolation> {
        let Some(key) = self.find(id)? else { return Ok(()) };
        let code = self.binding.from_wire(code);
        // A stream that is being reset needs no other reset (RFC 9000, section 3.5).
        if let Some(stream) = self.streams.get(key).filter(|stream| !stream.is_reset()) {
            self.events.push_back(DownstreamEvent {
                key,
                owner: stream.owner,
                kind: EventKind::Stopped(code),
            });
            self.begin_reset(key, code, Cause::Stopped);
        }
        Ok(())
    }

    /// Returns whether stream `id` is the data plane's: a unidirectional stream opened by this endpoint, but not by its
    /// QUIC stack.
    pub fn owns(&self, id: u64) -> bool {
        id & 0x3 == self.stream_id(0) & 0x3 && id >> 2 >= self.peer.first_stream_uni
    }

    /// Returns the path MTU: the largest UDP payload that the path carries, bytes.
    pub fn mtu(&self) -> usize {
        self.recovery.mtu() as usize
    }

    /// Notes that the QUIC stack found that the path carries UDP payloads of `size` bytes.
    pub fn on_mtu(&mut self, size: usize) {
        self.recovery.set_mtu(size as u64);
        self.pacer.set_mtu(self.recovery.mtu());
    }

    /// Notes that the connection moved to another path. A new port of the same IP address does not count as another
    /// path (RFC 9000, section 9.4).
    pub fn on_path_change(&mut self, now: Instant) {
        self.recovery.on_path_change(now);
        self.pacer = Pacer::new(self.recovery.mtu(), now);
    }

    /// Returns the newest round-trip sample.
    pub fn latest_rtt(&self) -> Duration {
        self.recovery.rtt.latest()
    }

    /// Returns the smoothed round-trip time.
    pub fn smoothed_rtt(&self) -> Duration {
        self.recovery.rtt.smoothed()
    }

    /// Returns whether the data plane's next packet has to be sent as ECT(0).
    pub fn marks(&self) -> bool {
        self.recovery.ecn().marks()
    }

    /// Returns whether the kernel offload may mark its packets ECT(0). It may once the data plane has found that marks
    /// arrive on this path.
    pub fn may_offload_mark(&self) -> bool {
        self.recovery.ecn().state() == ecn::EcnState::Capable
    }

    /// Notes whether the kernel offload marks its packets ECT(0) from now on.
    pub fn set_offload_marks(&mut self, now: Instant, marks: bool) {
        self.recovery.set_offload_marks(now, marks);
    }

    /// Returns the path's estimated bandwidth, round-trip time, queueing delay and loss, and how long data has waited
    /// to be sent. The call takes time proportional to the number of waiting streams.
    pub fn estimate(&self, now: Instant) -> Estimate {
        let rtt = &self.recovery.rtt;
        Estimate {
            bandwidth: self.recovery.bandwidth(),
            rtt: rtt.smoothed(),
            path_queue: rtt.smoothed().saturating_sub(rtt.min()),
            queue: self.queue_delay(now),
            loss: self.recovery.loss(),
        }
    }

    /// Returns the congestion window, bytes.
    pub fn window(&self) -> u64 {
        self.recovery.window()
    }

    /// Returns the congestion window for the kernel offload, whose packets are not paced, bytes.
    pub fn unpaced_window(&self) -> u64 {
        self.recovery.unpaced_window()
    }

    /// Returns how many bytes the QUIC stack may send until the congestion window is full.
    pub fn stack_window(&self) -> u64 {
        self.recovery.stack_window()
    }

    /// Returns the stream with this ID, or `None` if it has ended.
    fn find(&self, id: u64) -> Result<Option<StreamKey>, ProtocolViolation> {
        if !self.owns(id) || id >> 2 >= self.next_stream {
            return Err(ProtocolViolation::NeverOpened(id));
        }
        Ok(self.by_id.get(&id).copied())
    }
}

impl Downstream {
    /// Returns when [`Self::on_timeout`] is due. Any other call may change that.
    pub fn timeout(&self) -> Option<Instant> {
        let deadline = self.deadlines.first().map(|(at, _)| *at);
        [self.recovery.timeout(), self.paced_until, self.review_at, deadline].into_iter().flatten().min()
    }

    /// Returns whether the peer has left so many packets unacknowledged that the caller should close the connection.
    pub fn is_unanswered(&self) -> bool {
        self.recovery.is_unanswered()
    }

    /// Returns whether [`Self::on_timeout`] is due because an acknowledgement is missing.
    pub fn misses_ack(&self, now: Instant) -> bool {
        self.recovery.timeout().is_some_and(|at| at <= now)
    }

    /// Handles expired timers. Afterwards [`Self::poll_frames`] may have packets to send.
    pub fn on_timeout(&mut self, now: Instant) {
        while let Some((at, key)) = self.deadlines.first().copied()
            && at <= now
        {
            if !self.finish(key) {
                self.begin_reset(key, self.config.reset_codes.late, Cause::SubgroupTimeout);
            }
        }
        if self.review_at.is_some_and(|at| at <= now) {
            self.review(now);
        }
        if self.paced_until.is_some_and(|at| at <= now) {
            self.paced_until = None;
        }
        let mut outcome = std::mem::take(&mut self.outcome);
        if self.recovery.on_timeout(now, &mut outcome) {
            // A probe carries the oldest data that is not acknowledged (RFC 9002, section 6.2.4).
            outcome.lost.extend(self.recovery.own_in_flight().take(1).cloned());
        }
        self.settle(outcome);
    }
}

impl Downstream {
    /// Updates the streams with the packets that loss recovery has found acknowledged or lost. The emptied lists of
    /// packets are kept, so that the next call need not allocate them.
    fn settle(&mut self, mut outcome: RecoveryOutcome<PacketContent>) {
        for content in outcome.acked.drain(..) {
            self.acknowledge(&content);
        }
        for content in outcome.lost.drain(..) {
            self.lose(&content);
        }
        self.outcome = outcome;
    }

    fn acknowledge(&mut self, content: &PacketContent) {
        for sent in &content.0 {
            match *sent {
                SentFrame::Bytes { key, offset, len, fin, .. } => {
                    let Some(stream) = self.streams.get_mut(key) else { continue };
                    if stream.on_acked(offset..offset + u64::from(len), fin) {
                        self.stats.streams_finished += 1;
                        self.close(key, EventKind::Finished);
                    } else if stream.is_over() {
                        self.finish(key);
                    } else if stream.queue != SchedulerQueue::None {
                        self.place(key);
                    }
                }
                SentFrame::Reset { key } => {
                    if let Some(code) = self.streams.get(key).and_then(PlaneStream::reset_code) {
                        self.close(key, EventKind::Reset(code));
                    }
                }
                SentFrame::Datagram { .. } | SentFrame::Ping => {}
            }
        }
    }

    pub(super) fn lose(&mut self, content: &PacketContent) {
        for sent in &content.0 {
            let key = match *sent {
                SentFrame::Bytes { key, offset, len, fin, .. } => {
                    let Some(stream) = self.streams.get_mut(key) else { continue };
                    stream.on_lost(offset..offset + u64::from(len), fin);
                    key
                }
                SentFrame::Reset { key } => {
                    let Some(stream) = self.streams.get_mut(key) else { continue };
                    stream.on_reset_lost();
                    key
                }
                SentFrame::Datagram { .. } | SentFrame::Ping => continue,
            };
            self.place(key);
        }
    }
}
