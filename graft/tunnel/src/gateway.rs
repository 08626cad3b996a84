//! The gateway, which tunnels connections of the hosts behind this host. The kernel holds back their SYNs until this
//! broker admits, refuses or forwards each.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use millrace_graft::{
    settings::{self, AgreementPeer},
    status,
};
use millrace_graft_kernel::{
    covers, gateway as kernel,
    gateway::{Config, GatewayConnection, GatewayRun, GatewaySyn, VERDICTS},
    hook::RedirectRule,
};
use millrace_kernel::prefix::Prefix;
use parking_lot::Mutex;
use tokio::{net::TcpStream, sync::oneshot, time::timeout};
use tracing::{debug, warn};

use super::{
    kernel_events::KernelEvents,
    listeners::{BoundListeners, Listeners, canonical},
    syn::SynSender,
    warnings::warn_on_error,
    watchdog::TunnelWatchdog,
};

/// Time after the tunnel broker's latest sign of life from which on the kernel forwards all SYNs without asking the
/// broker.
const STAY: Duration = Duration::from_secs(10);
/// Limit of SYNs that the kernel holds back at the same time.
const WAITING_MAX: usize = 4096;
/// Time limit for the gateway's listener to accept the connection of an admitted SYN. The client may have given up
/// meanwhile.
const ADMISSION: Duration = Duration::from_secs(5);
/// Time for which the kernel forwards a flow that is not tunnelled. Its client repeats the SYN after 1, 3 and 7 s.
const FORWARDED: Duration = Duration::from_secs(60);

/// The gateway: its programs in the kernel, its routing, and the SYNs that are held back.
pub struct CarryGateway {
    /// The BPF programs in the kernel. They are dropped before the routing is removed.
    kernel: kernel::GatewayPrograms,
    /// The process that removes the routing if the daemon dies. `None` once the routing was removed.
    watchdog: Mutex<Option<TunnelWatchdog>>,
    settings: settings::GatewaySettings,
    listeners: Listeners,
    /// Raw sockets that send resets to clients whose connections are refused.
    wire: SynSender,
    /// Raw sockets that send held SYNs once more, with a packet mark that the BPF programs let pass.
    again: SynSender,
    /// SYNs that the kernel holds back. For an admitted SYN, the value is the channel on which a task waits for the
    /// accepted connection.
    waiting: Mutex<HashMap<GatewayConnection, Option<oneshot::Sender<TcpStream>>>>,
    /// Networks behind peers, as last written to the kernel, and whether connections to each of them are tunnelled.
    peers: Mutex<BTreeMap<Prefix, bool>>,
    trouble: Mutex<Option<String>>,
}

/// A SYN that is held back. Dropping this value removes it from the list of held SYNs.
pub struct HeldSyn<'a>(&'a CarryGateway, GatewayConnection);

impl Drop for HeldSyn<'_> {
    fn drop(&mut self) {
        self.0.waiting.lock().remove(&self.1);
    }
}

/// The gateway's programs in the kernel and its routing, before tasks use them.
pub struct GatewayInKernel {
    kernel: kernel::GatewayPrograms,
    asks: kernel::GatewaySyns,
    watchdog: TunnelWatchdog,
    listeners: BoundListeners,
    run: GatewayRun,
}

impl GatewayInKernel {
    /// Loads and attaches the programs, adds the routing, and starts the process that removes it.
    ///
    /// # Errors
    /// An interface does not exist, or the kernel rejects the programs or the routing.
    pub fn load(settings: &settings::GatewaySettings, run: u64) -> anyhow::Result<Self> {
        // A packet mark has only 16 bits for the random number that distinguishes this broker process from earlier
        // ones.
        let run = GatewayRun((run & 0xffff) as u16);
        let listeners = BoundListeners::transparent()?;
        let ports = listeners.ports()?;
        let (mut kernel, asks) = kernel::GatewayPrograms::load(&Config { run, v4: ports.v4, v6: ports.v6 })?;
        let watchdog = TunnelWatchdog::start(run, &settings.interfaces)?;
        settings.networks.iter().try_for_each(|network| kernel.add_inside(*network))?;
        kernel.stay(STAY)?;
        kernel.attach(&settings.interfaces, None)?;
        Ok(Self { kernel, asks, watchdog, listeners, run })
    }
}

