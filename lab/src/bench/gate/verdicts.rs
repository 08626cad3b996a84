//! Measures the cost of each verdict of the gate's BPF program, which runs on one frame again and again.

use std::{net::IpAddr, path::Path, time::Duration};

use anyhow::{Context as _, anyhow, ensure};
use millrace_gate::kernel::{Config, GateReason, GateTotals, LoadedGate, Pass, Rule};
use millrace_kernel::xdp::{self, XdpMode};
use nix::sched::{CloneFlags, unshare};
use serde_json::json;

use super::super::table::{columns, write_json};

const RUNS: u32 = 1 << 20;
/// Index of the loopback interface, which is the same in every network namespace.
const LOOPBACK: i32 = 1;
const PORT: u16 = 443;
const CLIENT: [u8; 4] = [192, 0, 2, 7];
const SERVER: [u8; 4] = [198, 51, 100, 1];
const UDP: u8 = 17;
const TCP: u8 = 6;
const ID: [u8; 8] = [0xc1; 8];
const INITIAL: u8 = 0xc3;
const RETRY: u8 = 0xf3;
const DATAGRAM: usize = 1200;

/// A policy, a frame, and the reason of the gate's verdict on the frame; `None` if the gate does not count that
/// verdict.
struct VerdictCase {
    name: &'static str,
    reason: Option<GateReason>,
    policy: String,
    frame: Vec<u8>,
}

pub fn run(json: Option<&Path>) -> anyhow::Result<()> {
    let mut lines = vec![["verdict", "ns", "on an interface, ns"].map(str::to_owned).to_vec()];
    let mut rows = Vec::new();
    for case in cases() {
        let times = time(&case).with_context(|| case.name)?;
        let [ns, attached] = [times.alone, times.attached].map(|time| time.as_nanos() as u64);
        lines.push(vec![case.name.to_owned(), ns.to_string(), attached.to_string()]);
        rows.push(json!({"verdict": case.name, "ns": ns, "attached_ns": attached}));
    }
    print!("{}", columns(&lines));
    json.map_or(Ok(()), |path| write_json(path, &rows))
}

/// Mean run times of the packet gate's XDP programs for one frame.
struct VerdictTimes {
    /// Run time of the gate's program alone, without the root program that calls it on an interface.
    alone: Duration,
    /// Run time as on an interface: of the root program, of the gate that it calls, and of the call of the next
    /// program, which is absent.
    attached: Duration,
}

/// Times a verdict in a new network namespace, with the program attached to its loopback interface.
fn time(case: &VerdictCase) -> anyhow::Result<VerdictTimes> {
    std::thread::scope(|scope| {
        let timed = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET)?;
            time_here(case)
        });
        timed.join().map_err(|_| anyhow!("a measurement panicked"))?
    })
}

fn time_here(case: &VerdictCase) -> anyhow::Result<VerdictTimes> {
    let gate = LoadedGate::load(&Config::default())?;
    gate.apply(&millrace_gate::Policy::parse(&case.policy)?.rules)?;
    let web = gate.scope("web")?;
    web.inc(IpAddr::from(CLIENT))?;
    if case.reason == Some(GateReason::Passed(Pass::Live)) {
        web.publish(&ID)?;
    }
    gate.attach(LOOPBACK, XdpMode::Generic)?;
    let times = VerdictTimes {
        alone: gate.time(&case.frame, RUNS)?,
        attached: xdp::time(LOOPBACK, &case.frame, RUNS).context("the program of the interface")?,
    };
    if let Some(reason) = case.reason {
        let decided = count(&gate.statistics()?, reason);
        // Where the verdict comes from an empty token bucket, a few runs still get a token and another verdict. So nine
        // tenths of the runs must have the expected one.
        ensure!(
            decided > 2 * u64::from(RUNS) * 9 / 10,
            "only {decided} of 2 x {RUNS} runs gave the expected verdict"
        );
    }
    Ok(times)
}

fn count(statistics: &GateTotals, reason: GateReason) -> u64 {
    let counted = statistics.scopes.iter().map(|scope| match reason {
        GateReason::Refused(rule) => scope.rule(rule).packets,
        GateReason::Passed(pass) => scope.pass(pass).packets,
    });
    counted.sum()
}

