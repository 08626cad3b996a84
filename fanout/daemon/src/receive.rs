//! `millrace fanout receive`: asks for a stream, keeps asking, reports, and hands what comes over to a player that can do none of
//! this.

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
    message::{Answer, Ask, NAME_MAX, Refusal, Request, Say},
    reception::Reception,
    rtp::Packet,
    token::Token,
};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use socket2::SockRef;

/// `HOST:PORT/STREAM`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    relay: String,
    stream: String,
}

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('/').filter(|(relay, _)| relay.contains(':'));
        let (relay, stream) =
            parts.ok_or_else(|| format!("`{text}` is not HOST:PORT/STREAM, such as 192.0.2.1:5004/live"))?;
        if !(1..=NAME_MAX).contains(&stream.len()) {
            return Err(format!("`{stream}` is no stream's name: these have 1 to {NAME_MAX} bytes"));
        }
        Ok(Self { relay: relay.to_owned(), stream: stream.to_owned() })
    }
}

pub struct Setup {
    pub source: Source,
    pub to: SocketAddr,
    /// Where RTCP goes, if that is another port.
    pub to_rtcp: Option<SocketAddr>,
    /// Asked for each time.
    pub lease: Duration,
    pub duration: Option<Duration>,
}

const REPORT: Duration = Duration::from_secs(1);
const RECEIVE_BYTES: usize = 4 << 20;
const DATAGRAM_MAX: usize = 65_536;
/// Datagrams in a row, before the time is looked at.
const BATCH: usize = 64;

/// Until `stop` is readable, or the end of its time.
pub fn run(setup: &Setup, stop: &impl AsFd) -> anyhow::Result<()> {
    let mut receiver = Receiver::open(setup)?;
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

/// Whether it is to stop.
fn wait(stop: &impl AsFd, relay: &UdpSocket, time: Duration) -> anyhow::Result<bool> {
    let mut ready =
        [PollFd::new(stop.as_fd(), PollFlags::POLLIN), PollFd::new(relay.as_fd(), PollFlags::POLLIN)];
    // Rounded up, so that it does not look too early again and again.
    let time = time.min(REPORT) + Duration::from_millis(1);
    match poll(&mut ready, PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX)) {
        Err(Errno::EINTR) => return Ok(false),
        polled => polled?,
    };
    Ok(ready[0].any().unwrap_or(false))
}

struct Receiver<'a> {
    setup: &'a Setup,
    relay: UdpSocket,
    player: UdpSocket,
    asker: Asker,
    reception: Reception,
    /// Who reports.
    ssrc: u32,
    begin: Instant,
    report_at: Duration,
    packets: u64,
    bytes: u64,
}

impl<'a> Receiver<'a> {
    fn open(setup: &'a Setup) -> anyhow::Result<Self> {
        let Source { relay, stream } = &setup.source;
        let found = relay.to_socket_addrs().with_context(|| format!("cannot find {relay}"))?.next();
        let at = found.with_context(|| format!("{relay} has no address"))?;
        let any = if at.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let relay = UdpSocket::bind(any)?;
        relay.connect(at).with_context(|| format!("cannot reach {at}"))?;
        relay.set_nonblocking(true)?;
        // As much as the system gives.
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

    /// What is due.
    fn work(&mut self) -> anyhow::Result<()> {
        let now = self.begin.elapsed();
        if let Some(request) = self.asker.ask(now)? {
            // Whether it came shows in the answer.
            let _ = self.relay.send(&request.encode());
        }
        if self.report_at <= now {
            self.report_at = now + REPORT;
            if let Some(report) = self.reception.report(self.ssrc, now) {
                let _ = self.relay.send(&report);
            }
        }
        Ok(())
    }

    /// Until something is due.
    fn wait(&self) -> Duration {
        self.asker.next.min(self.report_at).saturating_sub(self.begin.elapsed())
    }

    fn receive(&mut self, buffer: &mut [u8]) -> anyhow::Result<()> {
        for _ in 0..BATCH {
            match self.relay.recv(buffer) {
                Ok(len) => self.take(buffer.get(..len).unwrap_or_default())?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // The relay's host says that nobody listens there: the asker finds out.
                Err(_) => {}
            }
        }
        Ok(())
    }

    fn take(&mut self, datagram: &[u8]) -> anyhow::Result<()> {
        let now = self.begin.elapsed();
        if let Some(answer) = Answer::read(datagram) {
            return match self.asker.hear(&answer, now)? {
                Some(said) => print(&format!("{said}\n")),
                None => Ok(()),
            };
        }
        let Some(packet) = Packet::read(datagram) else { return Ok(()) };
        self.reception.packet(packet, now);
        let to = match packet {
            // The relay's own, which is to make hosts find each other.
            Packet::Control { ssrc: 0, .. } => return Ok(()),
            Packet::Control { .. } => self.setup.to_rtcp.unwrap_or(self.setup.to),
            Packet::Media { .. } => self.setup.to,
        };
        self.packets += 1;
        self.bytes += datagram.len() as u64;
        // The player may come later, or be gone.
        let _ = self.player.send_to(datagram, to);
        Ok(())
    }

    fn end(&mut self) -> anyhow::Result<()> {
        let _ = self.relay.send(&self.asker.leave().encode());
        print(&format!("{} packets, {} bytes\n", self.packets, self.bytes))
    }
}

fn random() -> anyhow::Result<u32> {
    let number = ring::rand::generate::<[u8; 4]>(&ring::rand::SystemRandom::new());
    let number = number.map_err(|_| anyhow::anyhow!("there are no random numbers"))?;
    // 0 is the relay's.
    Ok(u32::from_be_bytes(number.expose()).max(1))
}

/// Without an answer, when it asks again.
const AGAIN: Duration = Duration::from_secs(1);
/// Without any answer at all.
const PATIENCE: Duration = Duration::from_secs(10);

/// Asks for a lease and for its renewal, at a third of it. Times are since its beginning.
struct Asker {
    stream: String,
    seconds: u16,
    token: Token,
    transaction: u32,
    /// When it asks.
    next: Duration,
    /// Whether anything was answered since it last asked for the first time.
    answered: bool,
    has_lease: bool,
}

impl Asker {
    fn new(stream: &str, seconds: u16, transaction: u32) -> Self {
        Self {
            stream: stream.to_owned(),
            seconds,
            token: Token::default(),
            transaction,
            next: Duration::ZERO,
            answered: false,
            has_lease: false,
        }
    }

