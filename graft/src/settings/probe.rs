//! Settings of paths that are probed at regular intervals, and the limits of all probes.

use std::{collections::BTreeSet, net::IpAddr, time::Duration};

use serde::Deserialize;

/// Limit of probes that the settings may schedule.
const PROBES_MAX: usize = 64;
const PERIOD_MIN: Duration = Duration::from_millis(5);
const DURATION_MAX: Duration = Duration::from_secs(600);
const PACKETS_MAX: u128 = 10_000;
const EVERY_MAX_S: u64 = 7 * 24 * 3600;
/// Pause between the last packet of a probe and the start of the next probe, since answers may take three seconds.
const PAUSE: Duration = Duration::from_secs(5);

/// The settings of a probe of one path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeSettings {
    /// Address of the peer.
    pub peer: IpAddr,
    /// UDP port to probe, or `None` for a probe by ICMP.
    pub udp_port: Option<u16>,
    /// Interval between packets of the probe.
    pub period: Duration,
    /// Duration of one probe.
    pub duration: Duration,
    /// Interval from the start of one probe to the start of the next.
    pub every: Duration,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct RawProbe {
    /// Address of the peer to probe.
    peer: IpAddr,
    /// UDP port to probe. Without it the probe uses ICMP.
    udp_port: Option<u16>,
    /// Milliseconds between two packets of the probe: at least 5, and 100 by default.
    #[serde(default = "usual_period_ms")]
    period_ms: u64,
    /// Milliseconds that a probe takes, 5000 by default. At most 600,000, and at most the time for 10,000 packets.
    #[serde(default = "usual_duration_ms")]
    duration_ms: u64,
    /// Seconds from the start of one probe to the start of the next, 600 by default.
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

/// Checks that a probe does not exceed the limits of its rate and duration.
pub fn check(period: Duration, duration: Duration) -> Result<(), String> {
    if period < PERIOD_MIN {
        return Err(format!("the period has to be at least {PERIOD_MIN:?}"));
    }
    if duration < period || duration > DURATION_MAX {
        return Err(format!("the duration has to be from one period to {DURATION_MAX:?}"));
    }
    let packets = duration.as_nanos() / period.as_nanos();
    if packets > PACKETS_MAX {
        return Err(format!("the probe would send {packets} packets, and the limit is {PACKETS_MAX}"));
    }
    Ok(())
}

pub(super) fn check_count(raw: &[RawProbe]) -> Result<(), String> {
    match raw.len() {
        0..=PROBES_MAX => Ok(()),
        count => Err(format!("the settings have {count} probes, and the limit is {PROBES_MAX}")),
    }
}

/// Returns a function that checks one probe after another, and refuses a second probe of the same path.
pub(super) fn unlike_others() -> impl FnMut(RawProbe) -> Result<ProbeSettings, String> {
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

impl RawProbe {
    fn checked(self) -> Result<ProbeSettings, String> {
        let period = Duration::from_millis(self.period_ms);
        let duration = Duration::from_millis(self.duration_ms);
        check(period, duration)?;
        let every = Duration::from_secs(self.every_s.min(EVERY_MAX_S + 1));
        if every < duration + PAUSE || self.every_s > EVERY_MAX_S {
            return Err(format!("every-s is from the duration and {PAUSE:?} more to {EVERY_MAX_S}"));
        }
        if self.udp_port == Some(0) {
            return Err("udp-port is 1 to 65535".to_owned());
        }
        Ok(ProbeSettings { peer: self.peer, udp_port: self.udp_port, period, duration, every })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Settings;

    #[test]
    fn probe_settings_are_read() {
        let settings = Settings::parse("[[probe]]\npeer = \"2001:db8::1\"\nudp-port = 7\nevery-s = 60\n");
        let probe = ProbeSettings {
            peer: "2001:db8::1".parse().expect("an address"),
            udp_port: Some(7),
            period: Duration::from_millis(100),
            duration: Duration::from_secs(5),
            every: Duration::from_secs(60),
        };
        assert_eq!(settings.expect("settings").probes, [probe]);
    }

    #[test]
    fn path_probe_with_a_value_beyond_its_limit_is_refused() {
        let probe = "[[probe]]\npeer = \"192.0.2.1\"\n";
        let many: String = (0..65).map(|at| format!("[[probe]]\npeer = \"192.0.2.{at}\"\n")).collect();
        for (text, wanted) in [
            (format!("{probe}period-ms = 4\n"), "probe of 192.0.2.1: the period has to be at least 5ms"),
            (format!("{probe}duration-ms = 99\n"), "from one period to 600s"),
            (format!("{probe}duration-ms = 600001\n"), "from one period to 600s"),
            (format!("{probe}period-ms = 5\nduration-ms = 60000\n"), "12000 packets"),
            (format!("{probe}every-s = 9\n"), "from the duration and 5s more"),
            (format!("{probe}every-s = 604801\n"), "to 604800"),
            (format!("{probe}udp-port = 0\n"), "udp-port is 1 to 65535"),
            (format!("{probe}{probe}"), "two of the same path"),
            (probe.replace("192.0.2.1", "host"), "probe[0].peer: is an address"),
            (many, "65 probes, and the limit is 64"),
        ] {
            let error = Settings::parse(&text).expect_err(wanted).to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
        assert!(Settings::parse(&format!("{probe}{probe}udp-port = 7\n")).is_ok(), "two ways to one peer");
    }
}
