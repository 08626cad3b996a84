//! What is printed, as files that reviews show: `MILLRACE_GOLDEN=write cargo test -p millrace --lib` writes them anew.

use std::path::Path;

/// Compares with `tests/golden/tables/NAME.txt`.
#[track_caller]
pub(crate) fn assert_as_reviewed(name: &str, now: &str) {
    let path = format!("tests/golden/tables/{name}.txt");
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(&path);
    if std::env::var("MILLRACE_GOLDEN").is_ok_and(|value| value == "write") {
        std::fs::create_dir_all(file.parent().expect("a directory")).expect("a directory");
        return std::fs::write(&file, now).expect("written");
    }
    let before = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        now == before,
        "{path} is another. If that is meant: MILLRACE_GOLDEN=write cargo test -p millrace --lib. Now:\n{now}"
    );
}
