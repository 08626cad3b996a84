//! Impairs one direction of a link by the kernel's queueing discipline netem. It is used if the kernel supports it and
//! its result equals the emulator's.
//!
//! netem is attached to the sending node's device, so frames stay in the kernel. It differs from the emulator in some
//! ways: its jitter reorders packets, its queue includes packets on the wire, and on most kernels its random numbers
//! have no seed. So links with jitter, a rate, reordering or an MTU use the emulator.

use std::process::Command;

use parking_lot::Mutex;
use serde::Deserialize;

use super::impair::{Impairment, Settings};
use super::netns::{Netns, check};
use super::shape::FrameCounters;
use super::{Error, Result};

/// Largest number of frames on the wire. No lab reaches it: even with a delay of one second, that takes a million
/// frames per second, and no lab has that rate.
const LIMIT: &str = "1000000";

/// Reports whether the kernel has netem, by attaching it to the loopback device of the calling thread's namespace.
pub(super) fn is_available() -> bool {
    tc(&["qdisc", "replace", "dev", "lo", "root", "netem"]).is_ok()
        && tc(&["qdisc", "delete", "dev", "lo", "root"]).is_ok()
}

/// Reports whether netem would have the same effect as the emulator with these impairments.
pub(super) fn can(impairment: &Impairment) -> bool {
    let Impairment { jitter, reorder, rate, mtu, .. } = impairment;
    jitter.is_zero() && *reorder == 0.0 && rate.is_none() && mtu.is_none()
}

pub(super) struct NetemQdisc {
    link: String,
    netns: Netns,
    device: String,
    settings: Mutex<Impairment>,
}

impl NetemQdisc {
    pub(super) fn attach(link: &str, netns: Netns, device: &str, settings: Impairment) -> Result<Self> {
        let perfect = Mutex::new(Impairment::default());
        let qdisc = Self { link: link.into(), netns, device: device.into(), settings: perfect };
        qdisc.set(settings)?;
        Ok(qdisc)
    }

    pub(super) fn settings(&self) -> Impairment {
        self.settings.lock().clone()
    }

    pub(super) fn set(&self, settings: Impairment) -> Result<()> {
        self.replace(&mut self.settings.lock(), settings)
    }

    pub(super) fn change(&self, change: &Settings) -> Result<()> {
        let mut current = self.settings.lock();
        let mut changed = current.clone();
        changed.apply(change)?;
        self.replace(&mut current, changed)
    }

    fn replace(&self, current: &mut Impairment, settings: Impairment) -> Result<()> {
        if !can(&settings) {
            return Err(Error::NotByNetem(self.link.clone()));
        }
        let mut line = ["qdisc", "replace", "dev", &self.device, "root"].map(str::to_owned).to_vec();
        line.extend(arguments(&settings));
        let line: Vec<&str> = line.iter().map(String::as_str).collect();
        self.netns.enter(|| tc(&line))??;
        *current = settings;
        Ok(())
    }

    /// Reads netem's counters. They do not count duplicates, and count every dropped packet as lost.
    pub(super) fn counters(&self) -> Result<FrameCounters> {
        let line = ["-s", "-json", "qdisc", "show", "dev", &self.device, "root"];
        let text = self.netns.enter(|| tc(&line))??;
        parse(&text).ok_or_else(|| Error::Invalid(format!("tc shows no netem on {}: {text}", self.device)))
    }
}

fn arguments(settings: &Impairment) -> Vec<String> {
    let percent = |share: f64| format!("{}%", share * 100.0);
    let micros = format!("{:.3}us", settings.delay.as_nanos() as f64 / 1e3);
    let mut arguments = vec!["netem".to_owned(), "limit".into(), LIMIT.into(), "delay".into(), micros];
    if settings.burst_start > 0.0 {
        // Arguments of netem's option `loss gemodel` (Gilbert-Elliott), in order: p, r, loss within a burst, loss
        // outside of bursts.
        let Impairment { burst_start, burst_end, burst_loss, loss, .. } = *settings;
        arguments.extend(["loss".into(), "gemodel".into()]);
        arguments.extend([burst_start, burst_end, burst_loss, loss].map(percent));
    } else if settings.loss > 0.0 {
        arguments.extend(["loss".into(), "random".into(), percent(settings.loss)]);
    }
    if settings.duplicate > 0.0 {
        arguments.extend(["duplicate".into(), percent(settings.duplicate)]);
    }
    arguments
}

#[derive(Deserialize)]
struct NetemReport {
    kind: String,
    bytes: u64,
    packets: u64,
    drops: u64,
    qlen: u64,
}

fn parse(text: &str) -> Option<FrameCounters> {
    let shown: Vec<serde_json::Value> = serde_json::from_str(text).ok()?;
    let mut qdiscs = shown.into_iter().filter_map(|value| serde_json::from_value::<NetemReport>(value).ok());
    let NetemReport { bytes, packets, drops, qlen, .. } = qdiscs.find(|qdisc| qdisc.kind == "netem")?;
    Some(FrameCounters {
        received: packets + drops + qlen,
        received_bytes: bytes,
        delivered: packets,
        delivered_bytes: bytes,
        lost: drops,
        in_flight: qlen,
        ..FrameCounters::default()
    })
}

fn tc(arguments: &[&str]) -> Result<String> {
    let output = Command::new("tc").args(arguments).output();
    let output = output.map_err(|source| Error::Io { what: "run tc (iproute2)".into(), source })?;
    check("tc", &output)?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn netem_settings_become_tc_arguments() {
        for (settings, want) in [
            ("", "netem limit 1000000 delay 0.000us"),
            ("delay=10ms loss=1%", "netem limit 1000000 delay 10000.000us loss random 1%"),
            (
                "burst-start=1% burst-end=25% loss=0.5% duplicate=2%",
                "netem limit 1000000 delay 0.000us loss gemodel 1% 25% 100% 0.5% duplicate 2%",
            ),
        ] {
            assert_eq!(arguments(&Impairment::parse(settings).unwrap()).join(" "), want);
        }
    }

    #[test]
    fn impairments_that_netem_cannot_do_are_recognised() {
        for settings in ["jitter=1ms", "reorder=1%", "rate=1mbit", "mtu=1280"] {
            assert!(!can(&Impairment::parse(settings).unwrap()), "{settings}");
        }
        assert!(can(&Impairment::parse("delay=1ms loss=1% burst-start=1% duplicate=1%").unwrap()));
    }

    #[test]
    fn netem_counters_are_read_from_tc() {
        let text = r#"[{"kind":"netem","handle":"8001:","root":true,"refcnt":2,
            "options":{"limit":1000,"delay":{"delay":0.01,"jitter":0,"correlation":0}},
            "bytes":84000,"packets":80,"drops":20,"overlimits":0,"requeues":0,"backlog":0,"qlen":3}]"#;
        let counters = parse(text).unwrap();
        assert_eq!(
            (counters.received, counters.delivered, counters.lost, counters.in_flight),
            (103, 80, 20, 3)
        );
        assert_eq!(parse(r#"[{"kind":"noqueue","root":true}]"#), None);
    }
}
