//! The status of a gate.

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
};

use crate::{
    Config, Event, Gate, GateReason, ListEntry, PacketCounter, Pass, Prefix, RefusedPacket, Rule,
    ScopeStatistics, rules,
};
pub use millrace_base::Reload;
use serde::{Deserialize, Serialize};

/// Number of latest samples of refused packets that are kept for requests of the status.
const RECENT: usize = 256;

/// The status of a gate, as `millrace gate status --json` prints it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// Version of the program.
    pub version: String,
    /// Seconds since the gate was started.
    pub uptime_s: f64,
    /// True if all rules only count packets and refuse none.
    pub dry_run: bool,
    /// The policy file; empty if the policy was made from flags.
    pub policy: String,
    /// The interfaces that the gate should be attached to.
    pub interfaces: Vec<GateInterfaceStatus>,
    /// Faults that keep the gate from working, or from applying the newest policy; empty if there are none.
    pub trouble: Vec<String>,
    /// The outcome of the last reload of the policy; `None` if there is no policy file.
    pub reload: Option<Reload>,
    /// Prefix lengths by which source addresses are grouped into clients and into the networks that contain them, each
    /// with the limit on connections and rates.
    pub networks: Vec<NetworkSize>,
    /// Packet counters of each guarded application (scope); the first, "interface", counts packets for none of them.
    pub scopes: Vec<ScopeStatus>,
    /// Counts of events other than verdicts on packets.
    pub events: BTreeMap<String, u64>,
    /// Numbers of used and possible entries of the gate's BPF maps.
    pub tables: Vec<TableStatus>,
    /// Prefixes that the commands `block` and `allow` added to the lists.
    pub listed: Vec<ListedStatus>,
    /// Number of the daemon's log lines that were dropped instead of written.
    pub log_lines_dropped: u64,
    /// The latest samples of packets that rules refused, or that monitored rules would have refused; oldest first.
    pub recent: Vec<RefusalStatus>,
}

/// A prefix length by which source addresses are grouped into clients or networks, and the limit of each such group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkSize {
    /// Address family: 4 or 6.
    pub family: u8,
    /// Prefix length in bits.
    pub prefix: u8,
    /// Limit on the connections and rates of a network with this prefix length, as a multiple of a client's limit; 1
    /// for a client.
    pub times: u32,
}

/// An interface that the gate should be attached to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateInterfaceStatus {
    /// The interface's name.
    pub name: String,
    /// The XDP mode in which the gate is attached, or was attached last: `native` or `generic`.
    pub mode: String,
    /// True if the gate decides about packets of the interface.
    pub attached: bool,
    /// The reason why the gate is not attached or does not fully work; `None` if there is none.
    pub trouble: Option<String>,
    /// Number of times that the gate was attached again.
    pub reattached: u64,
}

/// Packet counters of a guarded application (scope) since the gate was started, and its present number of clients and
/// connections.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScopeStatus {
    /// The application's name.
    pub name: String,
    /// Number of clients with connections.
    pub clients: u64,
    /// Number of connections of all clients.
    pub connections: u64,
    /// Number of packets that each rule refused, in the order in which the rules are evaluated.
    pub rules: Vec<RuleCount>,
    /// Number of packets that passed, for each reason to pass.
    pub passed: Vec<PassCount>,
}

/// Number of packets and bytes that a rule refused.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleCount {
    /// The rule's name.
    pub rule: String,
    /// `off`, `monitor` or `enforce`.
    pub mode: String,
    /// Number of packets that the rule refused.
    pub packets: u64,
    /// Bytes of UDP payload of the refused packets.
    pub bytes: u64,
    /// Number of packets that the rule would have refused in mode `enforce`.
    pub monitored: u64,
}

/// Number of packets and bytes that passed for one reason, such as a valid token.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassCount {
    /// The reason's name.
    pub reason: String,
    /// Number of packets that passed for this reason.
    pub packets: u64,
    /// Bytes of UDP payload of the packets that passed for this reason.
    pub bytes: u64,
}

/// An entry of a block or allow list that was added at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedStatus {
    /// Name of the guarded application (scope) that the entry applies to; `None` for all.
    pub scope: Option<String>,
    /// The address prefix that is blocked or allowed.
    pub prefix: String,
    /// `block` or `allow`.
    pub entry: String,
    /// Seconds until the entry expires; `None` if it stays until it is removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<u64>,
}

/// The number of used and possible entries of one of the gate's BPF maps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableStatus {
    /// The map's name.
    pub name: String,
    /// Number of entries that the map has at present.
    pub entries: u64,
    /// Largest number of entries that the map can have.
    pub room: u64,
}

