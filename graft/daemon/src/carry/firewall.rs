//! The rules of this host's firewall, and those among them that a connection's first packets cannot stand for.

use std::{
    fs, io,
    ops::RangeInclusive,
    time::{Duration, Instant},
};

use millrace_kernel::netfilter::{self, Chain, Look, Rule};
use tracing::warn;

/// The first port that the kernel may choose for a client, on any host.
const CHOSEN: u16 = 32_768;
const TCP: u8 = 6;

/// NFPROTO_*
const INET: u8 = 1;
const IPV4: u8 = 2;
const NETDEV: u8 = 5;
const IPV6: u8 = 10;
/// NF_INET_*
const FORWARD: u32 = 2;
const OUTPUT: u32 = 3;
const POSTROUTING: u32 = 4;
/// NF_NETDEV_EGRESS: behind what is looked at.
const EGRESS: u32 = 1;

/// Tables of iptables before nftables.
const LEGACY: [&str; 2] = ["/proc/thread-self/net/ip_tables_names", "/proc/thread-self/net/ip6_tables_names"];

/// How often it is looked whether there are such tables, and for changes of rules that were counted before they were made.
const LOOK: Duration = Duration::from_secs(1);

/// Time within which a change is made after it was counted, however busy the machine is.
const UNSETTLED: Duration = Duration::from_secs(10);

/// The end of connections that this host is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Client,
    Server,
}

/// A rule for which connections have to be plain TCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle {
    /// The place of the rule, and the property that it looks at.
    pub what: String,
    /// Ports of servers whose connections are concerned.
    pub ports: RangeInclusive<u16>,
}

/// The rules as they were read last.
#[derive(Default)]
pub struct Firewall {
    /// `None`: they are not read yet, or were not to be.
    read: Option<Generation>,
    is_hooked: bool,
    rules: Vec<Rule>,
    trouble: Option<String>,
    /// When it was looked, and whether there were any.
    legacy: Option<(Instant, bool)>,
}

/// The state of the rules that were read last.
struct Generation {
    /// The kernel's count of changes.
    number: u32,
    first_read: Instant,
    last_read: Instant,
}

impl Generation {
    /// Reports whether the rules have to be read again. The kernel counts a change before it is made: whoever reads in between gets the
    /// rules of before with the number of after. So those of a new number are read again for a while.
    fn is_outdated(&self, number: u32, now: Instant) -> bool {
        let is_unsettled = self.last_read - self.first_read < UNSETTLED;
        self.number != number || is_unsettled && now - self.last_read >= LOOK
    }
}

impl Firewall {
    /// Reads the rules if they have changed.
    pub fn refresh(&mut self) {
        let trouble = self.read().err().map(|error| format!("rules of nftables cannot be read: {error}"));
        if let Some(trouble) = trouble.as_ref().filter(|_| self.trouble.is_none()) {
            warn!("{trouble}: nothing is carried until they can be");
        }
        self.trouble = trouble;
    }

    fn read(&mut self) -> io::Result<()> {
        let Some(number) = netfilter::generation()? else {
            (self.read, self.is_hooked) = (None, false);
            self.rules.clear();
            return Ok(());
        };
        let now = Instant::now();
        if self.read.as_ref().is_none_or(|read| read.is_outdated(number, now)) {
            (self.is_hooked, self.rules) = netfilter::rules()?;
            let first_read =
                self.read.as_ref().filter(|read| read.number == number).map(|read| read.first_read);
            self.read = Some(Generation { number, first_read: first_read.unwrap_or(now), last_read: now });
        }
        Ok(())
    }

    /// Reports whether there is anything that could have a say.
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

    /// Returns the rules for which connections to some of these ports of servers have to be plain TCP.
    pub fn obstacles(&self, ports: &RangeInclusive<u16>, end: End) -> Vec<Obstacle> {
        let trouble = self.trouble.iter().map(|what| Obstacle { what: what.clone(), ports: ports.clone() });
        let (mut found, mut known) = (trouble.collect::<Vec<_>>(), None::<&Chain>);
        let mut first_only = false;
        for rule in &self.rules {
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
            first_only |= lets_established_pass(rule);
        }
        found
    }
}

/// Whether packets of carried connections would pass the chain.
fn passes(chain: &Chain) -> bool {
    matches!(chain.family, INET | IPV4 | IPV6 | NETDEV)
        && (chain.family == NETDEV || chain.hook != Some(FORWARD))
}

