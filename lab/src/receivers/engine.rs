//! The thread that serves all subscriber sessions of `millrace-lab lab receivers`.

use std::{
    collections::BTreeSet,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use anyhow::Result;
use bytes::BytesMut;
use millrace_client::{payload, tls::CertificateTrust};
use millrace_kernel::clock::monotonic_ns;
use millrace_moq::Draft;
use nix::unistd::{SysconfVar, sysconf};
use quinn::{ClientConfig, EndpointConfig, TransportConfig, VarInt, crypto::rustls::QuicClientConfig};
use quinn_proto::{ConnectionHandle, DatagramEvent, Endpoint, EndpointEvent};

use super::{
    ReceiverControl, Settings,
    moves::MoveWave,
    report::{Moved, ReceiverCounters, ReceiversReport},
    session::{Now, ReceiverEnd, ReceiverSession, Wish},
    sockets::ReceiverSockets,
};

/// Largest number of handshakes at the same time. A relay accepts that many before it requires address validation.
const AT_ONCE: usize = 32;
/// Interval of the checks whether tracks are over and all sessions are connected, which no packet or timer triggers.
const TICK: Duration = Duration::from_millis(100);
/// Largest number of batches of datagrams that are read from one socket before the next socket is read.
const BATCHES: usize = 16;
const IDLE_MS: u32 = 30_000;
/// Interval of keep-alives, a third of the idle timeout (RFC 9000, section 10.1.2).
const KEEP_ALIVE: Duration = Duration::from_millis(IDLE_MS as u64 / 3);
/// Receive windows of a session, bytes. Data are read at once, so a large window takes no memory.
const WINDOW: u32 = 4 << 20;
/// Number of request streams that the relay may open.
const REQUESTS: u32 = 4;

/// The running subscriber sessions. They last until their track or their time is over, or until
/// [`ReceiverControl::stop`] is called.
pub struct ReceiverRun {
    settings: Settings,
    wish: Wish,
    control: Arc<ReceiverControl>,
    endpoint: Endpoint,
    client: ClientConfig,
    sockets: ReceiverSockets,
    /// Sessions in the order in which they began; `None` for a session that has ended.
    sessions: Vec<Option<ReceiverSession>>,
    /// Indices of sessions, by their connections' handles.
    routes: Vec<usize>,
    /// Indices of sessions whose connections have work to do.
    dirty: Vec<usize>,
    timers: BTreeSet<(Instant, usize)>,
    /// Number of sessions whose handshake is under way.
    handshakes: usize,
    /// Whether every session has been connected or has failed.
    have_come: bool,
    wave: Option<(MoveWave, Moved)>,
    storm: Option<Storm>,
    next_move: Option<Instant>,
    next_tick: Instant,
    figures: ReceiverCounters,
    /// Resident memory before the first session, bytes.
    rss_before: u64,
    packet: Vec<u8>,
}

/// Connected sessions that subscribe one after the other, evenly spread over a time.
#[derive(Clone, Copy)]
struct Storm {
    began: Instant,
    within: Duration,
    /// Index of the session that subscribes next.
    next: usize,
}

impl Storm {
    fn next_due(&self, sessions: usize) -> Instant {
        self.began + self.within.mul_f64(self.next as f64 / sessions.max(1) as f64)
    }
}

impl ReceiverRun {
    /// Prepares the sessions, and binds their sockets.
    ///
    /// # Errors
    ///
    /// Fails if a socket cannot be bound.
    pub fn new(settings: Settings, control: Arc<ReceiverControl>) -> Result<Self> {
        let Settings { relay, host, path, track, streams, subscribes_at_once: at_once, .. } = &settings;
        Ok(Self {
            wish: Wish {
                at_once: *at_once,
                track: track.clone(),
                path: path.clone(),
                authority: host.clone(),
            },
            control,
            endpoint: Endpoint::new(Arc::new(EndpointConfig::default()), None, false, None),
            client: client_config(*streams)?,
            sockets: ReceiverSockets::bind(settings.sockets, &settings.from, *relay)?,
            sessions: Vec::with_capacity(settings.sessions),
            routes: Vec::new(),
            dirty: Vec::new(),
            timers: BTreeSet::new(),
            handshakes: 0,
            have_come: false,
            wave: None,
            storm: None,
            next_move: None,
            next_tick: Instant::now(),
            figures: ReceiverCounters::new()?,
            rss_before: rss_bytes(),
            packet: Vec::with_capacity(2048),
            settings,
        })
    }

    /// Runs all sessions until they have ended. Returns their report.
    ///
    /// # Errors
    ///
    /// Fails if the process cannot wait for packets, or if a session cannot begin.
    pub fn run(mut self) -> Result<ReceiversReport> {
        let began = Instant::now();
        loop {
            let now = Instant::now();
            self.begin_sessions(now)?;
            self.tick(now);
            self.move_sessions(now);
            self.subscribe_sessions(now);
            self.fire_timers(now);
            self.drive_all(now);
            self.control.tell(&self.figures);
            if self.is_over(now, began) {
                return Ok(self.finish(now));
            }
            for socket in self.sockets.wait(self.patience(now))? {
                self.receive(socket);
            }
        }
    }

    fn is_over(&self, now: Instant, began: Instant) -> bool {
        let limit = self.settings.duration;
        let is_late = limit.is_some_and(|limit| now.saturating_duration_since(began) >= limit);
        let have_begun = self.sessions.len() == self.settings.sessions;
        is_late || self.control.stops() || (have_begun && self.sessions.iter().all(Option::is_none))
    }

    /// Returns how long the thread may wait for a packet: until the next timer, the next session's move to another
    /// address, or the next periodic check.
    fn patience(&self, now: Instant) -> Duration {
        let timer = self.timers.first().map(|(deadline, _)| *deadline);
        let wave = self.wave.as_ref().and_then(|(wave, _)| wave.next_due());
        let storm = self.storm.map(|storm| storm.next_due(self.sessions.len()));
        let next =
            [timer, wave, self.next_move, storm].into_iter().flatten().fold(self.next_tick, Instant::min);
        next.saturating_duration_since(now)
    }

    /// Ends the sessions. Returns their report.
    fn finish(mut self, now: Instant) -> ReceiversReport {
        for at in 0..self.sessions.len() {
            if let Some(Some(session)) = self.sessions.get_mut(at) {
                session.close(now, ReceiverEnd::Stopped);
                self.drive(at, now);
            }
        }
        self.figures.report(self.settings.sessions as u64)
    }
}

/// Methods for the life cycle of sessions.
impl ReceiverRun {
    /// Begins further sessions until `AT_ONCE` handshakes are under way, or until all sessions have begun.
    fn begin_sessions(&mut self, now: Instant) -> Result<()> {
        while self.sessions.len() < self.settings.sessions && self.handshakes < AT_ONCE {
            let at = self.sessions.len();
            let Settings { relay, host, .. } = &self.settings;
            let (handle, connection) = self.endpoint.connect(now, self.client.clone(), *relay, host)?;
            let index = handle.0;
            if self.routes.len() <= index {
                // `usize::MAX` says that this connection handle has no session.
                self.routes.resize(index + 1, usize::MAX);
            }
            self.routes[index] = at;
            let socket = at % self.sockets.count();
            self.sessions.push(Some(ReceiverSession::new(connection, handle, socket, now)));
            self.handshakes += 1;
            self.dirty.push(at);
        }
        Ok(())
    }

    /// Checks what no packet or timer triggers: whether tracks are over, and whether all sessions are connected.
    fn tick(&mut self, now: Instant) {
        if now < self.next_tick {
            return;
        }
        self.next_tick = now + TICK;
        let is_done =
            |session: &Option<ReceiverSession>| session.as_ref().is_some_and(ReceiverSession::is_done);
        let sessions = self.sessions.iter().enumerate();
        // The last streams of an ended track may have arrived by now, or the wait for them may be over.
        self.dirty.extend(sessions.filter(|(_, session)| is_done(session)).map(|(at, _)| at));
        if !self.have_come && self.handshakes == 0 && self.sessions.len() == self.settings.sessions {
            self.have_come = true;
            // All sessions have connected or failed, so the memory per session is measured now. This is done only once.
            let taken = rss_bytes().saturating_sub(self.rss_before);
            self.figures.bytes_per_session = taken / self.figures.connected.max(1);
            self.next_move = self.settings.moves.map(|(every, _)| now + every);
        }
        self.figures.look(now, self.settings.sessions as u64);
        if self.control.measures_anew.swap(false, Relaxed) {
            self.figures.measure_anew(now);
        }
    }

    /// Moves the sessions whose move to another address is due. First starts the next wave of such moves, if it is due.
    fn move_sessions(&mut self, now: Instant) {
        if self.next_move.is_some_and(|at| at <= now)
            && let Some((every, wanted)) = self.settings.moves
        {
            self.control.move_sessions(wanted);
            self.next_move = Some(now + every);
        }
        if self.wave.is_none()
            && let Some(wanted) = self.control.take_move()
        {
            let up =
                |(at, session): (usize, &Option<ReceiverSession>)| session.as_ref()?.is_up().then_some(at);
            let wave =
                MoveWave::begin(wanted, self.sessions.iter().enumerate().filter_map(up).collect(), now);
            let moved = Moved { began_ns: monotonic_ns(), ended_ns: 0, sessions: wave.count() as u64 };
            self.wave = Some((wave, moved));
        }
        let Some((wave, moved)) = &mut self.wave else { return };
        for at in wave.take_due(now) {
            let Some(Some(session)) = self.sessions.get_mut(at) else { continue };
            self.figures.not_resumed += u64::from(session.waits_for_media());
            session.move_to(self.sockets.next_of(session.socket), now);
            self.dirty.push(at);
        }
        if wave.next_due().is_none() {
            self.figures.moves.push(Moved { ended_ns: monotonic_ns(), ..*moved });
            self.wave = None;
        }
    }

    /// Lets the sessions subscribe whose turn has come.
    fn subscribe_sessions(&mut self, now: Instant) {
        if let Some(within) = self.control.take_storm() {
            self.storm = Some(Storm { began: now, within, next: 0 });
        }
        while let Some(storm) = self.storm.filter(|storm| storm.next_due(self.sessions.len()) <= now) {
            let at = storm.next;
            self.storm =
                Some(Storm { next: at + 1, ..storm }).filter(|storm| storm.next < self.sessions.len());
            let Some(Some(session)) = self.sessions.get_mut(at) else { continue };
            if let Err(error) = session.subscribe(&self.wish, now) {
                session.close(now, ReceiverEnd::Early(error.to_string()));
            }
            self.dirty.push(at);
        }
    }

    /// Records the end of a session.
    fn end(&mut self, at: usize) {
        let Some(session) = self.sessions.get_mut(at).and_then(Option::take) else { return };
        if !session.is_drained {
            // The endpoint still has state for the connection, so make it drop that state.
            self.endpoint.handle_event(session.handle, EndpointEvent::drained());
        }
        if let Some(deadline) = session.deadline {
            self.timers.remove(&(deadline, at));
        }
        self.figures.not_resumed += u64::from(session.waits_for_media());
        if let Some(ReceiverEnd::Early(reason)) = &session.ended {
            self.figures.end_early(reason.clone());
        }
        self.figures.add(session.into_counts());
    }
}

/// Methods for packets and timers.
impl ReceiverRun {
    fn receive(&mut self, socket: usize) {
        let now = Instant::now();
        let Self { sockets, endpoint, sessions, routes, dirty, figures, packet, .. } = self;
        for _ in 0..BATCHES {
            let more = sockets.receive(socket, |origin, bytes| {
                figures.packets += 1;
                figures.bytes += bytes.len() as u64;
                packet.clear();
                let event =
                    endpoint.handle(now, origin.remote, None, origin.ecn, BytesMut::from(bytes), packet);
                let Some(DatagramEvent::ConnectionEvent(ConnectionHandle(index), event)) = event else {
                    return;
                };
                let Some(at) = routes.get(index).copied() else { return };
                let Some(Some(session)) = sessions.get_mut(at) else { return };
                // The session has moved to another socket, so a packet that arrives here is dropped.
                if session.socket != socket {
                    figures.packets_too_late += 1;
                    return;
                }
                session.connection.handle_event(event);
                dirty.push(at);
            });
            if !more {
                return;
            }
        }
    }

    fn fire_timers(&mut self, now: Instant) {
        while let Some(&(deadline, at)) = self.timers.first()
            && deadline <= now
        {
            self.timers.pop_first();
            if let Some(Some(session)) = self.sessions.get_mut(at) {
                session.deadline = None;
                session.connection.handle_timeout(now);
                self.dirty.push(at);
            }
        }
    }

    fn drive_all(&mut self, now: Instant) {
        let mut dirty = std::mem::take(&mut self.dirty);
        // The list may contain a session several times, since each packet and each timer adds its session.
        dirty.sort_unstable();
        dirty.dedup();
        dirty.drain(..).for_each(|at| self.drive(at, now));
        self.dirty = dirty;
    }

    /// Processes a connection's events and sends its packets until none are left. Ends the connection's session if the
    /// session is over.
    fn drive(&mut self, at: usize, now: Instant) {
        // Unlike `||`, `|` evaluates both sides, so packets are sent in each pass of the loop.
        while self.events(at, now) | self.transmit(at, now) {}
        let Some(Some(session)) = self.sessions.get_mut(at) else { return };
        if session.ended.is_some() || !session.connection.is_handshaking() {
            self.handshakes -= usize::from(std::mem::take(&mut session.is_new));
        }
        let deadline = session.connection.poll_timeout();
        if session.deadline != deadline {
            if let Some(old) = session.deadline {
                self.timers.remove(&(old, at));
            }
            if let Some(new) = deadline {
                self.timers.insert((new, at));
            }
            session.deadline = deadline;
        }
        if session.ended.is_some() {
            self.end(at);
        }
    }

    /// Processes a connection's events. Returns whether there were any.
    fn events(&mut self, at: usize, now: Instant) -> bool {
        let Some(Some(session)) = self.sessions.get_mut(at) else { return false };
        let clocks = Now { instant: now, monotonic: payload::now() };
        let mut any = false;
        while let Some(event) = session.connection.poll_endpoint_events() {
            any = true;
            session.is_drained |= event.is_drained();
            if let Some(event) = self.endpoint.handle_event(session.handle, event) {
                session.connection.handle_event(event);
            }
        }
        while let Some(event) = session.connection.poll() {
            any = true;
            session.on_event(event, &self.wish, clocks, &mut |news| self.figures.take(news));
        }
        session.end_if_done(now);
        any
    }

    /// Sends a connection's packets. Returns whether there were any.
    fn transmit(&mut self, at: usize, now: Instant) -> bool {
        let Some(Some(session)) = self.sessions.get_mut(at) else { return false };
        let mut any = false;
        self.packet.clear();
        while let Some(transmit) = session.connection.poll_transmit(now, 1, &mut self.packet) {
            any = true;
            self.sockets.send(session.socket, &transmit, &self.packet[..transmit.size]);
            self.packet.clear();
        }
        any
    }
}

/// Returns the configuration of the clients. They keep no state between connections, and have no larger buffers than a
/// subscription needs.
fn client_config(streams: u32) -> Result<ClientConfig> {
    let mut tls = CertificateTrust::Anyone.client_config(&Draft::ALL.map(Draft::alpn))?;
    tls.resumption = rustls::client::Resumption::disabled();
    let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls)?));
    let mut transport = TransportConfig::default();
    transport
        .max_concurrent_uni_streams(VarInt::from_u32(streams))
        .max_concurrent_bidi_streams(VarInt::from_u32(REQUESTS))
        .stream_receive_window(VarInt::from_u32(WINDOW))
        .receive_window(VarInt::from_u32(WINDOW))
        .datagram_receive_buffer_size(Some(WINDOW as usize))
        .keep_alive_interval(Some(KEEP_ALIVE))
        .max_idle_timeout(Some(VarInt::from_u32(IDLE_MS).into()))
        .mtu_discovery_config(None);
    config.transport_config(Arc::new(transport)).token_store(Arc::new(quinn::NoneTokenStore));
    Ok(config)
}

/// Returns the resident memory of this process in bytes, or 0 if it cannot be read.
fn rss_bytes() -> u64 {
    let pages = || {
        let text = std::fs::read_to_string("/proc/self/statm").ok()?;
        text.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().unwrap_or(4096);
    pages().unwrap_or_default() * page.unsigned_abs()
}
