//! What comes back: the peer's acknowledgements and limits, changes of the path, and timeouts.

use std::time::{Duration, Instant};

use super::{Ack, Cause, Content, Downstream, Event, EventKind, Sent, StreamKey, Violation};
use crate::plane::{
    ecn,
    estimate::Estimate,
    pacing::Pacer,
    recovery::Outcome,
    stream::{Queue, Stream},
};

/// Frames of the peer, and what they tell of the path.
impl Downstream {
    pub fn on_ack(&mut self, now: Instant, ack: &Ack) -> Result<(), Violation> {
        let mut outcome = std::mem::take(&mut self.outcome);
        let result = self.recovery.on_ack(now, ack, self.app_limited, &mut outcome);
        self.settle(outcome);
        self.pacer.set_mtu(self.recovery.mtu());
        Ok(result?)
    }

    /// `max`: bytes that the data plane may send on the connection, not counting the QUIC stack's part.
    pub fn on_max_data(&mut self, max: u64) {
        if max <= self.peer.max_data {
            return;
        }
        self.peer.max_data = max;
        for key in self.blocked.drain() {
            if let Some(stream) = self.streams.get_mut(key) {
                stream.queue = Queue::None;
            }
            self.place(key);
        }
    }

    /// Gives away up to `wanted` bytes of unused connection credit. Returns how many.
    pub fn take_max_data(&mut self, wanted: u64) -> u64 {
        let taken = wanted.min(self.data_credit());
        self.peer.max_data -= taken;
        taken
    }

    pub fn on_max_stream_data(&mut self, id: u64, max: u64) -> Result<(), Violation> {
        let Some(key) = self.find(id)? else { return Ok(()) };
        if let Some(stream) = self.streams.get_mut(key)
            && max > stream.credit
        {
            stream.credit = max;
            self.place(key);
        }
        Ok(())
    }

    /// `max`: the frame's value, which includes the QUIC stack's unidirectional streams.
    pub fn on_max_streams_uni(&mut self, max: u64) {
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

    pub fn on_stop_sending(&mut self, id: u64, code: u64) -> Result<(), Violation> {
        let Some(key) = self.find(id)? else { return Ok(()) };
        let code = self.binding.from_wire(code);
        if let Some(stream) = self.streams.get(key).filter(|stream| !stream.is_reset()) {
            self.events.push_back(Event { key, owner: stream.owner, kind: EventKind::Stopped(code) });
            self.begin_reset(key, code, Cause::Stopped);
        }
        Ok(())
    }

    /// Whether frames about stream `id` are for the data plane: this end's unidirectional streams, except those that
    /// the QUIC stack opens.
    pub fn owns(&self, id: u64) -> bool {
        id & 0x3 == self.stream_id(0) & 0x3 && id >> 2 >= self.peer.first_stream_uni
    }

    /// The largest UDP payload that the path is thought to take, bytes.
    pub fn mtu(&self) -> usize {
        self.recovery.mtu() as usize
    }

    /// The QUIC stack found the path to take UDP payloads of `size` bytes.
    pub fn on_mtu(&mut self, size: usize) {
        self.recovery.set_mtu(size as u64);
        self.pacer.set_mtu(self.recovery.mtu());
    }

    /// The connection moved to another path, not only to another port of a NAT (RFC 9000, section 9.4).
    pub fn on_path_change(&mut self, now: Instant) {
        self.recovery.on_path_change(now);
        self.pacer = Pacer::new(self.recovery.mtu(), now);
    }

    /// The newest round-trip sample.
    pub fn latest_rtt(&self) -> Duration {
        self.recovery.rtt.latest()
    }

    pub fn smoothed_rtt(&self) -> Duration {
        self.recovery.rtt.smoothed()
    }

    /// Whether the packet that is polled next is sent as ECT(0).
    pub fn marks(&self) -> bool {
        self.recovery.ecn().marks()
    }

    /// Whether the offload may mark what it sends: it does not take part in finding out.
    pub fn may_offload_mark(&self) -> bool {
        self.recovery.ecn().state() == ecn::State::Capable
    }

    /// Whether what the offload sends from now on is marked.
    pub fn set_offload_marks(&mut self, now: Instant, marks: bool) {
        self.recovery.set_offload_marks(now, marks);
    }

    /// What the network carries. Looks at all that waits.
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

    /// The congestion window, bytes.
    pub fn window(&self) -> u64 {
        self.recovery.window()
    }

    /// The part of it that the offload may have in flight, bytes.
    pub fn unpaced_window(&self) -> u64 {
        self.recovery.unpaced_window()
    }

    /// The part of the congestion window that is left to the QUIC stack, bytes.
    pub fn stack_window(&self) -> u64 {
        self.recovery.stack_window()
    }

    /// The stream with this ID; `None` if it is gone.
    fn find(&self, id: u64) -> Result<Option<StreamKey>, Violation> {
        if !self.owns(id) || id >> 2 >= self.next_stream {
            return Err(Violation::NeverOpened(id));
        }
        Ok(self.by_id.get(&id).copied())
    }
}

impl Downstream {
    /// When [`Self::on_timeout`] is due. Any other call may change it.
    pub fn timeout(&self) -> Option<Instant> {
        let deadline = self.deadlines.first().map(|(at, _)| *at);
        [self.recovery.timeout(), self.paced_until, self.review_at, deadline].into_iter().flatten().min()
    }

    /// Whether the peer acknowledges nothing, although plenty was sent: the connection should be closed.
    pub fn is_unanswered(&self) -> bool {
        self.recovery.is_unanswered()
    }

    /// Whether [`Self::on_timeout`] is due because an acknowledgement is missing.
    pub fn misses_ack(&self, now: Instant) -> bool {
        self.recovery.timeout().is_some_and(|at| at <= now)
    }

    /// Expires what is due. Afterwards there may be more to send.
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
    /// Applies what recovery found out. The lists are kept for their allocations.
    fn settle(&mut self, mut outcome: Outcome<Content>) {
        for content in outcome.acked.drain(..) {
            self.acknowledge(&content);
        }
        for content in outcome.lost.drain(..) {
            self.lose(&content);
        }
        self.outcome = outcome;
    }

    fn acknowledge(&mut self, content: &Content) {
        for sent in &content.0 {
            match *sent {
                Sent::Bytes { key, offset, len, fin, .. } => {
                    let Some(stream) = self.streams.get_mut(key) else { continue };
                    if stream.on_acked(offset..offset + u64::from(len), fin) {
                        self.stats.streams_finished += 1;
                        self.close(key, EventKind::Finished);
                    } else if stream.is_over() {
                        self.finish(key);
                    } else if stream.queue != Queue::None {
                        self.place(key);
                    }
                }
                Sent::Reset { key } => {
                    if let Some(code) = self.streams.get(key).and_then(Stream::reset_code) {
                        self.close(key, EventKind::Reset(code));
                    }
                }
                Sent::Datagram { .. } | Sent::Ping => {}
            }
        }
    }

    pub(super) fn lose(&mut self, content: &Content) {
        for sent in &content.0 {
            let key = match *sent {
                Sent::Bytes { key, offset, len, fin, .. } => {
                    let Some(stream) = self.streams.get_mut(key) else { continue };
                    stream.on_lost(offset..offset + u64::from(len), fin);
                    key
                }
                Sent::Reset { key } => {
                    let Some(stream) = self.streams.get_mut(key) else { continue };
                    stream.on_reset_lost();
                    key
                }
                Sent::Datagram { .. } | Sent::Ping => continue,
            };
            self.place(key);
        }
    }
}
