//! Sends the data plane's packets, and accounts for those that quinn sends.

use std::{sync::atomic::Ordering, time::Instant};

use millrace_quic::{
    frame::{Frame, Walker},
    packet::ConnectionId,
};
use ring::rand::{SecureRandom as _, SystemRandom};

use super::{SharedConnection, SharedState, attention, with_batch};
use crate::{
    numbers::NumberAllocator,
    offload::state::Offloaded,
    plane::{Builder, KeyUse, Plane},
    send::{PacketBatch, PacketFlow, SendingConnection},
    traps::Traps,
};

impl SendingConnection for SharedConnection {
    fn add_packets(&self, now: Instant, batch: &mut PacketBatch) {
        self.transmit(now, batch);
    }

    fn flush(&self, batch: &mut PacketBatch) {
        self.sender.flush(batch);
    }
}

impl SharedConnection {
    /// Adds packets to `batch` as long as there is data to send, and credit, congestion window and pacing allow it.
    pub fn transmit(&self, now: Instant, batch: &mut PacketBatch) {
        if !self.open.load(Ordering::Acquire) {
            return;
        }
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.drain_offload(now);
        // The kernel offload must not use its budget while the data plane sends, so the budget is reclaimed first.
        state.reclaim_budget();
        let SharedState { numbers, plane, traps, .. } = state;
        let builder = Builder {
            numbers,
            counters: &self.counters,
            tap: &self.tap,
            session: self.session.load(Ordering::Relaxed),
        };
        batch.add_connection(&self.handover, |batch| {
            while batch.packet(plane.flow(), |out| {
                self.set_trap(numbers, traps);
                self.may_seal(numbers, plane) && plane.build(now, &builder, out)
            }) {}
        });
        if plane.downstream.has_events() {
            self.events.notify_one();
        }
        self.arm(state, now);
    }

    pub(super) fn transmit_now(&self, now: Instant) {
        with_batch(|batch| {
            self.transmit(now, batch);
            self.sender.flush(batch);
        });
    }

    /// Skips a packet number from time to time, to detect peers that acknowledge packets they did not receive.
    pub(super) fn set_trap(&self, numbers: &NumberAllocator, traps: &mut Traps) {
        if traps.is_due(numbers.peek().1) {
            traps.add(numbers.skip());
            self.counters.skipped_numbers.add(1);
        }
    }

    /// Returns whether the data plane may seal one more packet with its keys. Otherwise the data plane waits for a key
    /// update.
    fn may_seal(&self, numbers: &NumberAllocator, plane: &mut Plane) -> bool {
        let usable = self.is_usable(numbers, plane);
        plane.set_stalled(!usable && plane.keys.is_some());
        usable
    }

    /// Returns whether the data plane has keys that are not used up. Requests a key update long before the keys are
    /// used up.
    pub(super) fn has_keys(&self, state: &mut SharedState) -> bool {
        self.is_usable(&state.numbers, &mut state.plane)
    }

    fn is_usable(&self, numbers: &NumberAllocator, plane: &mut Plane) -> bool {
        let Some(KeyUse { used_up, ask }) = plane.key_use(numbers.peek().1) else { return false };
        if ask {
            self.request(attention::KEY_UPDATE);
        }
        !used_up
    }

    pub fn on_timeout(&self, now: Instant, batch: &mut PacketBatch) {
        {
            let mut state = self.state.lock();
            state.drain_offload(now);
            let late = state.plane.downstream.misses_ack(now);
            if late && state.offload.as_mut().is_some_and(Offloaded::reads_first) {
                // The loss timer is postponed by at least one tick, so that the woken thread has time to read the
                // peer's packets that did not wake it before.
                let at = self.alarm.time(now) + 1;
                self.set_deadline(at);
                return;
            }
            state.plane.downstream.on_timeout(now);
            self.tell(&mut state, now);
            if state.plane.downstream.has_events() {
                self.events.notify_one();
            }
            self.arm(&mut state, now);
        }
        self.transmit(now, batch);
    }

