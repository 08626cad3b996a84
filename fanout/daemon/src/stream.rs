//! One stream in userspace: who asks, who reports, who is cut off; and what the kernel leaves to it.

use std::{
    collections::{BTreeMap, HashMap},
    net::{SocketAddr, UdpSocket},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use millrace_fanout::kernel::{self as kernel, Leg, LegOutcome, Ssrc};
use millrace_fanout::{
    breaker::{Heard, Sent},
    message::{Request, Say},
    receivers::{Command, FOREVER, Receivers, Why},
    reception::round_trip,
    rtcp::{self, Block},
    rtp::Packet,
    token::Mint,
};
use millrace_kernel::clock::monotonic_ns;
use parking_lot::Mutex;
use socket2::SockRef;
use tracing::{info, warn};

use super::{
    config::Stream as Settings,
    reports::{self, Reports},
    status::{self, Counts},
};

/// For how long the kernel sends to receivers that an operator has named without being told again: they end with this process,
/// also where its programs outlive it.
const PINNED: Duration = Duration::from_secs(10);
/// Without packets for so long, the next SSRC is the first.
const FORGOTTEN: Duration = Duration::from_secs(5);
/// Of a socket: what comes while the program is not attached, and requests.
const RECEIVE_BYTES: usize = 4 << 20;
const HEADERS_V4: usize = 28;
const HEADERS_V6: usize = 48;
/// An empty receiver report: what makes the host find out a receiver's link address, and is understood by any.
const KNOCK: [u8; 8] = [0x80, 201, 0, 1, 0, 0, 0, 0];

pub struct Stream {
    pub settings: Settings,
    kernel: Arc<kernel::Stream>,
    socket: UdpSocket,
    /// Where RTCP has a port of its own.
    rtcp: Option<UdpSocket>,
    state: Mutex<State>,
}

struct State {
    /// With what may change while it runs; what it is known by is in [`Stream::settings`], too.
    settings: Settings,
    receivers: Receivers,
    /// Of those who have a lease.
    reached: HashMap<SocketAddr, Reached>,
    events: BTreeMap<&'static str, u64>,
    /// Reports of all receivers.
    reports: Reports,
}

/// A receiver and what is known of it.
struct Reached {
    leg: Leg,
    /// The source that its reports are judged by.
    judged: Option<u32>,
    heard: Option<Heard>,
    /// Reports of this receiver.
    reports: Reports,
    /// When it was last looked at.
    no_neighbour: u64,
}

/// Which of a stream's sockets a datagram came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    Media,
    Reports,
}

