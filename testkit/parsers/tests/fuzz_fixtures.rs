//! Runs the fuzz targets on inputs that once made them fail, and on a few inputs that reach rarely executed code.

use std::{fs, path::Path};

#[path = "../../../fuzz/checks.rs"]
mod checks;

#[test]
fn fuzz_targets_pass_on_every_fixture() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/fixtures");
    for (name, check) in checks::ALL {
        let dir = fixtures.join(name);
        let files: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(!files.is_empty(), "{} is empty", dir.display());
        for file in files {
            println!("{}", file.display());
            check(&fs::read(&file).unwrap());
        }
    }
}

/// Runs the fuzz targets on random bytes. This test is no substitute for fuzzing, but it fails early if a fuzz target
/// no longer matches the code.
#[test]
fn fuzz_targets_pass_on_random_bytes() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for (_, check) in checks::ALL {
        for _ in 0..20_000 {
            let len = random() % 64;
            check(&(0..len).map(|_| random() as u8).collect::<Vec<_>>());
        }
    }
}
