//! A socket of a pool: its port is taken at all times, so that nobody else gets what is meant for a session. While no application has it,
//! nothing comes in by it.

use std::{io, net::UdpSocket, os::fd::AsFd, time::Instant};

use millrace_graft_kernel::joint::Ends;
use millrace_kernel::udp::end_for_all;
use nix::sys::socket::{setsockopt, sockopt};
use socket2::{Domain, Protocol, SockFilter, Socket, Type};
use tracing::warn;

/// A whole window of the longest datagrams fits before the other end has heard how much room there is: with what the kernel keeps about
/// each, 256 take some 1.1 MB. The kernel doubles it.
const RECEIVE_BYTES: usize = 1 << 20;
const RETURN: u16 = 6; // BPF_RET | BPF_K: that many bytes of the packet

pub struct Seat {
    ends: Ends,
    socket: Option<Socket>,
    state: State,
    /// When an application gave it back last.
    pub released: Option<Instant>,
    /// Functions may still be at work for an application that has gone.
    pub is_restless: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No application has ever had this socket.
    Fresh,
    Lent(u32),
    /// This user may still hold a descriptor of it, which is of no use.
    Spent(u32),
}

impl Seat {
    /// # Errors
    /// Its address is not this host's, or the like. A port that is in use is no error: an application may hold it since a daemon of before.
    pub fn new(ends: Ends) -> io::Result<Self> {
        let (socket, state) = match closed(&ends) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                warn!("{} is in use: it is lent when whoever has it has closed it", ends.local);
                (None, State::Spent(u32::MAX))
            }
            socket => (Some(socket?), State::Fresh),
        };
        Ok(Self { ends, socket, state, released: None, is_restless: false })
    }

    /// Somebody else's never: a socket that an application has had is replaced first.
    ///
    /// # Errors
    /// An application holds the one before: the port is in use as long as it does.
    pub fn prepare(&mut self) -> io::Result<()> {
        if self.state == State::Fresh && self.socket.is_some() {
            return Ok(());
        }
        self.socket = None;
        self.socket = Some(closed(&self.ends)?);
        self.state = State::Fresh;
        Ok(())
    }

    /// From now on what comes is the application's.
    pub fn lend(&mut self, user: u32) -> io::Result<&Socket> {
        let socket = self.socket.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        if self.state == State::Fresh {
            socket.detach_filter()?;
            self.state = State::Lent(user);
        }
        Ok(socket)
    }

    /// If an application has it.
    pub fn lent(&self) -> Option<&Socket> {
        self.socket.as_ref().filter(|_| matches!(self.state, State::Lent(_)))
    }

    /// Whoever holds it can do nothing with it from now on.
    pub fn take_back(&mut self) -> io::Result<()> {
        let State::Lent(user) = self.state else { return Ok(()) };
        (self.state, self.released) = (State::Spent(user), Some(Instant::now()));
        self.socket.as_ref().map_or(Ok(()), |socket| end_for_all(socket.as_fd()))
    }

    /// Whether this user still holds what was taken back.
    pub fn is_held_by(&mut self, user: u32) -> bool {
        self.state == State::Spent(user) && self.prepare().is_err()
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let _ = self.take_back();
    }
}

/// Connected, and everything that comes is dropped.
fn closed(ends: &Ends) -> io::Result<Socket> {
    let socket = connected(ends, |socket| {
        // Before it has an address: nothing can come in.
        socket.attach_filter(&[SockFilter::new(RETURN, 0, 0, 0)])?;
        Ok(setsockopt(socket, sockopt::RcvBufForce, &RECEIVE_BYTES)?)
    })?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Of the daemons' own words.
pub fn control(ends: &Ends) -> io::Result<UdpSocket> {
    Ok(connected(ends, |_| Ok(()))?.into())
}

fn connected(ends: &Ends, prepare: impl FnOnce(&Socket) -> io::Result<()>) -> io::Result<Socket> {
    let domain = Domain::for_address(ends.local);
    let socket = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
    prepare(&socket)?;
    socket.bind(&ends.local.into())?;
    socket.connect(&ends.remote.into())?;
    // A full window is heard of.
    let heard = match ends.local.is_ipv4() {
        true => setsockopt(&socket, sockopt::Ipv4RecvErr, &true),
        false => setsockopt(&socket, sockopt::Ipv6RecvErr, &true),
    };
    heard.map_err(io::Error::from)?;
    Ok(socket)
}
