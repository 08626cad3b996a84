//! What connections are for, and how large they are, by what became of earlier ones of the same kind.
//!
//! A kind is a port, with the side and the command that connects, whoever the peer is. What is known is counted, not guessed: each of the latest
//! flows is of one of three shapes, the most frequent one is what is expected, and the answer says how many were.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::profile::Profile;

/// Kinds that are known at once; the one that was used longest ago goes.
pub const KINDS_MAX: usize = 1024;
/// Flows of a kind that are remembered.
pub const LATEST: usize = 16;
/// Of these, of one peer: no more, so that one stranger alone does not say what a port is for.
pub const OF_ONE_PEER: usize = 4;
/// Fewer say nothing.
pub const ENOUGH: usize = 4;

/// Bytes of one exchange of an interactive flow, at most.
const SMALL: u64 = 2 << 10;
/// Exchanges of an interactive flow, at least.
const MANY: u32 = 4;
/// Bytes of a bulk flow, at least.
const LARGE: u64 = 1 << 20;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kind {
    /// This host connects.
    pub is_client: bool,
    /// The server's.
    pub port: u16,
    /// That connects; empty: not known, as of a server's clients.
    pub command: String,
    /// That the rule names by which it is known, by id; 0: none.
    pub cgroup: u64,
}

/// That stands for a peer: one number for all addresses of a host's network in IPv6.
pub fn number_of(peer: IpAddr) -> u64 {
    match peer.to_canonical() {
        IpAddr::V4(v4) => u64::from(v4.to_bits()),
        IpAddr::V6(v6) => (v6.to_bits() >> 64) as u64,
    }
}

/// What went through a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Flow {
    /// Bytes of the client.
    pub asked: u64,
    /// Of the server.
    pub answered: u64,
    /// How often the client has spoken again after it had heard something; `None`: nobody has looked.
    pub turns: Option<u32>,
}

/// What a flow looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Shape {
    /// Many small exchanges: each is waited for.
    Interactive,
    /// Questions, and answers to them.
    Requests,
    /// A lot, in one direction, in one go.
    Bulk,
}

impl Shape {
    pub fn name(self) -> &'static str {
        match self {
            Self::Interactive => "small exchanges",
            Self::Requests => "requests",
            Self::Bulk => "bulk",
        }
    }
}

impl Flow {
    /// In the direction that has more.
    pub fn bytes(&self) -> u64 {
        self.asked.max(self.answered)
    }

    /// `None`: nothing went through it.
    pub fn shape(&self) -> Option<Shape> {
        let all = self.asked.saturating_add(self.answered);
        if all == 0 {
            return None;
        }
        let exchanges = self.turns.map_or(1, |turns| u64::from(turns) + 1);
        Some(match self.turns {
            Some(turns) if turns >= MANY && all / exchanges <= SMALL => Shape::Interactive,
            _ if self.bytes() / exchanges >= LARGE && self.bytes() / 9 >= self.asked.min(self.answered) => {
                Shape::Bulk
            }
            _ => Shape::Requests,
        })
    }
}

/// Where an expectation is from. Names are those of `graft why` and of the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// The operator's.
    Configured,
    /// Of earlier flows.
    Learned,
    /// What the port is usually for.
    Port,
    /// Nothing is known.
    Default,
}

impl Source {
    pub const ALL: [Self; 4] = [Self::Configured, Self::Learned, Self::Port, Self::Default];

    pub fn name(self) -> &'static str {
        match self {
            Self::Configured => "configured",
            Self::Learned => "learned",
            Self::Port => "port",
            Self::Default => "default",
        }
    }
}

/// What a connection is taken to be before it begins.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    pub profile: Profile,
    /// In the direction that has more; `None`: not known.
    pub size_kib: Option<u32>,
    pub source: Source,
    /// Share of the flows that were like that; 1 where nobody has counted.
    pub sure: f64,
    /// Why, in words.
    pub words: String,
}

