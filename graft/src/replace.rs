//! Replaces files atomically: a reader gets a whole file, and if the process is killed the previous file stays.

use std::{
    fs,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

/// Replaces a file. The umask of the process reduces the permissions in `mode`.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let new = sibling_path(path, "new");
    // A file of this temporary name may be a leftover of a killed process, or another program's symbolic link to
    // another file. It is therefore removed and never written to.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // A file that is created exclusively is never a symbolic link.
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&new)?;
    file.write_all(bytes)?;
    // The content has to be on disk before the file's name refers to it.
    file.sync_all()?;
    fs::rename(&new, path)
}

pub fn sibling_path(path: &Path, what: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{what}"));
    name.into()
}
