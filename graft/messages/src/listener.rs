//! Listeners for sessions that the other host opens.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use millrace_base::control::{ControlEnd, ControlReceived};
use rustix::event::PollFlags;

use crate::waiting::wait;
use crate::wire::{BrokerReply, BrokerRequest};
use crate::{Error, Session};

/// A listener for sessions of one service. It listens until it is dropped, and event loops can poll it.
///
/// ```no_run
/// use millrace_messages::{Preconnection, Received};
///
/// # fn example() -> Result<(), millrace_messages::Error> {
/// let listener = Preconnection::new("station", "telemetry").listen()?;
/// loop {
///     let mut session = listener.accept()?;
///     while let Received::Message(message) = session.receive()? {
///         session.send(&message)?;
///     }
///     session.close()?;
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct Listener {
    control: ControlEnd,
    is_blocking: bool,
}

impl Listener {
    pub(crate) fn new(path: &Path, peer: &str, service: &str, patience: Duration) -> Result<Self, Error> {
        let connected = ControlEnd::connect(path);
        let control = connected.map_err(|source| Error::NoDaemon { path: path.to_owned(), source })?;
        control.send(&BrokerRequest::Listen { peer: peer.to_owned(), service: service.to_owned() }, &[])?;
        let listener = Self { control, is_blocking: true };
        match listener.next(Some(Instant::now() + patience))? {
            (BrokerReply::Listening, _) => Ok(listener),
            (BrokerReply::Refused { why, reason }, _) => Err(Error::Refused { why, reason }),
            (other, _) => Err(Error::Protocol(format!("{other:?}"))),
        }
    }

    /// Accepts the next session that the peer has opened and both hosts have agreed on.
    ///
    /// # Errors
    /// `WouldBlock` if no session waits and the listener is nonblocking. `Over` if the daemon has ended.
    pub fn accept(&self) -> Result<Session, Error> {
        let until = (!self.is_blocking).then(Instant::now);
        match self.next(until) {
            Ok((BrokerReply::Accepted(opened), descriptors)) => Session::accepted(opened, descriptors),
            Ok((other, _)) => Err(Error::Protocol(format!("{other:?}"))),
            Err(Error::TimedOut) => Err(Error::WouldBlock),
            Err(error) => Err(error),
        }
    }

    /// Sets whether [`Self::accept`] returns [`Error::WouldBlock`] instead of waiting.
    pub fn set_nonblocking(&mut self, nonblocking: bool) {
        self.is_blocking = !nonblocking;
    }

    fn next(&self, until: Option<Instant>) -> Result<(BrokerReply, Vec<std::os::fd::OwnedFd>), Error> {
        loop {
            match self.control.receive() {
                ControlReceived::Record(reply, descriptors) => return Ok((reply, descriptors)),
                ControlReceived::Malformed(why) => return Err(Error::Protocol(why)),
                ControlReceived::End => {
                    return Err(Error::Over("the daemon has closed the connection".to_owned()));
                }
                ControlReceived::Nothing => wait(&self.control, PollFlags::IN, until)?,
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }
}
