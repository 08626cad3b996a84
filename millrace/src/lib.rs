//! The binary `millrace` as a library: its commands, one file each, and the code around a command. The products' own
//! crates implement what the commands do.

pub mod commands;
pub mod program;
