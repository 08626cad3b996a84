//! What the kernel's side tells this process: a ring buffer, and the wait for something to be in it.

use std::io;
use std::os::fd::AsFd as _;
use std::time::Duration;

use libbpf_rs::{MapCore as _, MapHandle};
use millrace_kernel::memory::Ring;
use millrace_kernel::object::Loaded;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::Error;

pub(super) struct Queue {
    name: &'static str,
    map: MapHandle,
    ring: Ring,
}

impl Queue {
    pub fn new(object: &mut Loaded, name: &'static str) -> Result<Self, Error> {
        let map = object.handle(name)?;
        let ring = Ring::new(&map, map.max_entries() as usize);
        Ok(Self {
            name,
            ring: ring.map_err(|source| millrace_kernel::Error::Memory { what: name, source })?,
            map,
        })
    }

    /// Until there is something, a signal comes, or it has taken so long.
    pub fn wait(&self, patience: Duration) -> Result<(), Error> {
        let patience = PollTimeout::try_from(patience).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(self.map.as_fd(), PollFlags::POLLIN)], patience) {
            Ok(_) | Err(nix::Error::EINTR) => Ok(()),
            Err(error) => {
                Err(millrace_kernel::Error::Read { what: self.name, source: io::Error::from(error).into() }
                    .into())
            }
        }
    }

    pub fn drain(&mut self, take: impl FnMut(&[u8])) {
        self.ring.drain(take);
    }
}
