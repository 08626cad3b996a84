//! What a gate says about itself.

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
};

use crate::{
    Config, Counter, Entry, Event, Gate, Pass, Prefix, Reason, Rule, Sample, ScopeStatistics, rules,
};
pub use millrace_base::Reload;
use serde::{Deserialize, Serialize};

/// Samples that are kept for those who ask.
const RECENT: usize = 256;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    pub version: String,
    pub uptime_s: f64,
    /// Nothing is enforced.
    pub dry_run: bool,
    /// The policy file; empty: flags.
    pub policy: String,
    pub interfaces: Vec<Interface>,
    /// What keeps the gate from doing its work, or from doing it as it was last told; empty: nothing.
    pub trouble: Vec<String>,
    /// `None`: there is no policy file.
    #[serde(default)]
    pub reload: Option<Reload>,
    /// Sizes of clients and of the wider networks that they are in.
    #[serde(default)]
    pub networks: Vec<NetworkSize>,
    pub scopes: Vec<Scope>,
    /// What else happened, how often.
    pub events: BTreeMap<String, u64>,
    #[serde(default)]
    pub tables: Vec<Table>,
    /// What `block` and `allow` did.
    pub listed: Vec<Listed>,
    /// Lines of the log that were not written.
    #[serde(default)]
    pub log_lines_dropped: u64,
    /// The latest samples of packets that were refused, or would have been; oldest first.
    pub recent: Vec<Refusal>,
}

/// How much a network of a size may have of what one client may.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkSize {
    /// 4 or 6.
    pub family: u8,
    /// Bits of the address that all of it have.
    pub prefix: u8,
    /// How many times as much as one client; 1: it is a client.
    pub times: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    pub name: String,
    /// `native` or `generic`: how the gate is attached, or was.
    pub mode: String,
    pub attached: bool,
    /// Why it is not, or what is not as it was; none: nothing.
    pub trouble: Option<String>,
    /// Times that it was attached again.
    pub reattached: u64,
}

/// Counts since the gate was started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scope {
    pub name: String,
    /// Clients that have connections.
    pub clients: u64,
    pub connections: u64,
    /// By name, in the order of evaluation.
    pub rules: Vec<RuleCount>,
    pub passed: Vec<PassCount>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleCount {
    pub rule: String,
    /// `off`, `monitor` or `enforce`.
    pub mode: String,
    /// Refused.
    pub packets: u64,
    /// Of UDP payload.
    pub bytes: u64,
    /// Packets that would have been refused.
    pub monitored: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassCount {
    pub reason: String,
    pub packets: u64,
    pub bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    /// `None`: all.
    pub scope: Option<String>,
    pub prefix: String,
    /// `block` or `allow`.
    pub entry: String,
    /// For which it stays; `None`: until it is taken back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<u64>,
}

/// How full a table is that can fill up.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Table {
    pub name: String,
    pub entries: u64,
    pub room: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// `CLOCK_MONOTONIC`.
    pub time_ns: u64,
    pub scope: String,
    /// Rules: the one that decided, or those that would have.
    pub rules: Vec<String>,
    /// Whether it was refused; else a rule only watches.
    pub refused: bool,
    pub source: SocketAddr,
    pub destination: SocketAddr,
    pub bytes: u32,
}

impl Refusal {
    pub fn new(sample: &Sample) -> Self {
        let rules = match sample.reason {
            Reason::Refused(rule) => vec![rule.name().to_owned()],
            Reason::Passed(_) => sample.monitored.iter().map(|rule| rule.name().to_owned()).collect(),
        };
        Self {
            time_ns: sample.time_ns,
            scope: sample.scope.clone(),
            rules,
            refused: matches!(sample.reason, Reason::Refused(_)),
            source: sample.source,
            destination: sample.destination,
            bytes: sample.bytes,
        }
    }
}

/// The latest samples.
#[derive(Debug, Default)]
pub struct Recent(VecDeque<Refusal>);

impl Recent {
    pub fn push(&mut self, refusal: Refusal) {
        if self.0.len() == RECENT {
            self.0.pop_front();
        }
        self.0.push_back(refusal);
    }

    pub fn all(&self) -> Vec<Refusal> {
        self.0.iter().cloned().collect()
    }
}

