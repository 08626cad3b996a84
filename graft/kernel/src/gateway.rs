//! A gateway: TCP connections of the hosts behind this one, which BPF programs redirect to this host's tunnel broker
//! instead of forwarding them.
//!
//! The programs need routing rules and routes on the host. If the process is killed, these remain until
//! [`remove_leftovers`] removes them.

mod intf;
mod routing;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use libbpf_rs::{MapCore as _, MapFlags, MapHandle};
use millrace_kernel::clock::in_future;
use millrace_kernel::intf::Plain as _;
use millrace_kernel::object::{LoadedObject, embedded, write};
use millrace_kernel::prefix::Prefix;
use millrace_kernel::tc::{self, KernelHook, Mechanism, TcAttachment, TcPosition};
use nix::libc;
use nix::net::if_::if_nametoindex;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, SockaddrIn, bind, socket};

pub use self::routing::PROTOCOL;
use self::routing::RouteFamily;
use super::diag::Diag;
use super::events::Events;
use super::hook::{RedirectRule, end, first_rule_after, write_rules};
use super::rule::{address, masked, remove};
use super::{Error, hook::intf::End};

/// Largest number of address prefixes of peers, and also largest number of prefixes of inside networks (behind this
/// gateway).
pub const PREFIXES: usize = intf::PREFIXES;

/// Names, in the order of `enum gateway_verdict`, of the BPF programs' verdicts on packets. Status, metrics and
/// documentation use these names.
pub const VERDICTS: [&str; 19] = [
    "other",
    "taken",
    "icmp-error",
    "asked",
    "held",
    "let-in",
    "no-room",
    "no-socket",
    "plain",
    "old",
    "no-rule",
    "outside",
    "wrong-way",
    "no-family",
    "cold",
    "refused",
    "asleep",
    "fragment",
    "malformed",
];

const IN: &str = "gateway_in";
const AGAIN: &str = "gateway_again";
pub(super) const LOOPBACK: &str = "lo";

/// Random number that identifies one daemon process. Each process uses its own packet marks and its own routing table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GatewayRun(pub u16);

impl GatewayRun {
    /// Upper 16 bits of the routing table's number, and of the packet mark of packets from hosts behind the gateway.
    /// The lower 16 bits are the number of the daemon process.
    const BASE: u32 = 0x4d52_0000;
    const BASE_AGAIN: u32 = 0x4d53_0000;

    /// Returns the packet mark by which routing delivers packets from hosts behind the gateway to this host instead of
    /// forwarding them.
    pub fn mark(self) -> u32 {
        Self::BASE | u32::from(self.0)
    }

    /// Returns the packet mark of SYNs that were held back and that the tunnel broker sends again over loopback.
    pub fn mark_again(self) -> u32 {
        Self::BASE_AGAIN | u32::from(self.0)
    }

    /// Returns the number of the routing table that delivers marked packets locally.
    pub fn table(self) -> u32 {
        self.mark()
    }

    /// Shows other processes in this network namespace that the daemon process lives, until the returned raw socket is
    /// closed. The socket is only bound and carries no data. It is a raw socket, since that requires CAP_NET_RAW: an
    /// unprivileged process cannot pretend to be a living daemon.
    fn hold(self) -> io::Result<OwnedFd> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let protocol = SockProtocol::Raw;
        let held = socket(AddressFamily::Inet, SockType::Raw, flags, protocol)?;
        let [a, b, c, d] = self.address().octets();
        bind(held.as_raw_fd(), &SockaddrIn::new(a, b, c, d, 0))?;
        Ok(held)
    }

    /// Returns the loopback address that the daemon's raw socket is bound to: 127.77, followed by the two bytes of the
    /// process's number.
    fn address(self) -> Ipv4Addr {
        let [high, low] = self.0.to_be_bytes();
        Ipv4Addr::new(127, 77, high, low)
    }

    fn is_live(self) -> bool {
        // /proc/thread-self/net/raw lists the raw sockets of this thread's network namespace. If it cannot be read, the
        // daemon process counts as living, so that its rules and routes are not removed.
        std::fs::read_to_string("/proc/thread-self/net/raw").map_or(true, |sockets| self.is_among(&sockets))
    }

    fn is_among(self, sockets: &str) -> bool {
        let address = u32::from_ne_bytes(self.address().octets());
        // The kernel prints the address in network byte order, and the IP protocol in place of a port.
        let own = format!("{address:08X}:{:04X}", libc::IPPROTO_RAW);
        sockets.lines().any(|line| line.split_whitespace().nth(1) == Some(&own))
    }

    fn from_table(table: u32) -> Option<Self> {
        let run = u16::try_from(table & 0xffff).ok()?;
        (table & 0xffff_0000 == Self::BASE).then_some(Self(run))
    }
}

