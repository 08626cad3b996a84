//! SYNs that are held back from a listening socket until somebody lets them in.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use libbpf_rs::MapHandle;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{Loaded, embedded, write};
use millrace_kernel::udp::set;
use nix::libc;

use super::Error;
use super::events::Events;
use super::hook::{
    end,
    intf::generated::{HOLD_OPEN as OPEN, HoldAsk as RawAsk},
};
use super::rule::{address, remove};

/// What becomes of packets at the sockets, as status, metrics and the documentation call it.
pub const VERDICTS: [&str; 6] = ["other", "asked", "held", "let-in", "no-room", "malformed"];

/// A SYN that was held back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    pub from: SocketAddr,
    /// Its TCP header with options. What it says of the checksum is not true yet.
    pub syn: Vec<u8>,
}

/// The filter, loaded. It acts on sockets from [`attach`](Self::attach) on, and on those that they make.
pub struct Hold {
    object: Mutex<Loaded>,
    known: MapHandle,
}

/// The SYNs, as they come.
pub type Asks = Events<Ask>;

impl Hold {
    /// # Errors
    /// The kernel refuses.
    pub fn load() -> Result<(Self, Asks), Error> {
        let mut object = embedded!("graft_hold.bpf.o").open()?.load()?;
        let known = object.handle("known")?;
        let asks = Events::of(&mut object, "asks", |bytes| ask(&RawAsk::from_bytes(bytes)?))?;
        Ok((Self { object: Mutex::new(object), known }, asks))
    }

    /// A TCP socket that listens, or will.
    pub fn attach(&self, socket: BorrowedFd<'_>) -> Result<(), Error> {
        let object = self.object.lock().unwrap_or_else(PoisonError::into_inner);
        let program = object.program("hold_syn")?.as_fd().as_raw_fd();
        set(socket, libc::SOL_SOCKET, libc::SO_ATTACH_BPF, &program).map_err(Error::Descriptor)
    }

    /// Its SYN may pass from now on.
    pub fn let_in(&self, from: SocketAddr) -> Result<(), Error> {
        Ok(write(&self.known, "known", end(from).as_bytes(), &OPEN.to_ne_bytes())?)
    }

    /// Its next SYN is held back, and told of.
    pub fn forget(&self, from: SocketAddr) -> Result<(), Error> {
        remove(&self.known, "known", end(from).as_bytes())
    }

    /// By [`VERDICTS`].
    pub fn verdicts(&self) -> Result<Vec<u64>, Error> {
        let mut object = self.object.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(object.counters("verdicts")?)
    }
}

/// A socket that one with the filter has made needs it no more.
pub fn release(socket: BorrowedFd<'_>) -> io::Result<()> {
    set(socket, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, &0)
}

fn ask(raw: &RawAsk) -> Option<Ask> {
    let syn = raw.syn.get(..raw.bytes as usize)?.to_vec();
    Some(Ask { from: SocketAddr::new(address(raw.from.address), raw.from.port), syn })
}

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::enum_names;

    use super::*;

    #[test]
    fn mirrors_match_btf() {
        let names: Vec<_> = VERDICTS.iter().map(|name| name.replace('-', "_")).collect();
        assert_eq!(names, enum_names(env!("OUT_DIR"), "graft_hold.bpf.o", "hold_verdict", "hold_"));
    }
}
