//! The end that is called. Nothing is kept of who has not shown a known key, and handshakes are few at once.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_graft::agreements::State;
use millrace_graft_proto::message::{Message, Reason, Refusal};
use rustls::ServerConfig;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tracing::{debug, warn};

use super::{
    Context, paths,
    talk::{End, Talk, unexpected},
    wire::{Broken, PATIENCE, Wire},
};
use crate::callers::Callers;

/// Conversations at once: the settings have at most as many peers, and one that was started anew has two for a moment.
const CONVERSATIONS_MAX: usize = 512;

pub async fn listen(context: Arc<Context>, listener: TcpListener, config: Arc<ServerConfig>) {
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
                warn!("a peer cannot be heard: {error}");
                // Mostly for want of descriptors.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let address = remote.ip().to_canonical();
        let is_named = context.agreement.peers.iter().any(|peer| peer.is_at(address));
        let Some(caller) = callers.enter(address, is_named, Instant::now()) else {
            debug!(%remote, "a caller was let go: too many handshakes are under way");
            continue;
        };
        let (context, acceptor, conversations) = (context.clone(), acceptor.clone(), conversations.clone());
        tasks.spawn(async move {
            let proved = tokio::select! {
                proved = prove(&context, acceptor, stream) => proved,
                () = caller.made_way() => {
                    context.daemon.with(|runtime| runtime.count_stranger());
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

/// Who it is. Whoever it is not gets nothing but the end of the connection.
async fn prove(
    context: &Context,
    acceptor: TlsAcceptor,
    stream: TcpStream,
) -> Option<(TlsStream<TcpStream>, String)> {
    let _ = stream.set_nodelay(true);
    let stream = match timeout(PATIENCE, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            debug!("a stranger was let go: {error}");
            context.daemon.with(|runtime| runtime.count_stranger());
            return None;
        }
        Err(_) => {
            context.daemon.with(|runtime| runtime.count_stranger());
            return None;
        }
    };
    let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
    let peer = context.tls.name(certificates)?;
    Some((stream, peer))
}

async fn converse(context: &Context, stream: TlsStream<TcpStream>, peer: &str, remote: SocketAddr) {
    let Ok(local) = stream.get_ref().0.local_addr() else { return };
    let token = paths::token(stream.get_ref().1);
    let _answered = token.zip(context.reflector.as_ref()).map(|(token, reflector)| reflector.know(token));
    let wire = Wire(stream);
    let mut talk = Talk { context, peer, wire, local, remote, session: None, calls: false, revision: 0 };
    let Err(End(state)) = go_on(&mut talk).await;
    let session = talk.session;
    if let Err(error) = context.daemon.with(|runtime| runtime.ended(peer, session, state)) {
        warn!(peer, "it stays bound until its time is over: {error}");
    }
}

async fn go_on(talk: &mut Talk<'_, TlsStream<TcpStream>>) -> Result<std::convert::Infallible, End> {
    let context = talk.context;
    if context.daemon.with(|runtime| runtime.agreement().and_then(|it| it.peer(talk.peer)).is_none()) {
        return Err(talk.refuse(Refusal::new(Reason::NotAllowed, "the settings have changed")).await);
    }
    let mut changes = context.daemon.changes();
    let mut patience = PATIENCE;
    loop {
        let message = tokio::select! {
            message = talk.wire.receive(patience) => message.map_err(silent)?,
            _ = changed(&mut changes, talk.revision) => {
                return Err(End(State::Ended("this host's settings have changed".to_owned())));
            }
        };
        let Message::Offer(theirs) = message else { return Err(unexpected(&message, "offer")) };
        talk.answer(&theirs).await?;
        patience = Duration::from_secs(u64::from(theirs.hold_s.clamp(1, 3 * 3600)));
    }
}

fn silent(broken: Broken) -> End {
    match broken {
        Broken::TimedOut(time) => End(State::TimedOut(format!("nothing was heard of it for {time:?}"))),
        other => other.into(),
    }
}

/// Until the settings are others than those that this end spoke of.
async fn changed(changes: &mut tokio::sync::watch::Receiver<u64>, spoken: u64) {
    loop {
        if spoken != 0 && *changes.borrow_and_update() != spoken || changes.changed().await.is_err() {
            return std::future::ready(()).await;
        }
    }
}
