//! Pools that this host keeps: as many connections as the settings want, for as long as they name the peer.

use std::{net::SocketAddr, os::fd::AsFd as _, sync::Arc, time::Duration};

use anyhow::bail;
use millrace_graft::settings::{self, Peer};
use rustls::ClientConfig;
use tokio::{task::JoinSet, time::Instant};
use tracing::debug;

use super::{
    carrier::{Carrier, Far, Link, Way},
    context::Context,
    pool::Pool,
    socket::{Socket, halves},
    stream::{Home, Stream, patience},
    tcp::{self, Met},
    warm,
};

const PAUSE_LEAST: Duration = Duration::from_millis(200);
const PAUSE_MOST: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(500);
/// Handshakes at once.
const CALLS_MAX: usize = 16;

/// Whom and how.
pub struct Keeper {
    pub context: Arc<Context>,
    pub peer: Peer,
    pub way: Way,
    pub at: SocketAddr,
    pub config: ClientConfig,
    pub limits: settings::Pool,
}

/// Until the settings do not name the peer any more.
pub async fn keep(keeper: Keeper) {
    let (keeper, mut pause) = (Arc::new(keeper), PAUSE_LEAST);
    loop {
        match keeper.begin().await {
            Ok(Some((carrier, pool))) => {
                let why = keeper.clone().hold(&carrier.far, &pool).await;
                pool.close();
                keeper.context.carriers.remove(&carrier, why.to_owned());
                // Else the other end has let it go as soon as it knew whose it was: it has as many as it may.
                if carrier.heard() > 0 {
                    pause = PAUSE_LEAST;
                    continue;
                }
            }
            Ok(None) => return,
            Err(error) => {
                keeper.context.carriers.lacks(&keeper.peer.name, &keeper.way, format!("{error:#}"));
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MOST);
    }
}

impl Keeper {
    async fn call(&self) -> anyhow::Result<Met> {
        // The hook does not lead what is exempt: this connection is no application's.
        let exempt = |socket: &_| drop(self.context.hooks.exempt(tokio::net::TcpSocket::as_fd(socket)));
        tcp::call((self.way.kind, self.at), self.config.clone(), &self.limits, self.context.run, exempt).await
    }

    /// Its first connection is used at once. `None`: the settings do not name the peer any more.
    async fn begin(&self) -> anyhow::Result<Option<(Arc<Carrier>, Arc<Pool>)>> {
        let met = self.call().await?;
        let (peer, remote) = (self.peer.name.clone(), self.at.ip().to_canonical());
        let local = met.stream.local_addr().ok().map(|at| at.ip().to_canonical());
        let far = Arc::new(Far { peer, run: met.run, remote, local });
        let pool = Arc::new(Pool::new(self.limits.clone(), met.rtt));
        pool.put(stream(&pool, met)?);
        let carrier = Carrier::new(far, self.way.clone(), Link::Pool(pool.clone()));
        Ok(self.context.carriers.add(carrier).map(|carrier| (carrier, pool)))
    }

    /// Until it has ended. Returns why.
    async fn hold(self: Arc<Self>, far: &Far, pool: &Arc<Pool>) -> &'static str {
        let (mut calls, mut not_before) = (JoinSet::new(), Instant::now());
        loop {
            pool.sweep();
            if pool.is_closed() {
                return "it was closed";
            }
            if pool.count() == 0 {
                return "its connections have ended";
            }
            while Instant::now() >= not_before && calls.len() < CALLS_MAX && pool.lacks(calls.len()) > 0 {
                calls.spawn(self.clone().one_more(pool.clone(), far.run));
            }
            let idle = pool.an_idle_one();
            tokio::select! {
                () = pool.lacking.notified() => {}
                () = stirs(idle) => {}
                () = tokio::time::sleep(LOOK) => {}
                Some(done) = calls.join_next() => match done {
                    Ok(Ok(true)) => {}
                    Ok(Ok(false)) => return "the peer's broker was started anew",
                    Ok(Err(error)) => {
                        debug!(peer = self.peer.name, "one connection less: {error:#}");
                        not_before = Instant::now() + LOOK;
                    }
                    Err(_) => {}
                },
            }
        }
    }

    /// Returns whether it belongs with the others.
    async fn one_more(self: Arc<Self>, pool: Arc<Pool>, run: u64) -> anyhow::Result<bool> {
        let met = self.call().await?;
        if met.run != run {
            return Ok(false);
        }
        pool.note_rtt(met.rtt);
        let mut stream = stream(&pool, met)?;
        // Others' windows are opened by what they carry.
        if pool.is_small() {
            warm::exchange(&mut stream, self.context.warm).await?;
        }
        pool.put(stream);
        Ok(true)
    }
}

fn stream(pool: &Arc<Pool>, met: Met) -> anyhow::Result<Stream> {
    let asked = met.asks.then(|| patience(met.rtt));
    let socket = Socket::new(met.stream, &pool.crowd);
    let Some(halves) = halves(&socket, &met.secrets) else { bail!("no cipher that is known here") };
    let home = Arc::downgrade(pool);
    let home: Home = Arc::new(move |stream| {
        if let Some(pool) = home.upgrade() {
            pool.put(stream);
        }
    });
    Ok(Stream::tls(halves, home, asked))
}

async fn stirs(idle: Option<Arc<Socket>>) {
    match idle {
        Some(socket) => socket.stirs().await,
        None => std::future::pending().await,
    }
}
