//! Two hosts whose daemons have a tunnel (carrier) between them.

use std::net::Ipv4Addr;

use anyhow::ensure;

use super::host::GraftHost;
use crate::bench::process::BenchProcess;
use crate::lab::LabNode;
use std::path::Path;

const CARRIERS: u16 = 9188;

/// Settings of the two hosts' daemons that differ from the benchmarks' default settings.
#[derive(Default)]
pub struct CarryingSettings<'a> {
    /// Additional lines of the section `[carry]`.
    pub carry: &'a str,
    /// Port where the server's daemon accepts tunnel connections (carriers), if it is not the default one.
    pub listen: Option<u16>,
    /// Port whose connections are not tunnelled, by a rule of the settings, and the congestion control that this rule
    /// sets for them.
    pub in_place: Option<(u16, &'a str)>,
}

/// Two hosts with daemons. Connections from the client's cgroup to the given ports of the server are tunnelled.
pub struct Carrying<'a> {
    pub client: GraftHost<'a>,
    pub server: GraftHost<'a>,
}

impl<'a> Carrying<'a> {
    pub fn new(
        client: &'a LabNode,
        server: &'a LabNode,
        directory: &Path,
        ports: &[u16],
    ) -> anyhow::Result<Self> {
        Self::wanted(client, server, directory, ports, &CarryingSettings::default())
    }

    /// Creates both hosts, each with one address.
    pub fn wanted(
        client: &'a LabNode,
        server: &'a LabNode,
        directory: &Path,
        ports: &[u16],
        wanted: &CarryingSettings<'_>,
    ) -> anyhow::Result<Self> {
        let hosts = [client, server].map(|node| (node, vec![node.addr_v4()]));
        Self::by(hosts, 1, directory, ports, wanted)
    }

    /// Creates both hosts, each with the addresses at which it can be reached. The client's tunnel connections
    /// (carriers) are made only to the first `called` addresses of the server.
    pub fn by(
        [client, server]: [(&'a LabNode, Vec<Ipv4Addr>); 2],
        called: usize,
        directory: &Path,
        ports: &[u16],
        wanted: &CarryingSettings<'_>,
    ) -> anyhow::Result<Self> {
        let addresses = [client.1, server.1];
        let [client, server] = [client.0, server.0];
        let host = |name, node| GraftHost::new(name, node, &directory.join(name));
        let client = host("client", client)?;
        let server = host("server", server)?;
        let near = client.key()?;
        let far = server.key()?;
        let port = wanted.listen.unwrap_or(CARRIERS);
        let list = |all: Vec<String>| all.iter().map(|it| format!("{it:?}")).collect::<Vec<_>>().join(", ");
        let named = addresses.each_ref().map(|all| list(all.iter().map(Ipv4Addr::to_string).collect()));
        let called = list(addresses[1].iter().take(called).map(|it| format!("{it}:{port}")).collect());
        // With several addresses, the daemon must accept tunnel connections (carriers) on each of them.
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
        let of_client = peer(&near, &named[0]);
        let of_server = peer(&far, &named[1]);
        client.configure(&format!("{own}{of_server}carry = [{called}]\n{}", rules("client")))?;
        server.configure(&format!("{own}listen = \"{listen}\"\n{of_client}{}", rules("server")))?;
        Ok(Self { client, server })
    }

    /// Starts both daemons and waits until a carrier is warm (ready for connections).
    pub fn start(&self) -> anyhow::Result<(BenchProcess, BenchProcess)> {
        let server = self.server.start()?;
        let client = self.client.start()?;
        self.wait_warm()?;
        Ok((server, client))
    }

    pub fn wait_warm(&self) -> anyhow::Result<()> {
        self.client.wait_warm(1)
    }

    /// Fails if fewer than `least` connections were tunnelled since the client's daemon started.
    pub fn check_redirected(&self, least: usize) -> anyhow::Result<()> {
        let redirected = self.client.redirected()?;
        ensure!(
            redirected >= least as u64,
            "{redirected} connections were tunnelled instead of at least {least}"
        );
        Ok(())
    }
}
