//! The connecting host of an agreement: it connects to a peer, offers it an agreement on the grafts that both hosts
//! use, and renews the offer while both hosts run.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_graft::{
    NegotiationEnds, agreements::NegotiationState, settings::AgreementPeer, status::Negotiated,
};
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{net::TcpStream, task::JoinSet, time::timeout};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tracing::warn;

use super::{
    AgreementContext, paths,
    talk::{AgreementTalk, ConversationEnd, micros},
    wire::{AgreementWire, PATIENCE, WireError},
};
use crate::link::LinkRequest;

/// Pause before the next attempt to connect, which doubles after each failure up to `PAUSE_MOST`.
const PAUSE_LEAST: Duration = Duration::from_millis(200);
const PAUSE_MOST: Duration = Duration::from_secs(30);
/// Interval at which this host checks whether an agreement that the peer made over a connection of its own still
/// exists.
const LOOK: Duration = Duration::from_secs(1);
/// Interval of the probes that measure the network path to the peer.
const PROBE_EVERY: Duration = Duration::from_secs(600);

/// Connects to the peer and keeps the agreement with it in force, until this task is aborted.
pub async fn call(
    context: Arc<AgreementContext>,
    peer: AgreementPeer,
    address: SocketAddr,
    config: Arc<ClientConfig>,
) {
    let mut pause = PAUSE_LEAST;
    let mut changes = context.host.changes();
    loop {
        // Without the process that holds this host's rules there is nothing to offer.
        if changes.wait_for(|revision| *revision != 0).await.is_err() {
            return;
        }
        if context.host.link.is_agreed(&peer.name, None) {
            tokio::time::sleep(LOOK).await;
            continue;
        }
        let was_agreed = converse(&context, &peer, address, &config).await;
        pause = if was_agreed { PAUSE_LEAST } else { (pause * 2).min(PAUSE_MOST) };
        // Earlier changes of the settings are marked as seen, so only a change from now on ends the pause before the
        // next attempt early.
        changes.borrow_and_update();
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // The new settings may have removed the reason why connecting failed, so the pause starts from its shortest
            // value.
            _ = changes.changed() => pause = PAUSE_LEAST,
        }
    }
}

/// Connects to the peer once. Returns whether an agreement was reached.
async fn converse(
    context: &AgreementContext,
    peer: &AgreementPeer,
    address: SocketAddr,
    config: &Arc<ClientConfig>,
) -> bool {
    let (session, state) = match reach(address, config).await {
        Ok((stream, timing)) => {
            let (local, remote) = stream_ends(&stream, address);
            let ends = NegotiationEnds { peer: peer.name.clone(), local, remote, calls: true };
            let mut talk =
                AgreementTalk { context, wire: AgreementWire(stream), ends, session: None, revision: 0 };
            let Err(ConversationEnd(state)) = go_on(&mut talk, peer, timing).await;
            (talk.session, state)
        }
        Err(state) => (None, state),
    };
    let detail = state.detail();
    context.host.link.tell(&LinkRequest::End { peer: peer.name.clone(), session, state });
    // The peer's own negotiation may have replaced this one.
    if session.is_some() && !context.host.link.is_agreed(&peer.name, None) {
        warn!(peer = peer.name, "the agreement with the peer has ended: {detail}");
    }
    session.is_some()
}

async fn reach(
    address: SocketAddr,
    config: &Arc<ClientConfig>,
) -> Result<(TlsStream<TcpStream>, Negotiated), NegotiationState> {
    let start = Instant::now();
    let nobody = |error: &dyn std::fmt::Display| {
        NegotiationState::Absent(format!("no daemon of grafts answers on {address}: {error}"))
    };
    let stream = match timeout(PATIENCE, TcpStream::connect(address)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return Err(nobody(&error)),
        Err(_) => return Err(nobody(&"no answer")),
    };
    let _ = stream.set_nodelay(true);
    let connected = Instant::now();
    // The peer is identified by its public key, which the settings contain, so the name in its certificate does not
    // matter.
    let name = ServerName::IpAddress(address.ip().into());
    let handshake = TlsConnector::from(config.clone()).connect(name, stream);
    let stream = match timeout(PATIENCE, handshake).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            return Err(match WireError::from(error) {
                // A listener that does not run the graft daemon closes the connection.
                WireError::Closed => nobody(&"the connection was closed"),
                broken => broken.into(),
            });
        }
        Err(_) => return Err(NegotiationState::TimedOut(format!("no TLS within {PATIENCE:?}"))),
    };
    let timing = Negotiated {
        connect_us: micros(connected - start),
        tls_us: micros(connected.elapsed()),
        ..Negotiated::default()
    };
    Ok((stream, timing))
}

fn stream_ends(stream: &TlsStream<TcpStream>, address: SocketAddr) -> (SocketAddr, SocketAddr) {
    let tcp = stream.get_ref().0;
    (tcp.local_addr().unwrap_or(address), tcp.peer_addr().unwrap_or(address))
}

/// Sends an offer at once, again after each interval, and after each change of the settings. The path to the peer is
/// probed between offers.
async fn go_on(
    talk: &mut AgreementTalk<'_, TlsStream<TcpStream>>,
    peer: &AgreementPeer,
    timing: Negotiated,
) -> Result<std::convert::Infallible, ConversationEnd> {
    let context = talk.context;
    let mut changes = context.host.changes();
    talk.offer(timing).await?;
    let token = paths::token(talk.wire.0.get_ref().1);
    let mut probes = tokio::time::interval(PROBE_EVERY);
    let mut probing = JoinSet::new();
    loop {
        let again = tokio::time::sleep(context.agreement.interval);
        tokio::select! {
            broken = talk.wire.closed() => return Err(broken.into()),
            () = again => {}
            _ = changes.changed() => {}
            _ = probes.tick(), if peer.probe && token.is_some() => {
                probing.spawn(paths::probe(talk.ends.remote, token.unwrap_or_default()));
                continue;
            }
            // The offer below is sent at once and carries the result of the path probe.
            Some(Ok(verdict)) = probing.join_next() => {
                context.host.link.tell(&LinkRequest::NotePath { peer: peer.name.clone(), verdict });
            }
        }
        talk.offer(Negotiated::default()).await?;
    }
}
