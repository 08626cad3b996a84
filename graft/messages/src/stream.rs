//! A session as a stream of bytes ([`Read`] and [`Write`]), for programs that do not use messages.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use crate::{Error, Received, Session};

/// Services that a session needs so that all bytes arrive once and in order.
const NEEDS: [&str; 2] = ["reliability", "order"];
/// Largest message of a stream, in bytes. Bytes that are written are sent in messages of at most this size.
const PIECE: usize = 16 << 10;

/// A session that both applications use as a stream of bytes. The boundaries of its messages have no meaning.
///
/// `read` returns 0 after the other application has ended its direction. It returns an error if the session ended in
/// another way, or if data before the end is missing. A nonblocking session returns errors of the kind
/// [`WouldBlock`](io::ErrorKind::WouldBlock).
#[derive(Debug)]
pub struct Stream {
    session: Session,
    rest: Rest,
}

/// A received message, with how much of it was read already.
#[derive(Debug, Default)]
pub(crate) struct Rest {
    bytes: Vec<u8>,
    at: usize,
}

impl Stream {
    /// Turns a session into a stream.
    ///
    /// # Errors
    /// Both hosts have not agreed on the session, or its graft lacks `reliability` or `order`.
    pub fn new(mut session: Session) -> Result<Self, Error> {
        check(&mut session)?;
        Ok(Self { session, rest: Rest::default() })
    }

    /// Returns the session, to read its events, to renegotiate, and to make it nonblocking. Messages received directly
    /// from the session are missing in the stream.
    pub fn session(&mut self) -> &mut Session {
        &mut self.session
    }

    /// Ends this application's direction: this application writes no more. The other application may continue to write.
    ///
    /// # Errors
    /// Fails like [`Session::finish`].
    pub fn finish(&mut self) -> Result<(), Error> {
        self.session.finish()
    }

    /// Ends this application's direction and closes the session.
    ///
    /// # Errors
    /// Fails like [`Session::close`].
    pub fn close(self) -> Result<(), Error> {
        self.session.close()
    }
}

/// Checks that the session's graft (list of packet functions) provides the services that a stream needs. The check is
/// repeated during the session, since the graft may change.
fn check(session: &mut Session) -> Result<(), Error> {
    let opened = session.agreed()?;
    let has = |service: &&str| opened.services.iter().any(|had| had == service);
    match NEEDS.iter().find(|service| !has(service)) {
        Some(&missing) => Err(Error::NotAStream { graft: opened.graft.clone(), missing }),
        None => Ok(()),
    }
}

/// Sends at most `PIECE` bytes, from the start of `bytes`. Returns how many were sent.
pub(crate) fn write(session: &mut Session, bytes: &[u8]) -> Result<usize, Error> {
    check(session)?;
    let piece = bytes.get(..PIECE).unwrap_or(bytes);
    if !piece.is_empty() {
        session.send(piece)?;
    }
    Ok(piece.len())
}

/// Reads bytes that have arrived. Returns how many were read, which is 0 at the end of the stream.
pub(crate) fn read(session: &mut Session, rest: &mut Rest, to: &mut [u8]) -> Result<usize, Error> {
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

    /// Sends the rest of a message that a nonblocking session has sent only in part.
    fn flush(&mut self) -> io::Result<()> {
        Ok(self.session.flush()?)
    }
}

impl AsFd for Stream {
    /// Returns the descriptor of [`Session::as_fd`].
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
