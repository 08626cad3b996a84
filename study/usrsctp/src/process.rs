//! The confined process. It passes messages of one session between the application's socket and the session's socket.
//!
//! It parses the peer's packets, and can reach nothing but these two sockets and the one to its owner.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd as _, OwnedFd},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use millrace_base::control::{ControlEnd, ControlReceived};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::{
    io::Errno,
    net::{RecvFlags, SendFlags, recv, send},
};
use serde::{Deserialize, Serialize};

use crate::{
    confine::{ChildLimits, enter, say},
    usrsctp::{Association, Connected, ERROR, MessageRead, READ, Usrsctp, WRITE},
};

const BOUNDS: ChildLimits = ChildLimits { memory: 64 << 20, descriptors: 16 };
/// Size of a buffer that any datagram of a session fits into, bytes.
const DATAGRAM_MAX: usize = 2048;
/// Largest number of datagrams that are read from one socket before the other sockets are served.
const TURN: usize = 64;
/// Intervals between two runs of SCTP's timers: `BUSY` while messages are passed, and `IDLE` after a time `IDLE_AFTER`
/// without any.
const BUSY: Duration = Duration::from_millis(10);
const IDLE: Duration = Duration::from_millis(100);
const IDLE_AFTER: Duration = Duration::from_secs(1);
/// Time between two messages that tell the daemon that the process still works.
const ALIVE: Duration = Duration::from_secs(1);
/// Time until an unacknowledged packet is first sent again, while no round-trip time has been measured, ms.
const RTO_INITIAL_MS: u32 = 500;

/// The only message from the daemon. The session's socket and the application's are sent along with it.
#[derive(Debug, Serialize, Deserialize)]
pub struct ServeMessage {
    pub packet_bytes: usize,
    pub parameters: BTreeMap<String, u64>,
}

/// A message to the daemon: the process still works, or its final result.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "tell", rename_all = "snake_case")]
pub enum ProcessMessage {
    /// The process has served all its sockets within the last second.
    Alive,
    /// The session has ended: the application and the peer have sent their last messages, and all messages were
    /// delivered.
    Done,
    Failed {
        why: String,
    },
}

/// Runs the process until application and peer have sent their last messages, or the daemon has ended.
///
/// # Errors
///
/// Returns an error if the library is missing, or if the process cannot be confined. The daemon was told the reason.
pub fn run() -> anyhow::Result<()> {
    let (library, control) = enter(BOUNDS, || Usrsctp::load().map_err(anyhow::Error::msg))?;
    let Some((serve, wire, application)) = served(&control)? else { return Ok(()) };
    let tell = match ProcessSession::begin(library, &serve, wire, application)
        .and_then(|mut link| link.run(&control))
    {
        Ok(()) => ProcessMessage::Done,
        Err(error) => ProcessMessage::Failed { why: error.to_string() },
    };
    // An error is ignored: the daemon may have ended.
    let _ = say(&control, &tell);
    Ok(())
}

