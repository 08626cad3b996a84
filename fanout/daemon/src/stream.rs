//! One stream in userspace: requests, reports, the circuit breaker, and packets that the kernel leaves to userspace.

use std::{
    collections::{BTreeMap, HashMap},
    net::{SocketAddr, UdpSocket},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use millrace_fanout::kernel::{self as kernel, CopyOutcome, ReceiverCopy, Ssrc};
use millrace_fanout::{
    breaker::{ReceiverReport, ReceiverSent},
    message::{ReceiverRequest, RequestOutcome},
    receivers::{Command, FOREVER, RemovalReason, StreamReceivers},
    reception::round_trip,
    rtcp::{self, Block},
    rtp::DatagramKind,
    token::Mint,
};
use millrace_kernel::clock::monotonic_ns;
use parking_lot::Mutex;
use socket2::SockRef;
use tracing::{info, warn};

use super::{
    config::StreamSection as Settings,
    reports::{self, Reports},
    status::{self, CounterStatus},
};

/// Length of the lease in the kernel for receivers that an operator has named. This process renews the lease. If the
/// process ends, the receivers get no packets after the lease, even if the BPF program stays attached.
const PINNED: Duration = Duration::from_secs(10);
/// Time without packets after which another SSRC may become the one that is forwarded.
const FORGOTTEN: Duration = Duration::from_secs(5);
/// Receive buffer of a socket, in bytes. The socket receives requests, and all packets while the BPF program is not
/// attached.
const RECEIVE_BYTES: usize = 4 << 20;
const HEADERS_V4: usize = 28;
const HEADERS_V6: usize = 48;
/// An empty receiver report. It makes the host find a receiver's link address, and every receiver ignores it.
const KNOCK: [u8; 8] = [0x80, 201, 0, 1, 0, 0, 0, 0];

/// A stream with its sockets, its receivers and its state in the kernel.
pub struct ServedRtpStream {
    pub settings: Settings,
    kernel: Arc<kernel::SenderStream>,
    socket: UdpSocket,
    /// The socket for RTCP, if the sender's RTCP arrives at a port of its own.
    rtcp: Option<UdpSocket>,
    state: Mutex<StreamState>,
}

struct StreamState {
    /// Settings that may change while the stream runs. [`ServedRtpStream::settings`] also has the settings that
    /// identify the stream.
    settings: Settings,
    receivers: StreamReceivers,
    /// Receivers that have a lease.
    reached: HashMap<SocketAddr, ReachedReceiver>,
    events: BTreeMap<&'static str, u64>,
    /// Count of the RTCP reports of all receivers that were passed on to the sender.
    reports: Reports,
}

/// A receiver and its state.
struct ReachedReceiver {
    receiver: ReceiverCopy,
    /// SSRC of the source whose report blocks drive the receiver's circuit breaker.
    judged: Option<u32>,
    heard: Option<ReceiverReport>,
    /// Count of this receiver's RTCP reports that were passed on to the sender.
    reports: Reports,
    /// Number of packets that could not be sent because the receiver's link address was not known, as read at the
    /// latest periodic check.
    no_neighbour: u64,
}

/// The socket of a stream that a datagram arrived at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketKind {
    Media,
    Reports,
}

impl ServedRtpStream {
    /// Opens a stream. If one of the earlier streams `before` has the same address, the new stream takes over the
    /// earlier stream's sockets, so that packets waiting in the sockets are not lost.
    pub fn open(settings: Settings, fanout: &kernel::Fanout, before: &[Arc<Self>]) -> anyhow::Result<Self> {
        let bind = |at: SocketAddr| match before.iter().find_map(|stream| stream.socket_at(at)) {
            Some(socket) => Ok(socket.try_clone()?),
            None => bind(at, &settings.name),
        };
        let socket = bind(settings.listen)?;
        let rtcp = settings.listen_rtcp().map(bind).transpose()?;
        let kernel = fanout.open(&settings.kernel())?;
        let receivers = StreamReceivers::new(&settings.name, settings.limits());
        let state = StreamState {
            settings: settings.clone(),
            receivers,
            reached: HashMap::new(),
            events: BTreeMap::new(),
            reports: Reports::default(),
        };
        let stream = Self { settings, kernel, socket, rtcp, state: Mutex::new(state) };
        stream.pin();
        Ok(stream)
    }

