//! Accepts the TCP, MPTCP and SCTP connections that peers make for their pools, which carry tunnelled connections. A
//! host that has not shown a known key leaves no state but its address, and the number of concurrent handshakes is
//! bounded.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use millrace_graft::settings;
use millrace_graft_tls::{Tls, callers::Callers};
use parking_lot::RwLock;
use rustls::pki_types::CertificateDer;
use tokio::net::{TcpListener, TcpStream};
use tracing::{debug, warn};

use super::{
    carrier::CarrierPeer,
    context::CarryContext,
    host,
    refused::{self, CallerLimitReached},
    socket::{CarrierSocket, halves},
    stream::{CarrierStream, Home},
    tcp,
};

/// Time limit for an answer of the host that made the connection. Only that host has measured the round-trip time, so
/// this limit is long: it only has to detect dead connections.
const ASKED: Duration = Duration::from_secs(5);

/// Accepts connections for as long as the tunnel broker runs.
pub async fn listen(
    context: Arc<CarryContext>,
    listener: TcpListener,
    tls: Arc<RwLock<Tls>>,
    limits: settings::PoolSettings,
) {
    let callers = Callers::default();
    let limits = Arc::new(limits);
    loop {
        let (stream, remote) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!("a peer's carrier cannot be accepted: {error}");
                // Accepting a connection fails mostly because this process has no free file descriptors, so the loop
                // waits a moment.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let remote = remote.ip().to_canonical();
        let Some(caller) = callers.enter(remote, context.carriers.are_at(remote), Instant::now()) else {
            context.table.count(refused::CROWDED);
            debug!(%remote, "refused a peer's carrier: too many handshakes are in progress");
            continue;
        };
        let context = context.clone();
        let tls = tls.clone();
        let limits = limits.clone();
        tokio::spawn(async move {
            let taken = tokio::select! {
                taken = take(&context, stream, &tls, &limits) => taken,
                () = caller.made_way() => Err(refused::CallerDisplaced.into()),
            };
            match taken {
                Ok(peer) => caller.has_shown(&peer),
                Err(error) => {
                    context.table.count(refused::name(&error));
                    debug!(%remote, "refused a peer's carrier: {error:#}");
                }
            }
        });
    }
}

/// Adds a connection to the peer's pool, and returns the peer's name.
async fn take(
    context: &Arc<CarryContext>,
    stream: TcpStream,
    tls: &RwLock<Tls>,
    limits: &settings::PoolSettings,
) -> anyhow::Result<String> {
    let remote = stream.peer_addr()?.ip().to_canonical();
    let local = Some(stream.local_addr()?.ip().to_canonical());
    let config = tcp::server_config(tls.read().server()?);
    let admit = |shown: &[CertificateDer<'_>]| {
        let peer = tls.read().name(shown).context("the caller's key is not in the settings")?;
        let crowd = context.carriers.served(&peer).context("the settings do not name the peer any more")?;
        match crowd.count() >= limits.most {
            true => Err(CallerLimitReached { peer, most: limits.most }.into()),
            false => Ok((peer, crowd)),
        }
    };
    let (met, (peer, crowd)) = tcp::answer(stream, config, limits, context.run, admit).await?;
    let socket = CarrierSocket::new(met.stream, &crowd);
    let halves = halves(&socket, &met.secrets).context("the cipher of the handshake is not supported")?;
    let caller = Arc::new(CarrierPeer { name: peer.clone(), run: met.run, remote, local });
    context.carriers.have_come_to(&caller);
    let context = context.clone();
    // A pool connection that no tunnelled connection uses waits for its next use in a task of its own.
    let home: Home = Arc::new(move |stream| {
        tokio::spawn(host::wait(context.clone(), caller.clone(), stream));
    });
    home(CarrierStream::tls(halves.0, halves.1, home.clone(), met.asks.then_some(ASKED)));
    Ok(peer)
}
