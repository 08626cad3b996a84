//! The binary `millrace` as a library: its commands, one file each, and the code that parses arguments and prints
//! errors. Other crates implement what the commands do: those of the relay, the gate, the cost observer, the grafts and
//! the RTP fan-out.

pub mod causes;
pub mod commands;
pub mod program;