    fn pin(&self) {
        let state = &mut self.state.lock();
        for pinned in &self.settings.receiver {
            let command = state.receivers.pin(pinned.address, pinned.breaker);
            self.apply(state, command);
        }
    }

    fn socket_at(&self, at: SocketAddr) -> Option<&UdpSocket> {
        match at {
            _ if at == self.settings.listen => Some(&self.socket),
            _ if Some(at) == self.settings.listen_rtcp() => self.rtcp.as_ref(),
            _ => None,
        }
    }

    /// Reports whether the stream can change to `settings` without being closed.
    pub fn may_become(&self, settings: &Settings) -> bool {
        self.settings.is_same_stream(settings) && settings.receivers() as usize <= self.kernel.receivers_max()
    }

    /// Applies new settings to the stream. A receiver that remains under the new settings misses no packets.
    pub fn change(&self, settings: &Settings) {
        let state = &mut self.state.lock();
        if state.settings == *settings {
            return;
        }
        let before = std::mem::replace(&mut state.settings, settings.clone());
        state.receivers.set_limits(settings.limits());
        state.reached.values().for_each(|reached| reached.receiver.set_cap(settings.cap()));
        for gone in
            before.receiver.iter().filter(|it| settings.receiver.iter().all(|new| new.address != it.address))
        {
            let command = state.receivers.unpin(gone.address);
            command.map(|command| self.apply(state, command));
        }
        for new in settings.receiver.iter().filter(|it| !before.receiver.contains(it)) {
            let command = state.receivers.pin(new.address, new.breaker);
            self.apply(state, command);
        }
        info!(stream = settings.name, "changed the settings of a stream");
    }

    /// Directs packets for the stream's address to this stream again, after another stream at this address was closed.
    pub fn place(&self, fanout: &kernel::Fanout) {
        if let Err(error) = fanout.place(&self.kernel) {
            warn!(
                stream = self.settings.name,
                "the kernel cannot take the stream's packets, so userspace fans them out: {error}"
            );
        }
    }

    /// Stops the stream: its receivers are removed, and the BPF program no longer forwards it.
    pub fn close(&self, fanout: &kernel::Fanout) {
        self.state.lock().reached.clear();
        if let Err(error) = fanout.close(&self.kernel) {
            warn!(stream = self.settings.name, "cannot close the stream in the kernel: {error}");
        }
    }

    /// Returns the number that identifies the stream in the kernel's trace events.
    pub fn number(&self) -> u32 {
        self.kernel.number()
    }

    /// Returns the stream's socket for RTP or RTCP, or `None` if RTCP has no port of its own.
    pub fn socket(&self, kind: SocketKind) -> Option<&UdpSocket> {
        match kind {
            SocketKind::Media => Some(&self.socket),
            SocketKind::Reports => self.rtcp.as_ref(),
        }
    }

    /// Returns the address of the receiver with this number, which identifies the receiver in the kernel's trace
    /// events.
    pub fn receiver(&self, number: u32) -> Option<SocketAddr> {
        let state = self.state.lock();
        state.reached.iter().find(|(_, it)| it.receiver.number() == number).map(|(who, _)| *who)
    }

    /// Returns the number that identifies the receiver in the kernel's trace events.
    pub fn receiver_number(&self, who: SocketAddr) -> Option<u32> {
        self.state.lock().reached.get(&who).map(|it| it.receiver.number())
    }

    /// Handles a datagram that arrived at one of the stream's sockets.
    pub fn receive(&self, mint: &Mint, datagram: &[u8], from: SocketAddr, kind: SocketKind) {
        let now_ns = monotonic_ns();
        let state = &mut self.state.lock();
        if from == self.settings.sender || from == self.settings.sender_rtcp() {
            self.fan_out(state, datagram, now_ns);
        } else if ReceiverRequest::is_meant(datagram) && kind == SocketKind::Media {
            self.answer(state, mint, datagram, from, now_ns);
        } else if state.reached.contains_key(&from)
            && matches!(DatagramKind::read(datagram), Some(DatagramKind::Control { .. }))
        {
            self.on_datagram(state, datagram, from, now_ns, kind);
        } else {
            state.count("foreign");
        }
    }

