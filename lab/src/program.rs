//! Finds the program `millrace` that is measured.

use std::env;
use std::path::PathBuf;

use anyhow::Context as _;

/// Environment variable with the path of the `millrace` program to measure, instead of the one next to this program.
const VARIABLE: &str = "MILLRACE";

/// Returns the path of `millrace`: the one in the environment variable `MILLRACE`, or else the one next to this
/// program.
///
/// # Errors
///
/// Fails if the file does not exist.
pub fn product() -> anyhow::Result<PathBuf> {
    let path = match env::var_os(VARIABLE) {
        Some(path) => path.into(),
        None => env::current_exe()?.with_file_name("millrace"),
    };
    // The path must be absolute, since processes may be started in other directories.
    path.canonicalize().with_context(|| {
        let path = path.display();
        format!("{path} does not exist: build it with `cargo build -p millrace`, or set {VARIABLE}=PATH")
    })
}