/// Waits for the daemon's message. Returns it with the two sockets, or `None` if the daemon has ended.
fn served(control: &ControlEnd) -> anyhow::Result<Option<(ServeMessage, OwnedFd, OwnedFd)>> {
    loop {
        match control.receive() {
            ControlReceived::Record(serve, descriptors) => {
                let [wire, application] =
                    <[OwnedFd; 2]>::try_from(descriptors).ok().context("a session without its sockets")?;
                return Ok(Some((serve, wire, application)));
            }
            ControlReceived::Malformed(why) => bail!("the daemon sent a malformed message: {why}"),
            ControlReceived::End => return Ok(None),
            ControlReceived::Nothing => {
                poll(&mut [PollFd::new(control.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE)?;
            }
        }
    }
}

/// One session. The process holds at most one message per direction. If that message cannot be passed on, the buffers
/// of sockets and association fill up, and the sender has to wait.
struct ProcessSession {
    association: Connected,
    wire: OwnedFd,
    application: OwnedFd,
    /// A message from the application for which the association's buffer has no space yet.
    outgoing: Option<Vec<u8>>,
    /// A message for the application whose socket has no buffer space yet.
    incoming: Option<Vec<u8>>,
    /// True if the application sends no more messages.
    is_left: bool,
    has_finished: bool,
    ticked: Instant,
    busy: Instant,
    told: Instant,
}

/// Result of an attempt to read from a socket.
enum SocketAttempt {
    Bytes(usize),
    Later,
    End,
}

impl ProcessSession {
    fn begin(
        library: Usrsctp,
        serve: &ServeMessage,
        wire: OwnedFd,
        application: OwnedFd,
    ) -> io::Result<Self> {
        let value = |name: &str, default: u32| {
            serve.parameters.get(name).and_then(|value| u32::try_from(*value).ok()).unwrap_or(default)
        };
        let how = Association {
            packet_bytes: u32::try_from(serve.packet_bytes).unwrap_or(1200),
            buffer_bytes: value("buffer_kib", 1024).saturating_mul(1024),
            is_ordered: value("ordered", 1) != 0,
            streams: u16::try_from(value("streams", 1)).unwrap_or(1),
            rto_initial_ms: RTO_INITIAL_MS,
            rto_min_ms: value("rto_min_ms", 200),
        };
        let association = library.connect(wire.try_clone()?, how)?;
        let now = Instant::now();
        Ok(Self {
            association,
            wire,
            application,
            outgoing: None,
            incoming: None,
            is_left: false,
            has_finished: false,
            ticked: now,
            busy: now,
            told: now,
        })
    }

    /// Runs until application and peer have sent their last messages, or the daemon has ended.
    fn run(&mut self, control: &ControlEnd) -> io::Result<()> {
        loop {
            self.tick();
            self.take_from_wire()?;
            self.give_to_association()?;
            if self.give_to_application()? {
                return Ok(());
            }
            if self.is_left && self.outgoing.is_none() && !std::mem::replace(&mut self.has_finished, true) {
                self.association.finish();
            }
            if self.told.elapsed() >= ALIVE {
                self.told = Instant::now();
                // An error is ignored: the socket is full while the daemon does not read.
                let _ = say(control, &ProcessMessage::Alive);
            }
            if self.wait(control)? {
                return Ok(());
            }
        }
    }

    fn tick(&mut self) {
        let ms = u32::try_from(self.ticked.elapsed().as_millis()).unwrap_or(u32::MAX);
        if ms > 0 {
            self.ticked += Duration::from_millis(ms.into());
            self.association.tick(ms);
        }
    }

    fn take_from_wire(&mut self) -> io::Result<()> {
        let mut packet = [0; DATAGRAM_MAX];
        for _ in 0..TURN {
            match received(&self.wire, &mut packet) {
                Ok(SocketAttempt::Bytes(bytes)) => {
                    self.busy = Instant::now();
                    self.association.input(packet.get(..bytes).unwrap_or_default());
                }
                Ok(SocketAttempt::Later) => return Ok(()),
                Ok(SocketAttempt::End) => return Err(io::Error::other("the session's socket was shut down")),
                // This call returned an ICMP error for an earlier packet.
                Err(Errno::CONNREFUSED | Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::NOBUFS) => {
                    // ICMP errors are also in a queue, which must be emptied. Otherwise the socket would stay readable
                    // forever.
                    let errors = RecvFlags::DONTWAIT | RecvFlags::ERRQUEUE;
                    while recv(&self.wire, &mut packet[..], errors).is_ok() {}
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Passes the application's messages to the association while its buffer has space.
    fn give_to_association(&mut self) -> io::Result<()> {
        for _ in 0..TURN {
            if self.association.events() & WRITE == 0 {
                return Ok(());
            }
            let message = match self.outgoing.take() {
                Some(message) => message,
                None => match self.next_outgoing()? {
                    Some(message) => message,
                    None => return Ok(()),
                },
            };
            self.busy = Instant::now();
            match self.association.send(&message) {
                Ok(true) => {}
                Ok(false) => {
                    self.outgoing = Some(message);
                    return Ok(());
                }
                // The peer accepts no more messages. Messages from it are still to be read.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => self.is_left = true,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn next_outgoing(&mut self) -> io::Result<Option<Vec<u8>>> {
        if self.is_left {
            return Ok(None);
        }
        let mut message = [0; DATAGRAM_MAX];
        loop {
            match received(&self.application, &mut message) {
                Ok(SocketAttempt::Bytes(bytes)) => return Ok(message.get(..bytes).map(<[u8]>::to_vec)),
                Ok(SocketAttempt::Later) => return Ok(None),
                Ok(SocketAttempt::End) => {
                    self.is_left = true;
                    return Ok(None);
                }
                // The application closed its socket with unread messages. The messages that the application sent before
                // are still in the socket.
                Err(Errno::CONNRESET) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Passes received messages to the application. Returns whether everything was delivered and nothing more can
    /// arrive.
    fn give_to_application(&mut self) -> io::Result<bool> {
        let mut buffer = [0; DATAGRAM_MAX];
        for _ in 0..TURN {
            if let Some(message) = self.incoming.take() {
                match send(&self.application, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                    Ok(_) => {}
                    Err(Errno::AGAIN | Errno::NOBUFS) => {
                        self.incoming = Some(message);
                        return Ok(false);
                    }
                    // The application has gone. The association is read to its end nevertheless, so that it can be
                    // closed.
                    Err(Errno::PIPE | Errno::CONNRESET) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            if self.association.events() & (READ | ERROR) == 0 {
                return Ok(false);
            }
            match self.association.receive(&mut buffer)? {
                MessageRead::Bytes(bytes) => self.incoming = buffer.get(..bytes).map(<[u8]>::to_vec),
                MessageRead::Nothing => return Ok(false),
                MessageRead::End => return Ok(true),
            }
        }
        Ok(false)
    }

    /// Waits for work. Returns whether the daemon has ended.
    fn wait(&self, control: &ControlEnd) -> io::Result<bool> {
        let mut wanted = PollFlags::empty();
        wanted.set(PollFlags::POLLIN, !self.is_left && self.association.events() & WRITE != 0);
        wanted.set(PollFlags::POLLOUT, self.incoming.is_some());
        let patience = match self.busy.elapsed() > IDLE_AFTER {
            // Data that the library already holds makes no descriptor readable, so poll must not wait.
            _ if self.incoming.is_none() && self.association.events() & (READ | ERROR) != 0 => Duration::ZERO,
            true => IDLE,
            false => BUSY,
        };
        let timeout = PollTimeout::try_from(patience).map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut of = vec![
            PollFd::new(control.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.wire.as_fd(), PollFlags::POLLIN),
        ];
        // A socket whose other end is closed would always be ready. The application's socket is therefore polled only
        // while a message can be taken from it or waits to be written to it.
        if !wanted.is_empty() {
            of.push(PollFd::new(self.application.as_fd(), wanted));
        }
        poll(&mut of, timeout)?;
        // The daemon sends nothing more, so a readable socket means that it has ended.
        Ok(of.first().and_then(PollFd::any).unwrap_or(false))
    }
}

fn received(socket: &OwnedFd, buffer: &mut [u8]) -> Result<SocketAttempt, Errno> {
    loop {
        match recv(socket, &mut *buffer, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return Ok(SocketAttempt::End),
            Ok((_, bytes)) => return Ok(SocketAttempt::Bytes(bytes.min(buffer.len()))),
            Err(Errno::AGAIN) => return Ok(SocketAttempt::Later),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}