    /// Fans out a packet that the kernel left to userspace, to the same receivers and under the same rate limits as the
    /// BPF program would.
    fn fan_out(&self, state: &mut StreamState, datagram: &[u8], now_ns: u64) {
        let Some(packet) = DatagramKind::read(datagram) else {
            return state.count("not_rtp");
        };
        if !self.kernel.takes(packet.ssrc()) {
            return state.count("other_ssrc");
        }
        self.kernel.count(datagram.len(), now_ns);
        if let DatagramKind::Control { ntp_middle: Some(middle), .. } = packet {
            self.kernel.note_report(middle, now_ns);
        }
        state.count("user_packets");
        // The rate limit of a receiver counts bytes from the IP header on.
        let headers = if self.settings.listen.is_ipv4() { HEADERS_V4 } else { HEADERS_V6 };
        let mut unsent = 0;
        for (who, reached) in &state.reached {
            let outcome = reached.receiver.admit(datagram.len() + headers, datagram.len(), now_ns);
            if outcome == CopyOutcome::Sent && self.socket.send_to(datagram, who).is_err() {
                unsent += 1;
            }
        }
        *state.events.entry("user_unsent").or_default() += unsent;
    }

    fn answer(&self, state: &mut StreamState, mint: &Mint, datagram: &[u8], from: SocketAddr, now_ns: u64) {
        let Some(request) = ReceiverRequest::read(datagram) else {
            return state.count("malformed");
        };
        let now = Duration::from_nanos(now_ns);
        let sent = state.reached.get(&from).map_or(ReceiverSent::default(), ReachedReceiver::sent);
        let (mut answer, command) = state.receivers.ask(mint, &request, from, sent, now);
        // If the kernel's table has no free entry for the receiver, its lease is revoked.
        if command.is_some_and(|command| !self.apply(state, command)) {
            answer = state.receivers.take_back(from, answer);
        }
        state.count(match answer.what {
            RequestOutcome::Prove(_) => "tokens",
            RequestOutcome::Lease { .. } => "leases",
            RequestOutcome::Ended => "ended",
            RequestOutcome::Refused { why, .. } => why.name(),
        });
        if self.socket.send_to(&answer.encode(), from).is_err() {
            state.count("unanswered");
        }
    }

    /// Handles RTCP of a receiver: its reports drive the circuit breaker, and the datagram is passed on to the sender
    /// unchanged.
    fn on_datagram(
        &self,
        state: &mut StreamState,
        bytes: &[u8],
        from: SocketAddr,
        at_ns: u64,
        kind: SocketKind,
    ) {
        let now = Duration::from_nanos(at_ns);
        let Some(reached) = state.reached.get_mut(&from) else { return };
        let sent = reached.sent();
        let heard = match self.settings.encrypted {
            // RTCP of an SRTP stream is encrypted, so a datagram shows only that its receiver still answers.
            true => None,
            false => {
                let Some(heard) = self.read(reached, bytes, at_ns) else {
                    return state.count("malformed");
                };
                let Some(heard) = heard else { return self.pass_on(state, bytes, from, at_ns, kind) };
                reached.heard = Some(heard);
                Some(heard)
            }
        };
        state.count("reports");
        if let Some(command) = state.receivers.on_report(from, heard, sent, now) {
            self.apply(state, command);
        }
        self.pass_on(state, bytes, from, at_ns, kind);
    }

    /// Returns the report block about the source that drives the receiver's circuit breaker. `None` means that the
    /// datagram is no RTCP, and `Some(None)` that it has no such block.
    fn read(
        &self,
        reached: &mut ReachedReceiver,
        bytes: &[u8],
        at_ns: u64,
    ) -> Option<Option<ReceiverReport>> {
        let wanted = self.kernel.media().ssrc.or(reached.judged);
        let mut first = None;
        let mut found = None;
        rtcp::walk(bytes, |block| {
            first = first.or(Some(block));
            found = found.or(Some(block).filter(|block| Some(block.ssrc) == wanted));
        })?;
        let block = found.or(first.filter(|_| self.kernel.media().ssrc.is_none()));
        reached.judged = block.map(|block| block.ssrc).or(reached.judged);
        Some(block.map(|block| ReceiverReport {
            highest: block.highest,
            fraction_lost: block.fraction_lost,
            round_trip: self.round_trip(&block, at_ns),
        }))
    }

