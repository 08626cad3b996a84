//! Golden files: the expected output of daemons. A change of the output shows as a change of the file in a review.

use std::path::Path;

use crate::cli;

/// Compares a text with `tests/golden/NAME.txt` of the crate in `folder`. Callers pass `env!("CARGO_MANIFEST_DIR")` for
/// `folder`. If the environment variable `MILLRACE_GOLDEN` is `write`, it writes the file instead.
#[track_caller]
pub fn assert_as_reviewed(folder: &str, name: &str, now: &str) {
    let file = Path::new(folder).join(format!("tests/golden/{name}.txt"));
    cli::assert_as_reviewed(&file, now, &format!("cargo test --lib, in {folder}"));
}
