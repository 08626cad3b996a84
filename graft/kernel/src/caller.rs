//! Conditions on the process that calls connect(): a rule may name its command and its cgroup.

use std::{io, os::unix::fs::MetadataExt as _, path::Path};

pub(super) mod intf {
    //! Structures and constants that the build generates from `bpf/caller_intf.h`.

    pub(crate) use generated::CallerWanted as Wanted;

    mod generated {
        #![allow(dead_code, reason = "the C header has more than Rust uses")]

        include!(concat!(env!("OUT_DIR"), "/caller_intf.rs"));
    }

    pub(crate) const NAME_BYTES: usize = generated::CALLER_NAME_BYTES as usize;
    pub(crate) const LEVELS: usize = generated::CALLER_LEVELS as usize;
}

/// Longest thread name in bytes, as the kernel stores it (`TASK_COMM_LEN` without the final zero).
pub const COMMAND_MAX: usize = intf::NAME_BYTES - 1;
/// Levels of nested cgroups that the BPF programs compare with a rule, counted from the root.
pub const CGROUP_LEVELS: usize = intf::LEVELS;

/// A condition on the process that calls connect(). If neither the command nor the cgroup is set, every process
/// matches.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct CallerRule {
    /// Name of the calling thread in the kernel (`comm`), at most [`COMMAND_MAX`] bytes.
    pub command: Option<String>,
    /// ID of a cgroup (version 2), from [`cgroup_id`]. Processes in this cgroup and in those below it match.
    pub cgroup: Option<u64>,
}

impl CallerRule {
    /// An ID that no cgroup has, so a rule with it matches no process.
    pub const NO_CGROUP: u64 = u64::MAX;

    /// Returns whether the condition matches every process.
    pub fn is_anybody(&self) -> bool {
        *self == Self::default()
    }

    pub(super) fn raw(&self) -> intf::Wanted {
        let mut raw = intf::Wanted { cgroup: self.cgroup.unwrap_or_default(), ..Default::default() };
        let name = self.command.as_deref().unwrap_or_default().bytes();
        // The kernel's names end with a zero byte, so the last byte of the array stays zero.
        raw.command.iter_mut().take(COMMAND_MAX).zip(name).for_each(|(to, from)| *to = from);
        raw
    }
}

/// Returns the ID of a cgroup as BPF programs see it: on 64-bit hosts, the inode number of its directory.
///
/// # Errors
/// The cgroup does not exist.
pub fn cgroup_id(path: &Path) -> io::Result<u64> {
    Ok(std::fs::metadata(path)?.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_for_a_command_stores_its_name_as_the_kernel_does() {
        let raw = CallerRule { command: Some("rsync".into()), cgroup: None }.raw();
        assert_eq!((&raw.command[..6], raw.cgroup), (&b"rsync\0"[..], 0));
        assert!(CallerRule::default().is_anybody());
        assert_eq!(CallerRule::default().raw(), intf::Wanted::default());
    }
}
