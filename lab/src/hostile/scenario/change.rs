//! Connections that change all the time: where they come from, their keys, their IDs.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::Attack;
use crate::hostile::peer::Peer;

/// How long one connection goes on with it.
const ROUND: Duration = Duration::from_secs(1);

/// Says SETUP, and then changes at the attack's rate and nothing else. The second argument of `change` is the part of the
/// round that is over, 0 to 1.
fn change(attack: &mut Attack<'_>, change: impl Fn(&mut Peer, f64) -> Result<()>) -> Result<()> {
    let mut peer = attack.peer()?;
    let (began, count) = (Instant::now(), attack.packets_per_s);
    for number in 0..count {
        let due = began + ROUND * number / count;
        peer.pump(due.saturating_duration_since(Instant::now()), |_| false);
        if peer.closed.is_some() || began.elapsed() > ROUND {
            break; // as the relay may; or there was no CPU for more
        }
        change(&mut peer, f64::from(number) / f64::from(count))?;
    }
    attack.close(peer)
}

/// The first ports never answer, the rest do.
pub fn path_hop(attack: &mut Attack<'_>) -> Result<()> {
    change(attack, |peer, part| {
        peer.answers_challenges = part >= 0.5;
        peer.hop()
    })
}

pub fn key_update(attack: &mut Attack<'_>) -> Result<()> {
    change(attack, |peer, _| peer.update_keys())
}

pub fn id_churn(attack: &mut Attack<'_>) -> Result<()> {
    change(attack, |peer, _| peer.change_ids())
}

pub fn steady(attack: &mut Attack<'_>) -> Result<()> {
    change(attack, |peer, _| peer.ping())
}
