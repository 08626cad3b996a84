//! Predicts the profile and size of a connection from earlier connections of the same kind.
//!
//! A kind consists of the server port, whether this host is the client, the connecting command and its cgroup. The peer
//! is not part of it. Each remembered flow has one of three shapes, and the most frequent shape is predicted. The
//! prediction states which share of the flows had that shape.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::profile::TrafficProfile;

/// Largest number of kinds of connections that are remembered. A new kind replaces the least recently used one.
pub const KINDS_MAX: usize = 1024;
/// Largest number of flows that are remembered for each kind of connection.
pub const LATEST: usize = 16;
/// Largest number of remembered flows of a kind from one peer, so that a single unknown host does not determine a
/// port's prediction.
pub const OF_ONE_PEER: usize = 4;
/// Smallest number of remembered flows from which a prediction is made.
pub const ENOUGH: usize = 4;

/// Interactive flows have at most this many bytes per exchange (a request and its answer).
const SMALL: u64 = 2 << 10;
/// Interactive flows have at least this many exchanges.
const MANY: u32 = 4;
/// Bulk flows have at least this many bytes per exchange.
const LARGE: u64 = 1 << 20;

/// A kind of connection. Connections of one kind are expected to have similar traffic.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TrafficClass {
    /// True if this host opens the connection.
    pub is_client: bool,
    /// Port of the server.
    pub port: u16,
    /// Name of the connecting process; empty if unknown, as always at a server.
    pub command: String,
    /// ID of the cgroup that the settings' rule for the connection names; 0 if the rule names none.
    pub cgroup: u64,
}

/// Returns a number that identifies a peer. All IPv6 addresses of a /64 network have the same number.
pub fn number_of(peer: IpAddr) -> u64 {
    match peer.to_canonical() {
        IpAddr::V4(v4) => u64::from(v4.to_bits()),
        IpAddr::V6(v6) => (v6.to_bits() >> 64) as u64,
    }
}

/// Bytes and exchanges of a finished connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FlowFigures {
    /// Bytes that the client sent.
    pub asked: u64,
    /// Bytes that the server sent.
    pub answered: u64,
    /// How often the client sent again after it had received data; `None`: not counted.
    pub turns: Option<u32>,
}

/// The traffic pattern of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FlowShape {
    /// Many small exchanges; a person waits for the answer in each of them.
    Interactive,
    /// Requests and their answers, of any size.
    Requests,
    /// Much data in one direction, in few exchanges.
    Bulk,
}

impl FlowShape {
    /// Returns the name of this traffic pattern in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Interactive => "small exchanges",
            Self::Requests => "requests",
            Self::Bulk => "bulk",
        }
    }
}

impl FlowFigures {
    /// Returns the bytes of the larger of both directions.
    pub fn bytes(&self) -> u64 {
        self.asked.max(self.answered)
    }

    /// Returns the traffic pattern of the flow; `None` if it transferred nothing.
    pub fn shape(&self) -> Option<FlowShape> {
        let all = self.asked.saturating_add(self.answered);
        if all == 0 {
            return None;
        }
        // A turn is a request that follows received data, so a flow with n turns has n + 1 exchanges.
        let exchanges = self.turns.map_or(1, |turns| u64::from(turns) + 1);
        Some(match self.turns {
            Some(turns) if turns >= MANY && all / exchanges <= SMALL => FlowShape::Interactive,
            // A bulk flow has at least 1 MiB per exchange, of which one direction has at most a ninth.
            _ if self.bytes() / exchanges >= LARGE && self.bytes() / 9 >= self.asked.min(self.answered) => {
                FlowShape::Bulk
            }
            _ => FlowShape::Requests,
        })
    }
}

/// The source of a prediction. `graft why` and metrics use the same names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ExpectationSource {
    /// The operator's settings state the traffic profile of these connections.
    Configured,
    /// Earlier connections of the same kind.
    Learned,
    /// The usual use of a well-known port.
    Port,
    /// No source has information about such connections.
    Default,
}

impl ExpectationSource {
    /// The sources of predictions, in the order in which they are tried.
    pub const ALL: [Self; 4] = [Self::Configured, Self::Learned, Self::Port, Self::Default];

