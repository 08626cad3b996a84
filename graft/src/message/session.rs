//! A session, as its application has it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use millrace_base::control::{self, Control};
use millrace_graft_proto::parts::{Assembly, Datagram, MESSAGE_MAX, Part, part, parts_of};
use millrace_graft_proto::turns::Turns;
use rustix::event::{PollFd, PollFlags, epoll};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use super::inbox::{DATAGRAM_MAX, Inbox};
use super::waiting::{wait, wait_any};
use super::want::Want;
use super::wire::{Opened, Request, Word};
use super::{Error, Event};

/// What could not be sent is tried again after this long, and then after twice as long each time.
const AGAIN: Duration = Duration::from_micros(100);
const AGAIN_MOST: Duration = Duration::from_millis(4);
/// The same of a window whose room the daemon tells of: for whatever else it may be.
const AGAIN_TOLD: Duration = Duration::from_millis(25);
/// The other end has finished, and what it has sent is not all there: where nothing is sent again, so long it may still be under way.
const LINGER: Duration = Duration::from_secs(1);
/// The same of a session that is over, where what is lost is sent again: the daemons keep it a little longer.
const LINGER_RELIABLE: Duration = Duration::from_secs(8);
/// Events that nobody asks for; then the oldest go.
const EVENTS_MAX: usize = 64;

/// Its messages go both ways. To be used by the process that opened it.
///
/// Dropped without [`close`](Self::close) it ends at both ends at once, and the other one hears that it was not finished.
#[derive(Debug)]
pub struct Session {
    control: Control,
    /// Readable where something came: a message, an event, or the time to try again.
    all: OwnedFd,
    again: OwnedFd,
    peer: String,
    service: String,
    phase: Phase,
    process: u32,
    is_blocking: bool,
    timeout: Option<Duration>,
    /// Of messages, modulo 2^32.
    next: u32,
    /// The rest of a message whose beginning has been sent.
    unsent: Option<Unsent>,
    has_finished: bool,
    incoming: Incoming,
    events: VecDeque<Event>,
}

#[derive(Debug)]
enum Phase {
    New,
    /// Nobody has answered yet.
    Asked,
    Open(Link),
    Over(Over),
    Refused(super::Why, String),
}

#[derive(Debug)]
struct Link {
    inbox: Inbox,
    opened: Opened,
}

/// What has come can be read, if there was a link.
#[derive(Debug)]
struct Over {
    reason: String,
    link: Option<Link>,
    since: Instant,
    /// The daemon keeps the session until what is under way has come.
    is_kept: bool,
}

#[derive(Debug)]
struct Unsent {
    message: u32,
    bytes: Vec<u8>,
    part: u16,
}

#[derive(Debug, Default)]
struct Incoming {
    assembly: Assembly,
    /// Messages that wait for others.
    turns: Turns,
    /// Some do not wait any more: so what waits does not wait for what may never come.
    is_out_of_turn: bool,
    /// Messages that have come.
    count: u32,
    /// How many there are, and since when that is known.
    all: Option<(u32, Instant)>,
    /// Of the assembly's losses, those that an event has told.
    told: u64,
}

/// What [`Session::receive`] has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Received {
    Message(Vec<u8>),
    /// The other end has finished, and nothing more comes.
    Finished,
}

impl Session {
    /// Not asked for yet: [`negotiate`](Self::negotiate).
    ///
    /// # Errors
    /// There is no daemon.
    pub fn new(path: &Path, peer: &str, service: &str) -> Result<Self, Error> {
        let connected = Control::connect(path);
        let control = connected.map_err(|source| Error::NoDaemon { path: path.to_owned(), source })?;
        Self::with(control, peer, service)
    }

