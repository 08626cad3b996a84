//! Conditions of rules on the process that connects.

use std::{
    path::{Component, Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use millrace_graft_kernel::{CGROUP_LEVELS, COMMAND_MAX, CallerRule, cgroup_id};

/// A condition on the process that connects. Without a command and a cgroup, every process matches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessCondition {
    /// Name of the connecting thread in the kernel (`comm`).
    pub command: Option<String>,
    /// Cgroup of the process. Processes in cgroups below this one match, too.
    pub cgroup: Option<CgroupSetting>,
}

/// Directory of a cgroup (version 2), which may be created and removed at any time.
#[derive(Clone, Debug)]
pub struct CgroupSetting {
    path: PathBuf,
    /// ID of the cgroup at the latest check, or `NO_CGROUP`. All clones of this value share the ID.
    id: Arc<AtomicU64>,
}

/// Two values are equal if the paths of their cgroups are equal, whether the cgroups exist or not.
impl PartialEq for CgroupSetting {
    fn eq(&self, other: &Self) -> bool {
        self.path == other.path
    }
}

impl Eq for CgroupSetting {}

impl CgroupSetting {
    pub(crate) fn new(path: PathBuf) -> Self {
        let cgroup = Self { path, id: Arc::new(AtomicU64::new(CallerRule::NO_CGROUP)) };
        cgroup.follow();
        cgroup
    }

    /// Returns the path of the cgroup's directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the cgroup's ID, or `None` if the cgroup did not exist at the latest check.
    pub(crate) fn id(&self) -> Option<u64> {
        Some(self.id.load(Relaxed)).filter(|id| *id != CallerRule::NO_CGROUP)
    }

    /// Checks whether the cgroup exists. Returns whether it was created or removed since the latest check.
    fn follow(&self) -> bool {
        let now = cgroup_id(&self.path).unwrap_or(CallerRule::NO_CGROUP);
        self.id.swap(now, Relaxed) != now
    }
}

impl ProcessCondition {
    pub(super) fn checked(command: Option<String>, cgroup: Option<PathBuf>) -> Result<Self, String> {
        let is_name = |name: &String| (1..=COMMAND_MAX).contains(&name.len()) && !name.contains('\0');
        if command.as_ref().is_some_and(|name| !is_name(name)) {
            return Err(format!(
                "command is 1 to {COMMAND_MAX} bytes, as /proc/PID/comm has it: the kernel cuts longer names off"
            ));
        }
        if cgroup.as_ref().is_some_and(|path| !is_absolute(path)) {
            return Err(
                "cgroup is the path of a directory, such as \"/sys/fs/cgroup/backup.slice\"".to_owned()
            );
        }
        if cgroup.as_ref().is_some_and(|path| path.components().count() > CGROUP_LEVELS) {
            return Err(format!("cgroup lies more than {CGROUP_LEVELS} directories deep"));
        }
        Ok(Self { command, cgroup: cgroup.map(CgroupSetting::new) })
    }

    /// Reports whether every process matches.
    pub fn is_anybody(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the condition as the kernel needs it, with the cgroup's ID from the latest call of
    /// [`follow`](Self::follow).
    pub(crate) fn caller(&self) -> CallerRule {
        let id = |cgroup: &CgroupSetting| cgroup.id().unwrap_or(CallerRule::NO_CGROUP);
        CallerRule { command: self.command.clone(), cgroup: self.cgroup.as_ref().map(id) }
    }

    /// Checks whether the cgroup of the condition exists. Returns whether it was created or removed since the latest
    /// check.
    pub(crate) fn follow(&self) -> bool {
        self.cgroup.as_ref().is_some_and(CgroupSetting::follow)
    }

    /// Reports whether a connection matches. `command` and `cgroup` are `None` if they are unknown for the connection.
    pub(crate) fn has(&self, command: Option<&str>, cgroup: Option<u64>) -> bool {
        let is_in = |own: &CgroupSetting| cgroup.is_some() && own.id() == cgroup;
        self.command.as_deref().is_none_or(|own| command == Some(own))
            && self.cgroup.as_ref().is_none_or(is_in)
    }

    /// Reports whether the condition names a cgroup that does not exist.
    pub fn is_missing(&self) -> bool {
        self.cgroup.as_ref().is_some_and(|cgroup| !cgroup.path.is_dir())
    }

    /// Returns the condition as text, such as `command rsync, cgroup /sys/fs/cgroup/backup.slice`. The text is empty if
    /// every process matches.
    pub fn words(&self) -> String {
        let command = self.command.iter().map(|name| format!("command {name}"));
        let cgroup = self.cgroup.iter().map(|cgroup| format!("cgroup {}", cgroup.path.display()));
        command.chain(cgroup).collect::<Vec<_>>().join(", ")
    }
}

fn is_absolute(path: &Path) -> bool {
    path.is_absolute() && path.components().all(|part| !matches!(part, Component::ParentDir))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_condition_follows_creation_and_removal_of_its_cgroup() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("backup.slice");
        let process = ProcessCondition::checked(None, Some(path.clone())).expect("a path");
        let id = || process.caller().cgroup;
        let shared = process.clone();
        assert_eq!((id(), process.follow()), (Some(CallerRule::NO_CGROUP), false));
        assert!(!process.has(None, Some(CallerRule::NO_CGROUP)));
        std::fs::create_dir(&path).expect("a directory");
        assert_eq!(id(), Some(CallerRule::NO_CGROUP), "nobody has looked");
        assert!(process.follow() && !process.follow());
        let now = cgroup_id(&path).expect("it is there");
        assert_eq!((id(), shared.caller().cgroup), (Some(now), Some(now)));
        assert!(shared.has(None, Some(now)) && !shared.has(None, None));
        std::fs::remove_dir(&path).expect("it was there");
        assert!(shared.follow());
        assert_eq!(id(), Some(CallerRule::NO_CGROUP));
    }

    #[test]
    fn missing_cgroup_matches_no_process() {
        let process =
            ProcessCondition::checked(Some("rsync".into()), Some("/sys/fs/cgroup/no.slice".into())).unwrap();
        assert!(process.is_missing() && !process.is_anybody());
        assert_eq!(process.caller().cgroup, Some(CallerRule::NO_CGROUP));
        assert_eq!(process.words(), "command rsync, cgroup /sys/fs/cgroup/no.slice");
        assert_eq!(ProcessCondition::default().caller(), CallerRule::default());
        assert!(
            ProcessCondition::default().has(None, None)
                && ProcessCondition::default().has(Some("rsync"), Some(7))
        );
        let process = ProcessCondition::checked(Some("rsync".into()), None).unwrap();
        assert!(
            process.has(Some("rsync"), Some(7))
                && !process.has(Some("rsyn"), None)
                && !process.has(None, None)
        );
    }
}
