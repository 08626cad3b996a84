//! Whose connections a rule is for.

use std::{io, os::unix::fs::MetadataExt as _, path::Path};

pub(super) mod intf {
    //! Structures and constants of `bpf/caller_intf.h`, as the build writes them from the header.

    pub(crate) use generated::CallerWanted as Wanted;

    mod generated {
        #![allow(dead_code, reason = "not all that C has is of use here")]

        include!(concat!(env!("OUT_DIR"), "/caller_intf.rs"));
    }

    pub(crate) const NAME_BYTES: usize = generated::CALLER_NAME_BYTES as usize;
    pub(crate) const LEVELS: usize = generated::CALLER_LEVELS as usize;
}

/// Of a thread's name in the kernel.
pub const COMMAND_MAX: usize = intf::NAME_BYTES - 1;
/// Nested cgroups that the kernel's programs look at, the root included.
pub const CGROUP_LEVELS: usize = intf::LEVELS;

/// By whom a connection is made; without anything, whoever it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Caller {
    /// What the kernel calls the thread that connects: at most [`COMMAND_MAX`] bytes.
    pub command: Option<String>,
    /// In the cgroup (version 2) of this id ([`cgroup_id`]), or below.
    pub cgroup: Option<u64>,
}

impl Caller {
    /// No cgroup has this id.
    pub const NO_CGROUP: u64 = u64::MAX;

    /// Whether the kernel need not know who it is.
    pub fn is_anybody(&self) -> bool {
        *self == Self::default()
    }

    pub(super) fn raw(&self) -> intf::Wanted {
        let mut raw = intf::Wanted { cgroup: self.cgroup.unwrap_or_default(), ..Default::default() };
        let name = self.command.as_deref().unwrap_or_default().bytes();
        // The last byte stays zero.
        raw.command.iter_mut().take(COMMAND_MAX).zip(name).for_each(|(to, from)| *to = from);
        raw
    }
}

/// As the kernel's programs have it: on 64 bits, the number of the directory's inode.
///
/// # Errors
/// It is not there.
pub fn cgroup_id(path: &Path) -> io::Result<u64> {
    Ok(std::fs::metadata(path)?.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_as_in_the_kernel() {
        let raw = Caller { command: Some("rsync".into()), cgroup: None }.raw();
        assert_eq!((&raw.command[..6], raw.cgroup), (&b"rsync\0"[..], 0));
        assert!(Caller::default().is_anybody());
        assert_eq!(Caller::default().raw(), intf::Wanted::default());
    }
}
