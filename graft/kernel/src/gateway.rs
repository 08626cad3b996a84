//! TCP connections of hosts behind this one, which are given to this host's broker instead of being forwarded.
//!
//! Besides the programs there are rules and routes of the host's, which outlive the process that has made them:
//! [`remove_leftovers`] finds them.

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
use millrace_kernel::object::{Loaded, embedded, write};
use millrace_kernel::prefix::Prefix;
use millrace_kernel::tc::{self, Attachment, Hook, Mechanism, Position};
use nix::libc;
use nix::net::if_::if_nametoindex;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, SockaddrIn, bind, socket};

use self::routing::Family;
pub use self::routing::PROTOCOL;
use super::diag::Diag;
use super::events::Events;
use super::hook::{Lead, end, first_rule_after, write_rules};
use super::rule::{address, masked, remove};
use super::{Error, hook::intf::End};

/// Prefixes that there is room for, of peers and of this host each.
pub const PREFIXES: usize = intf::PREFIXES;

/// What becomes of packets, as status, metrics and the documentation call it.
pub const VERDICTS: [&str; 19] = [
    "other",
    "taken",
    "told",
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

/// The number of a run, by which its marks and its table are told from those of others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run(pub u16);

impl Run {
    /// Of all runs: the upper half of marks and tables.
    const BASE: u32 = 0x4d52_0000;
    const BASE_AGAIN: u32 = 0x4d53_0000;

    /// Of packets of hosts behind this one.
    pub fn mark(self) -> u32 {
        Self::BASE | u32::from(self.0)
    }

    /// Of SYNs that are sent once more.
    pub fn mark_again(self) -> u32 {
        Self::BASE_AGAIN | u32::from(self.0)
    }

    pub fn table(self) -> u32 {
        self.mark()
    }

    /// Marks the run as a live one in this network namespace, until the returned raw socket is closed. It sends and
    /// receives nothing. Nobody else can make one without a privilege; names and ports anybody may take.
    fn hold(self) -> io::Result<OwnedFd> {
        let (flags, protocol) = (SockFlag::SOCK_CLOEXEC, SockProtocol::Raw);
        let held = socket(AddressFamily::Inet, SockType::Raw, flags, protocol)?;
        let [a, b, c, d] = self.address().octets();
        bind(held.as_raw_fd(), &SockaddrIn::new(a, b, c, d, 0))?;
        Ok(held)
    }

    /// Returns the address of loopback that its raw socket has.
    fn address(self) -> Ipv4Addr {
        let [high, low] = self.0.to_be_bytes();
        Ipv4Addr::new(127, 77, high, low)
    }

    fn is_live(self) -> bool {
        // Of this thread's network namespace. Where it cannot be read nothing is taken away.
        std::fs::read_to_string("/proc/thread-self/net/raw").map_or(true, |sockets| self.is_among(&sockets))
    }

    fn is_among(self, sockets: &str) -> bool {
        let address = u32::from_ne_bytes(self.address().octets());
        let own = format!("{address:08X}:{:04X}", libc::IPPROTO_RAW);
        sockets.lines().any(|line| line.split_whitespace().nth(1) == Some(&own))
    }

    fn of_table(table: u32) -> Option<Self> {
        let run = u16::try_from(table & 0xffff).ok()?;
        (table & 0xffff_0000 == Self::BASE).then_some(Self(run))
    }
}

/// Where the broker listens, transparently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    pub run: Run,
    /// On 127.0.0.1.
    pub v4: u16,
    /// On `::1`; `None`: IPv6 is forwarded.
    pub v6: Option<u16>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Flow {
    pub client: SocketAddr,
    pub server: SocketAddr,
}

/// A SYN that was held back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    pub flow: Flow,
    /// Its TCP header with options.
    pub syn: Vec<u8>,
    /// The socket of a connection before, between the same ends, waits: see [`Gateway::end_old`].
    pub is_old: bool,
}

/// The SYNs, as they come.
pub type Asks = Events<Ask>;

/// The programs, loaded. They act from [`attach`](Self::attach) on and until this is dropped, but for what is left of its routing
/// if this process is killed.
pub struct Gateway {
    run: Run,
    families: Vec<Family>,
    interfaces: Vec<String>,
    state: Mutex<State>,
    maps: Maps,
    _live: OwnedFd,
}

struct State {
    object: Loaded,
    first_rule: usize,
    /// By interface; the last is loopback.
    links: Vec<(String, Attachment)>,
    mechanism: Option<Mechanism>,
}

struct Maps {
    peers: MapHandle,
    inside: MapHandle,
    avoided: MapHandle,
    flows: MapHandle,
    alive: MapHandle,
}

