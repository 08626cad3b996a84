//! A BPF program attached to a cgroup. The program stays attached while its link is held by a process or pinned.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use libbpf_rs::{Link, ProgramMut};
use millrace_kernel::fork::{ForkSafeLink, keep_from_children};
use millrace_kernel::raw::detach;

use super::Error;
use super::pins::PinDirectory;

/// A BPF program attached to a cgroup. Dropping this detaches the program unless its link is pinned.
pub(super) struct CgroupAttachment {
    _kept: ForkSafeLink,
    link: Link,
    /// True if the link is pinned, so that the program stays attached when this value is dropped.
    pinned: bool,
}

impl CgroupAttachment {
    /// Attaches a program to a cgroup (version 2). Programs that others attached to the cgroup stay attached.
    pub fn new(program: &ProgramMut<'_>, cgroup: &Path) -> Result<Self, Error> {
        let path = || cgroup.display().to_string();
        let directory = File::open(cgroup).map_err(|source| Error::NoCgroup { path: path(), source })?;
        let link = program
            .attach_cgroup(directory.as_fd().as_raw_fd())
            .map_err(|source| Error::Cgroup { path: path(), source })?;
        Ok(Self { _kept: keep_from_children(&link), link, pinned: false })
    }

    pub fn pin(&mut self, pins: &PinDirectory, name: &'static str) -> Result<(), Error> {
        pins.put(name, self.link.as_fd())?;
        self.pinned = true;
        Ok(())
    }
}

impl Drop for CgroupAttachment {
    fn drop(&mut self) {
        // Detaching fails only if the cgroup was removed, and its links with it.
        if !self.pinned {
            let _ = detach(self.link.as_fd());
        }
    }
}
