//! Listening sockets to which the kernel redirects connections for the tunnel broker.

use std::{
    io,
    net::{self, IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use anyhow::Context as _;
use millrace_graft_kernel::hook::HookPorts;
use nix::sys::socket::{setsockopt, sockopt};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tracing::warn;

const BACKLOG: i32 = 4096;
/// Addresses that are assigned to no host (RFC 7600, RFC 6666), for listeners that nobody can connect to.
const NOBODY4: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 8);
const NOBODY6: Ipv6Addr = Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 1);

/// Listening sockets on loopback (also IPv6 where the host has it), or at addresses that nobody can connect to. They
/// are made without an async runtime; [`Self::serve`] needs one.
pub struct BoundListeners {
    v4: net::TcpListener,
    v6: Option<net::TcpListener>,
}

/// Listening sockets that tasks accept connections from.
pub struct Listeners {
    v4: TcpListener,
    v6: Option<TcpListener>,
}

impl BoundListeners {
    /// Creates listeners on loopback, each at a port that the kernel chooses.
    pub fn bind() -> anyhow::Result<Self> {
        Self::with(Ipv4Addr::LOCALHOST, Ipv6Addr::LOCALHOST, false)
    }

    /// Creates listeners that accept connections to any address (IP_TRANSPARENT).
    pub fn transparent() -> anyhow::Result<Self> {
        Self::with(Ipv4Addr::LOCALHOST, Ipv6Addr::LOCALHOST, true)
    }

    /// Creates listeners that get only packets that a BPF program assigns to them.
    pub fn nowhere() -> anyhow::Result<Self> {
        Self::with(NOBODY4, NOBODY6, true)
    }

    fn with(v4: Ipv4Addr, v6: Ipv6Addr, transparent: bool) -> anyhow::Result<Self> {
        let at = |address: IpAddr| listen((address, 0).into(), transparent);
        let first = at(v4.into()).with_context(|| format!("cannot listen on {v4}: is lo up?"))?;
        // IPv6 is optional, since a host may have none.
        Ok(Self { v4: first, v6: at(v6.into()).ok() })
    }

    /// Returns the ports of the listeners.
    pub fn ports(&self) -> io::Result<HookPorts> {
        let v6 = self.v6.as_ref().map(net::TcpListener::local_addr).transpose()?;
        Ok(HookPorts { v4: self.v4.local_addr()?.port(), v6: v6.map(|at| at.port()) })
    }

    pub fn sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [Some(&self.v4), self.v6.as_ref()].into_iter().flatten().map(AsFd::as_fd)
    }

    /// Makes the connections available to tasks. Must be called inside of a tokio runtime.
    pub fn serve(self) -> io::Result<Listeners> {
        let v6 = self.v6.map(TcpListener::from_std).transpose()?;
        Ok(Listeners { v4: TcpListener::from_std(self.v4)?, v6 })
    }
}

impl Listeners {
    /// Returns the address of the listener at which connections from `from` arrive.
    pub fn original_destination(&self, from: SocketAddr) -> io::Result<SocketAddr> {
        match &self.v6 {
            Some(v6) if from.is_ipv6() => v6.local_addr(),
            _ => self.v4.local_addr(),
        }
    }

    /// Accepts the next connection. Errors are logged, and the accept is tried again.
    pub async fn next(&self) -> (TcpStream, SocketAddr) {
        loop {
            match self.accept().await {
                Ok((local, from)) => return (local, canonical(from)),
                Err(error) => {
                    warn!("a redirected connection cannot be accepted: {error}");
                    // Accepting a connection fails mostly because this process has no free file descriptors, so the
                    // loop waits a moment.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        match &self.v6 {
            Some(v6) => tokio::select! {
                accepted = self.v4.accept() => accepted,
                accepted = v6.accept() => accepted,
            },
            None => self.v4.accept().await,
        }
    }
}

fn listen(at: SocketAddr, transparent: bool) -> io::Result<net::TcpListener> {
    let socket = Socket::new(Domain::for_address(at), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    setsockopt(&socket, sockopt::IpTransparent, &transparent)?;
    socket.bind(&at.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Returns the address in the form that the kernel uses: an IPv4-mapped IPv6 address becomes IPv4.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}