/// A packet that a rule refused, or that a monitored rule would have refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusalStatus {
    /// Time when the packet arrived, of `CLOCK_MONOTONIC` in ns.
    pub time_ns: u64,
    /// Name of the guarded application (scope) to which the packet was sent.
    pub scope: String,
    /// Name of the rule that refused the packet, or names of the rules in mode "monitor" that would have refused it.
    pub rules: Vec<String>,
    /// True if the packet was refused; false if the rules only monitor.
    pub refused: bool,
    /// The sender's address.
    pub source: SocketAddr,
    /// The receiver's address.
    pub destination: SocketAddr,
    /// UDP payload in bytes.
    pub bytes: u32,
}

impl RefusalStatus {
    /// Makes the status entry from a sample of a refused packet.
    pub fn new(sample: &RefusedPacket) -> Self {
        let rules = match sample.reason {
            GateReason::Refused(rule) => vec![rule.name().to_owned()],
            GateReason::Passed(_) => sample.monitored.iter().map(|rule| rule.name().to_owned()).collect(),
        };
        Self {
            time_ns: sample.time_ns,
            scope: sample.scope.clone(),
            rules,
            refused: matches!(sample.reason, GateReason::Refused(_)),
            source: sample.source,
            destination: sample.destination,
            bytes: sample.bytes,
        }
    }
}

/// The newest samples of refused packets, up to a fixed number, from which the oldest are removed first.
#[derive(Debug, Default)]
pub struct Recent(VecDeque<RefusalStatus>);

impl Recent {
    /// Adds a sample. If the list is full, the oldest sample is removed.
    pub fn push(&mut self, refusal: RefusalStatus) {
        if self.0.len() == RECENT {
            self.0.pop_front();
        }
        self.0.push_back(refusal);
    }

    /// Returns the samples, oldest first.
    pub fn all(&self) -> Vec<RefusalStatus> {
        self.0.iter().cloned().collect()
    }
}

/// Returns the status of a gate, without the fields that only its daemon knows.
pub fn read_status(gate: &Gate) -> Result<Status, crate::Error> {
    let statistics = gate.statistics()?;
    let rules = gate.rules();
    let scopes = statistics.scopes.iter().map(|scope| ScopeStatus::new(gate, &rules, scope));
    let scopes: Vec<ScopeStatus> = scopes.collect();
    let listed =
        gate.listed().into_iter().map(|(scope, prefix, entry)| ListedStatus::new(scope, prefix, entry));
    let unseen =
        rules.scopes.iter().filter(|scope| matches!(scope.policy.live, rules::LiveRule::Tracked { .. }));
    let unseen =
        unseen.filter_map(|tracking| scopes.iter().find(|scope| scope.name == tracking.name)?.unseen());
    Ok(Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        interfaces: gate.interfaces().into_iter().map(GateInterfaceStatus::from).collect(),
        trouble: trouble(gate).into_iter().chain(unseen).collect(),
        networks: sizes(gate.load()),
        scopes,
        tables: gate.tables().into_iter().map(TableStatus::from).collect(),
        events: Event::ALL.map(|event| (event.name().to_owned(), statistics.event(event))).into(),
        listed: listed.collect(),
        ..Status::default()
    })
}

fn sizes(load: &Config) -> Vec<NetworkSize> {
    let of_family = |family, prefixes: &[u8]| -> Vec<_> {
        let times = [1].into_iter().chain(load.network_times);
        prefixes
            .iter()
            .zip(times)
            .map(|(prefix, times)| NetworkSize { family, prefix: *prefix, times })
            .collect()
    };
    [of_family(4, &load.client_prefix_v4), of_family(6, &load.client_prefix_v6)].concat()
}

/// Returns the faults that keep the gate from working.
pub fn trouble(gate: &Gate) -> Vec<String> {
    let interfaces = gate.interfaces().into_iter();
    let interfaces = interfaces.filter_map(|it| Some(format!("interface {}: {}", it.name, it.trouble?)));
    interfaces.chain(gate.trouble()).collect()
}

impl From<crate::Interface> for GateInterfaceStatus {
    fn from(it: crate::Interface) -> Self {
        let crate::Interface { name, mode, attached, trouble, reattached } = it;
        Self { name, mode: mode.to_string(), attached, trouble, reattached }
    }
}

