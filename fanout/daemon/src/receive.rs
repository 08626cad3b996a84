//! `millrace fanout receive`: asks for a stream, renews the lease, reports reception, and hands the packets to a
//! player that can do none of this.

use std::{
    io,
    net::{SocketAddr, ToSocketAddrs as _, UdpSocket},
    os::fd::AsFd,
    str::FromStr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use millrace_daemon::render::print;
use millrace_fanout::{
    message::{NAME_MAX, ReceiverAction, ReceiverRequest, RelayAnswer, RequestOutcome, RequestRefusal},
    reception::Reception,
    rtp::DatagramKind,
    token::ReceiverToken,
};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use socket2::SockRef;

/// A relay and a stream, written `HOST:PORT/STREAM`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceiverSource {
    relay: String,
    stream: String,
}

impl FromStr for ReceiverSource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('/').filter(|(relay, _)| relay.contains(':'));
        let (relay, stream) =
            parts.ok_or_else(|| format!("`{text}` is not HOST:PORT/STREAM, such as 192.0.2.1:5004/live"))?;
        if !(1..=NAME_MAX).contains(&stream.len()) {
            return Err(format!("`{stream}` is not a stream's name, which has 1 to {NAME_MAX} bytes"));
        }
        Ok(Self { relay: relay.to_owned(), stream: stream.to_owned() })
    }
}

/// Arguments of the receiver.
pub struct ReceiverSetup {
    /// The stream, and the relay that has it.
    pub source: ReceiverSource,
    /// The player's address for RTP.
    pub to: SocketAddr,
    /// The player's address for RTCP, if it has another port.
    pub to_rtcp: Option<SocketAddr>,
    /// Length of the lease that the receiver requests.
    pub lease: Duration,
    /// Time after which the receiver ends by itself. `None`: it receives until it is stopped.
    pub duration: Option<Duration>,
}

const REPORT: Duration = Duration::from_secs(1);
const RECEIVE_BYTES: usize = 4 << 20;
const DATAGRAM_MAX: usize = 65_536;
/// Largest number of datagrams that are read in a row before timers are checked.
const BATCH: usize = 64;

/// Receives the stream until `stop` is readable, or until the configured time is over.
pub fn run(setup: &ReceiverSetup, stop: &impl AsFd) -> anyhow::Result<()> {
    let mut receiver = FanoutPlayer::open(setup)?;
    let end = setup.duration.and_then(|time| receiver.begin.checked_add(time));
    let mut buffer = vec![0; DATAGRAM_MAX];
    loop {
        receiver.work()?;
        let over = end.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()));
        if over.is_zero() || wait(stop, &receiver.relay, receiver.wait().min(over))? {
            break;
        }
        receiver.receive(&mut buffer)?;
    }
    receiver.end()
}

/// Waits until a datagram arrives, `stop` is readable, or the time has passed. Returns true if `stop` is readable.
fn wait(stop: &impl AsFd, relay: &UdpSocket, time: Duration) -> anyhow::Result<bool> {
    let mut ready =
        [PollFd::new(stop.as_fd(), PollFlags::POLLIN), PollFd::new(relay.as_fd(), PollFlags::POLLIN)];
    // The time is rounded up, so that the loop does not wake up too early again and again.
    let time = time.min(REPORT) + Duration::from_millis(1);
    match poll(&mut ready, PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX)) {
        Err(Errno::EINTR) => return Ok(false),
        polled => polled?,
    };
    Ok(ready[0].any().unwrap_or(false))
}

struct FanoutPlayer<'a> {
    setup: &'a ReceiverSetup,
    relay: UdpSocket,
    player: UdpSocket,
    asker: Asker,
    reception: Reception,
    /// SSRC of this receiver's reports.
    ssrc: u32,
    begin: Instant,
    report_at: Duration,
    packets: u64,
    bytes: u64,
}

impl<'a> FanoutPlayer<'a> {
    fn open(setup: &'a ReceiverSetup) -> anyhow::Result<Self> {
        let ReceiverSource { relay, stream } = &setup.source;
        let found = relay.to_socket_addrs().with_context(|| format!("cannot find {relay}"))?.next();
        let at = found.with_context(|| format!("{relay} has no address"))?;
        let any = if at.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let relay = UdpSocket::bind(any)?;
        relay.connect(at).with_context(|| format!("cannot reach {at}"))?;
        relay.set_nonblocking(true)?;
        // The kernel may grant a smaller receive buffer.
        let _ = SockRef::from(&relay).set_recv_buffer_size(RECEIVE_BYTES);
        let any = if setup.to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let seconds = u16::try_from(setup.lease.as_secs()).unwrap_or(u16::MAX).max(1);
        Ok(Self {
            setup,
            relay,
            player: UdpSocket::bind(any)?,
            asker: Asker::new(stream, seconds, random()?),
            reception: Reception::default(),
            ssrc: random()?,
            begin: Instant::now(),
            report_at: REPORT,
            packets: 0,
            bytes: 0,
        })
    }

