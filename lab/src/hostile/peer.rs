//! A QUIC client whose frames and acknowledgements the caller controls, so that it can break RFC 9000 on purpose.

mod stream;
pub mod web;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    os::fd::AsFd as _,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use millrace_client::tls::CertificateTrust;
use millrace_moq::Draft;
use millrace_quic::{
    frame::{self, Direction, Frame, Walker},
    packet::ConnectionId,
    webtransport::{self, Binding},
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustls::{pki_types::ServerName, quic};

use self::stream::ReceivedStream;
pub use self::stream::{StreamKind, encoded};
use super::{
    packet::{
        self, DatagramContent, EncryptionLevel, LEVELS, LevelKeys, MIN_INITIAL, PacketRoute, SharedSecrets,
    },
    params::{ClientLimits, PeerCredit},
};
use crate::transport::LabTransport;

/// MoQ draft that the client uses.
pub const DRAFT: Draft = Draft::NEWEST;
/// Longest time that a scenario waits for packets from the relay.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Largest number of packets in flight.
const WINDOW: usize = 128;
/// Time without an acknowledgement after which a packet is sent again.
const PROBE: Duration = Duration::from_millis(250);
/// Packet threshold: a packet is lost if one sent this many packets later has been acknowledged.
const REORDERING: u64 = 64;
const ID_LEN: usize = 8;
/// Smallest overhead of an Initial packet beyond token and frames, bytes.
const INITIAL_OVERHEAD: usize = 44;
/// Largest size of the frames in one packet, bytes.
pub const ROOM: usize = 1150;

/// The relay to connect to, and the path to request.
#[derive(Clone, Debug)]
pub struct PeerTarget {
    pub addr: SocketAddr,
    pub name: String,
    /// Path and query, sent in SETUP or in the WebTransport request.
    pub path: String,
    pub transport: LabTransport,
}

/// Packet numbers that the client acknowledges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acks {
    /// Acknowledges the packets that arrived.
    Honest,
    /// Acknowledges nothing.
    None,
    /// Acknowledges the packets that arrived, and as many that did not (RFC 9000, section 21.4).
    Optimistic,
    /// Acknowledges every number up to the largest that arrived, including packets that were lost.
    Gapless,
}

/// Counts of data that was sent and received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct PeerCounts {
    pub connections: u64,
    pub packets_sent: u64,
    pub packets_received: u64,
    pub streams_opened: u64,
    pub stream_bytes: u64,
    /// Number of connections that the relay closed or refused.
    pub closed_by_relay: u64,
    /// Number of packets whose packet number had been received before.
    pub repeated: u64,
}

impl PeerCounts {
    pub fn add(&mut self, other: Self) {
        self.connections += other.connections;
        self.packets_sent += other.packets_sent;
        self.packets_received += other.packets_received;
        self.streams_opened += other.streams_opened;
        self.stream_bytes += other.stream_bytes;
        self.closed_by_relay += other.closed_by_relay;
        self.repeated += other.repeated;
    }
}

/// State of one packet number space.
#[derive(Default)]
struct Space {
    next: u64,
    /// The largest packet number received, plus one.
    expected: u64,
    received: BTreeSet<u64>,
    owes_ack: bool,
    /// Frames that are sent again until they are acknowledged, with their time of sending, by packet number.
    unacked: BTreeMap<u64, (Instant, Vec<u8>)>,
    crypto_in: ReceivedStream,
    crypto_sent: u64,
}

/// A connection to the relay.
pub struct HostilePeer {
    socket: UdpSocket,
    tls: quic::ClientConnection,
    secrets: SharedSecrets,
    local: ConnectionId,
    remote: ConnectionId,
    token: Vec<u8>,
    keys: [Option<LevelKeys>; 3],
    spaces: [Space; 3],
    level: EncryptionLevel,
    pub acks: Acks,
    /// Whether the client answers PATH_CHALLENGE with PATH_RESPONSE.
    pub answers_challenges: bool,
    /// Sequence number of the relay's connection ID that is in use.
    remote_sequence: u64,
    /// Connection IDs of the relay that may be used next, with their sequence numbers.
    next_ids: VecDeque<(u64, ConnectionId)>,
    /// Sequence number of this client's newest connection ID.
    local_sequence: u64,
    /// Mapping of MoQ streams and datagrams to the transport (raw QUIC or WebTransport).
    pub binding: Binding,
    credit: PeerCredit,
    /// Data limits of streams whose limit the relay has raised above the initial one, by stream ID.
    stream_credit: HashMap<u64, u64>,
    offsets: HashMap<u64, u64>,
    data_sent: u64,
    opened: [u64; 2],
    received: HashMap<u64, ReceivedStream>,
    pub datagrams: u64,
    /// Reason for which the relay closed the connection.
    pub closed: Option<String>,
    pub counts: PeerCounts,
}

