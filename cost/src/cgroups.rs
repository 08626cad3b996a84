//! Finds the paths of cgroups (v2) by their kernel IDs, which are the inode numbers of their directories.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub struct Cgroups {
    mount: Option<PathBuf>,
    paths: HashMap<u64, String>,
    /// IDs of cgroups that the last scan of the directories did not find. They are not searched for again.
    unknown: HashSet<u64>,
}

/// Largest number of IDs without a known cgroup that are remembered.
const UNKNOWN: usize = 4096;
/// Levels of directories below the mount that are searched. Service managers nest cgroups less deeply.
const MAX_DEPTH: usize = 16;

impl Cgroups {
    pub fn new() -> Self {
        Self::at(mount())
    }

    fn at(mount: Option<PathBuf>) -> Self {
        Self { mount, paths: HashMap::new(), unknown: HashSet::new() }
    }

    /// Returns the path of a cgroup below the mount, `/` for the root. `None` if the cgroup was removed or no cgroup2
    /// file system is mounted.
    pub fn path(&mut self, id: u64) -> Option<&str> {
        if !self.paths.contains_key(&id) && self.unknown.insert(id) {
            self.scan();
        }
        self.paths.get(&id).map(String::as_str)
    }

    fn scan(&mut self) {
        let Some(mount) = self.mount.clone() else { return };
        // Removed cgroups are forgotten, so memory stays bounded on machines that create many of them.
        self.paths.clear();
        if self.unknown.len() > UNKNOWN {
            self.unknown.clear();
        }
        let mut directories = vec![(mount.clone(), 0)];
        while let Some((directory, depth)) = directories.pop() {
            let Ok(metadata) = fs::metadata(&directory) else { continue };
            let below = directory.strip_prefix(&mount).unwrap_or(&directory);
            self.paths.insert(metadata.ino(), format!("/{}", below.display()));
            self.unknown.remove(&metadata.ino());
            if depth < MAX_DEPTH {
                directories.extend(children(&directory).map(|child| (child, depth + 1)));
            }
        }
    }
}

fn children(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path())
}

/// Returns the mount point of the first cgroup2 file system, wherever it is mounted.
pub fn mount() -> Option<PathBuf> {
    first(&fs::read_to_string("/proc/self/mounts").unwrap_or_default())
}

fn first(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ');
        let place = fields.nth(1)?;
        (fields.next()? == "cgroup2").then(|| place.into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup2_mount_point_is_read_from_proc_mounts() {
        let mounts =
            "cgroup /sys/fs/cgroup/cpu cgroup rw 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(first(mounts), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(first("proc /proc proc rw 0 0\n"), None);
    }

    #[test]
    fn cgroup_directories_are_found_by_inode_on_request() {
        let root = tempfile::tempdir().expect("a directory");
        let id = |path: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(&path).expect("created");
            fs::metadata(path).expect("metadata").ino()
        };
        let service = id("system.slice/a.service");
        let mut cgroups = Cgroups::at(Some(root.path().to_owned()));
        assert_eq!(cgroups.path(service), Some("/system.slice/a.service"));
        assert_eq!(cgroups.path(id("")), Some("/"));
        let later = id("b");
        assert_eq!(cgroups.path(later), Some("/b"));
        assert_eq!(cgroups.path(u64::MAX), None);
    }
}
