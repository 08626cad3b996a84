//! Networks for measured transfers: one link with a delay, a loss and a rate.

use std::str::FromStr;

use anyhow::ensure;

use crate::bench::site::SUBSCRIBERS_LINK;
use crate::lab::{Directions, Topology};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NetworkProfile {
    /// Share of packets that are lost, percent.
    pub loss: f64,
    /// Mean number of consecutive packets in a burst of losses; 1: each packet is lost independently.
    pub burst: f64,
    pub rtt_ms: u32,
}

/// Returns the link setting that loses this share of packets, in bursts of this mean length.
pub fn loss(percent: f64, burst: f64) -> String {
    if burst <= 1.0 || percent == 0.0 {
        return format!("loss={percent}%");
    }
    // The Gilbert model: bursts end after `burst` packets on average. They start so often that the total loss is as
    // given.
    let loss = percent / 100.0;
    let end = 1.0 / burst;
    let start = loss * end / (1.0 - loss);
    format!("burst-start={:.6}% burst-end={:.4}% burst-loss=100%", start * 100.0, end * 100.0)
}

impl NetworkProfile {
    /// Creates a network that loses each packet independently.
    pub fn random(loss: f64, rtt_ms: u32) -> Self {
        Self { loss, burst: 1.0, rtt_ms }
    }

    /// Formats the loss as result rows show it: percent, and the mean length of bursts if there are any.
    pub fn loss_text(&self) -> String {
        match self.burst {
            burst if burst > 1.0 => format!("{}/{burst}", self.loss),
            _ => self.loss.to_string(),
        }
    }

    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(
            (0.0..100.0).contains(&self.loss),
            "a loss of {} % is out of range: it must be from 0 to less than 100",
            self.loss
        );
        let burst = self.burst;
        ensure!(
            (1.0..=1000.0).contains(&burst),
            "bursts of {burst} packets are out of range: they must have from 1 to 1000"
        );
        Ok(())
    }

    /// Returns a topology in which the queue of the link that loses packets holds one bandwidth-delay product, at least
    /// 64 KiB.
    pub fn topology(&self, rate_mbit: u32, lossy: Directions, seed: u64) -> anyhow::Result<Topology> {
        let Self { loss: percent, burst, rtt_ms } = self;
        let loss = loss(*percent, *burst);
        let queue = (u64::from(rate_mbit) * 125 * u64::from(*rtt_ms)).max(64 << 10);
        let mut topology = Topology::standard(1, 1);
        (topology.seed, topology.netem) = (seed, false);
        topology.impair(SUBSCRIBERS_LINK, Directions::Both, &format!("delay={}us", rtt_ms * 500))?;
        topology.impair(
            SUBSCRIBERS_LINK,
            lossy,
            &format!("rate={rate_mbit}mbit queue-bytes={queue} {loss}"),
        )?;
        Ok(topology)
    }
}

impl FromStr for NetworkProfile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wanted = || format!("{text:?} is no PERCENT[/BURST]:MS, such as 1:100 or 1/8:100");
        let (loss, rtt) = text.split_once(':').ok_or_else(wanted)?;
        let (loss, burst) = loss.split_once('/').unwrap_or((loss, "1"));
        let number = |text: &str| text.parse::<f64>().map_err(|_| wanted());
        Ok(Self { loss: number(loss)?, burst: number(burst)?, rtt_ms: rtt.parse().map_err(|_| wanted())? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::Impairment;

    #[test]
    fn emulated_networks_are_parsed() {
        assert_eq!("1:100".parse(), Ok(NetworkProfile::random(1.0, 100)));
        let bursts: NetworkProfile = "0.5/8:600".parse().expect("a network");
        assert_eq!((bursts.loss, bursts.burst, bursts.rtt_ms), (0.5, 8.0, 600));
        assert_eq!(
            (bursts.loss_text(), NetworkProfile::random(5.0, 1).loss_text()),
            ("0.5/8".into(), "5".into())
        );
        for bad in ["", "1", "1:", "1/:5", "1/a:5", "1/8", "1:8/5", "1:-5"] {
            assert!(bad.parse::<NetworkProfile>().is_err(), "{bad}");
        }
        for bad in ["100:1", "-1:1", "nan:1", "1/0.5:1", "1/1001:1", "1/nan:1"] {
            assert!(bad.parse::<NetworkProfile>().expect("numbers").check().is_err(), "{bad}");
        }
    }

    /// Gilbert's model puts start / (start + end) of all packets into bursts, which lose every packet.
    #[test]
    fn loss_bursts_add_up_to_the_requested_loss_rate() {
        for (percent, burst) in [(1.0, 8.0), (5.0, 2.0), (0.1, 100.0)] {
            let made = Impairment::parse(&loss(percent, burst)).expect("an impairment");
            let lost = made.burst_loss * made.burst_start / (made.burst_start + made.burst_end);
            assert!((lost * 100.0 - percent).abs() < 0.001 * percent, "{percent}/{burst}: {lost}");
            assert!((1.0 / made.burst_end - burst).abs() < 0.001 * burst);
            assert_eq!(made.loss, 0.0);
        }
        assert_eq!(loss(0.0, 8.0), "loss=0%");
    }
}
