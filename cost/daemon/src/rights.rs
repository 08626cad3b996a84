//! Reduces the privileges of the process before it answers requests over HTTP.

use std::collections::BTreeMap;

use anyhow::Context as _;
use millrace_daemon::rights::{keep_capabilities, refuse_calls};
use nix::unistd::{Gid, Uid, User, geteuid, setgroups, setresgid, setresuid};
use rustix::thread::{CapabilitySet, set_keep_capabilities};

/// Tasks of the process that need privileges.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RightsNeeds {
    /// True if the process observes the kernel.
    pub observes: bool,
    /// True if the process looks up the names of functions of other users' processes.
    pub profiles: bool,
    /// True if the process lists BPF programs.
    pub programs: bool,
    /// True if the process creates files with the present user's permissions.
    pub files: bool,
}

impl RightsNeeds {
    fn capabilities(self) -> CapabilitySet {
        let observes = CapabilitySet::BPF | CapabilitySet::PERFMON | CapabilitySet::SYSLOG;
        [
            (self.observes, observes),
            (self.profiles, CapabilitySet::SYS_PTRACE | CapabilitySet::DAC_READ_SEARCH),
            (self.programs, CapabilitySet::SYS_ADMIN),
            (self.files, CapabilitySet::DAC_OVERRIDE),
        ]
        .into_iter()
        .filter_map(|(needed, of)| needed.then_some(of))
        .fold(CapabilitySet::empty(), CapabilitySet::union)
    }
}

/// Drops privileges that are not needed, for ever: capabilities, the root user if no files will be created, and system
/// calls that start programs, read other processes or change the system. Call this while the process has one thread,
/// since other threads would keep their privileges.
///
/// # Errors
/// Fails if the kernel refuses one of the steps.
pub fn reduce(needs: RightsNeeds) -> anyhow::Result<()> {
    if geteuid().is_root() && !needs.files {
        // A change of the user ID from root to another user clears the capabilities unless they are kept
        // (capabilities(7)).
        set_keep_capabilities(true).context("cannot keep capabilities")?;
        become_nobody()
            .context("cannot become nobody: start this with CAP_SETUID and CAP_SETGID, or as another user")?;
    }
    keep_capabilities(needs.capabilities()).context("cannot drop capabilities")?;
    refuse_calls(BTreeMap::new()).context("cannot confine system calls")
}

/// User and group ID of `nobody` on a machine without a user of that name.
const NOBODY: u32 = 65_534;

fn become_nobody() -> nix::Result<()> {
    let user = User::from_name("nobody").ok().flatten();
    let (uid, gid) = user.map_or((Uid::from_raw(NOBODY), Gid::from_raw(NOBODY)), |user| (user.uid, user.gid));
    // Groups change first, since the change of the user ID clears the effective capabilities (capabilities(7)).
    setgroups(&[])?;
    setresgid(gid, gid, gid)?;
    setresuid(uid, uid, uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn observing_needs_three_capabilities() {
        let of = |needs: RightsNeeds| needs.capabilities();
        let observes = RightsNeeds { observes: true, ..RightsNeeds::default() };
        assert_eq!(of(RightsNeeds::default()), CapabilitySet::empty());
        assert_eq!(of(observes), CapabilitySet::BPF | CapabilitySet::PERFMON | CapabilitySet::SYSLOG);
        assert!(of(RightsNeeds { programs: true, ..observes }).contains(CapabilitySet::SYS_ADMIN));
        assert!(
            !of(RightsNeeds { files: true, profiles: true, ..observes }).contains(CapabilitySet::SYS_ADMIN)
        );
    }
}