fn cases() -> Vec<VerdictCase> {
    let refused = |rule: Rule, top: &str, scope: &str, rules: &str, frame: Vec<u8>| VerdictCase {
        name: rule.name(),
        reason: Some(GateReason::Refused(rule)),
        policy: policy(top, scope, rules),
        frame,
    };
    let passed =
        |name, reason, scope: &str, frame| VerdictCase { name, reason, policy: policy("", scope, ""), frame };
    let to = |payload| frame(UDP, 40000, PORT, payload);
    let opens = || to(long(INITIAL, 1, DATAGRAM));
    let published = "live = \"published\"\nid_bytes = 8";
    vec![
        passed("not UDP", None, "", frame(TCP, 40000, PORT, vec![0; 40])),
        passed("no scope", Some(GateReason::Passed(Pass::Other)), "", frame(UDP, 40000, 53, vec![0; 40])),
        passed("live", Some(GateReason::Passed(Pass::Live)), published, to(short())),
        refused(Rule::Block, "block = [\"192.0.2.0/24\"]", "", "", opens()),
        refused(Rule::Short, "", "", "", to(vec![0x40; 10])),
        refused(Rule::Malformed, "", "", "", to(long(RETRY, 1, DATAGRAM))),
        refused(
            Rule::Version,
            "",
            "",
            "version = { speaks = [1] }",
            to(long(INITIAL, 0x0a0a_0a0a, DATAGRAM)),
        ),
        refused(Rule::InitialSize, "", "", "", to(long(INITIAL, 1, DATAGRAM / 2))),
        refused(Rule::SourcePort, "", "", "", frame(UDP, 53, PORT, long(INITIAL, 1, DATAGRAM))),
        refused(Rule::UnknownId, "", published, "unknown_id = \"enforce\"", to(short())),
        refused(Rule::Quota, "", "count = \"application\"", "quota = { connections = 1 }", opens()),
        refused(
            Rule::UnknownPackets,
            "",
            "",
            "unknown_packets = { per_second = 1, burst = 1 }",
            unknown(short()),
        ),
        refused(
            Rule::UnknownInitials,
            "",
            "",
            "unknown_initials = { per_second = 1, burst = 1 }",
            unknown(long(INITIAL, 1, DATAGRAM)),
        ),
        refused(Rule::ClientInitials, "", "", "client_initials = { per_second = 1, burst = 1 }", opens()),
    ]
}

fn policy(top: &str, scope: &str, rules: &str) -> String {
    format!("{top}\n[[scope]]\nname = \"web\"\nport = {PORT}\n{scope}\n[scope.rules]\n{rules}\n")
}

/// Builds a frame from a client that has no connection.
fn unknown(payload: Vec<u8>) -> Vec<u8> {
    let mut frame = frame(UDP, 40000, PORT, payload);
    if let Some(last) = frame.get_mut(14 + 15) {
        *last = last.wrapping_add(1);
    }
    frame
}

/// Builds Ethernet and IPv4 headers, and ports and length where UDP has them. Checksums may be wrong, since nothing
/// checks them.
fn frame(protocol: u8, from: u16, to: u16, payload: Vec<u8>) -> Vec<u8> {
    let udp_bytes = 8 + payload.len() as u16;
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0, 0x45, 0];
    frame.extend((20 + udp_bytes).to_be_bytes());
    frame.extend([0, 0, 0x40, 0, 64, protocol, 0, 0]);
    frame.extend(CLIENT);
    frame.extend(SERVER);
    frame.extend([from, to, udp_bytes, 0].map(u16::to_be_bytes).concat());
    frame.extend(payload);
    frame
}

/// Builds a packet with an Initial's layout: a destination connection ID, no source ID, no token, and the length of the
/// rest.
fn long(first: u8, version: u32, bytes: usize) -> Vec<u8> {
    let mut packet = vec![first];
    packet.extend(version.to_be_bytes());
    packet.push(ID.len() as u8);
    packet.extend(ID);
    packet.extend([0, 0]);
    let rest = (bytes - packet.len() - 2) as u16;
    packet.extend((0x4000 | rest).to_be_bytes());
    packet.resize(bytes, 0xa5);
    packet
}

fn short() -> Vec<u8> {
    let mut packet = vec![0x40];
    packet.extend(ID);
    packet.resize(100, 0xa5);
    packet
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benchmark_policies_are_valid() {
        for case in cases() {
            if let Err(error) = millrace_gate::Policy::parse(&case.policy) {
                panic!("{}: {error}", case.name);
            }
        }
    }
}
