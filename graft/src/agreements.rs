//! Records for each peer whether its daemon and this host's daemon agreed on grafts (congestion controls loaded into
//! the kernel). Also records what the daemons learned about the path between the hosts.

use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    net::IpAddr,
};

use millrace_graft_proto::{
    evidence::{self, Downgrade},
    message::{ConnectionReport, HostOffer, PathVerdict, RefusalReason, Statement},
};
use serde::{Deserialize, Serialize};

use crate::status;

/// Number of a peer's latest downgrades (changes of TCP options by a middlebox) that the status lists with their times.
const LATEST: usize = 8;
/// Longest text of a state, in bytes.
const DETAIL_MAX: usize = 512;

/// State of the negotiation with a peer about grafts (congestion controls loaded into the kernel), or its outcome.
///
/// Each peer of the settings begins as `Waiting`. [`PeerAgreements::agreed`] moves it to `Agreed`, and
/// [`PeerAgreements::ended`] to one of the other states. Any of these can become `Agreed` when the daemons connect
/// again. Only the negotiation that made an agreement, or changed settings, can end it. The end of an older
/// negotiation is ignored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NegotiationState {
    /// Neither end has connected to the other yet.
    Waiting,
    /// An agreement is in force at both ends.
    Agreed,
    /// One end has refused the agreement.
    Refused {
        /// True if the peer refused, and false if this host did.
        by_peer: bool,
        /// The category of the reason, as counted in metrics.
        reason: RefusalReason,
        /// The reason as a text.
        detail: String,
    },
    /// The peer does not answer: no Millrace runs there, or packets do not reach it.
    Absent(String),
    /// The peer did not answer in time.
    TimedOut(String),
    /// The peer has a key that the settings do not name, or its certificate is not valid.
    Untrusted(String),
    /// The peer sent an invalid message, or one that is not expected now.
    Malformed(String),
    /// The agreement ended when its connection ended.
    Ended(String),
}

impl NegotiationState {
    /// Names of the negotiation states, in the order in which reports list them.
    pub const NAMES: [&str; 8] =
        ["waiting", "agreed", "refused", "absent", "timed-out", "untrusted", "malformed", "ended"];

    /// Returns the name of the negotiation state in reports and metrics.
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

    /// Returns the state with its text cut to [`DETAIL_MAX`] bytes.
    pub fn bounded(mut self) -> Self {
        if let Self::Refused { detail, .. }
        | Self::Absent(detail)
        | Self::TimedOut(detail)
        | Self::Untrusted(detail)
        | Self::Malformed(detail)
        | Self::Ended(detail) = &mut self
        {
            let end = (0..=DETAIL_MAX).rev().find(|at| detail.is_char_boundary(*at)).unwrap_or(0);
            detail.truncate(end);
        }
        self
    }

    /// Returns why the negotiation is in this state, empty if it needs no reason.
    pub fn detail(&self) -> String {
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

/// Returns the name of a reason for refusal, as used in messages and metrics.
pub fn reason_name(reason: RefusalReason) -> &'static str {
    match reason {
        RefusalReason::Version => "version",
        RefusalReason::Abi => "abi",
        RefusalReason::UnknownFunction => "unknown-function",
        RefusalReason::Kernel => "kernel",
        RefusalReason::Resources => "resources",
        RefusalReason::NoRule => "no-rule",
        RefusalReason::Nat => "nat",
        RefusalReason::NotAllowed => "not-allowed",
        RefusalReason::Busy => "busy",
        RefusalReason::NotGiven => "not-given",
    }
}

#[derive(Debug)]
struct AgreementEntry {
    state: NegotiationState,
    /// Time at which the negotiation last came into another state, in ns of `CLOCK_MONOTONIC`. A refusal after a
    /// refusal for another reason is the same state.
    since_ns: u64,
    address: Option<IpAddr>,
    epoch: Option<u64>,
    host: Option<HostOffer>,
    functions: usize,
    rules: Vec<String>,
    verdict: PathVerdict,
    verdict_ns: Option<u64>,
    downgrades: BTreeMap<Downgrade, u64>,
    latest: VecDeque<(u64, Downgrade, u16)>,
    /// Connections that were already compared with the peer's report, by their sequence numbers. A connection is
    /// removed when it is no longer reported.
    judged: HashSet<[u32; 2]>,
    timing: status::Negotiated,
    /// True if this host has connected to the peer.
    calls: bool,
    /// ID of the current negotiation. The end of an older negotiation is ignored.
    session: u64,
}

impl AgreementEntry {
    fn new(now_ns: u64) -> Self {
        Self {
            state: NegotiationState::Waiting,
            since_ns: now_ns,
            address: None,
            epoch: None,
            host: None,
            functions: 0,
            rules: Vec::new(),
            verdict: PathVerdict::default(),
            verdict_ns: None,
            downgrades: BTreeMap::new(),
            latest: VecDeque::new(),
            judged: HashSet::new(),
            timing: status::Negotiated::default(),
            calls: false,
            session: 0,
        }
    }

