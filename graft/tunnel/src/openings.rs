//! Asks the firewall of this host whether connections may be tunnelled. For each connection the tunnel broker sends a
//! SYN and its answer through netfilter, with the true addresses and owner. Both test packets are dropped after the
//! last hook that could reject them. A connection whose first packets do not pass stays plain TCP, and the firewall
//! handles it as usual. Without a firewall no packet is sent.

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
    hook::SocketOwner,
    opening::{self, OpeningPrograms as Kernel},
};
use millrace_kernel::neighbour::NextHop;
use parking_lot::Mutex;
use ring::rand::{SecureRandom as _, SystemRandom};
use socket2::{Domain, Protocol, Socket, Type};
use tracing::{debug, warn};

use super::{
    firewall::{ConnectionEnd, FirewallRules},
    listeners::BoundListeners,
    owner::socket_of,
    syn,
};

/// IPPROTO_RAW: a socket of this protocol sends packets that include their IP header.
const PROTOCOL_RAW: i32 = 255;
/// Time limit for a test packet to pass INPUT. Mostly it has passed before the first check.
const PATIENCE: Duration = Duration::from_millis(250);
/// Interval of checks whether a test packet has passed.
const LOOK: Duration = Duration::from_millis(1);
/// Time for which connections to a server stay plain TCP after this host's firewall has blocked the tunnel broker's own
/// connection to that server.
const UNREACHED: Duration = Duration::from_secs(60);
const UNREACHED_MOST: usize = 1024;

