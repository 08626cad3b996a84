//! Two links between two hosts, one of them with a router in it, since two nodes of a lab have one link at most.

use anyhow::{Context as _, ensure};

use super::network;
use crate::bench::site::{SUBSCRIBERS_LINK, Site};
use crate::lab::{Directions, Topology};

/// The first, at both of its ends; between relay and subscribers.
pub const FIRST: Ends = Ends { near: SUBSCRIBERS_LINK, far: SUBSCRIBERS_LINK };
/// The second, which has a router in it.
pub const SECOND: Ends = Ends { near: "relay-via", far: "via-sub1" };

/// Links of the relay's host and of the subscribers'.
#[derive(Clone, Copy)]
pub struct Ends {
    pub near: &'static str,
    pub far: &'static str,
}

/// What both do; but for loss, which is the second's.
#[derive(Debug, clap::Args)]
pub struct Links {
    /// Of each path
    #[arg(long, default_value_t = 20, value_name = "MBIT")]
    pub rate_mbit: u32,
    /// Of each path, without queue
    #[arg(long, default_value_t = 40, value_name = "MS")]
    pub rtt_ms: u32,
    /// Of the second path, in the direction of the data
    #[arg(long, default_value_t = 0.0, value_name = "PERCENT")]
    pub loss: f64,
}

impl Links {
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(self.rate_mbit > 0, "--rate-mbit is at least 1");
        ensure!((0.0..100.0).contains(&self.loss), "--loss is from 0 to less than 100 %");
        Ok(())
    }

    /// With a queue of one product of rate and round trip, and what loses at random by the seed.
    pub fn site(&self, packet_bytes: u64, seed: u64) -> anyhow::Result<Site> {
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
        let site = Site::new(&topology)?;
        // By the router, and no shorter way.
        let (near, far, via) = (site.relay()?, site.subscribers()?, site.node("via")?);
        for (from, to, [here, there]) in
            [(near, far, [SECOND.near, SECOND.far]), (far, near, [SECOND.far, SECOND.near])]
        {
            let (out, back) = (from.interface(here), to.interface(there));
            let (out, back) = (out.context("no interface")?, back.context("no interface")?);
            let next = via.interface(here).context("no interface")?.v4;
            let route = format!("route replace {}/32 via {next} dev {}", back.v4, out.device);
            let status = from.command("ip").args(route.split(' ')).status()?;
            ensure!(status.success(), "ip {route}");
        }
        Ok(site)
    }
}
