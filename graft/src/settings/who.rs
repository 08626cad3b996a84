//! By whom connections are made that a rule is for.

use std::{
    path::{Component, Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use millrace_graft_kernel::{CGROUP_LEVELS, COMMAND_MAX, Caller, cgroup_id};

/// Without anything, whoever it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Who {
    /// What the kernel calls the thread that connects.
    pub command: Option<String>,
    /// Those below it, too.
    pub cgroup: Option<Cgroup>,
}

/// A directory of cgroup version 2, which may come and go.
#[derive(Clone, Debug)]
pub struct Cgroup {
    path: PathBuf,
    /// As it was when somebody looked last; all clones have it.
    id: Arc<AtomicU64>,
}

/// One and the same, whether it is there or not.
impl PartialEq for Cgroup {
    fn eq(&self, other: &Self) -> bool {
        self.path == other.path
    }
}

impl Eq for Cgroup {}

impl Cgroup {
    pub(crate) fn new(path: PathBuf) -> Self {
        let cgroup = Self { path, id: Arc::new(AtomicU64::new(Caller::NO_CGROUP)) };
        cgroup.follow();
        cgroup
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `None`: it is not there, and has nobody in it.
    pub(crate) fn id(&self) -> Option<u64> {
        Some(self.id.load(Relaxed)).filter(|id| *id != Caller::NO_CGROUP)
    }

    /// Returns whether it has come or gone.
    fn follow(&self) -> bool {
        let now = cgroup_id(&self.path).unwrap_or(Caller::NO_CGROUP);
        self.id.swap(now, Relaxed) != now
    }
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
        Ok(Self { command, cgroup: cgroup.map(Cgroup::new) })
    }

    pub fn is_anybody(&self) -> bool {
        *self == Self::default()
    }

    /// For the kernel, as things were when [`follow`](Self::follow) looked.
    pub(crate) fn caller(&self) -> Caller {
        let id = |cgroup: &Cgroup| cgroup.id().unwrap_or(Caller::NO_CGROUP);
        Caller { command: self.command.clone(), cgroup: self.cgroup.as_ref().map(id) }
    }

    /// Looks whether its cgroup is there. Returns whether that is new.
    pub(crate) fn follow(&self) -> bool {
        self.cgroup.as_ref().is_some_and(Cgroup::follow)
    }

    /// Whether connections of these are for it; `None` of them is not known.
    pub(crate) fn has(&self, command: Option<&str>, cgroup: Option<u64>) -> bool {
        let is_in = |own: &Cgroup| cgroup.is_some() && own.id() == cgroup;
        self.command.as_deref().is_none_or(|own| command == Some(own))
            && self.cgroup.as_ref().is_none_or(is_in)
    }

    /// Whether its cgroup is missing.
    pub fn is_missing(&self) -> bool {
        self.cgroup.as_ref().is_some_and(|cgroup| !cgroup.path.is_dir())
    }

    /// `command rsync, cgroup /sys/fs/cgroup/backup.slice`; nothing for everybody.
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
    fn a_cgroup_comes_and_goes() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("backup.slice");
        let who = Who::checked(None, Some(path.clone())).expect("a path");
        let (id, shared) = (|| who.caller().cgroup, who.clone());
        assert_eq!((id(), who.follow()), (Some(Caller::NO_CGROUP), false));
        assert!(!who.has(None, Some(Caller::NO_CGROUP)));
        std::fs::create_dir(&path).expect("a directory");
        assert_eq!(id(), Some(Caller::NO_CGROUP), "nobody has looked");
        assert!(who.follow() && !who.follow());
        let now = cgroup_id(&path).expect("it is there");
        assert_eq!((id(), shared.caller().cgroup), (Some(now), Some(now)));
        assert!(shared.has(None, Some(now)) && !shared.has(None, None));
        std::fs::remove_dir(&path).expect("it was there");
        assert!(shared.follow());
        assert_eq!(id(), Some(Caller::NO_CGROUP));
    }

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
