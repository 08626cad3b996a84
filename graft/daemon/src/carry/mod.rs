//! Applications' TCP connections, carried: the broker. The kernel leads chosen connections to it ([`hooks`]), it takes them
//! ([`led`], or [`strict`] where the application is to wait for the server) and makes each a stream of a carrier to the peer's broker ([`carriers`]), which connects to the server
//! ([`host`]), if the [`firewall`] of both hosts lets it begin ([`openings`]). Connections of hosts behind this one come by [`behind`]. [`pump`] moves the bytes at both ends; what stands on a stream is in `millrace-graft-proto`.
//!
//! A [`carrier`] is a QUIC connection ([`dial`]), or a [`pool`] of TCP connections: who calls keeps it ([`keep`]), who is called takes them
//! ([`take`]). [`tcp`] is their handshake, [`record`] and [`socket`] their bytes, and [`stream`] what one connection has of either kind.
//!
//! [`meter`] counts what goes through a connection; [`purposes`] has what is known by that of the next one.

mod asking;
mod behind;
mod broken;
mod carrier;
mod carriers;
mod context;
mod dial;
mod firewall;
mod gateway;
mod hooks;
mod host;
mod keep;
pub mod keeper;
mod led;
mod let_go;
mod listeners;
mod meter;
pub mod metrics;
mod openings;
mod owner;
mod pool;
mod ports;
mod probe;
mod pump;
mod purposes;
mod record;
mod silence;
mod socket;
mod stream;
mod strict;
mod syn;
mod table;
mod take;
mod tcp;
pub mod text;
mod warm;
mod watch;

use std::{
    collections::BTreeMap, net::IpAddr, ops::RangeInclusive, path::Path, sync::Arc,
    sync::atomic::Ordering::Relaxed,
};

use anyhow::{Context as _, bail};
use millrace_daemon::cgroup::own_cgroup;
use millrace_graft::{
    Carried, Settings, Side,
    settings::{Agreement, Carry, Kind, Peer},
    status,
};
use millrace_graft_kernel::{
    Shared,
    hook::{Config, HOOK_RULES, Lead},
};
use millrace_graft_proto::select::kind::Kinds;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use parking_lot::{Mutex, RwLock};
use quinn::Endpoint;
use tokio::task::{AbortHandle, JoinSet};
use tracing::{info, warn};

use self::{
    carrier::Way, carriers::Carriers, context::Context, gateway::Gateway, hooks::Hooks, keep::Keeper,
    listeners::Listeners, openings::Openings, ports::Ports, purposes::Purposes, strict::Strict, table::Table,
    watch::Watch,
};
use super::tls::Tls;

/// Descriptors for all else.
const OTHER_DESCRIPTORS: u64 = 256;

/// Carries until it is dropped; connections that are carried are reset then.
pub struct Broker {
    carry: Carry,
    context: Arc<Context>,
    strict: Arc<Strict>,
    endpoint: Option<Endpoint>,
    tls: Arc<RwLock<Tls>>,
    /// What the kernel was told: cgroups come and go.
    leads: Mutex<Vec<Lead>>,
    calls: Mutex<BTreeMap<String, (Peer, Vec<AbortHandle>)>>,
    tasks: Mutex<JoinSet<()>>,
}

