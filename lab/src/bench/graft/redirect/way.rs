//! The ways to carry a connection between two hosts (directly, by haproxy, by a tunnel), and the programs that each way
//! needs on both hosts.

use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;

use anyhow::ensure;

use crate::bench::graft::carrying::{Carrying, CarryingSettings};
use crate::bench::graft::host::LIMIT;
use crate::bench::process::BenchProcess;
use crate::bench::site::BenchSite;
use crate::lab::LabNode;

const DIRECT: u16 = 7201;
const PROXY: u16 = 7202;
/// First port of the servers whose connections are tunnelled. The next constant, `BROKERS`, is the first port where
/// daemons accept tunnel connections (carriers).
const SERVERS: u16 = 7210;
const BROKERS: u16 = 9190;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum RedirectMethod {
    /// Plain TCP without Millrace
    Tcp,
    /// haproxy in TCP mode on the client's host
    Haproxy,
    /// A daemon on each host, with a rule by which the connection is not tunnelled
    InPlace,
    /// A tunnel over QUIC between two daemons
    Quic,
    /// A tunnel over TCP between two daemons
    CarriedTcp,
    /// A tunnel over MPTCP between two daemons
    CarriedMptcp,
}

impl RedirectMethod {
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Haproxy => "haproxy",
            Self::InPlace => "in place",
            Self::Quic => "carried",
            Self::CarriedTcp => "carried, TCP",
            Self::CarriedMptcp => "carried, MPTCP",
        }
    }

    /// Returns on how many hosts a proxy or daemon process forwards all bytes of the connection; `None` if on none.
    pub fn hosts(self) -> Option<f64> {
        match self {
            Self::Tcp | Self::InPlace => None,
            Self::Haproxy => Some(1.0),
            _ => Some(2.0),
        }
    }

    /// Returns the lines of the section `[carry]` in the settings of both daemons; `None` if this way needs no daemons.
    fn carry(self) -> Option<&'static str> {
        match self {
            Self::Tcp | Self::Haproxy => None,
            Self::InPlace | Self::Quic => Some(""),
            Self::CarriedTcp => Some("carrier = \"tcp\"\n"),
            Self::CarriedMptcp => Some("carrier = \"mptcp\"\n"),
        }
    }

    /// Returns the reason why connections cannot be carried in this way on this machine, if there is one.
    pub fn lacks(self) -> Option<&'static str> {
        let has_mptcp =
            || fs::read_to_string("/proc/sys/net/mptcp/enabled").is_ok_and(|text| text.trim() == "1");
        match self {
            Self::Haproxy if Command::new("haproxy").arg("-v").output().is_err() => {
                Some("apt-get install haproxy")
            }
            Self::CarriedMptcp if !has_mptcp() => Some("net.mptcp.enabled is 0, or the kernel lacks MPTCP"),
            _ => None,
        }
    }
}

/// A way to carry connections, with its programs, which run until this is dropped.
pub struct RedirectRoute<'a> {
    pub way: RedirectMethod,
    client: &'a LabNode,
    to: SocketAddr,
    pair: Option<Carrying<'a>>,
    processes: Vec<BenchProcess>,
}

impl<'a> RedirectRoute<'a> {
    /// Starts the programs that carry connections in this way. `serve` gets the server's listener. `number` makes the
    /// ports differ from those of other ways that run at the same time.
    pub fn new(
        site: &'a BenchSite,
        way: RedirectMethod,
        number: u16,
        serve: impl FnOnce(TcpListener),
    ) -> anyhow::Result<Self> {
        let client = site.relay()?;
        let server = site.subscribers()?;
        let directory = site.directory().join(format!("route{number}"));
        fs::create_dir_all(&directory)?;
        let mut route =
            Self { way, client, to: (server.addr_v4(), DIRECT).into(), pair: None, processes: Vec::new() };
        match way.carry() {
            None if way == RedirectMethod::Haproxy => route.proxy(&directory)?,
            None => serve(server.enter(|| TcpListener::bind((server.addr_v4(), DIRECT)))??),
            Some(carry) => {
                let port = SERVERS + number;
                route.to.set_port(port);
                let control = default_control(client)?;
                let is_in_place = way == RedirectMethod::InPlace;
                let wanted = CarryingSettings {
                    carry,
                    listen: Some(BROKERS + number),
                    in_place: is_in_place.then_some((port, &control)),
                };
                let ports = if is_in_place { &[][..] } else { &[port] };
                let pair = Carrying::wanted(client, server, &directory, ports, &wanted)?;
                let bind = || TcpListener::bind(route.to);
                serve(pair.server.cgroup.enter(|| server.enter(bind))???);
                let (far, near) = pair.start()?;
                route.processes.extend([far, near]);
                route.pair = Some(pair);
            }
        }
        Ok(route)
    }

    /// Starts haproxy in TCP mode on the client's host, in front of the server of the direct connections.
    fn proxy(&mut self, directory: &Path) -> anyhow::Result<()> {
        let path = directory.join("haproxy.cfg");
        let server = self.to;
        fs::write(
            &path,
            format!(
                "defaults\n  mode tcp\n  timeout connect 5s\n  timeout client 60s\n  timeout server 60s\n\
                 listen p\n  bind 127.0.0.1:{PROXY}\n  server s {server}\n"
            ),
        )?;
        self.to = SocketAddr::from(([127, 0, 0, 1], PROXY));
        let mut command = self.client.command("haproxy");
        command.arg("-db").arg("-f").arg(path);
        let mut process = BenchProcess::start("haproxy", command, directory)?;
        process.wait_until("its port", LIMIT, || self.connect().is_ok())?;
        self.processes.push(process);
        Ok(())
    }

    pub fn connect(&self) -> anyhow::Result<TcpStream> {
        let connect = || TcpStream::connect_timeout(&self.to, LIMIT);
        let stream = match &self.pair {
            Some(pair) => pair.client.cgroup.enter(|| self.client.enter(connect))???,
            None => self.client.enter(connect)??,
        };
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(LIMIT))?;
        stream.set_write_timeout(Some(LIMIT))?;
        Ok(stream)
    }

    /// Checks the number of tunnelled connections: `connections` if this way is a tunnel, and none if a rule of the
    /// daemon says that they are not tunnelled.
    pub fn check(&self, connections: usize) -> anyhow::Result<()> {
        let Some(pair) = &self.pair else { return Ok(()) };
        if self.way == RedirectMethod::InPlace {
            let redirected = pair.client.redirected()?;
            ensure!(
                redirected == 0,
                "{redirected} connections were tunnelled, but should have stayed outside of the tunnel"
            );
            return Ok(());
        }
        pair.check_redirected(connections)
    }
}

/// Returns the default congestion control of a node's sockets.
fn default_control(node: &LabNode) -> anyhow::Result<String> {
    let read = || fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control");
    Ok(node.enter(read)??.trim().to_owned())
}
