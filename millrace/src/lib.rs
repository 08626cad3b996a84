//! The binary `millrace` as a library: its commands, one file each, and what a program does around them. What they run is in the crates
//! of the products.

pub mod commands;
pub mod program;