impl CarryGateway {
    /// Makes the gateway available to tasks. Must be called inside of a tokio runtime.
    pub fn new(
        settings: &settings::GatewaySettings,
        in_kernel: GatewayInKernel,
    ) -> anyhow::Result<(Self, KernelEvents<GatewaySyn>)> {
        let GatewayInKernel { kernel, asks, watchdog, listeners, run } = in_kernel;
        let gateway = Self {
            kernel,
            watchdog: Mutex::new(Some(watchdog)),
            settings: settings.clone(),
            listeners: listeners.serve()?,
            wire: SynSender::new(None)?,
            again: SynSender::new(Some(run.mark_again()))?,
            waiting: Mutex::default(),
            peers: Mutex::default(),
            trouble: Mutex::default(),
        };
        Ok((gateway, KernelEvents::new(asks)?))
    }

    pub fn set_rules(&self, rules: &[RedirectRule]) -> anyhow::Result<()> {
        Ok(self.kernel.set_rules(rules)?)
    }

    /// Updates the list of peers in the kernel. `wanted` has all hosts and networks with a tunnel broker, and whether a
    /// carrier to each is ready.
    pub fn set_peers(&self, wanted: &BTreeMap<Prefix, bool>) {
        let mut told = self.peers.lock();
        told.retain(|network, _| {
            let stays = wanted.contains_key(network);
            if !stays {
                warn_on_error(
                    "a peer cannot be removed from the kernel's table",
                    self.kernel.forget_peer(*network),
                );
            }
            stays
        });
        for (network, warm) in wanted {
            if told.get(network) == Some(warm) {
                continue;
            }
            // If the kernel's list cannot be updated, the next call tries again.
            match self.kernel.set_peer(*network, *warm) {
                Ok(()) => drop(told.insert(*network, *warm)),
                failed => warn_on_error("a peer cannot be written to the kernel's table", failed),
            }
        }
    }

    /// Tells the kernel that this broker runs, and adds routing rules and routes again that others have removed. Called
    /// about once a second.
    pub fn tick(&self) {
        let done = self.kernel.stay(STAY).and_then(|()| self.kernel.mend());
        let trouble = done.err().map(|error| format!("gateway: {error}"));
        let mut before = self.trouble.lock();
        if let Some(trouble) = trouble.as_ref().filter(|_| before.is_none()) {
            warn!("{trouble}");
        }
        *before = trouble;
    }

    /// Detaches the programs and removes the routing.
    pub fn detach(&self) {
        self.kernel.detach();
        // When its pipe closes, the watchdog process removes the routing and ends.
        drop(self.watchdog.lock().take());
    }

    pub fn trouble(&self) -> Option<String> {
        self.trouble.lock().clone()
    }

    pub fn status(&self) -> status::GatewayStatus {
        let counts = self.kernel.verdicts().unwrap_or_default();
        status::GatewayStatus {
            interfaces: self.settings.interfaces.clone(),
            networks: self.settings.networks.iter().map(ToString::to_string).collect(),
            waiting: self.waiting.lock().len() as u64,
            verdicts: VERDICTS.into_iter().map(str::to_owned).zip(counts).collect(),
            trouble: self.trouble(),
        }
    }

    pub fn has_behind(&self, address: IpAddr) -> bool {
        self.settings.networks.iter().any(|network| covers(*network, address))
    }

