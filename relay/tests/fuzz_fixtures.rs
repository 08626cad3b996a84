//! Runs the fuzz targets of the relay, without a fuzzer, on inputs that fuzzing found or begins with.

use std::{fs, path::Path};

#[path = "../../fuzz/token_checks.rs"]
mod token_checks;
#[path = "../../fuzz/web_checks.rs"]
mod web_checks;

fn replay(target: &str, check: fn(&[u8])) -> Vec<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/fixtures").join(target);
    let mut inputs = Vec::new();
    for entry in fs::read_dir(dir).expect("fixtures") {
        let path = entry.expect("a file").path();
        println!("{}", path.display());
        let input = fs::read(path).expect("an input");
        check(&input);
        inputs.push(input);
    }
    assert!(inputs.len() >= 7, "{} inputs", inputs.len());
    inputs
}

#[test]
fn fuzz_inputs_of_tokens_do_not_panic() {
    replay("relay_token", token_checks::relay_token);
}

#[test]
fn fuzz_inputs_of_session_requests_do_not_panic() {
    let inputs = replay("web_request", web_checks::web_request);
    // Changes each input at random. This is no substitute for fuzzing, but it fails early if the fuzz target
    // (`web_checks.rs`) no longer matches the relay's code.
    let mut state = 0x9e37_79b9_7f4a_7c15_usize;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below.max(1)
    };
    for input in &inputs {
        for _ in 0..1000 {
            let mut input = input.clone();
            for _ in 0..1 + random(4) {
                let at = random(input.len());
                match random(4) {
                    0 => input.truncate(at),
                    1 => input.insert(at, random(256) as u8),
                    2 => input.extend_from_within(at..),
                    _ => input.iter_mut().skip(at).take(1).for_each(|byte| *byte = random(256) as u8),
                }
            }
            web_checks::web_request(&input);
        }
    }
}
