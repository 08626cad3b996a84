//! The binary `millrace` as a library: its commands, one file each, and the code that parses arguments and prints
//! errors. The products' own crates implement what the commands do.

pub mod commands;
pub mod program;
