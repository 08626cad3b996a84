//! The binary `millrace` as a library: its commands, one file each, and the code around a command. The crates of the
//! products do the work.

pub mod commands;
pub mod program;
