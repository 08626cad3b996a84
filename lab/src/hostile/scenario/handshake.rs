//! Scenarios in which a client starts handshakes and never completes them, or completes them and then does nothing.

use std::time::Duration;

use anyhow::Result;

use super::{MOMENT, ScenarioAttack};
use crate::hostile::{params::ClientLimits, peer::HostilePeer};

/// Number of handshakes at the same time, each from its own port.
const COUNT: usize = 300;
/// Number of times that the scenario `idle` sends a ping and reads packets on each of its connections.
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

/// Leaves connections idle after the handshake. The relay closes them after its time-out, or earlier in favour of new
/// connections.
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
