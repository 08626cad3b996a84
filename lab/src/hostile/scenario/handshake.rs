//! Handshakes.

use std::time::Duration;

use anyhow::Result;

use super::{Attack, MOMENT};
use crate::hostile::{params::Params, peer::Peer};

/// Handshakes at a time, each from a port of its own.
const COUNT: usize = 300;
/// Looks at connections on which nothing is said, and the time between them.
const LOOKS: u32 = 4;

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

/// The relay ends them in time, or others for them.
pub fn idle(attack: &mut Attack<'_>) -> Result<()> {
    let connect = |_| Peer::handshake(attack.target, Params::default());
    let mut peers: Vec<_> = (0..COUNT).map(connect).collect::<Result<_>>()?;
    for _ in 0..LOOKS {
        std::thread::sleep(MOMENT / LOOKS);
        for peer in peers.iter_mut().filter(|peer| peer.closed.is_none()) {
            peer.ping()?;
            peer.pump(Duration::ZERO, |_| false);
        }
    }
    peers.into_iter().try_for_each(|peer| attack.close(peer))
}
