//! One row of the table: a relay with interfaces of one kind, a publisher, a subscriber, and how media arrived.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use millrace_relay::status::Status;
use serde::Deserialize;
use serde_json::{Value, json};

use super::kind::{InterfaceKind, LabInterfaces};
use crate::bench::{BenchProcess, ContenderIdentity, listens};
use crate::lab::{Lab, LabNode, Topology};
use crate::program::product;

const PORT: u16 = 4443;
const HTTP: &str = "127.0.0.1:9184";
/// Size of an object, bytes. It fills several packets, so the publisher sends super-packets.
const OBJECT_BYTES: u32 = 20_000;
const OBJECTS_PER_GROUP: u32 = 30;
/// Time that a process may take to start on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// The setup that one row of the table tests: a kind of network interface, with or without offloads, and with or
/// without the packet gate (XDP).
#[derive(Debug, Clone, Copy)]
pub struct CaseSetup {
    pub kind: InterfaceKind,
    /// Whether offloads are on: super-packets and packets without checksums may then cross the links.
    pub offloads: bool,
    pub gate: bool,
    /// Time that the publisher sends.
    pub duration: Duration,
    pub rate_hz: u32,
}

/// One row of the table: the tested kind of interface, whether offloads and the packet gate were on, and the result.
pub struct InterfaceRow {
    pub setup: CaseSetup,
    outcome: CaseOutcome,
}

enum CaseOutcome {
    Forwarded(InterfaceFigures),
    /// The relay did not start, for this reason.
    Refused(String),
    /// This kernel does not support the interface, for this reason.
    Absent(String),
}

struct InterfaceFigures {
    /// Share of the media's bytes that the kernel sent, percent. The first quarter of the objects is left out.
    share: f64,
    super_packets: u64,
    published: u64,
    received: CaseReceived,
    /// Reasons for which packets were left to userspace, the most frequent first.
    reasons: Vec<(String, u64)>,
}

#[derive(Deserialize)]
struct CasePublished {
    objects: u64,
}

#[derive(Deserialize)]
struct CaseReceived {
    delivered: u64,
    lost: u64,
    duplicates: u64,
    corrupted: u64,
}

pub fn measure(setup: &CaseSetup) -> anyhow::Result<InterfaceRow> {
    let mut topology = Topology::standard(1, 1);
    topology.offloads = setup.offloads;
    topology.mtu = setup.kind.mtu();
    let lab = Lab::new(&topology).context("cannot make the lab")?;
    let relay = lab.node("relay")?;
    let outcome = match setup.kind.missing(relay) {
        Some(said) => CaseOutcome::Absent(said),
        None => {
            let made = setup.kind.make(&lab, setup.offloads)?;
            let directory = tempfile::tempdir()?;
            CaseRun { setup, lab: &lab, relay, made: &made, directory: directory.path() }.outcome()?
        }
    };
    Ok(InterfaceRow { setup: *setup, outcome })
}

struct CaseRun<'lab> {
    setup: &'lab CaseSetup,
    lab: &'lab Lab,
    relay: &'lab LabNode,
    made: &'lab LabInterfaces,
    directory: &'lab Path,
}