impl HostilePeer {
    /// Connects, and sends MoQ's SETUP.
    pub fn establish(target: &PeerTarget) -> Result<Self> {
        let mut peer = Self::connect(target, ClientLimits::default())?;
        peer.setup(target)?;
        Ok(peer)
    }

    /// Connects, and opens a WebTransport session if that is the transport.
    ///
    /// # Errors
    ///
    /// Fails if the handshake was not completed in time, or if the relay refused the session.
    pub fn connect(target: &PeerTarget, params: ClientLimits) -> Result<Self> {
        let mut peer = Self::handshake(target, params)?;
        match target.transport {
            LabTransport::Raw => {}
            LabTransport::Webtransport => peer.ask(target)?,
        }
        Ok(peer)
    }

    /// Completes the handshake, and sends nothing afterwards.
    ///
    /// # Errors
    ///
    /// Fails if the handshake was not completed in time.
    pub fn handshake(target: &PeerTarget, params: ClientLimits) -> Result<Self> {
        let mut peer = Self::start(target, params)?;
        let is_up =
            |peer: &Self| peer.keys[EncryptionLevel::OneRtt as usize].is_some() && !peer.tls.is_handshaking();
        if !peer.pump(PATIENCE, is_up) {
            bail!("the handshake was not completed: {}", peer.closed.as_deref().unwrap_or("no answer"));
        }
        peer.credit = PeerCredit::parse(peer.tls.quic_transport_parameters().unwrap_or_default());
        Ok(peer)
    }

    /// Sends the first packet of a handshake.
    pub fn start(target: &PeerTarget, params: ClientLimits) -> Result<Self> {
        let socket = socket_to(target.addr)?;
        let secrets = SharedSecrets::default();
        let alpn = match target.transport {
            LabTransport::Raw => DRAFT.alpn(),
            LabTransport::Webtransport => webtransport::ALPN,
        };
        let mut config = CertificateTrust::Anyone.client_config(&[alpn])?;
        config.key_log = Arc::clone(&secrets) as _;
        let name = ServerName::try_from(target.name.clone())?;
        let local = random_id();
        let remote = random_id();
        let encoded = params.encode(&local);
        let tls = quic::ClientConnection::new(Arc::new(config), quic::Version::V1, name, encoded)?;
        let mut peer = Self {
            socket,
            tls,
            secrets,
            local,
            remote,
            token: Vec::new(),
            keys: [Some(LevelKeys::initial(&remote)), None, None],
            spaces: Default::default(),
            level: EncryptionLevel::Initial,
            acks: Acks::Honest,
            answers_challenges: true,
            remote_sequence: 0,
            next_ids: VecDeque::new(),
            local_sequence: 0,
            binding: Binding::Bare,
            credit: PeerCredit::default(),
            stream_credit: HashMap::new(),
            offsets: HashMap::new(),
            data_sent: 0,
            opened: [0; 2],
            received: HashMap::new(),
            datagrams: 0,
            closed: None,
            counts: PeerCounts { connections: 1, ..PeerCounts::default() },
        };
        peer.write_handshake()?;
        Ok(peer)
    }

    /// Returns the address that the client sends from.
    ///
    /// # Errors
    ///
    /// Fails if the socket has no local address any more.
    pub fn local_addr(&self) -> Result<SocketAddr> {
        Ok(self.socket.local_addr()?)
    }

    /// Reports whether the relay has sent a Retry.
    pub fn was_asked_to_retry(&self) -> bool {
        !self.token.is_empty()
    }

    fn write_handshake(&mut self) -> Result<()> {
        loop {
            let mut bytes = Vec::new();
            let change = self.tls.write_hs(&mut bytes);
            for chunk in bytes.chunks(ROOM - 50) {
                let mut frames = Vec::new();
                let space = &mut self.spaces[self.level as usize];
                packet::write_crypto(space.crypto_sent, chunk, &mut frames);
                space.crypto_sent += chunk.len() as u64;
                self.send_at(self.level, frames, true)?;
            }
            // The next bytes of the handshake belong to the new encryption level, whose keys TLS has just reported.
            self.level = match change {
                Some(quic::KeyChange::Handshake { .. }) => EncryptionLevel::Handshake,
                Some(quic::KeyChange::OneRtt { .. }) => EncryptionLevel::OneRtt,
                None if bytes.is_empty() => return Ok(()),
                None => continue,
            };
            if let Some(suite) = self.tls.negotiated_cipher_suite() {
                self.keys[self.level as usize] = self.secrets.keys(self.level, suite.suite());
            }
        }
    }

