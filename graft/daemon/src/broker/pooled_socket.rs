//! A socket of a peer's pool. Its port stays bound, so that no other process gets the datagrams of a session. While
//! no application has the socket, it receives nothing.

use std::{io, os::fd::AsFd, time::Instant};

use millrace_graft_kernel::packet::SessionEnds;
use millrace_kernel::udp::end_for_all;
use nix::sys::socket::{setsockopt, sockopt};
use socket2::{Domain, Protocol, SockFilter, Socket, Type};
use tracing::warn;

/// Receive buffer in bytes. It has to hold a whole send window of the longest datagrams, because the peer may send that
/// much before it learns the buffer's free space. 256 such datagrams take some 1.1 MB with the kernel's overhead, and
/// the kernel doubles the value.
const RECEIVE_BYTES: usize = 1 << 20;
// BPF_RET | BPF_K: the classic BPF instruction that returns how many bytes of the packet are kept
const RETURN: u16 = 6;

/// A socket of a peer's pool, with its state.
pub struct PooledSocket {
    ends: SessionEnds,
    socket: Option<Socket>,
    state: PooledSocketState,
    /// Time at which the socket was last taken back from an application.
    pub released: Option<Instant>,
    /// True if the socket's last session is over, but the packet functions of its graft are still active.
    pub is_restless: bool,
}

/// State of a pooled socket. It goes from `Fresh` to `Lent` when an application gets it, and to `Spent` when it is
/// taken back; a spent socket is replaced by a fresh one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PooledSocketState {
    /// No application has had this socket yet.
    Fresh,
    /// An application of the user with this ID has the socket.
    Lent(u32),
    /// The socket was shut down. An application of the user with this ID may still hold a descriptor of it, which
    /// neither sends nor receives.
    Spent(u32),
}

impl PooledSocket {
    /// # Errors
    /// The address is not this host's, or the socket cannot be set up. A port in use is no error: an application may
    /// still hold a socket of a previous daemon on it.
    pub fn new(ends: SessionEnds) -> io::Result<Self> {
        let (socket, state) = match closed(&ends) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                warn!(
                    "{} is in use by another process: no session gets it until that process closes it",
                    ends.local
                );
                (None, PooledSocketState::Spent(u32::MAX))
            }
            socket => (Some(socket?), PooledSocketState::Fresh),
        };
        Ok(Self { ends, socket, state, released: None, is_restless: false })
    }

    /// Replaces a socket that an application has had by a new one, so that no other application's descriptor leads to
    /// it.
    ///
    /// # Errors
    /// An application still holds the old socket, so the port is in use.
    pub fn prepare(&mut self) -> io::Result<()> {
        if self.state == PooledSocketState::Fresh && self.socket.is_some() {
            return Ok(());
        }
        self.socket = None;
        self.socket = Some(closed(&self.ends)?);
        self.state = PooledSocketState::Fresh;
        Ok(())
    }

    /// Lends the socket to an application of this user. Datagrams that arrive from now on are the application's.
    pub fn lend(&mut self, user: u32) -> io::Result<&Socket> {
        let socket = self.socket.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        if self.state == PooledSocketState::Fresh {
            // Until now this filter has dropped every datagram that arrived at the socket.
            socket.detach_filter()?;
            self.state = PooledSocketState::Lent(user);
        }
        Ok(socket)
    }

    /// Returns the socket if an application has it.
    pub fn lent(&self) -> Option<&Socket> {
        self.socket.as_ref().filter(|_| matches!(self.state, PooledSocketState::Lent(_)))
    }

    /// Shuts the socket down for everybody who holds a descriptor of it.
    pub fn take_back(&mut self) -> io::Result<()> {
        let PooledSocketState::Lent(user) = self.state else { return Ok(()) };
        (self.state, self.released) = (PooledSocketState::Spent(user), Some(Instant::now()));
        self.socket.as_ref().map_or(Ok(()), |socket| end_for_all(socket.as_fd()))
    }

    /// Reports whether this user still holds a descriptor of the socket that was taken back.
    pub fn is_held_by(&mut self, user: u32) -> bool {
        self.state == PooledSocketState::Spent(user) && self.prepare().is_err()
    }
}

impl Drop for PooledSocket {
    fn drop(&mut self) {
        let _ = self.take_back();
    }
}

/// Returns a connected socket that drops everything it receives.
fn closed(ends: &SessionEnds) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(ends.local), Type::DGRAM, Some(Protocol::UDP))?;
    // The filter is attached before the socket has an address, so that nothing can arrive earlier.
    socket.attach_filter(&[SockFilter::new(RETURN, 0, 0, 0)])?;
    setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BYTES)?;
    socket.bind(&ends.local.into())?;
    socket.connect(&ends.remote.into())?;
    // With this socket option, a send that the graft refuses because its window of unacknowledged datagrams is full
    // returns an error to the application.
    let heard = match ends.local.is_ipv4() {
        true => setsockopt(&socket, sockopt::Ipv4RecvErr, &true),
        false => setsockopt(&socket, sockopt::Ipv6RecvErr, &true),
    };
    heard.map_err(io::Error::from)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}
