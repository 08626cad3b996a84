//! Clients to which the relay cannot say anything.

use std::time::Instant;

use anyhow::{Result, bail};
use millrace_quic::frame;

use super::{Attack, MOMENT};
use crate::{
    hostile::{
        params::Params,
        peer::{Kind, PATIENCE, Peer, web},
    },
    transport::Transport,
};

/// The relay has to close what it cannot talk to, and cannot say so either.
pub fn no_credit(attack: &mut Attack<'_>) -> Result<()> {
    let Attack { target, .. } = *attack;
    // No stream for the relay's SETUP, nor for that of HTTP/3.
    let mut mute = Peer::handshake(target, Params { max_streams: 0, ..Params::default() })?;
    if target.transport == Transport::Webtransport {
        mute.ask_unanswered(target)?;
    }
    // Enough to be let in to a session of WebTransport, and not for why it is closed.
    let mut rude =
        Peer::connect(target, Params { max_answer_data: web::answer_len()?, ..Params::default() })?;
    // May be closed meanwhile.
    let _ = rude.open(Kind::Data, &[0xff; 20], true).and_then(|_| rude.settle());
    for mut peer in [rude, mute] {
        stay(&mut peer)?;
        attack.vanish(peer);
    }
    Ok(())
}

/// Says from time to time that it is there, until the relay closes the connection.
fn stay(peer: &mut Peer) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    while !peer.pump(MOMENT, |peer| peer.closed.is_some()) {
        if Instant::now() > until {
            bail!("the relay keeps a connection on which nothing sensible is said");
        }
        let mut frames = Vec::new();
        frame::write_ping(&mut frames);
        peer.send(frames, true)?;
    }
    Ok(())
}
