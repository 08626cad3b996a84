//! Two links between two hosts. A lab allows one link between two nodes, so the second link leads through a router.

use anyhow::{Context as _, ensure};

use super::network;
use crate::bench::site::{BenchSite, SUBSCRIBERS_LINK};
use crate::lab::{Directions, Topology};

/// Names of the first link on both hosts. This link joins the relay's and the subscribers' hosts directly.
pub const FIRST: LinkEndNames = LinkEndNames { near: SUBSCRIBERS_LINK, far: SUBSCRIBERS_LINK };
/// Names of the second link on both hosts. This link leads through a router.
pub const SECOND: LinkEndNames = LinkEndNames { near: "relay-via", far: "via-sub1" };

/// Names of a link on the relay's host (`near`) and on the subscribers' (`far`).
#[derive(Clone, Copy)]
pub struct LinkEndNames {
    pub near: &'static str,
    pub far: &'static str,
}

/// Properties of both paths. Only the second path loses packets.
#[derive(Debug, clap::Args)]
pub struct LinkProperties {
    /// Rate of each path
    #[arg(long, default_value_t = 20, value_name = "MBIT")]
    pub rate_mbit: u32,
    /// Round-trip time of each path while the queue is empty
    #[arg(long, default_value_t = 40, value_name = "MS")]
    pub rtt_ms: u32,
    /// Random loss of the second path in the direction of the data
    #[arg(long, default_value_t = 0.0, value_name = "PERCENT")]
    pub loss: f64,
}

impl LinkProperties {
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(self.rate_mbit > 0, "--rate-mbit must be at least 1");
        ensure!((0.0..100.0).contains(&self.loss), "--loss must be from 0 to less than 100 %");
        Ok(())
    }

    /// Creates the lab network of both paths. Each path has a queue of one bandwidth-delay product. `seed` determines
    /// the random losses.
    pub fn site(&self, packet_bytes: u64, seed: u64) -> anyhow::Result<BenchSite> {
        let mut topology = Topology::standard(1, 1);
        topology.seed = seed;
        topology.connect("relay", "via");
        topology.connect("via", "sub1");
        let queue = u64::from(self.rate_mbit) * 125 * u64::from(self.rtt_ms) / packet_bytes;
        for link in [FIRST.near, SECOND.near] {
            let delay = format!("delay={}us", u64::from(self.rtt_ms) * 500);
            let rate = format!("rate={}mbit queue-packets={}", self.rate_mbit, queue.max(16));
            topology.impair(link, Directions::Both, &delay)?;
            topology.impair(link, Directions::Forward, &rate)?;
        }
        topology.impair(SECOND.near, Directions::Forward, &network::loss(self.loss, 1.0))?;
        let site = BenchSite::new(&topology)?;
        // The routes that the lab has set up use only the direct link, so routes through the router are added here.
        let near = site.relay()?;
        let far = site.subscribers()?;
        let via = site.node("via")?;
        for (from, to, [here, there]) in
            [(near, far, [SECOND.near, SECOND.far]), (far, near, [SECOND.far, SECOND.near])]
        {
            let out = from.interface(here);
            let back = to.interface(there);
            let out = out.context("no interface")?;
            let back = back.context("no interface")?;
            let next = via.interface(here).context("no interface")?.v4;
            let route = format!("route replace {}/32 via {next} dev {}", back.v4, out.device);
            let status = from.command("ip").args(route.split(' ')).status()?;
            ensure!(status.success(), "ip {route}");
        }
        Ok(site)
    }
}