/// Whether it says nothing that none of their packets fits.
fn may_be_for(rule: &Rule, ports: &RangeInclusive<u16>) -> bool {
    rule.looks.iter().all(|look| match look {
        Look::Protocol(protocol) => *protocol == TCP,
        Look::Ports(wanted) => {
            *wanted.end() >= CHOSEN || (wanted.start() <= ports.end() && ports.start() <= wanted.end())
        }
        _ => true,
    })
}

/// Returns those of the ports that a rule may apply to.
fn those_of(rule: &Rule, ports: &RangeInclusive<u16>) -> RangeInclusive<u16> {
    rule.looks.iter().fold(ports.clone(), |left, look| match look {
        Look::Ports(wanted) if *wanted.end() < CHOSEN => {
            *left.start().max(wanted.start())..=*left.end().min(wanted.end())
        }
        _ => left,
    })
}

fn obstacle(rule: &Rule, end: End, first_only: bool) -> Option<String> {
    let chain = &rule.chain;
    if chain.family == NETDEV && chain.hook == Some(EGRESS) {
        return Some("egress of an interface".to_owned());
    }
    let is_out = matches!(chain.hook, None | Some(OUTPUT | POSTROUTING));
    let is_of_first = first_only || rule.looks.contains(&Look::Place);
    rule.looks.iter().find_map(|look| match look {
        Look::Other(what) => Some(what.clone()),
        Look::Rate if !is_of_first => Some("limit of all packets".to_owned()),
        // The kernel does not say it of a socket that listens.
        Look::Group if end == End::Server && is_out => Some("meta skgid".to_owned()),
        _ => None,
    })
}

/// Rules behind it in its chain see first packets only.
fn lets_established_pass(rule: &Rule) -> bool {
    let is_of_it = |look: &Look| matches!(look, Look::Place | Look::Established | Look::Accepts);
    rule.looks.contains(&Look::Established)
        && rule.looks.contains(&Look::Accepts)
        && rule.looks.iter().all(is_of_it)
}

fn name(rule: &Rule) -> String {
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

    fn firewall(rules: &[(Option<u32>, &[Look])]) -> Firewall {
        let rule = |(handle, (hook, looks)): (usize, &(Option<u32>, &[Look]))| Rule {
            chain: Chain { family: INET, table: "t".into(), name: format!("{hook:?}"), hook: *hook },
            handle: handle as u64,
            looks: looks.to_vec(),
        };
        Firewall { rules: rules.iter().enumerate().map(rule).collect(), ..Firewall::default() }
    }

    #[test]
    fn rules_of_new_generation_are_read_again_until_it_is_settled() {
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
    fn rules_that_first_packets_cannot_stand_for_are_named() {
        let quota = || Look::Other("quota".into());
        let established = [Look::Place, Look::Established, Look::Accepts];
        let out = Some(OUTPUT);
        type Rules<'a> = &'a [(Option<u32>, &'a [Look])];
        let table: [(&str, Rules<'_>, [usize; 2]); 11] = [
            ("nothing", &[], [0, 0]),
            ("what is the same in all packets", &[(out, &[Look::Protocol(6), Look::Accepts])], [0, 0]),
            ("a quota", &[(out, &[quota()])], [1, 1]),
            ("of another protocol", &[(out, &[Look::Protocol(17), quota()])], [0, 0]),
            ("of another port", &[(out, &[Look::Ports(22..=22), quota()])], [0, 0]),
            ("of this port", &[(out, &[Look::Ports(440..=450), quota()])], [1, 1]),
            ("of what a client may have", &[(out, &[Look::Ports(40_000..=40_000), quota()])], [1, 1]),
            ("of what is forwarded", &[(Some(FORWARD), &[quota()])], [0, 0]),
            ("a limit", &[(None, &[Look::Rate])], [1, 1]),
            ("a limit of new ones", &[(out, &[Look::Place, Look::Rate])], [0, 0]),
            ("a group", &[(out, &[Look::Group]), (Some(1), &[Look::Group])], [0, 1]),
        ];
        for (what, rules, wanted) in table {
            let firewall = firewall(rules);
            let found = [End::Client, End::Server].map(|end| firewall.obstacles(&(443..=443), end).len());
            assert_eq!(found, wanted, "{what}");
        }
        let behind = firewall(&[(out, &established), (out, &[Look::Rate]), (Some(1), &[Look::Rate])]);
        let found = behind.obstacles(&(1..=443), End::Client);
        let what = "inet t Some(1) handle 2: limit of all packets".to_owned();
        assert_eq!(found, [Obstacle { what, ports: 1..=443 }]);
        let narrow = firewall(&[(out, &[Look::Ports(440..=450), quota()])]);
        assert_eq!(narrow.obstacles(&(1..=443), End::Client)[0].ports, 440..=443);
    }
}
