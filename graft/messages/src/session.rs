//! Sessions of applications: sending and receiving messages, events, and renegotiation.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use millrace_base::control::{self, ControlEnd};
use rustix::event::{PollFd, PollFlags, epoll};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use crate::inbox::{DATAGRAM_MAX, SessionInbox};
use crate::parts::{Assembly, MESSAGE_MAX, MessageDatagram, MessagePart, part, parts_of};
use crate::turns::Turns;
use crate::waiting::{wait, wait_any};
use crate::want::Want;
use crate::wire::{BrokerReply, BrokerRequest, OpenedSession};
use crate::{Error, SessionEvent};

/// Pause before a datagram is sent again that the socket has refused. It doubles with each attempt, up to `AGAIN_MOST`.
const AGAIN: Duration = Duration::from_micros(100);
const AGAIN_MOST: Duration = Duration::from_millis(4);
/// Longest pause before a datagram is sent again that the socket refused because the flow-control window was full. The
/// daemon reports when the window has space, which ends the pause early unless the report is lost.
const AGAIN_TOLD: Duration = Duration::from_millis(25);
/// Time for which messages may still arrive after the other side has ended, if the session's packet functions do not
/// retransmit.
const LINGER: Duration = Duration::from_secs(1);
/// Time for which messages may still arrive after a session is over, if its packet functions retransmit. The daemons
/// keep the session a little longer than this.
const LINGER_RELIABLE: Duration = Duration::from_secs(8);
/// Most events that are stored for the application. Beyond this number the oldest are dropped.
const EVENTS_MAX: usize = 64;

/// A session that exchanges messages with an application on another host. Only the process that opened it may use it.
///
/// If a session is dropped without [`close`](Self::close), it ends at once for both applications, and the other one
/// learns that it was not closed properly.
///
/// # States
///
/// 1. *New* after [`Self::new`].
/// 2. *Asked* after [`Self::negotiate`], until the daemon answers. No message can be sent.
/// 3. *Open* once [`Self::validate`] has returned the terms. [`Self::renegotiate`] changes them while messages pass.
/// 4. *Over* after [`Self::close`], or when the other application or the daemon has ended. Messages that have arrived
///    can still be received.
///
/// A session that the daemon refuses stays *refused*. Every call on other sessions first reads the daemon's messages,
/// so it may find that the session is over. [`Self::finish`] ends one direction only. Between calls, at most one
/// message has been sent only in part ([`Self::flush`]).
///
/// ```no_run
/// use std::time::Duration;
/// use millrace_messages::{SessionEvent, Preconnection, Received};
///
/// let mut session = Preconnection::new("station", "telemetry").service("reliability").service("order").initiate()?;
/// session.set_timeout(Some(Duration::from_secs(5)));
/// session.send(b"21.5 C")?;
/// session.finish()?;
/// while let Received::Message(answer) = session.receive()? {
///     println!("{}", String::from_utf8_lossy(&answer));
/// }
/// while let Some(event) = session.event()? {
///     if let SessionEvent::Changed { graft, .. } = event {
///         println!("graft {graft} was used in the end");
///     }
/// }
/// session.close()?;
/// # Ok::<(), millrace_messages::Error>(())
/// ```
#[derive(Debug)]
pub struct Session {
    control: ControlEnd,
    /// Epoll descriptor, which is readable if a message or an event has arrived, or if sending should be tried again.
    all: OwnedFd,
    /// Timer that makes the epoll descriptor `all` readable when sending should be tried again.
    again: OwnedFd,
    peer: String,
    service: String,
    phase: SessionPhase,
    /// ID of the process that opened the session.
    process: u32,
    is_blocking: bool,
    timeout: Option<Duration>,
    /// Number of the next message to be sent, modulo 2^32.
    next: u32,
    /// The rest of a message whose first parts were sent.
    unsent: Option<Unsent>,
    has_finished: bool,
    incoming: IncomingMessages,
    events: VecDeque<SessionEvent>,
}

#[derive(Debug)]
enum SessionPhase {
    New,
    /// The daemon was asked for the session and has not answered yet.
    Asked,
    Open(SessionLink),
    Over(Over),
    Refused(crate::SessionRefusal, String),
}

#[derive(Debug)]
/// The socket of an open session, and what both hosts agreed on.
struct SessionLink {
    inbox: SessionInbox,
    opened: OpenedSession,
}