    /// Returns the source's name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Configured => "configured",
            Self::Learned => "learned",
            Self::Port => "port",
            Self::Default => "default",
        }
    }
}

/// A prediction for a connection, before it begins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Expected {
    /// The predicted traffic profile: which delays matter to the application.
    pub profile: TrafficProfile,
    /// Predicted size of the larger direction in KiB; `None`: unknown.
    pub size_kib: Option<u32>,
    /// The source of the prediction: settings, flows, port, or none.
    pub source: ExpectationSource,
    /// Share of the remembered flows that have the predicted traffic pattern; 1 if the prediction does not depend on
    /// flows.
    pub sure: f64,
    /// The reason for the prediction, as text for operators.
    pub words: String,
}

/// A selection of connections. A field that is `None` matches all connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Question {
    /// True for connections that this host opens; false for those that it accepts.
    pub is_client: bool,
    /// Ranges of server ports.
    pub ports: Vec<RangeInclusive<u16>>,
    /// Name of the connecting process.
    pub command: Option<String>,
    /// ID of the cgroup that the settings' rule for the connection names.
    pub cgroup: Option<u64>,
}

impl Question {
    /// Returns the kind of connection if this selection covers exactly one kind; `None` if it may cover several.
    fn kind(&self) -> Option<TrafficClass> {
        let [ports] = &self.ports[..] else { return None };
        (ports.start() == ports.end()).then_some(())?;
        let command = self.command.clone()?;
        let cgroup = self.cgroup?;
        Some(TrafficClass { is_client: self.is_client, port: *ports.start(), command, cgroup })
    }

    fn is_about(&self, kind: &TrafficClass) -> bool {
        self.is_client == kind.is_client
            && self.ports.iter().any(|ports| ports.contains(&kind.port))
            && self.command.as_ref().is_none_or(|command| *command == kind.command)
            && self.cgroup.is_none_or(|cgroup| cgroup == kind.cgroup)
    }
}

#[derive(Clone, Copy, Debug)]
struct SeenFlow {
    at: u64,
    peer: u64,
    flow: FlowFigures,
}

#[derive(Debug, Default)]
struct KnownClass {
    used: u64,
    seen: VecDeque<SeenFlow>,
}

/// A remembered flow and its kind, in the form that is stored and read again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassLesson {
    /// The kind of the flow.
    pub kind: TrafficClass,
    /// The observed flow.
    pub seen: Saw,
}

/// An observation of a connection, from which the predictor learns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Saw {
    /// A finished flow, with the number that identifies its peer.
    Flow(u64, FlowFigures),
}

/// The known kinds of connections, and the latest flows of each kind. Only the order of events counts, since the
/// predictor has no clock.
#[derive(Debug)]
pub struct Kinds {
    kinds: BTreeMap<TrafficClass, KnownClass>,
    most: usize,
    now: u64,
}

impl Default for Kinds {
    fn default() -> Self {
        Self::new(KINDS_MAX)
    }
}

impl Kinds {
    /// Makes a predictor without flows, for at most `most` kinds of connections (at least one).
    pub fn new(most: usize) -> Self {
        Self { kinds: BTreeMap::new(), most: most.max(1), now: 0 }
    }

    /// Returns the known kinds of connections, the most recently used one first.
    pub fn iter(&self) -> impl Iterator<Item = &TrafficClass> {
        let mut all: Vec<_> = self.kinds.iter().collect();
        // Kinds are sorted by a counter of uses, since there is no clock.
        all.sort_by_key(|(_, known)| std::cmp::Reverse(known.used));
        all.into_iter().map(|(kind, _)| kind)
    }

    /// Adds a finished flow. `peer` is the peer's number from [`number_of`]. A flow without bytes is ignored.
    pub fn note(&mut self, kind: TrafficClass, peer: u64, flow: FlowFigures) {
        if flow.shape().is_none() {
            return;
        }
        let (at, known) = self.enter(kind);
        // If the peer already has as many flows as one peer may have, its oldest flow is dropped. Otherwise a full list
        // drops the oldest flow of all peers.
        let of_peer = known.seen.iter().filter(|seen| seen.peer == peer).count();
        if of_peer >= OF_ONE_PEER {
            let oldest = known.seen.iter().position(|seen| seen.peer == peer);
            oldest.and_then(|oldest| known.seen.remove(oldest));
        } else if known.seen.len() >= LATEST {
            known.seen.pop_front();
        }
        known.seen.push_back(SeenFlow { at, peer, flow });
    }

