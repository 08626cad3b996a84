//! Agreements with the peers of the settings, on connections that mutual TLS has proved: who calls, who is called, and what
//! both say. The messages and how they are judged are in `millrace-graft-proto`, what is done with them in `millrace-graft`.

mod answer;
mod call;
mod paths;
mod talk;
mod wire;

use std::{net::SocketAddr, sync::Arc};

use anyhow::Context as _;
use millrace_graft::settings::Agreement;
use tokio::{net::TcpListener, task::JoinSet};

use self::paths::Reflector;
use super::{daemon::Daemon, tls::Tls};

/// Calls and is called until it is dropped.
pub struct Agreements {
    tasks: JoinSet<()>,
    pub listens: Option<SocketAddr>,
}

/// What all conversations need.
struct Context {
    daemon: Arc<Daemon>,
    agreement: Agreement,
    tls: Tls,
    /// Of who is called: answers to probes.
    reflector: Option<Reflector>,
}

impl Agreements {
    /// Begins to listen after the rules hold, so that its connections are seen by them as others are.
    ///
    /// # Errors
    /// A key or a certificate is not usable, or there is no listening there.
    pub async fn start(daemon: Arc<Daemon>, agreement: Agreement) -> anyhow::Result<Self> {
        let tls = Tls::new(&agreement)?;
        let server = Arc::new(tls.server()?);
        let listener = match agreement.listen {
            Some(at) => {
                let listener = TcpListener::bind(at).await;
                Some(listener.with_context(|| format!("cannot listen for peers on {at}"))?)
            }
            None => None,
        };
        let reflector = agreement.listen.map(Reflector::bind).transpose()?;
        let mut tasks = JoinSet::new();
        if let Some(reflector) = &reflector {
            reflector.serve(&mut tasks)?;
        }
        let peers = agreement.peers.clone();
        let context = Arc::new(Context { daemon, agreement, tls, reflector });
        for peer in peers {
            let Some(address) = peer.address else { continue };
            let config = Arc::new(context.tls.client(&peer)?);
            tasks.spawn(call::call(context.clone(), peer, address, config));
        }
        let listens = listener.as_ref().map(TcpListener::local_addr).transpose()?;
        if let Some(listener) = listener {
            tasks.spawn(answer::listen(context, listener, server));
        }
        Ok(Self { tasks, listens })
    }

    /// When this returns, its ports are free.
    pub async fn end(&mut self) {
        self.tasks.shutdown().await;
    }
}
