//! Scenarios of handshakes.

use std::time::Duration;

use anyhow::Result;

use super::{MOMENT, ScenarioAttack};
use crate::hostile::{params::ClientLimits, peer::HostilePeer};

/// Handshakes at a time, each from a port of its own.
const COUNT: usize = 300;
/// Pings of each idle connection, spread over one [`MOMENT`].
const LOOKS: u32 = 4;

pub fn unfinished(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let mut peers = Vec::new();
    for _ in 0..COUNT {
        peers.push(HostilePeer::start(attack.target, ClientLimits::default())?);
    }
    std::thread::sleep(MOMENT);
    for peer in peers {
        attack.vanish(peer);
    }
    Ok(())
}

/// Leaves connections idle. The relay closes them in time, or in favour of others.
pub fn idle(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let connect = |_| HostilePeer::handshake(attack.target, ClientLimits::default());
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
