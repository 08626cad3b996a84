//! Requests and results of `millrace gate trace`, which shows packets that were refused, or would have been in mode
//! `enforce`.

use std::{fmt, net::SocketAddr};

use anyhow::Context as _;
use millrace_daemon::render::time_of_day;
use millrace_gate::{GateReason, GateTrace, Kind, RefusedPacket, Rule, Traced, hex};
use millrace_kernel::clock;
use serde::{Deserialize, Serialize};

/// A filter that selects the packets to trace, among those that were refused or would have been in mode `enforce`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GateTraceFilter {
    /// Address or prefix of the clients to follow; `None` follows all clients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// Names of the policy's scopes (applications with rules of their own) to follow; empty follows all scopes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scope: Vec<String>,
    /// Names of the rules to follow; empty follows all rules.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rule: Vec<String>,
    /// Largest number of packets per second that the trace reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_second: Option<u32>,
}

impl GateTraceFilter {
    /// Packets per second of a trace that does not set a rate.
    pub const PER_SECOND: u32 = 100;

    /// Checks the filter, and converts it to the type that the gate's kernel interface takes.
    pub fn read(&self) -> anyhow::Result<GateTrace> {
        let rule = |name: &String| {
            let known = Rule::ALL.into_iter().find(|rule| rule.name() == name);
            known.with_context(|| format!("there is no rule \"{name}\""))
        };
        Ok(GateTrace {
            client: self.client.as_ref().map(|client| client.parse()).transpose()?,
            scopes: self.scope.clone(),
            rules: self.rule.iter().map(rule).collect::<Result<_, _>>()?,
            per_second: self.per_second.unwrap_or(Self::PER_SECOND),
        })
    }
}

/// New packets of a trace since the last request, and totals since the trace began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceUpdate {
    /// The new packets, oldest first.
    pub packets: Vec<GateTraceLine>,
    /// Number of packets that match the trace.
    pub matched: u64,
    /// Number of matching packets that were left out, because the trace was over its rate.
    pub left_out: u64,
    /// Number of matching packets that were lost, because no request came in time.
    pub lost: u64,
}

impl TraceUpdate {
    /// Makes the answer to a request from the packets that the gate has traced.
    pub fn new(traced: Traced) -> Self {
        let Traced { samples, matched, left_out, lost } = traced;
        // The kernel stamps packets by its monotonic clock, so the offset to UNIX time is added to each stamp.
        let since_1970 = clock::unix_ns() - clock::monotonic_ns().cast_signed();
        let packets = samples.into_iter().map(|sample| GateTraceLine::new(sample, since_1970)).collect();
        Self { packets, matched, left_out, lost }
    }
}

/// A packet that was refused, or would have been in mode `enforce`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateTraceLine {
    /// Time of the packet in microseconds since 1970, with the resolution of the kernel's tick (some milliseconds).
    pub time_us: u64,
    /// The sender's address.
    pub client: SocketAddr,
    /// The receiver's address.
    pub to: SocketAddr,
    /// Name of the policy's scope (an application with rules of its own) to which the packet was sent.
    pub scope: String,
    /// The rule that refused the packet, or the rules that would have.
    pub rules: Vec<String>,
    /// True if the packet was refused; false if the rules only monitor.
    pub refused: bool,
    /// UDP payload in bytes.
    pub bytes: u32,
    /// The type of the packet; `None` if an earlier rule refused it before the type was read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packet: Option<String>,
    /// Destination connection ID of a long header, in hexadecimal.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub id: String,
}

impl GateTraceLine {
    /// Makes a line of the trace from a packet that the gate has refused or monitored. `since_1970` is the UNIX time in
    /// ns at which the kernel's monotonic clock was zero.
    fn new(sample: RefusedPacket, since_1970: i64) -> Self {
        let (rules, refused) = match sample.reason {
            GateReason::Refused(rule) => (vec![rule.name().to_owned()], true),
            GateReason::Passed(_) => {
                (sample.monitored.iter().map(|rule| rule.name().to_owned()).collect(), false)
            }
        };
        let time_ns = sample.time_ns.saturating_add_signed(since_1970);
        Self {
            time_us: time_ns / 1000,
            client: sample.source,
            to: sample.destination,
            scope: sample.scope,
            rules,
            refused,
            bytes: sample.bytes,
            packet: sample.kind.map(Kind::name).map(str::to_owned),
            id: hex::encode(&sample.id),
        }
    }

    /// The heading above lines of packets.
    pub const HEAD: &str =
        "TIME, UTC     CLIENT                 TO                     SCOPE     RULE           PACKET";
}

impl fmt::Display for GateTraceLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { time_us, client, to, scope, rules, refused, bytes, packet, id } = self;
        let time = time_of_day(*time_us);
        // Addresses become strings first, because their `Display` ignores a width.
        let client = client.to_string();
        let to = to.to_string();
        let rules = rules.join(",");
        let verdict = if *refused { "refused" } else { "would be refused" };
        write!(f, "{time:.12}  {client:<21}  {to:<21}  {scope:<8}  {rules:<13}  {verdict}, ")?;
        if let Some(packet) = packet {
            write!(f, "{}, ", packet.replace('_', " "))?;
        }
        write!(f, "{bytes} B")?;
        if id.is_empty() { Ok(()) } else { write!(f, ", ID {id}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traced_packet_is_one_line() {
        let packet = GateTraceLine {
            time_us: 3_723_120_004,
            client: "192.0.2.7:40000".parse().unwrap(),
            to: "[2001:db8::1]:443".parse().unwrap(),
            scope: "web".into(),
            rules: vec!["quota".into()],
            refused: true,
            bytes: 1200,
            packet: Some("initial".into()),
            id: "0a0b".into(),
        };
        assert_eq!(
            packet.to_string(),
            "01:02:03.120  192.0.2.7:40000        [2001:db8::1]:443      web       quota          refused, initial, \
             1200 B, ID 0a0b"
        );
        let watched = GateTraceLine {
            rules: vec!["short".into(), "source_port".into()],
            refused: false,
            packet: None,
            id: String::new(),
            ..packet.clone()
        };
        assert!(
            watched.to_string().ends_with("web       short,source_port  would be refused, 1200 B"),
            "{watched}"
        );
        for packet in [packet, watched] {
            let line = serde_json::to_string(&packet).unwrap();
            assert_eq!(serde_json::from_str::<GateTraceLine>(&line).unwrap(), packet);
        }
    }

    #[test]
    fn trace_filters_are_parsed() {
        let follow = GateTraceFilter {
            client: Some("192.0.2.0/24".into()),
            scope: vec!["web".into()],
            rule: vec!["quota".into()],
            per_second: None,
        };
        let trace = follow.read().unwrap();
        assert_eq!((trace.rules, trace.per_second), (vec![Rule::Quota], 100));
        let wrong = GateTraceFilter { rule: vec!["quoat".into()], ..follow.clone() };
        assert_eq!(wrong.read().unwrap_err().to_string(), "there is no rule \"quoat\"");
        assert!(GateTraceFilter { client: Some("192.0.2.0/33".into()), ..follow }.read().is_err());
    }
}
