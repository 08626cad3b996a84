//! Listens for peers, and accepts the negotiations that they start. A negotiation leads to an agreement on the grafts
//! that both hosts use. A host that has not shown a known key leaves no state, and the number of concurrent handshakes
//! is bounded.

use std::{
    net::SocketAddr,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use millrace_graft::{NegotiationEnds, agreements::NegotiationState};
use millrace_graft_proto::message::{AgreementMessage, AgreementRefusal, RefusalReason};
use millrace_graft_tls::callers::Callers;
use rustls::ServerConfig;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tracing::{debug, warn};

use super::{
    AgreementContext, paths,
    talk::{AgreementTalk, ConversationEnd, unexpected},
    wire::{AgreementWire, PATIENCE},
};

use crate::link::LinkRequest;

/// Limit of concurrent negotiations: at least two for each peer that the settings may have. A peer that has just
/// restarted may still have its old connection.
const CONVERSATIONS_MAX: usize = 512;

pub async fn listen(context: Arc<AgreementContext>, listener: TcpListener, config: Arc<ServerConfig>) {
    let acceptor = TlsAcceptor::from(config);
    let conversations = Arc::new(Semaphore::new(CONVERSATIONS_MAX));
    let callers = Callers::default();
    let mut tasks = tokio::task::JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = tasks.join_next() => continue,
        };
        let (stream, remote) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!("a connection that would negotiate grafts cannot be accepted: {error}");
                // Accepting a connection fails mostly because this process has no free file descriptors, so the loop
                // waits a moment.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let address = remote.ip().to_canonical();
        let is_named = context.agreement.peers.iter().any(|peer| peer.is_at(address));
        let Some(caller) = callers.enter(address, is_named, Instant::now()) else {
            debug!(%remote, "refused a peer that would negotiate: too many handshakes are in progress");
            continue;
        };
        let context = context.clone();
        let acceptor = acceptor.clone();
        let conversations = conversations.clone();
        tasks.spawn(async move {
            let proved = tokio::select! {
                proved = prove(&context, acceptor, stream) => proved,
                () = caller.made_way() => {
                    context.host.strangers.fetch_add(1, Relaxed);
                    None
                }
            };
            let Some((stream, peer)) = proved else { return };
            caller.has_shown(&peer);
            let Ok(_place) = conversations.try_acquire() else { return };
            converse(&context, stream, &peer, remote).await;
        });
    }
}

/// Does the TLS handshake, and returns the name of the peer. A host without a known key is disconnected without a
/// message.
async fn prove(
    context: &AgreementContext,
    acceptor: TlsAcceptor,
    stream: TcpStream,
) -> Option<(TlsStream<TcpStream>, String)> {
    // Each message waits for its answer, so small segments must not be delayed.
    let _ = stream.set_nodelay(true);
    let stream = match timeout(PATIENCE, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        failed => {
            if let Ok(Err(error)) = failed {
                debug!(
                    "a connection was refused, since the host's key is not in the settings or its handshake failed: {error}"
                );
            }
            context.host.strangers.fetch_add(1, Relaxed);
            return None;
        }
    };
    let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
    let peer = context.tls.name(certificates)?;
    Some((stream, peer))
}

async fn converse(context: &AgreementContext, stream: TlsStream<TcpStream>, peer: &str, remote: SocketAddr) {
    let Ok(local) = stream.get_ref().0.local_addr() else { return };
    let token = paths::token(stream.get_ref().1);
    // Probes of the network path that contain this token are answered as long as the negotiation's connection lasts.
    let _answered = token.zip(context.reflector.as_ref()).map(|(token, reflector)| reflector.know(token));
    let ends = NegotiationEnds { peer: peer.to_owned(), local, remote, calls: false };
    let mut talk = AgreementTalk { context, wire: AgreementWire(stream), ends, session: None, revision: 0 };
    let Err(ConversationEnd(state)) = go_on(&mut talk).await;
    context.host.link.tell(&LinkRequest::End { peer: peer.to_owned(), session: talk.session, state });
}

async fn go_on(
    talk: &mut AgreementTalk<'_, TlsStream<TcpStream>>,
) -> Result<std::convert::Infallible, ConversationEnd> {
    let context = talk.context;
    // A reload of the settings may have removed the peer since the TLS handshake began.
    if context.host.agreement().is_none_or(|it| it.peer(&talk.ends.peer).is_none()) {
        return Err(talk
            .refuse(AgreementRefusal::new(RefusalReason::NotAllowed, "the settings have changed"))
            .await);
    }
    let mut changes = context.host.changes();
    let mut patience = PATIENCE;
    loop {
        let message = tokio::select! {
            message = talk.wire.receive(patience) => message?,
            _ = changed(&mut changes, talk.revision) => {
                return Err(ConversationEnd(NegotiationState::Ended("this host's settings have changed".to_owned())));
            }
        };
        let AgreementMessage::Offer(theirs) = message else { return Err(unexpected(&message, "offer")) };
        talk.answer(&theirs).await?;
        // The peer's offer contains its period of validity, and the peer has to send another offer within that time.
        patience = Duration::from_secs(u64::from(theirs.hold_s.clamp(1, 3 * 3600)));
    }
}

/// Waits until the revision of this host's settings differs from `spoken`, the revision on which this host's latest
/// message to the peer was based.
async fn changed(changes: &mut tokio::sync::watch::Receiver<u64>, spoken: u64) {
    loop {
        // `spoken` is 0 before this host has sent its first message about the settings.
        if spoken != 0 && *changes.borrow_and_update() != spoken || changes.changed().await.is_err() {
            return std::future::ready(()).await;
        }
    }
}
