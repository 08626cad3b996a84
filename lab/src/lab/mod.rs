//! `millrace-lab lab`: networks of namespaces and emulated links.
//!
//! [`Lab::new`] builds a [`Topology`]. Dropping the lab removes everything, including processes inside. A lab whose
//! owner died without dropping it is removed when the next one starts, or by [`clean`]. A program that must remove its
//! labs when a signal ends it calls [`remove_on_signal`].
//!
//! ```no_run
//! use millrace_lab::lab::{LinkDirection, Impairment, Lab, Topology};
//!
//! # fn main() -> anyhow::Result<()> {
//! let mut topology = Topology::standard(1, 2);
//! topology.link_mut("pub-relay")?.emulate = true;
//! let lab = Lab::new(&topology)?;
//! let relay = lab.node("relay")?;
//! println!("{} {}", relay.addr_v4(), relay.addr_v6());
//! lab.link("pub-relay")?.set(LinkDirection::Forward, Impairment::parse("delay=10ms loss=1%")?)?;
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

pub use cli::{LabArgs, run};
pub use impair::{Error as SettingError, Impairment, JitterShape, Settings};
pub use netns::Netns;
pub use registry::clean;
pub use shape::{FrameCounters, Shaper};
pub use signals::remove_on_signal;
pub use tap::DeviceTap;
pub use topology::{
    Directions, Error as TopologyError, LinkDirection, LinkEvent, LinkSpec, NodeInterface, Topology,
};

use control::Background;
use emulator::EmulatedWire;
use netem::NetemQdisc;
use registry::LabClaim;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("a lab needs root, since it creates network namespaces")]
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
    #[error("link `{0}` is impaired by netem, which cannot do that; give it `emulate = true`")]
    NotByNetem(String),
    #[error("{0}")]
    Invalid(String),
}

/// A running network. Dropping it removes the network.
pub struct Lab {
    // Fields are dropped in this order: the threads that use links, then links and namespaces.
    _background: Background,
    net: Arc<LabNetwork>,
}

impl Lab {
    /// Builds the topology and starts its timeline. Needs root and the programs `ip`, `nsenter` and `ethtool`.
    pub fn new(topology: &Topology) -> Result<Self> {
        if !nix::unistd::geteuid().is_root() {
            return Err(Error::NotRoot);
        }
        topology.validate()?;
        let net = Arc::new(build::build(topology)?);
        let background = Background::start(net.clone(), topology.events.clone())?;
        Ok(Self { _background: background, net })
    }

    /// Returns the lab's ID, `mr-PID.N`. It is the prefix of its namespaces, and the name for `millrace-lab lab --lab`.
    pub fn id(&self) -> &str {
        self.net.claim.id()
    }

    pub fn nodes(&self) -> &[LabNode] {
        &self.net.nodes
    }

    pub fn links(&self) -> &[LabLink] {
        &self.net.links
    }

    pub fn node(&self, name: &str) -> Result<&LabNode> {
        self.net.node(name)
    }

    pub fn link(&self, name: &str) -> Result<&LabLink> {
        self.net.link(name)
    }
}

/// Nodes and links, which the lab shares with its threads.
struct LabNetwork {
    nodes: Vec<LabNode>,
    links: Vec<LabLink>,
    // The claim (the ownership of the namespaces) is dropped last, since links must end before their namespaces are
    // removed.
    claim: LabClaim,
}

impl LabNetwork {
    fn node(&self, name: &str) -> Result<&LabNode> {
        self.nodes.iter().find(|node| node.name == name).ok_or_else(|| Error::NoNode {
            name: name.into(),
            known: self.nodes.iter().map(|node| node.name.as_str()).collect::<Vec<_>>().join(", "),
        })
    }

    fn link(&self, name: &str) -> Result<&LabLink> {
        self.links.iter().find(|link| link.name == name).ok_or_else(|| {
            let known = self.links.iter().map(|link| link.name.clone()).collect();
            TopologyError::NoLink { name: name.into(), known }.into()
        })
    }
}

/// A host of the lab: a network namespace with one interface per link.
pub struct LabNode {
    name: String,
    netns: Netns,
    interfaces: Vec<NodeInterface>,
}

impl LabNode {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    pub fn interfaces(&self) -> &[NodeInterface] {
        &self.interfaces
    }

    /// Returns the interface on a link. Its `device` is named `to-PEER`.
    pub fn interface(&self, link: &str) -> Option<&NodeInterface> {
        self.interfaces.iter().find(|interface| interface.link == link)
    }

    /// Returns the IPv4 address on the node's first link. Every node can reach every address of the lab.
    pub fn addr_v4(&self) -> Ipv4Addr {
        self.interfaces.first().map_or(Ipv4Addr::LOCALHOST, |interface| interface.v4)
    }

    /// Returns the IPv6 address on the node's first link.
    pub fn addr_v6(&self) -> Ipv6Addr {
        self.interfaces.first().map_or(Ipv6Addr::LOCALHOST, |interface| interface.v6)
    }

    /// Returns a command that runs inside the node. The process ID of the child is that of the program.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> std::process::Command {
        self.netns.command(program)
    }

    /// Runs `work` in a thread inside the node. Sockets and processes that it creates stay inside.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        self.netns.enter(work)
    }
}

/// A point-to-point link between two nodes.
pub struct LabLink {
    name: String,
    ends: [String; 2],
    wires: Option<Wires>,
}

struct Wires {
    forward: Driver,
    backward: Driver,
}

/// Mechanism that impairs one direction of a link.
enum Driver {
    Emulator(EmulatedWire),
    Netem(NetemQdisc),
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

    fn counters(&self) -> Result<FrameCounters> {
        match self {
            Driver::Emulator(wire) => Ok(wire.counters()),
            Driver::Netem(qdisc) => qdisc.counters(),
        }
    }
}

impl LabLink {
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the names of the two nodes. The direction `Forward` leads from the first to the second.
    pub fn ends(&self) -> [&str; 2] {
        [&self.ends[0], &self.ends[1]]
    }

    /// Reports whether the link can be changed while the lab is up.
    pub fn is_emulated(&self) -> bool {
        self.wires.is_some()
    }

    /// Reports whether the kernel's netem impairs the link, instead of the emulator.
    pub fn is_netem(&self) -> bool {
        matches!(&self.wires, Some(Wires { forward: Driver::Netem(_), .. }))
    }

    /// Replaces the impairment of one direction.
    pub fn set(&self, direction: LinkDirection, impairment: Impairment) -> Result<()> {
        self.wire(direction)?.set(impairment)
    }

    /// Changes only the given settings of the impairment of one direction.
    pub fn change(&self, directions: Directions, settings: &Settings) -> Result<()> {
        directions.each().iter().try_for_each(|direction| self.wire(*direction)?.change(settings))
    }

    /// Returns the current impairment of one direction. A plain veth has none.
    pub fn impairment(&self, direction: LinkDirection) -> Impairment {
        self.wire(direction).map(Driver::settings).unwrap_or_default()
    }

    /// Returns the frame counters since the lab came up; `None` for a plain veth.
    pub fn counters(&self, direction: LinkDirection) -> Option<FrameCounters> {
        self.wire(direction).and_then(Driver::counters).ok()
    }

    fn wire(&self, direction: LinkDirection) -> Result<&Driver> {
        let wires = self.wires.as_ref().ok_or_else(|| Error::NotEmulated(self.name.clone()))?;
        Ok(match direction {
            LinkDirection::Forward => &wires.forward,
            LinkDirection::Backward => &wires.backward,
        })
    }
}