    /// Sends one packet with `frames`. With `reliably`, lost packets are sent again until they are acknowledged.
    pub fn send(&mut self, frames: Vec<u8>, reliably: bool) -> Result<()> {
        let is_open = |peer: &Self| peer.spaces[EncryptionLevel::OneRtt as usize].unacked.len() < WINDOW;
        if reliably && !is_open(self) && !self.pump(PATIENCE, is_open) {
            bail!("the relay acknowledges nothing: {}", self.closed.as_deref().unwrap_or("no answer"));
        }
        self.send_at(EncryptionLevel::OneRtt, frames, reliably)
    }

    /// Sends one packet with `frames` behind a Handshake packet in the same datagram. The relay's fast path passes such
    /// datagrams to userspace, so the fast path does not see the frames.
    pub fn send_hidden(&mut self, frames: Vec<u8>) -> Result<()> {
        let mut datagram = self.seal_at(EncryptionLevel::Handshake, Vec::new(), false)?;
        datagram.extend(self.seal_at(EncryptionLevel::OneRtt, frames, true)?);
        self.transmit(&datagram)
    }

    fn send_at(&mut self, level: EncryptionLevel, frames: Vec<u8>, reliably: bool) -> Result<()> {
        let packet = self.seal_at(level, frames, reliably)?;
        self.transmit(&packet)
    }

    fn seal_at(&mut self, level: EncryptionLevel, mut frames: Vec<u8>, reliably: bool) -> Result<Vec<u8>> {
        if level == EncryptionLevel::Initial && reliably {
            let room = MIN_INITIAL.saturating_sub(INITIAL_OVERHEAD + self.token.len());
            frames.resize(frames.len().max(room), 0);
        }
        // Header protection samples 16 bytes, starting four bytes after the start of the packet number, so short
        // packets are padded.
        frames.resize(frames.len().max(4), 0);
        let space = &mut self.spaces[level as usize];
        let number = space.next;
        space.next += 1;
        let Some(keys) = &self.keys[level as usize] else { bail!("no keys of level {level:?}") };
        let route = PacketRoute { to: &self.remote, from: &self.local, token: &self.token };
        let packet = packet::seal(level, &route, number, &frames, keys);
        if reliably {
            space.unacked.insert(number, (Instant::now(), frames));
        }
        self.counts.packets_sent += 1;
        Ok(packet)
    }