impl Broker {
    /// `kinds`: what is known of connections, which those that end here add to.
    ///
    /// # Errors
    /// A key is not usable, there is no listening there, or the kernel takes no hook.
    pub fn start(
        settings: &Settings,
        cgroup: &Path,
        shared: &Shared,
        kinds: Arc<std::sync::Mutex<Kinds>>,
    ) -> anyhow::Result<Option<Self>> {
        let (Some(carry), Some(agreement)) = (&settings.carry, &settings.agreement) else { return Ok(None) };
        let tls = Tls::new(agreement)?;
        let endpoint = match carry.listen.filter(|_| carry.has(Kind::Quic)) {
            Some(at) => Some(dial::endpoint(at, Some(dial::server_config(&tls, carry)?))?),
            None => None,
        };
        tcp::check(&carry.carriers, &carry.pool)?;
        let pools = carry.listen.map_or(Ok(Vec::new()), |at| tcp::listen(at, &carry.carriers))?;
        let listeners = Listeners::bind()?;
        let (strict, asks) = Strict::new()?;
        let config = Config { early: listeners.ports()?, strict: strict.listeners().ports()? };
        let hooks = Arc::new(Hooks::attach(config, cgroup, shared)?);
        let table = Arc::new(Table::new(descriptors(carry.connections)?, carry.window, carry.memory));
        let (run, servers, warm) = (run()?, RwLock::default(), carry.warm);
        let gateway = settings.gateway.as_ref().map(|gateway| Gateway::start(gateway, run)).transpose()?;
        let openings = Openings::start(&own_cgroup().context("no cgroup of version 2 is mounted")?)
            .context("cannot ask this host's firewall")?;
        let (gateway, behind) = gateway.map(|(gateway, asks)| (Arc::new(gateway), asks)).unzip();
        let carriers = Arc::new(Carriers::new(hooks.clone(), gateway.clone(), table.clone()));
        let carriers_wanted = carry.carriers.clone();
        let (watch, purposes) = (Watch::default(), Arc::new(Purposes::new(kinds)));
        let context = Arc::new(Context {
            run,
            hooks,
            table,
            watch,
            carriers,
            ports: Ports::new(),
            openings,
            gateway,
            servers,
            warm,
            carriers_wanted,
            purposes,
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(led::accept(context.clone(), listeners));
        let strict = Arc::new(strict);
        tasks.spawn(strict::accept(strict.clone()));
        tasks.spawn(strict::answer_all(context.clone(), strict.clone(), asks));
        if let (Some(gateway), Some(asks)) = (&context.gateway, behind) {
            tasks.spawn(behind::accept(context.clone(), gateway.clone()));
            tasks.spawn(behind::answer(context.clone(), gateway.clone(), asks));
        }
        let tls = Arc::new(RwLock::new(tls));
        if let Some(endpoint) = &endpoint {
            tasks.spawn(dial::listen(context.clone(), endpoint.clone(), tls.clone()));
            info!(at = %endpoint.local_addr()?, "carriers are taken, by UDP");
        }
        for listener in pools {
            info!(at = %listener.local_addr()?, "carriers are taken, for pools");
            tasks.spawn(take::listen(context.clone(), listener, tls.clone(), carry.pool.clone()));
        }
        let (leads, calls, tasks, carry) =
            (Mutex::default(), Mutex::default(), Mutex::new(tasks), carry.clone());
        let broker = Self { carry, context, strict, endpoint, tls, leads, calls, tasks };
        broker.apply(settings)?;
        Ok(Some(broker))
    }

    /// Other rules and peers. Connections with peers that stay go on.
    pub fn apply(&self, settings: &Settings) -> anyhow::Result<()> {
        let agreement = settings.agreement.as_ref().context("no [agreement]")?;
        let tls = Tls::new(agreement)?;
        if let Some(endpoint) = &self.endpoint {
            endpoint.set_server_config(Some(dial::server_config(&tls, &self.carry)?));
        }
        let leads = leads(settings)?;
        self.follow_firewall(&leads)?;
        self.context.hooks.set_rules(&leads)?;
        self.context.gateway.as_ref().map_or(Ok(()), |gateway| gateway.set_rules(&leads))?;
        *self.leads.lock() = leads;
        self.context.purposes.apply(settings);
        *self.context.servers.write() = settings.carried(Side::Server).cloned().collect();
        self.context.carriers.set_peers(&agreement.peers);
        self.call(&tls, agreement)?;
        *self.tls.write() = tls;
        Ok(())
    }

    fn call(&self, tls: &Tls, agreement: &Agreement) -> anyhow::Result<()> {
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

    /// Each for itself, so that where one does not carry another is there.
    fn call_by_all_ways(&self, tls: &Tls, peer: &Peer) -> anyhow::Result<Vec<AbortHandle>> {
        let mut handles = Vec::new();
        for (place, kind) in self.carry.carriers.iter().copied().enumerate() {
            for (number, at) in peer.carry.iter().copied().enumerate() {
                let (context, way) = (self.context.clone(), Way::called(place, kind, number, at));
                let mut tasks = self.tasks.lock();
                handles.push(match kind {
                    Kind::Quic => {
                        let config = dial::client_config(tls, peer, &self.carry)?;
                        tasks.spawn(dial::call(context, peer.clone(), (way, at), config))
                    }
                    Kind::Tcp | Kind::Mptcp | Kind::Sctp => {
                        let (config, limits) =
                            (tcp::client_config(tls.client(peer)?), self.carry.pool.clone());
                        tasks.spawn(keep::keep(Keeper {
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

    /// The processes of a cgroup, as a rule of their own, until the cgroup is gone.
    pub fn hook(&self, cgroup: &Path, side: Side, leads: Vec<Lead>) -> anyhow::Result<()> {
        self.follow_firewall(&leads)?;
        self.context.hooks.add(cgroup, side, leads)
    }

    /// Has connections go plain from where they are made that this host's firewall does not let be carried, of these rules and of those that
    /// there are.
    fn follow_firewall(&self, leads: &[Lead]) -> anyhow::Result<()> {
        let mut ports = self.context.hooks.ports();
        ports.extend(leads.iter().filter(|lead| !lead.in_place).map(|lead| lead.ports.clone()));
        self.context.hooks.set_plain(self.context.openings.plain_ports(&ports))
    }

    /// Once a second or so. `leads`: what applications are led by now.
    pub fn tick(&self, leads: Vec<Lead>) {
        self.context.hooks.prune();
        // By which of its addresses this host reaches a peer changes without a carrier's end.
        self.context.carriers.refresh();
        self.context.gateway.iter().for_each(|gateway| gateway.tick());
        if let Err(error) = self.follow_firewall(&[]) {
            warn!("the firewall's rules have changed, and the kernel cannot be told: {error:#}");
        }
        self.context.openings.name_rules([&self.context.hooks.ports(), &self.served_ports()]);
        if let Err(error) = self.follow_cgroups(leads) {
            warn!("cgroups that rules name have come or gone, and the kernel cannot be told: {error:#}");
        }
    }

    /// Rules for somebody are not for a gateway: it need not be told.
    fn follow_cgroups(&self, now: Vec<Lead>) -> anyhow::Result<()> {
        let mut told = self.leads.lock();
        if now != *told {
            self.context.hooks.set_rules(&now)?;
            *told = now;
        }
        Ok(())
    }

    pub fn trouble(&self) -> Option<String> {
        self.context.gateway.as_ref().and_then(|gateway| gateway.trouble())
    }

    /// What was told of connections since the last time.
    pub fn take_told(&self) -> Vec<Carried> {
        self.context.watch.take()
    }

    /// Hosts with a broker, and whether a carrier to each is warm.
    pub fn warmth(&self) -> BTreeMap<IpAddr, bool> {
        self.context.carriers.warmth()
    }

    pub fn status(&self) -> status::Carry {
        let table = &self.context.table;
        status::Carry {
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
            untold: self.context.watch.lost(),
            firewall: Some(self.context.openings.status([&self.context.hooks.ports(), &self.served_ports()])),
        }
    }

    fn served_ports(&self) -> Vec<RangeInclusive<u16>> {
        let rules = self.context.servers.read();
        let ports = rules.iter().flat_map(|rule| rule.ports.iter().cloned());
        ports.chain(self.context.hooks.served_ports()).collect()
    }

    pub fn carrier_to(&self, address: IpAddr) -> Option<status::Carrier> {
        self.context.carriers.status_to(address)
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.context.hooks.detach();
        self.context.gateway.iter().for_each(|gateway| gateway.detach());
        if let Some(endpoint) = &self.endpoint {
            endpoint.close(0_u32.into(), b"the broker ends");
        }
        self.context.carriers.set_peers(&[]);
    }
}

fn said(what: &str, done: Result<(), millrace_graft_kernel::Error>) {
    if let Err(error) = done {
        warn!("{what}: {error}");
    }
}

fn leads(settings: &Settings) -> anyhow::Result<Vec<Lead>> {
    let leads = settings.leads();
    if leads.len() > HOOK_RULES {
        bail!(
            "carried rules, and those before them, have {} pairs of a port and a peer: there is room for {HOOK_RULES}",
            leads.len()
        );
    }
    Ok(leads)
}

fn run() -> anyhow::Result<u64> {
    let mut bytes = [0; 8];
    ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut bytes)
        .map_err(|_| anyhow::anyhow!("the system has no random numbers"))?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Makes room for so many connections, or says for how many there is.
fn descriptors(connections: usize) -> anyhow::Result<usize> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    let room = usize::try_from(hard.saturating_sub(OTHER_DESCRIPTORS).max(1))?;
    if room < connections {
        warn!("descriptors (RLIMIT_NOFILE, {hard}) are for {room} connections, not for {connections}");
    }
    Ok(connections.min(room))
}