    /// Returns all remembered flows in the order in which they were added. A predictor that learns them has the same
    /// state as this one.
    pub fn lessons(&self) -> Vec<ClassLesson> {
        let mut lessons: Vec<(u64, ClassLesson)> = Vec::new();
        for (kind, known) in &self.kinds {
            let flows = known.seen.iter().map(|seen| (seen.at, Saw::Flow(seen.peer, seen.flow)));
            lessons.extend(flows.map(|(at, seen)| (at, ClassLesson { kind: kind.clone(), seen })));
        }
        lessons.sort_by_key(|(at, _)| *at);
        lessons.into_iter().map(|(_, lesson)| lesson).collect()
    }

    /// Adds a flow that [`Self::lessons`] has returned earlier.
    pub fn teach(&mut self, ClassLesson { kind, seen }: ClassLesson) {
        let Saw::Flow(peer, flow) = seen;
        self.note(kind, peer, flow);
    }

    fn enter(&mut self, kind: TrafficClass) -> (u64, &mut KnownClass) {
        self.now += 1;
        if !self.kinds.contains_key(&kind) && self.kinds.len() >= self.most {
            let oldest = self.kinds.iter().min_by_key(|(_, known)| known.used).map(|(kind, _)| kind.clone());
            oldest.map(|oldest| self.kinds.remove(&oldest));
        }
        let known = self.kinds.entry(kind).or_default();
        known.used = self.now;
        (self.now, known)
    }

    fn known_classes(&self, question: &Question) -> Vec<&KnownClass> {
        match question.kind() {
            Some(kind) => self.kinds.get(&kind).into_iter().collect(),
            None => {
                let about = self.kinds.iter().filter(|(kind, _)| question.is_about(kind));
                about.map(|(_, known)| known).collect()
            }
        }
    }

    /// Returns the latest flows of several kinds together, within the limits that apply to one kind.
    fn latest(about: &[&KnownClass]) -> Vec<FlowFigures> {
        let mut seen: Vec<SeenFlow> = about.iter().flat_map(|known| known.seen.iter().copied()).collect();
        // Flows are sorted from new to old, so that the limit for each peer drops its oldest flows.
        seen.sort_by_key(|seen| std::cmp::Reverse(seen.at));
        let mut of_peers = BTreeMap::<u64, usize>::new();
        seen.retain(|seen| {
            let count = of_peers.entry(seen.peer).or_default();
            *count += 1;
            *count <= OF_ONE_PEER
        });
        seen.into_iter().take(LATEST).map(|seen| seen.flow).collect()
    }

    /// Predicts the profile and size of the next connection that the selection `question` covers.
    pub fn expect(&self, question: &Question) -> Expected {
        let about = self.known_classes(question);
        let usual = usual(question);
        let flows = Self::latest(&about);
        // Too few flows are known, so the usual traffic profile of the port is predicted.
        if flows.len() < ENOUGH {
            return usual;
        }
        let Some((shape, count)) = most_frequent(&flows) else { return usual };
        let is_left = match shape {
            FlowShape::Interactive => false,
            // If exchanges were not counted, the flow may really be interactive, so the usual traffic profile of the
            // port is predicted.
            FlowShape::Requests => flows.iter().all(|flow| flow.turns.is_none()),
            // The number of bytes does not show whether a person waits for them. If the port's usual profile is
            // insensitive to delay, the prediction is, too.
            FlowShape::Bulk => usual.profile == TrafficProfile::Insensitive,
        };
        let is_usual = is_left && usual.source != ExpectationSource::Default;
        let profile = match shape {
            _ if is_usual => usual.profile,
            FlowShape::Interactive => TrafficProfile::Time,
            FlowShape::Requests => TrafficProfile::TimeAndLoss,
            FlowShape::Bulk => TrafficProfile::Loss,
        };
        let kib = median_kib(&flows);
        let of = flows.len();
        let mut words =
            format!("{count} of the latest {of} were {}, their median is {kib} KiB", shape.name());
        if is_usual {
            words = format!("{words}; {}", usual.words);
        }
        Expected {
            profile,
            size_kib: Some(kib),
            source: ExpectationSource::Learned,
            sure: count as f64 / of as f64,
            words,
        }
    }
}

