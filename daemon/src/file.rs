//! Reads files that users specify.

use std::path::Path;

use anyhow::Context as _;

/// Reads a text file of at most `most` bytes.
///
/// # Errors
/// Fails if the file is longer, or cannot be read.
pub fn read(path: &Path, most: usize) -> anyhow::Result<String> {
    millrace_base::file::text(path, most).with_context(|| path.display().to_string())
}