    /// Sends the requests and reports that are due.
    fn work(&mut self) -> anyhow::Result<()> {
        let now = self.begin.elapsed();
        if let Some(request) = self.asker.ask(now)? {
            // An error is ignored: a request that is lost is repeated when no answer arrives.
            let _ = self.relay.send(&request.encode());
        }
        if self.report_at <= now {
            self.report_at = now + REPORT;
            if let Some(report) = self.reception.report(self.ssrc, now) {
                // An error is ignored: a lost report is not repeated, since the next one follows a second later.
                let _ = self.relay.send(&report);
            }
        }
        Ok(())
    }

    /// Returns the time until the next request or report is due.
    fn wait(&self) -> Duration {
        self.asker.next.min(self.report_at).saturating_sub(self.begin.elapsed())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> anyhow::Result<()> {
        for _ in 0..BATCH {
            match self.relay.recv(buffer) {
                Ok(len) => self.take(buffer.get(..len).unwrap_or_default())?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // An ICMP error is ignored. It says that no program listens at the relay's address, which missing
                // answers also show.
                Err(_) => {}
            }
        }
        Ok(())
    }

    fn take(&mut self, datagram: &[u8]) -> anyhow::Result<()> {
        let now = self.begin.elapsed();
        if let Some(answer) = RelayAnswer::read(datagram) {
            return match self.asker.on_answer(&answer, now)? {
                Some(said) => print(&format!("{said}\n")),
                None => Ok(()),
            };
        }
        let Some(packet) = DatagramKind::read(datagram) else { return Ok(()) };
        self.reception.packet(packet, now);
        let to = match packet {
            // An empty report of the relay is ignored. It only makes the two hosts find each other's link addresses.
            DatagramKind::Control { ssrc: 0, .. } => return Ok(()),
            DatagramKind::Control { .. } => self.setup.to_rtcp.unwrap_or(self.setup.to),
            DatagramKind::Media { .. } => self.setup.to,
        };
        self.packets += 1;
        self.bytes += datagram.len() as u64;
        // An error is ignored: the player may not be running yet, or may have ended.
        let _ = self.player.send_to(datagram, to);
        Ok(())
    }

    fn end(&mut self) -> anyhow::Result<()> {
        // An error is ignored: without this request, the lease ends by itself.
        let _ = self.relay.send(&self.asker.leave().encode());
        print(&format!("{} packets, {} bytes\n", self.packets, self.bytes))
    }
}

fn random() -> anyhow::Result<u32> {
    let number = ring::rand::generate::<[u8; 4]>(&ring::rand::SystemRandom::new());
    let number = number.map_err(|_| anyhow::anyhow!("the system gives no random numbers for a request"))?;
    // An SSRC of 0 stands for the relay itself, so this receiver's SSRC is never 0.
    Ok(u32::from_be_bytes(number.expose()).max(1))
}

/// Time without an answer from the relay after which a request is repeated.
const AGAIN: Duration = Duration::from_secs(1);
/// Time without any answer from the relay after which the receiver gives up.
const PATIENCE: Duration = Duration::from_secs(10);

/// The requests of a receiver: it asks for a lease, and renews the lease after a third of its time. Times count from
/// the receiver's start.
struct Asker {
    stream: String,
    seconds: u16,
    token: ReceiverToken,
    transaction: u32,
    /// Time of the next request.
    next: Duration,
    /// Whether the relay has answered any request.
    answered: bool,
    has_lease: bool,
}

impl Asker {
    fn new(stream: &str, seconds: u16, transaction: u32) -> Self {
        Self {
            stream: stream.to_owned(),
            seconds,
            token: ReceiverToken::default(),
            transaction,
            next: Duration::ZERO,
            answered: false,
            has_lease: false,
        }
    }

    /// Returns the request that is due now.
    ///
    /// # Errors
    /// Fails if the relay has never answered.
    fn ask(&mut self, now: Duration) -> anyhow::Result<Option<ReceiverRequest>> {
        if now < self.next {
            return Ok(None);
        }
        if !self.answered && now > PATIENCE {
            bail!(
                "the relay does not answer: check that `millrace fanout` listens on this address, and that firewalls pass UDP in both directions"
            );
        }
        self.next = now + AGAIN;
        self.transaction = self.transaction.wrapping_add(1);
        Ok(Some(self.request(ReceiverAction::Subscribe { seconds: self.seconds })))
    }

