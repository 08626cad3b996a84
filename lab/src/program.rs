//! Finds the program that is measured.

use std::env;
use std::path::PathBuf;

use anyhow::Context as _;

/// The environment variable that names another build of the program.
const VARIABLE: &str = "MILLRACE";

/// Returns the path of `millrace`: the one that `MILLRACE` names, or else the one in the directory of this program.
///
/// # Errors
/// There is no such file.
pub fn product() -> anyhow::Result<PathBuf> {
    let path = match env::var_os(VARIABLE) {
        Some(path) => path.into(),
        None => env::current_exe()?.with_file_name("millrace"),
    };
    // The path is absolute, since the program may be started in another directory.
    path.canonicalize().with_context(|| {
        let path = path.display();
        format!(
            "no {path}: build it with `cargo build -p millrace`, or name another one with {VARIABLE}=PATH"
        )
    })
}
