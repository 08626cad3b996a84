//! The tunnel broker, which tunnels applications' TCP connections. The kernel redirects chosen connections to it
//! ([`hooks`]). It accepts them ([`redirected`], or [`strict`] where the application has to wait for the server), and
//! forwards each on a stream of a carrier to the peer's broker ([`carriers`]). That broker connects to the server
//! ([`host`]), if the [`firewall`] of both hosts accepts the connection's first packets ([`openings`]). Connections of
//! hosts behind this one are handled by [`gatewayed`]. [`pump`] moves the bytes at both ends. The format of a stream is
//! in `millrace-graft-proto`.
//!
//! A [`carrier`] is a QUIC connection ([`dial`]), or a [`pool`] of TCP connections: the connecting end maintains it
//! ([`peer_pool`]), and the listening end accepts its connections ([`accept`]). [`tcp`] is their handshake, [`record`]
//! and [`socket`] move their bytes, and [`stream`] is the part of either kind that carries one connection.
//!
//! [`meter`] counts the bytes of a connection. [`purposes`] predicts from these counts how the next connection will be
//! used.
#![deny(missing_docs)]

mod accept;
mod carrier;
mod carrier_error;
mod carriers;
mod context;
mod dial;
mod firewall;
mod gateway;
mod gatewayed;
mod hooks;
mod host;
mod kernel_events;
mod listeners;
mod meter;
pub mod metrics;
mod openings;
mod owner;
mod peer_pool;
mod pool;
mod ports;
mod probe;
mod pump;
mod purposes;
mod record;
mod redirected;
mod refused;
mod silence;
mod socket;
mod stream;
mod strict;
mod syn;
mod table;
mod tcp;
pub mod text;
mod warm;
mod warnings;
mod watch;
pub mod watchdog;

use std::{
    collections::BTreeMap, net::IpAddr, ops::RangeInclusive, path::Path, sync::Arc,
    sync::atomic::Ordering::Relaxed,
};

use anyhow::{Context as _, bail};
use millrace_daemon::cgroup::own_cgroup;
use millrace_graft::{
    CarriedFlow, Settings, SideSetting,
    settings::{AgreementPeer, AgreementSettings, CarrierKind, CarrySettings},
    status,
};
use millrace_graft_kernel::{
    SelectionMaps,
    hook::{Config, HOOK_RULES, RedirectRule},
};
use millrace_graft_tls::Tls;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use parking_lot::{Mutex, RwLock};
use quinn::Endpoint;
use tokio::task::{AbortHandle, JoinSet};
use tracing::{info, warn};

pub use self::hooks::is_populated;
use self::{
    carrier::CarrierRoute,
    carriers::Carriers,
    context::CarryContext,
    gateway::{CarryGateway, GatewayInKernel},
    hooks::Hooks,
    listeners::BoundListeners,
    openings::TunnelOpenings,
    peer_pool::PeerPoolTask,
    ports::PortRange,
    purposes::Purposes,
    strict::{Strict, StrictPrograms},
    table::TunnelTable,
    watch::TunnelWatch,
};

/// The tunnel broker's BPF programs, which are attached, with the sockets that they refer to. Loading them needs
/// capabilities that the broker itself does without, since it parses what peers send.
pub struct TunnelPrograms {
    hooks: Hooks,
    /// Listeners that accept redirected connections at once.
    early: BoundListeners,
    strict: StrictPrograms,
    openings: TunnelOpenings,
    gateway: Option<GatewayInKernel>,
    /// Random number that distinguishes this broker from earlier ones.
    run: u64,
}

impl TunnelPrograms {
    /// Loads and attaches the programs. They redirect no connection before the broker has rules and carriers. `shared`
    /// has the maps in which a model chooses between the broker and direct connections.
    ///
    /// # Errors
    /// The kernel rejects a program, an interface of the gateway does not exist, or no port is free.
    pub fn load(settings: &Settings, shared: &SelectionMaps) -> anyhow::Result<Self> {
        let early = BoundListeners::bind()?;
        let strict = StrictPrograms::load()?;
        let config = Config { early: early.ports()?, strict: strict.listeners.ports()? };
        let hooks = Hooks::attach(&config, &settings.top_cgroup()?, shared)?;
        let run = run()?;
        let gateway =
            settings.gateway.as_ref().map(|gateway| GatewayInKernel::load(gateway, run)).transpose()?;
        let openings = TunnelOpenings::load(&own_cgroup().context("no cgroup of version 2 is mounted")?)
            .context("cannot ask this host's firewall")?;
        Ok(Self { hooks, early, strict, openings, gateway, run })
    }
}