    fn with(control: Control, peer: &str, service: &str) -> Result<Self, Error> {
        let all = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io::Error::from)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let again = timerfd_create(TimerfdClockId::Monotonic, flags).map_err(io::Error::from)?;
        watch(&all, &control)?;
        watch(&all, &again)?;
        Ok(Self {
            control,
            all,
            again,
            peer: peer.to_owned(),
            service: service.to_owned(),
            phase: Phase::New,
            process: std::process::id(),
            is_blocking: true,
            timeout: None,
            next: 0,
            unsent: None,
            has_finished: false,
            incoming: Incoming::default(),
            events: VecDeque::new(),
        })
    }

    /// Of a listener.
    pub(super) fn accepted(opened: Opened, descriptors: Vec<OwnedFd>) -> Result<Self, Error> {
        let mut descriptors = descriptors.into_iter();
        let (Some(socket), Some(control)) = (descriptors.next(), descriptors.next()) else {
            return Err(Error::Protocol("a session without its descriptors".to_owned()));
        };
        let (peer, service) = (opened.peer.clone(), opened.service.clone());
        let mut session = Self::with(Control::from(control), &peer, &service)?;
        session.begin(opened, socket)?;
        Ok(session)
    }

    // --- Agreement ---

    /// Asks for the session. Nothing is sent before [`validate`](Self::validate) has returned.
    pub fn negotiate(&mut self, want: Want) -> Result<(), Error> {
        self.check_process()?;
        if !matches!(self.phase, Phase::New) {
            return Err(Error::Protocol("a session is negotiated once, and then renegotiated".to_owned()));
        }
        let (peer, service) = (self.peer.clone(), self.service.clone());
        self.say(&Request::Open { peer, service, want })?;
        self.phase = Phase::Asked;
        Ok(())
    }

    /// Until both ends have agreed; `None`: however long that takes.
    pub fn validate(&mut self, patience: Option<Duration>) -> Result<&Opened, Error> {
        self.check_process()?;
        let until = if self.is_blocking { patience } else { Some(Duration::ZERO) };
        let until = until.map(|patience| Instant::now() + patience);
        loop {
            self.look();
            match &self.phase {
                Phase::Asked => match wait(&self.control, PollFlags::IN, until) {
                    Err(Error::TimedOut) if !self.is_blocking => return Err(Error::WouldBlock),
                    waited => waited?,
                },
                _ => return Ok(&self.link()?.opened),
            }
        }
    }

    /// Other services, or another quality, in the middle of the traffic, which loses nothing by it. [`Event::Changed`] or
    /// [`Event::Refused`] says what came of it.
    pub fn renegotiate(&mut self, want: Want) -> Result<(), Error> {
        self.check()?;
        self.say(&Request::Renegotiate { want })
    }

    /// What both ends agreed on last.
    pub fn agreed(&mut self) -> Result<&Opened, Error> {
        self.check_process()?;
        self.look();
        Ok(&self.link()?.opened)
    }

    // --- Messages ---

    /// Sends a message of at most [`MESSAGE_MAX`] bytes.
    ///
    /// Where the window is full it waits. A session that does not block says [`Error::WouldBlock`], and nothing of the message was taken;
    /// [`as_fd`](AsFd::as_fd) is readable when there is sense in another try.
    pub fn send(&mut self, message: &[u8]) -> Result<(), Error> {
        self.check()?;
        if self.has_finished {
            return Err(Error::Finished);
        }
        let until = self.until();
        self.flush_until(until)?;
        let datagram_bytes = self.link()?.opened.datagram_bytes;
        let too_long = || Error::TooLong { bytes: message.len(), most: MESSAGE_MAX };
        let parts = parts_of(message.len(), datagram_bytes).ok_or_else(too_long)?;
        for at in 0..parts {
            match self.send_part(message, self.next, at, until) {
                Ok(()) => {}
                // It is taken: the rest goes with the next call.
                Err(Error::WouldBlock | Error::TimedOut) if at > 0 => {
                    self.unsent = Some(Unsent { message: self.next, bytes: message.to_vec(), part: at });
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        self.next = self.next.wrapping_add(1);
        Ok(())
    }

    /// The rest of a message of which a part was sent when there was no room for more; the other calls do it, too.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.check()?;
        self.flush_until(self.until())
    }

    /// The next message, whole; in what order is a matter of the graft.
    pub fn receive(&mut self) -> Result<Received, Error> {
        self.check_process()?;
        let until = self.until();
        loop {
            self.look();
            self.quiet_timer();
            if let Some(message) = self.next_message()? {
                return Ok(Received::Message(message));
            }
            // For who waits for an answer to what it believes to have sent.
            if let Err(Error::Socket(error)) = self.flush_until(Some(Instant::now())) {
                return Err(Error::Socket(error));
            }
            if self.unsent.is_some() {
                self.wake_after(self.again_most())?;
            }
            if self.is_all_here() && self.incoming.turns.skip() {
                continue;
            }
            if self.is_all_here() {
                self.incoming.assembly.end();
                self.tell_losses();
                return Ok(Received::Finished);
            }
            let patience = self.patience();
            if patience.is_none() {
                self.link()?;
            }
            match wait(&self.all, PollFlags::IN, [until, patience].into_iter().flatten().min()) {
                Err(Error::TimedOut) if patience.is_some_and(|patience| patience <= Instant::now()) => {}
                Err(Error::TimedOut) if !self.is_blocking => {
                    let left = patience.map(|patience| patience.saturating_duration_since(Instant::now()));
                    left.map_or(Ok(()), |left| self.wake_after(left))?;
                    return Err(Error::WouldBlock);
                }
                waited => waited?,
            }
        }
    }

    /// Messages that the other end has sent before it finished, and that have not come.
    pub fn missing(&self) -> u32 {
        let all = self.incoming.all.map_or(0, |(all, _)| all.wrapping_sub(self.incoming.count));
        u32::try_from(all.cast_signed()).unwrap_or(0)
    }

    /// What has become of it since the last call.
    pub fn event(&mut self) -> Result<Option<Event>, Error> {
        self.check_process()?;
        self.look();
        self.quiet_timer();
        self.tell_losses();
        Ok(self.events.pop_front())
    }

    /// This end sends no more; the other one may go on, and [`receive`](Self::receive) goes on with it.
    pub fn finish(&mut self) -> Result<(), Error> {
        self.check()?;
        if std::mem::replace(&mut self.has_finished, true) {
            return Ok(());
        }
        let until = self.until();
        let flushed = self.flush_until(until);
        // Behind the last message, and again by the daemons, which say it until it is heard.
        let _ = self.send_datagram(&Datagram::End(self.next).write());
        self.say(&Request::Finish { messages: self.next })?;
        flushed
    }

    /// Finishes, and gives the session back. What is under way still comes.
    pub fn close(mut self) -> Result<(), Error> {
        match self.finish() {
            Ok(()) | Err(Error::NotAgreed(_) | Error::Over(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    // --- How it waits ---

    /// Whether calls say [`Error::WouldBlock`] instead of waiting.
    pub fn set_nonblocking(&mut self, nonblocking: bool) {
        self.is_blocking = !nonblocking;
    }

    /// Longer than that no call waits, which says [`Error::TimedOut`] then.
    pub fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.timeout = timeout;
    }

    fn until(&self) -> Option<Instant> {
        let timeout = if self.is_blocking { self.timeout } else { Some(Duration::ZERO) };
        timeout.map(|timeout| Instant::now() + timeout)
    }

    // --- Datagrams ---

    fn send_part(&mut self, message: &[u8], id: u32, at: u16, until: Option<Instant>) -> Result<(), Error> {
        let datagram_bytes = self.link()?.opened.datagram_bytes;
        let too_long = || Error::TooLong { bytes: message.len(), most: MESSAGE_MAX };
        let part = part(id, message, datagram_bytes, at).ok_or_else(too_long)?;
        let in_order = self.link()?.opened.in_order;
        let datagram = Datagram::Part(Part { in_order, ..part }).write();
        let most = self.again_most();
        let mut pause = if most == AGAIN_TOLD { AGAIN_TOLD } else { AGAIN };
        loop {
            if self.send_datagram(&datagram)? {
                return Ok(());
            }
            if !self.is_blocking {
                self.wake_after(most)?;
                return Err(Error::WouldBlock);
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Err(Error::TimedOut);
            }
            // Also ended by a word of the daemon, or by its end.
            let mut wanted = [PollFd::new(&self.control, PollFlags::IN)];
            match wait_any(&mut wanted, Some(Instant::now() + pause)) {
                Ok(()) | Err(Error::TimedOut) => pause = (2 * pause).min(most),
                Err(error) => return Err(error),
            }
        }
    }

    /// Where a window bounds what is under way, and nothing else does, the daemon says when there is room.
    fn again_most(&self) -> Duration {
        let has = |link: &Link, name: &str| link.opened.services.iter().any(|service| service == name);
        match self.link() {
            Ok(link) if has(link, "flow-control") && !has(link, "pacing") => AGAIN_TOLD,
            _ => AGAIN_MOST,
        }
    }

    /// Returns whether the socket had room. Sends only while the daemon runs: without it nothing would be sealed.
    fn send_datagram(&mut self, datagram: &[u8]) -> Result<bool, Error> {
        self.look();
        let link = match &self.phase {
            Phase::Open(link) => link,
            _ => return self.link().map(|_| false),
        };
        match link.inbox.socket.send(datagram) {
            Ok(_) => Ok(true),
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::NOBUFS | Errno::AGAIN | Errno::NOMEM | Errno::INTR) => Ok(false),
                // What became of an earlier one: nobody listens, says a host or a router, or so it seems.
                Some(Errno::CONNREFUSED | Errno::HOSTUNREACH | Errno::NETUNREACH) => Ok(false),
                Some(Errno::PIPE) => {
                    self.end("the daemon has taken its socket back", false);
                    self.link().map(|_| false)
                }
                _ => Err(Error::Socket(error)),
            },
        }
    }

    fn flush_until(&mut self, until: Option<Instant>) -> Result<(), Error> {
        let Some(mut unsent) = self.unsent.take() else { return Ok(()) };
        let datagram_bytes = self.link()?.opened.datagram_bytes;
        let parts = parts_of(unsent.bytes.len(), datagram_bytes).unwrap_or_default();
        while unsent.part < parts {
            if let Err(error) = self.send_part(&unsent.bytes, unsent.message, unsent.part, until) {
                self.unsent = Some(unsent);
                return Err(error);
            }
            unsent.part += 1;
        }
        Ok(())
    }

    fn next_message(&mut self) -> Result<Option<Vec<u8>>, Error> {
        let Self { phase, incoming, .. } = self;
        let (Phase::Open(link) | Phase::Over(Over { link: Some(link), .. })) = phase else { return Ok(None) };
        let mut buffer = [0; DATAGRAM_MAX];
        loop {
            if let Some(message) = incoming.next() {
                return Ok(Some(message));
            }
            let Some(got) = link.inbox.next(&mut buffer).map_err(io::Error::from)? else { return Ok(None) };
            match Datagram::read(buffer.get(..got).unwrap_or_default()) {
                Some(Datagram::Part(part)) => {
                    let (id, in_order) = (part.message, part.in_order);
                    if let Some(message) = incoming.assembly.take(part) {
                        incoming.count = incoming.count.wrapping_add(1);
                        if !in_order {
                            incoming.is_out_of_turn = true;
                            return Ok(Some(message));
                        }
                        incoming.turns.put(id, message);
                    }
                }
                Some(Datagram::End(messages)) => self.events.extend(incoming.finish(messages)),
                None => {}
            }
        }
    }

    /// What the other end has sent before it finished, or as much of it as will come.
    fn is_all_here(&self) -> bool {
        let Some((all, _)) = self.incoming.all else { return false };
        let is_complete = all.wrapping_sub(self.incoming.count).cast_signed() <= 0;
        is_complete || self.patience().is_some_and(|patience| patience <= Instant::now())
    }

    /// Until when the rest of what the other end has sent may come, if that has finished; `None`: as long as the session lives.
    fn patience(&self) -> Option<Instant> {
        let (_, told) = self.incoming.all?;
        let is_reliable = |link: &Link| link.opened.services.iter().any(|service| service == "reliability");
        match &self.phase {
            Phase::Open(link) if is_reliable(link) => None,
            Phase::Over(Over { is_kept: true, link: Some(link), since, .. }) => {
                let linger = if is_reliable(link) { LINGER_RELIABLE } else { LINGER };
                Some(*since + linger)
            }
            Phase::Open(_) => Some(told + LINGER),
            _ => Some(told),
        }
    }

    // --- The daemon ---

    /// Hears what the daemon has said.
    fn look(&mut self) {
        loop {
            if matches!(self.phase, Phase::Over(..) | Phase::Refused(..)) {
                return;
            }
            match self.control.receive() {
                control::Received::Nothing => return,
                control::Received::Record(word, descriptors) => self.hear(word, descriptors),
                control::Received::Malformed(why) => {
                    self.end(&format!("the daemon cannot be understood: {why}"), false);
                }
                control::Received::End => self.end("the daemon is gone", false),
            }
        }
    }

    fn hear(&mut self, word: Word, descriptors: Vec<OwnedFd>) {
        match word {
            Word::Opened(opened) => {
                let socket = descriptors.into_iter().next();
                let begun = socket.ok_or_else(|| Error::Protocol("a session without its socket".to_owned()));
                let begin = |socket| self.begin(opened, socket);
                if let Err(error) = begun.and_then(begin) {
                    self.end(&error.to_string(), false);
                }
            }
            Word::Refused { why, reason } if matches!(self.phase, Phase::Asked) => {
                self.phase = Phase::Refused(why, reason);
            }
            Word::Refused { why, reason } => self.tell(Event::Refused { why, reason }),
            Word::Changed { graft, services, by } => {
                if let Phase::Open(link) = &mut self.phase {
                    (link.opened.graft, link.opened.services) = (graft.clone(), services.clone());
                    link.opened.in_order &= services.iter().any(|service| service == "order");
                }
                self.tell(Event::Changed { graft, services, by });
            }
            // Who waits for it was woken.
            Word::Room => {}
            Word::Violated(violation) => self.tell(Event::Violated(violation)),
            Word::Finished { messages } => self.events.extend(self.incoming.finish(messages)),
            Word::Closed { reason } => self.end(&reason, true),
            Word::Listening | Word::Accepted(_) => {
                self.end("the daemon takes this for a listener", false);
            }
        }
    }

    fn begin(&mut self, opened: Opened, socket: OwnedFd) -> Result<(), Error> {
        watch(&self.all, &socket)?;
        self.phase = Phase::Open(Link { inbox: Inbox::new(socket), opened });
        Ok(())
    }

    /// Nothing is sent any more.
    fn end(&mut self, reason: &str, is_kept: bool) {
        let link = match std::mem::replace(&mut self.phase, Phase::New) {
            Phase::Open(link) => Some(link),
            _ => None,
        };
        // It would be readable for ever.
        let _ = epoll::delete(&self.all, &self.control);
        let (reason, since) = (reason.to_owned(), Instant::now());
        self.phase = Phase::Over(Over { reason: reason.clone(), link, since, is_kept });
        self.tell(Event::Closed { reason });
        let _ = self.wake_after(Duration::from_nanos(1));
    }

    fn say(&mut self, request: &Request) -> Result<(), Error> {
        self.control.send(request, &[]).map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                Error::Over("the daemon is gone".to_owned())
            }
            _ => Error::Socket(error),
        })
    }

    fn tell(&mut self, event: Event) {
        if self.events.len() >= EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    fn tell_losses(&mut self) {
        let lost = self.incoming.assembly.given_up() + self.incoming.turns.given_up();
        let new = lost - std::mem::replace(&mut self.incoming.told, lost);
        if new > 0 {
            self.tell(Event::Lost(new));
        }
    }

    // --- Checks ---

    /// It may be asked to do something.
    fn check(&mut self) -> Result<(), Error> {
        self.check_process()?;
        self.look();
        match &self.phase {
            Phase::Over(over) => Err(Error::Over(over.reason.clone())),
            _ => self.link().map(drop),
        }
    }

    /// A child has the same sockets: whatever it did would be the parent's.
    fn check_process(&self) -> Result<(), Error> {
        if self.process == std::process::id() { Ok(()) } else { Err(Error::Forked) }
    }

    fn link(&self) -> Result<&Link, Error> {
        match &self.phase {
            Phase::Open(link) => Ok(link),
            Phase::New => Err(Error::NotAgreed("it was not negotiated")),
            Phase::Asked => Err(Error::NotAgreed("the other end has not answered yet")),
            Phase::Refused(why, reason) => Err(Error::Refused { why: *why, reason: reason.clone() }),
            Phase::Over(over) => Err(Error::Over(over.reason.clone())),
        }
    }

    // --- The timer ---

    fn wake_after(&self, pause: Duration) -> Result<(), Error> {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let it_value = Timespec::try_from(pause).unwrap_or(zero);
        let when = Itimerspec { it_interval: zero, it_value };
        let set = timerfd_settime(&self.again, TimerfdTimerFlags::empty(), &when);
        Ok(set.map(drop).map_err(io::Error::from)?)
    }

    /// What it has woken for is looked at now.
    fn quiet_timer(&self) {
        let _ = rustix::io::read(&self.again, &mut [0; 8][..]);
    }
}

impl Incoming {
    /// That has waited for others, and has its turn.
    fn next(&mut self) -> Option<Vec<u8>> {
        let next = self.turns.take();
        next.or_else(|| (self.is_out_of_turn && self.turns.skip()).then(|| self.turns.take()).flatten())
    }

    /// The first word about it counts.
    fn finish(&mut self, messages: u32) -> Option<Event> {
        if self.all.is_some() {
            return None;
        }
        self.all = Some((messages, Instant::now()));
        Some(Event::Finished)
    }
}

impl AsFd for Session {
    /// Readable when a message has come, an event, or time to try again: then call [`receive`](Self::receive),
    /// [`event`](Self::event) and [`send`](Self::send) until they have nothing.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.all.as_fd()
    }
}

fn watch(all: &OwnedFd, what: impl AsFd) -> Result<(), Error> {
    let data = epoll::EventData::new_u64(0);
    Ok(epoll::add(all, what, data, epoll::EventFlags::IN).map_err(io::Error::from)?)
}
