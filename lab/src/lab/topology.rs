//! Nodes and links of a lab, read from a TOML file or created for given numbers of relays and subscribers.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::time::Duration;

use millrace_daemon::duration;
use serde::{Deserialize, Serialize};

use super::impair::{self, Impairment, Settings};
use super::netem;

/// Longest name of a node. Interfaces are named `to-PEER`, with at most 15 characters (IFNAMSIZ - 1).
const MAX_NODE_NAME: usize = 12;
/// Largest number of links: each has a /24 in `10.77.0.0/16`.
const MAX_LINKS: usize = 256;
const DEFAULT_MTU: u32 = 1500;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {path}: {source}")]
    Read { path: String, source: std::io::Error },
    #[error("{0}")]
    Syntax(#[from] toml::de::Error),
    #[error("link `{link}`: {source}")]
    Setting { link: String, source: impair::Error },
    #[error("there is no link `{name}`; there are: {}", known.join(", "))]
    NoLink { name: String, known: Vec<String> },
    #[error("{0}")]
    Invalid(String),
}

/// Direction of a link: from its first node to its second node (`Forward`), or the opposite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkDirection {
    Forward,
    Backward,
}

/// Directions that a setting applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Directions {
    #[default]
    Both,
    Forward,
    Backward,
}

impl Directions {
    pub fn each(self) -> &'static [LinkDirection] {
        match self {
            Directions::Both => &[LinkDirection::Forward, LinkDirection::Backward],
            Directions::Forward => &[LinkDirection::Forward],
            Directions::Backward => &[LinkDirection::Backward],
        }
    }
}

/// A change of a link at a given time after the lab came up.
#[derive(Debug, Clone, Deserialize)]
pub struct LinkEvent {
    #[serde(deserialize_with = "time")]
    pub at: Duration,
    pub link: String,
    #[serde(default)]
    pub direction: Directions,
    #[serde(flatten)]
    pub settings: Settings,
}

#[derive(Debug, Clone)]
pub struct LinkSpec {
    pub name: String,
    pub ends: [String; 2],
    /// Whether the link uses the emulator although it is perfect, so that it can be changed later. A link with an
    /// impairment or an event is always emulated.
    pub emulate: bool,
    pub forward: Impairment,
    pub backward: Impairment,
}

#[derive(Debug, Clone)]
pub struct Topology {
    /// Seed of all random decisions of the emulator.
    pub seed: u64,
    /// MTU of every link: largest IP packet, bytes.
    pub mtu: u32,
    /// Whether the kernel's netem impairs links if it can, except links with `emulate`. netem has no seed, so it is not
    /// used if the file has a seed.
    pub netem: bool,
    /// Whether GSO, GRO and checksum offload stay on, so that super-packets without checksums cross plain links.
    pub offloads: bool,
    pub links: Vec<LinkSpec>,
    pub events: Vec<LinkEvent>,
}

impl Default for Topology {
    fn default() -> Self {
        Self {
            seed: 1,
            mtu: DEFAULT_MTU,
            netem: true,
            offloads: false,
            links: Vec::new(),
            events: Vec::new(),
        }
    }
}

impl Topology {
    /// Creates `pub - relay [- relay2 ...] - sub1, sub2, ...`: perfect links, with the subscribers on the last relay.
    /// Links are named by their ends, such as `pub-relay` and `relay-sub1`.
    pub fn standard(relays: usize, subscribers: usize) -> Self {
        let mut topology = Self::default();
        let mut last = "pub".to_owned();
        for n in 1..=relays {
            let relay = if n == 1 { "relay".to_owned() } else { format!("relay{n}") };
            topology.connect(&last, &relay);
            last = relay;
        }
        for n in 1..=subscribers {
            topology.connect(&last, &format!("sub{n}"));
        }
        topology
    }

