//! Connections: quinn's handle, and the data plane beside it.

use std::{
    convert::Infallible,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use millrace_quic::{
    keys::Suite,
    plane::{
        downstream::{Downstream, Event},
        estimate::Estimate,
    },
    silence::{self, Silence},
};
use millrace_webtransport::{Binding, Foreign, Streams};
use parking_lot::MappedMutexGuard;
use quinn::crypto::rustls::HandshakeData;
use tracing::debug;

use crate::{
    offload::{ConnectionStatus, LockedOffload, Worth},
    registry::Listed,
    send::Batch,
    shared::Shared,
    stats::Stats,
    windows::{ReceiveWindow, Share},
};

/// How long objects wait for the control message before them.
const CONTROL_PATIENCE: Duration = Duration::from_millis(2);
/// How often it is looked whether a peer has answered.
const ANSWER_LOOKS: Duration = Duration::from_millis(20);

/// One QUIC connection with two senders.
///
/// quinn ([`Connection::quic`]) does the handshake, bidirectional streams, all receiving, and the first
/// unidirectional streams ([`Config::control_streams`](crate::Config::control_streams) of them). From [`Connection::start`] on, all
/// other unidirectional streams and the datagrams that are sent belong to [`Connection::downstream`].
pub struct Connection {
    pub quic: quinn::Connection,
    pub(crate) shared: Arc<Shared>,
    pub(crate) binding: OnceLock<Binding>,
    pub(crate) foreign: Foreign,
    /// What the last probe has shown; locked while one is under way.
    pub(crate) probed: tokio::sync::Mutex<Option<Probed>>,
    pub(crate) _listed: Listed,
}

/// The result of a probe.
#[derive(Clone, Copy)]
pub(crate) struct Probed {
    at: Instant,
    answered: bool,
}

impl Connection {
    /// The application protocol that was agreed on (ALPN).
    pub fn protocol(&self) -> Option<Vec<u8>> {
        let data = self.quic.handshake_data()?.downcast::<HandshakeData>().ok()?;
        data.protocol
    }

    /// The application's streams lie in a session of HTTP/3, which has `streams` unidirectional streams of its own. Called
    /// before [`Self::start`].
    pub fn bind(&self, binding: Binding, streams: u64) {
        self.shared.bind(binding, streams);
        let _ = self.binding.set(binding); // called once
    }

    /// How the application's streams lie on the connection.
    pub fn binding(&self) -> Binding {
        self.binding.get().copied().unwrap_or_default()
    }

    /// The streams that quinn has, as the application sees them.
    pub fn streams(&self) -> Streams<'_> {
        Streams { connection: &self.quic, binding: self.binding(), foreign: &self.foreign }
    }

    /// What the peer has sent beside its WebTransport session.
    pub fn foreign(&self) -> &Foreign {
        &self.foreign
    }

    /// What this peer is owed. Held for a moment only: quinn waits for it with every packet.
    /// Afterwards [`Connection::transmit`] sends what has become possible.
    pub fn downstream(&self) -> MappedMutexGuard<'_, Downstream> {
        self.shared.downstream()
    }

    /// quinn has opened its unidirectional streams: the data plane may send.
    pub fn start(&self) {
        self.shared.open();
        self.transmit_now();
    }

    /// Puts what may be sent into `batch`. The caller flushes it.
    pub fn transmit(&self, now: Instant, batch: &mut Batch) {
        self.shared.transmit(now, batch);
    }

    /// Sends what may be sent.
    pub fn transmit_now(&self) {
        let mut batch = self.batch();
        self.transmit(Instant::now(), &mut batch);
        self.flush(&mut batch);
    }

    /// Says what an offload is worth to the connection; nothing at first. There may be fewer offloads than connections.
    pub fn set_worth(&self, worth: Worth) {
        self.shared.set_worth(worth);
    }

    /// How traces name the connection.
    pub fn set_session(&self, session: u32) {
        self.shared.set_session(session);
    }

    /// Calls `act` with the connection's offload, with the connection's lock held. `act` must not use the connection otherwise.
    pub fn offload<R>(&self, act: impl FnOnce(&mut LockedOffload<'_>) -> R) -> R {
        self.shared.with_offload(act)
    }

    /// Returns counts of what offloads did on this connection; `None` if it never has one.
    pub fn offload_status(&self) -> Option<ConnectionStatus> {
        self.shared.offload_status()
    }

    /// Whether both connections send through the same socket, so that one batch serves them.
    pub fn shares_socket(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared.sender, &other.shared.sender)
    }

    /// An empty batch.
    pub fn batch(&self) -> Batch {
        Batch::default()
    }

    /// Sends a batch, of any connections of the endpoint.
    pub fn flush(&self, batch: &mut Batch) {
        self.shared.sender.flush(batch);
    }

    /// Waits for something to have happened to streams of the data plane, and takes it all.
    pub async fn events(&self) -> Vec<Event> {
        loop {
            let more = self.shared.events.notified();
            let events = self.take_events();
            if !events.is_empty() {
                return events;
            }
            more.await;
        }
    }

    /// What has happened to streams of the data plane since the last time.
    pub fn take_events(&self) -> Vec<Event> {
        let mut downstream = self.downstream();
        std::iter::from_fn(|| downstream.poll_event()).collect()
    }

    /// Waits until quinn has sent stream data since, but not for long: it may have been faster.
    pub async fn control_sent(&self) {
        let _ = tokio::time::timeout(CONTROL_PATIENCE, self.shared.control.notified()).await;
    }

    /// What the network carries to the peer. [`Paths`](crate::Paths) tells when that changes.
    pub fn estimate(&self) -> Estimate {
        self.downstream().estimate(Instant::now())
    }

    pub fn stats(&self) -> Stats {
        self.shared.counters.snapshot()
    }

    /// The cipher suite; `None` if the data plane has no keys.
    pub fn suite(&self) -> Option<Suite> {
        self.shared.suite()
    }

    /// Asks quinn for newer keys if the data plane still needs them. Returns whether it did.
    pub(crate) fn renew_keys(&self) -> bool {
        if !self.shared.wants_keys() {
            return false;
        }
        self.quic.force_key_update();
        // quinn moves on with the next packet that it sends.
        self.nudge();
        true
    }

    /// Whether the peer has said, by a stateless reset, that it does not know the connection: it was restarted.
    pub fn is_forgotten(&self) -> bool {
        matches!(self.quic.close_reason(), Some(quinn::ConnectionError::Reset))
    }

    /// Asks the peer for an acknowledgement, and reports whether anything comes from it within `patience`. Those who ask at the same time
    /// share a probe, and an answer that is not older than `age` is good enough. Only time in which packets could be read counts.
    pub async fn answers(&self, patience: Duration, age: Duration) -> bool {
        let asked = Instant::now();
        let mut probed = self.probed.lock().await;
        let is_known = |last: &Probed| last.at >= asked || last.answered && last.at + age > asked;
        if let Some(last) = probed.filter(is_known) {
            return last.answered;
        }
        let answered = self.probe(patience).await;
        *probed = Some(Probed { at: Instant::now(), answered });
        answered
    }

    async fn probe(&self, patience: Duration) -> bool {
        let before = self.received();
        let looks = (patience.as_nanos() / ANSWER_LOOKS.as_nanos()) as u32;
        for look in 0..looks {
            // Once more, as one may be lost.
            if look == 0 || look == looks / 2 {
                self.nudge();
            }
            tokio::time::sleep(ANSWER_LOOKS).await;
            if self.received() > before {
                return true;
            }
        }
        false
    }

    /// Probes the peer whenever media came and nothing comes any more, with two packets. A living peer acknowledges the first.
    /// A peer that was restarted answers at least the second with a stateless reset: congestion control, which may hold
    /// everything back by now, does not count it. Never returns.
    pub async fn probe_when_silent(&self) -> Infallible {
        let mut looks = tokio::time::interval(silence::LOOKS);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut silence = Silence::new(Instant::now());
        loop {
            looks.tick().await;
            if silence.look(Instant::now(), self.received()) {
                debug!(remote = %self.quic.remote_address(), "the peer is silent: probing it");
                self.nudge();
                self.shared.send_stray();
            }
        }
    }

    /// Packets that came so far.
    fn received(&self) -> u64 {
        self.quic.stats().udp_rx.datagrams
    }

    /// Makes quinn send a packet that the peer acknowledges, by granting a byte more.
    fn nudge(&self) {
        self.quic.set_receive_window(self.shared.window.nudge().into());
    }

    /// Counts its receive window with those of others, as which it grows no further than `share` does.
    pub fn share_receive_window(&self, share: Arc<Share>) {
        self.shared.window.join(share);
    }

    /// Returns the receive window, and for how long it has been idle.
    pub fn receive_window(&self, now: Instant) -> ReceiveWindow {
        self.shared.window.status(now)
    }

    /// Tells quinn how large the receive window is.
    pub(crate) fn resize_window(&self) {
        let bytes = self.shared.window.bytes();
        self.quic.set_receive_window(bytes.into());
        self.shared.window.on_applied(bytes);
    }

    /// Asks quinn where the peer is. Returns whether quinn still waits for an answer from there.
    pub(crate) fn look_up_address(&self) -> bool {
        // quinn's lock is taken and released before ours.
        let remote = self.quic.remote_address();
        let waiting = self.shared.on_remote(Instant::now(), remote);
        if !waiting {
            self.transmit_now();
        }
        waiting
    }
}