/// Connections that are asked about: each `None`, whichever.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Question {
    pub is_client: bool,
    pub ports: Vec<RangeInclusive<u16>>,
    pub command: Option<String>,
    pub cgroup: Option<u64>,
}

impl Question {
    /// If it can only be about one.
    fn kind(&self) -> Option<Kind> {
        let [ports] = &self.ports[..] else { return None };
        (ports.start() == ports.end()).then_some(())?;
        let (command, cgroup) = (self.command.clone()?, self.cgroup?);
        Some(Kind { is_client: self.is_client, port: *ports.start(), command, cgroup })
    }

    fn is_about(&self, kind: &Kind) -> bool {
        self.is_client == kind.is_client
            && self.ports.iter().any(|ports| ports.contains(&kind.port))
            && self.command.as_ref().is_none_or(|command| *command == kind.command)
            && self.cgroup.is_none_or(|cgroup| cgroup == kind.cgroup)
    }
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    at: u64,
    peer: u64,
    flow: Flow,
}

#[derive(Debug, Default)]
struct Known {
    used: u64,
    seen: VecDeque<Seen>,
}

/// One thing that was seen of a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lesson {
    pub kind: Kind,
    pub seen: Saw,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Saw {
    /// One that is over, with the number that stands for its peer.
    Flow(u64, Flow),
}

/// All that is known. It has no clock: what came later counts as newer.
#[derive(Debug)]
pub struct Kinds {
    kinds: BTreeMap<Kind, Known>,
    most: usize,
    now: u64,
}

impl Default for Kinds {
    fn default() -> Self {
        Self::new(KINDS_MAX)
    }
}

impl Kinds {
    /// `most`: kinds, of which there is at least one.
    pub fn new(most: usize) -> Self {
        Self { kinds: BTreeMap::new(), most: most.max(1), now: 0 }
    }

    /// The latest first.
    pub fn iter(&self) -> impl Iterator<Item = &Kind> {
        let mut all: Vec<_> = self.kinds.iter().collect();
        all.sort_by_key(|(_, known)| std::cmp::Reverse(known.used));
        all.into_iter().map(|(kind, _)| kind)
    }

    /// A flow is over. `peer`: any number that stands for it. One with nothing in it says nothing.
    pub fn note(&mut self, kind: Kind, peer: u64, flow: Flow) {
        if flow.shape().is_none() {
            return;
        }
        let (at, known) = self.enter(kind);
        let of_peer = known.seen.iter().filter(|seen| seen.peer == peer).count();
        if of_peer >= OF_ONE_PEER {
            let oldest = known.seen.iter().position(|seen| seen.peer == peer);
            oldest.and_then(|oldest| known.seen.remove(oldest));
        } else if known.seen.len() >= LATEST {
            known.seen.pop_front();
        }
        known.seen.push_back(Seen { at, peer, flow });
    }

    /// Of what it knows, in the order in which it was seen: whoever is taught all of it knows the same.
    pub fn lessons(&self) -> Vec<Lesson> {
        let mut lessons: Vec<(u64, Lesson)> = Vec::new();
        for (kind, known) in &self.kinds {
            let flows = known.seen.iter().map(|seen| (seen.at, Saw::Flow(seen.peer, seen.flow)));
            lessons.extend(flows.map(|(at, seen)| (at, Lesson { kind: kind.clone(), seen })));
        }
        lessons.sort_by_key(|(at, _)| *at);
        lessons.into_iter().map(|(_, lesson)| lesson).collect()
    }

    pub fn teach(&mut self, Lesson { kind, seen }: Lesson) {
        let Saw::Flow(peer, flow) = seen;
        self.note(kind, peer, flow);
    }

    fn enter(&mut self, kind: Kind) -> (u64, &mut Known) {
        self.now += 1;
        if !self.kinds.contains_key(&kind) && self.kinds.len() >= self.most {
            let oldest = self.kinds.iter().min_by_key(|(_, known)| known.used).map(|(kind, _)| kind.clone());
            oldest.map(|oldest| self.kinds.remove(&oldest));
        }
        let known = self.kinds.entry(kind).or_default();
        known.used = self.now;
        (self.now, known)
    }

