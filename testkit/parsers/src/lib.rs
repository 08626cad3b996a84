//! The parsers of all BPF programs, compiled natively. tests/parsers.rs compares them with the parsers in Rust.
#![deny(missing_docs)]
