//! The program that is measured.

use std::env;
use std::path::PathBuf;

use anyhow::{Context as _, bail};

/// Names another build of it.
const VARIABLE: &str = "MILLRACE";

/// Returns the path of `millrace`: what `MILLRACE` says, or the one beside this program.
///
/// # Errors
/// There is none.
pub fn product() -> anyhow::Result<PathBuf> {
    if let Some(path) = env::var_os(VARIABLE) {
        return Ok(path.into());
    }
    let path = env::current_exe()?.with_file_name("millrace");
    if !path.is_file() {
        bail!(
            "{} is not there: build it with `cargo build -p millrace`, or say where it is with {VARIABLE}=PATH",
            path.display()
        );
    }
    path.canonicalize().with_context(|| path.display().to_string())
}