/// Returns the traffic profile that is predicted from the server port alone.
fn usual(question: &Question) -> Expected {
    // A range of ports has no usual profile. Several ports have one only if it is the same for all.
    let mut usual =
        question.ports.iter().map(|ports| usual_of(*ports.start()).filter(|_| ports.start() == ports.end()));
    let first = usual.next().flatten();
    match first.filter(|first| usual.all(|other| other == Some(*first))) {
        Some(profile) => Expected {
            profile,
            size_kib: None,
            source: ExpectationSource::Port,
            sure: 1.0,
            words: "what the port is usually for".to_owned(),
        },
        None => Expected {
            profile: TrafficProfile::TimeAndLoss,
            size_kib: None,
            source: ExpectationSource::Default,
            sure: 0.0,
            words: "nothing is known of such connections yet".to_owned(),
        },
    }
}

/// Returns the most frequent traffic pattern of the flows, and how many flows have it. Of equally frequent patterns,
/// the one that is most sensitive to delay is returned.
fn most_frequent(flows: &[FlowFigures]) -> Option<(FlowShape, usize)> {
    let mut counts = BTreeMap::<FlowShape, usize>::new();
    for shape in flows.iter().filter_map(FlowFigures::shape) {
        *counts.entry(shape).or_default() += 1;
    }
    // max_by_key returns the last of several maxima. Iterating in reverse makes that the first shape in the enum's
    // order.
    counts.into_iter().rev().max_by_key(|(_, count)| *count)
}

/// Returns the median size in KiB, rounded up. For an even number of flows, it is the larger of the two middle sizes.
fn median_kib(flows: &[FlowFigures]) -> u32 {
    let mut sizes: Vec<u64> = flows.iter().map(FlowFigures::bytes).collect();
    sizes.sort_unstable();
    let bytes = sizes.get(sizes.len() / 2).copied().unwrap_or_default();
    u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX)
}