    fn round_trip(&self, block: &Block, at_ns: u64) -> Option<Duration> {
        let reports = self.kernel.reports();
        let report = reports.iter().find(|report| report.ntp_middle == block.last_report)?;
        Some(round_trip(block, report.passed_us, (at_ns / 1000) as u32))
    }

    /// Passes a datagram on to the sender, unless the limit of reports per second is reached.
    fn pass_on(&self, state: &mut StreamState, bytes: &[u8], from: SocketAddr, at_ns: u64, kind: SocketKind) {
        if !state.may_report(from, at_ns / 1_000_000_000) {
            return state.count("reports_kept");
        }
        let socket = self.socket(kind).unwrap_or(&self.socket);
        match socket.send_to(bytes, self.settings.sender_rtcp()) {
            Ok(_) => state.count("reports_passed"),
            Err(_) => state.count("reports_kept"),
        }
    }

    /// Ends expired leases, cuts off silent receivers, and makes the host find link addresses that are not known. Call
    /// it a few times a second.
    pub fn tick(&self) {
        let now_ns = monotonic_ns();
        let now = Duration::from_nanos(now_ns);
        let state = &mut self.state.lock();
        let StreamState { receivers, reached, .. } = &mut **state;
        let sent = |who| reached.get(&who).map_or(ReceiverSent::default(), ReachedReceiver::sent);
        for command in receivers.tick(now, sent) {
            self.apply(state, command);
        }
        self.keep_pinned(state, now);
        for (who, reached) in &mut state.reached {
            let unknown = reached.receiver.copies(CopyOutcome::NoNeighbour);
            if unknown > std::mem::replace(&mut reached.no_neighbour, unknown) {
                // Sending through the host's network stack makes it look up the link address. Errors are ignored, since
                // this is repeated.
                let _ = self.socket.send_to(&KNOCK, who);
            }
        }
        let last = Duration::from_nanos(self.kernel.media().last_ns);
        // A sender that restarts may choose another SSRC, which would otherwise never be forwarded.
        if self.settings.ssrc() == Ssrc::First && now.saturating_sub(last) > FORGOTTEN {
            self.kernel.forget_ssrc();
        }
    }

    fn keep_pinned(&self, state: &StreamState, now: Duration) {
        let pinned = state.receivers.leased().filter(|(_, pinned)| *pinned);
        for reached in pinned.filter_map(|(who, _)| state.reached.get(&who)) {
            reached.receiver.renew(nanos(now + PINNED));
        }
    }

    /// Makes one change to the receivers in the kernel, such as adding one. No other function changes them. Returns
    /// false if the kernel's table is full.
    fn apply(&self, state: &mut StreamState, command: Command) -> bool {
        let name = &self.settings.name;
        match command {
            Command::Add { who, until } => {
                let pinned = Duration::from_nanos(monotonic_ns()) + PINNED;
                // A receiver that the settings name has no end of lease, so the kernel gets a short lease that this
                // process renews.
                let until = if until == FOREVER { pinned } else { until };
                match self.kernel.add(who, state.settings.cap(), nanos(until)) {
                    Ok(receiver) => {
                        info!(stream = name, receiver = %who, "added a receiver to the stream");
                        let reports = Reports::default();
                        let reached =
                            ReachedReceiver { receiver, judged: None, heard: None, reports, no_neighbour: 0 };
                        state.reached.insert(who, reached);
                        let _ = self.socket.send_to(&KNOCK, who);
                    }
                    Err(error) => {
                        warn!(stream = name, receiver = %who, "cannot add the receiver to the stream in the kernel: {error}");
                        return false;
                    }
                }
            }
            Command::Renew { who, until } => {
                if let Some(reached) = state.reached.get(&who) {
                    reached.receiver.renew(nanos(until));
                }
            }
            Command::Remove { who, why } => {
                state.reached.remove(&who);
                match why {
                    RemovalReason::Asked => {
                        info!(stream = name, receiver = %who, "removed a receiver from the stream: it left")
                    }
                    RemovalReason::Unnamed => {
                        info!(stream = name, receiver = %who, "removed a receiver from the stream: the settings no longer name it")
                    }
                    RemovalReason::Expired => {
                        info!(stream = name, receiver = %who, "removed a receiver from the stream: the lease has ended")
                    }
                    RemovalReason::Cut(trip) => {
                        state.count(match trip.name() {
                            "silent" => "cut_silent",
                            "nothing" => "cut_nothing",
                            _ => "cut_congestion",
                        });
                        warn!(stream = name, receiver = %who, reason = trip.name(), "the circuit breaker has cut off a receiver of the stream");
                    }
                }
            }
        }
        true
    }