    /// Sets the state of the negotiation with this peer. The time of the latest change is updated only if the new state
    /// has another name.
    fn become_other(&mut self, state: NegotiationState, now_ns: u64) {
        if self.state.name() != state.name() {
            self.since_ns = now_ns;
        }
        self.state = state;
    }
}

/// A peer with which an agreement is in force.
#[derive(Debug)]
pub struct AgreedPeer<'a> {
    /// The peer's name in the settings.
    pub name: &'a str,
    /// True if this host has connected to the peer.
    pub calls: bool,
    /// The peer's address. The agreement applies to connections with this address.
    pub address: IpAddr,
}

/// The peers of the settings with the state of each. All times are times of `CLOCK_MONOTONIC`.
#[derive(Debug, Default)]
pub struct PeerAgreements {
    peers: BTreeMap<String, AgreementEntry>,
    /// Number of negotiations by their outcome, which is the name of a state or the reason for a refusal.
    negotiations: BTreeMap<String, u64>,
    /// ID of the latest negotiation.
    sessions: u64,
}

impl PeerAgreements {
    /// Replaces the list of peers. The states of peers that are in both lists are kept.
    pub fn set_peers(&mut self, names: impl Iterator<Item = String>, now_ns: u64) {
        let mut before = std::mem::take(&mut self.peers);
        self.peers = names
            .map(|name| {
                let entry = before.remove(&name).unwrap_or_else(|| AgreementEntry::new(now_ns));
                (name, entry)
            })
            .collect();
    }

    /// Reports whether an agreement with the peer is in force.
    pub fn is_agreed(&self, peer: &str) -> bool {
        self.peers.get(peer).is_some_and(|it| it.state == NegotiationState::Agreed)
    }

    /// Reports whether this host has connected to the peer and an agreement is in force there. `epoch` is the random
    /// number that the peer's daemon chose when it started, so that its predecessors do not count. If so, a connection
    /// that the peer has made at the same time is superfluous.
    pub fn has_called(&self, peer: &str, epoch: u64) -> bool {
        let entry = self.peers.get(peer).filter(|it| it.state == NegotiationState::Agreed);
        entry.is_some_and(|it| it.calls && it.epoch == Some(epoch))
    }

    /// Reports whether an agreement in force takes precedence over a new one, because both hosts have connected to each
    /// other at the same time: the host with the larger epoch decides which connection maintains the agreement, and the
    /// other one follows. `calls` is true if this host has connected for the new one.
    pub fn is_superfluous(&self, peer: &str, calls: bool, theirs: u64, own: u64) -> bool {
        let agreed = self.peers.get(peer).filter(|it| it.state == NegotiationState::Agreed);
        agreed.is_some_and(|it| it.epoch == Some(theirs) && it.calls != calls) && (calls || own > theirs)
    }

    /// Ends all agreements. Returns the addresses for which no agreement applies any more.
    pub fn end_all(&mut self, now_ns: u64) -> Vec<IpAddr> {
        let agreed = self.peers.values_mut().filter(|it| it.state == NegotiationState::Agreed);
        let ended = agreed.map(|entry| {
            entry.become_other(
                NegotiationState::Ended("this host's settings have changed".to_owned()),
                now_ns,
            );
            entry.session = 0;
            entry.address
        });
        ended.flatten().collect()
    }

