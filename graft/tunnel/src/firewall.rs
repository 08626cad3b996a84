//! The nftables rules of this host's firewall, and which of them examine more than the first packets of connections.
//! Such rules would not see tunnelled packets, so connections under them stay plain TCP.

use std::{
    fs, io,
    ops::RangeInclusive,
    time::{Duration, Instant},
};

use millrace_kernel::netfilter::{self, Chain, NetfilterRule, RuleProperty};
use tracing::warn;

/// Lowest local port that Linux chooses for a client by default (`ip_local_port_range`). A firewall rule on this port
/// or a higher one may be meant for the ports of clients.
const CHOSEN: u16 = 32_768;
const TCP: u8 = 6;

/// Address families of netfilter: NFPROTO_* in linux/netfilter.h.
const INET: u8 = 1;
const IPV4: u8 = 2;
const NETDEV: u8 = 5;
const IPV6: u8 = 10;
/// Hooks of netfilter: NF_INET_* in linux/netfilter.h.
const FORWARD: u32 = 2;
const OUTPUT: u32 = 3;
const POSTROUTING: u32 = 4;
/// NF_NETDEV_EGRESS. The tunnel broker's test packets do not reach this hook, so it is unknown whether rules there
/// accept a connection.
const EGRESS: u32 = 1;

/// Files that list the tables of legacy iptables, whose rules nftables does not show.
const LEGACY: [&str; 2] = ["/proc/thread-self/net/ip_tables_names", "/proc/thread-self/net/ip6_tables_names"];

/// Interval of checks for tables of legacy iptables. After a change of the nftables rules, they are also read again at
/// this interval for the time `UNSETTLED`.
const LOOK: Duration = Duration::from_secs(1);

/// Time from the moment at which the kernel counts a change of the nftables rules until the change is certainly in
/// force, even on a busy machine.
const UNSETTLED: Duration = Duration::from_secs(10);

/// The end of a TCP connection at which this host is: client or server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionEnd {
    Client,
    Server,
}

/// A firewall rule that forces connections to be plain TCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle {
    /// Position of the rule in the ruleset, and the property of packets that it examines.
    pub what: String,
    /// Server ports whose connections the rule forces to be plain TCP.
    pub ports: RangeInclusive<u16>,
}

/// The nftables rules of this host, as they were read last.
#[derive(Default)]
pub struct FirewallRules {
    /// Generation of the rules that were read last. `None` if they were not read yet, or the kernel has no nftables.
    read: Option<Generation>,
    is_hooked: bool,
    rules: Vec<NetfilterRule>,
    /// Reason why the rules cannot be read, or `None`.
    trouble: Option<String>,
    /// Time of the latest check for tables of legacy iptables, and whether such tables existed.
    legacy: Option<(Instant, bool)>,
}

/// The generation of the rules that were read last, and when it was read.
struct Generation {
    /// The kernel's count of changes to the rules.
    number: u32,
    first_read: Instant,
    last_read: Instant,
}

impl Generation {
    /// Reports whether the rules have to be read again. The kernel first increments its count and then applies the
    /// change, so a reader between these steps gets the old rules with the new count. After a new count the rules are
    /// therefore read again for some seconds.
    fn is_outdated(&self, number: u32, now: Instant) -> bool {
        let is_unsettled = self.last_read - self.first_read < UNSETTLED;
        self.number != number || is_unsettled && now - self.last_read >= LOOK
    }
}

impl FirewallRules {
    /// Reads the nftables rules if they have changed.
    pub fn refresh(&mut self) {
        let trouble = self.read().err().map(|error| format!("rules of nftables cannot be read: {error}"));
        if let Some(trouble) = trouble.as_ref().filter(|_| self.trouble.is_none()) {
            warn!("{trouble}: no connection is tunnelled until the rules can be read");
        }
        self.trouble = trouble;
    }

    fn read(&mut self) -> io::Result<()> {
        // A kernel without nftables has no rules.
        let Some(number) = netfilter::generation()? else {
            (self.read, self.is_hooked) = (None, false);
            self.rules.clear();
            return Ok(());
        };
        let now = Instant::now();
        if self.read.as_ref().is_none_or(|read| read.is_outdated(number, now)) {
            (self.is_hooked, self.rules) = netfilter::rules()?;
            // The time at which the rules with this count of changes were first read is kept until the kernel's count
            // differs.
            let first_read =
                self.read.as_ref().filter(|read| read.number == number).map(|read| read.first_read);
            self.read = Some(Generation { number, first_read: first_read.unwrap_or(now), last_read: now });
        }
        Ok(())
    }

