//! Files in the place of others: whoever reads one reads all of it, and a process that is killed leaves what was there.

use std::{
    fs,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

/// `mode`: less what the process' mask takes away.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let new = beside(path, "new");
    // Of somebody who was killed then; or it is somebody else's, and leads elsewhere.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&new, path)
}

pub fn beside(path: &Path, what: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{what}"));
    name.into()
}
