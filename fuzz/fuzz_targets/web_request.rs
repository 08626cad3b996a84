#![no_main]

#[path = "../web_checks.rs"]
mod checks;

libfuzzer_sys::fuzz_target!(|data: &[u8]| checks::web_request(data));
