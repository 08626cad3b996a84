//! Paths that are probed again and again, and how much probing there may be.

use std::{collections::BTreeSet, net::IpAddr, time::Duration};

use serde::Deserialize;

/// Of the settings.
const PROBES_MAX: usize = 64;
const PERIOD_MIN: Duration = Duration::from_millis(5);
const DURATION_MAX: Duration = Duration::from_secs(600);
const PACKETS_MAX: u128 = 10_000;
const EVERY_MAX_S: u64 = 7 * 24 * 3600;
/// Between a probe's last packet and the next probe: answers may take three seconds.
const PAUSE: Duration = Duration::from_secs(5);

/// Of one path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    pub peer: IpAddr,
    /// `None`: by ICMP.
    pub udp_port: Option<u16>,
    /// Between two packets.
    pub period: Duration,
    pub duration: Duration,
    /// From the beginning of one to that of the next.
    pub every: Duration,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Raw {
    peer: IpAddr,
    udp_port: Option<u16>,
    #[serde(default = "usual_period_ms")]
    period_ms: u64,
    #[serde(default = "usual_duration_ms")]
    duration_ms: u64,
    #[serde(default = "usual_every_s")]
    every_s: u64,
}

fn usual_period_ms() -> u64 {
    100
}

fn usual_duration_ms() -> u64 {
    5000
}

fn usual_every_s() -> u64 {
    600
}

/// Whether a probe is not too much.
pub fn check(period: Duration, duration: Duration) -> Result<(), String> {
    if period < PERIOD_MIN {
        return Err(format!("a period is at least {PERIOD_MIN:?}"));
    }
    if duration < period || duration > DURATION_MAX {
        return Err(format!("a duration is from one period to {DURATION_MAX:?}"));
    }
    let packets = duration.as_nanos() / period.as_nanos();
    if packets > PACKETS_MAX {
        return Err(format!("{packets} packets are more than {PACKETS_MAX}"));
    }
    Ok(())
}

pub(super) fn check_count(raw: &[Raw]) -> Result<(), String> {
    match raw.len() {
        0..=PROBES_MAX => Ok(()),
        count => Err(format!("there are {count} probes: at most {PROBES_MAX}")),
    }
}

/// Checks one probe after the other: each is of another path.
pub(super) fn unlike_others() -> impl FnMut(Raw) -> Result<Probe, String> {
    let mut paths = BTreeSet::new();
    move |raw| {
        let peer = raw.peer;
        let probe = raw.checked().map_err(|error| format!("probe of {peer}: {error}"))?;
        match paths.insert((probe.peer, probe.udp_port)) {
            true => Ok(probe),
            false => Err(format!("probe of {peer}: there are two of the same path")),
        }
    }
}

impl Raw {
    fn checked(self) -> Result<Probe, String> {
        let (period, duration) =
            (Duration::from_millis(self.period_ms), Duration::from_millis(self.duration_ms));
        check(period, duration)?;
        let every = Duration::from_secs(self.every_s.min(EVERY_MAX_S + 1));
        if every < duration + PAUSE || self.every_s > EVERY_MAX_S {
            return Err(format!("every-s is from the duration and {PAUSE:?} more to {EVERY_MAX_S}"));
        }
        if self.udp_port == Some(0) {
            return Err("udp-port is 1 to 65535".to_owned());
        }
        Ok(Probe { peer: self.peer, udp_port: self.udp_port, period, duration, every })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Settings;

    #[test]
    fn probes_are_read() {
        let settings = Settings::parse("[[probe]]\npeer = \"2001:db8::1\"\nudp-port = 7\nevery-s = 60\n");
        let probe = Probe {
            peer: "2001:db8::1".parse().expect("an address"),
            udp_port: Some(7),
            period: Duration::from_millis(100),
            duration: Duration::from_secs(5),
            every: Duration::from_secs(60),
        };
        assert_eq!(settings.expect("settings").probes, [probe]);
    }

    #[test]
    fn what_is_too_much_is_refused() {
        let probe = "[[probe]]\npeer = \"192.0.2.1\"\n";
        let many: String = (0..65).map(|at| format!("[[probe]]\npeer = \"192.0.2.{at}\"\n")).collect();
        for (text, wanted) in [
            (format!("{probe}period-ms = 4\n"), "probe of 192.0.2.1: a period is at least 5ms"),
            (format!("{probe}duration-ms = 99\n"), "from one period to 600s"),
            (format!("{probe}duration-ms = 600001\n"), "from one period to 600s"),
            (format!("{probe}period-ms = 5\nduration-ms = 60000\n"), "12000 packets"),
            (format!("{probe}every-s = 9\n"), "from the duration and 5s more"),
            (format!("{probe}every-s = 604801\n"), "to 604800"),
            (format!("{probe}udp-port = 0\n"), "udp-port is 1 to 65535"),
            (format!("{probe}{probe}"), "two of the same path"),
            (probe.replace("192.0.2.1", "host"), "probe[0].peer: is an address"),
            (many, "65 probes: at most 64"),
        ] {
            let error = Settings::parse(&text).expect_err(wanted).to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
        assert!(Settings::parse(&format!("{probe}{probe}udp-port = 7\n")).is_ok(), "two ways to one peer");
    }
}
