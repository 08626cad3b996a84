//! By whom connections are made that a rule is for.

use std::path::{Component, Path, PathBuf};

use millrace_bpf::graft::{CGROUP_LEVELS, COMMAND_MAX, Caller, cgroup_id};

/// Without anything, whoever it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Who {
    /// What the kernel calls the thread that connects.
    pub command: Option<String>,
    /// A directory of cgroup version 2; those below it, too. It may come and go.
    pub cgroup: Option<PathBuf>,
}

impl Who {
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
        Ok(Self { command, cgroup })
    }

    pub fn is_anybody(&self) -> bool {
        *self == Self::default()
    }

    /// For the kernel, as things are now: a cgroup that is not there has nobody in it.
    pub(crate) fn caller(&self) -> Caller {
        let id = |path: &PathBuf| cgroup_id(path).unwrap_or(Caller::NO_CGROUP);
        Caller { command: self.command.clone(), cgroup: self.cgroup.as_ref().map(id) }
    }

    /// Whether connections of these are for it; `None` of them is not known.
    pub(crate) fn has(&self, command: Option<&str>, cgroup: Option<u64>) -> bool {
        let is_in = |path: &PathBuf| cgroup.is_some() && cgroup_id(path).ok() == cgroup;
        self.command.as_deref().is_none_or(|own| command == Some(own))
            && self.cgroup.as_ref().is_none_or(is_in)
    }

    /// Whether its cgroup is missing.
    pub fn is_missing(&self) -> bool {
        self.cgroup.as_ref().is_some_and(|path| !path.is_dir())
    }

    /// `command rsync, cgroup /sys/fs/cgroup/backup.slice`; nothing for everybody.
    pub fn words(&self) -> String {
        let command = self.command.iter().map(|name| format!("command {name}"));
        let cgroup = self.cgroup.iter().map(|path| format!("cgroup {}", path.display()));
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
    fn a_cgroup_that_is_not_there_has_nobody_in_it() {
        let who = Who::checked(Some("rsync".into()), Some("/sys/fs/cgroup/no.slice".into())).unwrap();
        assert!(who.is_missing() && !who.is_anybody());
        assert_eq!(who.caller().cgroup, Some(Caller::NO_CGROUP));
        assert_eq!(who.words(), "command rsync, cgroup /sys/fs/cgroup/no.slice");
        assert_eq!(Who::default().caller(), Caller::default());
        assert!(Who::default().has(None, None) && Who::default().has(Some("rsync"), Some(7)));
        let who = Who::checked(Some("rsync".into()), None).unwrap();
        assert!(who.has(Some("rsync"), Some(7)) && !who.has(Some("rsyn"), None) && !who.has(None, None));
    }
}
