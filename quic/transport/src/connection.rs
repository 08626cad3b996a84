//! Connections: quinn's handle together with the data plane.

use std::{
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use millrace_quic::{
    keys::KeySuite,
    plane::{
        downstream::{Downstream, DownstreamEvent},
        estimate::Estimate,
    },
    silence::{self, PacketTotals, Silence},
};
use millrace_webtransport::{Binding, Foreign, SessionStreams};
use parking_lot::{MappedMutexGuard, Mutex};
use quinn::{Dir, VarInt, crypto::rustls::HandshakeData};
use tracing::debug;

use crate::{
    allowance::{self, OpenStream, StreamUse},
    offload::{ConnectionStatus, LockedOffload, Worth},
    registry::RegisteredConnection,
    send::{PacketBatch, SendingConnection},
    shared::SharedConnection,
    stats::Stats,
    windows::{ReceiveWindow, WindowShare},
};

/// Longest time for which objects wait until quinn has sent the control message that has to precede them.
const CONTROL_PATIENCE: Duration = Duration::from_millis(2);
/// Interval at which [`Connection::answers`] checks whether the peer has answered its probe.
const ANSWER_LOOKS: Duration = Duration::from_millis(20);
/// Number of probes that [`Connection::answers`] sends to a peer that does not answer.
const PROBES: u32 = 4;

/// One QUIC connection with two senders.
///
/// quinn ([`Connection::quic`]) does the handshake, bidirectional streams, all receiving, and the first unidirectional
/// streams ([`Config::control_streams`](crate::Config::control_streams) of them). From [`Connection::start`] on, all
/// other unidirectional streams and the datagrams that are sent belong to [`Connection::downstream`].
///
/// # Order of calls
///
/// 1. The application calls [`Self::bind`] if it uses a WebTransport session.
/// 2. It opens `control_streams` unidirectional streams through [`Self::quic`].
/// 3. It calls [`Self::start`]. Before this call data may be queued, but the data plane sends nothing.
/// 4. It calls [`Self::downstream`] to queue streams and datagrams, then [`Self::transmit_now`] or [`Self::transmit`].
///    All three may be called from any thread. Timers, retransmissions and the peer's credit cause further packets
///    without a call.
/// 5. It calls [`Self::events`] or [`Self::take_events`] to learn which streams have ended. A connection has one queue
///    of events, so only one task should read it.
///
/// While no method runs, every byte of the data plane is acknowledged, in flight or waiting. Both senders together stay
/// within the congestion window and the peer's credit. When the connection is closed, by either end or by a timeout,
/// the data plane stops and reports no further events.
///
/// ```no_run
/// use bytes::Bytes;
/// use millrace_quic::plane::downstream::{Label, NewDatagram, Priority};
///
/// # async fn example(incoming: millrace_transport::Incoming) -> Result<(), Box<dyn std::error::Error>> {
/// let connection = incoming.accept().await?;
/// connection.start();
/// let payload = Bytes::from_static(b"an object");
/// let (priority, label) = (Priority::default(), Label::default());
/// connection.downstream().send_datagram(NewDatagram { payload, priority, expires: None, late: None, label })?;
/// connection.transmit_now();
/// # Ok(())
/// # }
/// ```
pub struct Connection {
    /// quinn's handle, for bidirectional streams, for everything received, and to close the connection.
    pub quic: quinn::Connection,
    pub(crate) shared: Arc<SharedConnection>,
    pub(crate) binding: OnceLock<Binding>,
    pub(crate) foreign: Foreign,
    /// The result of the last liveness probe of the peer. The lock is held while a probe waits for its answer.
    pub(crate) probed: tokio::sync::Mutex<Option<ProbeResult>>,
    /// The largest numbers of bidirectional and of unidirectional streams that the peer may have open at a time.
    pub(crate) most_streams: [u32; 2],
    pub(crate) streams_used: [Arc<Mutex<StreamUse>>; 2],
    pub(crate) _listed: RegisteredConnection,
    pub(crate) shard: usize,
}

/// The time and the result of a probe of the peer.
#[derive(Clone, Copy)]
pub(crate) struct ProbeResult {
    at: Instant,
    answered: bool,
}

impl Connection {
    /// Returns the negotiated application protocol (ALPN).
    pub fn protocol(&self) -> Option<Vec<u8>> {
        let data = self.quic.handshake_data()?.downcast::<HandshakeData>().ok()?;
        data.protocol
    }

    /// Sets the WebTransport session that the application's streams belong to. HTTP/3 opens `streams` unidirectional
    /// streams for itself. This must be called before [`Self::start`].
    pub fn bind(&self, binding: Binding, streams: u64) {
        self.shared.bind(binding, streams);
        // only the first call of `bind` sets the value; the error of later calls is ignored
        let _ = self.binding.set(binding);
    }

    /// Returns whether the application's streams are plain QUIC streams or belong to a WebTransport session.
    pub fn binding(&self) -> Binding {
        self.binding.get().copied().unwrap_or_default()
    }

    /// Returns a handle with which the application opens and accepts streams of quinn.
    pub fn streams(&self) -> SessionStreams<'_> {
        SessionStreams { connection: &self.quic, binding: self.binding(), foreign: &self.foreign }
    }

    /// Counts a stream that the peer has opened and the application has accepted. Lets the peer open more streams if it
    /// needs them.
    pub fn count_stream(&self, direction: Dir) -> OpenStream {
        let at = direction as usize;
        let (open, grows) = OpenStream::begin(&self.streams_used[at], Instant::now(), allowance::FIRST[at]);
        let most = VarInt::from_u32(self.most_streams[at]);
        match direction {
            Dir::Bi if grows => self.quic.set_max_concurrent_bi_streams(most),
            Dir::Uni if grows => self.quic.set_max_concurrent_uni_streams(most),
            _ => {}
        }
        open
    }

    /// Returns counts of the peer's streams and datagrams outside its WebTransport session.
    pub fn foreign(&self) -> &Foreign {
        &self.foreign
    }

    /// Locks the data plane of this connection. The caller has to release the lock soon, because quinn's crypto takes
    /// the same lock for every packet. Call [`Connection::transmit`] afterwards to send queued data.
    pub fn downstream(&self) -> MappedMutexGuard<'_, Downstream> {
        self.shared.downstream()
    }

    /// Lets the data plane send. quinn has to have opened its unidirectional streams before.
    pub fn start(&self) {
        self.shared.open();
        self.transmit_now();
    }

    /// Adds the packets that may be sent now to `batch`. The caller flushes the batch.
    pub fn transmit(&self, now: Instant, batch: &mut PacketBatch) {
        self.shared.transmit(now, batch);
    }

    /// Makes the thread of a shard send what these connections of the shard may send. They stay in `connections` if the
    /// shard has no thread, since the endpoint has no other shard, or if the thread has too much to do.
    pub fn hand_over(connections: &mut Vec<Arc<Self>>) {
        let Some(first) = connections.first() else { return };
        let shared = |connection: &Arc<Self>| Arc::clone(&connection.shared) as Arc<dyn SendingConnection>;
        if first.shared.sender.ask(connections.iter().map(shared).collect()) {
            connections.clear();
        }
    }

    /// Sends the packets that may be sent now.
    pub fn transmit_now(&self) {
        let mut batch = self.batch();
        self.transmit(Instant::now(), &mut batch);
        self.flush(&mut batch);
    }

    /// Sets how valuable a kernel offload is for the connection, which is
    /// [`Worth::Nothing`](crate::offload::Worth::Nothing) at first. If there are fewer offloads than connections, the
    /// most valuable connections get them.
    pub fn set_worth(&self, worth: Worth) {
        self.shared.set_worth(worth);
    }

    /// Sets the number by which packet traces identify the MoQ session on this connection.
    pub fn set_session(&self, session: u32) {
        self.shared.set_session(session);
    }

    /// Calls `act` with the connection's kernel offload while the connection's lock is held. `act` must not call other
    /// methods of the connection.
    pub fn offload<R>(&self, act: impl FnOnce(&mut LockedOffload<'_>) -> R) -> R {
        self.shared.with_offload(act)
    }

    /// Returns the counters of all kernel offloads that this connection has had, or `None` if the endpoint has no
    /// offload engine.
    pub fn offload_status(&self) -> Option<ConnectionStatus> {
        self.shared.offload_status()
    }

    /// Returns the index of the connection's shard in its endpoint.
    pub fn shard(&self) -> usize {
        self.shard
    }

    /// Returns whether this connection and `other` send through the same socket, so that one packet batch serves both.
    pub fn shares_socket(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared.sender, &other.shared.sender)
    }

    /// Returns an empty batch of packets.
    pub fn batch(&self) -> PacketBatch {
        PacketBatch::default()
    }

    /// Sends a batch, which may have packets of several connections of one shard.
    pub fn flush(&self, batch: &mut PacketBatch) {
        self.shared.sender.flush(batch);
    }

    /// Waits for events of the data plane's streams, and returns them all.
    pub async fn events(&self) -> Vec<DownstreamEvent> {
        loop {
            // The future is created before the queue is read, so no event in between is missed.
            let more = self.shared.events.notified();
            let events = self.take_events();
            if !events.is_empty() {
                return events;
            }
            more.await;
        }
    }

    /// Returns the events of the data plane's streams since the last call, without waiting.
    pub fn take_events(&self) -> Vec<DownstreamEvent> {
        let mut downstream = self.downstream();
        std::iter::from_fn(|| downstream.poll_event()).collect()
    }

    /// Waits until quinn sends stream data, such as a control message, but at most `CONTROL_PATIENCE`: quinn may have
    /// sent that data before this call.
    pub async fn control_sent(&self) {
        let _ = tokio::time::timeout(CONTROL_PATIENCE, self.shared.control.notified()).await;
    }

    /// Returns the estimate of the path to the peer. [`PathReports`](crate::PathReports) reports changes.
    pub fn estimate(&self) -> Estimate {
        self.downstream().estimate(Instant::now())
    }

    /// Returns counts of the packets that quinn and the data plane have sent, and of received frames that were
    /// rewritten for quinn.
    pub fn stats(&self) -> Stats {
        self.shared.counters.snapshot()
    }

    /// Returns the cipher suite, or `None` if the data plane has no keys.
    pub fn suite(&self) -> Option<KeySuite> {
        self.shared.suite()
    }

    /// Requests a key update from quinn if the data plane still needs newer keys. Returns whether the data plane still
    /// needs newer keys.
    pub(crate) fn renew_keys(&self) -> bool {
        if !self.shared.wants_keys() {
            return false;
        }
        self.quic.force_key_update();
        // quinn uses the new keys only with the next packet that it sends, so a packet is triggered.
        self.nudge();
        true
    }

    /// Returns whether the peer has sent a stateless reset, because it was restarted and does not know the connection.
    pub fn is_forgotten(&self) -> bool {
        matches!(self.quic.close_reason(), Some(quinn::ConnectionError::Reset))
    }

    /// Probes the peer, and returns whether it answers within `patience`. Simultaneous calls share a probe, and an answer
    /// that is at most `age` old counts. Time in which this process could not read packets does not count.
    pub async fn answers(&self, patience: Duration, age: Duration) -> bool {
        let asked = Instant::now();
        let mut probed = self.probed.lock().await;
        // If another caller's probe ended after this call began, its result is returned.
        let is_known = |last: &ProbeResult| last.at >= asked || last.answered && last.at + age > asked;
        if let Some(last) = probed.filter(is_known) {
            return last.answered;
        }
        let answered = self.probe(patience).await;
        *probed = Some(ProbeResult { at: Instant::now(), answered });
        answered
    }

    /// Sends probes, and returns whether the peer acknowledges one within `patience`. Only the acknowledgement of a packet
    /// that is sent from now on is an answer. Any other packet may have been on its way when the peer died.
    async fn probe(&self, patience: Duration) -> bool {
        let first = self.shared.next_number();
        let looks = (patience.as_nanos() / ANSWER_LOOKS.as_nanos()) as u32;
        for look in 0..looks {
            // Further probes are sent, because a probe or its acknowledgement may be lost.
            if look % looks.div_ceil(PROBES) == 0 {
                self.nudge();
            }
            tokio::time::sleep(ANSWER_LOOKS).await;
            if self.shared.is_acked(first) {
                return true;
            }
        }
        false
    }

    /// Returns a new monitor that detects whether the peer is alive.
    pub fn watch(&self) -> PeerWatch<'_> {
        let mut looks = tokio::time::interval(silence::LOOKS);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        PeerWatch { connection: self, looks, silence: Silence::new(Instant::now()), was_dead: false }
    }

    /// Returns a number that grows while the peer lives: that of [`PacketTotals::received`].
    pub fn heard(&self) -> u64 {
        let frames = self.quic.stats().frame_rx;
        frames.acks + frames.datagram + frames.ping + frames.stream
    }

    /// Makes quinn send an ack-eliciting packet, by increasing the receive window by one byte.
    fn nudge(&self) {
        self.quic.set_receive_window(self.shared.window.nudge().into());
    }

    /// Counts the connection's receive window in `share`, which limits the sum of several connections' windows.
    pub fn share_receive_window(&self, share: Arc<WindowShare>) {
        self.shared.window.join(share);
    }

    /// Returns the size of the connection's receive window, and the time since the last MAX_DATA frame to the peer.
    pub fn receive_window(&self, now: Instant) -> ReceiveWindow {
        self.shared.window.status(now)
    }

    /// Sets quinn's receive window to the size that `ConnectionWindow` has computed.
    pub(crate) fn resize_window(&self) {
        let bytes = self.shared.window.bytes();
        self.quic.set_receive_window(bytes.into());
        self.shared.window.on_applied(bytes);
    }

    /// Reads the peer's address from quinn. Returns whether quinn is still validating that address (no PATH_RESPONSE
    /// yet).
    pub(crate) fn look_up_address(&self) -> bool {
        // quinn's lock has to be released before this connection's lock is taken. The documentation of
        // `SharedConnection` has the lock order.
        let remote = self.quic.remote_address();
        let waiting = self.shared.on_remote(Instant::now(), remote);
        if !waiting {
            self.transmit_now();
        }
        waiting
    }
}

