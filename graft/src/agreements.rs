//! What became of negotiations with peers, and what is known of the paths to them.

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    net::IpAddr,
};

use millrace_graft_proto::{
    evidence::{self, Downgrade},
    message::{Connection, Host, Reason, Statement, Verdict},
};

use crate::status;

/// Downgrades of a peer that are told with their times.
const LATEST: usize = 8;

/// How a negotiation has ended, or stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// It was not called, or has not called.
    Waiting,
    Agreed,
    /// By whom, and why.
    Refused {
        by_peer: bool,
        reason: Reason,
        detail: String,
    },
    /// Nobody answers: no Millrace there, or nothing comes through.
    Absent(String),
    TimedOut(String),
    /// Another key, or no certificate that counts.
    Untrusted(String),
    /// What it said is no message, or none that fits there.
    Malformed(String),
    /// It was agreed, and the connection has ended.
    Ended(String),
}

impl State {
    pub const NAMES: [&str; 8] =
        ["waiting", "agreed", "refused", "absent", "timed-out", "untrusted", "malformed", "ended"];

    pub fn name(&self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Agreed => "agreed",
            Self::Refused { .. } => "refused",
            Self::Absent(_) => "absent",
            Self::TimedOut(_) => "timed-out",
            Self::Untrusted(_) => "untrusted",
            Self::Malformed(_) => "malformed",
            Self::Ended(_) => "ended",
        }
    }

    fn detail(&self) -> String {
        match self {
            Self::Waiting | Self::Agreed => String::new(),
            Self::Refused { by_peer, reason, detail } => {
                let who = if *by_peer { "the peer" } else { "this host" };
                format!("{who} refuses ({}): {detail}", reason_name(*reason))
            }
            Self::Absent(detail)
            | Self::TimedOut(detail)
            | Self::Untrusted(detail)
            | Self::Malformed(detail)
            | Self::Ended(detail) => detail.clone(),
        }
    }
}

/// As messages and metrics call it.
pub fn reason_name(reason: Reason) -> &'static str {
    match reason {
        Reason::Version => "version",
        Reason::Abi => "abi",
        Reason::UnknownFunction => "unknown-function",
        Reason::Kernel => "kernel",
        Reason::Resources => "resources",
        Reason::NoRule => "no-rule",
        Reason::Nat => "nat",
        Reason::NotAllowed => "not-allowed",
        Reason::Busy => "busy",
        Reason::NotGiven => "not-given",
    }
}

#[derive(Debug)]
struct Entry {
    state: State,
    since_ns: u64,
    address: Option<IpAddr>,
    epoch: Option<u64>,
    host: Option<Host>,
    functions: usize,
    rules: Vec<String>,
    verdict: Verdict,
    verdict_ns: Option<u64>,
    downgrades: BTreeMap<Downgrade, u64>,
    latest: VecDeque<(u64, Downgrade, u16)>,
    /// Connections that were compared already, of those that are still told of.
    judged: HashSet<[u32; 2]>,
    timing: status::Negotiated,
    /// Whether this host has called for it.
    calls: bool,
    /// The conversation that it is of: an older one's end does not matter.
    session: u64,
}

impl Entry {
    fn new(now_ns: u64) -> Self {
        Self {
            state: State::Waiting,
            since_ns: now_ns,
            address: None,
            epoch: None,
            host: None,
            functions: 0,
            rules: Vec::new(),
            verdict: Verdict::default(),
            verdict_ns: None,
            downgrades: BTreeMap::new(),
            latest: VecDeque::new(),
            judged: HashSet::new(),
            timing: status::Negotiated::default(),
            calls: false,
            session: 0,
        }
    }

    fn become_other(&mut self, state: State, now_ns: u64) {
        if self.state.name() != state.name() {
            self.since_ns = now_ns;
        }
        self.state = state;
    }
}

/// One entry for each peer of the settings. Times are those of `CLOCK_MONOTONIC`.
#[derive(Debug, Default)]
pub struct Agreements {
    peers: BTreeMap<String, Entry>,
    /// By what became of them: states, and reasons of refusals.
    negotiations: BTreeMap<String, u64>,
    sessions: u64,
}

