//! The fastest forwarder that uses sockets only: it receives and sends datagrams in batches (recvmmsg, sendmmsg).

use std::io::{IoSlice, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd as _;

use anyhow::Context;
use nix::sys::socket::{MsgFlags, MultiHeaders, SockaddrStorage, recvmmsg, sendmmsg};

use super::HELLO;

const BATCH: usize = 64;
const DATAGRAM_MAX: usize = 2048;

/// Forwards each object to every sink that has registered by a hello datagram.
pub fn forward(listen: SocketAddr) -> anyhow::Result<()> {
    let socket = UdpSocket::bind(listen).with_context(|| format!("cannot listen on {listen}"))?;
    let mut sinks: Vec<Option<SockaddrStorage>> = Vec::new();
    let mut buffers = vec![[0; DATAGRAM_MAX]; BATCH];
    loop {
        let came = receive(&socket, &mut buffers)?;
        for (buffer, (len, from)) in buffers.iter().zip(came) {
            let datagram = buffer.get(..len).unwrap_or_default();
            match datagram == HELLO {
                true => sinks.push(from),
                false => send(&socket, datagram, &sinks),
            }
        }
    }
}

/// Receives all waiting datagrams, and waits for at least one. Returns their lengths and sources.
fn receive(
    socket: &UdpSocket,
    buffers: &mut [[u8; DATAGRAM_MAX]],
) -> anyhow::Result<Vec<(usize, Option<SockaddrStorage>)>> {
    let mut headers = MultiHeaders::<SockaddrStorage>::preallocate(BATCH, None);
    let mut slices: Vec<_> = buffers.iter_mut().map(|buffer| [IoSliceMut::new(buffer)]).collect();
    let came = recvmmsg(socket.as_raw_fd(), &mut headers, slices.iter_mut(), MsgFlags::MSG_WAITFORONE, None)?;
    Ok(came.map(|it| (it.bytes, it.address)).collect())
}

/// Sends a datagram to all sinks in batches. An error ends its batch and is otherwise ignored, since a sink may be
/// gone.
fn send(socket: &UdpSocket, datagram: &[u8], sinks: &[Option<SockaddrStorage>]) {
    let slices = [[IoSlice::new(datagram)]; 1];
    for some in sinks.chunks(BATCH) {
        let mut headers = MultiHeaders::<SockaddrStorage>::preallocate(some.len(), None);
        let each = slices.iter().cycle().take(some.len());
        let _ = sendmmsg(socket.as_raw_fd(), &mut headers, each, some, [], MsgFlags::empty())
            .map(Iterator::count);
    }
}
