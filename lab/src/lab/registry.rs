//! Registers the labs of this host and their owner processes.
//!
//! A lab has a directory `/run/millrace/lab/ID` with its control socket and a file `lock`, and the namespaces
//! `ID-NODE`. The lab's owner keeps `lock` locked. Whoever may open the file could lock it, so only root, who creates
//! all labs, may open it. The kernel releases the lock however the owner ends. So a lab with a free lock is dead, and
//! its remains may be removed. Process IDs decide nothing, since they are reused.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

use super::netns::{self, Netns};
use super::{Error, Result};

const ROOT: &str = "/run/millrace/lab";
const PREFIX: &str = "mr-";
/// File that is locked while labs are claimed or removed.
const REGISTRY: &str = "registry";

/// Ownership of a lab's ID, directory and namespaces. Dropping it removes them all.
pub(super) struct LabClaim {
    id: String,
    _lock: Flock<File>,
}

impl LabClaim {
    /// Removes the remains of dead labs, then claims a new ID and creates its namespaces.
    pub(super) fn new(nodes: &[&str]) -> Result<Self> {
        let _one_at_a_time = lock_registry()?;
        sweep()?;
        let id = free_id();
        let lock = dir(&id).join("lock");
        fs::create_dir(dir(&id)).map_err(|source| io("create", &dir(&id), source))?;
        let mut file = own_file(&lock)?;
        writeln!(file, "{}", std::process::id()).map_err(|source| io("write", &lock, source))?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock)
            .map_err(|(_, errno)| io("lock", &lock, errno.into()))?;
        // From here on, an error drops this ownership of the lab's ID, which removes everything that was created.
        let claim = Self { id, _lock: lock };
        netns::create(&nodes.iter().map(|node| claim.netns(node)).collect::<Vec<_>>())?;
        Ok(claim)
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn netns(&self, node: &str) -> Netns {
        netns_of(&self.id, node)
    }

    pub(super) fn control_socket(&self) -> PathBuf {
        control_socket(&self.id)
    }
}

impl Drop for LabClaim {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.id) {
            tracing::error!(%error, id = self.id, "lab: the lab could not be removed; `millrace-lab lab clean` tries again");
        }
    }
}

pub(super) fn netns_of(id: &str, node: &str) -> Netns {
    Netns::new(format!("{id}-{node}"))
}

pub(super) fn control_socket(id: &str) -> PathBuf {
    dir(id).join("control")
}

/// Returns the IDs of labs whose owners are alive.
pub(super) fn live() -> Vec<String> {
    ids().into_iter().filter(|id| !is_dead(id)).collect()
}

/// Returns the IDs of labs whose owners ended without removing the labs.
pub(super) fn dead() -> Vec<String> {
    // An error is ignored: if the registry cannot be locked, no lab can be claimed meanwhile either.
    let _none_is_claimed = lock_registry_for(FlockArg::LockShared).ok();
    remains()
}

/// Returns the process ID of a running lab's owner.
pub(super) fn owner(id: &str) -> Option<i32> {
    fs::read_to_string(dir(id).join("lock")).ok()?.trim().parse().ok()
}

/// Removes the remains of dead labs. Returns their IDs.
pub fn clean() -> Result<Vec<String>> {
    let _one_at_a_time = lock_registry()?;
    sweep()
}

/// Removes this process' labs, even if they are in use.
pub(super) fn remove_own() -> Result<()> {
    let _one_at_a_time = lock_registry()?;
    let own = format!("{PREFIX}{}.", std::process::id());
    ids().iter().filter(|id| id.starts_with(&own)).try_for_each(|id| remove(id))
}

fn remove(id: &str) -> Result<()> {
    netns::remove(&netns::list(&format!("{id}-")))?;
    match fs::remove_dir_all(dir(id)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(io("remove", &dir(id), error)),
        _ => Ok(()),
    }
}

fn sweep() -> Result<Vec<String>> {
    let dead = remains();
    dead.iter().try_for_each(|id| remove(id))?;
    Ok(dead)
}

