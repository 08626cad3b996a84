//! The cgroup of this process.

use std::{fs, path::PathBuf};

/// Returns the cgroup of version 2 that this process is in. `None`: none is mounted.
pub fn own_cgroup() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let mut fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let root = PathBuf::from(fields.find(|fields| fields.get(2) == Some(&"cgroup2"))?.get(1)?);
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(root.join(own))
}
