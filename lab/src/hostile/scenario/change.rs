//! Scenarios that change a connection's port, keys or connection IDs all the time.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::ScenarioAttack;
use crate::hostile::peer::HostilePeer;

/// Length of a round.
const ROUND: Duration = Duration::from_secs(1);

/// Connects, sends SETUP, and then calls `change` at the attack's rate. The second argument of `change` is the elapsed
/// part of the round, 0 to 1.
fn change(
    attack: &mut ScenarioAttack<'_>,
    change: impl Fn(&mut HostilePeer, f64) -> Result<()>,
) -> Result<()> {
    let mut peer = attack.peer()?;
    let began = Instant::now();
    let count = attack.packets_per_s;
    for number in 0..count {
        let due = began + ROUND * number / count;
        peer.pump(due.saturating_duration_since(Instant::now()), |_| false);
        if peer.closed.is_some() || began.elapsed() > ROUND {
            break; // stop early if the relay has closed the connection, or if this process had too little CPU
        }
        change(&mut peer, f64::from(number) / f64::from(count))?;
    }
    attack.close(peer)
}

/// Changes ports. In the first half of the round the client does not answer path challenges, in the second half it
/// does.
pub fn path_hop(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    change(attack, |peer, part| {
        peer.answers_challenges = part >= 0.5;
        peer.hop()
    })
}

pub fn key_update(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    change(attack, |peer, _| peer.update_keys())
}

pub fn id_churn(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    change(attack, |peer, _| peer.change_ids())
}

pub fn steady(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    change(attack, |peer, _| peer.ping())
}
