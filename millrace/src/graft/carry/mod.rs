//! Applications' TCP connections, carried: the broker. The kernel leads chosen connections to it ([`hooks`]), it takes them
//! ([`led`], or [`strict`] where the application is to wait for the server) and makes each a stream of a carrier to the peer's broker ([`carriers`]), which connects to the server
//! ([`host`]). [`pump`] moves the bytes at both ends; what stands on a stream is in `millrace-proto`.
//!
//! A [`carrier`] is a QUIC connection ([`dial`]), or a [`pool`] of TCP connections: who calls keeps it ([`keep`]), who is called takes them
//! ([`take`]). [`tcp`] is their handshake, [`record`] and [`socket`] their bytes, and [`stream`] what one connection has of either kind.

mod broken;
mod carrier;
mod carriers;
mod context;
mod dial;
mod hooks;
mod host;
mod keep;
mod led;
pub mod metrics;
mod pool;
mod probe;
mod pump;
mod record;
mod socket;
mod stream;
mod strict;
mod syn;
mod table;
mod take;
mod tcp;
pub mod text;
mod warm;

use std::{collections::BTreeMap, net::IpAddr, path::Path, sync::Arc, sync::atomic::Ordering::Relaxed};

use anyhow::{Context as _, bail};
use millrace_bpf::graft::hook::{Config, HOOK_RULES, Lead};
use millrace_graft::{
    Rule, Settings, Side,
    settings::{Agreement, Carry, Kind, Peer},
    status,
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use parking_lot::{Mutex, RwLock};
use quinn::Endpoint;
use tokio::task::{AbortHandle, JoinSet};
use tracing::{info, warn};

use self::{
    carrier::Way, carriers::Carriers, context::Context, hooks::Hooks, keep::Keeper, led::Listeners,
    strict::Strict, table::Table,
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
    calls: Mutex<BTreeMap<String, (Peer, Vec<AbortHandle>)>>,
    tasks: Mutex<JoinSet<()>>,
}

impl Broker {
    /// # Errors
    /// A key is not usable, there is no listening there, or the kernel takes no hook.
    pub fn start(settings: &Settings, cgroup: &Path) -> anyhow::Result<Option<Self>> {
        let (Some(carry), Some(agreement)) = (&settings.carry, &settings.agreement) else { return Ok(None) };
        let tls = Tls::new(agreement)?;
        let endpoint = match carry.listen.filter(|_| carry.has(Kind::Quic)) {
            Some(at) => Some(dial::endpoint(at, Some(dial::server_config(&tls, carry)?))?),
            None => None,
        };
        tcp::check(&carry.carriers, &carry.pool)?;
        let listener = match carry.listen.filter(|_| carry.has(Kind::Tcp) || carry.has(Kind::Mptcp)) {
            Some(at) => Some(tcp::listen(at, &carry.carriers)?),
            None => None,
        };
        let listeners = Listeners::bind()?;
        let (strict, asks) = Strict::new()?;
        let config = Config { early: listeners.ports()?, strict: strict.listeners().ports()? };
        let hooks = Arc::new(Hooks::attach(config, cgroup)?);
        let table = Arc::new(Table::new(descriptors(carry.connections)?, carry.window, carry.memory));
        let carriers = Arc::new(Carriers::new(hooks.clone(), table.clone()));
        let (run, servers, warm) = (run()?, RwLock::default(), carry.warm);
        let carriers_wanted = carry.carriers.clone();
        let context = Arc::new(Context { run, hooks, table, carriers, servers, warm, carriers_wanted });
        let mut tasks = JoinSet::new();
        tasks.spawn(led::accept(context.clone(), listeners));
        let strict = Arc::new(strict);
        tasks.spawn(strict::accept(strict.clone()));
        tasks.spawn(strict::answer(context.clone(), strict.clone(), asks));
        let tls = Arc::new(RwLock::new(tls));
        if let Some(endpoint) = &endpoint {
            tasks.spawn(dial::listen(context.clone(), endpoint.clone(), tls.clone()));
            info!(at = %endpoint.local_addr()?, "carriers are taken, by UDP");
        }
        if let Some(listener) = listener {
            info!(at = %listener.local_addr()?, "carriers are taken, by TCP");
            tasks.spawn(take::listen(context.clone(), listener, tls.clone(), carry.pool.clone()));
        }
        let (calls, tasks, carry) = (Mutex::default(), Mutex::new(tasks), carry.clone());
        let broker = Self { carry, context, strict, endpoint, tls, calls, tasks };
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
        self.context.hooks.set_rules(&leads(settings)?)?;
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
                    Kind::Tcp | Kind::Mptcp => {
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
        self.context.hooks.add(cgroup, side, leads)
    }

    pub fn tick(&self) {
        self.context.hooks.prune();
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
        }
    }

    pub fn carrier_to(&self, address: IpAddr) -> Option<status::Carrier> {
        let mut carriers = self.context.carriers.status().into_iter();
        carriers.find(|carrier| carrier.addresses.contains(&address))
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.context.hooks.detach();
        if let Some(endpoint) = &self.endpoint {
            endpoint.close(0_u32.into(), b"the broker ends");
        }
        self.context.carriers.set_peers(&[]);
    }
}

fn leads(settings: &Settings) -> anyhow::Result<Vec<Lead>> {
    let leads: Vec<_> = settings.carried(Side::Client).flat_map(Rule::leads).collect();
    if leads.len() > HOOK_RULES {
        bail!(
            "carried rules have {} pairs of a port and a peer: there is room for {HOOK_RULES}",
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
