//! Makes single requests through io_uring (`io_uring(7)`).

#![allow(unsafe_code)]

use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::squeue::{Entry, Flags};
use io_uring::{IoUring, opcode, types::Fd};
use nix::libc;

/// The file offset in a splice request whose file is a pipe or a socket: such files have no offset.
const NO_OFFSET: i64 = -1;

/// A request on a connected socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UringRequest {
    Send,
    SendMessage,
    Receive,
    ReceiveMessage,
    Write,
    WriteVector,
    Read,
    ReadVector,
}

/// An io_uring instance with room for one request.
pub struct Uring(IoUring);

impl Uring {
    pub fn new() -> io::Result<Self> {
        IoUring::new(1).map(Self)
    }

    /// Makes one request, waits for its completion, and returns the number of bytes sent or received.
    pub fn call(
        &mut self,
        request: UringRequest,
        socket: BorrowedFd<'_>,
        bytes: &mut [u8],
    ) -> io::Result<usize> {
        self.run(request, Flags::empty(), socket, bytes)
    }

    /// Makes one request like [`Self::call`], executed by a worker thread of io_uring.
    pub fn call_worker(
        &mut self,
        request: UringRequest,
        socket: BorrowedFd<'_>,
        bytes: &mut [u8],
    ) -> io::Result<usize> {
        self.run(request, Flags::ASYNC, socket, bytes)
    }

    /// Splices from a pipe to a socket, or from a socket to a pipe. The kernel executes splices in a worker thread.
    pub fn splice(&mut self, from: BorrowedFd<'_>, to: BorrowedFd<'_>, bytes: u32) -> io::Result<usize> {
        let [from, to] = [from, to].map(|file| Fd(file.as_raw_fd()));
        let splice = opcode::Splice::new(from, NO_OFFSET, to, NO_OFFSET, bytes).build();
        // SAFETY: the request points to no memory, and its files are open while the call waits.
        unsafe { self.complete(splice) }
    }

    fn run(
        &mut self,
        request: UringRequest,
        flags: Flags,
        socket: BorrowedFd<'_>,
        bytes: &mut [u8],
    ) -> io::Result<usize> {
        let socket = Fd(socket.as_raw_fd());
        let len = u32::try_from(bytes.len()).map_err(io::Error::other)?;
        let start = bytes.as_mut_ptr();
        let mut slice = libc::iovec { iov_base: start.cast(), iov_len: bytes.len() };
        // SAFETY: `msghdr` is plain data, and all zeroes is an empty message.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut slice;
        message.msg_iovlen = 1;
        let entry = match request {
            UringRequest::Send => opcode::Send::new(socket, start, len).build(),
            UringRequest::SendMessage => opcode::SendMsg::new(socket, &raw const message).build(),
            UringRequest::Receive => opcode::Recv::new(socket, start, len).build(),
            UringRequest::ReceiveMessage => opcode::RecvMsg::new(socket, &raw mut message).build(),
            UringRequest::Write => opcode::Write::new(socket, start, len).build(),
            UringRequest::WriteVector => opcode::Writev::new(socket, &raw const slice, 1).build(),
            UringRequest::Read => opcode::Read::new(socket, start, len).build(),
            UringRequest::ReadVector => opcode::Readv::new(socket, &raw const slice, 1).build(),
        };
        // SAFETY: what the request points to outlives the call.
        unsafe { self.complete(entry.flags(flags)) }
    }

    /// Submits a request, waits until it has completed, and returns its number of bytes or its error. The kernel then
    /// no longer uses the memory to which the request points.
    ///
    /// # Safety
    /// The memory to which the request points is valid during the call.
    unsafe fn complete(&mut self, request: Entry) -> io::Result<usize> {
        // SAFETY: the caller promises that the request's memory is valid until it has completed.
        unsafe { self.0.submission().push(&request) }.map_err(io::Error::other)?;
        loop {
            let waited = self.0.submit_and_wait(1);
            if let Some(completion) = self.0.completion().next() {
                let result = completion.result();
                return usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
            }
            // A signal may interrupt the wait.
            waited.map(|_| ()).or_else(|error| match error.kind() {
                ErrorKind::Interrupted => Ok(()),
                _ => Err(error),
            })?;
        }
    }
}
