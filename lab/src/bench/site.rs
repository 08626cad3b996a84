//! The lab in which relays are measured: publisher, relay and subscribers. It also starts the relays.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow};

use super::contender::{Contender, ContenderIdentity, PORT, STATUS};
use super::process::{BenchProcess, listens};
use super::traffic::{STREAM, TrafficRoute};
use super::udp::SOURCE_PORT;
use crate::lab::{self, Lab, LabLink, LabNode, Topology};

pub const PUBLISHER_LINK: &str = "pub-relay";
pub const SUBSCRIBERS_LINK: &str = "relay-sub1";
/// Longest wait until a relay listens.
const START_LIMIT: Duration = Duration::from_secs(60);

pub struct BenchSite {
    lab: Lab,
    directory: tempfile::TempDir,
    identity: ContenderIdentity,
}

impl BenchSite {
    /// Creates the lab from the standard topology, whose links may be impaired.
    pub fn new(topology: &Topology) -> anyhow::Result<Self> {
        lab::remove_on_signal()?;
        let lab = Lab::new(topology).context("cannot make the lab")?;
        let directory = tempfile::tempdir()?;
        let identity =
            ContenderIdentity::create(&directory.path().join("identity"), lab.node("relay")?.addr_v4())?;
        Ok(Self { lab, directory, identity })
    }

    pub fn node(&self, name: &str) -> anyhow::Result<&LabNode> {
        Ok(self.lab.node(name)?)
    }

    pub fn link(&self, name: &str) -> anyhow::Result<&LabLink> {
        Ok(self.lab.link(name)?)
    }

    pub fn relay(&self) -> anyhow::Result<&LabNode> {
        self.node("relay")
    }

    pub fn subscribers(&self) -> anyhow::Result<&LabNode> {
        self.node("sub1")
    }

    /// Returns the directory for output files of processes.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns the file with the relays' certificate.
    pub fn certificate(&self) -> &Path {
        &self.identity.certificate
    }

    pub fn route(&self) -> anyhow::Result<TrafficRoute<'_>> {
        self.route_through("relay")
    }

    /// Returns the route of traffic whose subscribers connect to the relay on the node `edge`.
    pub fn route_through(&self, edge: &str) -> anyhow::Result<TrafficRoute<'_>> {
        let publisher = self.node("pub")?;
        let subscribers = self.subscribers()?;
        Ok(TrafficRoute { publisher, relay: self.address()?, edge: address(self.node(edge)?), subscribers })
    }

    fn address(&self) -> anyhow::Result<SocketAddr> {
        Ok(address(self.relay()?))
    }

    pub fn start_relay(&self, contender: Contender) -> anyhow::Result<BenchProcess> {
        self.start_relay_with(contender, &[])
    }

    /// Starts a relay on the relay's node, with additional arguments.
    pub fn start_relay_with(&self, contender: Contender, further: &[&str]) -> anyhow::Result<BenchProcess> {
        self.start(contender, STATUS, further)
    }

    /// Starts a relay on the given node, in addition to the one on the relay's node.
    pub fn start_relay_on(
        &self,
        node: &str,
        contender: Contender,
        further: &[&str],
    ) -> anyhow::Result<BenchProcess> {
        self.start_on(self.node(node)?, contender, STATUS, further)
    }

    /// Starts a relay that serves its web page at `page`, with additional arguments.
    pub fn start_relay_with_page(
        &self,
        contender: Contender,
        page: SocketAddr,
        further: &[&str],
    ) -> anyhow::Result<BenchProcess> {
        self.start(contender, page, further)
    }

    fn start(
        &self,
        contender: Contender,
        http: SocketAddr,
        further: &[&str],
    ) -> anyhow::Result<BenchProcess> {
        self.start_on(self.relay()?, contender, http, further)
    }

    fn start_on(
        &self,
        node: &LabNode,
        contender: Contender,
        http: SocketAddr,
        further: &[&str],
    ) -> anyhow::Result<BenchProcess> {
        let line = contender.command_line(address(node), http, &self.identity)?;
        let mut command = node.command(line.program);
        command.args(line.arguments).args(further);
        if contender.engine() == Some("kernel") || contender.gate() == Some(true) {
            let devices: Vec<_> =
                node.interfaces().iter().map(|interface| interface.device.as_str()).collect();
            command.arg("--interface").arg(devices.join(","));
        }
        if contender == Contender::Fanout {
            command.arg("--socket").arg(self.directory().join("fanout.sock"));
            command.arg("--config").arg(self.fanout_settings()?);
        }
        let mut relay = BenchProcess::start(node.name(), command, self.directory())?;
        let bound = || node.enter(|| listens(PORT)).unwrap_or(false);
        relay.wait_until("listening", START_LIMIT, bound)?;
        Ok(relay)
    }
}

impl BenchSite {
    /// Writes the settings file of Millrace's RTP fan-out, with one stream from the plain UDP source to the sinks.
    /// Sinks send no reception reports.
    fn fanout_settings(&self) -> anyhow::Result<PathBuf> {
        let interface = device(self.relay()?, PUBLISHER_LINK)?;
        let listen = self.address()?;
        let sender = self.node("pub")?.addr_v4();
        let settings = format!(
            "interface = [\"{interface}\"]\n[[stream]]\nname = \"{STREAM}\"\nlisten = \"{listen}\"\nsender = \"{sender}:{SOURCE_PORT}\"\n\
             max-receivers = 10000\nmax-per-address = 10000\nmax-kbit-per-s = 10000000\nlease-s = 3600\nreport-interval-s = 3600\n"
        );
        let path = self.directory().join("fanout.toml");
        std::fs::write(&path, settings)?;
        Ok(path)
    }
}

/// Returns the address that a relay on this node listens on.
pub fn address(node: &LabNode) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(node.addr_v4()), PORT)
}

/// Returns the name of a node's interface on a link.
pub fn device(node: &LabNode, link: &str) -> anyhow::Result<String> {
    let interface = node.interface(link).ok_or_else(|| anyhow!("{} has no link {link}", node.name()))?;
    Ok(interface.device.clone())
}
