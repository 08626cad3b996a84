//! `millrace-lab lab`: networks out of namespaces and emulated links.
//!
//! [`Lab::new`] builds a [`Topology`]; dropping the lab removes everything, processes inside included. A lab
//! whose owner died without dropping it is removed when the next one starts, or by [`clean`]; a process that
//! should not die by a signal without dropping its labs calls [`remove_on_signal`].
//!
//! ```no_run
//! use millrace_lab::lab::{Direction, Impairment, Lab, Topology};
//!
//! # fn main() -> anyhow::Result<()> {
//! let mut topology = Topology::standard(1, 2);
//! topology.link_mut("pub-relay")?.emulate = true;
//! let lab = Lab::new(&topology)?;
//! let relay = lab.node("relay")?;
//! println!("{} {}", relay.addr_v4(), relay.addr_v6());
//! lab.link("pub-relay")?.set(Direction::Forward, Impairment::parse("delay=10ms loss=1%")?)?;
//! lab.node("pub")?.command("ip").arg("address").status()?;
//! # Ok(())
//! # }
//! ```

mod accuracy;
mod build;
mod cli;
mod control;
mod emulator;
mod impair;
mod netem;
mod netns;
mod registry;
mod shape;
mod signals;
mod tap;
mod topology;

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

pub use cli::{Args, run};
pub use impair::{Error as SettingError, Impairment, JitterShape, Settings};
pub use netns::Netns;
pub use registry::clean;
pub use shape::{Counters, Shaper};
pub use signals::remove_on_signal;
pub use tap::Tap;
pub use topology::{Direction, Directions, Error as TopologyError, Event, Interface, LinkSpec, Topology};

use control::Background;
use emulator::Wire;
use netem::Qdisc;
use registry::Claim;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("a lab needs root: it makes network namespaces")]
    NotRoot,
    #[error(transparent)]
    Topology(#[from] TopologyError),
    #[error(transparent)]
    Setting(#[from] SettingError),
    #[error("cannot {what}: {source}")]
    Io { what: String, source: std::io::Error },
    #[error("{program}: {text}")]
    Command { program: String, text: String },
    #[error("there is no node `{name}`; there are: {known}")]
    NoNode { name: String, known: String },
    #[error("link `{0}` is a plain veth; give it `emulate = true` to change it while it is up")]
    NotEmulated(String),
    #[error("link `{0}` is netem's, which cannot do that; give it `emulate = true`")]
    NotByNetem(String),
    #[error("{0}")]
    Invalid(String),
}

/// A network that is up, until it is dropped.
pub struct Lab {
    // Order of removal: first what uses the links, then the links, then the namespaces.
    _background: Background,
    net: Arc<Net>,
}

impl Lab {
    /// Builds the topology and starts its events. Needs root, `ip`, `nsenter` and `ethtool`.
    pub fn new(topology: &Topology) -> Result<Self> {
        if !nix::unistd::geteuid().is_root() {
            return Err(Error::NotRoot);
        }
        topology.validate()?;
        let net = Arc::new(build::build(topology)?);
        let background = Background::start(net.clone(), topology.events.clone())?;
        Ok(Self { _background: background, net })
    }

    /// `mr-PID.N`: the prefix of its namespaces, and its name for `millrace-lab lab --lab`.
    pub fn id(&self) -> &str {
        self.net.claim.id()
    }

    pub fn nodes(&self) -> &[Node] {
        &self.net.nodes
    }

    pub fn links(&self) -> &[Link] {
        &self.net.links
    }

    pub fn node(&self, name: &str) -> Result<&Node> {
        self.net.node(name)
    }

    pub fn link(&self, name: &str) -> Result<&Link> {
        self.net.link(name)
    }
}

/// What is built, shared with the threads that serve it.
struct Net {
    nodes: Vec<Node>,
    links: Vec<Link>,
    // Last: links end before their namespaces.
    claim: Claim,
}

impl Net {
    fn node(&self, name: &str) -> Result<&Node> {
        self.nodes.iter().find(|node| node.name == name).ok_or_else(|| Error::NoNode {
            name: name.into(),
            known: self.nodes.iter().map(|node| node.name.as_str()).collect::<Vec<_>>().join(", "),
        })
    }

    fn link(&self, name: &str) -> Result<&Link> {
        self.links.iter().find(|link| link.name == name).ok_or_else(|| {
            let known = self.links.iter().map(|link| link.name.clone()).collect();
            TopologyError::NoLink { name: name.into(), known }.into()
        })
    }
}

/// A host of the lab: a network namespace with an interface per link.
pub struct Node {
    name: String,
    netns: Netns,
    interfaces: Vec<Interface>,
}

impl Node {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    pub fn interfaces(&self) -> &[Interface] {
        &self.interfaces
    }

    /// The interface on a link; its `device` is `to-PEER`.
    pub fn interface(&self, link: &str) -> Option<&Interface> {
        self.interfaces.iter().find(|interface| interface.link == link)
    }

    /// The address on the node's first link. Every node reaches every address of every other.
    pub fn addr_v4(&self) -> Ipv4Addr {
        self.interfaces.first().map_or(Ipv4Addr::LOCALHOST, |interface| interface.v4)
    }

    /// The address on the node's first link.
    pub fn addr_v6(&self) -> Ipv6Addr {
        self.interfaces.first().map_or(Ipv6Addr::LOCALHOST, |interface| interface.v6)
    }

    /// A command that runs inside; the child's process ID is the program's.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> std::process::Command {
        self.netns.command(program)
    }

    /// Runs `work` on a thread inside: sockets and processes made there stay inside.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        self.netns.enter(work)
    }
}

