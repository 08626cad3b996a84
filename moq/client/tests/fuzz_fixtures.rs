//! Runs the media fuzz target as an ordinary test, on inputs that fuzzing found, on its seeds, and on random changes of
//! them.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{fs, path::Path};

#[path = "../../../fuzz/media_checks.rs"]
mod media_checks;

fn inputs() -> Vec<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/fixtures/media_input");
    let files = fs::read_dir(dir).unwrap().map(|entry| fs::read(entry.unwrap().path()).unwrap());
    files.collect()
}

#[test]
fn fuzz_inputs_of_media_do_not_panic() {
    let inputs = inputs();
    assert!(inputs.len() >= 6, "{} inputs", inputs.len());
    // Random changes of the inputs do not replace fuzzing. They make this test fail early if a fuzz target no longer
    // matches the code.
    let mut state = 0x9e37_79b9_7f4a_7c15_usize;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below.max(1)
    };
    for input in &inputs {
        media_checks::media_input(input);
        for _ in 0..300 {
            let mut input = input.clone();
            for _ in 0..1 + random(4) {
                let at = random(input.len());
                match random(5) {
                    0 => input.truncate(at),
                    1 => input.insert(at, random(256) as u8),
                    2 => input.extend_from_within(at..),
                    3 => input.iter_mut().skip(at).take(4).for_each(|byte| *byte = 0xff),
                    _ => input.iter_mut().skip(at).take(1).for_each(|byte| *byte = random(256) as u8),
                }
            }
            media_checks::media_input(&input);
        }
    }
}
