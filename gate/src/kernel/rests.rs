//! The further XDP programs of an interface, which the gate calls with the packets that it passes.

use std::os::fd::{AsRawFd, BorrowedFd};

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use millrace_kernel::Error;
use millrace_kernel::object::{LoadedObject, write};

pub(super) struct Rests {
    /// Map from an interface's index to an index into `programs`.
    at: MapHandle,
    /// Array of programs for tail calls.
    programs: MapHandle,
}

impl Rests {
    pub fn new(object: &mut LoadedObject) -> Result<Self, Error> {
        Ok(Self { at: object.handle("rest_at")?, programs: object.handle("rests")? })
    }

    pub fn put(&self, ifindex: i32, rest: BorrowedFd<'_>) -> Result<(), Error> {
        let index = self.index(ifindex).or_else(|| self.free()).ok_or(Error::Full { what: "interfaces" })?;
        write(&self.programs, "rests", &index, &rest.as_raw_fd().to_ne_bytes())?;
        write(&self.at, "rest_at", &ifindex.to_ne_bytes(), &index)
    }

    pub fn remove(&self, ifindex: i32) {
        if let Some(index) = self.index(ifindex) {
            // The interface's entry in `at` is deleted before the program, so that no packet is passed to a deleted
            // program.
            let _ = self.at.delete(&ifindex.to_ne_bytes());
            let _ = self.programs.delete(&index);
        }
    }

    fn index(&self, ifindex: i32) -> Option<[u8; 4]> {
        let found = self.at.lookup(&ifindex.to_ne_bytes(), MapFlags::ANY).ok()??;
        found.first_chunk().copied()
    }

    fn free(&self) -> Option<[u8; 4]> {
        let indices = (0..self.programs.max_entries()).map(u32::to_ne_bytes);
        indices.into_iter().find(|index| matches!(self.programs.lookup(index, MapFlags::ANY), Ok(None)))
    }
}