impl State {
    /// If it is not.
    fn attach(&mut self, (interface, program): (&str, &'static str)) -> Result<(), Error> {
        if self.links.iter().any(|(known, _)| known == interface) {
            return Ok(());
        }
        let index = index(interface)?;
        let program = self.object.program(program)?;
        let link = Attachment::new(&program, index, Hook::Ingress, Position::First, self.mechanism)?;
        self.links.push((interface.to_owned(), link));
        Ok(())
    }
}

impl Gateway {
    /// # Errors
    /// The kernel refuses.
    pub fn load(config: &Config) -> Result<(Self, Asks), Error> {
        let mut open = embedded!("graft_gateway.bpf.o").open()?;
        open.configure(&intf::Config {
            mark: config.run.mark(),
            mark_again: config.run.mark_again(),
            port4: config.v4,
            port6: config.v6.unwrap_or_default(),
        })?;
        let mut object = open.load()?;
        let maps = Maps {
            peers: object.handle("peers")?,
            inside: object.handle("inside")?,
            avoided: object.handle("avoided")?,
            flows: object.handle("flows")?,
            alive: object.handle("alive")?,
        };
        let asks = Events::of(&mut object, "asks", |bytes| ask(&intf::RawAsk::from_bytes(bytes)?))?;
        let families = match config.v6 {
            Some(_) => vec![Family::V4, Family::V6],
            None => vec![Family::V4],
        };
        let state = State { object, first_rule: 0, links: Vec::new(), mechanism: None };
        let (run, interfaces, state) = (config.run, Vec::new(), Mutex::new(state));
        let live = run.hold().map_err(Error::Descriptor)?;
        Ok((Self { run, families, interfaces, state, maps, _live: live }, asks))
    }

    /// Where packets of hosts behind this one come in. `mechanism` `None` takes TCX where the kernel has it.
    ///
    /// # Errors
    /// There is no such interface, or the kernel refuses.
    pub fn attach(&mut self, interfaces: &[String], mechanism: Option<Mechanism>) -> Result<(), Error> {
        self.interfaces = interfaces.to_vec();
        self.state.get_mut().unwrap_or_else(PoisonError::into_inner).mechanism = mechanism;
        self.mend()
    }

    /// Puts back what somebody else has taken away: programs, rules, routes. An interface that is there again has its program again. All is
    /// tried before an error is returned, the first one.
    pub fn mend(&self) -> Result<(), Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.links.retain(|(_, link)| link.is_in_place());
        let interfaces = self.interfaces.iter().map(|name| (name.as_str(), IN));
        let attached: Vec<_> =
            [(LOOPBACK, AGAIN)].into_iter().chain(interfaces).map(|it| state.attach(it)).collect();
        let routed = routing::add(self.run, &self.families, &self.interfaces).map_err(Error::Routing);
        attached.into_iter().chain([routed]).collect()
    }

