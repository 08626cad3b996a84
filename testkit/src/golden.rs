//! Golden files, which hold the expected output of daemons, so that a review shows each change of it.

use std::path::Path;

use crate::cli;

/// Compares a text with `tests/golden/NAME.txt` of the crate in `folder`. Callers pass `env!("CARGO_MANIFEST_DIR")` for
/// `folder`. `MILLRACE_GOLDEN=write` writes the file.
#[track_caller]
pub fn assert_as_reviewed(folder: &str, name: &str, now: &str) {
    let file = Path::new(folder).join(format!("tests/golden/{name}.txt"));
    cli::assert_as_reviewed(&file, now, &format!("cargo test --lib, in {folder}"));
}