macro_rules! verdicts {
    ($($(#[$doc:meta])* $name:ident = $text:literal),* $(,)?) => {
        /// The firewall's verdict on a connection.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Verdict { $($(#[$doc])* $name),* }

        impl Verdict {
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Returns the verdict's name in status, metrics and documentation.
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }
        }
    };
}

verdicts! {
    /// The host has no firewall, so the connection is tunnelled.
    NoFirewall = "no-firewall",
    /// The firewall accepts the connection's first packets, so the connection is tunnelled.
    Passes = "passes",
    /// OUTPUT or POSTROUTING drops the first packet, or queues it for a program in user space.
    Output = "output",
    /// PREROUTING or INPUT does not accept the first packet.
    Input = "input",
    /// The firewall changes the addresses or ports of the first packet (NAT).
    Translated = "translated",
    /// A rule examines more than the first packets of connections, so the connection stays plain TCP.
    Rule = "rule",
    /// This host's firewall blocks the tunnel broker's connections to the host's own server.
    Loopback = "loopback",
    /// The firewall's verdict cannot be determined. The log says why at level debug.
    Failed = "failed",
}

/// Determines whether the firewall accepts connections, and counts its verdicts.
pub struct TunnelOpenings {
    kernel: Kernel,
    /// Listeners to which incoming test packets are assigned once they have passed the chain INPUT.
    _ends: BoundListeners,
    firewall: Mutex<FirewallRules>,
    /// Firewall rules that force connections to be plain TCP, and that were already logged.
    named: Mutex<Vec<String>>,
    /// Servers of this host to which the firewall blocks the tunnel broker's own connections, with the time of the
    /// blocked attempt.
    unreached: Mutex<HashMap<SocketAddr, Instant>>,
    counts: [AtomicU64; Verdict::ALL.len()],
}

impl TunnelOpenings {
    /// Loads the BPF programs and attaches them. `cgroup` is the cgroup of this process.
    pub fn load(cgroup: &Path) -> anyhow::Result<Self> {
        let kernel = Kernel::load(cgroup)?;
        let ends = BoundListeners::nowhere()?;
        for (socket, is_v6) in ends.sockets().zip([false, true]) {
            kernel.end_at(socket, is_v6)?;
        }
        let firewall = Mutex::default();
        let named = Mutex::default();
        let unreached = Mutex::default();
        Ok(Self { kernel, _ends: ends, firewall, named, unreached, counts: Default::default() })
    }

    /// Reports whether this host's firewall accepts a connection of one of its applications: the SYN in the chain
    /// OUTPUT, and the server's answer in INPUT.
    pub async fn let_out(&self, client: SocketAddr, server: SocketAddr, owner: SocketOwner) -> bool {
        let verdict = match self.ask_first(server, ConnectionEnd::Client) {
            Some(verdict) => verdict,
            None => self.begin(client, server, owner).await.unwrap_or_else(failed),
        };
        self.count(verdict, client, server)
    }

    /// Reports whether this host's firewall accepts a connection to one of its servers: the SYN in the chain INPUT, and
    /// the answer of the server's `owner` in OUTPUT. `owner` is `None` if nobody listens.
    pub async fn let_in(&self, client: SocketAddr, server: SocketAddr, owner: Option<SocketOwner>) -> bool {
        let verdict = match self.ask_first(server, ConnectionEnd::Server) {
            Some(verdict) => verdict,
            None => self.receive(client, server, owner).await.unwrap_or_else(failed),
        };
        self.count(verdict, client, server)
    }

    /// Reports whether this host has a firewall, which may also examine packets on loopback.
    pub fn has_firewall(&self) -> bool {
        self.firewall.lock().is_there()
    }

    /// Remembers for the time `UNREACHED` that this host's firewall blocks the tunnel broker's connections to a server
    /// of this host.
    pub fn note_unreached(&self, server: SocketAddr) {
        let mut unreached = self.unreached.lock();
        if unreached.len() < UNREACHED_MOST {
            unreached.insert(server, Instant::now());
        }
        drop(unreached);
        warn!(%server, "the firewall blocks connections of this host to its own server on lo, so connections to the server are plain TCP: add a rule that accepts input from lo");
    }

    /// Returns the verdict, if it is known without a test packet.
    fn ask_first(&self, server: SocketAddr, end: ConnectionEnd) -> Option<Verdict> {
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
        (end == ConnectionEnd::Server && unreached.contains_key(&server)).then_some(Verdict::Loopback)
    }

    async fn begin(
        &self,
        client: SocketAddr,
        server: SocketAddr,
        owner: SocketOwner,
    ) -> anyhow::Result<Verdict> {
        let ours = number()?;
        let theirs = number()?;
        // This host is the client's. Its outgoing SYN is tested first, and then the server's incoming answer.
        match self.send(client, server, owner, ours, None)? {
            Verdict::Passes => self.take(server, client, theirs, Some(ours)).await,
            verdict => Ok(verdict),
        }
    }

    async fn receive(
        &self,
        client: SocketAddr,
        server: SocketAddr,
        owner: Option<SocketOwner>,
    ) -> anyhow::Result<Verdict> {
        let theirs = number()?;
        let ours = number()?;
        // This host is the server's. The client's incoming SYN is tested first, and then the server's outgoing answer.
        match (self.take(client, server, theirs, None).await?, owner) {
            (Verdict::Passes, Some(owner)) => self.send(server, client, owner, ours, Some(theirs)),
            (verdict, _) => Ok(verdict),
        }
    }

    /// Sends a test packet, and reports whether it passes the firewall. A packet that waits for a verdict of a program
    /// in user space counts as blocked.
    fn send(
        &self,
        from: SocketAddr,
        to: SocketAddr,
        owner: SocketOwner,
        number: u32,
        answers: Option<u32>,
    ) -> anyhow::Result<Verdict> {
        let packet = test_packet(from, to, number, answers)?;
        let protocol = Some(Protocol::from(PROTOCOL_RAW));
        // The socket belongs to the application's user, whom the firewall's rules may match.
        let socket = socket_of(owner, || Socket::new(Domain::for_address(to), Type::RAW, protocol))?;
        self.kernel.watch(socket.as_fd())?;
        // Every send fails, since a BPF program drops the packet after the firewall. A raw IPv6 socket rejects a port.
        let _ = socket.send_to(&packet, &SocketAddr::new(to.ip(), 0).into());
        Ok(match self.kernel.passed_out(socket.as_fd())? {
            Some(ends) if ends == (from, to) => Verdict::Passes,
            // The packet left with other addresses or ports than it was sent with, so NAT has changed it.
            Some(_) => Verdict::Translated,
            None => Verdict::Output,
        })
    }

    /// Injects a test packet as if it had arrived from the connection's remote host, and reports whether it passes the
    /// firewall.
    async fn take(
        &self,
        from: SocketAddr,
        to: SocketAddr,
        number: u32,
        answers: Option<u32>,
    ) -> anyhow::Result<Verdict> {
        let packet = test_packet(from, to, number, answers)?;
        let hop = NextHop::find_route(to.ip(), from.ip())?;
        let due = self.kernel.expect(from, to, hop.interface())?;
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

    /// Counts the verdict. Returns whether it permits tunnelling the connection.
    fn count(&self, verdict: Verdict, client: SocketAddr, server: SocketAddr) -> bool {
        self.counts[verdict as usize].fetch_add(1, Relaxed);
        let passes = matches!(verdict, Verdict::Passes | Verdict::NoFirewall);
        if !passes {
            debug!(%client, %server, "the firewall does not let the connection be tunnelled: {:?}", verdict.name());
        }
        passes
    }

    /// Returns the ports among `wanted` to which connections of this host have to be plain TCP.
    pub fn plain_ports(&self, wanted: &[RangeInclusive<u16>]) -> Vec<RangeInclusive<u16>> {
        let mut firewall = self.firewall.lock();
        firewall.refresh();
        let mut plain = Vec::new();
        for obstacle in wanted.iter().flat_map(|ports| firewall.obstacles(ports, ConnectionEnd::Client)) {
            if !plain.contains(&obstacle.ports) {
                plain.push(obstacle.ports);
            }
        }
        plain
    }

    /// Returns the firewall rules that force connections to be plain TCP. The first list has the server ports of
    /// connections in which this host is the client, and the second those in which it is the server.
    fn rules(&self, ports: [&[RangeInclusive<u16>]; 2]) -> Vec<String> {
        let firewall = self.firewall.lock();
        let mut all = Vec::new();
        for (ports, end) in ports.into_iter().zip([ConnectionEnd::Client, ConnectionEnd::Server]) {
            let found = ports.iter().flat_map(|ports| firewall.obstacles(ports, end));
            all.extend(found.map(|obstacle| obstacle.what));
        }
        drop(firewall);
        let unreached = self.unreached.lock();
        all.extend(unreached.keys().map(|server| {
            format!("lo: the firewall does not let this host connect to its own server {server}")
        }));
        all.sort();
        all.dedup();
        all
    }

    /// Logs each rule that forces connections to be plain TCP, once.
    pub fn name_rules(&self, ports: [&[RangeInclusive<u16>]; 2]) {
        let rules = self.rules(ports);
        let mut named = self.named.lock();
        for rule in rules.iter().filter(|rule| !named.contains(rule)) {
            warn!(
                "connections are plain TCP because of a firewall rule that examines more than their first packets: {rule}"
            );
        }
        *named = rules;
    }

    pub fn status(&self, ports: [&[RangeInclusive<u16>]; 2]) -> status::FirewallStatus {
        let counts = Verdict::ALL.iter().zip(&self.counts);
        let packets = self.kernel.verdicts().unwrap_or_default();
        status::FirewallStatus {
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

/// Returns a test packet: a SYN with this sequence number, or a SYN-ACK for the SYN with the number `answers`.
fn test_packet(
    from: SocketAddr,
    to: SocketAddr,
    number: u32,
    answers: Option<u32>,
) -> anyhow::Result<Vec<u8>> {
    let segment = syn::first(from.port(), to.port(), number, answers);
    syn::packet(from.ip(), to.ip(), &segment)
        .context("the addresses of client and server are of different families")
}

/// Returns a random initial sequence number for a test packet.
fn number() -> anyhow::Result<u32> {
    let mut bytes = [0; 4];
    SystemRandom::new().fill(&mut bytes).map_err(|_| anyhow::anyhow!("the system has no random numbers"))?;
    Ok(u32::from_ne_bytes(bytes))
}

fn failed(error: anyhow::Error) -> Verdict {
    debug!("cannot test whether this host's firewall accepts a connection: {error:#}");
    Verdict::Failed
}