/// The state of a session that is over. If the session was open before, messages that have arrived can still be read.
#[derive(Debug)]
struct Over {
    reason: String,
    link: Option<SessionLink>,
    since: Instant,
    /// True if the daemons keep the session for a while, so that packets in flight still arrive.
    is_kept: bool,
}

/// A message whose parts before `part` were sent; the other parts were not sent yet.
#[derive(Debug)]
struct Unsent {
    message: u32,
    bytes: Vec<u8>,
    part: u16,
}

#[derive(Debug, Default)]
/// The messages from the other application: those that have arrived, and those that are incomplete.
struct IncomingMessages {
    assembly: Assembly,
    /// Complete messages that wait for earlier ones.
    turns: Turns,
    /// True once a message has arrived that need not wait for earlier ones. Gaps in the order are then skipped at once,
    /// since the missing messages may never arrive.
    is_out_of_turn: bool,
    /// Number of complete messages that have arrived, modulo 2^32.
    count: u32,
    /// How many messages the other application sent before it ended its direction, and when this host learned that.
    all: Option<(u32, Instant)>,
    /// Number of lost messages that were already reported by events.
    told: u64,
}

/// The result of [`Session::receive`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Received {
    /// A complete message.
    Message(Vec<u8>),
    /// The other application has ended its direction, and everything that can arrive has arrived.
    Finished,
}

impl Session {
    /// Creates a session. [`negotiate`](Self::negotiate) then requests it from the daemon.
    ///
    /// # Errors
    /// No daemon answers on the socket.
    pub fn new(path: &Path, peer: &str, service: &str) -> Result<Self, Error> {
        let connected = ControlEnd::connect(path);
        let control = connected.map_err(|source| Error::NoDaemon { path: path.to_owned(), source })?;
        Self::with(control, peer, service)
    }