    pub fn load(path: &Path) -> Result<Self, Error> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| Error::Read { path: path.display().to_string(), source })?;
        Self::parse(&text)
    }

    pub fn parse(text: &str) -> Result<Self, Error> {
        let file: TopologyFile = toml::from_str(text)?;
        let mut topology = match (file.relays, file.subscribers) {
            (None, None) => Self::default(),
            (relays, subscribers) => Self::standard(relays.unwrap_or(1), subscribers.unwrap_or(1)),
        };
        topology.seed = file.seed.unwrap_or(topology.seed);
        topology.mtu = file.mtu.unwrap_or(topology.mtu);
        topology.netem = file.netem.unwrap_or(file.seed.is_none());
        topology.offloads = file.offloads;
        for link in file.links {
            topology.merge(link)?;
        }
        topology.events = file.events;
        topology.validate()?;
        Ok(topology)
    }

    /// Adds a perfect link named `a-b`.
    pub fn connect(&mut self, a: &str, b: &str) -> &mut LinkSpec {
        self.links.push(LinkSpec {
            name: format!("{a}-{b}"),
            ends: [a.to_owned(), b.to_owned()],
            emulate: false,
            forward: Impairment::default(),
            backward: Impairment::default(),
        });
        let last = self.links.len() - 1;
        &mut self.links[last]
    }

    /// Applies settings such as `delay=10ms loss=1%` to one link, or to all links if the name is `all`.
    pub fn impair(&mut self, link: &str, directions: Directions, settings: &str) -> Result<(), Error> {
        let bad = |source| Error::Setting { link: link.into(), source };
        let settings = Settings::parse(settings).map_err(bad)?;
        if link != "all" {
            return self.link_mut(link)?.impair(directions, &settings);
        }
        self.links.iter_mut().try_for_each(|link| link.impair(directions, &settings))
    }

    pub fn link_mut(&mut self, name: &str) -> Result<&mut LinkSpec, Error> {
        let known = self.links.iter().map(|link| link.name.clone()).collect();
        let found = self.links.iter_mut().find(|link| link.name == name);
        found.ok_or_else(|| Error::NoLink { name: name.into(), known })
    }

    /// Returns the names of the nodes in order of first appearance.
    pub fn nodes(&self) -> Vec<&str> {
        let mut seen = BTreeSet::new();
        self.links
            .iter()
            .flat_map(|link| &link.ends)
            .map(String::as_str)
            .filter(|n| seen.insert(*n))
            .collect()
    }

    pub(super) fn is_emulated(&self, link: &LinkSpec) -> bool {
        link.emulate
            || !link.forward.is_perfect()
            || !link.backward.is_perfect()
            || self.events.iter().any(|event| event.link == link.name)
    }

    /// Reports whether netem could impair the link as the topology needs it, now and after each event of the timeline.
    pub(super) fn is_for_netem(&self, link: &LinkSpec) -> bool {
        let start =
            [LinkDirection::Forward, LinkDirection::Backward].iter().all(|d| netem::can(link.impairment(*d)));
        let events = self.events.iter().filter(|event| event.link == link.name);
        let changes = |settings: &Settings| Impairment::try_from(settings.clone());
        let later =
            events.map(|event| changes(&event.settings)).all(|change| change.is_ok_and(|c| netem::can(&c)));
        self.netem && !link.emulate && start && later
    }

    fn merge(&mut self, link: FileLink) -> Result<(), Error> {
        let name = match (&link.name, &link.ends) {
            (Some(name), _) => name.clone(),
            (None, Some([a, b])) => format!("{a}-{b}"),
            (None, None) => return Err(Error::Invalid("a [[link]] wants `name` or `ends`".into())),
        };
        if let Some([a, b]) = &link.ends {
            self.connect(a, b).name.clone_from(&name);
        }
        let spec = self.link_mut(&name)?;
        spec.emulate = link.emulate;
        spec.impair(Directions::Both, &link.both)?;
        spec.impair(Directions::Forward, &link.forward)?;
        spec.impair(Directions::Backward, &link.backward)
    }

    pub(super) fn validate(&self) -> Result<(), Error> {
        let invalid = |text: String| Err(Error::Invalid(text));
        if self.links.is_empty() || self.links.len() > MAX_LINKS {
            return invalid(format!("a lab has 1 to {MAX_LINKS} links, not {}", self.links.len()));
        }
        if !(1280..=65_000).contains(&self.mtu) {
            return invalid(format!("mtu = {}: IPv6 wants at least 1280 and IPv4 at most 65000", self.mtu));
        }
        for node in self.nodes() {
            if !is_name(node) || node.len() > MAX_NODE_NAME {
                return invalid(format!("node `{node}`: wants 1 to {MAX_NODE_NAME} of a-z, 0-9 and -"));
            }
        }
        let mut names = BTreeSet::new();
        let mut pairs = BTreeSet::new();
        for LinkSpec { name, ends: [a, b], .. } in &self.links {
            if !is_name(name) || name == "all" || !names.insert(name) {
                return invalid(format!(
                    "link `{name}`: must have a unique name of a-z, 0-9 and -, other than `all`"
                ));
            }
            if a == b || !pairs.insert((a.min(b), a.max(b))) {
                return invalid(format!("link `{name}`: must join two nodes that have no other link"));
            }
        }
        self.events.iter().try_for_each(|event| {
            let check = |link: &mut LinkSpec| link.impair(event.direction, &event.settings);
            self.clone().link_mut(&event.link).and_then(check)
        })
    }
}

