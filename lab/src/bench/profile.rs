//! Named impairments of the link between the relay and its subscribers.

use std::time::Duration;

use super::replay::{self, LinkStep};
use crate::lab::{Directions, Topology};

/// Impairment of the link between a relay and its subscribers. With the same random seed, the same packets are lost and
/// delayed for every relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum LinkProfile {
    /// No impairment
    Clean,
    /// Delay of 20 ms in each direction, 0.5 % of packets lost
    Noisy,
    /// Delay of 20 ms in each direction, 1 % of packets lost
    Loss1,
    /// Delay of 20 ms in each direction, 2 % of packets lost
    Lossy,
    /// Delay of 20 ms in each direction, bursts of losses that last four packets on average and take a thirtieth of the
    /// time
    Bursts,
    /// Delay of 20 ms in each direction, 4 ms of jitter, 2 % of packets overtaken by up to 5 ms
    Reorder,
    /// Delay of 20 ms in each direction, three fifths of the rate that one subscriber needs, a queue of 100 ms
    Bottleneck,
    /// Delay of 20 ms in each direction, three fifths of the rate that one subscriber needs, a queue of 2 s
    Bufferbloat,
    /// A radio link of a moving receiver: rate and delay change every half second, a queue of 300 ms
    Mobile,
}

impl LinkProfile {
    pub fn name(self) -> &'static str {
        match self {
            Self::Clean => "clean",
            Self::Noisy => "noisy",
            Self::Loss1 => "loss1",
            Self::Lossy => "lossy",
            Self::Bursts => "bursts",
            Self::Reorder => "reorder",
            Self::Bottleneck => "bottleneck",
            Self::Bufferbloat => "bufferbloat",
            Self::Mobile => "mobile",
        }
    }

    /// Reports whether the link's rate is at times too low for one subscriber.
    pub fn is_narrow(self) -> bool {
        matches!(self, Self::Bottleneck | Self::Bufferbloat | Self::Mobile)
    }

    /// Returns the shortest latency of a packet that was lost once and sent again: three times the one-way delay, and
    /// the time in which the sender sends three more packets. Returns `None` for links without random loss.
    pub fn repair_floor(self, rate_hz: u32) -> Option<Duration> {
        const ONE_WAY: Duration = Duration::from_millis(20);
        const PACKET_THRESHOLD: f64 = 3.0;
        let wait = Duration::from_secs_f64(PACKET_THRESHOLD / f64::from(rate_hz));
        matches!(self, Self::Noisy | Self::Loss1 | Self::Lossy).then(|| 3 * ONE_WAY + wait)
    }

    /// Returns the link's settings; `None` for a link without impairment. `offered` is the rate of media to one
    /// subscriber, bits per second.
    pub fn settings(self, offered: u64) -> Option<String> {
        let rate = offered * 3 / 5;
        let queue = |ms: u64| rate / 8 * ms / 1000;
        Some(match self {
            Self::Clean => return None,
            Self::Noisy => "delay=20ms loss=0.5%".to_owned(),
            Self::Loss1 => "delay=20ms loss=1%".to_owned(),
            Self::Lossy => "delay=20ms loss=2%".to_owned(),
            Self::Bursts => "delay=20ms burst-start=0.8% burst-end=25% burst-loss=100%".to_owned(),
            Self::Reorder => "delay=20ms jitter=4ms reorder=2% reorder-by=5ms".to_owned(),
            Self::Bottleneck => format!("delay=20ms rate={rate}bit queue-bytes={}", queue(100)),
            Self::Bufferbloat => format!("delay=20ms rate={rate}bit queue-bytes={}", queue(2000)),
            Self::Mobile => replay::mobile(offered).next()?.settings(),
        })
    }

    /// Returns the changes of the link's rate and delay during a measurement; `None` if rate and delay are constant.
    pub fn changes(self, offered: u64) -> Option<impl Iterator<Item = LinkStep>> {
        (self == Self::Mobile).then(|| replay::mobile(offered))
    }

    /// Returns a topology with publisher, relay and subscribers, where `link` has this impairment.
    pub fn topology(self, link: &str, offered: u64) -> anyhow::Result<Topology> {
        let mut topology = Topology::standard(1, 1);
        if let Some(settings) = self.settings(offered) {
            topology.impair(link, Directions::Both, &settings)?;
        }
        Ok(topology)
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn lab_accepts_every_impairment_profile() {
        for profile in LinkProfile::value_variants() {
            let topology = profile.topology("relay-sub1", 4_800_000).unwrap();
            let link = topology.links.iter().find(|link| link.name == "relay-sub1").unwrap();
            assert_eq!(link.forward.is_perfect(), *profile == LinkProfile::Clean, "{profile:?}");
            assert_eq!(profile.to_possible_value().unwrap().get_name(), profile.name());
        }
    }
}