    /// Records an agreement. Returns the ID of the negotiation, and the peer's previous address if the agreement
    /// applied to another one before.
    pub fn agreed(
        &mut self,
        peer: AgreedPeer<'_>,
        theirs: &Statement,
        rules: Vec<String>,
        timing: status::Negotiated,
        now_ns: u64,
    ) -> Option<(u64, Option<IpAddr>)> {
        let entry = self.peers.get_mut(peer.name)?;
        self.sessions += 1;
        // If the peer's address has changed, the agreement must no longer apply to the old address.
        let before = entry.address.replace(peer.address).filter(|before| *before != peer.address);
        entry.epoch = Some(theirs.epoch);
        entry.host = Some(theirs.host.clone());
        (entry.functions, entry.rules) = (theirs.functions.len(), rules);
        (entry.timing, entry.session, entry.calls) = (timing, self.sessions, peer.calls);
        entry.become_other(NegotiationState::Agreed, now_ns);
        self.count("agreed", 1);
        Some((self.sessions, before))
    }

    /// Renews an agreement, and stores the rules that both hosts agree on now. Returns false if the peer's latest
    /// negotiation is not `session`.
    pub fn renewed(&mut self, peer: &str, session: u64, theirs: &Statement, rules: Vec<String>) -> bool {
        match self.peers.get_mut(peer).filter(|entry| entry.session == session) {
            Some(entry) => {
                (entry.functions, entry.rules) = (theirs.functions.len(), rules);
                true
            }
            None => false,
        }
    }

    /// Records the end of a negotiation, and returns the address to which the agreement no longer applies. `session` is
    /// the ID of the negotiation if its agreement was in force; the end of an older negotiation is ignored.
    pub fn ended(
        &mut self,
        peer: &str,
        session: Option<u64>,
        state: NegotiationState,
        now_ns: u64,
    ) -> Option<IpAddr> {
        let entry = self.peers.get_mut(peer)?;
        let is_current = session == Some(entry.session);
        // Another negotiation with the peer maintains the agreement, which stays in force.
        if entry.state == NegotiationState::Agreed && !is_current {
            return None;
        }
        let name = match &state {
            NegotiationState::Refused { reason, .. } => reason_name(*reason),
            other => other.name(),
        };
        entry.become_other(state, now_ns);
        // A negotiation that never led to an agreement has no address to release.
        let address = entry.address.filter(|_| is_current);
        self.count(name, 1);
        address
    }

    /// Counts negotiations with this outcome.
    pub(crate) fn count(&mut self, name: &str, count: u64) {
        *self.negotiations.entry(name.to_owned()).or_default() += count;
    }

