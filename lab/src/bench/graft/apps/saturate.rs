//! Saturates a tunnel with iperf3, so that competing traffic on the same link can be measured.

use std::time::Duration;

use anyhow::ensure;

use super::server::AppServer;
use crate::bench::graft::carrying::Carrying;
use crate::bench::site::BenchSite;

/// Sends over IPv4 from the relay's host to the subscribers' host of the lab network, through a tunnel.
///
/// # Errors
///
/// Fails if iperf3 fails, or if the connection was not tunnelled.
pub fn saturate(site: &BenchSite, _rtt_ms: u32, sending: Duration) -> anyhow::Result<()> {
    let [_, port] = AppServer::Iperf.ports();
    let pair = Carrying::new(site.relay()?, site.subscribers()?, site.directory(), &[port])?;
    let _servers = AppServer::Iperf.start(&pair.server, site.directory())?;
    let _brokers = pair.start()?;
    let mut command = pair.client.node.command("iperf3");
    command.args(["-c", &pair.server.node.addr_v4().to_string(), "-p", &port.to_string()]);
    command.args(["-t", &sending.as_secs().to_string()]);
    let done = pair.client.cgroup.command(&command).output()?;
    let errors = String::from_utf8_lossy(&done.stdout);
    ensure!(done.status.success(), "iperf3 ended with {}: {}", done.status, errors.trim());
    pair.check_redirected(1)
}
