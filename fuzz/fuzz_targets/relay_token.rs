#![no_main]

#[path = "../token_checks.rs"]
mod checks;

libfuzzer_sys::fuzz_target!(|data: &[u8]| checks::relay_token(data));
