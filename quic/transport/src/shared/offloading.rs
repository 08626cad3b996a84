//! What the offload is told and asked, and what it says.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use millrace_quic::{
    plane::downstream::{Downstream, NewStream, StreamKey},
    received::ReceivedStreams,
    webtransport::Binding,
};

use super::{Shared, State};
use crate::{
    numbers::Word,
    offload::{
        self, Adopted, ConnectionStatus, Datagrams, Ingress, Offload, Openings, Opens, Origin, Owner,
        state::Offloaded,
    },
};

impl Shared {
    /// Tells the offload what it may send now, and takes streams back that are over.
    pub(super) fn hand_out(&self, state: &mut State, now: Instant) {
        if state.offload.is_none() {
            return;
        }
        let has_keys = self.has_keys(state);
        let State { offload: Some(offload), plane, .. } = state else { return };
        let open = has_keys && self.open.load(Ordering::Relaxed);
        let class = plane.offload_class();
        offload.hand_out(now, &mut plane.downstream, (&plane.path, class), open);
        if !self.open.load(Ordering::SeqCst) {
            // Closed meanwhile, without the lock.
            offload.reclaim_budget(&mut plane.downstream);
        }
    }

    /// How the application's streams and datagrams lie on the connection, on which the stack has `streams` unidirectional
    /// ones besides.
    pub fn bind(&self, binding: Binding, streams: u64) {
        let mut state = self.state.lock();
        state.plane.downstream.bind(binding, streams);
        state.offload.iter_mut().for_each(|offload| offload.bind(binding));
    }

    /// What the peer sends as the offload may forward it from now on.
    pub fn ingress(self: &Arc<Self>, origin: Origin) -> Option<Arc<dyn Ingress>> {
        let mut guard = self.state.lock();
        let State { offload: Some(offload), received, streams, .. } = &mut *guard else { return None };
        let begun = streams.iter().flat_map(ReceivedStreams::begun);
        offload.ingress(origin, (received.next(), begun), Arc::clone(self) as _)
    }

    /// Lets the offload forward a track's datagrams, in place of others with the same tag.
    pub fn delegate_datagrams(&self, ingress: &Arc<dyn Ingress>, datagrams: &Datagrams) {
        let mut state = self.state.lock();
        state.offload.iter_mut().for_each(|offload| offload.delegate_datagrams(ingress, datagrams));
    }

    /// Stops the offload from forwarding datagrams with this tag.
    pub fn recall_datagrams(&self, tag: u64) {
        self.state.lock().offload.iter_mut().for_each(|offload| offload.recall_datagrams(tag));
    }

    /// Whether the offload has sent the datagram of a subscription, at this group and object; says so once.
    pub fn take_delivered(&self, now: Instant, tag: u64, at: (u64, u64)) -> bool {
        let mut state = self.state.lock();
        state.drain_offload(now);
        state.offload.as_mut().is_some_and(|offload| offload.take_delivered(tag, at))
    }

    /// Has the offload forward an ingress as stream `key`, once that owes nothing: from offset `from` of the ingress on,
    /// at an offset that is larger by `shift`. Returns whether it does.
    pub fn delegate(&self, key: StreamKey, ingress: &Arc<dyn Ingress>, shift: i64, from: u64) -> bool {
        let mut guard = self.state.lock();
        let State { offload: Some(offload), plane, .. } = &mut *guard else { return false };
        offload.delegate(&mut plane.downstream, key, ingress, (shift, from))
    }

    /// Streams of the peer that begin under a track alias as the offload may open streams for them.
    pub fn openings(self: &Arc<Self>, alias: u64, last: (u64, u64)) -> Option<Arc<dyn Openings>> {
        let mut guard = self.state.lock();
        let State { offload: Some(offload), received, streams, .. } = &mut *guard else { return None };
        let begun = streams.iter().flat_map(ReceivedStreams::begun);
        offload.openings((alias, last), (received.next(), begun), Arc::clone(self) as _)
    }