impl CaseRun<'_> {
    fn outcome(&self) -> anyhow::Result<CaseOutcome> {
        let mut relay = self.start_relay()?;
        // If the relay has ended, its output contains the reason.
        match self.media(&mut relay) {
            Ok(figures) => Ok(CaseOutcome::Forwarded(figures)),
            Err(error) => match relay.check_runs() {
                Err(ended) => Ok(CaseOutcome::Refused(ended.to_string())),
                Ok(()) => Err(error),
            },
        }
    }

    fn media(&self, relay: &mut BenchProcess) -> anyhow::Result<InterfaceFigures> {
        let bound = || self.relay.enter(|| listens(PORT)).unwrap_or(false);
        relay.wait_until("listening", LIMIT, bound)?;
        relay.wait_until("answering", LIMIT, || self.status().is_ok())?;
        let url = format!("moqt://{}:{PORT}", self.relay.addr_v4());
        let mut publisher = self.client("pub", "publisher", &self.publishing(&url))?;
        let is_there = || self.status().is_ok_and(|status| status.sessions.iter().any(|one| one.publisher));
        publisher.wait_until("known to the relay", LIMIT, is_there)?;
        let subscribing = format!(
            "subscribe --name lab --track objects --json --tls-disable-verify --reconnect=false {url}"
        );
        let subscriber = self.client("sub1", "subscriber", &subscribing)?;
        // The first quarter is left out: userspace starts the streams, and congestion windows are still small.
        let beginning = (self.setup.duration.as_secs() * u64::from(self.setup.rate_hz)).div_ceil(4);
        let mut kernel = 0;
        let mut user = 0;
        publisher.wait_until("a quarter of the objects", self.setup.duration + LIMIT, || {
            let Ok(status) = self.status() else { return false };
            (kernel, user) = (status.totals.kernel.bytes, status.totals.data_plane.bytes);
            status.totals.objects_received >= beginning
        })?;
        let published: CasePublished = serde_json::from_str(&publisher.finish(self.setup.duration + LIMIT)?)?;
        let received: CaseReceived = serde_json::from_str(&subscriber.finish(LIMIT)?)?;
        let status = self.status().context("cannot read the relay's status")?;
        let kernel = status.totals.kernel.bytes - kernel;
        let user = status.totals.data_plane.bytes - user;
        let packets = status.engine.received.unwrap_or_default();
        Ok(InterfaceFigures {
            share: 100.0 * kernel as f64 / (kernel + user).max(1) as f64,
            super_packets: packets.get("segmented").copied().unwrap_or(0)
                + packets.get("super_packet").copied().unwrap_or(0),
            published: published.objects,
            received,
            reasons: reasons(&packets, status.engine.copies.as_ref()),
        })
    }

    fn start_relay(&self) -> anyhow::Result<BenchProcess> {
        let identity = ContenderIdentity::create(&self.directory.join("identity"), self.relay.addr_v4())?;
        let mut command = self.command(&format!(
            "relay --listen {}:{PORT} --public --engine kernel --gate {} --interface {} --http {HTTP} --http-token-file off \
             --max-delay off --log-level warn",
            self.relay.addr_v4(),
            if self.setup.gate { "on" } else { "off" },
            self.made.interfaces.join(","),
        ))?;
        command.arg("--tls-cert").arg(&identity.certificate).arg("--tls-key").arg(&identity.key);
        BenchProcess::start("relay", command, self.directory)
    }

    /// Returns a command that runs `millrace` on the relay's node.
    fn command(&self, arguments: &str) -> anyhow::Result<Command> {
        let mut command = self.relay.command(product()?);
        command.args(arguments.split_whitespace());
        Ok(command)
    }

    fn status(&self) -> anyhow::Result<Status> {
        let output = self.command(&format!("status --json --http {HTTP} --http-token-file off"))?.output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    fn client(&self, node: &str, name: &'static str, arguments: &str) -> anyhow::Result<BenchProcess> {
        let mut command = self.lab.node(node)?.command(product()?);
        command.args(arguments.split_whitespace());
        BenchProcess::start(name, command, self.directory)
    }

    fn publishing(&self, url: &str) -> String {
        let CaseSetup { duration, rate_hz, .. } = self.setup;
        format!(
            "publish --name lab --generate --wait --json --reconnect=false --tls-disable-verify --object-bytes {OBJECT_BYTES} \
             --rate-hz {rate_hz} --objects-per-group {OBJECTS_PER_GROUP} --duration {} {url}",
            duration.as_secs()
        )
    }
}