    /// Returns the status of the stream.
    pub fn status(&self) -> status::StreamStatus {
        let now_ns = monotonic_ns();
        let state = self.state.lock();
        let media = self.kernel.media();
        let idle = (media.last_ns > 0).then(|| now_ns.saturating_sub(media.last_ns) as f64 / 1e9);
        let receivers = state
            .receivers
            .leased()
            .filter_map(|(who, pinned)| Some(state.reached.get(&who)?.status(who, pinned)));
        let paused = state.receivers.paused(Duration::from_nanos(now_ns));
        status::StreamStatus {
            name: self.settings.name.clone(),
            listen: self.settings.listen.to_string(),
            sender: self.settings.sender.to_string(),
            ssrc: media.ssrc.map(|ssrc| format!("{ssrc:08x}")),
            packets: media.packets,
            bytes: media.bytes,
            idle_s: idle,
            receivers: receivers.collect(),
            paused: paused
                .map(|(address, left)| status::Paused { address, seconds: left.as_secs() })
                .collect(),
            events: EVENTS
                .iter()
                .map(|name| ((*name).to_owned(), state.events.get(name).copied().unwrap_or(0)))
                .collect(),
        }
    }
}

/// Counters of a stream in userspace. `docs/guide/fanout.md` explains each.
pub const EVENTS: [&str; 20] = [
    "tokens",
    "leases",
    "ended",
    "unknown",
    "full",
    "full_address",
    "cut",
    "unanswered",
    "malformed",
    "foreign",
    "reports",
    "reports_passed",
    "reports_kept",
    "cut_silent",
    "cut_nothing",
    "cut_congestion",
    "user_packets",
    "user_unsent",
    "other_ssrc",
    "not_rtp",
];

impl StreamState {
    fn may_report(&mut self, from: SocketAddr, second: u64) -> bool {
        let most = self.settings.max_reports_per_s;
        let receivers = self.reached.len();
        let own = self.reached.get_mut(&from).map(|reached| &mut reached.reports);
        own.is_some_and(|own| reports::take(&mut self.reports, own, second, most, receivers))
    }

    fn count(&mut self, what: &'static str) {
        *self.events.entry(what).or_default() += 1;
    }
}

impl ReachedReceiver {
    fn sent(&self) -> ReceiverSent {
        let (packets, bytes) = self.receiver.sent();
        ReceiverSent { packets, bytes }
    }

    fn status(&self, address: SocketAddr, pinned: bool) -> status::ReceiverStatus {
        let (packets, bytes) = self.receiver.sent();
        let dropped = CopyOutcome::ALL.into_iter().filter(|outcome| *outcome != CopyOutcome::Sent);
        let dropped: CounterStatus = dropped
            .map(|outcome| (outcome.name().to_owned(), self.receiver.copies(outcome)))
            .filter(|(_, count)| *count > 0)
            .collect();
        // A report block gives the fraction of lost packets in 256ths (RFC 3550, section 6.4.1).
        let lost = self.heard.map(|heard| f64::from(heard.fraction_lost) / 2.56);
        let trip = self.heard.and_then(|heard| heard.round_trip).map(|trip| trip.as_secs_f64() * 1e3);
        status::ReceiverStatus {
            address,
            pinned,
            packets,
            bytes,
            lost_percent: lost,
            round_trip_ms: trip,
            dropped,
        }
    }
}

fn bind(at: SocketAddr, stream: &str) -> anyhow::Result<UdpSocket> {
    let socket = UdpSocket::bind(at).with_context(|| format!("stream {stream:?}: cannot listen on {at}"))?;
    socket.set_nonblocking(true)?;
    // The kernel may grant a smaller receive buffer.
    let _ = SockRef::from(&socket).set_recv_buffer_size(RECEIVE_BYTES);
    Ok(socket)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