/// Settings of the gateway: the number of the daemon process, and the loopback ports on which the tunnel broker listens
/// with IP_TRANSPARENT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Number of the daemon process to whose broker connections are redirected.
    pub run: GatewayRun,
    /// The tunnel broker's port on 127.0.0.1.
    pub v4: u16,
    /// The tunnel broker's port on `::1`; `None`: IPv6 connections are forwarded instead of redirected.
    pub v6: Option<u16>,
}

/// A connection of a client behind the gateway, identified by the addresses and ports of client and server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GatewayConnection {
    /// The client's address and port.
    pub client: SocketAddr,
    /// The server's address and port.
    pub server: SocketAddr,
}

/// A SYN of a client behind the gateway that the BPF programs have held back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewaySyn {
    /// The connection that the SYN opens.
    pub flow: GatewayConnection,
    /// The SYN's TCP header with its options.
    pub syn: Vec<u8>,
    /// True if the tunnel broker still has a socket in TIME_WAIT with the same addresses and ports; see
    /// [`GatewayPrograms::end_old`].
    pub is_old: bool,
}

/// Events about SYNs that the gateway held back.
pub type GatewaySyns = Events<GatewaySyn>;

/// The loaded programs. They redirect connections from [`attach`](Self::attach) on, until this value is dropped. If the
/// process is killed, its routing rules and routes remain.
pub struct GatewayPrograms {
    run: GatewayRun,
    families: Vec<RouteFamily>,
    interfaces: Vec<String>,
    state: Mutex<GatewayInner>,
    maps: GatewayMaps,
    _live: OwnedFd,
}

struct GatewayInner {
    object: LoadedObject,
    first_rule: usize,
    /// Attached programs, each with the name of its interface; loopback is one of them.
    links: Vec<(String, TcAttachment)>,
    mechanism: Option<Mechanism>,
}

struct GatewayMaps {
    peers: MapHandle,
    inside: MapHandle,
    avoided: MapHandle,
    flows: MapHandle,
    alive: MapHandle,
}

impl GatewayInner {
    /// Attaches a program to the ingress of an interface, if it is not attached yet.
    fn attach(&mut self, interface: &str, program: &'static str) -> Result<(), Error> {
        if self.links.iter().any(|(known, _)| known == interface) {
            return Ok(());
        }
        let index = index(interface)?;
        let program = self.object.program(program)?;
        let link =
            TcAttachment::new(&program, index, KernelHook::Ingress, TcPosition::First, self.mechanism)?;
        self.links.push((interface.to_owned(), link));
        Ok(())
    }
}

impl GatewayPrograms {
    /// Loads the programs. Returns them with the events about SYNs that they hold back.
    ///
    /// # Errors
    /// The kernel refuses a program, or the raw socket that shows that the daemon process lives.
    pub fn load(config: &Config) -> Result<(Self, GatewaySyns), Error> {
        let mut open = embedded!("graft_gateway.bpf.o").open()?;
        open.configure(&intf::Config {
            mark: config.run.mark(),
            mark_again: config.run.mark_again(),
            port4: config.v4,
            port6: config.v6.unwrap_or_default(),
        })?;
        let mut object = open.load()?;
        let maps = GatewayMaps {
            peers: object.handle("peers")?,
            inside: object.handle("inside")?,
            avoided: object.handle("avoided")?,
            flows: object.handle("flows")?,
            alive: object.handle("alive")?,
        };
        let asks = Events::open_ring(&mut object, "asks", |bytes| ask(&intf::RawAsk::from_bytes(bytes)?))?;
        let families = match config.v6 {
            Some(_) => vec![RouteFamily::V4, RouteFamily::V6],
            None => vec![RouteFamily::V4],
        };
        let state = GatewayInner { object, first_rule: 0, links: Vec::new(), mechanism: None };
        let run = config.run;
        let interfaces = Vec::new();
        let state = Mutex::new(state);
        // The raw socket that shows that this daemon process lives is opened before routing rules are added, so that no
        // other process removes them as leftovers.
        let live = run.hold().map_err(Error::Descriptor)?;
        Ok((Self { run, families, interfaces, state, maps, _live: live }, asks))
    }