/// Returns the three most frequent reasons for which the kernel left packets, or their copies for subscribers, to
/// userspace, with counts.
fn reasons(packets: &BTreeMap<String, u64>, copies: Option<&BTreeMap<String, u64>>) -> Vec<(String, u64)> {
    const GOOD: [&str; 6] =
        ["forwarded", "segmented", "continued", "not_udp", "other_port", "from_subscriber"];
    let copies = copies.into_iter().flatten().filter(|(name, _)| name.as_str() != "sent");
    let packets = packets.iter().filter(|(name, _)| !GOOD.contains(&name.as_str()));
    let mut all: Vec<_> =
        packets.chain(copies).filter(|(_, count)| **count > 0).map(|(name, n)| (name.clone(), *n)).collect();
    all.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    all.truncate(3);
    all
}

impl CaseSetup {
    pub fn label(&self) -> String {
        let on = |on| if on { "on" } else { "off" };
        format!("{}, offloads {}, gate {}", self.kind, on(self.offloads), on(self.gate))
    }
}

impl InterfaceFigures {
    fn is_intact(&self) -> bool {
        let CaseReceived { delivered, lost, duplicates, corrupted } = self.received;
        delivered == self.published && delivered > 0 && [lost, duplicates, corrupted] == [0; 3]
    }

    fn said(&self) -> String {
        let reasons = self.reasons.iter().map(|(reason, count)| format!("{reason} {count}"));
        reasons.collect::<Vec<_>>().join(", ")
    }
}

impl InterfaceRow {
    /// Reports whether the media arrived intact and the kernel sent at least `least` percent of the bytes. If the relay
    /// refused the interface, or this kernel does not support the interface, the row must have a reason instead.
    pub fn is_good(&self, least: f64) -> bool {
        match &self.outcome {
            CaseOutcome::Forwarded(figures) => figures.is_intact() && figures.share >= least,
            CaseOutcome::Refused(said) | CaseOutcome::Absent(said) => !said.is_empty(),
        }
    }

    pub fn is_forwarded(&self) -> bool {
        matches!(self.outcome, CaseOutcome::Forwarded(_))
    }

    pub fn told(&self) -> String {
        match &self.outcome {
            CaseOutcome::Forwarded(figures) => {
                let intact = if figures.is_intact() { "intact" } else { "not intact" };
                format!("{:.1} %, {intact}; {}", figures.share, figures.said())
            }
            CaseOutcome::Refused(said) => format!("refused: {said}"),
            CaseOutcome::Absent(said) => format!("not in this kernel: {said}"),
        }
    }

    pub fn cells(&self) -> Vec<String> {
        let on = |on: bool| if on { "on" } else { "off" }.to_owned();
        let mut cells = vec![self.setup.kind.to_string(), on(self.setup.offloads), on(self.setup.gate)];
        cells.extend(match &self.outcome {
            CaseOutcome::Forwarded(figures) => [
                format!("{:.1} %", figures.share),
                figures.super_packets.to_string(),
                format!("{}/{}", figures.received.delivered, figures.published),
                if figures.is_intact() { "yes" } else { "no" }.to_owned(),
                figures.said(),
            ],
            _ => ["-".into(), "-".into(), "-".into(), "-".into(), self.told()],
        });
        cells
    }

    pub fn json(&self) -> Value {
        let CaseSetup { kind, offloads, gate, .. } = self.setup;
        let mut row = json!({"interface": kind.name(), "offloads": offloads, "gate": gate});
        let more = match &self.outcome {
            CaseOutcome::Forwarded(figures) => json!({
                "kernel_percent": figures.share,
                "super_packets": figures.super_packets,
                "published": figures.published,
                "delivered": figures.received.delivered,
                "intact": figures.is_intact(),
                "reasons": figures.reasons.iter().cloned().collect::<BTreeMap<_, _>>(),
            }),
            CaseOutcome::Refused(said) => json!({"refused": said}),
            CaseOutcome::Absent(said) => json!({"absent": said}),
        };
        if let (Some(row), Value::Object(more)) = (row.as_object_mut(), more) {
            row.extend(more);
        }
        row
    }
}
