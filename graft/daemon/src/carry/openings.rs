//! Asks the firewall of this host whether connections may be carried. Netfilter judges first packets, a SYN and its answer, which have the true
//! ends and the true owner; they end behind the firewall. A connection whose first packets do not pass is plain TCP, so the firewall treats it as it
//! would have. Where there is no firewall nothing is sent.

use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
    ops::RangeInclusive,
    os::fd::AsFd as _,
    path::Path,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use millrace_graft::status;
use millrace_graft_kernel::{
    hook::Owner,
    opening::{self, Openings as Kernel},
};
use millrace_kernel::neighbour::NextHop;
use parking_lot::Mutex;
use ring::rand::{SecureRandom as _, SystemRandom};
use socket2::{Domain, Protocol, Socket, Type};
use tracing::{debug, warn};

use super::{
    firewall::{End, Firewall},
    listeners::Listeners,
    owner::socket_of,
    syn,
};

/// The kernel takes packets with their IP header.
const PROTOCOL_RAW: i32 = 255;
/// Time for a packet to pass INPUT. Mostly it has passed before the first look.
const PATIENCE: Duration = Duration::from_millis(250);
const LOOK: Duration = Duration::from_millis(1);
/// A server that this host itself does not reach past its firewall is not tried again for so long.
const UNREACHED: Duration = Duration::from_secs(60);
const UNREACHED_MOST: usize = 1024;

macro_rules! verdicts {
    ($($name:ident = $text:literal),* $(,)?) => {
        /// The outcome for a connection.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Verdict { $($name),* }

        impl Verdict {
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Returns the name in status, metrics and documentation.
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }
        }
    };
}

verdicts! {
    NoFirewall = "no-firewall",
    Passes = "passes",
    Output = "output",
    Input = "input",
    Translated = "translated",
    Rule = "rule",
    Loopback = "loopback",
    Failed = "failed",
}

pub struct Openings {
    kernel: Kernel,
    /// The sockets that incoming first packets end at.
    _ends: Listeners,
    firewall: Mutex<Firewall>,
    /// Rules that were named in the log, and are still there.
    named: Mutex<Vec<String>>,
    unreached: Mutex<HashMap<SocketAddr, Instant>>,
    counts: [AtomicU64; Verdict::ALL.len()],
}

impl Openings {
    /// `cgroup`: in which this process is.
    pub fn start(cgroup: &Path) -> anyhow::Result<Self> {
        let (kernel, ends) = (Kernel::load(cgroup)?, Listeners::nowhere()?);
        for (socket, is_v6) in ends.sockets().zip([false, true]) {
            kernel.end_at(socket, is_v6)?;
        }
        let (firewall, named, unreached) = (Mutex::default(), Mutex::default(), Mutex::default());
        Ok(Self { kernel, _ends: ends, firewall, named, unreached, counts: Default::default() })
    }

    /// Reports whether OUTPUT of this host lets a connection begin that one of its applications makes, and INPUT its answer.
    pub async fn let_out(&self, (client, server): (SocketAddr, SocketAddr), owner: Owner) -> bool {
        let verdict = match self.ask_first(server, End::Client) {
            Some(verdict) => verdict,
            None => self.begin((client, server), owner).await.unwrap_or_else(failed),
        };
        self.count(verdict, (client, server))
    }

    /// Reports whether INPUT of this host lets a connection begin that comes to one of its servers, and OUTPUT the answer of `owner`. `None`: nobody
    /// listens, who would answer.
    pub async fn let_in(&self, (client, server): (SocketAddr, SocketAddr), owner: Option<Owner>) -> bool {
        let verdict = match self.ask_first(server, End::Server) {
            Some(verdict) => verdict,
            None => self.receive((client, server), owner).await.unwrap_or_else(failed),
        };
        self.count(verdict, (client, server))
    }

    /// Reports whether there is a firewall, which may also judge what this host says to itself.
    pub fn has_firewall(&self) -> bool {
        self.firewall.lock().is_there()
    }

    /// Remembers that this host's own firewall keeps it from a server of its own, for a while.
    pub fn note_unreached(&self, server: SocketAddr) {
        let mut unreached = self.unreached.lock();
        if unreached.len() < UNREACHED_MOST {
            unreached.insert(server, Instant::now());
        }
        drop(unreached);
        warn!(%server, "the firewall keeps this host from its own server on lo: connections to it are plain TCP. A rule that accepts what comes in by lo mends it");
    }

    /// Returns the verdict, if it is known before any packet is sent.
    fn ask_first(&self, server: SocketAddr, end: End) -> Option<Verdict> {
        let mut firewall = self.firewall.lock();
        firewall.refresh();
        if !firewall.is_there() {
            return Some(Verdict::NoFirewall);
        }
        if !firewall.obstacles(&(server.port()..=server.port()), end).is_empty() {
            return Some(Verdict::Rule);
        }
        let mut unreached = self.unreached.lock();
        unreached.retain(|_, since| since.elapsed() < UNREACHED);
        (end == End::Server && unreached.contains_key(&server)).then_some(Verdict::Loopback)
    }

    async fn begin(
        &self,
        (client, server): (SocketAddr, SocketAddr),
        owner: Owner,
    ) -> anyhow::Result<Verdict> {
        let (ours, theirs) = (number()?, number()?);
        match self.send((client, server), owner, (ours, None))? {
            Verdict::Passes => self.take((server, client), (theirs, Some(ours))).await,
            verdict => Ok(verdict),
        }
    }

