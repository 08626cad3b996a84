//! The sockets that all sessions share, each with its own port.

use std::{
    io::{self, IoSliceMut},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    os::fd::AsFd as _,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{setsockopt, sockopt},
};
use quinn::udp::{BATCH_SIZE, EcnCodepoint, RecvMeta, Transmit, UdpSocketState};

/// Size of a buffer for datagrams that the kernel has merged (GRO), bytes.
const MERGED: usize = 65_536;
/// Size of a socket's receive buffer in the kernel, bytes. Hundreds of sessions share it.
const RECEIVE_BUFFER: usize = 16 << 20;

/// One or more sockets, in the order in which sessions move between them.
pub struct ReceiverSockets {
    sockets: Vec<ReceiverSocket>,
    buffers: Vec<u8>,
}

struct ReceiverSocket {
    io: UdpSocket,
    state: UdpSocketState,
}

/// The source address of a datagram, and its ECN mark.
pub struct DatagramOrigin {
    pub remote: SocketAddr,
    pub ecn: Option<quinn::EcnCodepoint>,
}

impl ReceiverSockets {
    /// Binds `count` sockets for packets to `remote`. They use the local addresses `from` in turn, or any address if
    /// there are none.
    ///
    /// # Errors
    ///
    /// Fails if an address does not belong to this host, or has another family than `remote`.
    pub fn bind(count: usize, from: &[IpAddr], remote: SocketAddr) -> Result<Self> {
        ensure!(count > 0, "at least one socket is needed");
        let any: IpAddr = match remote {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        if let Some(other) = from.iter().find(|from| from.is_ipv4() != remote.is_ipv4()) {
            anyhow::bail!(
                "{other} cannot be the source of packets to {remote}: it has another address family"
            );
        }
        let addresses = from.iter().copied().chain(from.is_empty().then_some(any)).cycle();
        let sockets = addresses.take(count).map(ReceiverSocket::bind).collect::<Result<_>>()?;
        Ok(Self { sockets, buffers: vec![0; BATCH_SIZE * MERGED] })
    }

    /// Returns the number of sockets.
    pub fn count(&self) -> usize {
        self.sockets.len()
    }

    /// Returns the socket to which a session on this socket moves next.
    pub fn next_of(&self, socket: usize) -> usize {
        (socket + 1) % self.sockets.len()
    }

    /// Waits for packets, at most for `patience`. Returns the sockets with packets.
    pub fn wait(&self, patience: Duration) -> Result<Vec<usize>> {
        let mut polled: Vec<_> =
            self.sockets.iter().map(|socket| PollFd::new(socket.io.as_fd(), PollFlags::POLLIN)).collect();
        // The time-out is rounded up to whole milliseconds: 0 would make the caller's loop spin.
        let millis = patience.as_micros().div_ceil(1000).min(60_000) as u16;
        match poll(&mut polled, PollTimeout::from(millis)) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error).context("cannot wait for packets"),
        }
        let has_some = |(at, fd): (usize, &PollFd<'_>)| fd.any().unwrap_or_default().then_some(at);
        Ok(polled.iter().enumerate().filter_map(has_some).collect())
    }

    /// Reads one batch of datagrams from a socket. Returns whether there may be more.
    pub fn receive(&mut self, socket: usize, mut take: impl FnMut(DatagramOrigin, &[u8])) -> bool {
        let Some(ReceiverSocket { io, state }) = self.sockets.get(socket) else { return false };
        let mut metas = [RecvMeta::default(); BATCH_SIZE];
        let mut slices = self.buffers.chunks_exact_mut(MERGED).map(IoSliceMut::new).collect::<Vec<_>>();
        let received = state.recv(io.into(), &mut slices, &mut metas);
        // An error is ICMP's answer to an earlier packet, or means that no datagram is waiting.
        let Ok(count) = received else { return false };
        for (meta, buffer) in metas.iter().zip(&slices).take(count) {
            let ecn = meta.ecn.and_then(|ecn| quinn::EcnCodepoint::from_bits(ecn as u8));
            for datagram in buffer[..meta.len].chunks(meta.stride.max(1)) {
                take(DatagramOrigin { remote: meta.addr, ecn }, datagram);
            }
        }
        count == BATCH_SIZE
    }

    /// Sends a packet. If it does not fit into the socket's buffer, it is lost, as on the network.
    pub fn send(&self, socket: usize, transmit: &quinn::Transmit, contents: &[u8]) {
        let Some(ReceiverSocket { io, state }) = self.sockets.get(socket) else { return };
        let ecn = transmit.ecn.and_then(|ecn| EcnCodepoint::from_bits(ecn as u8));
        let packet = Transmit {
            destination: transmit.destination,
            ecn,
            contents,
            segment_size: transmit.segment_size,
            src_ip: None,
        };
        let _ = state.send(io.into(), &packet);
    }
}

impl ReceiverSocket {
    fn bind(address: IpAddr) -> Result<Self> {
        let io = UdpSocket::bind((address, 0)).with_context(|| format!("cannot bind to {address}"))?;
        let state = UdpSocketState::new((&io).into())?;
        // Only root may exceed the host's limit for receive buffers.
        if setsockopt(&io, sockopt::RcvBufForce, &RECEIVE_BUFFER).is_err() {
            setsockopt(&io, sockopt::RcvBuf, &RECEIVE_BUFFER).map_err(io::Error::from)?;
        }
        Ok(Self { io, state })
    }
}
