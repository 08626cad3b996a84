//! A socket filter that holds SYNs back from a listening socket until the tunnel broker lets them pass.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use libbpf_rs::MapHandle;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{LoadedObject, embedded, write};
use millrace_kernel::udp::set;
use nix::libc;

use super::Error;
use super::events::Events;
use super::hook::{
    end,
    intf::generated::{HOLD_OPEN as OPEN, HoldAsk as RawAsk},
};
use super::rule::{address, remove};

/// The filter's verdicts on packets at listening sockets, by their names in status, metrics and documentation.
pub const VERDICTS: [&str; 6] = ["other", "asked", "held", "let-in", "no-room", "malformed"];

/// A SYN that the filter held back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HoldSyn {
    /// The client's address and port.
    pub from: SocketAddr,
    /// The SYN's TCP header with its options. Its checksum is not complete yet.
    pub syn: Vec<u8>,
}

/// The loaded socket filter. It acts on sockets that it is attached to by [`attach`](Self::attach), and on the sockets
/// that those accept.
pub struct Hold {
    object: Mutex<LoadedObject>,
    known: MapHandle,
}

/// Events about SYNs that the filter held back.
pub type HoldSyns = Events<HoldSyn>;

impl Hold {
    /// Loads the filter. Returns it with the events about the SYNs that it holds back.
    ///
    /// # Errors
    /// The kernel refuses the program.
    pub fn load() -> Result<(Self, HoldSyns), Error> {
        let mut object = embedded!("graft_hold.bpf.o").open()?.load()?;
        let known = object.handle("known")?;
        let asks = Events::open_ring(&mut object, "asks", |bytes| ask(&RawAsk::from_bytes(bytes)?))?;
        Ok((Self { object: Mutex::new(object), known }, asks))
    }

    /// Attaches the filter to a TCP socket that already listens or will listen.
    pub fn attach(&self, socket: BorrowedFd<'_>) -> Result<(), Error> {
        let object = self.object.lock().unwrap_or_else(PoisonError::into_inner);
        let program = object.program("hold_syn")?.as_fd().as_raw_fd();
        set(socket, libc::SOL_SOCKET, libc::SO_ATTACH_BPF, &program).map_err(Error::Descriptor)
    }

    /// Lets SYNs from a client's address and port pass from now on.
    pub fn let_in(&self, from: SocketAddr) -> Result<(), Error> {
        Ok(write(&self.known, "known", end(from).as_bytes(), &OPEN.to_ne_bytes())?)
    }

    /// Removes the entry of a client's address and port, so that its next SYN is held back and reported.
    pub fn forget(&self, from: SocketAddr) -> Result<(), Error> {
        remove(&self.known, "known", end(from).as_bytes())
    }

    /// Returns the number of packets by verdict, in the order of [`VERDICTS`].
    pub fn verdicts(&self) -> Result<Vec<u64>, Error> {
        let mut object = self.object.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(object.counters("verdicts")?)
    }
}

/// Removes the filter from an accepted socket, which inherited it. The filter is useful at listening sockets only.
pub fn release(socket: BorrowedFd<'_>) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, &0)
}

fn ask(raw: &RawAsk) -> Option<HoldSyn> {
    let syn = raw.syn.get(..raw.bytes as usize)?.to_vec();
    Some(HoldSyn { from: SocketAddr::new(address(raw.from.address), raw.from.port), syn })
}

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::enum_names;

    use super::*;

    #[test]
    fn syn_filter_verdicts_are_named_as_in_the_bpf_program() {
        let names: Vec<_> = VERDICTS.iter().map(|name| name.replace('-', "_")).collect();
        assert_eq!(names, enum_names(env!("OUT_DIR"), "graft_hold.bpf.o", "hold_verdict", "hold_"));
    }
}