/// A monitor that detects whether the peer of a connection is alive. If the peer has stopped sending media, or does not
/// acknowledge packets, the monitor probes it with two packets. A living peer acknowledges the first packet. A
/// restarted peer answers at least the second packet with a stateless reset. The second packet is sent even if
/// congestion control blocks all other packets.
pub struct PeerWatch<'a> {
    connection: &'a Connection,
    looks: tokio::time::Interval,
    silence: Silence,
    was_dead: bool,
}

/// Change in the state of a monitored peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// The peer has answered no probe for so long that it is likely gone.
    Dead,
    /// The peer was considered dead, and has sent a packet since.
    Alive,
}

impl PeerWatch<'_> {
    /// Probes the peer while it is silent, and waits until its health changes. The method is cancel safe.
    pub async fn changed(&mut self) -> Health {
        loop {
            self.looks.tick().await;
            let stats = self.connection.quic.stats();
            let packets = PacketTotals { received: self.connection.heard(), sent: stats.udp_tx.datagrams };
            if self.silence.look(Instant::now(), packets) {
                debug!(remote = %self.connection.quic.remote_address(), "the peer has been silent: probing the connection");
                self.connection.nudge();
                self.connection.shared.send_stray();
            }
            let is_dead = self.silence.is_dead(stats.path.rtt);
            if is_dead != std::mem::replace(&mut self.was_dead, is_dead) {
                return if is_dead { Health::Dead } else { Health::Alive };
            }
        }
    }
}
