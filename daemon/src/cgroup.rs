//! The cgroup of this process.

use std::{fs, path::PathBuf};

/// Returns the version 2 cgroup of this process, or `None` if no cgroup version 2 hierarchy is mounted.
pub fn own_cgroup() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let mut fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let root = PathBuf::from(fields.find(|fields| fields.get(2) == Some(&"cgroup2"))?.get(1)?);
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(root.join(own))
}