    fn transmit(&self, datagram: &[u8]) -> Result<()> {
        match self.socket.send(datagram) {
            // An ICMP error in answer to an earlier packet, or a full send queue, counts as a lost packet.
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::WouldBlock) => {
                Ok(())
            }
            sent => sent.map(drop).context("cannot send"),
        }
    }

    /// Processes incoming packets until `done` returns true or `patience` has passed. Returns whether `done` returned
    /// true.
    pub fn pump(&mut self, patience: Duration, done: impl Fn(&Self) -> bool) -> bool {
        let deadline = Instant::now() + patience;
        loop {
            if done(self) {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if self.closed.is_some() || self.receive(left.min(PROBE / 5)).is_err() {
                return false;
            }
            if left.is_zero() {
                return done(self);
            }
        }
    }

    /// Reads and acknowledges all packets that have arrived. Waits up to `wait` if none has.
    fn receive(&mut self, wait: Duration) -> Result<()> {
        let mut polled = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
        // The time-out has whole milliseconds. It is rounded up, since 0 would not wait at all.
        let _ = poll(&mut polled, PollTimeout::from(wait.as_micros().div_ceil(1000).min(60_000) as u16));
        let mut buffer = [0; 65536];
        loop {
            match self.socket.recv(&mut buffer) {
                Ok(len) => self.on_datagram(buffer[..len].to_vec())?,
                // A refused connection is believed only before the first packet has arrived. Later, anyone on the path
                // could have forged the ICMP message.
                Err(error)
                    if error.kind() == ErrorKind::ConnectionRefused && self.counts.packets_received == 0 =>
                {
                    self.closed = Some("no process listens on that UDP port".to_owned());
                    return Ok(());
                }
                Err(_) => break,
            }
        }
        self.acknowledge()?;
        self.repair()
    }

    fn on_datagram(&mut self, mut datagram: Vec<u8>) -> Result<()> {
        loop {
            let expected = [0, 1, 2].map(|level: usize| self.spaces[level].expected);
            let incoming = packet::next(&mut datagram, ID_LEN, &mut self.keys, &expected);
            let Some(incoming) = incoming else { return Ok(()) };
            self.counts.packets_received += 1;
            match incoming {
                DatagramContent::Retry { from, token } if self.token.is_empty() => self.retry(from, token)?,
                DatagramContent::Retry { .. } => {}
                DatagramContent::Packet { level, number, from, frames } => {
                    if let Some(from) = from {
                        self.remote = from;
                    }
                    self.on_packet(level, number, &frames)?;
                }
            }
        }
    }

    /// Handles a Retry: sends the first flight again with the token (RFC 9000, section 8.1.2).
    fn retry(&mut self, from: ConnectionId, token: Vec<u8>) -> Result<()> {
        (self.remote, self.token) = (from, token);
        // Initial keys depend on the destination connection ID, which the Retry has changed.
        self.keys[0] = Some(LevelKeys::initial(&from));
        let flight = std::mem::take(&mut self.spaces[0].unacked);
        flight.into_values().try_for_each(|(_, mut frames)| {
            // The Initial's padding shrinks to make space for the token.
            frames.truncate(MIN_INITIAL.saturating_sub(INITIAL_OVERHEAD + self.token.len()));
            self.send_at(EncryptionLevel::Initial, frames, true)
        })
    }

    fn on_packet(&mut self, level: EncryptionLevel, number: u64, frames: &[u8]) -> Result<()> {
        let space = &mut self.spaces[level as usize];
        space.expected = space.expected.max(number + 1);
        if !space.received.insert(number) {
            self.counts.repeated += 1;
            return Ok(());
        }
        // Keep only the newest packet numbers, so that memory is bounded.
        while space.received.len() > 4096 {
            space.received.pop_first();
        }
        for item in Walker::new(frames) {
            let (_, frame) = item?;
            self.spaces[level as usize].owes_ack |= frame.is_ack_eliciting();
            self.on_frame(level, frame)?;
        }
        Ok(())
    }

    fn on_frame(&mut self, level: EncryptionLevel, frame: Frame<'_>) -> Result<()> {
        match frame {
            Frame::Ack(ack) => {
                for range in ack.ranges() {
                    let unacked = &mut self.spaces[level as usize].unacked;
                    let acked: Vec<u64> = unacked.range(range).map(|(number, _)| *number).collect();
                    acked.iter().for_each(|number| drop(unacked.remove(number)));
                }
                self.resend(level, |number, _| number + REORDERING < ack.largest)?;
            }
            Frame::Crypto { offset, data } => {
                let crypto = &mut self.spaces[level as usize].crypto_in;
                crypto.insert(offset, data);
                let bytes = crypto.take();
                if level != EncryptionLevel::OneRtt && !bytes.is_empty() {
                    self.tls.read_hs(&bytes)?;
                    self.write_handshake()?;
                }
            }
            Frame::Stream(stream) => {
                let received = self.received.entry(stream.id).or_default();
                received.insert(stream.offset, stream.data);
                received.fin |= stream.fin;
            }
            Frame::ResetStream { id, code, .. } => self.received.entry(id).or_default().reset = Some(code),
            Frame::StopSending { id, code } => self.received.entry(id).or_default().stopped = Some(code),
            Frame::MaxData(limit) => self.credit.data = self.credit.data.max(limit),
            Frame::MaxStreamData { id, limit } => {
                let known = self.stream_credit.entry(id).or_default();
                *known = limit.max(*known);
            }
            Frame::MaxStreams(Direction::Bidirectional, limit) => {
                self.credit.streams_bidi = self.credit.streams_bidi.max(limit);
            }
            Frame::MaxStreams(Direction::Unidirectional, limit) => {
                self.credit.streams_uni = self.credit.streams_uni.max(limit);
            }
            Frame::NewConnectionId { sequence, id, .. } => {
                let newest = self.next_ids.back().map_or(self.remote_sequence, |(sequence, _)| *sequence);
                if sequence > newest {
                    let id = ConnectionId::new(id).context("a connection ID is too long")?;
                    self.next_ids.push_back((sequence, id));
                }
            }
            Frame::PathChallenge(_) if !self.answers_challenges => {}
            Frame::PathChallenge(data) => {
                // Answer with a PATH_RESPONSE that has the same data.
                let mut frames = vec![0x1b];
                frames.extend_from_slice(&data);
                self.send_at(level, frames, false)?;
            }
            Frame::Datagram(_) => self.datagrams += 1,
            Frame::ConnectionClose { code, reason, .. } | Frame::ApplicationClose { code, reason } => {
                self.closed = Some(format!("{code:#x} {}", String::from_utf8_lossy(reason)));
                self.counts.closed_by_relay += 1;
            }
            _ => {}
        }
        Ok(())
    }

    fn acknowledge(&mut self) -> Result<()> {
        for level in LEVELS {
            let space = &mut self.spaces[level as usize];
            if !std::mem::take(&mut space.owes_ack) || self.keys[level as usize].is_none() {
                continue;
            }
            let mut frames = Vec::new();
            match self.acks {
                // Only 1-RTT packets are acknowledged dishonestly, so that every handshake succeeds.
                Acks::None if level == EncryptionLevel::OneRtt => continue,
                Acks::Optimistic if level == EncryptionLevel::OneRtt => {
                    let ahead = space.received.len() as u64;
                    let ahead =
                        (space.expected..space.expected + ahead).chain(space.received.iter().copied());
                    packet::write_ack(&ahead.collect(), &mut frames);
                }
                Acks::Gapless if level == EncryptionLevel::OneRtt => {
                    packet::write_ack(&(0..space.expected).collect(), &mut frames)
                }
                _ => packet::write_ack(&space.received, &mut frames),
            }
            self.send_at(level, frames, false)?;
        }
        Ok(())
    }

    /// Sends packets again that were not acknowledged in time.
    fn repair(&mut self) -> Result<()> {
        let late = Instant::now().checked_sub(PROBE);
        LEVELS
            .into_iter()
            .try_for_each(|level| self.resend(level, |_, sent| late.is_some_and(|late| sent < late)))
    }

    fn resend(&mut self, level: EncryptionLevel, is_lost: impl Fn(u64, Instant) -> bool) -> Result<()> {
        let unacked = &mut self.spaces[level as usize].unacked;
        let lost: Vec<u64> = unacked
            .iter()
            .filter(|(number, (sent, _))| is_lost(**number, *sent))
            .map(|(number, _)| *number)
            .take(WINDOW)
            .collect();
        let lost: Vec<_> = lost.iter().filter_map(|number| unacked.remove(number)).collect();
        lost.into_iter().try_for_each(|(_, frames)| self.send_at(level, frames, true))
    }

    /// Changes to a new source port, as if a NAT had lost its state.
    pub fn hop(&mut self) -> Result<()> {
        self.socket = socket_to(self.socket.peer_addr()?)?;
        self.ping()
    }

    /// Changes to the next 1-RTT keys, provided that the relay already uses the current keys.
    pub fn update_keys(&mut self) -> Result<()> {
        self.keys[EncryptionLevel::OneRtt as usize].iter_mut().for_each(LevelKeys::update);
        self.ping()
    }

    /// Changes to another connection ID of the relay, if there is one, and makes the relay change to another ID of
    /// ours. Both sides retire the old IDs.
    pub fn change_ids(&mut self) -> Result<()> {
        let mut frames = Vec::new();
        if let Some((sequence, id)) = self.next_ids.pop_front() {
            let retired = std::mem::replace(&mut self.remote_sequence, sequence);
            self.remote = id;
            // Retire the old ID with a RETIRE_CONNECTION_ID frame.
            packet::write_fields(&[0x19, retired], &mut frames);
        }
        self.local_sequence += 1;
        packet::write_new_id(self.local_sequence, &random_id(), &mut frames);
        self.send(frames, true)
    }

    /// Sends a packet that only elicits an acknowledgement.
    pub fn ping(&mut self) -> Result<()> {
        let mut frames = Vec::new();
        frame::write_ping(&mut frames);
        self.send(frames, false)
    }

    /// Closes the connection. Returns the counts of data sent and received.
    pub fn close(mut self) -> Result<PeerCounts> {
        let mut frames = Vec::new();
        // Close with the application's CONNECTION_CLOSE frame (type 0x1d), without a reason.
        packet::write_fields(&[0x1d, 0, 0], &mut frames);
        self.send_at(EncryptionLevel::OneRtt, frames, false)?;
        Ok(self.counts)
    }

    /// Waits until everything that was sent reliably has been acknowledged.
    pub fn settle(&mut self) -> Result<()> {
        let mut frames = Vec::new();
        frame::write_ping(&mut frames);
        self.send(frames, true)?;
        self.pump(PATIENCE, |peer| peer.spaces[EncryptionLevel::OneRtt as usize].unacked.is_empty());
        Ok(())
    }
}

/// Creates a socket with a new port that is connected to `addr`.
fn socket_to(addr: SocketAddr) -> Result<UdpSocket> {
    let local: IpAddr = match addr {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((local, 0))?;
    socket.connect(addr)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

fn random_id() -> ConnectionId {
    let mut id = [0; ID_LEN];
    fastrand::fill(&mut id);
    ConnectionId::new(&id).unwrap_or_default()
}