/// A point-to-point link between two nodes.
pub struct Link {
    name: String,
    ends: [String; 2],
    wires: Option<Wires>,
}

struct Wires {
    forward: Driver,
    backward: Driver,
}

/// What impairs one direction.
enum Driver {
    Emulator(Wire),
    Netem(Qdisc),
}

impl Driver {
    fn settings(&self) -> Impairment {
        match self {
            Driver::Emulator(wire) => wire.settings(),
            Driver::Netem(qdisc) => qdisc.settings(),
        }
    }

    fn set(&self, impairment: Impairment) -> Result<()> {
        match self {
            Driver::Emulator(wire) => {
                wire.set(impairment);
                Ok(())
            }
            Driver::Netem(qdisc) => qdisc.set(impairment),
        }
    }

    fn change(&self, settings: &Settings) -> Result<()> {
        match self {
            Driver::Emulator(wire) => wire.change(settings),
            Driver::Netem(qdisc) => qdisc.change(settings),
        }
    }

    fn counters(&self) -> Result<Counters> {
        match self {
            Driver::Emulator(wire) => Ok(wire.counters()),
            Driver::Netem(qdisc) => qdisc.counters(),
        }
    }
}

impl Link {
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Node names; `Forward` is from the first to the second.
    pub fn ends(&self) -> [&str; 2] {
        [&self.ends[0], &self.ends[1]]
    }

    /// Whether it can be changed while it is up.
    pub fn is_emulated(&self) -> bool {
        self.wires.is_some()
    }

    /// Whether the kernel's netem impairs it, and not the emulator.
    pub fn is_netem(&self) -> bool {
        matches!(&self.wires, Some(Wires { forward: Driver::Netem(_), .. }))
    }

    /// Replaces what the link does in one direction.
    pub fn set(&self, direction: Direction, impairment: Impairment) -> Result<()> {
        self.wire(direction)?.set(impairment)
    }

    /// Changes what the settings name, and leaves the rest.
    pub fn change(&self, directions: Directions, settings: &Settings) -> Result<()> {
        directions.each().iter().try_for_each(|direction| self.wire(*direction)?.change(settings))
    }

    /// What the link does now; perfect for a plain veth.
    pub fn impairment(&self, direction: Direction) -> Impairment {
        self.wire(direction).map(Driver::settings).unwrap_or_default()
    }

    /// Frame counts since the lab came up; none for a plain veth.
    pub fn counters(&self, direction: Direction) -> Option<Counters> {
        self.wire(direction).and_then(Driver::counters).ok()
    }

    fn wire(&self, direction: Direction) -> Result<&Driver> {
        let wires = self.wires.as_ref().ok_or_else(|| Error::NotEmulated(self.name.clone()))?;
        Ok(match direction {
            Direction::Forward => &wires.forward,
            Direction::Backward => &wires.backward,
        })
    }
}