    fn about(&self, question: &Question) -> Vec<&Known> {
        match question.kind() {
            Some(kind) => self.kinds.get(&kind).into_iter().collect(),
            None => {
                let about = self.kinds.iter().filter(|(kind, _)| question.is_about(kind));
                about.map(|(_, known)| known).collect()
            }
        }
    }

    /// Of what is asked about, the latest flows, of each peer so many as of one kind.
    fn latest(about: &[&Known]) -> Vec<Flow> {
        let mut seen: Vec<Seen> = about.iter().flat_map(|known| known.seen.iter().copied()).collect();
        seen.sort_by_key(|seen| std::cmp::Reverse(seen.at));
        let mut of_peers = BTreeMap::<u64, usize>::new();
        seen.retain(|seen| {
            let count = of_peers.entry(seen.peer).or_default();
            *count += 1;
            *count <= OF_ONE_PEER
        });
        seen.into_iter().take(LATEST).map(|seen| seen.flow).collect()
    }

    /// What the next connection of these is taken to be.
    pub fn expect(&self, question: &Question) -> Expected {
        let about = self.about(question);
        let usual = usual(question);
        let flows = Self::latest(&about);
        if flows.len() < ENOUGH {
            return usual;
        }
        let Some((shape, count)) = most_frequent(&flows) else { return usual };
        let is_left = match shape {
            Shape::Interactive => false,
            // Whether there were many questions cannot be said where nobody has counted.
            Shape::Requests => flows.iter().all(|flow| flow.turns.is_none()),
            // Whether somebody waits for it cannot be seen in bytes.
            Shape::Bulk => usual.profile == Profile::Insensitive,
        };
        let is_usual = is_left && usual.source != Source::Default;
        let profile = match shape {
            _ if is_usual => usual.profile,
            Shape::Interactive => Profile::Time,
            Shape::Requests => Profile::TimeAndLoss,
            Shape::Bulk => Profile::Loss,
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
            source: Source::Learned,
            sure: count as f64 / of as f64,
            words,
        }
    }
}

/// Without what flows have shown.
fn usual(question: &Question) -> Expected {
    // Of a range that has both, nothing is said.
    let mut usual =
        question.ports.iter().map(|ports| usual_of(*ports.start()).filter(|_| ports.start() == ports.end()));
    let first = usual.next().flatten();
    match first.filter(|first| usual.all(|other| other == Some(*first))) {
        Some(profile) => Expected {
            profile,
            size_kib: None,
            source: Source::Port,
            sure: 1.0,
            words: "what the port is usually for".to_owned(),
        },
        None => Expected {
            profile: Profile::TimeAndLoss,
            size_kib: None,
            source: Source::Default,
            sure: 0.0,
            words: "nothing is known of such connections yet".to_owned(),
        },
    }
}

/// With how many are of it; of two that are as frequent, the one that minds delays more.
fn most_frequent(flows: &[Flow]) -> Option<(Shape, usize)> {
    let mut counts = BTreeMap::<Shape, usize>::new();
    for shape in flows.iter().filter_map(Flow::shape) {
        *counts.entry(shape).or_default() += 1;
    }
    counts.into_iter().rev().max_by_key(|(_, count)| *count)
}

/// Rounded up. Of two in the middle, the larger.
fn median_kib(flows: &[Flow]) -> u32 {
    let mut sizes: Vec<u64> = flows.iter().map(Flow::bytes).collect();
    sizes.sort_unstable();
    let bytes = sizes.get(sizes.len() / 2).copied().unwrap_or_default();
    u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX)
}

