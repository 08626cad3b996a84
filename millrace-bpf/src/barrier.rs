//! Waiting for program runs; see `bpf/barrier.h`.

use std::os::fd::{AsFd, AsRawFd};

use libbpf_rs::MapHandle;

use crate::Error;
use crate::object::{Loaded, write};

pub(crate) struct Barrier {
    barrier: MapHandle,
    nothing: MapHandle,
}

impl Barrier {
    pub fn new(object: &mut Loaded) -> Result<Self, Error> {
        Ok(Self { barrier: object.handle("barrier")?, nothing: object.handle("nothing")? })
    }

    /// Returns when every run of a program has ended that had begun before: an update of a map of maps waits for them
    /// (`maybe_wait_bpf_programs` in the kernel).
    pub fn wait_for_runs(&self) -> Result<(), Error> {
        let fd = self.nothing.as_fd().as_raw_fd();
        write(&self.barrier, "barrier", &0u32.to_ne_bytes(), &fd.to_ne_bytes())
    }
}