/// What the gate knows; the rest is the daemon's.
pub fn of(gate: &Gate) -> Result<Status, crate::Error> {
    let statistics = gate.statistics()?;
    let rules = gate.rules();
    let scopes = statistics.scopes.iter().map(|scope| Scope::new(gate, &rules, scope));
    let scopes: Vec<Scope> = scopes.collect();
    let listed = gate.listed().into_iter().map(|(scope, prefix, entry)| Listed::new(scope, prefix, entry));
    let unseen = rules.scopes.iter().filter(|scope| matches!(scope.policy.live, rules::Live::Tracked { .. }));
    let unseen =
        unseen.filter_map(|tracking| scopes.iter().find(|scope| scope.name == tracking.name)?.unseen());
    Ok(Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        interfaces: gate.interfaces().into_iter().map(Interface::from).collect(),
        trouble: trouble(gate).into_iter().chain(unseen).collect(),
        networks: sizes(gate.load()),
        scopes,
        tables: gate.tables().into_iter().map(Table::from).collect(),
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

/// What keeps the gate from doing its work.
pub fn trouble(gate: &Gate) -> Vec<String> {
    let interfaces = gate.interfaces().into_iter();
    let interfaces = interfaces.filter_map(|it| Some(format!("interface {}: {}", it.name, it.trouble?)));
    interfaces.chain(gate.trouble()).collect()
}

impl From<crate::Interface> for Interface {
    fn from(it: crate::Interface) -> Self {
        let crate::Interface { name, mode, attached, trouble, reattached } = it;
        Self { name, mode: mode.to_string(), attached, trouble, reattached }
    }
}

impl Listed {
    pub fn new(scope: Option<String>, prefix: Prefix, entry: Entry) -> Self {
        let entry = match entry {
            Entry::Block => "block",
            Entry::Allow => "allow",
        };
        Self { scope, prefix: prefix.to_string(), entry: entry.to_owned(), seconds: None }
    }
}

impl From<crate::Table> for Table {
    fn from(it: crate::Table) -> Self {
        Self { name: it.name.to_owned(), entries: it.entries, room: it.room }
    }
}

/// Packets after which it is strange that none answers to something that the server sent.
const STRANGE: u64 = 20;

impl Scope {
    /// Where connections are tracked: clients send what only follows an answer, and the gate has seen no answer.
    fn unseen(&self) -> Option<String> {
        let packets = |pass: Pass| {
            let count = self.passed.iter().find(|count| count.reason == pass.name());
            count.map_or(0, |count| count.packets)
        };
        let opened = packets(Pass::New) + packets(Pass::Proved);
        let answered = packets(Pass::Handshake) + packets(Pass::Live) + packets(Pass::LivePath);
        (opened >= STRANGE && packets(Pass::Unknown) >= STRANGE && answered == 0).then(|| {
            format!(
                "scope {}: connections go on of which no answer was seen, so none is tracked: answers leave by an \
                 interface that is not among --interface, or with empty connection IDs",
                self.name
            )
        })
    }

    fn new(gate: &Gate, rules: &rules::Rules, scope: &ScopeStatistics) -> Self {
        let known = rules.scopes.iter().find(|known| known.name == scope.name);
        let modes = known.map_or(rules.interface, |known| known.policy.modes);
        // "interface", and scopes that are gone, have none.
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
    fn new(rule: Rule, mode: rules::Mode, counter: Counter) -> Self {
        let mode = match mode {
            rules::Mode::Off => "off",
            rules::Mode::Monitor => "monitor",
            rules::Mode::Enforce => "enforce",
        };
        let Counter { packets, bytes, monitored } = counter;
        Self { rule: rule.name().to_owned(), mode: mode.to_owned(), packets, bytes, monitored }
    }
}

impl PassCount {
    fn new(pass: Pass, Counter { packets, bytes, .. }: Counter) -> Self {
        Self { reason: pass.name().to_owned(), packets, bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_networks_are_named() {
        let load = Config { client_prefix_v4: vec![32], ..Config::default() };
        let named: Vec<_> = sizes(&load).into_iter().map(|it| (it.family, it.prefix, it.times)).collect();
        assert_eq!(named, [(4, 32, 1), (6, 64, 1), (6, 56, 8), (6, 48, 64)]);
    }

    #[test]
    fn answers_that_are_never_seen_are_trouble() {
        let scope = |counts: &[(Pass, u64)]| {
            let passed = counts.iter().map(|(pass, packets)| PassCount {
                reason: pass.name().to_owned(),
                packets: *packets,
                bytes: 0,
            });
            Scope { name: "web".into(), passed: passed.collect(), ..Scope::default() }
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