/// Number of file descriptors that are kept free of tunnelled connections, for all other uses in the daemon.
const OTHER_DESCRIPTORS: u64 = 256;

/// The tunnel broker of this host, from [`Self::start`] until it is dropped.
///
/// `start` returns once the hooks and listeners are in place and the tasks run that serve connections and carriers. The
/// daemon then calls [`Self::apply`] for changed settings and [`Self::tick`] about once a second. [`Self::hook`] adds
/// rules for a single cgroup. Each of them first gives the kernel the ports that need plain TCP, and then the rules, so
/// that no connection is redirected by mistake. `apply` keeps the carriers of unchanged peers, and closes the others.
/// If it fails, the steps before the failure stay in force, and the daemon may call it again. The kernel redirects
/// connections to a peer only while a carrier to the peer is ready. Dropping the broker detaches the hooks first, and
/// then closes the carriers, which resets all tunnelled connections.
pub struct TunnelBroker {
    carry: CarrySettings,
    context: Arc<CarryContext>,
    strict: Arc<Strict>,
    endpoint: Option<Endpoint>,
    tls: Arc<RwLock<Tls>>,
    /// Redirection rules that were last given to the kernel. They change when cgroups are added or removed.
    rules: Mutex<Vec<RedirectRule>>,
    /// Tasks that connect to each peer, with the settings of the peer that were valid when the tasks
    /// started.
    calls: Mutex<BTreeMap<String, (AgreementPeer, Vec<AbortHandle>)>>,
    tasks: Mutex<JoinSet<()>>,
}