/// Returns the IDs of dead labs. The caller must hold the registry's lock.
fn remains() -> Vec<String> {
    let mut dead: Vec<String> = ids().into_iter().filter(|id| is_dead(id)).collect();
    // A namespace whose lab has no directory also belongs to a dead lab, since /run/millrace may have been emptied.
    let orphans = netns::list(PREFIX).into_iter().filter_map(|netns| id_of(netns.name()));
    dead.extend(orphans.filter(|id| !dir(id).exists()));
    dead.sort();
    dead.dedup();
    dead
}

/// Returns the lab's ID `mr-PID.N` for a namespace `mr-PID.N-NODE`; `None` for other namespaces.
fn id_of(netns: &str) -> Option<String> {
    let (number, _node) = netns.strip_prefix(PREFIX)?.split_once('-')?;
    let (pid, n) = number.split_once('.')?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    (is_number(pid) && is_number(n)).then(|| format!("{PREFIX}{number}"))
}

fn ids() -> Vec<String> {
    let Ok(entries) = fs::read_dir(ROOT) else { return Vec::new() };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut ids: Vec<String> = names.filter(|name| name.starts_with(PREFIX)).collect();
    ids.sort();
    ids
}

fn is_dead(id: &str) -> bool {
    match File::open(dir(id).join("lock")) {
        Ok(file) => Flock::lock(file, FlockArg::LockExclusiveNonblock).is_ok(),
        Err(_) => true,
    }
}

/// Locks the registry while labs are claimed or removed. A lab looks dead between the creation of its directory and of
/// its lock.
fn lock_registry() -> Result<Flock<File>> {
    lock_registry_for(FlockArg::LockExclusive)
}

fn lock_registry_for(whom: FlockArg) -> Result<Flock<File>> {
    let root = Path::new(ROOT);
    if let Some(above) = root.parent() {
        fs::create_dir_all(above).map_err(|source| io("create", above, source))?;
    }
    lock_in(root, whom)
}

/// Creates the directory if it is missing, makes it private to its owner, and locks the registry in it.
fn lock_in(root: &Path, whom: FlockArg) -> Result<Flock<File>> {
    match DirBuilder::new().mode(0o700).create(root) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            // An older version may have created the directory with access for others.
            fs::set_permissions(root, Permissions::from_mode(0o700)).map_err(|it| io("close", root, it))?;
        }
        made => made.map_err(|source| io("create", root, source))?,
    }
    let path = root.join(REGISTRY);
    Flock::lock(own_file(&path)?, whom).map_err(|(_, errno)| io("lock", &path, errno.into()))
}

/// Opens or creates a file that only its owner may open.
fn own_file(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    options.open(path).map_err(|source| io("open", path, source))
}

fn free_id() -> String {
    let id = |n: u32| format!("{PREFIX}{}.{n}", std::process::id());
    (0..).map(id).find(|id| !dir(id).exists()).unwrap_or_else(|| id(u32::MAX))
}

fn dir(id: &str) -> PathBuf {
    Path::new(ROOT).join(id)
}

fn io(what: &str, path: &Path, source: std::io::Error) -> Error {
    Error::Io { what: format!("{what} {}", path.display()), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever may open a file can keep it locked forever.
    #[test]
    fn lab_registry_is_accessible_only_to_its_unix_user() {
        let above = std::env::temp_dir().join(format!("millrace-registry-{}", std::process::id()));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        fs::create_dir(&above).unwrap();
        // The test covers two cases: a new directory, and a directory that other users could read.
        for (name, before) in [("new", None), ("open", Some(0o755))] {
            let root = above.join(name);
            if let Some(before) = before {
                fs::create_dir(&root).unwrap();
                fs::set_permissions(&root, Permissions::from_mode(before)).unwrap();
            }
            let _lock = lock_in(&root, FlockArg::LockExclusiveNonblock).unwrap();
            assert_eq!((mode(&root), mode(&root.join(REGISTRY))), (0o700, 0o600), "{name}");
        }
        fs::remove_dir_all(&above).unwrap();
    }

    #[test]
    fn namespaces_of_labs_are_recognised() {
        assert_eq!(id_of("mr-12.0-relay-2"), Some("mr-12.0".into()));
        for name in ["mr-12-relay", "mr-d-pub", "mr-.0-pub", "mr-12.x-pub", "mr-12.0", "blue"] {
            assert_eq!(id_of(name), None, "{name}");
        }
    }
}