    async fn receive(
        &self,
        (client, server): (SocketAddr, SocketAddr),
        owner: Option<Owner>,
    ) -> anyhow::Result<Verdict> {
        let (theirs, ours) = (number()?, number()?);
        match (self.take((client, server), (theirs, None)).await?, owner) {
            (Verdict::Passes, Some(owner)) => self.send((server, client), owner, (ours, Some(theirs))),
            (verdict, _) => Ok(verdict),
        }
    }

    /// Sends one out, and sees whether it comes through. What is queued for a program that judges does not, in time.
    fn send(
        &self,
        (from, to): (SocketAddr, SocketAddr),
        owner: Owner,
        (number, answers): (u32, Option<u32>),
    ) -> anyhow::Result<Verdict> {
        let segment = syn::first(from.port(), to.port(), number, answers);
        let packet = syn::packet(from.ip(), to.ip(), &segment).context("ends of two families")?;
        let protocol = Some(Protocol::from(PROTOCOL_RAW));
        let socket = socket_of(owner, || Socket::new(Domain::for_address(to), Type::RAW, protocol))?;
        self.kernel.watch(socket.as_fd())?;
        // It fails however it ends. IPv6 knows of no port there.
        let _ = socket.send_to(&packet, &SocketAddr::new(to.ip(), 0).into());
        Ok(match self.kernel.passed_out(socket.as_fd())? {
            Some(ends) if ends == (from, to) => Verdict::Passes,
            Some(_) => Verdict::Translated,
            None => Verdict::Output,
        })
    }

    /// Injects a first packet as if it came from the other end, and reports whether it passes.
    async fn take(
        &self,
        (from, to): (SocketAddr, SocketAddr),
        (number, answers): (u32, Option<u32>),
    ) -> anyhow::Result<Verdict> {
        let segment = syn::first(from.port(), to.port(), number, answers);
        let packet = syn::packet(from.ip(), to.ip(), &segment).context("ends of two families")?;
        let hop = NextHop::of(to.ip(), from.ip())?;
        let due = self.kernel.expect((from, to), hop.interface())?;
        self.kernel.inject(&hop, &packet)?;
        let begin = Instant::now();
        loop {
            if due.has_passed()? {
                return Ok(Verdict::Passes);
            }
            if begin.elapsed() > PATIENCE {
                return Ok(Verdict::Input);
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Returns whether it may be carried.
    fn count(&self, verdict: Verdict, (client, server): (SocketAddr, SocketAddr)) -> bool {
        self.counts[verdict as usize].fetch_add(1, Relaxed);
        let passes = matches!(verdict, Verdict::Passes | Verdict::NoFirewall);
        if !passes {
            debug!(%client, %server, "not carried: what the firewall says is {:?}", verdict.name());
        }
        passes
    }

    /// Returns those of the ports to which this host's connections have to be plain TCP.
    pub fn plain_ports(&self, wanted: &[RangeInclusive<u16>]) -> Vec<RangeInclusive<u16>> {
        let mut firewall = self.firewall.lock();
        firewall.refresh();
        let mut plain = Vec::new();
        for obstacle in wanted.iter().flat_map(|ports| firewall.obstacles(ports, End::Client)) {
            if !plain.contains(&obstacle.ports) {
                plain.push(obstacle.ports);
            }
        }
        plain
    }

    /// Returns the rules for which connections are plain TCP: of clients to these ports, and to servers with those.
    fn rules(&self, ports: [&[RangeInclusive<u16>]; 2]) -> Vec<String> {
        let (firewall, mut all) = (self.firewall.lock(), Vec::new());
        for (ports, end) in ports.into_iter().zip([End::Client, End::Server]) {
            let found = ports.iter().flat_map(|ports| firewall.obstacles(ports, end));
            all.extend(found.map(|obstacle| obstacle.what));
        }
        drop(firewall);
        let unreached = self.unreached.lock();
        all.extend(unreached.keys().map(|server| format!("lo: this host does not reach its own {server}")));
        all.sort();
        all.dedup();
        all
    }

    /// Logs each such rule once.
    pub fn name_rules(&self, ports: [&[RangeInclusive<u16>]; 2]) {
        let (rules, mut named) = (self.rules(ports), self.named.lock());
        for rule in rules.iter().filter(|rule| !named.contains(rule)) {
            warn!(
                "connections are plain TCP, for a rule of the firewall that is not only about how they begin: {rule}"
            );
        }
        *named = rules;
    }

    pub fn status(&self, ports: [&[RangeInclusive<u16>]; 2]) -> status::Firewall {
        let counts = Verdict::ALL.iter().zip(&self.counts);
        let packets = self.kernel.verdicts().unwrap_or_default();
        status::Firewall {
            is_there: self.has_firewall(),
            rules: self.rules(ports),
            openings: counts
                .map(|(verdict, count)| (verdict.name().to_owned(), count.load(Relaxed)))
                .collect(),
            packets: opening::VERDICTS
                .into_iter()
                .map(str::to_owned)
                .zip(packets)
                .collect::<BTreeMap<_, _>>(),
        }
    }
}

/// A first one, as connections have it.
fn number() -> anyhow::Result<u32> {
    let mut bytes = [0; 4];
    SystemRandom::new().fill(&mut bytes).map_err(|_| anyhow::anyhow!("the system has no random numbers"))?;
    Ok(u32::from_ne_bytes(bytes))
}

fn failed(error: anyhow::Error) -> Verdict {
    debug!("the firewall cannot be asked: {error:#}");
    Verdict::Failed
}
