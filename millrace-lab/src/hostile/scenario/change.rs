//! Connections that change all the time: where they come from, their keys, their IDs.

use std::time::Duration;

use anyhow::Result;

use super::Attack;
use crate::hostile::{params::Params, peer::Peer};

/// Changes of each kind, and the time between them.
const COUNT: u32 = 500;
const PAUSE: Duration = Duration::from_millis(2);

/// Handshakes, and changes: nothing else.
fn change(attack: &mut Attack<'_>, change: impl Fn(&mut Peer, u32) -> Result<()>) -> Result<()> {
    let mut peer = Peer::handshake(attack.target, Params::default())?;
    peer.settle()?;
    for number in 0..COUNT {
        change(&mut peer, number)?;
        peer.pump(PAUSE, |_| false);
        if peer.closed.is_some() {
            break; // as the relay may
        }
    }
    attack.close(peer)
}

/// The first ports never answer, the rest do.
pub fn path_hop(attack: &mut Attack<'_>) -> Result<()> {
    change(attack, |peer, number| {
        peer.answers_challenges = number >= COUNT / 2;
        peer.hop()
    })
}

pub fn key_update(attack: &mut Attack<'_>) -> Result<()> {
    change(attack, |peer, _| peer.update_keys())
}

pub fn id_churn(attack: &mut Attack<'_>) -> Result<()> {
    change(attack, |peer, _| peer.change_ids())
}
