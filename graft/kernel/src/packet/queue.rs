//! A ring buffer with events of the BPF programs, and the wait for an event.

use std::io;
use std::os::fd::AsFd as _;
use std::time::Duration;

use libbpf_rs::{MapCore as _, MapHandle};
use millrace_kernel::memory::RingReader;
use millrace_kernel::object::LoadedObject;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::Error;

pub(super) struct PacketQueue {
    name: &'static str,
    map: MapHandle,
    ring: RingReader,
}

impl PacketQueue {
    pub fn new(object: &mut LoadedObject, name: &'static str) -> Result<Self, Error> {
        let map = object.handle(name)?;
        let ring = RingReader::new(&map, map.max_entries() as usize);
        Ok(Self {
            name,
            ring: ring.map_err(|source| millrace_kernel::Error::Memory { what: name, source })?,
            map,
        })
    }

    /// Waits until an event is available, a signal arrives, or `patience` has passed.
    pub fn wait(&self, patience: Duration) -> Result<(), Error> {
        // poll() takes at most 24 days, so longer durations are shortened to that.
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
