//! Tests of media through a relay, with unmodified peers, our own clients, and every mix of both.
//!
//! Tier: test-all, since the peers have to be built.
//!
//! `scripts/peers.sh` builds the peers. A test whose peers, ffmpeg or root are missing prints SKIP.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod clip;
mod drafts;
mod ladder;
mod lossy;
mod mesh;
mod ours;
mod players;
mod process;
mod relay;
mod returns;
#[path = "../support/site.rs"]
mod site;
mod suite;
mod web;

/// Ends a test that cannot run here, and prints the reason.
macro_rules! needs {
    ($($program:expr),* $(,)?) => {
        if let Some(missing) = [$($program),*].into_iter().find_map(super::process::missing) {
            println!("SKIP {}: {missing}", std::thread::current().name().unwrap_or("interop"));
            return;
        }
    };
}
pub(crate) use needs;