    /// Handles an answer of the relay. Returns a message for the user if the lease has begun or has been refused.
    ///
    /// # Errors
    /// Fails if the relay refuses the stream for good.
    fn on_answer(&mut self, answer: &RelayAnswer, now: Duration) -> anyhow::Result<Option<String>> {
        // An answer to an earlier request may arrive late, and only the latest request counts.
        if answer.transaction != self.transaction {
            return Ok(None);
        }
        self.answered = true;
        match answer.what {
            RequestOutcome::Prove(token) => {
                self.token = token;
                self.next = now;
                Ok(None)
            }
            RequestOutcome::Lease { seconds, token } => {
                self.token = token;
                // A third of the lease leaves time to repeat lost requests before the lease ends.
                self.next = now + Duration::from_secs(seconds.into()) / 3;
                let is_new = !std::mem::replace(&mut self.has_lease, true);
                Ok(is_new.then(|| format!("receiving {}, with a lease of {seconds} s", self.stream)))
            }
            RequestOutcome::Ended => Ok(None),
            RequestOutcome::Refused { why: why @ RequestRefusal::Cut, seconds } => {
                self.has_lease = false;
                self.next = now + Duration::from_secs(seconds.max(1).into());
                Ok(Some(format!("not receiving: {}; asking again in {seconds} s", why.text())))
            }
            RequestOutcome::Refused { why, .. } => bail!("{}: {}", self.stream, why.text()),
        }
    }

    fn leave(&self) -> ReceiverRequest {
        self.request(ReceiverAction::Unsubscribe)
    }

    fn request(&self, what: ReceiverAction) -> ReceiverRequest {
        ReceiverRequest {
            what,
            token: self.token,
            transaction: self.transaction,
            stream: self.stream.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn answer(asker: &Asker, what: RequestOutcome) -> RelayAnswer {
        RelayAnswer { what, transaction: asker.transaction }
    }

    #[test]
    fn fanout_source_is_host_port_and_stream() {
        let source: ReceiverSource = "[2001:db8::1]:5004/live/2".parse().unwrap();
        assert_eq!((source.relay.as_str(), source.stream.as_str()), ("[2001:db8::1]:5004", "live/2"));
        for wrong in ["live", "host/live", "host:1", "host:1/"] {
            assert!(wrong.parse::<ReceiverSource>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn receive_client_proves_its_address_and_renews_its_lease() {
        let mut asker = Asker::new("live", 30, 1);
        let first = asker.ask(Duration::ZERO).unwrap().unwrap();
        assert_eq!(
            (first.what, first.token),
            (ReceiverAction::Subscribe { seconds: 30 }, ReceiverToken::default())
        );
        assert_eq!(asker.ask(SECOND / 2).unwrap(), None);
        let token = ReceiverToken([7; 8]);
        let stale = RelayAnswer { what: RequestOutcome::Prove(token), transaction: 9 };
        assert_eq!(asker.on_answer(&stale, SECOND / 2).unwrap(), None);
        assert_eq!(asker.ask(SECOND / 2).unwrap(), None, "that was no answer to it");
        asker.on_answer(&answer(&asker, RequestOutcome::Prove(token)), SECOND / 2).unwrap();
        assert_eq!(asker.ask(SECOND / 2).unwrap().unwrap().token, token);
        let lease = RequestOutcome::Lease { seconds: 30, token: ReceiverToken([8; 8]) };
        let said = asker.on_answer(&answer(&asker, lease), SECOND).unwrap().unwrap();
        assert_eq!(said, "receiving live, with a lease of 30 s");
        assert_eq!(asker.ask(10 * SECOND).unwrap(), None);
        assert_eq!(asker.ask(11 * SECOND).unwrap().unwrap().token, ReceiverToken([8; 8]));
        assert_eq!(asker.on_answer(&answer(&asker, lease), 11 * SECOND).unwrap(), None, "it has one");
        assert_eq!(asker.leave().what, ReceiverAction::Unsubscribe);
        // The relay does not answer for a while, and the client keeps asking.
        assert!(asker.ask(100 * SECOND).unwrap().is_some());
    }

    #[test]
    fn receive_client_retries_after_cut_off_and_gives_up_if_relay_is_full() {
        let mut asker = Asker::new("live", 30, 1);
        asker.ask(Duration::ZERO).unwrap();
        let cut = RequestOutcome::Refused { why: RequestRefusal::Cut, seconds: 40 };
        let said = asker.on_answer(&answer(&asker, cut), SECOND).unwrap().unwrap();
        assert!(said.contains("asking again in 40 s"), "{said}");
        assert_eq!(asker.ask(40 * SECOND).unwrap(), None);
        assert!(asker.ask(41 * SECOND).unwrap().is_some());
        let full = RequestOutcome::Refused { why: RequestRefusal::Full, seconds: 1 };
        assert!(asker.on_answer(&answer(&asker, full), SECOND).is_err());
        let mut alone = Asker::new("live", 30, 1);
        for second in 0..=10 {
            assert!(alone.ask(second * SECOND).unwrap().is_some());
        }
        assert!(alone.ask(11 * SECOND).unwrap_err().to_string().starts_with("the relay does not answer"));
    }
}