impl Stream {
    /// Its sockets are those that `before` has there already: what waits in them is not lost.
    pub fn open(settings: Settings, fanout: &kernel::Fanout, before: &[Arc<Self>]) -> anyhow::Result<Self> {
        let bind = |at: SocketAddr| match before.iter().find_map(|stream| stream.socket_at(at)) {
            Some(socket) => Ok(socket.try_clone()?),
            None => bind(at, &settings.name),
        };
        let socket = bind(settings.listen)?;
        let rtcp = settings.listen_rtcp().map(bind).transpose()?;
        let kernel = fanout.open(&settings.kernel())?;
        let receivers = Receivers::new(&settings.name, settings.limits());
        let state = State {
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

    /// Whether it can go on by other settings.
    pub fn may_become(&self, settings: &Settings) -> bool {
        self.settings.is_same_stream(settings) && settings.legs() as usize <= self.kernel.receivers_max()
    }

    /// By other settings from now on, of the same stream. Receivers that stay miss nothing.
    pub fn change(&self, settings: &Settings) {
        let state = &mut self.state.lock();
        if state.settings == *settings {
            return;
        }
        let before = std::mem::replace(&mut state.settings, settings.clone());
        state.receivers.set_limits(settings.limits());
        state.reached.values().for_each(|reached| reached.leg.set_cap(settings.cap()));
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
        info!(stream = settings.name, "has other settings");
    }

    /// Others that were opened where it arrives have been closed.
    pub fn place(&self, fanout: &kernel::Fanout) {
        if let Err(error) = fanout.place(&self.kernel) {
            warn!(stream = self.settings.name, "userspace fans out: {error}");
        }
    }

    /// Nothing more is sent by it, nor decided.
    pub fn close(&self, fanout: &kernel::Fanout) {
        self.state.lock().reached.clear();
        if let Err(error) = fanout.close(&self.kernel) {
            warn!(stream = self.settings.name, "cannot be closed: {error}");
        }
    }

    /// Its name in the kernel's events.
    pub fn number(&self) -> u32 {
        self.kernel.number()
    }

    pub fn socket(&self, door: Door) -> Option<&UdpSocket> {
        match door {
            Door::Media => Some(&self.socket),
            Door::Reports => self.rtcp.as_ref(),
        }
    }

    /// A receiver by its name in the kernel's events, and the other way around.
    pub fn receiver(&self, number: u32) -> Option<SocketAddr> {
        let state = self.state.lock();
        state.reached.iter().find(|(_, it)| it.leg.number() == number).map(|(who, _)| *who)
    }

    pub fn receiver_number(&self, who: SocketAddr) -> Option<u32> {
        self.state.lock().reached.get(&who).map(|it| it.leg.number())
    }

    /// A datagram that came to one of its sockets.
    pub fn receive(&self, mint: &Mint, datagram: &[u8], from: SocketAddr, door: Door) {
        let now_ns = monotonic_ns();
        let state = &mut self.state.lock();
        if from == self.settings.sender || from == self.settings.sender_rtcp() {
            self.fan_out(state, datagram, now_ns);
        } else if Request::is_meant(datagram) && door == Door::Media {
            self.answer(state, mint, datagram, from, now_ns);
        } else if state.reached.contains_key(&from)
            && matches!(Packet::read(datagram), Some(Packet::Control { .. }))
        {
            self.hear(state, datagram, from, now_ns, door);
        } else {
            state.count("foreign");
        }
    }

    /// What the kernel has left to userspace, for the same receivers by the same caps.
    fn fan_out(&self, state: &mut State, datagram: &[u8], now_ns: u64) {
        let Some(packet) = Packet::read(datagram) else {
            return state.count("not_rtp");
        };
        if !self.kernel.takes(packet.ssrc()) {
            return state.count("other_ssrc");
        }
        self.kernel.count(datagram.len(), now_ns);
        if let Packet::Control { ntp_middle: Some(middle), .. } = packet {
            self.kernel.note_report(middle, now_ns);
        }
        state.count("user_packets");
        let headers = if self.settings.listen.is_ipv4() { HEADERS_V4 } else { HEADERS_V6 };
        let mut unsent = 0;
        for (who, reached) in &state.reached {
            let outcome = reached.leg.admit(datagram.len() + headers, datagram.len(), now_ns);
            if outcome == LegOutcome::Sent && self.socket.send_to(datagram, who).is_err() {
                unsent += 1;
            }
        }
        *state.events.entry("user_unsent").or_default() += unsent;
    }

    fn answer(&self, state: &mut State, mint: &Mint, datagram: &[u8], from: SocketAddr, now_ns: u64) {
        let Some(request) = Request::read(datagram) else {
            return state.count("malformed");
        };
        let now = Duration::from_nanos(now_ns);
        let sent = state.reached.get(&from).map_or(Sent::default(), Reached::sent);
        let (mut answer, command) = state.receivers.ask(mint, &request, from, sent, now);
        // It is answered by what it has.
        if command.is_some_and(|command| !self.apply(state, command)) {
            answer = state.receivers.take_back(from, answer);
        }
        state.count(match answer.what {
            Say::Prove(_) => "tokens",
            Say::Lease { .. } => "leases",
            Say::Ended => "ended",
            Say::Refused { why, .. } => why.name(),
        });
        if self.socket.send_to(&answer.encode(), from).is_err() {
            state.count("unanswered");
        }
    }

    /// A receiver's RTCP: it is judged, and goes on to the sender as it is.
    fn hear(&self, state: &mut State, datagram: &[u8], from: SocketAddr, now_ns: u64, door: Door) {
        let now = Duration::from_nanos(now_ns);
        let Some(reached) = state.reached.get_mut(&from) else { return };
        let sent = reached.sent();
        let heard = match self.settings.encrypted {
            true => None,
            false => {
                let Some(heard) = self.read(reached, datagram, now_ns) else {
                    return state.count("malformed");
                };
                let Some(heard) = heard else { return self.pass_on(state, datagram, from, now_ns, door) };
                reached.heard = Some(heard);
                Some(heard)
            }
        };
        state.count("reports");
        if let Some(command) = state.receivers.heard(from, heard, sent, now) {
            self.apply(state, command);
        }
        self.pass_on(state, datagram, from, now_ns, door);
    }

    /// What is said of the source that the receiver is judged by: `None` where it is no RTCP, `Some(None)` where nothing is said.
    fn read(&self, reached: &mut Reached, datagram: &[u8], now_ns: u64) -> Option<Option<Heard>> {
        let wanted = self.kernel.media().ssrc.or(reached.judged);
        let (mut first, mut found) = (None, None);
        rtcp::walk(datagram, |block| {
            first = first.or(Some(block));
            found = found.or(Some(block).filter(|block| Some(block.ssrc) == wanted));
        })?;
        let block = found.or(first.filter(|_| self.kernel.media().ssrc.is_none()));
        reached.judged = block.map(|block| block.ssrc).or(reached.judged);
        Some(block.map(|block| Heard {
            highest: block.highest,
            fraction_lost: block.fraction_lost,
            round_trip: self.round_trip(&block, now_ns),
        }))
    }

    fn round_trip(&self, block: &Block, now_ns: u64) -> Option<Duration> {
        let reports = self.kernel.reports();
        let report = reports.iter().find(|report| report.ntp_middle == block.last_report)?;
        Some(round_trip(block, report.passed_us, (now_ns / 1000) as u32))
    }

    /// To the sender, up to so many in a second.
    fn pass_on(&self, state: &mut State, datagram: &[u8], from: SocketAddr, now_ns: u64, door: Door) {
        if !state.may_report(from, now_ns / 1_000_000_000) {
            return state.count("reports_kept");
        }
        let socket = self.socket(door).unwrap_or(&self.socket);
        match socket.send_to(datagram, self.settings.sender_rtcp()) {
            Ok(_) => state.count("reports_passed"),
            Err(_) => state.count("reports_kept"),
        }
    }

    /// A few times a second: leases that end, receivers that are silent, link addresses that are not known.
    pub fn tick(&self) {
        let now_ns = monotonic_ns();
        let now = Duration::from_nanos(now_ns);
        let state = &mut self.state.lock();
        let State { receivers, reached, .. } = &mut **state;
        let sent = |who| reached.get(&who).map_or(Sent::default(), Reached::sent);
        for command in receivers.tick(now, sent) {
            self.apply(state, command);
        }
        self.keep_pinned(state, now);
        for (who, reached) in &mut state.reached {
            let unknown = reached.leg.copies(LegOutcome::NoNeighbour);
            if unknown > std::mem::replace(&mut reached.no_neighbour, unknown) {
                let _ = self.socket.send_to(&KNOCK, who);
            }
        }
        let last = Duration::from_nanos(self.kernel.media().last_ns);
        if self.settings.ssrc() == Ssrc::First && now.saturating_sub(last) > FORGOTTEN {
            self.kernel.forget_ssrc();
        }
    }

    fn keep_pinned(&self, state: &State, now: Duration) {
        let pinned = state.receivers.leased().filter(|(_, pinned)| *pinned);
        for reached in pinned.filter_map(|(who, _)| state.reached.get(&who)) {
            reached.leg.renew(nanos(now + PINNED));
        }
    }

    /// The one place where what was decided becomes the kernel's state. `false`: it has no room.
    fn apply(&self, state: &mut State, command: Command) -> bool {
        let name = &self.settings.name;
        match command {
            Command::Add { who, until } => {
                let pinned = Duration::from_nanos(monotonic_ns()) + PINNED;
                let until = if until == FOREVER { pinned } else { until };
                match self.kernel.add(who, state.settings.cap(), nanos(until)) {
                    Ok(leg) => {
                        info!(stream = name, receiver = %who, "receives");
                        let reports = Reports::default();
                        let reached = Reached { leg, judged: None, heard: None, reports, no_neighbour: 0 };
                        state.reached.insert(who, reached);
                        let _ = self.socket.send_to(&KNOCK, who);
                    }
                    Err(error) => {
                        warn!(stream = name, receiver = %who, "cannot receive: {error}");
                        return false;
                    }
                }
            }
            Command::Renew { who, until } => {
                if let Some(reached) = state.reached.get(&who) {
                    reached.leg.renew(nanos(until));
                }
            }
            Command::Remove { who, why } => {
                state.reached.remove(&who);
                match why {
                    Why::Asked => info!(stream = name, receiver = %who, "receives no more: it asked for it"),
                    Why::Unnamed => {
                        info!(stream = name, receiver = %who, "receives no more: it is not named any more")
                    }
                    Why::Expired => {
                        info!(stream = name, receiver = %who, "receives no more: its lease is over")
                    }
                    Why::Cut(trip) => {
                        state.count(match trip.name() {
                            "silent" => "cut_silent",
                            "nothing" => "cut_nothing",
                            _ => "cut_congestion",
                        });
                        warn!(stream = name, receiver = %who, reason = trip.name(), "cut off");
                    }
                }
            }
        }
        true
    }

    pub fn status(&self) -> status::Stream {
        let now_ns = monotonic_ns();
        let state = self.state.lock();
        let media = self.kernel.media();
        let idle = (media.last_ns > 0).then(|| now_ns.saturating_sub(media.last_ns) as f64 / 1e9);
        let receivers = state
            .receivers
            .leased()
            .filter_map(|(who, pinned)| Some(state.reached.get(&who)?.status(who, pinned)));
        let paused = state.receivers.paused(Duration::from_nanos(now_ns));
        status::Stream {
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

/// What is counted of a stream in userspace; `docs/fanout.md` says what each is.
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

impl State {
    fn may_report(&mut self, from: SocketAddr, second: u64) -> bool {
        let (most, receivers) = (self.settings.max_reports_per_s, self.reached.len());
        let own = self.reached.get_mut(&from).map(|reached| &mut reached.reports);
        own.is_some_and(|own| reports::take(&mut self.reports, own, second, most, receivers))
    }

    fn count(&mut self, what: &'static str) {
        *self.events.entry(what).or_default() += 1;
    }
}

impl Reached {
    fn sent(&self) -> Sent {
        let (packets, bytes) = self.leg.sent();
        Sent { packets, bytes }
    }

    fn status(&self, address: SocketAddr, pinned: bool) -> status::Receiver {
        let (packets, bytes) = self.leg.sent();
        let dropped = LegOutcome::ALL.into_iter().filter(|outcome| *outcome != LegOutcome::Sent);
        let dropped: Counts = dropped
            .map(|outcome| (outcome.name().to_owned(), self.leg.copies(outcome)))
            .filter(|(_, count)| *count > 0)
            .collect();
        let lost = self.heard.map(|heard| f64::from(heard.fraction_lost) / 2.56);
        let trip = self.heard.and_then(|heard| heard.round_trip).map(|trip| trip.as_secs_f64() * 1e3);
        status::Receiver { address, pinned, packets, bytes, lost_percent: lost, round_trip_ms: trip, dropped }
    }
}

fn bind(at: SocketAddr, stream: &str) -> anyhow::Result<UdpSocket> {
    let socket = UdpSocket::bind(at).with_context(|| format!("stream {stream:?}: cannot listen on {at}"))?;
    socket.set_nonblocking(true)?;
    // As much as the system gives.
    let _ = SockRef::from(&socket).set_recv_buffer_size(RECEIVE_BYTES);
    Ok(socket)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
