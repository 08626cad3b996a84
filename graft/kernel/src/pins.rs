//! Pinned BPF links: files in a BPF file system that keep a link when its process ends.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use millrace_kernel::raw::{check, detach, owned};
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

use super::Error;

/// A directory in a BPF file system that holds the pins of one daemon.
#[derive(Debug, Clone)]
pub struct PinDirectory(PathBuf);

impl PinDirectory {
    /// The default directory, in the BPF file system that systemd mounts.
    pub const DEFAULT: &str = "/sys/fs/bpf/millrace-graft";

    /// Returns the directory at a path. The directory need not exist.
    pub fn at(directory: &Path) -> Self {
        Self(directory.to_owned())
    }

    /// Creates the directory, if it does not exist.
    ///
    /// # Errors
    /// The parent directory is not in a BPF file system, or the directory cannot be created.
    pub fn create(&self) -> Result<(), Error> {
        let failed = |source| Error::Pin { path: self.0.display().to_string(), source };
        let parent = self.0.parent().unwrap_or(Path::new("/"));
        let is_bpf = statfs(parent).is_ok_and(|found| found.filesystem_type() == BPF_FS_MAGIC);
        if !is_bpf {
            let message = format!("no BPF file system: mount -t bpf bpf {}", parent.display());
            return Err(failed(io::Error::other(message)));
        }
        match fs::create_dir(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(failed(error)),
            _ => Ok(()),
        }
    }

    /// Returns the names of the pins, sorted. The list is empty if the directory does not exist.
    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Returns a descriptor of the link that is pinned under a name; `None` if there is none. The pin stays.
    pub fn open(&self, name: &str) -> Option<OwnedFd> {
        let path = CString::new(self.0.join(name).as_os_str().as_bytes()).ok()?;
        // SAFETY: the path outlives the call, which returns a new descriptor or an error.
        unsafe { owned(libbpf_sys::bpf_obj_get(path.as_ptr())) }.ok()
    }

    /// Pins a link under a name. An earlier pin of this name is removed.
    pub(super) fn put(&self, name: &str, link: BorrowedFd<'_>) -> Result<(), Error> {
        let path = self.0.join(name);
        let failed = |source| Error::Pin { path: path.display().to_string(), source };
        self.remove(name);
        let text =
            CString::new(path.as_os_str().as_bytes()).map_err(|error| failed(io::Error::other(error)))?;
        // SAFETY: the path outlives the call, and the descriptor is open.
        check(unsafe { libbpf_sys::bpf_obj_pin(link.as_raw_fd(), text.as_ptr()) }).map_err(failed)
    }

    /// Removes a pin. The link then ends with the last process that has a descriptor of it.
    pub(super) fn remove(&self, name: &str) {
        let _ = fs::remove_file(self.0.join(name));
    }

    /// Detaches the link that is pinned under a name, and removes the pin. Does nothing if there is no such pin.
    pub fn end(&self, name: &str) {
        if let Some(link) = self.open(name) {
            // Errors are ignored. The program of a removed cgroup is detached already, and before Linux 6.11 a
            // congestion control ends when its descriptor is closed.
            let _ = detach(&link);
        }
        self.remove(name);
    }

    /// Detaches all pinned links and removes the directory. Returns the names of the pins.
    pub fn clean(&self) -> Vec<String> {
        let names = self.names();
        names.iter().for_each(|name| self.end(name));
        let _ = fs::remove_dir(&self.0);
        names
    }
}