    /// Attaches the programs to the interfaces of the inside networks, and adds rules and routes. With `mechanism`
    /// `None`, TCX is used if the kernel has it.
    ///
    /// # Errors
    /// An interface does not exist, or the kernel refuses an attachment or a route.
    pub fn attach(&mut self, interfaces: &[String], mechanism: Option<Mechanism>) -> Result<(), Error> {
        self.interfaces = interfaces.to_vec();
        self.state.get_mut().unwrap_or_else(PoisonError::into_inner).mechanism = mechanism;
        self.mend()
    }

    /// Restores attachments, rules and routes that another program removed, and those of an interface that was created
    /// again. Every step is tried; the first error is returned.
    pub fn mend(&self) -> Result<(), Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.links.retain(|(_, link)| link.is_in_place());
        // Lost attachments were dropped above, so this attaches programs only where they are missing.
        let interfaces = self.interfaces.iter().map(|name| (name.as_str(), IN));
        let attached: Vec<_> =
            [(LOOPBACK, AGAIN)].into_iter().chain(interfaces).map(|it| state.attach(it.0, it.1)).collect();
        let routed = routing::add(self.run, &self.families, &self.interfaces).map_err(Error::Routing);
        attached.into_iter().chain([routed]).collect()
    }

    /// Detaches the programs and removes their rules and routes. From now on connections are forwarded instead of
    /// redirected.
    pub fn detach(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).links.clear();
        // If a rule or route cannot be removed now, the next daemon process removes it as a leftover.
        let _ = routing::remove(|run| run == self.run);
    }

    /// Replaces the list of rules. The map has two lists, and the one in force is never written.
    pub fn set_rules(&self, rules: &[RedirectRule]) -> Result<(), Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let first = first_rule_after(state.first_rule);
        write_rules(&mut state.object, first, rules)?;
        state.first_rule = first;
        Ok(())
    }

    /// Adds an inside network. Only connections from inside networks are redirected to the tunnel broker.
    pub fn add_inside(&self, network: Prefix) -> Result<(), Error> {
        Ok(write(&self.maps.inside, "inside", key(network).as_bytes(), &1_u32.to_ne_bytes())?)
    }

    /// Adds a peer's network or address, or changes whether it is `warm`. Connections to the peer are redirected only
    /// while it is warm, which means that a carrier (a connection that tunnels others) to the peer is ready.
    pub fn set_peer(&self, network: Prefix, warm: bool) -> Result<(), Error> {
        Ok(write(&self.maps.peers, "peers", key(network).as_bytes(), &u32::from(warm).to_ne_bytes())?)
    }

    /// Removes a peer's network. Does nothing if the network was not added.
    pub fn forget_peer(&self, network: Prefix) -> Result<(), Error> {
        remove(&self.maps.peers, "peers", key(network).as_bytes())
    }

    /// Makes connections to a server be forwarded for this time, instead of being redirected.
    pub fn avoid(&self, server: SocketAddr, time: Duration) -> Result<(), Error> {
        Ok(write(&self.maps.avoided, "avoided", end(server).as_bytes(), in_future(time).as_bytes())?)
    }

    /// Tells the programs that the tunnel broker will be alive for this time. The broker repeats the call regularly.
    /// Without a call for this time, SYNs are forwarded.
    pub fn stay(&self, time: Duration) -> Result<(), Error> {
        Ok(write(&self.maps.alive, "alive", &0_u32.to_ne_bytes(), in_future(time).as_bytes())?)
    }

    /// Lets the BPF programs deliver a connection's SYN to the tunnel broker from now on. Returns false if the SYN was
    /// forwarded to the server in the meantime.
    pub fn let_in(&self, flow: GatewayConnection) -> Result<bool, Error> {
        let found = self.maps.flows.lookup(raw(flow).as_bytes(), MapFlags::ANY);
        let found = found.map_err(|source| millrace_kernel::Error::Read { what: "flows", source })?;
        let found = found.and_then(|value| intf::State::from_bytes(&value));
        // The server may have answered the forwarded SYN, so the tunnel broker must not answer it as well.
        if found.is_some_and(|it| it.state == intf::FORWARD) {
            return Ok(false);
        }
        self.set(flow, intf::State { state: intf::OPEN, ..intf::State::default() })?;
        Ok(true)
    }

    /// Closes the tunnel broker's socket in TIME_WAIT of an earlier connection with the same addresses, so that a new
    /// one may begin.
    ///
    /// # Errors
    /// The socket is in use, or the kernel does not support SOCK_DESTROY.
    pub fn end_old(&self, flow: GatewayConnection) -> io::Result<()> {
        Diag::open()?.end_waiting((flow.server, flow.client))
    }

    /// Makes a connection's SYN be forwarded for this time, instead of being held back.
    pub fn forward(&self, flow: GatewayConnection, time: Duration) -> Result<(), Error> {
        self.set(flow, intf::State { state: intf::FORWARD, until_ns: in_future(time), pad: 0 })
    }

    /// Removes a connection's entry, so that its next SYN is handled as a first one.
    pub fn forget(&self, flow: GatewayConnection) -> Result<(), Error> {
        remove(&self.maps.flows, "flows", raw(flow).as_bytes())
    }

    fn set(&self, flow: GatewayConnection, state: intf::State) -> Result<(), Error> {
        Ok(write(&self.maps.flows, "flows", raw(flow).as_bytes(), state.as_bytes())?)
    }

    /// Returns the number of packets by verdict, in the order of [`VERDICTS`].
    pub fn verdicts(&self) -> Result<Vec<u64>, Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(state.object.counters("verdicts")?)
    }
}

