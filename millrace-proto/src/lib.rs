//! Millrace's protocol logic: QUIC packets and frames, MoQ Transport (draft-18), and the relay's tracks,
//! repair, loss recovery and congestion control.
//!
//! Nothing here does I/O, reads a clock, spawns a task or needs `unsafe`: time is an argument and bytes go
//! in and out of slices, so that every rule can be tested, fuzzed and replayed.
#![forbid(unsafe_code)]

pub mod moq;
pub mod plane;
pub mod quic;
pub mod relay;
