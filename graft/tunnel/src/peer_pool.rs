//! Maintains this host's pools of connections to a peer. Each pool has as many connections as the settings want, for as
//! long as the settings name the peer.

use std::{net::SocketAddr, os::fd::AsFd as _, sync::Arc, time::Duration};

use anyhow::bail;
use millrace_graft::settings::{self, AgreementPeer};
use rustls::ClientConfig;
use tokio::{task::JoinSet, time::Instant};
use tracing::debug;

use super::{
    carrier::{CarrierLink, CarrierPeer, CarrierRoute, PeerCarrier},
    context::CarryContext,
    pool::ConnectionPool,
    socket::{CarrierSocket, halves},
    stream::{CarrierStream, Home, patience},
    tcp::{self, AuthenticatedConnection},
    warm,
};

/// Pause before the next attempt to make a pool, after the pool's first connection has failed. The pause doubles up to
/// `PAUSE_MOST`.
const PAUSE_LEAST: Duration = Duration::from_millis(200);
const PAUSE_MOST: Duration = Duration::from_secs(10);
/// Interval at which a pool is checked for missing connections, and pause after a failed connection.
const LOOK: Duration = Duration::from_millis(500);
/// Limit of concurrent TLS handshakes for a pool.
const CALLS_MAX: usize = 16;

/// The peer of a pool, the address and credentials to connect with, and the limits of the pool.
pub struct PeerPoolTask {
    pub context: Arc<CarryContext>,
    pub peer: AgreementPeer,
    pub way: CarrierRoute,
    pub at: SocketAddr,
    pub config: ClientConfig,
    pub limits: settings::PoolSettings,
}

/// Maintains a full pool to the peer, until the settings do not name the peer any more.
pub async fn keep(task: PeerPoolTask) {
    let task = Arc::new(task);
    let mut pause = PAUSE_LEAST;
    loop {
        match task.begin().await {
            Ok(Some((carrier, pool))) => {
                let why = task.clone().hold(&carrier.peer, &pool).await;
                pool.close();
                task.context.carriers.remove(&carrier, why.to_owned());
                // If nothing was received, the peer has closed the connection after the handshake because its limit of
                // connections from this host is reached. A pause follows in that case.
                if carrier.last_arrival() > 0 {
                    pause = PAUSE_LEAST;
                    continue;
                }
            }
            Ok(None) => return,
            Err(error) => {
                task.context.carriers.lacks(&task.peer.name, &task.way, format!("{error:#}"));
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MOST);
    }
}

impl PeerPoolTask {
    async fn call(&self) -> anyhow::Result<AuthenticatedConnection> {
        // This connection is the tunnel broker's own, so the hooks must not redirect it.
        let exempt = |socket: &_| drop(self.context.hooks.exempt(tokio::net::TcpSocket::as_fd(socket)));
        tcp::call(self.way.kind, self.at, self.config.clone(), &self.limits, self.context.run, exempt).await
    }

    /// Makes the first connection of the pool, and a carrier that can be used at once. Returns `None` if the settings
    /// do not name the peer any more.
    async fn begin(&self) -> anyhow::Result<Option<(Arc<PeerCarrier>, Arc<ConnectionPool>)>> {
        let met = self.call().await?;
        let name = self.peer.name.clone();
        let remote = self.at.ip().to_canonical();
        let local = met.stream.local_addr().ok().map(|at| at.ip().to_canonical());
        let peer = Arc::new(CarrierPeer { name, run: met.run, remote, local });
        let pool = Arc::new(ConnectionPool::new(self.limits.clone(), met.rtt));
        pool.put(stream(&pool, met)?);
        let carrier = PeerCarrier::new(peer, self.way.clone(), CarrierLink::Pool(pool.clone()));
        Ok(self.context.carriers.add(carrier).map(|carrier| (carrier, pool)))
    }

    /// Maintains enough connections in the pool until the pool has ended, and returns the reason for its end.
    async fn hold(self: Arc<Self>, peer: &CarrierPeer, pool: &Arc<ConnectionPool>) -> &'static str {
        let mut calls = JoinSet::new();
        let mut not_before = Instant::now();
        loop {
            pool.sweep();
            if pool.is_closed() {
                return "the pool was closed";
            }
            if pool.count() == 0 {
                return "all connections of the pool have ended";
            }
            while Instant::now() >= not_before && calls.len() < CALLS_MAX && pool.lacks(calls.len()) > 0 {
                calls.spawn(self.clone().one_more(pool.clone(), peer.run));
            }
            let idle = pool.an_idle_one();
            tokio::select! {
                () = pool.lacking.notified() => {}
                () = stirs(idle) => {}
                () = tokio::time::sleep(LOOK) => {}
                Some(done) = calls.join_next() => match done {
                    Ok(Ok(true)) => {}
                    Ok(Ok(false)) => return "the peer's broker was restarted",
                    Ok(Err(error)) => {
                        debug!(peer = self.peer.name, "a carrier could not be added to the pool: {error:#}");
                        not_before = Instant::now() + LOOK;
                    }
                    Err(_) => {}
                },
            }
        }
    }

    /// Adds one connection to the pool. Returns false if the peer's tunnel broker was restarted: the pool's other
    /// connections lead to a broker that no longer exists.
    async fn one_more(self: Arc<Self>, pool: Arc<ConnectionPool>, run: u64) -> anyhow::Result<bool> {
        let met = self.call().await?;
        if met.run != run {
            return Ok(false);
        }
        pool.note_rtt(met.rtt);
        let mut stream = stream(&pool, met)?;
        // Filler bytes open the congestion window of a new connection only while the pool has its minimum size. In a
        // larger pool, the tunnelled data itself opens the window.
        if pool.is_small() {
            warm::exchange(&mut stream, self.context.warm).await?;
        }
        pool.put(stream);
        Ok(true)
    }
}

fn stream(pool: &Arc<ConnectionPool>, met: AuthenticatedConnection) -> anyhow::Result<CarrierStream> {
    let asked = met.asks.then(|| patience(met.rtt));
    let socket = CarrierSocket::new(met.stream, &pool.crowd);
    let Some(halves) = halves(&socket, &met.secrets) else {
        bail!("the cipher of the handshake is not supported")
    };
    // A stream must not own the pool that takes its connection back, so the stream has a weak reference to the pool.
    let home = Arc::downgrade(pool);
    let home: Home = Arc::new(move |stream| {
        if let Some(pool) = home.upgrade() {
            pool.put(stream);
        }
    });
    Ok(CarrierStream::tls(halves.0, halves.1, home, asked))
}

async fn stirs(idle: Option<Arc<CarrierSocket>>) {
    match idle {
        Some(socket) => socket.stirs().await,
        None => std::future::pending().await,
    }
}