impl Drop for GatewayPrograms {
    fn drop(&mut self) {
        self.detach();
    }
}

/// Removes rules and routes that killed processes left in the calling thread's network namespace. They are those of the
/// given daemon process, or of all daemon processes that have ended. Returns how many were removed.
pub fn remove_leftovers(run: Option<GatewayRun>) -> io::Result<usize> {
    routing::remove(|other| run.map_or_else(|| !other.is_live(), |run| run == other))
}

/// Removes gateway programs that killed processes left on these interfaces and on loopback, which happens with TC
/// without links. Does nothing while any daemon process lives, since the programs of all processes have the same names.
pub fn remove_programs(interfaces: &[String]) {
    if !routing::runs().is_ok_and(|runs| !runs.into_iter().any(GatewayRun::is_live)) {
        return;
    }
    let all = interfaces.iter().map(|name| (name.as_str(), IN)).chain([(LOOPBACK, AGAIN)]);
    for (interface, program) in all {
        if let Ok(index) = index(interface) {
            let _ = tc::remove_leftovers(index, KernelHook::Ingress, program);
        }
    }
}

fn index(interface: &str) -> Result<i32, Error> {
    let unknown = || Error::NoInterface(interface.to_owned());
    if_nametoindex(interface).ok().and_then(|index| i32::try_from(index).ok()).ok_or_else(unknown)
}

fn key(network: Prefix) -> intf::PrefixKey {
    let (address, mask) = masked(network);
    // The LPM trie contains IPv4 addresses in mapped form, so IPv4 prefixes are 96 bits longer.
    intf::PrefixKey { bits: u128::from_be_bytes(mask).leading_ones(), address }
}

fn raw(flow: GatewayConnection) -> intf::RawFlow {
    intf::RawFlow { client: end(flow.client), server: end(flow.server) }
}

fn ask(raw: &intf::RawAsk) -> Option<GatewaySyn> {
    let at = |end: &End| SocketAddr::new(address(end.address), end.port);
    let syn = raw.syn.get(..raw.bytes as usize)?.to_vec();
    let flow = GatewayConnection { client: at(&raw.flow.client), server: at(&raw.flow.server) };
    Some(GatewaySyn { flow, syn, is_old: raw.old != 0 })
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{self, UnixDatagram};

    use super::*;

    /// Only a privileged process can show that a daemon process lives. Otherwise any process could prevent that the
    /// leftovers of a killed daemon are removed.
    #[test]
    fn unprivileged_process_cannot_make_an_ended_gateway_look_alive() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP unprivileged_process_cannot_make_an_ended_gateway_look_alive: needs root");
            return;
        }
        let run = GatewayRun(40_000 + (std::process::id() % 20_000) as u16);
        let name = net::SocketAddr::from_abstract_name(format!("millrace-gateway-{}", run.0));
        let _stranger = UnixDatagram::bind_addr(&name.expect("a name")).expect("bind");
        assert!(!run.is_live());
        let held = run.hold().expect("a raw socket");
        assert!(run.is_live() && !GatewayRun(run.0 - 1).is_live());
        // A daemon process counts as living while at least one of its raw sockets is open.
        drop(run.hold());
        assert!(run.is_live());
        drop(held);
        assert!(!run.is_live());
    }
}