impl ListedStatus {
    /// Makes the status of a block or allow list entry, without an expiry time.
    pub fn new(scope: Option<String>, prefix: Prefix, entry: ListEntry) -> Self {
        let entry = match entry {
            ListEntry::Block => "block",
            ListEntry::Allow => "allow",
        };
        Self { scope, prefix: prefix.to_string(), entry: entry.to_owned(), seconds: None }
    }
}

impl From<crate::TableFill> for TableStatus {
    fn from(it: crate::TableFill) -> Self {
        Self { name: it.name.to_owned(), entries: it.entries, room: it.room }
    }
}

/// The gate warns that it sees no packets of the server only after this number of packets that open connections, and of
/// packets that continue them.
const STRANGE: u64 = 20;

impl ScopeStatus {
    /// Returns a warning if clients send packets that only follow a server's answer, but the gate has seen no answer of
    /// the server. Call it only for applications (scopes) whose connections the gate tracks.
    fn unseen(&self) -> Option<String> {
        let packets = |pass: Pass| {
            let count = self.passed.iter().find(|count| count.reason == pass.name());
            count.map_or(0, |count| count.packets)
        };
        let opened = packets(Pass::New) + packets(Pass::Proved);
        let answered = packets(Pass::Handshake) + packets(Pass::Live) + packets(Pass::LivePath);
        (opened >= STRANGE && packets(Pass::Unknown) >= STRANGE && answered == 0).then(|| {
            format!(
                "scope {}: clients continue connections, but the gate has seen no answer of the server, so it tracks none: add the \
                 interface by which answers leave to --interface, or let the server use connection IDs",
                self.name
            )
        })
    }

    fn new(gate: &Gate, rules: &rules::GateRules, scope: &ScopeStatistics) -> Self {
        let known = rules.scopes.iter().find(|known| known.name == scope.name);
        let modes = known.map_or(rules.interface, |known| known.policy.modes);
        // No clients are counted for the scope "interface" and for scopes that have been removed from the rules.
        let clients = known.and_then(|known| gate.clients(&known.name).ok()).unwrap_or_default();
        let clients: Vec<_> = clients.into_iter().filter(|client| client.connections > 0).collect();
        Self {
            name: scope.name.clone(),
            clients: clients.len() as u64,
            connections: clients.iter().map(|client| u64::from(client.connections)).sum(),
            rules: Rule::ALL.map(|rule| RuleCount::new(rule, modes.get(rule), scope.rule(rule))).into(),
            passed: Pass::ALL.map(|pass| PassCount::new(pass, scope.pass(pass))).into(),
        }
    }
}

impl RuleCount {
    fn new(rule: Rule, mode: rules::RuleMode, counter: PacketCounter) -> Self {
        let mode = match mode {
            rules::RuleMode::Off => "off",
            rules::RuleMode::Monitor => "monitor",
            rules::RuleMode::Enforce => "enforce",
        };
        let PacketCounter { packets, bytes, monitored } = counter;
        Self { rule: rule.name().to_owned(), mode: mode.to_owned(), packets, bytes, monitored }
    }
}

impl PassCount {
    fn new(pass: Pass, PacketCounter { packets, bytes, .. }: PacketCounter) -> Self {
        Self { reason: pass.name().to_owned(), packets, bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_names_the_network_prefix_lengths_of_limits() {
        let load = Config { client_prefix_v4: vec![32], ..Config::default() };
        let named: Vec<_> = sizes(&load).into_iter().map(|it| (it.family, it.prefix, it.times)).collect();
        assert_eq!(named, [(4, 32, 1), (6, 64, 1), (6, 56, 8), (6, 48, 64)]);
    }

    #[test]
    fn status_warns_if_the_gate_sees_no_answers_of_the_server() {
        let scope = |counts: &[(Pass, u64)]| {
            let passed = counts.iter().map(|(pass, packets)| PassCount {
                reason: pass.name().to_owned(),
                packets: *packets,
                bytes: 0,
            });
            ScopeStatus { name: "web".into(), passed: passed.collect(), ..ScopeStatus::default() }
        };
        let asymmetric = scope(&[(Pass::New, 15), (Pass::Proved, 5), (Pass::Unknown, 20)]);
        assert!(asymmetric.unseen().is_some_and(|said| said.starts_with("scope web: ")));
        for counts in [
            vec![(Pass::New, 19), (Pass::Unknown, 1000)],
            vec![(Pass::New, 1000)],
            vec![(Pass::New, 1000), (Pass::Unknown, 1000), (Pass::Handshake, 1)],
            vec![(Pass::New, 1000), (Pass::Unknown, 1000), (Pass::Live, 1)],
        ] {
            assert_eq!(scope(&counts).unseen(), None, "{counts:?}");
        }
    }
}
