//! What `millrace gate trace` asks for and gets: packets that were refused, or would have been.

use std::{fmt, net::SocketAddr};

use anyhow::Context as _;
use millrace_daemon::render::time_of_day;
use millrace_gate::{Kind, Reason, Rule, Sample, Trace, Traced, hex};
use millrace_kernel::clock;
use serde::{Deserialize, Serialize};

/// Which packets are followed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Follow {
    /// An address or a prefix; `None`: everybody.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// Scopes; empty: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scope: Vec<String>,
    /// Rules; empty: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rule: Vec<String>,
    /// Packets at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_second: Option<u32>,
}

impl Follow {
    pub const PER_SECOND: u32 = 100;

    pub fn read(&self) -> anyhow::Result<Trace> {
        let rule = |name: &String| {
            let known = Rule::ALL.into_iter().find(|rule| rule.name() == name);
            known.with_context(|| format!("there is no rule \"{name}\""))
        };
        Ok(Trace {
            client: self.client.as_ref().map(|client| client.parse()).transpose()?,
            scopes: self.scope.clone(),
            rules: self.rule.iter().map(rule).collect::<Result<_, _>>()?,
            per_second: self.per_second.unwrap_or(Self::PER_SECOND),
        })
    }
}

/// What came since the last look, and what became of everything since the beginning.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    pub packets: Vec<Packet>,
    /// Packets that are followed.
    pub matched: u64,
    /// Of these, beyond the rate.
    pub left_out: u64,
    /// Of these, lost on the way since nobody looked in time.
    pub lost: u64,
}

impl Seen {
    pub fn new(traced: Traced) -> Self {
        let Traced { samples, matched, left_out, lost } = traced;
        let since_1970 = clock::unix_ns() - clock::monotonic_ns().cast_signed();
        let packets = samples.into_iter().map(|sample| Packet::new(sample, since_1970)).collect();
        Self { packets, matched, left_out, lost }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Packet {
    /// Since 1970, to the kernel's tick: some milliseconds.
    pub time_us: u64,
    pub client: SocketAddr,
    pub to: SocketAddr,
    pub scope: String,
    /// The one that refused it, or those that would have.
    pub rules: Vec<String>,
    /// Whether it was refused; else rules only watch.
    pub refused: bool,
    /// UDP payload.
    pub bytes: u32,
    /// What the packet is, where a rule that comes before that is read did not object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packet: Option<String>,
    /// Destination connection ID of long headers, hexadecimal.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub id: String,
}

impl Packet {
    /// `since_1970`: when the kernel's clock began.
    fn new(sample: Sample, since_1970: i64) -> Self {
        let (rules, refused) = match sample.reason {
            Reason::Refused(rule) => (vec![rule.name().to_owned()], true),
            Reason::Passed(_) => {
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

    /// Above lines of packets.
    pub const HEAD: &str =
        "TIME, UTC     CLIENT                 TO                     SCOPE     RULE           PACKET";
}

impl fmt::Display for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { time_us, client, to, scope, rules, refused, bytes, packet, id } = self;
        let time = time_of_day(*time_us);
        // Formatted first: addresses do not mind a width.
        let (client, to, rules) = (client.to_string(), to.to_string(), rules.join(","));
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
    fn a_packet_is_a_line() {
        let packet = Packet {
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
        let watched = Packet {
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
            assert_eq!(serde_json::from_str::<Packet>(&line).unwrap(), packet);
        }
    }

    #[test]
    fn what_is_followed_is_read() {
        let follow = Follow {
            client: Some("192.0.2.0/24".into()),
            scope: vec!["web".into()],
            rule: vec!["quota".into()],
            per_second: None,
        };
        let trace = follow.read().unwrap();
        assert_eq!((trace.rules, trace.per_second), (vec![Rule::Quota], 100));
        let wrong = Follow { rule: vec!["quoat".into()], ..follow.clone() };
        assert_eq!(wrong.read().unwrap_err().to_string(), "there is no rule \"quoat\"");
        assert!(Follow { client: Some("192.0.2.0/33".into()), ..follow }.read().is_err());
    }
}