    /// Adds a SYN to the list of SYNs that the kernel holds back. Returns `None` if it is in the list already. If too
    /// many SYNs are held, it is forwarded, and the result is also `None`.
    pub fn wait(&self, flow: GatewayConnection) -> Option<HeldSyn<'_>> {
        let mut waiting = self.waiting.lock();
        if waiting.contains_key(&flow) {
            return None;
        }
        if waiting.len() >= WAITING_MAX {
            drop(waiting);
            self.forward(flow);
            return None;
        }
        waiting.insert(flow, None);
        Some(HeldSyn(self, flow))
    }

    /// Ends the socket of an earlier connection between the same addresses and ports, which may be in TIME-WAIT.
    pub fn end_old(&self, flow: GatewayConnection) {
        if let Err(error) = self.kernel.end_old(flow) {
            debug!(client = %flow.client, "the client's earlier connection could not be closed: {error}");
        }
    }

    /// Admits the SYN, and waits for its connection. Returns `None` if the client does not connect in time.
    pub async fn admit(&self, ask: &GatewaySyn) -> Option<TcpStream> {
        let (sender, receiver) = oneshot::channel();
        self.waiting.lock().insert(ask.flow, Some(sender));
        let GatewayConnection { client, server } = ask.flow;
        match self.kernel.let_in(ask.flow) {
            Ok(true) => {}
            // The kernel has forwarded the SYN in the meantime, so the connection is not tunnelled.
            Ok(false) => return None,
            Err(error) => {
                warn!(%client, "the kernel cannot pass a client's held SYN to the gateway's listener: {error}");
                self.forget(ask.flow);
                return None;
            }
        }
        // The kernel has dropped the held packet, so its copy is sent to the listener.
        if let Err(error) = self.again.send(client, server, &ask.syn) {
            // If the copy cannot be sent, the client repeats its SYN a second later.
            debug!(%client, "a client's held SYN could not be sent on to the gateway's listener: {error}");
        }
        let local = timeout(ADMISSION, receiver).await.ok().and_then(Result::ok);
        self.forget(ask.flow);
        local
    }

    /// Returns the next connection whose SYN was admitted, and the channel of the task that waits for the connection,
    /// if one does.
    pub async fn next(&self) -> (TcpStream, SocketAddr, Option<oneshot::Sender<TcpStream>>) {
        let (local, client) = self.listeners.next().await;
        let server = local.local_addr().map(canonical);
        let flow = server.ok().map(|server| GatewayConnection { client, server });
        let mut waiting = self.waiting.lock();
        let waits = flow.and_then(|flow| waiting.get_mut(&flow)).and_then(Option::take);
        drop(waiting);
        (local, client, waits)
    }

    /// Refuses the connection with a reset, as the server would refuse it.
    pub fn refuse(&self, ask: &GatewaySyn) {
        let GatewayConnection { client, server } = ask.flow;
        if let Err(error) = self.wire.refuse(server, client, &ask.syn) {
            warn!(%client, "a refusal (TCP reset) cannot be sent to a client: {error}");
        }
        self.forget(ask.flow);
    }

    pub fn forget(&self, flow: GatewayConnection) {
        warn_on_error("a held SYN cannot be removed from the kernel's table", self.kernel.forget(flow));
    }

    /// Makes the kernel forward the SYNs of this connection for the time [`FORWARDED`], instead of holding them back.
    pub fn forward(&self, flow: GatewayConnection) {
        warn_on_error("a held SYN cannot be forwarded", self.kernel.forward(flow, FORWARDED));
    }

    /// Makes the kernel leave connections to this server alone for some time, so that they are plain TCP.
    pub fn avoid(&self, server: SocketAddr, time: Duration) {
        warn_on_error("a server cannot be excluded from tunnelling", self.kernel.avoid(server, time));
    }
}

/// Returns the hosts and networks to which connections can be tunnelled through this peer's tunnel broker.
pub fn networks_of(peer: &AgreementPeer) -> impl Iterator<Item = Prefix> {
    peer.all_addresses().map(Prefix::from).chain(peer.networks.iter().copied())
}
