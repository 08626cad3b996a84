//! A connection between an application and its daemon. It carries JSON records, each with optional file descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg,
    sendmsg, shutdown, socket_with, socketpair,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Largest size of a record (one JSON message), in bytes.
pub const RECORD_MAX: usize = 4096;

/// Largest number of file descriptors that are passed with one record (one JSON message).
const DESCRIPTORS_MAX: usize = 4;

/// One end of the connection between an application and its daemon. No method but [`Self::wait`] blocks.
#[derive(Debug)]
pub struct ControlEnd(OwnedFd);

/// The outcome of a receive call.
#[derive(Debug)]
pub enum ControlReceived<T> {
    /// A record (one JSON message) was received, with the file descriptors that came with it.
    Record(T, Vec<OwnedFd>),
    /// A record was received whose JSON is not valid.
    Malformed(String),
    /// No record waits to be received now.
    Nothing,
    /// The other end has closed the connection.
    End,
}

impl ControlEnd {
    /// Connects to a daemon's socket.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self(socket))
    }

    /// Returns both ends of a new connection, which is a socket pair.
    pub fn pair() -> io::Result<(Self, Self)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (one, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Self(one), Self(other)))
    }

    /// Sends a record with descriptors.
    ///
    /// # Errors
    /// Fails if the other end has closed the connection, or with `WouldBlock` if its receive buffer is full.
    pub fn send(&self, record: &impl Serialize, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let text = serde_json::to_vec(record)?;
        if text.len() > RECORD_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("longer than {RECORD_MAX} bytes"),
            ));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            beside.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(&self.0, &[IoSlice::new(&text)], &mut beside, flags)?;
        Ok(())
    }

    /// Receives a record with its descriptors.
    pub fn receive<T: DeserializeOwned>(&self) -> ControlReceived<T> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let received = self.receive_with(&mut beside);
        // If no valid record was received, the descriptors that came with it are closed when this function returns.
        let descriptors = beside.drain().flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
            _ => Vec::new(),
        });
        let descriptors: Vec<_> = descriptors.collect();
        match received {
            ControlReceived::Record(record, _) => ControlReceived::Record(record, descriptors),
            other => other,
        }
    }

    /// Receives a record and discards the descriptors that are passed with it. The kernel closes the descriptors in the
    /// calling thread. If a descriptor is a TCP socket with `SO_LINGER`, closing it may block for as long as the sender
    /// likes.
    pub fn receive_alone<T: DeserializeOwned>(&self) -> ControlReceived<T> {
        self.receive_with(&mut RecvAncillaryBuffer::default())
    }

    fn receive_with<T: DeserializeOwned>(&self, beside: &mut RecvAncillaryBuffer<'_>) -> ControlReceived<T> {
        let mut text = [0; RECORD_MAX];
        // Descriptors are close-on-exec from the start, so that a child process started meanwhile does not inherit
        // them.
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let mut receive = || recvmsg(&self.0, &mut [IoSliceMut::new(&mut text)], beside, flags);
        // If the other end closed before it read everything, the first `recvmsg` returns ECONNRESET. The second
        // `recvmsg` reads the records that the other end sent before it closed.
        let got = receive().or_else(|error| match error {
            rustix::io::Errno::CONNRESET => receive(),
            other => Err(other),
        });
        let got = match got {
            Ok(got) if got.bytes > 0 => got,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return ControlReceived::Nothing,
            // No record is empty, so zero bytes mean the end of the connection.
            Ok(_) | Err(_) => return ControlReceived::End,
        };
        // The kernel discards the rest of a record that is longer than the buffer (recvmsg(2), MSG_TRUNC).
        if got.flags.contains(ReturnFlags::TRUNC) {
            return ControlReceived::Malformed(format!("longer than {RECORD_MAX} bytes"));
        }
        match serde_json::from_slice(text.get(..got.bytes).unwrap_or_default()) {
            Ok(record) => ControlReceived::Record(record, Vec::new()),
            Err(error) => ControlReceived::Malformed(error.to_string()),
        }
    }

    /// Ends the connection for both ends, without closing the descriptor.
    pub fn end(&self) {
        // Shutdown fails only if the connection is lost already.
        let _ = shutdown(&self.0, Shutdown::Both);
    }

    /// Blocks until there is something to receive, or the other end has closed the connection.
    pub fn wait(&self) {
        // If poll fails, the next receive call reports the error.
        let _ = poll(&mut [PollFd::new(&self.0, PollFlags::IN)], None);
    }

    /// Returns another handle of this end of the connection.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(self.0.try_clone()?))
    }
}

impl From<OwnedFd> for ControlEnd {
    fn from(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }
}

impl From<ControlEnd> for OwnedFd {
    fn from(control: ControlEnd) -> Self {
        control.0
    }
}

impl AsFd for ControlEnd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
    enum ControlNotice {
        Listening,
        Refused { reason: String },
        Finish { messages: u64 },
    }

    #[test]
    fn records_arrive_with_their_file_descriptors() {
        let (one, other) = ControlEnd::pair().expect("a pair");
        let (lent, _kept) = ControlEnd::pair().expect("a pair");
        assert!(matches!(other.receive::<ControlNotice>(), ControlReceived::Nothing));
        let said = ControlNotice::Refused { reason: "later".to_owned() };
        one.send(&said, &[lent.as_fd(), lent.as_fd()]).expect("sent");
        one.send(&ControlNotice::Listening, &[]).expect("sent");
        let ControlReceived::Record(word, descriptors) = other.receive::<ControlNotice>() else {
            panic!("a record")
        };
        assert_eq!((word, descriptors.len()), (said, 2));
        assert!(
            matches!(other.receive::<ControlNotice>(), ControlReceived::Record(ControlNotice::Listening, none) if none.is_empty())
        );
        drop(one);
        assert!(matches!(other.receive::<ControlNotice>(), ControlReceived::End));
    }

    /// An end receives the records that the other end sent before closing, even if the closing end left records unread.
    #[test]
    fn records_sent_before_the_connection_closes_are_received() {
        let (one, other) = ControlEnd::pair().expect("a pair");
        other.send(&ControlNotice::Listening, &[]).expect("sent");
        one.send(&ControlNotice::Finish { messages: 7 }, &[]).expect("sent");
        drop(one);
        let heard = other.receive::<ControlNotice>();
        assert!(
            matches!(heard, ControlReceived::Record(ControlNotice::Finish { messages: 7 }, _)),
            "{heard:?}"
        );
        assert!(matches!(other.receive::<ControlNotice>(), ControlReceived::End));
    }

    #[test]
    fn invalid_or_too_long_record_is_malformed() {
        use rustix::net::send;
        let (one, other) = ControlEnd::pair().expect("a pair");
        let long = vec![b' '; 3 * RECORD_MAX];
        let table: [&[u8]; 6] =
            [b"{", b"[1]", b"\xff\xfe", b"{\"do\":\"open\"}", b"{\"do\":\"finish\",\"messages\":-1}", &long];
        for record in table {
            send(&one, record, SendFlags::empty()).expect("sent");
            assert!(matches!(other.receive::<ControlNotice>(), ControlReceived::Malformed(_)), "{record:?}");
        }
        assert!(matches!(other.receive::<ControlNotice>(), ControlReceived::Nothing));
        // A peer that does not read cannot block the sender.
        let refused = (0..100_000).find_map(|_| one.send(&ControlNotice::Listening, &[]).err());
        assert_eq!(refused.map(|error| error.kind()), Some(io::ErrorKind::WouldBlock));
    }
}
