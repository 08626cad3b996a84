//! New cgroups (version 2) for benchmarked processes, so that the sockets of other processes are not affected.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Context as _;

static MADE: AtomicUsize = AtomicUsize::new(0);

pub struct HostCgroup {
    root: PathBuf,
    path: PathBuf,
}

impl HostCgroup {
    pub fn new(what: &str) -> anyhow::Result<Self> {
        let mounts = std::fs::read_to_string("/proc/self/mounts")?;
        let mut fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let found = fields.find(|fields| fields.get(2) == Some(&"cgroup2"));
        let root = found.and_then(|fields| fields.get(1).map(PathBuf::from));
        let root = root.context("no cgroup of version 2 is mounted")?;
        // Labs that run at the same time have hosts with the same names, so a number makes the cgroup's name unique.
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let path = root.join(format!("millrace-bench-{}-{number}-{what}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| path.display().to_string())?;
        Ok(Self { root, path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `work` while this process is in the cgroup. Sockets that it creates meanwhile belong to the cgroup.
    pub fn enter<T>(&self, work: impl FnOnce() -> T) -> anyhow::Result<T> {
        let enter = |path: &Path| std::fs::write(path.join("cgroup.procs"), std::process::id().to_string());
        enter(&self.path)?;
        let done = work();
        enter(&self.root)?;
        Ok(done)
    }

    /// Returns a command that runs `inner` in the cgroup.
    pub fn command(&self, inner: &Command) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ >\"$0\"; exec \"$@\""]).arg(self.path.join("cgroup.procs"));
        command.arg(inner.get_program()).args(inner.get_args());
        command
    }
}

impl Drop for HostCgroup {
    fn drop(&mut self) {
        let _ = std::fs::write(self.root.join("cgroup.procs"), std::process::id().to_string());
        let _ = std::fs::remove_dir(&self.path);
    }
}
