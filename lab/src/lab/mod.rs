//! `millrace-lab lab`: networks out of namespaces and emulated links.
//!
//! [`Lab::new`] builds a [`Topology`]; dropping the lab removes everything, processes inside included. A lab
//! whose owner died without dropping it is removed when the next one starts, or by [`clean`]; a process that
//! should not die by a signal without dropping its labs calls [`remove_on_signal`].
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
    // The fields' order is that of removal: users of the links, then the links, then the namespaces.
    _background: Background,
    net: Arc<LabNetwork>,
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

    /// Returns `mr-PID.N`: the prefix of its namespaces, and its name for `millrace-lab lab --lab`.
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

/// Nodes and links, shared with the threads that serve them.
struct LabNetwork {
    nodes: Vec<LabNode>,
    links: Vec<LabLink>,
    // The field is the last: links end before their namespaces.
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

/// A host of the lab: a network namespace with an interface per link.
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

    /// Returns the interface on a link; its `device` is `to-PEER`.
    pub fn interface(&self, link: &str) -> Option<&NodeInterface> {
        self.interfaces.iter().find(|interface| interface.link == link)
    }

    /// Returns the address on the node's first link. Every node reaches every address of every other.
    pub fn addr_v4(&self) -> Ipv4Addr {
        self.interfaces.first().map_or(Ipv4Addr::LOCALHOST, |interface| interface.v4)
    }

    /// Returns the address on the node's first link.
    pub fn addr_v6(&self) -> Ipv6Addr {
        self.interfaces.first().map_or(Ipv6Addr::LOCALHOST, |interface| interface.v6)
    }

    /// Returns a command that runs inside; the child's process ID is the program's.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> std::process::Command {
        self.netns.command(program)
    }

    /// Runs `work` on a thread inside. Sockets and processes made there stay inside.
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

/// Implementation that impairs one direction.
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

    /// Returns the names of both nodes; `Forward` is from the first to the second.
    pub fn ends(&self) -> [&str; 2] {
        [&self.ends[0], &self.ends[1]]
    }

    /// Reports whether it can be changed while it is up.
    pub fn is_emulated(&self) -> bool {
        self.wires.is_some()
    }

    /// Reports whether the kernel's netem impairs it, and not the emulator.
    pub fn is_netem(&self) -> bool {
        matches!(&self.wires, Some(Wires { forward: Driver::Netem(_), .. }))
    }

    /// Replaces the impairment of one direction.
    pub fn set(&self, direction: LinkDirection, impairment: Impairment) -> Result<()> {
        self.wire(direction)?.set(impairment)
    }

    /// Changes the named settings, and leaves the rest.
    pub fn change(&self, directions: Directions, settings: &Settings) -> Result<()> {
        directions.each().iter().try_for_each(|direction| self.wire(*direction)?.change(settings))
    }

    /// Returns the link's current impairment, which is perfect for a plain veth.
    pub fn impairment(&self, direction: LinkDirection) -> Impairment {
        self.wire(direction).map(Driver::settings).unwrap_or_default()
    }

    /// Returns frame counts since the lab came up; none for a plain veth.
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
