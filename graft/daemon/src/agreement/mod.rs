//! Agreements with the peers in the settings, on the grafts that both hosts use. They are negotiated on TLS connections
//! with certificates of both hosts. This module has the connecting end, the listening end and their negotiation.
//! `millrace-graft-proto` has the messages and the rules for accepting them, and `millrace-graft` applies the result.

mod answer;
mod call;
mod host;
mod paths;
mod talk;
mod wire;

use std::{net::SocketAddr, sync::Arc};

use anyhow::Context as _;
use millrace_graft::settings::AgreementSettings;
use millrace_graft_tls::Tls;
use tokio::{net::TcpListener, task::JoinSet};

pub use self::host::AgreementHost;
use self::paths::Reflector;

/// The tasks that connect to peers and accept connections of peers. They end when this value is dropped.
pub struct AgreementTasks {
    tasks: JoinSet<()>,
    pub listens: Option<SocketAddr>,
}

/// State that all negotiations of agreements with peers share.
struct AgreementContext {
    host: Arc<AgreementHost>,
    agreement: AgreementSettings,
    tls: Tls,
    /// Answers peers' probes of the network path. `None` if this host does not listen for peers.
    reflector: Option<Reflector>,
}

impl AgreementTasks {
    /// Starts the tasks. The kernel must have the settings' rules before, so that these rules also apply to the
    /// connections of agreements.
    ///
    /// # Errors
    /// A key or a certificate is not usable, or this host cannot listen on a port.
    pub async fn start(host: Arc<AgreementHost>, agreement: AgreementSettings) -> anyhow::Result<Self> {
        let tls = Tls::new(&agreement)?;
        let server = Arc::new(tls.server()?);
        let mut listener = None;
        if let Some(at) = agreement.listen {
            let bound = TcpListener::bind(at).await;
            listener = Some(bound.with_context(|| format!("cannot listen for peers on {at}"))?);
        }
        let reflector = agreement.listen.map(Reflector::bind).transpose()?;
        let mut tasks = JoinSet::new();
        if let Some(reflector) = &reflector {
            reflector.serve(&mut tasks)?;
        }
        let peers = agreement.peers.clone();
        let context = Arc::new(AgreementContext { host, agreement, tls, reflector });
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

    /// Ends all tasks of agreements. Their ports are free when this returns.
    pub async fn end(&mut self) {
        self.tasks.shutdown().await;
    }
}