    /// What is to be asked now.
    ///
    /// # Errors
    /// Nobody has ever answered.
    fn ask(&mut self, now: Duration) -> anyhow::Result<Option<Request>> {
        if now < self.next {
            return Ok(None);
        }
        if !self.answered && now > PATIENCE {
            bail!(
                "nobody answers: is it the address that `millrace fanout` listens on, and may UDP pass from here to there and back?"
            );
        }
        self.next = now + AGAIN;
        self.transaction = self.transaction.wrapping_add(1);
        Ok(Some(self.request(Ask::Subscribe { seconds: self.seconds })))
    }

    /// What an answer means; something to be said, perhaps.
    ///
    /// # Errors
    /// It will not be.
    fn hear(&mut self, answer: &Answer, now: Duration) -> anyhow::Result<Option<String>> {
        if answer.transaction != self.transaction {
            return Ok(None);
        }
        self.answered = true;
        match answer.what {
            Say::Prove(token) => {
                self.token = token;
                self.next = now;
                Ok(None)
            }
            Say::Lease { seconds, token } => {
                self.token = token;
                self.next = now + Duration::from_secs(seconds.into()) / 3;
                let is_new = !std::mem::replace(&mut self.has_lease, true);
                Ok(is_new.then(|| format!("receiving {}, for {seconds} s at a time", self.stream)))
            }
            Say::Ended => Ok(None),
            Say::Refused { why: why @ Refusal::Cut, seconds } => {
                self.has_lease = false;
                self.next = now + Duration::from_secs(seconds.max(1).into());
                Ok(Some(format!("not received: {}; asking again in {seconds} s", why.text())))
            }
            Say::Refused { why, .. } => bail!("{}: {}", self.stream, why.text()),
        }
    }

    fn leave(&self) -> Request {
        self.request(Ask::Unsubscribe)
    }

    fn request(&self, what: Ask) -> Request {
        Request { what, token: self.token, transaction: self.transaction, stream: self.stream.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn answer(asker: &Asker, what: Say) -> Answer {
        Answer { what, transaction: asker.transaction }
    }

    #[test]
    fn a_source_is_a_relay_and_a_stream() {
        let source: Source = "[2001:db8::1]:5004/live/2".parse().unwrap();
        assert_eq!((source.relay.as_str(), source.stream.as_str()), ("[2001:db8::1]:5004", "live/2"));
        for wrong in ["live", "host/live", "host:1", "host:1/"] {
            assert!(wrong.parse::<Source>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn it_proves_itself_and_renews() {
        let mut asker = Asker::new("live", 30, 1);
        let first = asker.ask(Duration::ZERO).unwrap().unwrap();
        assert_eq!((first.what, first.token), (Ask::Subscribe { seconds: 30 }, Token::default()));
        assert_eq!(asker.ask(SECOND / 2).unwrap(), None);
        let token = Token([7; 8]);
        let stale = Answer { what: Say::Prove(token), transaction: 9 };
        assert_eq!(asker.hear(&stale, SECOND / 2).unwrap(), None);
        assert_eq!(asker.ask(SECOND / 2).unwrap(), None, "that was no answer to it");
        asker.hear(&answer(&asker, Say::Prove(token)), SECOND / 2).unwrap();
        assert_eq!(asker.ask(SECOND / 2).unwrap().unwrap().token, token);
        let lease = Say::Lease { seconds: 30, token: Token([8; 8]) };
        let said = asker.hear(&answer(&asker, lease), SECOND).unwrap().unwrap();
        assert_eq!(said, "receiving live, for 30 s at a time");
        assert_eq!(asker.ask(10 * SECOND).unwrap(), None);
        assert_eq!(asker.ask(11 * SECOND).unwrap().unwrap().token, Token([8; 8]));
        assert_eq!(asker.hear(&answer(&asker, lease), 11 * SECOND).unwrap(), None, "it has one");
        assert_eq!(asker.leave().what, Ask::Unsubscribe);
        // The relay is gone for a while: it asks on.
        assert!(asker.ask(100 * SECOND).unwrap().is_some());
    }

    #[test]
    fn who_is_refused_waits_or_gives_up() {
        let mut asker = Asker::new("live", 30, 1);
        asker.ask(Duration::ZERO).unwrap();
        let cut = Say::Refused { why: Refusal::Cut, seconds: 40 };
        let said = asker.hear(&answer(&asker, cut), SECOND).unwrap().unwrap();
        assert!(said.contains("asking again in 40 s"), "{said}");
        assert_eq!(asker.ask(40 * SECOND).unwrap(), None);
        assert!(asker.ask(41 * SECOND).unwrap().is_some());
        let full = Say::Refused { why: Refusal::Full, seconds: 1 };
        assert!(asker.hear(&answer(&asker, full), SECOND).is_err());
        let mut alone = Asker::new("live", 30, 1);
        for second in 0..=10 {
            assert!(alone.ask(second * SECOND).unwrap().is_some());
        }
        assert!(alone.ask(11 * SECOND).unwrap_err().to_string().starts_with("nobody answers"));
    }
}
