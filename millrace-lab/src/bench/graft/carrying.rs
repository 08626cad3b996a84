//! Two hosts with a carrier between their brokers.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use super::host::{Host, LIMIT};
use crate::bench::process::Process;
use crate::lab::Node;
use std::path::Path;

const CARRIERS: u16 = 9188;

/// Connections of the client's cgroup to some ports of the server's are carried.
pub struct Carrying<'a> {
    pub client: Host<'a>,
    pub server: Host<'a>,
}

impl<'a> Carrying<'a> {
    pub fn new(client: &'a Node, server: &'a Node, directory: &Path, ports: &[u16]) -> anyhow::Result<Self> {
        Self::with(client, server, directory, ports, None)
    }

    /// With another `warm-kib` than usual.
    pub fn with(
        client: &'a Node,
        server: &'a Node,
        directory: &Path,
        ports: &[u16],
        warm_kib: Option<u32>,
    ) -> anyhow::Result<Self> {
        let host = |name, node| Host::new(name, node, &directory.join(name));
        let (client, server) = (host("client", client)?, host("server", server)?);
        let (near, far) = (client.key()?, server.key()?);
        let at = SocketAddr::new(server.node.addr_v4().into(), CARRIERS);
        let rule = |side: &str, port: &u16| {
            format!(
                "[[rule]]\nname = \"r{port}\"\nside = \"{side}\"\nport = {port}\ntier = \"carried\"\nagree = false\n"
            )
        };
        let rules = |side| ports.iter().map(|port| rule(side, port)).collect::<String>();
        let warm = warm_kib.map_or_else(String::new, |kib| format!("warm-kib = {kib}\n"));
        let own = format!("[agreement]\nkey = \"host.key\"\n[carry]\n{warm}");
        let peer = |key: &str| format!("[[peer]]\nname = \"p\"\nkey = \"{key}\"\n");
        client.configure(&format!("{own}{}carry = \"{at}\"\n{}", peer(&far), rules("client")))?;
        server.configure(&format!("{own}listen = \"{at}\"\n{}{}", peer(&near), rules("server")))?;
        Ok(Self { client, server })
    }

    /// Until the carrier is warm.
    pub fn start(&self) -> anyhow::Result<(Process, Process)> {
        let (server, client) = (self.server.start()?, self.client.start()?);
        self.wait_warm()?;
        Ok((server, client))
    }

    pub fn wait_warm(&self) -> anyhow::Result<()> {
        let start = Instant::now();
        loop {
            let status = self.client.status()?;
            let state = status.pointer("/status/carry/carriers/0/state").and_then(Value::as_str);
            if state == Some("warm") {
                return Ok(());
            }
            if start.elapsed() > LIMIT {
                bail!("no carrier within {LIMIT:?}: {status}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// At least so many connections have been carried since the start.
    pub fn check_led(&self, least: usize) -> anyhow::Result<()> {
        let status = self.client.status()?;
        let led = status.pointer("/status/carry/verdicts/led").and_then(Value::as_u64).context("verdicts")?;
        ensure!(led >= least as u64, "{led} connections were carried, and not {least}");
        Ok(())
    }
}