    /// Reports whether this host has a firewall that could affect a connection.
    pub fn is_there(&mut self) -> bool {
        self.is_hooked || self.trouble.is_some() || self.has_legacy()
    }

    fn has_legacy(&mut self) -> bool {
        if let Some((_, found)) = self.legacy.filter(|(at, _)| at.elapsed() < LOOK) {
            return found;
        }
        let has_tables = |path| fs::read_to_string(path).is_ok_and(|names| !names.is_empty());
        let found = LEGACY.into_iter().any(has_tables);
        self.legacy = Some((Instant::now(), found));
        found
    }

    /// Returns the rules that force connections to some of these server ports to be plain TCP.
    pub fn obstacles(&self, ports: &RangeInclusive<u16>, end: ConnectionEnd) -> Vec<Obstacle> {
        let trouble = self.trouble.iter().map(|what| Obstacle { what: what.clone(), ports: ports.clone() });
        let mut found = trouble.collect::<Vec<_>>();
        let mut known = None::<&Chain>;
        let mut first_only = false;
        for rule in &self.rules {
            // The rules are sorted by chain, and within a chain in the order in which the kernel applies them.
            if known != Some(&rule.chain) {
                (known, first_only) = (Some(&rule.chain), false);
            }
            if !passes(&rule.chain) || !may_be_for(rule, ports) {
                continue;
            }
            if let Some(what) = obstacle(rule, end, first_only) {
                found
                    .push(Obstacle { what: format!("{}: {what}", name(rule)), ports: those_of(rule, ports) });
            }
            // If a rule accepts established connections, the rules after it see only the first packets of connections.
            first_only |= lets_established_pass(rule);
        }
        found
    }
}

/// Reports whether packets of tunnelled connections would go through this chain as plain TCP, so that its rules matter.
fn passes(chain: &Chain) -> bool {
    matches!(chain.family, INET | IPV4 | IPV6 | NETDEV)
        && (chain.family == NETDEV || chain.hook != Some(FORWARD))
}

/// Reports whether the rule may match TCP packets of connections to these server ports.
fn may_be_for(rule: &NetfilterRule, ports: &RangeInclusive<u16>) -> bool {
    rule.looks.iter().all(|look| match look {
        RuleProperty::Protocol(protocol) => *protocol == TCP,
        RuleProperty::Ports(wanted) => {
            // The rule's ports may be meant as client ports if the range reaches `CHOSEN`, the lowest port that clients
            // get by default.
            *wanted.end() >= CHOSEN || (wanted.start() <= ports.end() && ports.start() <= wanted.end())
        }
        _ => true,
    })
}

/// Returns those of the given server ports that a rule may match.
fn those_of(rule: &NetfilterRule, ports: &RangeInclusive<u16>) -> RangeInclusive<u16> {
    rule.looks.iter().fold(ports.clone(), |left, look| match look {
        RuleProperty::Ports(wanted) if *wanted.end() < CHOSEN => {
            *left.start().max(wanted.start())..=*left.end().min(wanted.end())
        }
        _ => left,
    })
}

fn obstacle(rule: &NetfilterRule, end: ConnectionEnd, first_only: bool) -> Option<String> {
    let chain = &rule.chain;
    // The tunnel broker's test packets are dropped before the egress hook, so rules there cannot be tested.
    if chain.family == NETDEV && chain.hook == Some(EGRESS) {
        return Some("egress of an interface".to_owned());
    }
    let is_out = matches!(chain.hook, None | Some(OUTPUT | POSTROUTING));
    let is_of_first = first_only || rule.looks.contains(&RuleProperty::Place);
    rule.looks.iter().find_map(|look| match look {
        RuleProperty::Other(what) => Some(what.clone()),
        RuleProperty::Rate if !is_of_first => Some("limit of all packets".to_owned()),
        // The kernel does not report the owning group (GID) of a listening socket, so rules that match `skgid` cannot
        // be tested.
        RuleProperty::Group if end == ConnectionEnd::Server && is_out => Some("meta skgid".to_owned()),
        _ => None,
    })
}

