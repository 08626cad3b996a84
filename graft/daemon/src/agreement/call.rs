//! The caller's end: calls a peer, offers, and offers again while both live.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_graft::{agreements::State, settings::Peer, status::Negotiated};
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{net::TcpStream, task::JoinSet, time::timeout};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tracing::warn;

use super::{
    Context, paths,
    talk::{End, Talk, micros},
    wire::{Broken, PATIENCE, Wire},
};

const PAUSE_LEAST: Duration = Duration::from_millis(200);
const PAUSE_MOST: Duration = Duration::from_secs(30);
/// How often it is looked whether an agreement that the peer has called for still is.
const LOOK: Duration = Duration::from_secs(1);
/// The path is looked at anew.
const PROBE_EVERY: Duration = Duration::from_secs(600);

/// For as long as the settings are.
pub async fn call(context: Arc<Context>, peer: Peer, address: SocketAddr, config: Arc<ClientConfig>) {
    let mut pause = PAUSE_LEAST;
    let mut changes = context.daemon.changes();
    loop {
        if context.daemon.with(|runtime| runtime.is_agreed(&peer.name)) {
            tokio::time::sleep(LOOK).await;
            continue;
        }
        let was_agreed = converse(&context, &peer, address, &config).await;
        pause = if was_agreed { PAUSE_LEAST } else { (pause * 2).min(PAUSE_MOST) };
        changes.borrow_and_update();
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // What stood in the way may be gone.
            _ = changes.changed() => pause = PAUSE_LEAST,
        }
    }
}

/// Returns whether it came to an agreement.
async fn converse(context: &Context, peer: &Peer, address: SocketAddr, config: &Arc<ClientConfig>) -> bool {
    let (session, state) = match reach(address, config).await {
        Ok((stream, timing)) => {
            let (local, remote) = ends(&stream, address);
            let mut talk = Talk {
                context,
                peer: &peer.name,
                wire: Wire(stream),
                local,
                remote,
                session: None,
                calls: true,
                revision: 0,
            };
            let Err(End(state)) = go_on(&mut talk, peer, timing).await;
            (talk.session, state)
        }
        Err(state) => (None, state),
    };
    if session.is_some() {
        warn!(peer = peer.name, "the agreement is over: {}", told(&state));
    }
    let ended = context.daemon.with(|runtime| runtime.ended(&peer.name, session, state));
    if let Err(error) = ended {
        warn!(peer = peer.name, "it stays bound until its time is over: {error}");
    }
    session.is_some()
}

fn told(state: &State) -> String {
    match state {
        State::Refused { detail, .. } => detail.clone(),
        State::Absent(detail)
        | State::TimedOut(detail)
        | State::Untrusted(detail)
        | State::Malformed(detail)
        | State::Ended(detail) => detail.clone(),
        State::Waiting | State::Agreed => String::new(),
    }
}

async fn reach(
    address: SocketAddr,
    config: &Arc<ClientConfig>,
) -> Result<(TlsStream<TcpStream>, Negotiated), State> {
    let start = Instant::now();
    let nobody = |error: &dyn std::fmt::Display| {
        State::Absent(format!("no daemon of grafts answers on {address}: {error}"))
    };
    let stream = match timeout(PATIENCE, TcpStream::connect(address)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return Err(nobody(&error)),
        Err(_) => return Err(nobody(&"nothing came back")),
    };
    let _ = stream.set_nodelay(true);
    let connected = Instant::now();
    // Whom the certificate is for is up to the settings, not to the address.
    let name = ServerName::IpAddress(address.ip().into());
    let handshake = TlsConnector::from(config.clone()).connect(name, stream);
    let stream = match timeout(PATIENCE, handshake).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            return Err(match Broken::from(error) {
                // Something else listens there.
                Broken::Closed => nobody(&"it closed the connection"),
                broken => broken.into(),
            });
        }
        Err(_) => return Err(State::TimedOut(format!("no TLS within {PATIENCE:?}"))),
    };
    let timing = Negotiated {
        connect_us: micros(connected - start),
        tls_us: micros(connected.elapsed()),
        ..Negotiated::default()
    };
    Ok((stream, timing))
}

fn ends(stream: &TlsStream<TcpStream>, address: SocketAddr) -> (SocketAddr, SocketAddr) {
    let tcp = stream.get_ref().0;
    (tcp.local_addr().unwrap_or(address), tcp.peer_addr().unwrap_or(address))
}

/// Offers, looks at the path, and offers again: after a time, and when there is something new to say.
async fn go_on(
    talk: &mut Talk<'_, TlsStream<TcpStream>>,
    peer: &Peer,
    timing: Negotiated,
) -> Result<std::convert::Infallible, End> {
    let context = talk.context;
    let mut changes = context.daemon.changes();
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
                probing.spawn(paths::probe(talk.remote, token.unwrap_or_default()));
                continue;
            }
            // What was found out is said with the next offer, which is now.
            Some(Ok(verdict)) = probing.join_next() => {
                context.daemon.with(|runtime| runtime.note_path(&peer.name, &verdict));
            }
        }
        talk.offer(Negotiated::default()).await?;
    }
}
