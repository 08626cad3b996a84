//! Parsers of all BPF programs, compiled natively. tests/parsers.rs compares them with those in Rust.
