//! What a gateway has in the kernel and on the wire for hosts behind it: which of their SYNs wait, and what becomes of them.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use millrace_graft::{
    settings::{self, Peer},
    status,
};
use millrace_graft_kernel::{
    covers, gateway as kernel,
    gateway::{Ask, Config, Flow, Run, VERDICTS},
    hook::Lead,
};
use millrace_kernel::prefix::Prefix;
use parking_lot::Mutex;
use tokio::{net::TcpStream, sync::oneshot, time::timeout};
use tracing::{debug, warn};

use super::{
    asking::Asking,
    keeper::Keeper,
    listeners::{Listeners, canonical},
    said,
    syn::Wire,
};

/// Longer silence of the broker, and SYNs are forwarded.
const STAY: Duration = Duration::from_secs(10);
/// SYNs that are held back at once.
const WAITING_MAX: usize = 4096;
/// For a SYN that was let in to become a connection. Its client may have given up.
const ADMISSION: Duration = Duration::from_secs(5);
/// What is not carried is forwarded for so long: its SYN comes again after 1, 3 and 7 s.
const FORWARDED: Duration = Duration::from_secs(60);

pub struct Gateway {
    /// The kernel's part, which goes first.
    kernel: kernel::Gateway,
    /// Until the routing is taken back.
    keeper: Mutex<Option<Keeper>>,
    settings: settings::Gateway,
    listeners: Listeners,
    wire: Wire,
    again: Wire,
    waiting: Mutex<HashMap<Flow, Option<oneshot::Sender<TcpStream>>>>,
    /// As the kernel was told.
    peers: Mutex<BTreeMap<Prefix, bool>>,
    trouble: Mutex<Option<String>>,
}

/// A SYN that is held back, until this is dropped.
pub struct Waiting<'a>(&'a Gateway, Flow);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.lock().remove(&self.1);
    }
}

impl Gateway {
    /// # Errors
    /// There is no such interface, or the kernel refuses.
    pub fn start(settings: &settings::Gateway, run: u64) -> anyhow::Result<(Self, Asking<Ask>)> {
        let run = Run((run & 0xffff) as u16);
        let listeners = Listeners::transparent()?;
        let ports = listeners.ports()?;
        let (mut kernel, asks) = kernel::Gateway::load(&Config { run, v4: ports.v4, v6: ports.v6 })?;
        let keeper = Keeper::start(run, &settings.interfaces)?;
        settings.networks.iter().try_for_each(|network| kernel.add_inside(*network))?;
        kernel.stay(STAY)?;
        kernel.attach(&settings.interfaces, None)?;
        let gateway = Self {
            kernel,
            keeper: Mutex::new(Some(keeper)),
            settings: settings.clone(),
            listeners,
            wire: Wire::new(None)?,
            again: Wire::new(Some(run.mark_again()))?,
            waiting: Mutex::default(),
            peers: Mutex::default(),
            trouble: Mutex::default(),
        };
        Ok((gateway, Asking::new(asks)?))
    }

    pub fn set_rules(&self, rules: &[Lead]) -> anyhow::Result<()> {
        Ok(self.kernel.set_rules(rules)?)
    }

    /// Hosts and networks with a broker, and whether a carrier to each is warm: these and no others.
    pub fn set_peers(&self, wanted: &BTreeMap<Prefix, bool>) {
        let mut told = self.peers.lock();
        told.retain(|network, _| {
            let stays = wanted.contains_key(network);
            if !stays {
                said("a peer cannot be taken from the kernel", self.kernel.forget_peer(*network));
            }
            stays
        });
        for (network, warm) in wanted {
            if told.get(network) == Some(warm) {
                continue;
            }
            match self.kernel.set_peer(*network, *warm) {
                Ok(()) => drop(told.insert(*network, *warm)),
                failed => said("a peer cannot be told to the kernel", failed),
            }
        }
    }

    /// Once a second or so. What others have taken away is put back.
    pub fn tick(&self) {
        let done = self.kernel.stay(STAY).and_then(|()| self.kernel.mend());
        let trouble = done.err().map(|error| format!("gateway: {error}"));
        let mut before = self.trouble.lock();
        if let Some(trouble) = trouble.as_ref().filter(|_| before.is_none()) {
            warn!("{trouble}");
        }
        *before = trouble;
    }

    /// For good.
    pub fn detach(&self) {
        self.kernel.detach();
        drop(self.keeper.lock().take());
    }

    pub fn trouble(&self) -> Option<String> {
        self.trouble.lock().clone()
    }

    pub fn status(&self) -> status::Gateway {
        let counts = self.kernel.verdicts().unwrap_or_default();
        status::Gateway {
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

    /// `None`: it waits already, or too many do, and it is forwarded.
    pub fn wait(&self, flow: Flow) -> Option<Waiting<'_>> {
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
        Some(Waiting(self, flow))
    }

    /// The socket of a connection before, between the same ends, waits for its time.
    pub fn end_old(&self, flow: Flow) {
        if let Err(error) = self.kernel.end_old(flow) {
            debug!(client = %flow.client, "the socket of the connection before could not be ended: {error}");
        }
    }

    /// Lets the SYN in. `None`: nobody is there any more.
    pub async fn admit(&self, ask: &Ask) -> Option<TcpStream> {
        let (sender, receiver) = oneshot::channel();
        self.waiting.lock().insert(ask.flow, Some(sender));
        let Flow { client, server } = ask.flow;
        match self.kernel.let_in(ask.flow) {
            Ok(true) => {}
            // Its client has it in place already.
            Ok(false) => return None,
            Err(error) => {
                warn!(%client, "a SYN cannot be let in: {error}");
                self.forget(ask.flow);
                return None;
            }
        }
        if let Err(error) = self.again.send(client, server, &ask.syn) {
            // It comes again by itself, a second later.
            debug!(%client, "a SYN could not be sent again: {error}");
        }
        let local = timeout(ADMISSION, receiver).await.ok().and_then(Result::ok);
        self.forget(ask.flow);
        local
    }

    /// The next that was let in, with what waits for it. `None`: nobody does.
    pub async fn next(&self) -> (TcpStream, SocketAddr, Option<oneshot::Sender<TcpStream>>) {
        let (local, client) = self.listeners.next().await;
        let server = local.local_addr().map(canonical);
        let flow = server.ok().map(|server| Flow { client, server });
        let mut waiting = self.waiting.lock();
        let waits = flow.and_then(|flow| waiting.get_mut(&flow)).and_then(Option::take);
        drop(waiting);
        (local, client, waits)
    }

    /// As the server would.
    pub fn refuse(&self, ask: &Ask) {
        let Flow { client, server } = ask.flow;
        if let Err(error) = self.wire.refuse(server, client, &ask.syn) {
            warn!(%client, "a client cannot be told that it is refused: {error}");
        }
        self.forget(ask.flow);
    }

    pub fn forget(&self, flow: Flow) {
        said("what is known of a SYN cannot be taken from the kernel", self.kernel.forget(flow));
    }

    pub fn forward(&self, flow: Flow) {
        said("a SYN cannot be forwarded", self.kernel.forward(flow, FORWARDED));
    }

    pub fn avoid(&self, server: SocketAddr, time: Duration) {
        said("a server cannot be avoided", self.kernel.avoid(server, time));
    }
}

/// Hosts and networks that its broker stands for.
pub fn networks_of(peer: &Peer) -> impl Iterator<Item = Prefix> {
    peer.all_addresses().map(Prefix::from).chain(peer.networks.iter().copied())
}
