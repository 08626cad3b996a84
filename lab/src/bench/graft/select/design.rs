//! Draws the networks from a Latin hypercube, so that even a few networks cover each dimension evenly.

use std::str::FromStr;

use crate::train::runs::TrainingNetwork;

use crate::bench::graft::network::loss;

/// Range of a property of the drawn networks, such as the round-trip time: its lowest and highest value, both above 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DesignRange(f64, f64);

impl FromStr for DesignRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts =
            text.split_once(':').and_then(|(low, high)| Some((low.parse().ok()?, high.parse().ok()?)));
        match parts {
            Some((low, high)) if 0.0 < low && low <= high && high <= 1e5 => Ok(Self(low, high)),
            _ => Err(format!("{text:?} is no LOW:HIGH, such as 0.5:100")),
        }
    }
}

impl DesignRange {
    /// Interpolates on a logarithmic scale: returns the lowest value of the range for `share` 0, and the highest for 1.
    fn at(self, share: f64) -> f64 {
        self.0 * (self.1 / self.0).powf(share)
    }
}

/// Returns `count` networks whose properties are drawn from a Latin hypercube. The same arguments give the same
/// networks.
pub fn networks(
    count: usize,
    cube: u64,
    rtts_ms: DesignRange,
    rates_mbit: DesignRange,
) -> Vec<TrainingNetwork> {
    let mut random = fastrand::Rng::with_seed(cube);
    let dimensions: [Vec<f64>; 8] = std::array::from_fn(|_| dimension(count, &mut random));
    let network = |at: usize| {
        let [rtt, rate, loss, burst, queue, jitter, reorder, cross] =
            dimensions.each_ref().map(|shares| shares[at]);
        let rtt_ms = rtts_ms.at(rtt);
        let network = TrainingNetwork {
            rtt_ms,
            rate_mbit: rates_mbit.at(rate),
            // A quarter of the networks loses nothing, and small losses are more frequent than large ones.
            loss_percent: 5.0 * beyond(0.25, loss).powi(2),
            burst_packets: DesignRange(1.0, 8.0).at(beyond(0.5, burst)),
            queue_bdp: DesignRange(0.25, 4.0).at(queue),
            jitter_ms: rtt_ms * 0.1 * beyond(0.5, jitter),
            reorder_percent: 2.0 * beyond(0.75, reorder),
            cross_percent: 50.0 * beyond(0.5, cross),
        };
        rounded(network)
    };
    (0..count).map(network).collect()
}

/// Returns random values, one in each of `count` equal parts of 0 to 1, in random order.
fn dimension(count: usize, random: &mut fastrand::Rng) -> Vec<f64> {
    let mut shares: Vec<f64> = (0..count).map(|part| (part as f64 + random.f64()) / count as f64).collect();
    random.shuffle(&mut shares);
    shares
}

/// Maps values up to `share` to 0, and values from `share` to 1 linearly to 0 to 1.
fn beyond(share: f64, value: f64) -> f64 {
    ((value - share) / (1.0 - share)).max(0.0)
}

/// Rounds the properties of a network to the three decimals that the CSV file of results keeps.
fn rounded(network: TrainingNetwork) -> TrainingNetwork {
    let round = |value: f64| (value * 1e3).round() / 1e3;
    TrainingNetwork {
        rtt_ms: round(network.rtt_ms),
        rate_mbit: round(network.rate_mbit),
        loss_percent: round(network.loss_percent),
        burst_packets: round(network.burst_packets),
        queue_bdp: round(network.queue_bdp),
        jitter_ms: round(network.jitter_ms),
        reorder_percent: round(network.reorder_percent),
        cross_percent: round(network.cross_percent),
    }
}

/// Returns the impairment of the link in the direction of the data.
pub fn impairment(network: &TrainingNetwork) -> String {
    let TrainingNetwork {
        rtt_ms,
        rate_mbit,
        loss_percent,
        burst_packets,
        queue_bdp,
        jitter_ms,
        reorder_percent,
        ..
    } = network;
    // The queue has room for sixteen packets, even if the bandwidth-delay product is smaller.
    let queue = (rate_mbit * 125.0 * rtt_ms * queue_bdp).max(24e3) as u64;
    let mut text = format!(
        "rate={}bit queue-bytes={queue} jitter={}us",
        (rate_mbit * 1e6) as u64,
        (jitter_ms * 1e3) as u64
    );
    // If the mean burst is shorter than 1.5 packets, packets are lost independently.
    let burst = if *burst_packets < 1.5 { 1.0 } else { *burst_packets };
    text += &format!(" {}", loss(*loss_percent, burst));
    if *reorder_percent > 0.0 {
        text += &format!(" reorder={reorder_percent}% reorder-by={}us", (rtt_ms * 250.0).max(200.0) as u64);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lab::Impairment;

    #[test]
    fn hypercube_sample_has_one_network_in_each_interval_of_a_dimension() {
        let all = networks(64, 1, DesignRange(1.0, 800.0), DesignRange(0.5, 100.0));
        let mut parts: Vec<usize> =
            all.iter().map(|it| ((it.rtt_ms.ln() / 800_f64.ln() * 64.0) as usize).min(63)).collect();
        parts.sort_unstable();
        parts.dedup();
        assert!(parts.len() >= 60, "rounding moves few of them: {}", parts.len());
        let share = |of: fn(&TrainingNetwork) -> bool| all.iter().filter(|it| of(it)).count();
        assert!((16..=18).contains(&share(|it| it.loss_percent == 0.0)));
        assert_eq!(share(|it| it.cross_percent == 0.0), 32);
        assert!(all.iter().all(|it| it.loss_percent <= 5.0 && (0.25..=4.0).contains(&it.queue_bdp)));
        assert_eq!(all, networks(64, 1, DesignRange(1.0, 800.0), DesignRange(0.5, 100.0)));
        assert_ne!(all, networks(64, 2, DesignRange(1.0, 800.0), DesignRange(0.5, 100.0)));
    }

    #[test]
    fn lab_can_emulate_every_network_of_the_latin_hypercube_sample() {
        for network in networks(200, 3, DesignRange(1.0, 800.0), DesignRange(0.5, 100.0)) {
            let text = impairment(&network);
            let made = Impairment::parse(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
            let loss = match made.burst_start {
                0.0 => made.loss,
                start => start / (start + made.burst_end),
            };
            assert!((loss * 100.0 - network.loss_percent).abs() < 0.01, "{text}");
        }
    }

    #[test]
    fn ranges_of_the_latin_hypercube_sample_are_parsed() {
        assert_eq!("0.5:100".parse(), Ok(DesignRange(0.5, 100.0)));
        for bad in ["", "1", "1:a", "0:1", "2:1", "1:nan", "1:1e9"] {
            assert!(bad.parse::<DesignRange>().is_err(), "{bad}");
        }
    }
}