impl Agreements {
    /// These peers and no others; what is known of them stays.
    pub fn set_peers(&mut self, names: impl Iterator<Item = String>, now_ns: u64) {
        let mut before = std::mem::take(&mut self.peers);
        self.peers = names
            .map(|name| {
                let entry = before.remove(&name).unwrap_or_else(|| Entry::new(now_ns));
                (name, entry)
            })
            .collect();
    }

    /// Whether an agreement with it is in force.
    pub fn is_agreed(&self, peer: &str) -> bool {
        self.peers.get(peer).is_some_and(|it| it.state == State::Agreed)
    }

    /// Whether there is one, with this run of the peer, that this host has called for: when both call at once, the peer's
    /// call is then one too many.
    pub fn has_called(&self, peer: &str, epoch: u64) -> bool {
        let entry = self.peers.get(peer).filter(|it| it.state == State::Agreed);
        entry.is_some_and(|it| it.calls && it.epoch == Some(epoch))
    }

    /// None is in force any more.
    pub fn end_all(&mut self, now_ns: u64) -> Vec<IpAddr> {
        let agreed = self.peers.values_mut().filter(|it| it.state == State::Agreed);
        let ended = agreed.map(|entry| {
            entry.become_other(State::Ended("this host's settings have changed".to_owned()), now_ns);
            entry.session = 0;
            entry.address
        });
        ended.flatten().collect()
    }

    /// Somebody called who is not known.
    pub fn count_stranger(&mut self) {
        self.count("stranger");
    }

    /// `calls`: this host has called. Returns what the conversation is called, and where the peer was bound before, if it was elsewhere.
    pub fn agreed(
        &mut self,
        (peer, calls): (&str, bool),
        theirs: &Statement,
        rules: Vec<String>,
        (address, timing): (IpAddr, status::Negotiated),
        now_ns: u64,
    ) -> Option<(u64, Option<IpAddr>)> {
        let entry = self.peers.get_mut(peer)?;
        self.sessions += 1;
        let before = entry.address.replace(address).filter(|before| *before != address);
        entry.epoch = Some(theirs.epoch);
        entry.host = Some(theirs.host.clone());
        (entry.functions, entry.rules) = (theirs.functions.len(), rules);
        (entry.timing, entry.session, entry.calls) = (timing, self.sessions, calls);
        entry.become_other(State::Agreed, now_ns);
        self.count("agreed");
        Some((self.sessions, before))
    }

    /// A conversation goes on: what was agreed on is now this.
    pub fn renewed(&mut self, peer: &str, session: u64, theirs: &Statement, rules: Vec<String>) -> bool {
        match self.peers.get_mut(peer).filter(|entry| entry.session == session) {
            Some(entry) => {
                (entry.functions, entry.rules) = (theirs.functions.len(), rules);
                true
            }
            None => false,
        }
    }

    /// Returns the address that is to be unbound. `session`: of an agreement that was in force; an older one's end does not count.
    pub fn ended(&mut self, peer: &str, session: Option<u64>, state: State, now_ns: u64) -> Option<IpAddr> {
        let entry = self.peers.get_mut(peer)?;
        let is_current = session == Some(entry.session);
        // Another conversation with it goes on.
        if entry.state == State::Agreed && !is_current {
            return None;
        }
        let name = match &state {
            State::Refused { reason, .. } => reason_name(*reason),
            other => other.name(),
        };
        entry.become_other(state, now_ns);
        let address = entry.address.filter(|_| is_current);
        self.count(name);
        address
    }

    fn count(&mut self, name: &str) {
        *self.negotiations.entry(name.to_owned()).or_default() += 1;
    }