    fn with(control: ControlEnd, peer: &str, service: &str) -> Result<Self, Error> {
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
            phase: SessionPhase::New,
            process: std::process::id(),
            is_blocking: true,
            timeout: None,
            next: 0,
            unsent: None,
            has_finished: false,
            incoming: IncomingMessages::default(),
            events: VecDeque::new(),
        })
    }

    /// Creates a session that a listener has accepted.
    pub(crate) fn accepted(opened: OpenedSession, descriptors: Vec<OwnedFd>) -> Result<Self, Error> {
        let mut descriptors = descriptors.into_iter();
        let (Some(socket), Some(control)) = (descriptors.next(), descriptors.next()) else {
            return Err(Error::Protocol("the daemon sent a session without its descriptors".to_owned()));
        };
        let peer = opened.peer.clone();
        let service = opened.service.clone();
        let mut session = Self::with(ControlEnd::from(control), &peer, &service)?;
        session.begin(opened, socket)?;
        Ok(session)
    }

    // --- Agreement on the session ---

    /// Requests the session from the daemon. No message can be sent before [`validate`](Self::validate) has returned.
    pub fn negotiate(&mut self, want: Want) -> Result<(), Error> {
        self.check_process()?;
        if !matches!(self.phase, SessionPhase::New) {
            return Err(Error::Protocol("the session was negotiated already: renegotiate it".to_owned()));
        }
        let peer = self.peer.clone();
        let service = self.service.clone();
        self.say(&BrokerRequest::Open { peer, service, want })?;
        self.phase = SessionPhase::Asked;
        Ok(())
    }

    /// Waits until both hosts have agreed on the session, without a limit if `patience` is `None`.
    pub fn validate(&mut self, patience: Option<Duration>) -> Result<&OpenedSession, Error> {
        self.check_process()?;
        let until = if self.is_blocking { patience } else { Some(Duration::ZERO) };
        let until = until.map(|patience| Instant::now() + patience);
        loop {
            self.look();
            match &self.phase {
                SessionPhase::Asked => match wait(&self.control, PollFlags::IN, until) {
                    Err(Error::TimedOut) if !self.is_blocking => return Err(Error::WouldBlock),
                    waited => waited?,
                },
                _ => return Ok(&self.link()?.opened),
            }
        }
    }

    /// Requests other services, or another quality, during the session. No message is lost. [`SessionEvent::Changed`]
    /// or [`SessionEvent::Refused`] reports the result.
    pub fn renegotiate(&mut self, want: Want) -> Result<(), Error> {
        self.check()?;
        self.say(&BrokerRequest::Renegotiate { want })
    }

    /// Returns the graft (list of packet functions) and the services that both hosts agreed on last.
    pub fn agreed(&mut self) -> Result<&OpenedSession, Error> {
        self.check_process()?;
        self.look();
        Ok(&self.link()?.opened)
    }

    // --- Messages ---

    /// Sends a message of at most [`MESSAGE_MAX`] bytes.
    ///
    /// If the flow-control window is full, the call waits. A nonblocking session returns [`Error::WouldBlock`] instead,
    /// and has sent no part of the message. [`as_fd`](AsFd::as_fd) is readable when the call should be repeated.
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
                // The first parts were sent, so the message counts as sent: the next call sends its other parts.
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

    /// Sends the rest of a message that was sent only in part. Other calls on the session do this, too.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.check()?;
        self.flush_until(self.until())
    }

    /// Receives the next complete message. The session's graft (list of packet functions) determines the order of
    /// messages.
    pub fn receive(&mut self) -> Result<Received, Error> {
        self.check_process()?;
        let until = self.until();
        loop {
            self.look();
            self.quiet_timer();
            if let Some(message) = self.next_message()? {
                return Ok(Received::Message(message));
            }
            // The caller may wait for an answer to a message that it believes to have sent, so the rest of that
            // message is sent first.
            if let Err(Error::Socket(error)) = self.flush_until(Some(Instant::now())) {
                return Err(Error::Socket(error));
            }
            if self.unsent.is_some() {
                self.wake_after(self.again_most())?;
            }
            // Missing messages will not arrive any more, so messages behind a gap are returned now.
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

    /// Returns how many of the messages that the other application sent before it ended have not arrived.
    pub fn missing(&self) -> u32 {
        let all = self.incoming.all.map_or(0, |(all, _)| all.wrapping_sub(self.incoming.count));
        u32::try_from(all.cast_signed()).unwrap_or(0)
    }

    /// Returns the next event, or `None` if there is none.
    pub fn event(&mut self) -> Result<Option<SessionEvent>, Error> {
        self.check_process()?;
        self.look();
        self.quiet_timer();
        self.tell_losses();
        Ok(self.events.pop_front())
    }

    /// Ends this application's direction: this application sends no more messages. The other application may continue
    /// to send, and [`receive`](Self::receive) returns its messages.
    pub fn finish(&mut self) -> Result<(), Error> {
        self.check()?;
        if std::mem::replace(&mut self.has_finished, true) {
            return Ok(());
        }
        let until = self.until();
        let flushed = self.flush_until(until);
        // This datagram, which states how many messages were sent, may be lost. The daemons report the same number to
        // each other, and repeat it until it is acknowledged.
        let _ = self.send_datagram(&MessageDatagram::End(self.next).write());
        self.say(&BrokerRequest::Finish { messages: self.next })?;
        flushed
    }

    /// Ends this application's direction and closes the session. Messages in flight still arrive at the other
    /// application.
    pub fn close(mut self) -> Result<(), Error> {
        match self.finish() {
            Ok(()) | Err(Error::NotAgreed(_) | Error::Over(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    // --- Waiting ---

    /// Sets whether calls return [`Error::WouldBlock`] instead of waiting.
    pub fn set_nonblocking(&mut self, nonblocking: bool) {
        self.is_blocking = !nonblocking;
    }

    /// Limits how long each call waits. After that time the call returns [`Error::TimedOut`].
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
        let datagram = MessageDatagram::Part(MessagePart { in_order, ..part }).write();
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
            // The wait also ends when the daemon sends a message or ends.
            let mut wanted = [PollFd::new(&self.control, PollFlags::IN)];
            match wait_any(&mut wanted, Some(Instant::now() + pause)) {
                Ok(()) | Err(Error::TimedOut) => pause = (2 * pause).min(most),
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns the longest pause before a refused datagram is sent again. The pause may be long if only the
    /// flow-control window limits sending, since the daemon then reports when the window has space.
    fn again_most(&self) -> Duration {
        let has = |link: &SessionLink, name: &str| link.opened.services.iter().any(|service| service == name);
        match self.link() {
            Ok(link) if has(link, "flow-control") && !has(link, "pacing") => AGAIN_TOLD,
            _ => AGAIN_MOST,
        }
    }

    /// Sends a datagram. Returns whether the socket accepted it. Without the daemon no datagram is sent, because it
    /// would not be sealed.
    fn send_datagram(&mut self, datagram: &[u8]) -> Result<bool, Error> {
        self.look();
        let link = match &self.phase {
            SessionPhase::Open(link) => link,
            _ => return self.link().map(|_| false),
        };
        match link.inbox.socket.send(datagram) {
            Ok(_) => Ok(true),
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::NOBUFS | Errno::AGAIN | Errno::NOMEM | Errno::INTR) => Ok(false),
                // The error is about an earlier datagram: by ICMP, a host or a router reported that nothing listens
                // there.
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
        let (SessionPhase::Open(link) | SessionPhase::Over(Over { link: Some(link), .. })) = phase else {
            return Ok(None);
        };
        let mut buffer = [0; DATAGRAM_MAX];
        loop {
            if let Some(message) = incoming.next() {
                return Ok(Some(message));
            }
            let Some(got) = link.inbox.next(&mut buffer).map_err(io::Error::from)? else { return Ok(None) };
            match MessageDatagram::read(buffer.get(..got).unwrap_or_default()) {
                Some(MessageDatagram::Part(part)) => {
                    let id = part.message;
                    let in_order = part.in_order;
                    if let Some(message) = incoming.assembly.take(part) {
                        incoming.count = incoming.count.wrapping_add(1);
                        if !in_order {
                            incoming.is_out_of_turn = true;
                            return Ok(Some(message));
                        }
                        incoming.turns.put(id, message);
                    }
                }
                Some(MessageDatagram::End(messages)) => self.events.extend(incoming.finish(messages)),
                None => {}
            }
        }
    }

    /// Returns whether all messages have arrived that the other application sent before it ended, or no more of them
    /// can arrive.
    fn is_all_here(&self) -> bool {
        let Some((all, _)) = self.incoming.all else { return false };
        let is_complete = all.wrapping_sub(self.incoming.count).cast_signed() <= 0;
        is_complete || self.patience().is_some_and(|patience| patience <= Instant::now())
    }

    /// Returns the time until which messages may arrive after the other application has ended. `None`: they may arrive
    /// while the session exists.
    fn patience(&self) -> Option<Instant> {
        let (_, told) = self.incoming.all?;
        let is_reliable =
            |link: &SessionLink| link.opened.services.iter().any(|service| service == "reliability");
        match &self.phase {
            SessionPhase::Open(link) if is_reliable(link) => None,
            SessionPhase::Over(Over { is_kept: true, link: Some(link), since, .. }) => {
                let linger = if is_reliable(link) { LINGER_RELIABLE } else { LINGER };
                Some(*since + linger)
            }
            SessionPhase::Open(_) => Some(told + LINGER),
            _ => Some(told),
        }
    }

    // --- The daemon ---

    /// Processes all messages of the daemon that have arrived.
    fn look(&mut self) {
        loop {
            if matches!(self.phase, SessionPhase::Over(..) | SessionPhase::Refused(..)) {
                return;
            }
            match self.control.receive() {
                control::ControlReceived::Nothing => return,
                control::ControlReceived::Record(reply, descriptors) => self.hear(reply, descriptors),
                control::ControlReceived::Malformed(why) => {
                    self.end(&format!("the daemon sent an invalid message: {why}"), false);
                }
                control::ControlReceived::End => self.end("the daemon has closed the connection", false),
            }
        }
    }

    fn hear(&mut self, reply: BrokerReply, descriptors: Vec<OwnedFd>) {
        match reply {
            BrokerReply::Opened(opened) => {
                let socket = descriptors.into_iter().next();
                let begun = socket.ok_or_else(|| {
                    Error::Protocol("the daemon sent a session without its socket".to_owned())
                });
                let begin = |socket| self.begin(opened, socket);
                if let Err(error) = begun.and_then(begin) {
                    self.end(&error.to_string(), false);
                }
            }
            BrokerReply::Refused { why, reason } if matches!(self.phase, SessionPhase::Asked) => {
                self.phase = SessionPhase::Refused(why, reason);
            }
            BrokerReply::Refused { why, reason } => self.tell(SessionEvent::Refused { why, reason }),
            BrokerReply::Changed { graft, services, by } => {
                if let SessionPhase::Open(link) = &mut self.phase {
                    (link.opened.graft, link.opened.services) = (graft.clone(), services.clone());
                    link.opened.in_order &= services.iter().any(|service| service == "order");
                }
                self.tell(SessionEvent::Changed { graft, services, by });
            }
            // The daemon reports that the flow-control window has space. A call that waits to send again is woken by
            // this message itself, so nothing is left to do.
            BrokerReply::Room => {}
            BrokerReply::Violated(violation) => self.tell(SessionEvent::Violated(violation)),
            BrokerReply::Finished { messages } => self.events.extend(self.incoming.finish(messages)),
            BrokerReply::Closed { reason } => self.end(&reason, true),
            BrokerReply::Listening | BrokerReply::Accepted(_) => {
                self.end("the daemon sent a message for a listener", false);
            }
        }
    }

    fn begin(&mut self, opened: OpenedSession, socket: OwnedFd) -> Result<(), Error> {
        watch(&self.all, &socket)?;
        self.phase = SessionPhase::Open(SessionLink { inbox: SessionInbox::new(socket), opened });
        Ok(())
    }

    /// Ends the session, after which no datagram is sent.
    fn end(&mut self, reason: &str, is_kept: bool) {
        let link = match std::mem::replace(&mut self.phase, SessionPhase::New) {
            SessionPhase::Open(link) => Some(link),
            _ => None,
        };
        // A closed connection to the daemon would make the epoll descriptor readable for ever, so it is removed.
        let _ = epoll::delete(&self.all, &self.control);
        let reason = reason.to_owned();
        let since = Instant::now();
        self.phase = SessionPhase::Over(Over { reason: reason.clone(), link, since, is_kept });
        self.tell(SessionEvent::Closed { reason });
        // The timer makes the session's descriptor readable, so that the application's event loop calls the session for
        // the new event.
        let _ = self.wake_after(Duration::from_nanos(1));
    }

    fn say(&mut self, request: &BrokerRequest) -> Result<(), Error> {
        self.control.send(request, &[]).map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                Error::Over("the daemon has closed the connection".to_owned())
            }
            _ => Error::Socket(error),
        })
    }

    fn tell(&mut self, event: SessionEvent) {
        if self.events.len() >= EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    fn tell_losses(&mut self) {
        let lost = self.incoming.assembly.given_up() + self.incoming.turns.given_up();
        let new = lost - std::mem::replace(&mut self.incoming.told, lost);
        if new > 0 {
            self.tell(SessionEvent::Lost(new));
        }
    }

    // --- Checks ---

    /// Reads the daemon's messages, and returns an error if the session cannot be used.
    fn check(&mut self) -> Result<(), Error> {
        self.check_process()?;
        self.look();
        match &self.phase {
            SessionPhase::Over(over) => Err(Error::Over(over.reason.clone())),
            _ => self.link().map(drop),
        }
    }

    /// Refuses calls in a forked child. The child has copies of the sockets, and would act in the parent's session.
    fn check_process(&self) -> Result<(), Error> {
        if self.process == std::process::id() { Ok(()) } else { Err(Error::Forked) }
    }

    fn link(&self) -> Result<&SessionLink, Error> {
        match &self.phase {
            SessionPhase::Open(link) => Ok(link),
            SessionPhase::New => Err(Error::NotAgreed("it was not negotiated")),
            SessionPhase::Asked => Err(Error::NotAgreed("the other end has not answered yet")),
            SessionPhase::Refused(why, reason) => Err(Error::Refused { why: *why, reason: reason.clone() }),
            SessionPhase::Over(over) => Err(Error::Over(over.reason.clone())),
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

    /// Resets the timer, since the caller asks for messages and events now.
    fn quiet_timer(&self) {
        let _ = rustix::io::read(&self.again, &mut [0; 8][..]);
    }
}

impl IncomingMessages {
    /// Returns the next message in order, if it has arrived. Gaps are skipped if messages need not be in order.
    fn next(&mut self) -> Option<Vec<u8>> {
        let next = self.turns.take();
        next.or_else(|| (self.is_out_of_turn && self.turns.skip()).then(|| self.turns.take()).flatten())
    }

    /// Records how many messages the other application has sent in all. Only the first report counts.
    fn finish(&mut self, messages: u32) -> Option<SessionEvent> {
        if self.all.is_some() {
            return None;
        }
        self.all = Some((messages, Instant::now()));
        Some(SessionEvent::Finished)
    }
}

impl AsFd for Session {
    /// Returns a descriptor that is readable if a message or an event has arrived, or if sending should be tried again.
    /// Then call [`receive`](Self::receive), [`event`](Self::event) and [`send`](Self::send) until they would have to
    /// wait.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.all.as_fd()
    }
}

fn watch(all: &OwnedFd, what: impl AsFd) -> Result<(), Error> {
    let data = epoll::EventData::new_u64(0);
    Ok(epoll::add(all, what, data, epoll::EventFlags::IN).map_err(io::Error::from)?)
}
