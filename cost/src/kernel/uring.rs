//! Makes single requests through io_uring (`io_uring(7)`).

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use millrace_kernel::memory::Mapping;
use nix::libc;

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

impl UringRequest {
    /// Returns the request's `IORING_OP_*` code.
    const fn code(self) -> u8 {
        match self {
            Self::ReadVector => 1,
            Self::WriteVector => 2,
            Self::SendMessage => 9,
            Self::ReceiveMessage => 10,
            Self::Read => 22,
            Self::Write => 23,
            Self::Send => 26,
            Self::Receive => 27,
        }
    }
}

#[repr(C)]
#[derive(Default)]
struct SubmissionOffsets {
    head: u32,
    tail: u32,
    ring_mask: u32,
    ring_entries: u32,
    flags: u32,
    dropped: u32,
    array: u32,
    resv1: u32,
    user_addr: u64,
}

#[repr(C)]
#[derive(Default)]
struct CompletionOffsets {
    head: u32,
    tail: u32,
    ring_mask: u32,
    ring_entries: u32,
    overflow: u32,
    cqes: u32,
    flags: u32,
    resv1: u32,
    user_addr: u64,
}

/// The kernel's `struct io_uring_params`.
#[repr(C)]
#[derive(Default)]
struct UringParams {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    sq_thread_cpu: u32,
    sq_thread_idle: u32,
    features: u32,
    wq_fd: u32,
    resv: [u32; 3],
    submission: SubmissionOffsets,
    completion: CompletionOffsets,
}

/// The code `IORING_OP_SPLICE`.
const SPLICE: u8 = 30;
/// The file offset in a splice request whose file is a pipe or a socket: such files have no offset.
const NO_OFFSET: u64 = u64::MAX;

/// The kernel's `struct io_uring_sqe`, with the names of the fields that sockets use.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Submission {
    opcode: u8,
    flags: u8,
    ioprio: u16,
    fd: i32,
    off: u64,
    addr: u64,
    len: u32,
    msg_flags: u32,
    user_data: u64,
    buffer: u16,
    personality: u16,
    splice_from: i32,
    rest: [u64; 2],
}

const _: () = assert!(size_of::<Submission>() == 64 && size_of::<UringParams>() == 120);

/// The flag `IOSQE_ASYNC`: a worker thread executes the request.
const FLAG_ASYNC: u8 = 1 << 4;
/// The flag `IORING_ENTER_GETEVENTS`.
const ENTER_GETEVENTS: libc::c_uint = 1;
/// The mapping's offset `IORING_OFF_SQES`.
const OFFSET_SUBMISSIONS: usize = 0x1000_0000;
/// Size of `struct io_uring_cqe`: 8 bytes of user data, then the result and flags.
const COMPLETION_BYTES: usize = 16;
const RESULT_AT: usize = 8;

/// An io_uring instance with room for one request.
pub struct Uring {
    fd: OwnedFd,
    params: UringParams,
    /// Mapping of the submission and the completion ring, which share a mapping since Linux 5.4.
    rings: Mapping,
    submissions: Mapping,
}

