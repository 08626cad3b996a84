//! Links that outlive their process, as files in the BPF file system.

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

/// A directory of them.
#[derive(Debug, Clone)]
pub struct Pins(PathBuf);

impl Pins {
    pub const DEFAULT: &str = "/sys/fs/bpf/millrace-graft";

    /// Whether or not there is one.
    pub fn at(directory: &Path) -> Self {
        Self(directory.to_owned())
    }

    /// Makes the directory.
    ///
    /// # Errors
    /// No BPF file system is mounted there.
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

    /// Their names; none if there is no directory.
    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// The link under a name, if there is one. It stays.
    pub fn open(&self, name: &str) -> Option<OwnedFd> {
        let path = CString::new(self.0.join(name).as_os_str().as_bytes()).ok()?;
        // SAFETY: the path outlives the call, which makes the descriptor.
        unsafe { owned(libbpf_sys::bpf_obj_get(path.as_ptr())) }.ok()
    }

    /// It stays from now on, in the place of what was there.
    pub(super) fn put(&self, name: &str, link: BorrowedFd<'_>) -> Result<(), Error> {
        let path = self.0.join(name);
        let failed = |source| Error::Pin { path: path.display().to_string(), source };
        self.remove(name);
        let text =
            CString::new(path.as_os_str().as_bytes()).map_err(|error| failed(io::Error::other(error)))?;
        // SAFETY: the path outlives the call, and the descriptor is open.
        check(unsafe { libbpf_sys::bpf_obj_pin(link.as_raw_fd(), text.as_ptr()) }).map_err(failed)
    }

    /// It ends with its process again.
    pub(super) fn remove(&self, name: &str) {
        let _ = fs::remove_file(self.0.join(name));
    }

    /// Ends a link, and that it stays. Nothing happens if it is not there.
    pub fn end(&self, name: &str) {
        if let Some(link) = self.open(name) {
            // One of a cgroup that is gone is detached already; the congestion controls of before 6.11 end by being closed.
            let _ = detach(&link);
        }
        self.remove(name);
    }

    /// Ends all of them; returns which.
    pub fn clean(&self) -> Vec<String> {
        let names = self.names();
        names.iter().for_each(|name| self.end(name));
        let _ = fs::remove_dir(&self.0);
        names
    }
}