    /// What both ends tell of the same connections. Returns what is new.
    pub fn compare(
        &mut self,
        peer: &str,
        own: &[Connection],
        theirs: &[Connection],
        now_ns: u64,
    ) -> Vec<(Downgrade, u16)> {
        let Some(entry) = self.peers.get_mut(peer) else { return Vec::new() };
        if let Some(pass) = evidence::options_pass(evidence::compare(own, theirs)) {
            entry.verdict.options = Some(pass);
            entry.verdict_ns = Some(now_ns);
        }
        entry.judged.retain(|known| own.iter().any(|it| it.sequence == *known));
        let mut found = Vec::new();
        for (connection, downgrade) in evidence::compare(own, theirs) {
            if !entry.judged.insert(connection.sequence) {
                continue;
            }
            let Some(downgrade) = downgrade else { continue };
            *entry.downgrades.entry(downgrade).or_default() += 1;
            entry.latest.push_back((now_ns, downgrade, connection.port));
            found.push((downgrade, connection.port));
        }
        let surplus = entry.latest.len().saturating_sub(LATEST);
        entry.latest.drain(..surplus);
        found
    }

    /// What was found out about the path; what was not stays as it was.
    pub fn note(&mut self, peer: &str, verdict: &Verdict, now_ns: u64) {
        let Some(entry) = self.peers.get_mut(peer) else { return };
        let known = &mut entry.verdict;
        known.udp = verdict.udp.or(known.udp);
        known.protocol_253 = verdict.protocol_253.or(known.protocol_253);
        known.mtu = verdict.mtu.or(known.mtu);
        known.nat = verdict.nat.or(known.nat);
        entry.verdict_ns = Some(now_ns);
    }

    pub fn verdict(&self, peer: &str) -> Verdict {
        self.peers.get(peer).map(|entry| entry.verdict.clone()).unwrap_or_default()
    }

    pub fn negotiations(&self) -> BTreeMap<String, u64> {
        self.negotiations.clone()
    }

    pub fn downgrades(&self) -> BTreeMap<String, u64> {
        let sum = |kind: &Downgrade| self.peers.values().filter_map(|it| it.downgrades.get(kind)).sum();
        Downgrade::ALL.iter().map(|kind| (kind.name().to_owned(), sum(kind))).collect()
    }

    pub fn status(&self, now_ns: u64) -> Vec<status::Peer> {
        self.peers.iter().map(|(name, entry)| entry.status(name, now_ns)).collect()
    }

    /// Of the peer with this address.
    pub fn status_of(&self, address: IpAddr, now_ns: u64) -> Option<status::Peer> {
        let mut entries = self.peers.iter();
        let (name, entry) = entries.find(|(_, entry)| entry.address == Some(address))?;
        Some(entry.status(name, now_ns))
    }
}