    /// Notes that quinn seals a packet of `size` bytes with the keys of `generation` and its own `number`. Returns the
    /// packet number for the wire.
    pub fn on_quinn_packet(
        &self,
        now: Instant,
        generation: u16,
        number: u64,
        remote_id: &[u8],
        payload: &[u8],
        size: usize,
    ) -> u64 {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        self.set_trap(&state.numbers, &mut state.traps);
        let wire = state.stack.draw(now, generation, number, &state.numbers, &self.counters);
        if let Some(keys) = state.plane.keys.as_mut().filter(|keys| generation > keys.generation) {
            keys.advance(generation, wire);
            self.counters.key_updates.add(1);
            if let Some(offload) = &mut state.offload {
                offload.on_seal_keys(generation, &keys.secret);
            }
        }
        if *state.plane.path.id != *remote_id {
            state.plane.path.id = ConnectionId::new(remote_id).unwrap_or_default();
        }
        let ack_eliciting = self.inspect(state, now, payload);
        state.plane.downstream.on_stack_sent(now, wire, size, ack_eliciting);
        if state.plane.downstream.is_unanswered() {
            self.close();
            self.request(attention::UNANSWERED);
        }
        self.counters.quinn_packets.add(1);
        self.counters.quinn_bytes.add(size as u64);
        self.arm(state, now);
        if state.plane.resume() {
            self.hurry();
        }
        wire
    }

    /// Sends a packet that no key can open: the peer's connection ID, followed by random bytes. A peer that knows the
    /// connection ID drops the packet. A restarted peer, which does not know the ID, answers with a stateless reset,
    /// which has to be shorter than the packet (RFC 9000, section 10.3).
    pub fn send_stray(&self) {
        const LEN: usize = 48;
        const FIXED_BIT: u8 = 0x40;
        let mut packet = [0; LEN];
        if SystemRandom::new().fill(&mut packet).is_err() {
            return; // without random bytes no probe is sent now; the caller sends further probes later
        }
        let flow = {
            let state = self.state.lock();
            let path = &state.plane.path;
            packet[0] = FIXED_BIT | packet[0] & 0x3f;
            packet[1..][..path.id.len()].copy_from_slice(&path.id);
            PacketFlow { to: path.remote, from: path.local, traffic_class: 0 }
        };
        // The probe may fail because the network is unreachable. The caller sends further probes.
        let _ = self.sender.send_one(flow, &packet, None);
    }

    /// Notes the frames of quinn's packet that concern the shared state. Returns whether the packet is ack-eliciting.
    fn inspect(&self, state: &mut SharedState, now: Instant, payload: &[u8]) -> bool {
        let mut ack_eliciting = false;
        for (_, frame) in Walker::new(payload).map_while(Result::ok) {
            ack_eliciting |= frame.is_ack_eliciting();
            match frame {
                Frame::Stream(stream) => {
                    state.stack.on_stream_frame(&stream);
                    self.control.notify_waiters();
                }
                Frame::PathChallenge(challenge) if state.plane.path.on_challenge(challenge) => {
                    self.request(attention::ADDRESS);
                }
                Frame::MaxData(limit)
                    if self.window.on_max_data(now, limit, state.plane.downstream.smoothed_rtt()) =>
                {
                    self.request(attention::WINDOW);
                }
                Frame::ConnectionClose { .. } | Frame::ApplicationClose { .. } => self.close(),
                _ => {}
            }
        }
        ack_eliciting
    }

    /// Returns the bytes of the congestion window that are left to quinn, without the kernel offload's budget.
    pub fn stack_window(&self) -> u64 {
        let state = self.state.lock();
        let budget = state.offload.as_ref().map_or(0, |offload| offload.budget().bytes);
        // At least two packets are left, because quinn has to be able to send control streams at any time.
        let least = 2 * state.plane.downstream.mtu() as u64;
        state.plane.downstream.stack_window().saturating_sub(budget).max(least)
    }
}
