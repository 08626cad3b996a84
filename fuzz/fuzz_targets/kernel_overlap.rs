#![no_main]

#[path = "../kernel_checks.rs"]
mod kernel_checks;

libfuzzer_sys::fuzz_target!(|data: &[u8]| kernel_checks::kernel_overlap(data));