    /// Compares what both ends have reported about the same connections. Returns changes of TCP options by a middlebox
    /// (downgrades) that were not known yet.
    pub fn compare(
        &mut self,
        peer: &str,
        own: &[ConnectionReport],
        theirs: &[ConnectionReport],
        now_ns: u64,
    ) -> Vec<(Downgrade, u16)> {
        let Some(entry) = self.peers.get_mut(peer) else { return Vec::new() };
        if let Some(pass) = evidence::options_pass(evidence::compare(own, theirs)) {
            entry.verdict.options = Some(pass);
            entry.verdict_ns = Some(now_ns);
        }
        // Connections that the peer no longer reports are forgotten, so that the set stays bounded.
        entry.judged.retain(|known| own.iter().any(|it| it.sequence == *known));
        let mut found = Vec::new();
        for (connection, downgrade) in evidence::compare(own, theirs) {
            // Each connection is compared only once, although it is reported several times.
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

    /// Records newly measured properties of the path to a peer. A property that is unknown in `verdict` keeps its
    /// previous value.
    pub fn note(&mut self, peer: &str, verdict: &PathVerdict, now_ns: u64) {
        let Some(entry) = self.peers.get_mut(peer) else { return };
        let known = &mut entry.verdict;
        known.udp = verdict.udp.or(known.udp);
        known.mtu = verdict.mtu.or(known.mtu);
        known.nat = verdict.nat.or(known.nat);
        entry.verdict_ns = Some(now_ns);
    }

    /// Returns what is known of the path to a peer.
    pub fn verdict(&self, peer: &str) -> PathVerdict {
        self.peers.get(peer).map(|entry| entry.verdict.clone()).unwrap_or_default()
    }

    /// Returns the number of negotiations with each outcome.
    pub fn negotiations(&self) -> BTreeMap<String, u64> {
        self.negotiations.clone()
    }

    /// Returns how many changes of TCP options by a middlebox (downgrades) were found, by kind.
    pub fn downgrades(&self) -> BTreeMap<String, u64> {
        let sum = |kind: &Downgrade| self.peers.values().filter_map(|it| it.downgrades.get(kind)).sum();
        Downgrade::ALL.iter().map(|kind| (kind.name().to_owned(), sum(kind))).collect()
    }

    /// Returns the status of all peers.
    pub fn status(&self, now_ns: u64) -> Vec<status::GraftPeerStatus> {
        self.peers.iter().map(|(name, entry)| entry.status(name, now_ns)).collect()
    }

    /// Returns the status of the peer with this address.
    pub fn status_of(&self, address: IpAddr, now_ns: u64) -> Option<status::GraftPeerStatus> {
        let mut entries = self.peers.iter();
        let (name, entry) = entries.find(|(_, entry)| entry.address == Some(address))?;
        Some(entry.status(name, now_ns))
    }
}

impl AgreementEntry {
    fn status(&self, name: &str, now_ns: u64) -> status::GraftPeerStatus {
        let age = |then_ns: u64| now_ns.saturating_sub(then_ns) as f64 / 1e9;
        let latest = self.latest.iter().map(|(then_ns, downgrade, port)| status::Downgraded {
            kind: downgrade.name().to_owned(),
            port: *port,
            age_s: age(*then_ns),
        });
        status::GraftPeerStatus {
            name: name.to_owned(),
            state: self.state.name().to_owned(),
            detail: self.state.detail(),
            age_s: age(self.since_ns),
            address: self.address,
            host: self.host.clone(),
            functions: self.functions,
            rules: if self.state == NegotiationState::Agreed { self.rules.clone() } else { Vec::new() },
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
    use millrace_graft_proto::message::{NatReport, OfferSide, OptionOutcome};

    use super::*;

    fn table() -> PeerAgreements {
        let mut table = PeerAgreements::default();
        table.set_peers(["b".to_owned()].into_iter(), 1);
        table
    }

    fn statement(epoch: u64) -> Statement {
        let host = HostOffer { program: "0".into(), kernel: "6.18".into(), abi: 1, cpus: 1, memory_mib: 1 };
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
            path: PathVerdict::default(),
        }
    }

    fn agree(table: &mut PeerAgreements, epoch: u64) -> u64 {
        let address = "192.0.2.1".parse().unwrap();
        let made = table.agreed(
            AgreedPeer { name: "b", calls: epoch == 7, address },
            &statement(epoch),
            vec!["r".into()],
            Default::default(),
            2,
        );
        made.expect("a peer").0
    }

    #[test]
    fn end_of_an_older_negotiation_with_a_peer_is_ignored() {
        let mut table = table();
        let first = agree(&mut table, 7);
        assert!(table.is_agreed("b") && table.has_called("b", 7) && !table.has_called("b", 8));
        // The peer has restarted, so this is another negotiation.
        let second = agree(&mut table, 8);
        assert!(!table.has_called("b", 7) && !table.has_called("b", 8));
        assert_eq!(table.ended("b", Some(first), NegotiationState::Ended("closed".into()), 3), None);
        assert_eq!(table.ended("b", None, NegotiationState::Absent("refused".into()), 3), None);
        assert!(table.is_agreed("b"));
        assert!(!table.renewed("b", first, &statement(7), Vec::new()));
        let gone = table.ended("b", Some(second), NegotiationState::Ended("closed".into()), 1_000_000_003);
        assert_eq!(gone, Some("192.0.2.1".parse().unwrap()));
        let status = &table.status(3_000_000_003)[0];
        assert_eq!((status.state.as_str(), status.detail.as_str(), status.age_s), ("ended", "closed", 2.0));
        assert_eq!(table.negotiations(), [("agreed".to_owned(), 2), ("ended".to_owned(), 1)].into());
    }

    /// Two hosts that connect to each other at the same time, in every order in which their messages may arrive: a host
    /// that has connected binds and then confirms, the other one binds when the confirmation arrives.
    #[test]
    fn both_hosts_keep_the_same_one_of_two_simultaneous_negotiations() {
        // Each pair of steps: the connecting host binds, and the listening host does. 0 and 1 are the negotiations of
        // host 0 and of host 1.
        let orders = [[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0]];
        for (order, epochs) in orders.into_iter().flat_map(|order| [(order, [3, 7]), (order, [7, 3])]) {
            let mut hosts = [table(), table()];
            let mut steps = [0, 0];
            let mut kept = [None, None];
            let mut is_open = [true, true];
            for by in order {
                let host = if steps[by] == 0 { by } else { 1 - by };
                steps[by] += 1;
                let own = epochs[host];
                let theirs = epochs[1 - host];
                if !is_open[by] || hosts[host].is_superfluous("b", host == by, theirs, own) {
                    is_open[by] = false;
                    continue;
                }
                let address = "192.0.2.1".parse().unwrap();
                let peer = AgreedPeer { name: "b", calls: host == by, address };
                hosts[host].agreed(peer, &statement(theirs), Vec::new(), Default::default(), 2).unwrap();
                kept[host] = Some(by);
            }
            let kept = [kept[0].unwrap(), kept[1].unwrap()];
            assert!(kept[0] == kept[1] && is_open[kept[0]], "{order:?} {epochs:?}: {kept:?}");
        }
    }

    #[test]
    fn refusals_are_counted_by_their_reasons() {
        let mut table = table();
        let state = NegotiationState::Refused {
            by_peer: true,
            reason: RefusalReason::UnknownFunction,
            detail: "hybla".into(),
        };
        assert_eq!(table.ended("b", None, state, 5), None);
        let status = &table.status(5)[0];
        assert_eq!(status.detail, "the peer refuses (unknown-function): hybla");
        assert_eq!(table.negotiations(), [("unknown-function".to_owned(), 1)].into());
        assert_eq!(table.ended("nobody", None, NegotiationState::Waiting, 5), None);
    }

    #[test]
    fn client_and_server_reports_of_a_connection_are_compared_once() {
        let mut table = table();
        let connection = |number: u32, side| ConnectionReport {
            sequence: [number, number],
            side,
            port: 80,
            outcome: OptionOutcome::Silent,
            spoke: true,
            own: 0,
            heard: 0,
        };
        let own: Vec<_> = (0..20).map(|number| connection(number, OfferSide::Client)).collect();
        let theirs: Vec<_> = (0..20).map(|number| connection(number, OfferSide::Server)).collect();
        let found = table.compare("b", &own, &theirs[..10], 1);
        assert_eq!(found, vec![(Downgrade::Stripped, 80); 10]);
        assert_eq!(table.compare("b", &own, &theirs, 2).len(), 10, "the others");
        assert_eq!(table.compare("b", &own, &theirs, 3).len(), 0);
        let status = &table.status(3)[0];
        assert_eq!((status.downgrades, status.latest_downgrades.len()), (20, LATEST));
        assert_eq!(status.path.options, Some(false));
        assert_eq!(table.downgrades()["stripped"], 20);
        // A connection that was compared is forgotten once the peer no longer reports it.
        table.compare("b", &own[..1], &theirs, 4);
        assert_eq!(table.peers["b"].judged.len(), 1);
    }

    #[test]
    fn reload_keeps_agreement_state_of_peers_still_in_the_settings() {
        let mut table = table();
        agree(&mut table, 7);
        let found = PathVerdict { udp: Some(true), mtu: Some(1400), ..PathVerdict::default() };
        table.note("b", &found, 4);
        table.note("b", &PathVerdict { nat: Some(NatReport::Theirs), ..PathVerdict::default() }, 5);
        table.set_peers(["a".to_owned(), "b".to_owned()].into_iter(), 6);
        let wanted = PathVerdict { nat: Some(NatReport::Theirs), ..found };
        assert_eq!(table.verdict("b"), wanted);
        assert!(table.is_agreed("b") && !table.is_agreed("a"));
        assert_eq!(table.end_all(6), ["192.0.2.1".parse::<IpAddr>().unwrap()]);
        assert!(!table.is_agreed("b") && table.end_all(6).is_empty());
        table.set_peers(["a".to_owned()].into_iter(), 7);
        assert_eq!(table.verdict("b"), PathVerdict::default());
    }
}