    /// Nothing is given to the broker any more.
    pub fn detach(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).links.clear();
        // What cannot be removed now is removed by the next one.
        let _ = routing::remove(|run| run == self.run);
    }

    /// These and no others.
    pub fn set_rules(&self, rules: &[Lead]) -> Result<(), Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let first = first_rule_after(state.first_rule);
        write_rules(&mut state.object, first, rules)?;
        state.first_rule = first;
        Ok(())
    }

    /// Clients of these are carried.
    pub fn add_inside(&self, network: Prefix) -> Result<(), Error> {
        Ok(write(&self.maps.inside, "inside", key(network).as_bytes(), &1_u32.to_ne_bytes())?)
    }

    /// A peer's network, or its host. `warm`: from now on connections to it are carried, or they are not.
    pub fn set_peer(&self, network: Prefix, warm: bool) -> Result<(), Error> {
        Ok(write(&self.maps.peers, "peers", key(network).as_bytes(), &u32::from(warm).to_ne_bytes())?)
    }

    /// Nothing happens if nothing was known of it.
    pub fn forget_peer(&self, network: Prefix) -> Result<(), Error> {
        remove(&self.maps.peers, "peers", key(network).as_bytes())
    }

    /// For so long, connections to this server are forwarded.
    pub fn avoid(&self, server: SocketAddr, time: Duration) -> Result<(), Error> {
        Ok(write(&self.maps.avoided, "avoided", end(server).as_bytes(), in_future(time).as_bytes())?)
    }

    /// The broker is there, and will say so again within this time. Else SYNs are forwarded.
    pub fn stay(&self, time: Duration) -> Result<(), Error> {
        Ok(write(&self.maps.alive, "alive", &0_u32.to_ne_bytes(), in_future(time).as_bytes())?)
    }

    /// Its SYN may come in from now on. Returns whether that is so: if it was forwarded meanwhile, it may not.
    pub fn let_in(&self, flow: Flow) -> Result<bool, Error> {
        let found = self.maps.flows.lookup(raw(flow).as_bytes(), MapFlags::ANY);
        let found = found.map_err(|source| millrace_kernel::Error::Read { what: "flows", source })?;
        let found = found.and_then(|value| intf::State::from_bytes(&value));
        if found.is_some_and(|it| it.state == intf::FORWARD) {
            return Ok(false);
        }
        self.set(flow, intf::State { state: intf::OPEN, ..intf::State::default() })?;
        Ok(true)
    }

    /// There is room for another connection with these ends, before the socket of the last one has waited for its time.
    ///
    /// # Errors
    /// The kernel cannot end it, or it is in use.
    pub fn end_old(&self, flow: Flow) -> io::Result<()> {
        Diag::open()?.end_waiting((flow.server, flow.client))
    }

    /// Its SYN is forwarded from now on, for so long.
    pub fn forward(&self, flow: Flow, time: Duration) -> Result<(), Error> {
        self.set(flow, intf::State { state: intf::FORWARD, until_ns: in_future(time), pad: 0 })
    }

    /// Its next SYN is judged as if it was the first.
    pub fn forget(&self, flow: Flow) -> Result<(), Error> {
        remove(&self.maps.flows, "flows", raw(flow).as_bytes())
    }

    fn set(&self, flow: Flow, state: intf::State) -> Result<(), Error> {
        Ok(write(&self.maps.flows, "flows", raw(flow).as_bytes(), state.as_bytes())?)
    }

    /// By [`VERDICTS`].
    pub fn verdicts(&self) -> Result<Vec<u64>, Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(state.object.counters("verdicts")?)
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.detach();
    }
}

/// Rules and routes that processes which were killed have left, of one run or of all that are not live, in the calling thread's network
/// namespace. Returns how many there were.
pub fn remove_leftovers(run: Option<Run>) -> io::Result<usize> {
    routing::remove(|other| run.map_or_else(|| !other.is_live(), |run| run == other))
}

/// And their programs on these interfaces, where the kernel leaves them. Interfaces that are gone have taken them along. Those of a run that
/// is live have the same names: then all stay, and the next that cleans up takes them.
pub fn remove_programs(interfaces: &[String]) {
    if !routing::runs().is_ok_and(|runs| !runs.into_iter().any(Run::is_live)) {
        return;
    }
    let all = interfaces.iter().map(|name| (name.as_str(), IN)).chain([(LOOPBACK, AGAIN)]);
    for (interface, program) in all {
        if let Ok(index) = index(interface) {
            let _ = tc::remove_leftovers(index, Hook::Ingress, program);
        }
    }
}

fn index(interface: &str) -> Result<i32, Error> {
    let unknown = || Error::NoInterface(interface.to_owned());
    if_nametoindex(interface).ok().and_then(|index| i32::try_from(index).ok()).ok_or_else(unknown)
}

fn key(network: Prefix) -> intf::PrefixKey {
    let (address, mask) = masked(network);
    intf::PrefixKey { bits: u128::from_be_bytes(mask).leading_ones(), address }
}

fn raw(flow: Flow) -> intf::RawFlow {
    intf::RawFlow { client: end(flow.client), server: end(flow.server) }
}

fn ask(raw: &intf::RawAsk) -> Option<Ask> {
    let at = |end: &End| SocketAddr::new(address(end.address), end.port);
    let syn = raw.syn.get(..raw.bytes as usize)?.to_vec();
    let flow = Flow { client: at(&raw.flow.client), server: at(&raw.flow.server) };
    Some(Ask { flow, syn, is_old: raw.old != 0 })
}

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{self, UnixDatagram};

    use super::*;

    /// Anybody may take a name or a port, and would make what a killed run has left look alive.
    #[test]
    fn run_is_live_by_nothing_that_everybody_may_have() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP run_is_live_by_nothing_that_everybody_may_have: needs root");
            return;
        }
        let run = Run(40_000 + (std::process::id() % 20_000) as u16);
        let name = net::SocketAddr::from_abstract_name(format!("millrace-gateway-{}", run.0));
        let _stranger = UnixDatagram::bind_addr(&name.expect("a name")).expect("bind");
        assert!(!run.is_live());
        let held = run.hold().expect("a raw socket");
        assert!(run.is_live() && !Run(run.0 - 1).is_live());
        // Another one takes nothing away.
        drop(run.hold());
        assert!(run.is_live());
        drop(held);
        assert!(!run.is_live());
    }
}
