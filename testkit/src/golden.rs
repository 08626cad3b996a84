//! What is printed, as files that reviews show: `MILLRACE_GOLDEN=write cargo test -p millrace --lib` writes them anew.

use std::path::Path;

use millrace_testkit::cli;

/// Compares with `tests/golden/tables/NAME.txt`.
#[track_caller]
pub(crate) fn assert_as_reviewed(name: &str, now: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/tables/{name}.txt"));
    cli::assert_as_reviewed(&file, now, "cargo test -p millrace --lib");
}
