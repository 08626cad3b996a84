//! Networks that transfers are measured on: one link with a delay, a loss and a rate.

use std::str::FromStr;

use anyhow::ensure;

use crate::bench::site::SUBSCRIBERS_LINK;
use crate::lab::{Directions, Topology};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Network {
    /// Percent.
    pub loss: f64,
    pub rtt_ms: u32,
}

impl Network {
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!((0.0..100.0).contains(&self.loss), "a loss of {} %: from 0 to less than 100", self.loss);
        Ok(())
    }

    /// The queue has room for the product of rate and round trip.
    pub fn topology(&self, rate_mbit: u32, lossy: Directions, seed: u64) -> anyhow::Result<Topology> {
        let Self { loss, rtt_ms } = self;
        let queue = (u64::from(rate_mbit) * 125 * u64::from(*rtt_ms)).max(64 << 10);
        let mut topology = Topology::standard(1, 1);
        (topology.seed, topology.netem) = (seed, false);
        topology.impair(SUBSCRIBERS_LINK, Directions::Both, &format!("delay={}us", rtt_ms * 500))?;
        topology.impair(
            SUBSCRIBERS_LINK,
            lossy,
            &format!("rate={rate_mbit}mbit queue-bytes={queue} loss={loss}%"),
        )?;
        Ok(topology)
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wanted = || format!("{text:?} is no PERCENT:MS, such as 1:100");
        let (loss, rtt) = text.split_once(':').ok_or_else(wanted)?;
        let (loss, rtt_ms) = (loss.parse().map_err(|_| wanted())?, rtt.parse().map_err(|_| wanted())?);
        Ok(Self { loss, rtt_ms })
    }
}
