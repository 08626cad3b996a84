//! Programs on a cgroup, as long as somebody holds them.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use libbpf_rs::{Link, ProgramMut};
use millrace_kernel::fork::{Kept, keep_from_children};
use millrace_kernel::raw::detach;

use super::Error;
use super::pins::Pins;

/// A program on a cgroup, until this is dropped.
pub(super) struct Attachment {
    _kept: Kept,
    link: Link,
    /// It stays when this ends.
    pinned: bool,
}

impl Attachment {
    /// Other programs of the cgroup (version 2) stay.
    pub fn new(program: &ProgramMut<'_>, cgroup: &Path) -> Result<Self, Error> {
        let path = || cgroup.display().to_string();
        let directory = File::open(cgroup).map_err(|source| Error::NoCgroup { path: path(), source })?;
        let link = program
            .attach_cgroup(directory.as_fd().as_raw_fd())
            .map_err(|source| Error::Cgroup { path: path(), source })?;
        Ok(Self { _kept: keep_from_children(&link), link, pinned: false })
    }

    pub fn pin(&mut self, pins: &Pins, name: &'static str) -> Result<(), Error> {
        pins.put(name, self.link.as_fd())?;
        self.pinned = true;
        Ok(())
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        // A cgroup that is gone took the link along.
        if !self.pinned {
            let _ = detach(self.link.as_fd());
        }
    }
}
