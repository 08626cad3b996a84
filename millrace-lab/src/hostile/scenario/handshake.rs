//! Handshakes.

use anyhow::Result;

use super::{Attack, MOMENT};
use crate::hostile::{params::Params, peer::Peer};

/// Handshakes at a time, each from a port of its own.
const COUNT: usize = 300;

pub fn unfinished(attack: &mut Attack<'_>) -> Result<()> {
    let mut peers = Vec::new();
    for _ in 0..COUNT {
        peers.push(Peer::start(attack.target, Params::default())?);
    }
    std::thread::sleep(MOMENT);
    for peer in peers {
        attack.vanish(peer);
    }
    Ok(())
}