/// Reports whether the rule accepts established connections. Later rules in its chain then see only first packets of
/// connections.
fn lets_established_pass(rule: &NetfilterRule) -> bool {
    let is_of_it = |look: &RuleProperty| {
        matches!(look, RuleProperty::Place | RuleProperty::Established | RuleProperty::Accepts)
    };
    rule.looks.contains(&RuleProperty::Established)
        && rule.looks.contains(&RuleProperty::Accepts)
        && rule.looks.iter().all(is_of_it)
}

fn name(rule: &NetfilterRule) -> String {
    let Chain { family, table, name, .. } = &rule.chain;
    let family = match *family {
        INET => "inet",
        IPV4 => "ip",
        IPV6 => "ip6",
        _ => "netdev",
    };
    format!("{family} {table} {name} handle {}", rule.handle)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn firewall(rules: &[(Option<u32>, &[RuleProperty])]) -> FirewallRules {
        let rule = |(handle, (hook, looks)): (usize, &(Option<u32>, &[RuleProperty]))| NetfilterRule {
            chain: Chain { family: INET, table: "t".into(), name: format!("{hook:?}"), hook: *hook },
            handle: handle as u64,
            looks: looks.to_vec(),
        };
        FirewallRules { rules: rules.iter().enumerate().map(rule).collect(), ..FirewallRules::default() }
    }

    #[test]
    fn nftables_rules_are_read_again_until_ten_seconds_after_a_change() {
        let first_read = Instant::now();
        let read = |seconds| Generation {
            number: 7,
            first_read,
            last_read: first_read + Duration::from_secs(seconds),
        };
        let at = |seconds| first_read + Duration::from_secs(seconds);
        assert!(read(0).is_outdated(8, at(0)), "another one");
        assert!(!read(0).is_outdated(7, at(0)), "just read");
        assert!(read(0).is_outdated(7, at(1)), "it may have been read before it was made");
        assert!(read(9).is_outdated(7, at(60)), "nobody has looked since");
        assert!(!read(10).is_outdated(7, at(60)), "settled");
    }

    #[test]
    fn nftables_rules_that_apply_beyond_a_connections_start_are_reported() {
        let quota = || RuleProperty::Other("quota".into());
        let established = [RuleProperty::Place, RuleProperty::Established, RuleProperty::Accepts];
        let out = Some(OUTPUT);
        type Rules<'a> = &'a [(Option<u32>, &'a [RuleProperty])];
        let table: [(&str, Rules<'_>, [usize; 2]); 11] = [
            ("nothing", &[], [0, 0]),
            (
                "what is the same in all packets",
                &[(out, &[RuleProperty::Protocol(6), RuleProperty::Accepts])],
                [0, 0],
            ),
            ("a quota", &[(out, &[quota()])], [1, 1]),
            ("of another protocol", &[(out, &[RuleProperty::Protocol(17), quota()])], [0, 0]),
            ("of another port", &[(out, &[RuleProperty::Ports(22..=22), quota()])], [0, 0]),
            ("of this port", &[(out, &[RuleProperty::Ports(440..=450), quota()])], [1, 1]),
            ("of what a client may have", &[(out, &[RuleProperty::Ports(40_000..=40_000), quota()])], [1, 1]),
            ("of what is forwarded", &[(Some(FORWARD), &[quota()])], [0, 0]),
            ("a limit", &[(None, &[RuleProperty::Rate])], [1, 1]),
            ("a limit of new ones", &[(out, &[RuleProperty::Place, RuleProperty::Rate])], [0, 0]),
            ("a group", &[(out, &[RuleProperty::Group]), (Some(1), &[RuleProperty::Group])], [0, 1]),
        ];
        for (what, rules, wanted) in table {
            let firewall = firewall(rules);
            let found = [ConnectionEnd::Client, ConnectionEnd::Server]
                .map(|end| firewall.obstacles(&(443..=443), end).len());
            assert_eq!(found, wanted, "{what}");
        }
        let behind =
            firewall(&[(out, &established), (out, &[RuleProperty::Rate]), (Some(1), &[RuleProperty::Rate])]);
        let found = behind.obstacles(&(1..=443), ConnectionEnd::Client);
        let what = "inet t Some(1) handle 2: limit of all packets".to_owned();
        assert_eq!(found, [Obstacle { what, ports: 1..=443 }]);
        let narrow = firewall(&[(out, &[RuleProperty::Ports(440..=450), quota()])]);
        assert_eq!(narrow.obstacles(&(1..=443), ConnectionEnd::Client)[0].ports, 440..=443);
    }
}
