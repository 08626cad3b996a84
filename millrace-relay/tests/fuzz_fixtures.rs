//! Inputs that fuzzing found or begins with, as an ordinary test.

use std::{fs, path::Path};

#[path = "../../fuzz/token_checks.rs"]
mod checks;

#[test]
fn tokens() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/fixtures/relay_token");
    let mut inputs = 0;
    for entry in fs::read_dir(dir).expect("fixtures") {
        let path = entry.expect("a file").path();
        println!("{}", path.display());
        checks::relay_token(&fs::read(path).expect("an input"));
        inputs += 1;
    }
    assert!(inputs >= 7, "{inputs} inputs");
}
