//! Makes single requests through Linux AIO (`io_submit(2)`), the interface older than io_uring.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::libc;

/// The operation of a request, with the values of `IOCB_CMD_PREAD` and `IOCB_CMD_PWRITE`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum AioRequest {
    Read = 0,
    Write = 1,
}

/// The kernel's `struct iocb`.
#[repr(C)]
#[derive(Default)]
struct AioBlock {
    data: u64,
    key_and_flags: [u32; 2],
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    more_flags: u32,
    event_fd: u32,
}

/// The kernel's `struct io_event`.
#[repr(C)]
#[derive(Default)]
struct Completion {
    data: u64,
    block: u64,
    result: i64,
    result2: i64,
}

const _: () = assert!(size_of::<AioBlock>() == 64 && size_of::<Completion>() == 32);

/// An AIO context with room for one request.
pub struct Aio(libc::c_ulong);

impl Aio {
    pub fn new() -> io::Result<Self> {
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes one number, the context's ID, to `context`.
        done(unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut context) })?;
        Ok(Self(context))
    }

    /// Makes one request, waits for it, and returns the number of bytes sent or received. The kernel executes AIO on
    /// sockets synchronously, inside `io_submit`.
    pub fn call(&self, request: AioRequest, socket: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<usize> {
        let mut block = AioBlock {
            opcode: request as u16,
            fd: socket.as_raw_fd() as u32,
            buffer: bytes.as_mut_ptr() as u64,
            bytes: bytes.len() as u64,
            ..AioBlock::default()
        };
        let blocks = [&raw mut block];
        // SAFETY: the control block and the data outlive the request, since this function waits for the request's
        // completion.
        done(unsafe { libc::syscall(libc::SYS_io_submit, self.0, 1, blocks.as_ptr()) })?;
        let mut completion = Completion::default();
        let for_ever = std::ptr::null::<libc::timespec>();
        // SAFETY: `completion` has space for one event, and the call asks for one.
        done(unsafe { libc::syscall(libc::SYS_io_getevents, self.0, 1, 1, &raw mut completion, for_ever) })?;
        usize::try_from(completion.result)
            .map_err(|_| io::Error::from_raw_os_error(i32::try_from(-completion.result).unwrap_or(libc::EIO)))
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        // SAFETY: `new` created the context, and no request is pending: `call` waits for each.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}

fn done(result: libc::c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
