//! Two hosts with a carrier between their brokers.

use std::net::Ipv4Addr;

use anyhow::ensure;

use super::host::Host;
use crate::bench::process::Process;
use crate::lab::Node;
use std::path::Path;

const CARRIERS: u16 = 9188;

/// What both hosts' settings have besides what is usual.
#[derive(Default)]
pub struct Wanted<'a> {
    /// Lines of `[carry]`.
    pub carry: &'a str,
    /// Where the server's broker listens, if not as usual.
    pub listen: Option<u16>,
    /// Connections to this port are ruled, and stay in place with this congestion control.
    pub in_place: Option<(u16, &'a str)>,
}

/// Connections of the client's cgroup to some ports of the server's are carried.
pub struct Carrying<'a> {
    pub client: Host<'a>,
    pub server: Host<'a>,
}

impl<'a> Carrying<'a> {
    pub fn new(client: &'a Node, server: &'a Node, directory: &Path, ports: &[u16]) -> anyhow::Result<Self> {
        Self::wanted(client, server, directory, ports, &Wanted::default())
    }

    /// Each host by its one address.
    pub fn wanted(
        client: &'a Node,
        server: &'a Node,
        directory: &Path,
        ports: &[u16],
        wanted: &Wanted<'_>,
    ) -> anyhow::Result<Self> {
        let hosts = [client, server].map(|node| (node, vec![node.addr_v4()]));
        Self::by(hosts, 1, directory, ports, wanted)
    }

    /// The client's host and the server's, each with the addresses by which it is reached; carriers are called at so many of the
    /// server's, in this order.
    pub fn by(
        [client, server]: [(&'a Node, Vec<Ipv4Addr>); 2],
        called: usize,
        directory: &Path,
        ports: &[u16],
        wanted: &Wanted<'_>,
    ) -> anyhow::Result<Self> {
        let ([client, server], addresses) = ([client.0, server.0], [client.1, server.1]);
        let host = |name, node| Host::new(name, node, &directory.join(name));
        let (client, server) = (host("client", client)?, host("server", server)?);
        let (near, far) = (client.key()?, server.key()?);
        let port = wanted.listen.unwrap_or(CARRIERS);
        let list = |all: Vec<String>| all.iter().map(|it| format!("{it:?}")).collect::<Vec<_>>().join(", ");
        let named = addresses.each_ref().map(|all| list(all.iter().map(Ipv4Addr::to_string).collect()));
        let called = list(addresses[1].iter().take(called).map(|it| format!("{it}:{port}")).collect());
        // By any of them.
        let listen = match &addresses[1][..] {
            [one] => format!("{one}:{port}"),
            _ => format!("0.0.0.0:{port}"),
        };
        let rule = |side: &str, port: &u16| {
            format!(
                "[[rule]]\nname = \"r{port}\"\nside = \"{side}\"\nport = {port}\ntier = \"carried\"\nagree = false\n"
            )
        };
        let in_place = |side: &str| {
            wanted.in_place.map_or_else(String::new, |(port, control)| {
                format!(
                    "[[rule]]\nname = \"i{port}\"\nside = \"{side}\"\nport = {port}\nagree = false\n\
                     congestion = \"{control}\"\n"
                )
            })
        };
        let rules =
            |side| ports.iter().map(|port| rule(side, port)).chain([in_place(side)]).collect::<String>();
        let own = format!("[agreement]\nkey = \"host.key\"\n[carry]\n{}", wanted.carry);
        let peer = |key: &str, addresses: &str| {
            format!("[[peer]]\nname = \"p\"\nkey = \"{key}\"\naddresses = [{addresses}]\n")
        };
        let (of_client, of_server) = (peer(&near, &named[0]), peer(&far, &named[1]));
        client.configure(&format!("{own}{of_server}carry = [{called}]\n{}", rules("client")))?;
        server.configure(&format!("{own}listen = \"{listen}\"\n{of_client}{}", rules("server")))?;
        Ok(Self { client, server })
    }

    /// Until the carrier is warm.
    pub fn start(&self) -> anyhow::Result<(Process, Process)> {
        let (server, client) = (self.server.start()?, self.client.start()?);
        self.wait_warm()?;
        Ok((server, client))
    }

    pub fn wait_warm(&self) -> anyhow::Result<()> {
        self.client.wait_warm(1)
    }

    /// At least so many connections were carried since the start.
    pub fn check_led(&self, least: usize) -> anyhow::Result<()> {
        let led = self.client.led()?;
        ensure!(led >= least as u64, "{led} connections were carried, and not {least}");
        Ok(())
    }
}