/// Returns the usual profile of a well-known port.
pub fn usual_of(port: u16) -> Option<TrafficProfile> {
    Some(match port {
        // Ports of shells, remote desktops, calls, DNS, message brokers and databases.
        22
        | 23
        | 3389
        | 5900..=5909
        | 5060
        | 5061
        | 53
        | 853
        | 1883
        | 8883
        | 3306
        | 5432
        | 6379
        | 11211
        | 27017 => TrafficProfile::Time,
        // Ports of web pages and video.
        80 | 443 | 554 | 1935 | 8000 | 8008 | 8080 | 8443 => TrafficProfile::TimeAndLoss,
        // Ports of files, mail and directories for which a person waits.
        110 | 143 | 389 | 445 | 465 | 587 | 636 | 993 | 995 | 2049 => TrafficProfile::Loss,
        // Ports of mail between servers, copies and updates, for which nobody waits.
        20 | 21 | 25 | 119 | 873 | 3142 | 9418 => TrafficProfile::Insensitive,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kind(port: u16) -> TrafficClass {
        TrafficClass { is_client: true, port, command: "curl".to_owned(), cgroup: 0 }
    }

    fn about(port: u16) -> Question {
        Question { is_client: true, ports: vec![port..=port], ..Question::default() }
    }

    fn flow(asked: u64, answered: u64, turns: impl Into<Option<u32>>) -> FlowFigures {
        FlowFigures { asked, answered, turns: turns.into() }
    }

    #[test]
    fn flow_is_classified_as_requests_interactive_or_bulk() {
        let table = [
            (flow(0, 0, 0), None),
            (flow(500, 40_000, 0), Some(FlowShape::Requests)),
            (flow(3_000, 20_000, 50), Some(FlowShape::Interactive)),
            (flow(3_000, 20_000, 3), Some(FlowShape::Requests)),
            (flow(3_000, 2_000_000, 50), Some(FlowShape::Requests)),
            (flow(300, 5 << 20, 0), Some(FlowShape::Bulk)),
            (flow(300, 5 << 20, None), Some(FlowShape::Bulk)),
            (flow(500 << 20, 9_000, 2), Some(FlowShape::Bulk)),
            (flow(3 << 20, 3 << 20, 1), Some(FlowShape::Requests)),
            (flow(u64::MAX, u64::MAX, u32::MAX), Some(FlowShape::Requests)),
            (flow(0, u64::MAX, 0), Some(FlowShape::Bulk)),
        ];
        for (flow, wanted) in table {
            assert_eq!(flow.shape(), wanted, "{flow:?}");
        }
    }

    #[test]
    fn traffic_class_of_earlier_flows_is_predicted() {
        let mut kinds = Kinds::default();
        let port = kinds.expect(&about(443));
        assert_eq!(
            (port.profile, port.source, port.size_kib),
            (TrafficProfile::TimeAndLoss, ExpectationSource::Port, None)
        );
        assert_eq!(kinds.expect(&about(7100)).source, ExpectationSource::Default);
        for peer in 0..ENOUGH as u64 {
            assert_ne!(kinds.expect(&about(443)).source, ExpectationSource::Learned, "{peer} say nothing");
            kinds.note(kind(443), peer, flow(300, (5 + peer) << 20, 0));
        }
        let learned = kinds.expect(&about(443));
        assert_eq!((learned.profile, learned.source), (TrafficProfile::Loss, ExpectationSource::Learned));
        assert_eq!((learned.size_kib, learned.sure), (Some(7 << 10), 1.0));
        assert_eq!(learned.words, "4 of the latest 4 were bulk, their median is 7168 KiB");
        assert_eq!(kinds.expect(&about(80)).source, ExpectationSource::Port, "others do not count");
        let other = Question { command: Some("wget".into()), ..about(443) };
        assert_eq!(kinds.expect(&other).source, ExpectationSource::Port);
        let server = Question { is_client: false, ..about(443) };
        assert_eq!(kinds.expect(&server).source, ExpectationSource::Port);
        let all = Question { ports: vec![1..=1000], ..about(1) };
        assert_eq!(kinds.expect(&all).profile, TrafficProfile::Loss, "a range has what is in it");
    }

    #[test]
    fn bulk_flows_keep_the_usual_traffic_profile_of_the_rsync_port() {
        let mut kinds = Kinds::default();
        for peer in 0..9 {
            kinds.note(kind(873), peer, flow(900 << 20, 9_000, 3));
            kinds.note(kind(7100), peer, flow(900 << 20, 9_000, 3));
        }
        assert_eq!(kinds.expect(&about(873)).profile, TrafficProfile::Insensitive);
        assert_eq!(kinds.expect(&about(7100)).profile, TrafficProfile::Loss);
    }

    #[test]
    fn unknown_exchange_counts_leave_the_traffic_profile_to_the_port() {
        let mut kinds = Kinds::default();
        for peer in 0..9 {
            kinds.note(kind(22), peer, flow(9_000, 40_000, None));
            kinds.note(kind(7100), peer, flow(9_000, 40_000, None));
        }
        let shell = kinds.expect(&about(22));
        assert_eq!((shell.profile, shell.size_kib), (TrafficProfile::Time, Some(40)));
        assert_eq!(
            shell.words,
            "9 of the latest 9 were requests, their median is 40 KiB; what the port is usually for"
        );
        assert_eq!(kinds.expect(&about(7100)).profile, TrafficProfile::TimeAndLoss);
        kinds.note(kind(22), 9, flow(9_000, 40_000, 2));
        assert_eq!(kinds.expect(&about(22)).profile, TrafficProfile::TimeAndLoss, "one was counted");
    }

    #[test]
    fn flows_from_one_network_count_as_one_peer() {
        let number = |text: &str| number_of(text.parse().unwrap());
        assert_eq!(number("2001:db8::1"), number("2001:db8::ffff:1"));
        assert_ne!(number("2001:db8::1"), number("2001:db8:0:1::1"));
        assert_eq!(number("10.0.0.1"), number("::ffff:10.0.0.1"));
        assert_ne!(number("10.0.0.1"), number("10.0.0.2"));
    }

    #[test]
    fn well_known_ports_have_their_traffic_class() {
        for (port, wanted) in [
            (22, TrafficProfile::Time),
            (443, TrafficProfile::TimeAndLoss),
            (993, TrafficProfile::Loss),
            (873, TrafficProfile::Insensitive),
        ] {
            assert_eq!(usual_of(port), Some(wanted), "{port}");
        }
        assert_eq!(usual_of(7100), None);
        let both = Question { ports: vec![80..=80, 443..=443], ..about(1) };
        assert_eq!(Kinds::default().expect(&both).source, ExpectationSource::Port);
        let mixed = Question { ports: vec![22..=22, 443..=443], ..about(1) };
        assert_eq!(Kinds::default().expect(&mixed).source, ExpectationSource::Default);
    }

    #[test]
    fn flows_of_a_single_peer_hardly_change_predictions() {
        let mut kinds = Kinds::default();
        for peer in 0..12 {
            kinds.note(kind(443), peer, flow(300, 40_000, 0));
        }
        for _ in 0..10_000 {
            kinds.note(kind(443), 99, flow(300, 5 << 20, 0));
        }
        let expected = kinds.expect(&about(443));
        assert_eq!((expected.profile, expected.sure), (TrafficProfile::TimeAndLoss, 0.75));
        assert_eq!(expected.size_kib, Some(40));
    }

    proptest! {
        #[test]
        fn memory_and_confidence_of_traffic_predictions_are_bounded(
            notes in prop::collection::vec((0_u16..40, 0_u64..6, any::<u64>(), any::<u64>(), any::<Option<u32>>()), 0..300),
        ) {
            let mut kinds = Kinds::new(8);
            for (port, peer, asked, answered, turns) in notes {
                kinds.note(kind(port), peer, flow(asked, answered, turns));
                prop_assert!(kinds.kinds.len() <= 8);
                prop_assert!(kinds.kinds.values().all(|known| known.seen.len() <= LATEST));
                let question = Question { is_client: true, ports: vec![0..=u16::MAX], ..Question::default() };
                let flows = Kinds::latest(&kinds.known_classes(&question));
                let expected = kinds.expect(&question);
                prop_assert!((0.0..=1.0).contains(&expected.sure));
                let learned = expected.source == ExpectationSource::Learned;
                prop_assert_eq!(learned, flows.len() >= ENOUGH);
                prop_assert_eq!(learned, expected.size_kib.is_some());
                if learned {
                    // The most frequent of the three traffic patterns always has at least a third of the flows.
                    prop_assert!(expected.sure >= 1.0 / 3.0 - 1e-9);
                    let sizes = flows.iter().map(|flow| u32::try_from(flow.bytes().div_ceil(1024)).unwrap_or(u32::MAX));
                    prop_assert!(sizes.into_iter().any(|size| Some(size) == expected.size_kib));
                }
                for peer in 0..6 {
                    for known in kinds.kinds.values() {
                        prop_assert!(known.seen.iter().filter(|seen| seen.peer == peer).count() <= OF_ONE_PEER);
                    }
                }
            }
        }

        #[test]
        fn predictor_restored_from_stored_flows_is_equal(
            notes in prop::collection::vec((0_u16..12, 0_u64..6, any::<u32>(), any::<Option<u32>>()), 0..100),
        ) {
            let mut kinds = Kinds::new(8);
            for (port, peer, answered, turns) in notes {
                kinds.note(kind(port), peer, flow(1, answered.into(), turns));
            }
            let mut other = Kinds::new(8);
            kinds.lessons().into_iter().for_each(|lesson| other.teach(lesson));
            prop_assert_eq!(other.lessons(), kinds.lessons());
            prop_assert_eq!(other.iter().collect::<Vec<_>>(), kinds.iter().collect::<Vec<_>>());
            for ports in (0..12).map(|port| port..=port).chain([0..=u16::MAX]) {
                let question = Question { is_client: true, ports: vec![ports], ..Question::default() };
                prop_assert_eq!(other.expect(&question), kinds.expect(&question));
            }
        }

        #[test]
        fn majority_of_peers_determines_the_traffic_class(most in 9_usize..=16) {
            let mut kinds = Kinds::default();
            for at in 0..16_u64 {
                let is_bulk = at < most as u64;
                kinds.note(kind(1), at, if is_bulk { flow(1, 2 << 20, 0) } else { flow(10, 10, 9) });
            }
            let expected = kinds.expect(&about(1));
            prop_assert_eq!(expected.profile, TrafficProfile::Loss);
            prop_assert_eq!(expected.sure, most as f64 / 16.0);
        }
    }
}
