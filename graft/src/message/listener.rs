//! Sessions that the other end opens.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use millrace_base::control::{Control, Received};
use rustix::event::PollFlags;

use super::waiting::wait;
use super::wire::{Request, Word};
use super::{Error, Session};

/// Of a service, as long as it is there. Pollable.
#[derive(Debug)]
pub struct Listener {
    control: Control,
    is_blocking: bool,
}

impl Listener {
    pub(super) fn new(path: &Path, peer: &str, service: &str, patience: Duration) -> Result<Self, Error> {
        let connected = Control::connect(path);
        let control = connected.map_err(|source| Error::NoDaemon { path: path.to_owned(), source })?;
        control.send(&Request::Listen { peer: peer.to_owned(), service: service.to_owned() }, &[])?;
        let listener = Self { control, is_blocking: true };
        match listener.next(Some(Instant::now() + patience))? {
            (Word::Listening, _) => Ok(listener),
            (Word::Refused { why, reason }, _) => Err(Error::Refused { why, reason }),
            (other, _) => Err(Error::Protocol(format!("{other:?}"))),
        }
    }

    /// The next session, agreed on.
    ///
    /// # Errors
    /// `WouldBlock`: none is there, and the listener does not block. `Over`: the daemon is gone.
    pub fn accept(&self) -> Result<Session, Error> {
        let until = (!self.is_blocking).then(Instant::now);
        match self.next(until) {
            Ok((Word::Accepted(opened), descriptors)) => Session::accepted(opened, descriptors),
            Ok((other, _)) => Err(Error::Protocol(format!("{other:?}"))),
            Err(Error::TimedOut) => Err(Error::WouldBlock),
            Err(error) => Err(error),
        }
    }

    pub fn set_nonblocking(&mut self, nonblocking: bool) {
        self.is_blocking = !nonblocking;
    }

    fn next(&self, until: Option<Instant>) -> Result<(Word, Vec<std::os::fd::OwnedFd>), Error> {
        loop {
            match self.control.receive() {
                Received::Record(word, descriptors) => return Ok((word, descriptors)),
                Received::Malformed(why) => return Err(Error::Protocol(why)),
                Received::End => return Err(Error::Over("the daemon is gone".to_owned())),
                Received::Nothing => wait(&self.control, PollFlags::IN, until)?,
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }
}
