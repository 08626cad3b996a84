//! Connections of pools that peers make. Nothing is kept of who has not shown a known key, but from where it calls, and handshakes are few at once.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use millrace_graft::settings;
use parking_lot::RwLock;
use rustls::pki_types::CertificateDer;
use tokio::net::{TcpListener, TcpStream};
use tracing::{debug, warn};

use super::{
    carrier::Far,
    context::Context,
    host,
    let_go::{self, Full},
    socket::{Socket, halves},
    stream::{Home, Stream},
    tcp,
};
use crate::{callers::Callers, tls::Tls};

/// For an answer of who has called: that one knows how long it takes, and this end does not, and need only end what is no connection any more.
const ASKED: Duration = Duration::from_secs(5);

/// For as long as the broker runs.
pub async fn listen(
    context: Arc<Context>,
    listener: TcpListener,
    tls: Arc<RwLock<Tls>>,
    limits: settings::Pool,
) {
    let (callers, limits) = (Callers::default(), Arc::new(limits));
    loop {
        let (stream, remote) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!("a carrier cannot be taken: {error}");
                // Mostly for want of descriptors.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let remote = remote.ip().to_canonical();
        let Some(caller) = callers.enter(remote, context.carriers.are_at(remote), Instant::now()) else {
            context.table.count(let_go::CROWDED);
            debug!(%remote, "a caller was let go: too many handshakes are under way");
            continue;
        };
        let (context, tls, limits) = (context.clone(), tls.clone(), limits.clone());
        tokio::spawn(async move {
            let taken = tokio::select! {
                taken = take(&context, stream, &tls, &limits) => taken,
                () = caller.made_way() => Err(let_go::Crowded.into()),
            };
            match taken {
                Ok(peer) => caller.has_shown(&peer),
                Err(error) => {
                    context.table.count(let_go::name(&error));
                    debug!(%remote, "a caller was let go: {error:#}");
                }
            }
        });
    }
}

/// Returns whose it is.
async fn take(
    context: &Arc<Context>,
    stream: TcpStream,
    tls: &RwLock<Tls>,
    limits: &settings::Pool,
) -> anyhow::Result<String> {
    let remote = stream.peer_addr()?.ip().to_canonical();
    let local = Some(stream.local_addr()?.ip().to_canonical());
    let config = tcp::server_config(tls.read().server()?);
    let admit = |shown: &[CertificateDer<'_>]| {
        let peer = tls.read().name(shown).context("no key that is known")?;
        let crowd = context.carriers.served(&peer).context("no peer any more")?;
        match crowd.count() >= limits.most {
            true => Err(Full { peer, most: limits.most }.into()),
            false => Ok((peer, crowd)),
        }
    };
    let (met, (peer, crowd)) = tcp::answer(stream, config, limits, context.run, admit).await?;
    let socket = Socket::new(met.stream, &crowd);
    let halves = halves(&socket, &met.secrets).context("no cipher that is known here")?;
    let far = Arc::new(Far { peer: peer.clone(), run: met.run, remote, local });
    context.carriers.have_come_to(&far);
    let context = context.clone();
    let home: Home = Arc::new(move |stream| {
        tokio::spawn(host::wait(context.clone(), far.clone(), stream));
    });
    home(Stream::tls(halves, home.clone(), met.asks.then_some(ASKED)));
    Ok(peer)
}
