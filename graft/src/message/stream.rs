//! A session as a stream of bytes, for what knows no messages: [`Read`] and [`Write`].

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use super::{Error, Received, Session};

/// What a session has to have, so that all bytes come, once, and in order.
const NEEDS: [&str; 2] = ["reliability", "order"];
/// Bytes of a message: what is read at the other end comes in such pieces.
const PIECE: usize = 16 << 10;

/// Both ends use the session as a stream: where the pieces begin and end means nothing.
///
/// It ends where the other end has finished (`read` returns 0), and with an error where that did not come, or not all of what was sent
/// before. Errors of a session that does not block are [`WouldBlock`](io::ErrorKind::WouldBlock).
#[derive(Debug)]
pub struct Stream {
    session: Session,
    rest: Rest,
}

/// Of a message, what was not read yet.
#[derive(Debug, Default)]
pub(super) struct Rest {
    bytes: Vec<u8>,
    at: usize,
}

impl Stream {
    /// # Errors
    /// The session is not agreed on, or its graft has no `reliability` or no `order`.
    pub fn new(mut session: Session) -> Result<Self, Error> {
        check(&mut session)?;
        Ok(Self { session, rest: Rest::default() })
    }

    /// For its events, to renegotiate, and how it waits. Who receives from it takes pieces away.
    pub fn session(&mut self) -> &mut Session {
        &mut self.session
    }

    /// This end writes no more; the other one may go on.
    ///
    /// # Errors
    /// As [`Session::finish`].
    pub fn finish(&mut self) -> Result<(), Error> {
        self.session.finish()
    }

    /// Finishes, and gives the session back.
    ///
    /// # Errors
    /// As [`Session::close`].
    pub fn close(self) -> Result<(), Error> {
        self.session.close()
    }
}

/// Also in mid-stream: another graft may have come.
fn check(session: &mut Session) -> Result<(), Error> {
    let opened = session.agreed()?;
    let has = |service: &&str| opened.services.iter().any(|had| had == service);
    match NEEDS.iter().find(|service| !has(service)) {
        Some(&missing) => Err(Error::NotAStream { graft: opened.graft.clone(), missing }),
        None => Ok(()),
    }
}

/// Sends a piece of it: how much.
pub(super) fn write(session: &mut Session, bytes: &[u8]) -> Result<usize, Error> {
    check(session)?;
    let piece = bytes.get(..PIECE).unwrap_or(bytes);
    if !piece.is_empty() {
        session.send(piece)?;
    }
    Ok(piece.len())
}

/// How many bytes have come; 0 at the end.
pub(super) fn read(session: &mut Session, rest: &mut Rest, to: &mut [u8]) -> Result<usize, Error> {
    while rest.is_empty() && !to.is_empty() {
        match session.receive()? {
            Received::Message(bytes) => *rest = Rest { bytes, at: 0 },
            Received::Finished if session.missing() > 0 => return Err(Error::Incomplete),
            Received::Finished => return Ok(0),
        }
    }
    Ok(rest.take(to))
}

impl Rest {
    fn is_empty(&self) -> bool {
        self.at == self.bytes.len()
    }

    fn take(&mut self, to: &mut [u8]) -> usize {
        let left = self.bytes.get(self.at..).unwrap_or_default();
        let now = left.len().min(to.len());
        for (to, from) in to.iter_mut().zip(left) {
            *to = *from;
        }
        self.at += now;
        now
    }
}

impl Read for Stream {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        Ok(read(&mut self.session, &mut self.rest, to)?)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(write(&mut self.session, bytes)?)
    }

    /// What a session that does not block has taken, and not sent yet.
    fn flush(&mut self) -> io::Result<()> {
        Ok(self.session.flush()?)
    }
}

impl AsFd for Stream {
    /// As [`Session::as_fd`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.session.as_fd()
    }
}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = match &error {
            Error::WouldBlock => io::ErrorKind::WouldBlock,
            Error::TimedOut => io::ErrorKind::TimedOut,
            Error::Finished => io::ErrorKind::BrokenPipe,
            Error::Over(_) => io::ErrorKind::ConnectionReset,
            Error::Incomplete => io::ErrorKind::UnexpectedEof,
            Error::NotAgreed(_) => io::ErrorKind::NotConnected,
            Error::NoDaemon { .. } | Error::Refused { .. } => io::ErrorKind::ConnectionRefused,
            Error::NotAStream { .. } | Error::TooLong { .. } => io::ErrorKind::InvalidInput,
            Error::Socket(socket) => socket.kind(),
            Error::Forked | Error::Protocol(_) => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}