impl TunnelBroker {
    /// Starts the tunnel broker, which uses these programs. Must be called inside of a tokio runtime.
    ///
    /// # Errors
    /// A key is not usable, or the broker cannot listen on an address.
    pub fn start(settings: &Settings, programs: TunnelPrograms) -> anyhow::Result<Self> {
        let carry = settings.carry.as_ref().context("no [carry]")?;
        let tls = Tls::new(settings.agreement.as_ref().context("no [agreement]")?)?;
        let endpoint = match carry.listen.filter(|_| carry.has(CarrierKind::Quic)) {
            Some(at) => Some(dial::endpoint(at, Some(dial::server_config(&tls, carry)?))?),
            None => None,
        };
        // This check reports missing kernel features when the tunnel broker starts, and not with the first connection
        // to a peer.
        tcp::check(&carry.carriers, &carry.pool)?;
        let pools = carry.listen.map_or(Ok(Vec::new()), |at| tcp::listen(at, &carry.carriers))?;
        let TunnelPrograms { hooks, early, strict, openings, gateway, run } = programs;
        let (strict, asks) = Strict::new(strict)?;
        let hooks = Arc::new(hooks);
        let table = Arc::new(TunnelTable::new(descriptors(carry.connections)?, carry.window, carry.memory));
        let servers = RwLock::default();
        let warm = carry.warm;
        let gateway = settings.gateway.as_ref().zip(gateway);
        let gateway =
            gateway.map(|(settings, in_kernel)| CarryGateway::new(settings, in_kernel)).transpose()?;
        let (gateway, behind) = gateway.map(|(gateway, asks)| (Arc::new(gateway), asks)).unzip();
        let carriers = Arc::new(Carriers::new(hooks.clone(), gateway.clone(), table.clone()));
        let carriers_wanted = carry.carriers.clone();
        let watch = TunnelWatch::default();
        let purposes = Arc::new(Purposes::default());
        let context = Arc::new(CarryContext {
            run,
            hooks,
            table,
            watch,
            carriers,
            ports: PortRange::new(),
            openings,
            gateway,
            servers,
            warm,
            carriers_wanted,
            purposes,
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(redirected::accept(context.clone(), early.serve()?));
        let strict = Arc::new(strict);
        tasks.spawn(strict::accept(strict.clone()));
        tasks.spawn(strict::answer_all(context.clone(), strict.clone(), asks));
        if let (Some(gateway), Some(asks)) = (&context.gateway, behind) {
            tasks.spawn(gatewayed::accept(context.clone(), gateway.clone()));
            tasks.spawn(gatewayed::answer(context.clone(), gateway.clone(), asks));
        }
        let tls = Arc::new(RwLock::new(tls));
        if let Some(endpoint) = &endpoint {
            tasks.spawn(dial::listen(context.clone(), endpoint.clone(), tls.clone()));
            info!(at = %endpoint.local_addr()?, "listening for QUIC carriers");
        }
        for listener in pools {
            info!(at = %listener.local_addr()?, "listening for carriers by TCP, MPTCP or SCTP");
            tasks.spawn(accept::listen(context.clone(), listener, tls.clone(), carry.pool.clone()));
        }
        let rules = Mutex::default();
        let calls = Mutex::default();
        let tasks = Mutex::new(tasks);
        let carry = carry.clone();
        let broker = Self { carry, context, strict, endpoint, tls, rules, calls, tasks };
        broker.apply(settings)?;
        Ok(broker)
    }

    /// Applies changed rules and peers. Connections with peers that are unchanged continue.
    pub fn apply(&self, settings: &Settings) -> anyhow::Result<()> {
        let agreement = settings.agreement.as_ref().context("no [agreement]")?;
        let tls = Tls::new(agreement)?;
        if let Some(endpoint) = &self.endpoint {
            endpoint.set_server_config(Some(dial::server_config(&tls, &self.carry)?));
        }
        let rules = redirect_rules(settings)?;
        // The ports that must stay plain TCP are set before the rules, so that no connection is redirected by mistake.
        self.follow_firewall(&rules)?;
        self.context.hooks.set_rules(&rules)?;
        self.context.gateway.as_ref().map_or(Ok(()), |gateway| gateway.set_rules(&rules))?;
        *self.rules.lock() = rules;
        self.context.purposes.apply(settings);
        *self.context.servers.write() = settings.carried(SideSetting::Server).cloned().collect();
        self.context.carriers.set_peers(&agreement.peers);
        self.call(&tls, agreement)?;
        *self.tls.write() = tls;
        Ok(())
    }

    fn call(&self, tls: &Tls, agreement: &AgreementSettings) -> anyhow::Result<()> {
        let mut calls = self.calls.lock();
        calls.retain(|name, (before, tasks)| {
            let stays = agreement.peer(name) == Some(before);
            if !stays {
                tasks.iter().for_each(AbortHandle::abort);
            }
            stays
        });
        let new = agreement.peers.iter().filter(|peer| !calls.contains_key(&peer.name));
        for peer in new.collect::<Vec<_>>() {
            let tasks = self.call_by_all_ways(tls, peer)?;
            calls.insert(peer.name.clone(), (peer.clone(), tasks));
        }
        Ok(())
    }

    /// Starts tasks that connect to the peer, one for each kind of carrier and each address of the peer. So another
    /// carrier is ready when one fails.
    fn call_by_all_ways(&self, tls: &Tls, peer: &AgreementPeer) -> anyhow::Result<Vec<AbortHandle>> {
        let mut handles = Vec::new();
        for (place, kind) in self.carry.carriers.iter().copied().enumerate() {
            for (number, at) in peer.carry.iter().copied().enumerate() {
                let context = self.context.clone();
                let way = CarrierRoute::called(place, kind, number, at);
                let mut tasks = self.tasks.lock();
                handles.push(match kind {
                    CarrierKind::Quic => {
                        let config = dial::client_config(tls, peer, &self.carry)?;
                        tasks.spawn(dial::call(context, peer.clone(), way, at, config))
                    }
                    CarrierKind::Tcp | CarrierKind::Mptcp | CarrierKind::Sctp => {
                        let config = tcp::client_config(tls.client(peer)?);
                        let limits = self.carry.pool.clone();
                        tasks.spawn(peer_pool::keep(PeerPoolTask {
                            context,
                            peer: peer.clone(),
                            way,
                            at,
                            config,
                            limits,
                        }))
                    }
                });
            }
        }
        Ok(handles)
    }

    /// Adds a hook for the processes of a cgroup, with a rule for this hook only, until the cgroup is removed or empty.
    pub fn hook(&self, cgroup: &Path, side: SideSetting, rules: Vec<RedirectRule>) -> anyhow::Result<()> {
        self.follow_firewall(&rules)?;
        self.context.hooks.add(cgroup, side, rules)
    }

    /// Updates the server ports to which connections are not redirected because this host's firewall requires plain
    /// TCP. The ports of the redirection rules in the kernel, and of `rules`, are checked.
    fn follow_firewall(&self, rules: &[RedirectRule]) -> anyhow::Result<()> {
        let mut ports = self.context.hooks.ports();
        ports.extend(rules.iter().filter(|rule| !rule.in_place).map(|rule| rule.ports.clone()));
        self.context.hooks.set_plain(self.context.openings.plain_ports(&ports))
    }

    /// Does the periodic work, about once a second. `rules` are the redirection rules that the settings and cgroups
    /// require now.
    pub fn tick(&self, rules: Vec<RedirectRule>) {
        if let Err(error) = self.context.hooks.prune() {
            warn!("rules of commands that have ended cannot be removed from the kernel: {error:#}");
        }
        // The local addresses of the routes to a peer may change while its carriers stay open.
        self.context.carriers.refresh();
        self.context.gateway.iter().for_each(|gateway| gateway.tick());
        if let Err(error) = self.follow_firewall(&[]) {
            warn!(
                "the firewall's rules have changed, but the redirection rules in the kernel cannot be updated: {error:#}"
            );
        }
        self.context.openings.name_rules([&self.context.hooks.ports(), &self.served_ports()]);
        if let Err(error) = self.follow_cgroups(rules) {
            warn!(
                "cgroups that rules name have come or gone, but the redirection rules in the kernel cannot be updated: {error:#}"
            );
        }
    }

    /// Applies the redirection rules after cgroups were added or removed. The gateway has no rules for single cgroups,
    /// so it is not updated.
    fn follow_cgroups(&self, now: Vec<RedirectRule>) -> anyhow::Result<()> {
        let mut told = self.rules.lock();
        if now != *told {
            self.context.hooks.set_rules(&now)?;
            *told = now;
        }
        Ok(())
    }

    /// Returns a problem of the gateway that needs the operator's attention, or `None`.
    pub fn trouble(&self) -> Option<String> {
        self.context.gateway.as_ref().and_then(|gateway| gateway.trouble())
    }

    /// Returns the tunnelled connections that have begun or ended since the last call.
    pub fn take_flows(&self) -> Vec<CarriedFlow> {
        self.context.watch.take()
    }

    /// Returns the statistics of past connections, from which the use of new ones is predicted.
    pub fn purposes(&self) -> &Purposes {
        &self.context.purposes
    }

    /// Returns the addresses of hosts with a tunnel broker, and whether a carrier to each is ready ("warm").
    pub fn warmth(&self) -> BTreeMap<IpAddr, bool> {
        self.context.carriers.warmth()
    }

    /// Returns the status of the hooks, carriers and tunnelled connections.
    pub fn status(&self) -> status::CarryStatus {
        let table = &self.context.table;
        status::CarryStatus {
            listen: self.endpoint.as_ref().and_then(|endpoint| endpoint.local_addr().ok()),
            verdicts: self.context.hooks.verdicts(),
            held: self.strict.verdicts().collect(),
            carriers: self.context.carriers.status(),
            connections: table.live() as u64,
            connections_max: table.connections_max() as u64,
            ended: table.ended(),
            resumed: table.resumed.load(Relaxed),
            sent_bytes: table.sent.load(Relaxed),
            received_bytes: table.received.load(Relaxed),
            kept_bytes: table.kept.load(Relaxed),
            gateway: self.context.gateway.as_ref().map(|gateway| gateway.status()),
            lost_reports: self.context.watch.lost(),
            firewall: Some(self.context.openings.status([&self.context.hooks.ports(), &self.served_ports()])),
        }
    }

    fn served_ports(&self) -> Vec<RangeInclusive<u16>> {
        let rules = self.context.servers.read();
        let ports = rules.iter().flat_map(|rule| rule.ports.iter().cloned());
        ports.chain(self.context.hooks.served_ports()).collect()
    }

    /// Returns the status of the carrier to the host with this address, or `None` if no peer of the
    /// settings has this address.
    pub fn carrier_to(&self, address: IpAddr) -> Option<status::CarrierStatus> {
        self.context.carriers.status_to(address)
    }
}

impl Drop for TunnelBroker {
    fn drop(&mut self) {
        // The hooks are detached first, so that no connection is redirected here while the carriers are closed.
        self.context.hooks.detach();
        self.context.gateway.iter().for_each(|gateway| gateway.detach());
        if let Some(endpoint) = &self.endpoint {
            endpoint.close(0_u32.into(), b"the broker ends");
        }
        self.context.carriers.set_peers(&[]);
    }
}

fn redirect_rules(settings: &Settings) -> anyhow::Result<Vec<RedirectRule>> {
    let rules = settings.redirect_rules();
    if rules.len() > HOOK_RULES {
        bail!(
            "carried rules, and those before them, have {} pairs of a port and a peer: the limit is {HOOK_RULES}",
            rules.len()
        );
    }
    Ok(rules)
}

fn run() -> anyhow::Result<u64> {
    let mut bytes = [0; 8];
    ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut bytes)
        .map_err(|_| anyhow::anyhow!("the system has no random numbers"))?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Raises the limit of file descriptors. Returns the number of connections that the limit suffices for, at most
/// `connections`.
fn descriptors(connections: usize) -> anyhow::Result<usize> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    let room = usize::try_from(hard.saturating_sub(OTHER_DESCRIPTORS).max(1))?;
    if room < connections {
        warn!(
            "the limit of descriptors (RLIMIT_NOFILE, {hard}) is enough for {room} connections, not for {connections}"
        );
    }
    Ok(connections.min(room))
}
