//! The connection's calls to its offload, and the kernel offload's reports.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use millrace_quic::{plane::downstream::StreamKey, webtransport::Binding};

use super::{SharedConnection, SharedState};
use crate::{
    numbers::NumberWord,
    offload::{self, ConnectionStatus, LockedOffload, Offload, OffloadOwner},
};

impl SharedConnection {
    /// Grants the kernel offload its budget, and recalls streams that have ended.
    pub(super) fn hand_out(&self, state: &mut SharedState, now: Instant) {
        if state.offload.is_none() {
            return;
        }
        let has_keys = self.has_keys(state);
        let SharedState { offload: Some(offload), plane, .. } = state else { return };
        let open = has_keys && self.open.load(Ordering::Relaxed);
        let class = plane.offload_class();
        offload.hand_out(now, &mut plane.downstream, &plane.path, class, open);
        if !self.open.load(Ordering::SeqCst) {
            // `close` does not take the connection's lock, so the connection may have been closed meanwhile.
            offload.reclaim_budget(&mut plane.downstream);
        }
    }

    /// Sets whether the application's streams and datagrams are plain QUIC ones or belong to a WebTransport session.
    /// `streams` is the number of unidirectional streams that the QUIC stack opens for itself in addition.
    pub fn bind(&self, binding: Binding, streams: u64) {
        let mut state = self.state.lock();
        state.plane.downstream.bind(binding, streams);
        state.offload.iter_mut().for_each(|offload| offload.bind(binding));
    }

    /// Calls `act` with the kernel offload while the connection's lock is held.
    pub fn with_offload<R>(self: &Arc<Self>, act: impl FnOnce(&mut LockedOffload<'_>) -> R) -> R {
        let mut guard = self.state.lock();
        let SharedState { offload, plane, received, streams, .. } = &mut *guard;
        act(&mut LockedOffload {
            offloaded: offload.as_mut(),
            downstream: &mut plane.downstream,
            received,
            streams: streams.as_ref(),
            hold: &|| Arc::clone(self) as _,
        })
    }

    /// Returns counts of the connection's offloads, or `None` if the connection cannot have one.
    pub fn offload_status(&self) -> Option<ConnectionStatus> {
        let mut status = self.state.lock().offload.as_ref()?.status();
        status.standing = self.claim.get().map(|claim| claim.standing());
        Some(status)
    }
}

impl OffloadOwner for SharedConnection {
    fn on_offload(&self, now: Instant, offload: Arc<dyn Offload>) {
        {
            let mut guard = self.state.lock();
            let SharedState { numbers, plane, offload: Some(offloaded), .. } = &mut *guard else { return };
            // The packet number counter can be replaced by the kernel offload's, because the offload has no budget,
            // keys or streams yet, and draws no numbers.
            *numbers = numbers.moved(NumberWord::Offload(Arc::clone(&offload)));
            *self.offload.lock() = Some(Arc::clone(&offload));
            let seal = plane.keys.as_ref().map(|keys| (keys.generation, &keys.secret));
            offloaded.take_offload(offload, seal);
            self.arm(&mut guard, now);
        }
        self.transmit_now(now);
    }

    fn on_offload_recalled(&self, now: Instant) {
        {
            let mut guard = self.state.lock();
            guard.drain_offload(now);
            let SharedState { plane, offload: Some(offload), .. } = &mut *guard else { return };
            offload.release(&mut plane.downstream);
            self.arm(&mut guard, now);
        }
        self.transmit_now(now);
    }

    fn on_released(&self, now: Instant) {
        let offload = {
            let mut guard = self.state.lock();
            guard.drain_offload(now);
            let SharedState { numbers, plane, offload: Some(offloaded), .. } = &mut *guard else { return };
            let Some(offload) = offloaded.finish_release(&mut plane.downstream) else { return };
            // The kernel offload's packet number counter can be replaced by one of this process, because the offload
            // has stopped and draws no numbers.
            *numbers = numbers.moved(NumberWord::own());
            *self.offload.lock() = None;
            self.arm(&mut guard, now);
            offload
        };
        self.transmit_now(now);
        // Dropping the offload removes it from the kernel's tables, which takes system calls. So the connection's lock
        // is not held.
        drop(offload);
    }

    fn on_sent(&self, now: Instant) {
        self.transmit_now(now);
    }

    fn on_returned(&self, now: Instant, keys: &[StreamKey]) {
        {
            let mut state = self.state.lock();
            state.drain_offload(now);
            for key in keys {
                state.plane.downstream.on_returned(*key);
                state.offload.iter_mut().for_each(|offload| offload.on_returned(*key));
            }
        }
        self.transmit_now(now);
    }

    fn on_gone(&self, now: Instant, tags: &[u64]) {
        {
            let mut guard = self.state.lock();
            guard.drain_offload(now);
            if let SharedState { offload: Some(offload), plane, .. } = &mut *guard {
                offload.abandon(&mut plane.downstream, tags);
            }
        }
        self.transmit_now(now);
    }

    fn on_path(&self, now: Instant, path: &offload::OffloadPath) {
        if let Some(offload) = &mut self.state.lock().offload {
            offload.on_path(path);
        }
        self.transmit_now(now);
    }
}
