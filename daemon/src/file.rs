//! Files that users name.

use std::{fs, path::Path};

use anyhow::{Context as _, ensure};

/// Reads a file that has at most `most` bytes.
///
/// # Errors
/// It is longer, or cannot be read.
pub fn read(path: &Path, most: usize) -> anyhow::Result<String> {
    let name = || path.display().to_string();
    let bytes = fs::metadata(path).with_context(name)?.len();
    ensure!(bytes <= most as u64, "{}: it has {bytes} bytes; up to {most} are read", name());
    fs::read_to_string(path).with_context(name)
}
