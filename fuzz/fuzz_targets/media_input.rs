#![no_main]

#[path = "../media_checks.rs"]
mod checks;

libfuzzer_sys::fuzz_target!(|data: &[u8]| checks::media_input(data));