/// What a port is usually for.
pub fn usual_of(port: u16) -> Option<Profile> {
    Some(match port {
        // Shells, screens, calls, databases, messages between machines.
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
        | 27017 => Profile::Time,
        // Pages and video.
        80 | 443 | 554 | 1935 | 8000 | 8008 | 8080 | 8443 => Profile::TimeAndLoss,
        // Files and mail that somebody waits for.
        110 | 143 | 389 | 445 | 465 | 587 | 636 | 993 | 995 | 2049 => Profile::Loss,
        // Mail between servers, copies, updates.
        20 | 21 | 25 | 119 | 873 | 3142 | 9418 => Profile::Insensitive,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kind(port: u16) -> Kind {
        Kind { is_client: true, port, command: "curl".to_owned(), cgroup: 0 }
    }

    fn about(port: u16) -> Question {
        Question { is_client: true, ports: vec![port..=port], ..Question::default() }
    }

    fn flow(asked: u64, answered: u64, turns: impl Into<Option<u32>>) -> Flow {
        Flow { asked, answered, turns: turns.into() }
    }

    #[test]
    fn shapes_by_hand() {
        let table = [
            (flow(0, 0, 0), None),
            (flow(500, 40_000, 0), Some(Shape::Requests)),
            (flow(3_000, 20_000, 50), Some(Shape::Interactive)),
            (flow(3_000, 20_000, 3), Some(Shape::Requests)),
            (flow(3_000, 2_000_000, 50), Some(Shape::Requests)),
            (flow(300, 5 << 20, 0), Some(Shape::Bulk)),
            (flow(300, 5 << 20, None), Some(Shape::Bulk)),
            (flow(500 << 20, 9_000, 2), Some(Shape::Bulk)),
            (flow(3 << 20, 3 << 20, 1), Some(Shape::Requests)),
            (flow(u64::MAX, u64::MAX, u32::MAX), Some(Shape::Requests)),
            (flow(0, u64::MAX, 0), Some(Shape::Bulk)),
        ];
        for (flow, wanted) in table {
            assert_eq!(flow.shape(), wanted, "{flow:?}");
        }
    }

    #[test]
    fn what_was_is_expected_again_and_says_why() {
        let mut kinds = Kinds::default();
        let port = kinds.expect(&about(443));
        assert_eq!((port.profile, port.source, port.size_kib), (Profile::TimeAndLoss, Source::Port, None));
        assert_eq!(kinds.expect(&about(7100)).source, Source::Default);
        for peer in 0..ENOUGH as u64 {
            assert_ne!(kinds.expect(&about(443)).source, Source::Learned, "{peer} say nothing");
            kinds.note(kind(443), peer, flow(300, (5 + peer) << 20, 0));
        }
        let learned = kinds.expect(&about(443));
        assert_eq!((learned.profile, learned.source), (Profile::Loss, Source::Learned));
        assert_eq!((learned.size_kib, learned.sure), (Some(7 << 10), 1.0));
        assert_eq!(learned.words, "4 of the latest 4 were bulk, their median is 7168 KiB");
        assert_eq!(kinds.expect(&about(80)).source, Source::Port, "others do not count");
        let other = Question { command: Some("wget".into()), ..about(443) };
        assert_eq!(kinds.expect(&other).source, Source::Port);
        let server = Question { is_client: false, ..about(443) };
        assert_eq!(kinds.expect(&server).source, Source::Port);
        let all = Question { ports: vec![1..=1000], ..about(1) };
        assert_eq!(kinds.expect(&all).profile, Profile::Loss, "a range has what is in it");
    }

    #[test]
    fn whether_somebody_waits_is_not_seen_in_bytes() {
        let mut kinds = Kinds::default();
        for peer in 0..9 {
            kinds.note(kind(873), peer, flow(900 << 20, 9_000, 3));
            kinds.note(kind(7100), peer, flow(900 << 20, 9_000, 3));
        }
        assert_eq!(kinds.expect(&about(873)).profile, Profile::Insensitive);
        assert_eq!(kinds.expect(&about(7100)).profile, Profile::Loss);
    }

    #[test]
    fn whether_there_were_many_questions_is_not_seen_where_nobody_counted() {
        let mut kinds = Kinds::default();
        for peer in 0..9 {
            kinds.note(kind(22), peer, flow(9_000, 40_000, None));
            kinds.note(kind(7100), peer, flow(9_000, 40_000, None));
        }
        let shell = kinds.expect(&about(22));
        assert_eq!((shell.profile, shell.size_kib), (Profile::Time, Some(40)));
        assert_eq!(
            shell.words,
            "9 of the latest 9 were requests, their median is 40 KiB; what the port is usually for"
        );
        assert_eq!(kinds.expect(&about(7100)).profile, Profile::TimeAndLoss);
        kinds.note(kind(22), 9, flow(9_000, 40_000, 2));
        assert_eq!(kinds.expect(&about(22)).profile, Profile::TimeAndLoss, "one was counted");
    }

    #[test]
    fn a_network_counts_as_one() {
        let number = |text: &str| number_of(text.parse().unwrap());
        assert_eq!(number("2001:db8::1"), number("2001:db8::ffff:1"));
        assert_ne!(number("2001:db8::1"), number("2001:db8:0:1::1"));
        assert_eq!(number("10.0.0.1"), number("::ffff:10.0.0.1"));
        assert_ne!(number("10.0.0.1"), number("10.0.0.2"));
    }

    #[test]
    fn ports_have_what_they_are_for() {
        for (port, wanted) in [
            (22, Profile::Time),
            (443, Profile::TimeAndLoss),
            (993, Profile::Loss),
            (873, Profile::Insensitive),
        ] {
            assert_eq!(usual_of(port), Some(wanted), "{port}");
        }
        assert_eq!(usual_of(7100), None);
        let both = Question { ports: vec![80..=80, 443..=443], ..about(1) };
        assert_eq!(Kinds::default().expect(&both).source, Source::Port);
        let mixed = Question { ports: vec![22..=22, 443..=443], ..about(1) };
        assert_eq!(Kinds::default().expect(&mixed).source, Source::Default);
    }

    #[test]
    fn one_peer_says_little() {
        let mut kinds = Kinds::default();
        for peer in 0..12 {
            kinds.note(kind(443), peer, flow(300, 40_000, 0));
        }
        for _ in 0..10_000 {
            kinds.note(kind(443), 99, flow(300, 5 << 20, 0));
        }
        let expected = kinds.expect(&about(443));
        assert_eq!((expected.profile, expected.sure), (Profile::TimeAndLoss, 0.75));
        assert_eq!(expected.size_kib, Some(40));
    }

    proptest! {
        #[test]
        fn it_is_bounded_and_within_what_was(
            notes in prop::collection::vec((0_u16..40, 0_u64..6, any::<u64>(), any::<u64>(), any::<Option<u32>>()), 0..300),
        ) {
            let mut kinds = Kinds::new(8);
            for (port, peer, asked, answered, turns) in notes {
                kinds.note(kind(port), peer, flow(asked, answered, turns));
                prop_assert!(kinds.kinds.len() <= 8);
                prop_assert!(kinds.kinds.values().all(|known| known.seen.len() <= LATEST));
                let question = Question { is_client: true, ports: vec![0..=u16::MAX], ..Question::default() };
                let flows = Kinds::latest(&kinds.about(&question));
                let expected = kinds.expect(&question);
                prop_assert!((0.0..=1.0).contains(&expected.sure));
                let learned = expected.source == Source::Learned;
                prop_assert_eq!(learned, flows.len() >= ENOUGH);
                prop_assert_eq!(learned, expected.size_kib.is_some());
                if learned {
                    // Of three shapes, the most frequent one has a third.
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
        fn whoever_is_taught_all_of_it_knows_the_same(
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
        fn a_majority_of_many_peers_is_followed(most in 9_usize..=16) {
            let mut kinds = Kinds::default();
            for at in 0..16_u64 {
                let is_bulk = at < most as u64;
                kinds.note(kind(1), at, if is_bulk { flow(1, 2 << 20, 0) } else { flow(10, 10, 9) });
            }
            let expected = kinds.expect(&about(1));
            prop_assert_eq!(expected.profile, Profile::Loss);
            prop_assert_eq!(expected.sure, most as f64 / 16.0);
        }
    }
}
