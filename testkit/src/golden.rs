//! Golden files: expected output of daemons, which reviews show.

use std::path::Path;

use crate::cli;

/// Compares with `tests/golden/NAME.txt` of the crate in `folder`, which callers give as
/// `env!("CARGO_MANIFEST_DIR")`. `MILLRACE_GOLDEN=write` writes the file.
#[track_caller]
pub fn assert_as_reviewed(folder: &str, name: &str, now: &str) {
    let file = Path::new(folder).join(format!("tests/golden/{name}.txt"));
    cli::assert_as_reviewed(&file, now, &format!("cargo test --lib, in {folder}"));
}
