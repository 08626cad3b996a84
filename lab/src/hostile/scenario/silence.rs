//! Scenarios with clients to which the relay cannot send anything.

use std::time::Instant;

use anyhow::{Result, bail};
use millrace_quic::frame;

use super::{MOMENT, ScenarioAttack};
use crate::{
    hostile::{
        params::ClientLimits,
        peer::{HostilePeer, PATIENCE, StreamKind, web},
    },
    transport::LabTransport,
};

/// Gives the relay no credit for streams or data. The relay must close the connection, although it cannot send the
/// reason on a stream.
pub fn no_credit(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let ScenarioAttack { target, .. } = *attack;
    // Without credit for streams the relay cannot send its SETUP, nor HTTP/3's SETTINGS.
    let mut mute =
        HostilePeer::handshake(target, ClientLimits { max_streams: 0, ..ClientLimits::default() })?;
    if target.transport == LabTransport::Webtransport {
        mute.ask_unanswered(target)?;
    }
    // The credit allows the relay to accept a WebTransport session, but not to send the reason of its end.
    let mut rude = HostilePeer::connect(
        target,
        ClientLimits { max_answer_data: web::answer_len()?, ..ClientLimits::default() },
    )?;
    // An error is expected: the relay may have closed the connection already.
    let _ = rude.open(StreamKind::Data, &[0xff; 20], true).and_then(|_| rude.settle());
    for mut peer in [rude, mute] {
        stay(&mut peer)?;
        attack.vanish(peer);
    }
    Ok(())
}

/// Sends pings from time to time until the relay closes the connection.
fn stay(peer: &mut HostilePeer) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    while !peer.pump(MOMENT, |peer| peer.closed.is_some()) {
        if Instant::now() > until {
            bail!("the relay did not close a connection that only sends pings");
        }
        let mut frames = Vec::new();
        frame::write_ping(&mut frames);
        peer.send(frames, true)?;
    }
    Ok(())
}