impl LinkSpec {
    pub(super) fn impairment(&self, direction: LinkDirection) -> &Impairment {
        match direction {
            LinkDirection::Forward => &self.forward,
            LinkDirection::Backward => &self.backward,
        }
    }

    fn impair(&mut self, directions: Directions, settings: &Settings) -> Result<(), Error> {
        for direction in directions.each() {
            let target = match direction {
                LinkDirection::Forward => &mut self.forward,
                LinkDirection::Backward => &mut self.backward,
            };
            target.apply(settings).map_err(|source| Error::Setting { link: self.name.clone(), source })?;
        }
        Ok(())
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TopologyFile {
    seed: Option<u64>,
    mtu: Option<u32>,
    netem: Option<bool>,
    #[serde(default)]
    offloads: bool,
    relays: Option<usize>,
    subscribers: Option<usize>,
    #[serde(default, rename = "link")]
    links: Vec<FileLink>,
    #[serde(default, rename = "event")]
    events: Vec<LinkEvent>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileLink {
    name: Option<String>,
    ends: Option<[String; 2]>,
    #[serde(default)]
    emulate: bool,
    #[serde(default)]
    both: Settings,
    #[serde(default)]
    forward: Settings,
    #[serde(default)]
    backward: Settings,
}

fn time<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    duration::parse(&text).map_err(serde::de::Error::custom)
}

fn is_name(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !name.is_empty() && !name.starts_with('-') && name.chars().all(allowed)
}

/// A node's end of a link, with its addresses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInterface {
    pub link: String,
    pub device: String,
    pub mac: String,
    /// IPv4 address, in a /24.
    pub v4: Ipv4Addr,
    /// IPv6 address, in a /64.
    pub v6: Ipv6Addr,
}

/// Interfaces and routes of a node.
#[derive(Debug, Clone)]
pub(super) struct NodePlan {
    pub name: String,
    pub interfaces: Vec<NodeInterface>,
    /// The opposite ends of the interfaces, in the same order.
    pub peers: Vec<NodeInterface>,
    pub routes: Vec<NodeRoute>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NodeRoute {
    pub v4: (Ipv4Addr, u8),
    pub v6: (Ipv6Addr, u8),
    pub via_v4: Ipv4Addr,
    pub via_v6: Ipv6Addr,
}

/// Returns the addresses and the shortest-path routes of every node.
pub(super) fn plan(topology: &Topology) -> Vec<NodePlan> {
    let nodes = topology.nodes();
    let mut plans: BTreeMap<&str, NodePlan> = BTreeMap::new();
    for (index, link) in topology.links.iter().enumerate() {
        let [a, b] = &link.ends;
        let [near, far] = [interface(link, index, 0, b), interface(link, index, 1, a)];
        for (node, own, peer) in [(a, &near, &far), (b, &far, &near)] {
            let plan = plans.entry(node).or_insert_with(|| NodePlan {
                name: node.clone(),
                interfaces: Vec::new(),
                peers: Vec::new(),
                routes: Vec::new(),
            });
            plan.interfaces.push(own.clone());
            plan.peers.push(peer.clone());
        }
    }
    for plan in plans.values_mut() {
        plan.routes = routes(topology, &plan.name, &plan.interfaces, &plan.peers);
    }
    nodes.iter().filter_map(|node| plans.remove(node)).collect()
}

fn interface(link: &LinkSpec, index: usize, end: u8, peer: &str) -> NodeInterface {
    NodeInterface {
        link: link.name.clone(),
        device: format!("to-{peer}"),
        mac: format!("02:6d:72:00:{index:02x}:{:02x}", end + 1),
        v4: Ipv4Addr::from(subnet_v4(index) + u32::from(end) + 1),
        v6: Ipv6Addr::from(subnet_v6(index) + u128::from(end) + 1),
    }
}

fn subnet_v4(index: usize) -> u32 {
    u32::from(Ipv4Addr::new(10, 77, 0, 0)) + ((index as u32) << 8)
}

fn subnet_v6(index: usize) -> u128 {
    u128::from(Ipv6Addr::new(0xfd00, 0x6d72, 0, 0, 0, 0, 0, 0)) + ((index as u128) << 64)
}

/// Returns routes from `node` to all subnets that it is not on. A node with a single link gets a default route.
fn routes(topology: &Topology, node: &str, own: &[NodeInterface], peers: &[NodeInterface]) -> Vec<NodeRoute> {
    let via = |first: usize, v4, v6| NodeRoute { v4, v6, via_v4: peers[first].v4, via_v6: peers[first].v6 };
    if own.len() == 1 {
        return vec![via(0, (Ipv4Addr::UNSPECIFIED, 0), (Ipv6Addr::UNSPECIFIED, 0))];
    }
    // This is a breadth-first search over the links. `first[node]` is the interface that starts a shortest path to that
    // node.
    let mut first: BTreeMap<&str, usize> = BTreeMap::new();
    let mut queue = VecDeque::from([node]);
    let mut routes = Vec::new();
    let mut reached = BTreeSet::new();
    while let Some(at) = queue.pop_front() {
        for (index, link) in topology.links.iter().enumerate() {
            let Some(end) = link.ends.iter().position(|end| end == at) else { continue };
            let far = link.ends[1 - end].as_str();
            let hop = match first.get(at) {
                Some(hop) => *hop,
                None => own.iter().position(|interface| interface.link == link.name).unwrap_or_default(),
            };
            if reached.insert(index) && at != node {
                let v4 = (Ipv4Addr::from(subnet_v4(index)), 24);
                routes.push(via(hop, v4, (Ipv6Addr::from(subnet_v6(index)), 64)));
            }
            if far != node && !first.contains_key(far) {
                first.insert(far, hop);
                queue.push_back(far);
            }
        }
    }
    routes
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
        seed = 7
        relays = 2
        subscribers = 2

        [[link]]
        name = "pub-relay"
        both = { delay = "10ms" }
        backward = { loss = "1%" }

        [[link]]
        ends = ["relay2", "tap"]
        emulate = true

        [[event]]
        at = "2.5s"
        link = "relay2-sub1"
        direction = "forward"
        rate = "5mbit"
    "#;

    #[test]
    fn topology_file_is_parsed() {
        let topology = Topology::parse(FILE).unwrap();
        assert_eq!(topology.nodes(), ["pub", "relay", "relay2", "sub1", "sub2", "tap"]);
        let emulated: Vec<&str> = topology
            .links
            .iter()
            .filter(|link| topology.is_emulated(link))
            .map(|link| link.name.as_str())
            .collect();
        assert_eq!(emulated, ["pub-relay", "relay2-sub1", "relay2-tap"]);
        assert_eq!(topology.links[0].forward, Impairment::parse("delay=10ms").unwrap());
        assert_eq!(topology.links[0].backward, Impairment::parse("delay=10ms loss=1%").unwrap());
        assert_eq!(topology.events[0].at, Duration::from_millis(2500));
        assert_eq!(topology.events[0].direction, Directions::Forward);
    }

    #[test]
    fn impossible_topologies_are_refused() {
        for (text, want) in [
            ("", "1 to 256 links"),
            ("nodes = 3", "unknown field `nodes`"),
            ("relays = 1\nmtu = 500", "mtu = 500"),
            ("[[link]]\nemulate = true", "`name` or `ends`"),
            ("[[link]]\nends = ['a', 'a']", "two nodes"),
            ("[[link]]\nends = ['a', 'b']\n[[link]]\nname = 'x'\nends = ['b', 'a']", "no other link"),
            ("[[link]]\nends = ['a', 'a-name-too-long']", "1 to 12"),
            ("[[link]]\nends = ['a', '../b']", "a-z"),
            (
                "subscribers = 1\n[[link]]\nname = 'pub-sub1'",
                "there is no link `pub-sub1`; there are: pub-relay",
            ),
            ("[[link]]\nends = ['a', 'b']\nforward = { delay = 5 }", "`delay = 5` is wrong: wants a time"),
            ("[[link]]\nends = ['a', 'b']\n[[event]]\nat = '1s'\nlink = 'a-c'", "no link `a-c`"),
            (
                "[[link]]\nends = ['a', 'b']\n[[event]]\nat = '1s'\nlink = 'a-b'\nlos = 1",
                "unknown setting `los`",
            ),
            ("[[link]]\nends = ['a', 'b']\n[[event]]\nat = 'soon'\nlink = 'a-b'", "not a time"),
        ] {
            let error = Topology::parse(text).unwrap_err().to_string();
            assert!(error.contains(want), "{text}: {error}");
        }
    }

    #[test]
    fn topology_gets_addresses_and_routes() {
        let plans = plan(&Topology::standard(2, 2));
        let node = |name: &str| plans.iter().find(|plan| plan.name == name).unwrap();
        let relay = node("relay");
        assert_eq!(relay.interfaces[0].device, "to-pub");
        assert_eq!(relay.interfaces[0].v4, Ipv4Addr::new(10, 77, 0, 2));
        assert_eq!(relay.interfaces[1].v4, Ipv4Addr::new(10, 77, 1, 1));
        assert_eq!(relay.interfaces[1].v6, "fd00:6d72:0:1::1".parse::<Ipv6Addr>().unwrap());
        assert_eq!(relay.peers[1].v4, Ipv4Addr::new(10, 77, 1, 2));

        let via: Vec<_> = relay.routes.iter().map(|route| (route.v4.0.octets()[2], route.via_v4)).collect();
        let relay2 = Ipv4Addr::new(10, 77, 1, 2);
        assert_eq!(via, [(2, relay2), (3, relay2)]);
        let sub1 = node("sub1");
        assert_eq!(sub1.routes.len(), 1);
        assert_eq!(sub1.routes[0].v4, (Ipv4Addr::UNSPECIFIED, 0));
        assert_eq!(sub1.routes[0].via_v4, Ipv4Addr::new(10, 77, 2, 1));
    }

    #[test]
    fn impairment_applies_to_one_link_or_all() {
        let mut topology = Topology::standard(1, 2);
        topology.impair("all", Directions::Both, "delay=5ms").unwrap();
        topology.impair("relay-sub2", Directions::Backward, "delay=7ms").unwrap();
        let delays: Vec<_> = topology
            .links
            .iter()
            .map(|link| (link.forward.delay.as_millis(), link.backward.delay.as_millis()))
            .collect();
        assert_eq!(delays, [(5, 5), (5, 5), (5, 7)]);
    }
}