impl Uring {
    pub fn new() -> io::Result<Self> {
        let mut params = UringParams::default();
        // SAFETY: `params` has the layout of the kernel's structure, which the kernel fills.
        let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, &raw mut params) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just returned this descriptor, and nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        let array_end = params.submission.array + params.sq_entries * 4;
        let completions_end = params.completion.cqes + params.cq_entries * COMPLETION_BYTES as u32;
        let rings = Mapping::new(fd.as_fd(), array_end.max(completions_end) as usize, 0, true)?;
        let bytes = params.sq_entries as usize * size_of::<Submission>();
        let submissions = Mapping::new(fd.as_fd(), bytes, OFFSET_SUBMISSIONS, true)?;
        Ok(Self { fd, params, rings, submissions })
    }

    /// Makes one request, waits for its completion, and returns the number of bytes sent or received.
    pub fn call(
        &mut self,
        request: UringRequest,
        socket: BorrowedFd<'_>,
        bytes: &mut [u8],
    ) -> io::Result<usize> {
        self.run(request, 0, socket, bytes)
    }

    /// Makes one request like [`Self::call`], executed by a worker thread of io_uring.
    pub fn call_worker(
        &mut self,
        request: UringRequest,
        socket: BorrowedFd<'_>,
        bytes: &mut [u8],
    ) -> io::Result<usize> {
        self.run(request, FLAG_ASYNC, socket, bytes)
    }

    /// Splices from a pipe to a socket, or from a socket to a pipe. The kernel executes splices in a worker thread.
    pub fn splice(&mut self, from: BorrowedFd<'_>, to: BorrowedFd<'_>, bytes: u32) -> io::Result<usize> {
        self.submit(Submission {
            opcode: SPLICE,
            fd: to.as_raw_fd(),
            off: NO_OFFSET,
            addr: NO_OFFSET,
            len: bytes,
            splice_from: from.as_raw_fd(),
            ..Submission::default()
        })?;
        self.completion()
    }

    fn run(
        &mut self,
        request: UringRequest,
        flags: u8,
        socket: BorrowedFd<'_>,
        bytes: &mut [u8],
    ) -> io::Result<usize> {
        let mut slice = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        // SAFETY: `msghdr` is plain data, and all zeroes is an empty message.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut slice;
        message.msg_iovlen = 1;
        let (address, len) = match request {
            UringRequest::Send | UringRequest::Receive | UringRequest::Write | UringRequest::Read => {
                (bytes.as_mut_ptr() as u64, bytes.len() as u32)
            }
            UringRequest::SendMessage | UringRequest::ReceiveMessage => (&raw mut message as u64, 1),
            UringRequest::WriteVector | UringRequest::ReadVector => (&raw mut slice as u64, 1),
        };
        self.submit(Submission {
            opcode: request.code(),
            flags,
            fd: socket.as_raw_fd(),
            addr: address,
            len,
            ..Submission::default()
        })?;
        self.completion()
    }

    /// Submits a request and waits until it has completed. The kernel then no longer uses the memory to which the
    /// request points.
    fn submit(&mut self, submission: Submission) -> io::Result<()> {
        // SAFETY: the mapping has one submission entry, which starts here. The kernel does not read the entry before
        // the tail moves.
        unsafe { self.submissions.start().cast::<Submission>().write(submission) };
        let tail = self.word(self.params.submission.tail);
        let at = tail.load(Ordering::Relaxed);
        // The submission queue has one entry, so its index array has one element: the index 0.
        self.word(self.params.submission.array).store(0, Ordering::Relaxed);
        // Release: the kernel must see the entry before the new tail.
        tail.store(at.wrapping_add(1), Ordering::Release);
        // A signal may interrupt the wait, so repeat it until there is a completion.
        loop {
            // SAFETY: no pointer is passed, and the request's memory outlives the wait.
            let done = unsafe {
                libc::syscall(
                    libc::SYS_io_uring_enter,
                    self.fd.as_raw_fd(),
                    1,
                    1,
                    ENTER_GETEVENTS,
                    std::ptr::null::<libc::sigset_t>(),
                    0,
                )
            };
            let completed = self.word(self.params.completion.tail).load(Ordering::Acquire)
                != self.word(self.params.completion.head).load(Ordering::Relaxed);
            match io::Error::last_os_error() {
                _ if completed => return Ok(()),
                error if done < 0 && error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
        }
    }

    /// Takes the completion from the ring, and returns its number of bytes or its error.
    fn completion(&self) -> io::Result<usize> {
        let head = self.word(self.params.completion.head);
        let at = head.load(Ordering::Relaxed);
        let index = at & self.word(self.params.completion.ring_mask).load(Ordering::Relaxed);
        let offset = self.params.completion.cqes as usize + index as usize * COMPLETION_BYTES + RESULT_AT;
        let result = self.word(u32::try_from(offset).map_err(io::Error::other)?).load(Ordering::Relaxed);
        head.store(at.wrapping_add(1), Ordering::Release);
        let result = result as i32;
        usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
    }

    /// Returns the 32-bit value in the rings at an offset that the kernel returned.
    fn word(&self, offset: u32) -> &AtomicU32 {
        // SAFETY: the offset is aligned and inside the mapping, whose size was computed from the kernel's offsets.
        unsafe { self.rings.start().add(offset as usize).cast().as_ref() }
    }
}