impl Entry {
    fn status(&self, name: &str, now_ns: u64) -> status::Peer {
        let age = |then_ns: u64| now_ns.saturating_sub(then_ns) as f64 / 1e9;
        let latest = self.latest.iter().map(|(then_ns, downgrade, port)| status::Downgraded {
            kind: downgrade.name().to_owned(),
            port: *port,
            age_s: age(*then_ns),
        });
        status::Peer {
            name: name.to_owned(),
            state: self.state.name().to_owned(),
            detail: self.state.detail(),
            age_s: age(self.since_ns),
            address: self.address,
            host: self.host.clone(),
            functions: self.functions,
            rules: if self.state == State::Agreed { self.rules.clone() } else { Vec::new() },
            path: self.verdict.clone(),
            path_age_s: self.verdict_ns.map(age),
            downgrades: self.downgrades.values().sum(),
            latest_downgrades: latest.collect(),
            negotiated: self.timing.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use millrace_graft_proto::message::{Outcome, Side};

    use super::*;

    fn table() -> Agreements {
        let mut table = Agreements::default();
        table.set_peers(["b".to_owned()].into_iter(), 1);
        table
    }

    fn statement(epoch: u64) -> Statement {
        let host = Host { program: "0".into(), kernel: "6.18".into(), abi: 1, cpus: 1, memory_mib: 1 };
        let at = "192.0.2.1:1".parse().unwrap();
        Statement {
            versions: vec![1],
            epoch,
            hold_s: 30,
            host,
            local: at,
            remote: at,
            functions: Vec::new(),
            rules: Vec::new(),
            connections: Vec::new(),
            path: Verdict::default(),
        }
    }

    fn agree(table: &mut Agreements, epoch: u64) -> u64 {
        let address = "192.0.2.1".parse().unwrap();
        let made = table.agreed(
            ("b", epoch == 7),
            &statement(epoch),
            vec!["r".into()],
            (address, Default::default()),
            2,
        );
        made.expect("a peer").0
    }

    #[test]
    fn only_the_end_of_the_latest_conversation_counts() {
        let mut table = table();
        let first = agree(&mut table, 7);
        assert!(table.is_agreed("b") && table.has_called("b", 7) && !table.has_called("b", 8));
        // It was started anew: another conversation.
        let second = agree(&mut table, 8);
        assert!(!table.has_called("b", 7) && !table.has_called("b", 8));
        assert_eq!(table.ended("b", Some(first), State::Ended("closed".into()), 3), None);
        assert_eq!(table.ended("b", None, State::Absent("refused".into()), 3), None);
        assert!(table.is_agreed("b"));
        assert!(!table.renewed("b", first, &statement(7), Vec::new()));
        let gone = table.ended("b", Some(second), State::Ended("closed".into()), 1_000_000_003);
        assert_eq!(gone, Some("192.0.2.1".parse().unwrap()));
        let status = &table.status(3_000_000_003)[0];
        assert_eq!((status.state.as_str(), status.detail.as_str(), status.age_s), ("ended", "closed", 2.0));
        assert_eq!(table.negotiations(), [("agreed".to_owned(), 2), ("ended".to_owned(), 1)].into());
    }

    #[test]
    fn refusals_are_counted_by_their_reasons() {
        let mut table = table();
        let state = State::Refused { by_peer: true, reason: Reason::UnknownFunction, detail: "hybla".into() };
        assert_eq!(table.ended("b", None, state, 5), None);
        let status = &table.status(5)[0];
        assert_eq!(status.detail, "the peer refuses (unknown-function): hybla");
        assert_eq!(table.negotiations(), [("unknown-function".to_owned(), 1)].into());
        assert_eq!(table.ended("nobody", None, State::Waiting, 5), None);
    }

    #[test]
    fn a_connection_is_compared_once() {
        let mut table = table();
        let connection = |number: u32, side| Connection {
            sequence: [number, number],
            side,
            port: 80,
            outcome: Outcome::Silent,
            spoke: true,
            own: 0,
            heard: 0,
        };
        let own: Vec<_> = (0..20).map(|number| connection(number, Side::Client)).collect();
        let theirs: Vec<_> = (0..20).map(|number| connection(number, Side::Server)).collect();
        let found = table.compare("b", &own, &theirs[..10], 1);
        assert_eq!(found, vec![(Downgrade::Stripped, 80); 10]);
        assert_eq!(table.compare("b", &own, &theirs, 2).len(), 10, "the others");
        assert_eq!(table.compare("b", &own, &theirs, 3).len(), 0);
        let status = &table.status(3)[0];
        assert_eq!((status.downgrades, status.latest_downgrades.len()), (20, LATEST));
        assert_eq!(status.path.options, Some(false));
        assert_eq!(table.downgrades()["stripped"], 20);
        // What is no longer told of is forgotten.
        table.compare("b", &own[..1], &theirs, 4);
        assert_eq!(table.peers["b"].judged.len(), 1);
    }

    #[test]
    fn peers_that_stay_keep_what_is_known() {
        let mut table = table();
        agree(&mut table, 7);
        let found = Verdict { udp: Some(true), mtu: Some(1400), ..Verdict::default() };
        table.note("b", &found, 4);
        table.note("b", &Verdict { protocol_253: Some(false), ..Verdict::default() }, 5);
        table.set_peers(["a".to_owned(), "b".to_owned()].into_iter(), 6);
        let wanted = Verdict { protocol_253: Some(false), ..found };
        assert_eq!(table.verdict("b"), wanted);
        assert!(table.is_agreed("b") && !table.is_agreed("a"));
        assert_eq!(table.end_all(6), ["192.0.2.1".parse::<IpAddr>().unwrap()]);
        assert!(!table.is_agreed("b") && table.end_all(6).is_empty());
        table.set_peers(["a".to_owned()].into_iter(), 7);
        assert_eq!(table.verdict("b"), Verdict::default());
    }
}
