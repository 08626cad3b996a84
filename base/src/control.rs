//! A connection between an application and its daemon: records of JSON, with descriptors beside them.

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

/// Longest record, bytes.
pub const RECORD_MAX: usize = 4096;

/// Descriptors in a record.
const DESCRIPTORS_MAX: usize = 4;

/// Never blocks.
#[derive(Debug)]
pub struct Control(OwnedFd);

/// What came.
#[derive(Debug)]
pub enum Received<T> {
    Record(T, Vec<OwnedFd>),
    /// A record that is none of these.
    Malformed(String),
    Nothing,
    /// The other end is gone.
    End,
}

impl Control {
    pub fn connect(path: &Path) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self(socket))
    }

    pub fn pair() -> io::Result<(Self, Self)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (one, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Self(one), Self(other)))
    }

    /// # Errors
    /// The other end is gone, or does not read (`WouldBlock`).
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

    pub fn receive<T: DeserializeOwned>(&self) -> Received<T> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let received = self.receive_with(&mut beside);
        // Closed when this is left, if nobody takes them.
        let descriptors = beside.drain().flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
            _ => Vec::new(),
        });
        let descriptors: Vec<_> = descriptors.collect();
        match received {
            Received::Record(record, _) => Received::Record(record, descriptors),
            other => other,
        }
    }

    /// Receives a record, and takes no descriptor beside it. The kernel closes those in this thread, for as long as whoever has passed them
    /// likes: a TCP socket lingers.
    pub fn receive_alone<T: DeserializeOwned>(&self) -> Received<T> {
        self.receive_with(&mut RecvAncillaryBuffer::default())
    }

    fn receive_with<T: DeserializeOwned>(&self, beside: &mut RecvAncillaryBuffer<'_>) -> Received<T> {
        let mut text = [0; RECORD_MAX];
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let mut receive = || recvmsg(&self.0, &mut [IoSliceMut::new(&mut text)], beside, flags);
        // Who went without having read everything is told first, and what it has said stands behind that.
        let got = receive().or_else(|error| match error {
            rustix::io::Errno::CONNRESET => receive(),
            other => Err(other),
        });
        let got = match got {
            Ok(got) if got.bytes > 0 => got,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Received::Nothing,
            // There are no empty records.
            Ok(_) | Err(_) => return Received::End,
        };
        if got.flags.contains(ReturnFlags::TRUNC) {
            return Received::Malformed(format!("longer than {RECORD_MAX} bytes"));
        }
        match serde_json::from_slice(text.get(..got.bytes).unwrap_or_default()) {
            Ok(record) => Received::Record(record, Vec::new()),
            Err(error) => Received::Malformed(error.to_string()),
        }
    }

    /// Ends the connection for both ends, and closes nothing.
    pub fn end(&self) {
        // Where it is no connection any more there is nothing to end.
        let _ = shutdown(&self.0, Shutdown::Both);
    }

    /// Waits until there is something to receive, or the other end is gone.
    pub fn wait(&self) {
        // Whatever went wrong shows when it is received.
        let _ = poll(&mut [PollFd::new(&self.0, PollFlags::IN)], None);
    }

    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(self.0.try_clone()?))
    }
}

impl From<OwnedFd> for Control {
    fn from(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }
}

impl From<Control> for OwnedFd {
    fn from(control: Control) -> Self {
        control.0
    }
}

impl AsFd for Control {
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
    enum Word {
        Listening,
        Refused { reason: String },
        Finish { messages: u64 },
    }

    #[test]
    fn records_come_with_their_descriptors() {
        let (one, other) = Control::pair().expect("a pair");
        let (lent, _kept) = Control::pair().expect("a pair");
        assert!(matches!(other.receive::<Word>(), Received::Nothing));
        let said = Word::Refused { reason: "later".to_owned() };
        one.send(&said, &[lent.as_fd(), lent.as_fd()]).expect("sent");
        one.send(&Word::Listening, &[]).expect("sent");
        let Received::Record(word, descriptors) = other.receive::<Word>() else { panic!("a record") };
        assert_eq!((word, descriptors.len()), (said, 2));
        assert!(
            matches!(other.receive::<Word>(), Received::Record(Word::Listening, none) if none.is_empty())
        );
        drop(one);
        assert!(matches!(other.receive::<Word>(), Received::End));
    }

    /// Whoever goes may leave words unread.
    #[test]
    fn what_was_said_before_the_end_is_heard() {
        let (one, other) = Control::pair().expect("a pair");
        other.send(&Word::Listening, &[]).expect("sent");
        one.send(&Word::Finish { messages: 7 }, &[]).expect("sent");
        drop(one);
        let heard = other.receive::<Word>();
        assert!(matches!(heard, Received::Record(Word::Finish { messages: 7 }, _)), "{heard:?}");
        assert!(matches!(other.receive::<Word>(), Received::End));
    }

    #[test]
    fn garbage_is_malformed_and_bounded() {
        use rustix::net::send;
        let (one, other) = Control::pair().expect("a pair");
        let long = vec![b' '; 3 * RECORD_MAX];
        let table: [&[u8]; 6] =
            [b"{", b"[1]", b"\xff\xfe", b"{\"do\":\"open\"}", b"{\"do\":\"finish\",\"messages\":-1}", &long];
        for record in table {
            send(&one, record, SendFlags::empty()).expect("sent");
            assert!(matches!(other.receive::<Word>(), Received::Malformed(_)), "{record:?}");
        }
        assert!(matches!(other.receive::<Word>(), Received::Nothing));
        // Who does not read holds nobody up.
        let refused = (0..100_000).find_map(|_| one.send(&Word::Listening, &[]).err());
        assert_eq!(refused.map(|error| error.kind()), Some(io::ErrorKind::WouldBlock));
    }
}
