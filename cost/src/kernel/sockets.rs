//! Makes trial calls: one for every system call and request that sends or receives on a socket.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;

use nix::fcntl::{SpliceFFlags, splice};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::sendfile::sendfile;
use nix::sys::socket::{
    ControlMessage, MsgFlags, MultiHeaders, UnixAddr, recv, recvmmsg, recvmsg, send, sendmmsg, sendmsg,
};
use nix::sys::uio::{readv, writev};
use nix::unistd::{pipe, read, write};

use super::aio::{self, Aio};
use super::uring::{Uring, UringRequest};

pub(super) const BYTES: [u8; 8] = *b"millrace";

/// A connected pair of AF_UNIX sockets for trial calls, which need no network.
pub struct SocketPair {
    sender: UnixStream,
    receiver: UnixStream,
}

impl SocketPair {
    /// Opens the sockets and files that trial calls need.
    pub fn new() -> io::Result<Self> {
        let (sender, receiver) = UnixStream::pair()?;
        // A trial call that fails must return an error and never block.
        sender.set_nonblocking(true)?;
        receiver.set_nonblocking(true)?;
        Ok(Self { sender, receiver })
    }

    pub(super) fn write(&self) -> io::Result<usize> {
        Ok(write(&self.sender, &BYTES)?)
    }

    pub(super) fn writev(&self) -> io::Result<usize> {
        Ok(writev(&self.sender, &[IoSlice::new(&BYTES)])?)
    }

    pub(super) fn aio_write(&self) -> io::Result<usize> {
        Aio::new()?.call(aio::AioRequest::Write, self.sender.as_fd(), &mut BYTES.clone())
    }

    pub(super) fn sendto(&self) -> io::Result<usize> {
        Ok(send(self.sender.as_raw_fd(), &BYTES, MsgFlags::empty())?)
    }

    pub(super) fn sendmsg(&self) -> io::Result<usize> {
        let slices = [IoSlice::new(&BYTES)];
        Ok(sendmsg::<()>(self.sender.as_raw_fd(), &slices, &[], MsgFlags::empty(), None)?)
    }

    pub(super) fn sendmmsg(&self) -> io::Result<usize> {
        let mut headers = MultiHeaders::<UnixAddr>::preallocate(1, None);
        let slices = [[IoSlice::new(&BYTES)]];
        let nothing: [ControlMessage<'_>; 0] = [];
        let to = [None::<UnixAddr>];
        let sent = sendmmsg(self.sender.as_raw_fd(), &mut headers, &slices, to, nothing, MsgFlags::empty())?;
        Ok(sent.map(|message| message.bytes).sum())
    }

    pub(super) fn sendfile(&self) -> io::Result<usize> {
        let mut file = File::from(memfd_create(c"millrace", MFdFlags::MFD_CLOEXEC)?);
        file.write_all(&BYTES)?;
        file.seek(SeekFrom::Start(0))?;
        Ok(sendfile(&self.sender, &file, None, BYTES.len())?)
    }

    pub(super) fn splice_to(&self) -> io::Result<usize> {
        let (reader, writer) = pipe()?;
        write(&writer, &BYTES)?;
        Ok(splice(&reader, None, &self.sender, None, BYTES.len(), SpliceFFlags::empty())?)
    }

    pub(super) fn uring_write(&self) -> io::Result<usize> {
        Uring::new()?.call(UringRequest::Write, self.sender.as_fd(), &mut BYTES.clone())
    }

    pub(super) fn uring_writev(&self) -> io::Result<usize> {
        Uring::new()?.call(UringRequest::WriteVector, self.sender.as_fd(), &mut BYTES.clone())
    }

    pub(super) fn uring_send(&self) -> io::Result<usize> {
        Uring::new()?.call(UringRequest::Send, self.sender.as_fd(), &mut BYTES.clone())
    }

    /// Sends from a worker thread of io_uring.
    pub fn send_by_worker(&self) -> io::Result<usize> {
        Uring::new()?.call_worker(UringRequest::Send, self.sender.as_fd(), &mut BYTES.clone())
    }

    /// Splices from a pipe to the sender, then from the receiver to the pipe, in worker threads of io_uring.
    pub fn splice_by_worker(&self) -> io::Result<usize> {
        let (reader, writer) = pipe()?;
        let bytes = write(&writer, &BYTES)? as u32;
        let mut uring = Uring::new()?;
        uring.splice(reader.as_fd(), self.sender.as_fd(), bytes)?;
        uring.splice(self.receiver.as_fd(), writer.as_fd(), bytes)
    }

    pub(super) fn uring_sendmsg(&self) -> io::Result<usize> {
        Uring::new()?.call(UringRequest::SendMessage, self.sender.as_fd(), &mut BYTES.clone())
    }

    pub(super) fn read(&self) -> io::Result<usize> {
        Ok(read(&self.receiver, &mut BYTES.clone())?)
    }

    pub(super) fn readv(&self) -> io::Result<usize> {
        Ok(readv(&self.receiver, &mut [IoSliceMut::new(&mut BYTES.clone())])?)
    }

    pub(super) fn aio_read(&self) -> io::Result<usize> {
        Aio::new()?.call(aio::AioRequest::Read, self.receiver.as_fd(), &mut BYTES.clone())
    }

    pub(super) fn recvfrom(&self) -> io::Result<usize> {
        Ok(recv(self.receiver.as_raw_fd(), &mut BYTES.clone(), MsgFlags::empty())?)
    }

    pub(super) fn recvmsg(&self) -> io::Result<usize> {
        let mut bytes = BYTES;
        let mut slices = [IoSliceMut::new(&mut bytes)];
        Ok(recvmsg::<()>(self.receiver.as_raw_fd(), &mut slices, None, MsgFlags::empty())?.bytes)
    }

    pub(super) fn recvmmsg(&self) -> io::Result<usize> {
        let mut headers = MultiHeaders::<UnixAddr>::preallocate(1, None);
        let mut bytes = BYTES;
        let mut slices = [[IoSliceMut::new(&mut bytes)]];
        let from = self.receiver.as_raw_fd();
        let messages = recvmmsg(from, &mut headers, slices.iter_mut(), MsgFlags::empty(), None)?;
        Ok(messages.map(|message| message.bytes).sum())
    }

    pub(super) fn splice(&self) -> io::Result<usize> {
        let (_reader, writer) = pipe()?;
        Ok(splice(&self.receiver, None, &writer, None, BYTES.len(), SpliceFFlags::empty())?)
    }

    pub(super) fn uring_read(&self) -> io::Result<usize> {
        Uring::new()?.call(UringRequest::Read, self.receiver.as_fd(), &mut BYTES.clone())
    }

    pub(super) fn uring_readv(&self) -> io::Result<usize> {
        Uring::new()?.call(UringRequest::ReadVector, self.receiver.as_fd(), &mut BYTES.clone())
    }

    pub(super) fn uring_recv(&self) -> io::Result<usize> {
        Uring::new()?.call(UringRequest::Receive, self.receiver.as_fd(), &mut BYTES.clone())
    }

    pub(super) fn uring_recvmsg(&self) -> io::Result<usize> {
        Uring::new()?.call(UringRequest::ReceiveMessage, self.receiver.as_fd(), &mut BYTES.clone())
    }
}

/// Returns the calling thread's ID.
pub(super) fn thread_id() -> u32 {
    u32::try_from(nix::unistd::gettid().as_raw()).unwrap_or(0)
}
