//! The parsers of the BPF programs, compiled natively, against Rust's on the same bytes: inputs that once broke a
//! fuzz target, and a few that reach deep, replayed; and random ones.

#![allow(unsafe_code)]

use std::{fs, path::Path};

#[path = "../../fuzz/kernel_checks.rs"]
mod checks;

#[test]
fn every_fixture_passes() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/fixtures");
    for (name, check) in checks::ALL {
        let dir = fixtures.join(name);
        let files: Vec<_> =
            fs::read_dir(&dir).expect("fixtures").map(|entry| entry.expect("a file").path()).collect();
        assert!(!files.is_empty(), "{} is empty", dir.display());
        for file in files {
            println!("{}", file.display());
            check(&fs::read(&file).expect("a file"));
        }
    }
}

/// Not a fuzzer, but enough to notice at once when the two no longer agree.
#[test]
fn random_bytes_pass() {
    let mut rng = fastrand::Rng::with_seed(1);
    for (_, check) in checks::ALL {
        for _ in 0..20_000 {
            let len = rng.usize(..96);
            check(&(0..len).map(|_| rng.u8(..)).collect::<Vec<_>>());
        }
    }
}