    /// This end takes a unidirectional stream of the peer; returns what the offload has bound it to.
    pub fn accept(&self, stream: u64) -> Option<Arc<dyn Ingress>> {
        self.state.lock().offload.as_mut()?.accept(stream)
    }

    /// Has the offload open a stream for what the ingress will be bound to. Returns whether it may.
    pub fn prepare(&self, ingress: &Arc<dyn Ingress>, opens: &Opens) -> bool {
        let mut guard = self.state.lock();
        let State { offload: Some(offload), plane, .. } = &mut *guard else { return false };
        offload.prepare(&plane.downstream, ingress, opens)
    }

    /// `stream` is what the ingress carries for its owner; comes back where the offload has not opened one for it.
    pub fn adopt(
        &self,
        now: Instant,
        ingress: &Arc<dyn Ingress>,
        stream: NewStream,
    ) -> (Adopted, Option<NewStream>) {
        let mut guard = self.state.lock();
        guard.drain_offload(now);
        let State { offload: Some(offload), plane, .. } = &mut *guard else {
            return (Adopted::Unopened, Some(stream));
        };
        offload.adopt(&mut plane.downstream, ingress, stream)
    }

    /// Changes what the offload may open streams for, after all that it has sent. `None`: there is no offload.
    pub fn with_openings<R>(
        &self,
        now: Instant,
        change: impl FnOnce(&mut Offloaded, &mut Downstream) -> R,
    ) -> Option<R> {
        let mut guard = self.state.lock();
        guard.offload.as_ref()?;
        guard.drain_offload(now);
        let State { offload: Some(offload), plane, .. } = &mut *guard else { return None };
        Some(change(offload, &mut plane.downstream))
    }

    /// Returns counts of what the connection's offloads did; `None`: it never has one.
    pub fn offload_status(&self) -> Option<ConnectionStatus> {
        let mut status = self.state.lock().offload.as_ref()?.status();
        status.standing = self.claim.get().map(|claim| claim.standing());
        Some(status)
    }

    /// Packets that the offload sent without saying so. There are none but those that another CPU registers this moment.
    pub fn unregistered(&self) -> Option<u64> {
        let mut state = self.state.lock();
        let sent = state.offload.as_ref()?.status().sent;
        state.drain_offload(Instant::now());
        Some(sent.saturating_sub(state.plane.downstream.stats().offloaded_packets))
    }
}

impl Owner for Shared {
    fn on_offload(&self, now: Instant, offload: Arc<dyn Offload>) {
        {
            let mut guard = self.state.lock();
            let State { numbers, plane, offload: Some(offloaded), .. } = &mut *guard else { return };
            // It has no window, no keys and no streams: nobody but this end draws from either word.
            *numbers = numbers.moved(Word::Offload(Arc::clone(&offload)));
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
            let State { plane, offload: Some(offload), .. } = &mut *guard else { return };
            offload.release(&mut plane.downstream);
            self.arm(&mut guard, now);
        }
        self.transmit_now(now);
    }

    fn on_released(&self, now: Instant) {
        let offload = {
            let mut guard = self.state.lock();
            guard.drain_offload(now);
            let State { numbers, plane, offload: Some(offloaded), .. } = &mut *guard else { return };
            let Some(offload) = offloaded.finish_release(&mut plane.downstream) else { return };
            // No run of it is under way, and it may send nothing.
            *numbers = numbers.moved(Word::own());
            *self.offload.lock() = None;
            self.arm(&mut guard, now);
            offload
        };
        self.transmit_now(now);
        // Without the lock: it leaves the kernel's tables.
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
        self.with_openings(now, |offload, downstream| offload.abandon(downstream, tags));
        self.transmit_now(now);
    }

    fn on_path(&self, now: Instant, path: &offload::Path) {
        if let Some(offload) = &mut self.state.lock().offload {
            offload.on_path(path);
        }
        self.transmit_now(now);
    }
}
