//! Rules of nftables in the calling thread's network namespace. Each is reduced to the properties of packets that it
//! matches (nfnetlink, linux/netfilter/nf_tables.h).

use std::collections::HashMap;
use std::io;
use std::ops::RangeInclusive;

use nix::libc;
use nix::sys::socket::SockProtocol;

use crate::netlink::{attribute, attributes, dump_by, get_by};

const NFNL_SUBSYS_NFTABLES: u16 = 10;
const NEWCHAIN: u16 = NFNL_SUBSYS_NFTABLES << 8 | 3;
const GETCHAIN: u16 = NFNL_SUBSYS_NFTABLES << 8 | 4;
const NEWRULE: u16 = NFNL_SUBSYS_NFTABLES << 8 | 6;
const GETRULE: u16 = NFNL_SUBSYS_NFTABLES << 8 | 7;
const NEWGEN: u16 = NFNL_SUBSYS_NFTABLES << 8 | 15;
const GETGEN: u16 = NFNL_SUBSYS_NFTABLES << 8 | 16;
/// Length of `struct nfgenmsg` in bytes. All zeroes stand for all address families.
const HEAD: usize = 4;
const GEN_ID: u16 = 1;
const CHAIN_TABLE: u16 = 1;
const CHAIN_NAME: u16 = 3;
const CHAIN_HOOK: u16 = 4;
const HOOK_NUMBER: u16 = 1;
const RULE_TABLE: u16 = 1;
const RULE_CHAIN: u16 = 2;
const RULE_HANDLE: u16 = 3;
const RULE_EXPRESSIONS: u16 = 4;
const EXPRESSION_NAME: u16 = 1;
const EXPRESSION_DATA: u16 = 2;
const DATA_VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
const NF_ACCEPT: u32 = 1;

// Bits of a connection's state in conntrack.
const STATE_ESTABLISHED: u32 = 2;
const STATE_NEW: u32 = 8;

/// A rule of nftables: its chain and handle, and the properties of packets that it matches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetfilterRule {
    /// The chain that the rule is in.
    pub chain: Chain,
    /// The rule's handle, which is unique in its table.
    pub handle: u64,
    /// The properties that the rule matches, and its effects, in the order of the rule's expressions.
    pub looks: Vec<RuleProperty>,
}

/// A chain of rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// Address family, NFPROTO_*.
    pub family: u8,
    /// The table's name.
    pub table: String,
    /// The chain's name.
    pub name: String,
    /// The chain's hook, NF_INET_* or NF_NETDEV_*. `None` for a chain that is used only if other chains jump to it.
    pub hook: Option<u32>,
}

/// A property of packets that a rule matches, or an effect of the rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RuleProperty {
    /// The rule applies only to packets of this protocol (IPPROTO_*).
    Protocol(u8),
    /// The rule applies only to packets from or to these ports.
    Ports(RangeInclusive<u16>),
    /// The rule depends on the packet's position in its connection, such as the first packet or a SYN.
    Place,
    /// The rule applies only to packets of established connections.
    Established,
    /// The rule accepts the packet.
    Accepts,
    /// The rule depends on the number or rate of packets.
    Rate,
    /// The rule depends on the group of the socket's owner.
    Group,
    /// The rule depends on a property that all packets of a connection share.
    Match,
    /// The rule depends on another property, with this name. It is unknown whether all packets of a connection share
    /// it.
    Other(String),
}

/// Returns a number that changes with each change of the rules, or `None` if this kernel has no nftables.
///
/// # Errors
/// Fails if the kernel refuses to answer. The call needs CAP_NET_ADMIN.
pub fn generation() -> io::Result<Option<u32>> {
    let found = get_by(SockProtocol::NetlinkNetFilter, GETGEN, &[0; HEAD], NEWGEN);
    match found {
        Ok(body) => Ok(body.get(HEAD..).and_then(|rest| number(attribute(rest, GEN_ID)))),
        Err(error) if is_nowhere(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reports whether the error means that the kernel has no nftables.
fn is_nowhere(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINVAL | libc::ENOENT | libc::EOPNOTSUPP | libc::EPROTONOSUPPORT)
    )
}

/// Returns all rules, and whether any chain has a hook.
///
/// # Errors
/// Fails if the kernel refuses to answer. The call needs CAP_NET_ADMIN.
pub fn rules() -> io::Result<(bool, Vec<NetfilterRule>)> {
    let mut hooks = HashMap::new();
    let mut rules = Vec::new();
    dump_by(SockProtocol::NetlinkNetFilter, GETCHAIN, &[0; HEAD], NEWCHAIN, |body| {
        if let Some(chain) = chain(body) {
            hooks.insert((chain.family, chain.table, chain.name), chain.hook);
        }
    })?;
    dump_by(SockProtocol::NetlinkNetFilter, GETRULE, &[0; HEAD], NEWRULE, |body| {
        rules.extend(rule(body, |family, table, name| {
            hooks.get(&(family, table.to_owned(), name.to_owned())).copied().flatten()
        }));
    })?;
    Ok((hooks.values().any(Option::is_some), rules))
}

fn chain(body: &[u8]) -> Option<Chain> {
    let family = *body.first()?;
    let rest = body.get(HEAD..)?;
    let hook = attribute(rest, CHAIN_HOOK).and_then(|hook| number(attribute(hook, HOOK_NUMBER)));
    Some(Chain { family, table: text(rest, CHAIN_TABLE)?, name: text(rest, CHAIN_NAME)?, hook })
}

fn rule(body: &[u8], hook: impl Fn(u8, &str, &str) -> Option<u32>) -> Option<NetfilterRule> {
    let family = *body.first()?;
    let rest = body.get(HEAD..)?;
    let table = text(rest, RULE_TABLE)?;
    let name = text(rest, RULE_CHAIN)?;
    let hook = hook(family, &table, &name);
    let handle = attribute(rest, RULE_HANDLE)?.first_chunk().map(|handle| u64::from_be_bytes(*handle))?;
    let mut reader = RuleReader::default();
    for (_, expression) in attributes(attribute(rest, RULE_EXPRESSIONS).unwrap_or_default()) {
        let data = attribute(expression, EXPRESSION_DATA).unwrap_or_default();
        reader.read(&text(expression, EXPRESSION_NAME)?, data);
    }
    Some(NetfilterRule { chain: Chain { family, table, name, hook }, handle, looks: reader.looks })
}

fn text(attributes: &[u8], kind: u16) -> Option<String> {
    let value = attribute(attributes, kind)?;
    Some(String::from_utf8_lossy(value.strip_suffix(&[0]).unwrap_or(value)).into_owned())
}

fn number(value: Option<&[u8]>) -> Option<u32> {
    value?.first_chunk().map(|value| u32::from_be_bytes(*value))
}

/// The value that the latest expression loaded into a register, for the next comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LoadedValue {
    Protocol,
    Port,
    State,
    /// A connection's state after the expression `bitwise`, which masks it with several states.
    States,
}

#[derive(Default)]
struct RuleReader {
    looks: Vec<RuleProperty>,
    loaded: Option<(u32, LoadedValue)>,
    /// First port of a range of ports, whose last port comes with the next comparison.
    first_port: Option<u16>,
}

impl RuleReader {
    fn read(&mut self, name: &str, data: &[u8]) {
        // An expression of another kind may load another value into the register, so a later comparison is not with a
        // port.
        if !matches!(name, "cmp" | "range" | "bitwise" | "lookup") {
            (self.loaded, self.first_port) = (None, None);
        }
        match name {
            "meta" => self.meta(data),
            "payload" => self.payload(data),
            "ct" => self.connection(data),
            "cmp" => self.compare(data),
            "range" => self.range(data),
            "bitwise" => self.mask(data),
            "immediate" => self.immediate(data),
            "limit" => self.limit(data),
            "dynset" => self.looks.push(RuleProperty::Rate),
            "objref" => self.object(data),
            "socket" => self.socket(data),
            "match" => self.extension(data),
            "target" => self.target(data),
            // Neither `lookup` nor one of the expressions in the next match arm makes a rule treat packets of a
            // connection differently.
            "lookup" => self.matches(),
            "counter" | "last" | "log" | "reject" | "notrack" | "nat" | "masq" | "redir" | "fib" | "rt"
            | "byteorder" | "hash" | "numgen" | "exthdr" => {}
            other => self.note_unknown(other),
        }
    }

    fn note_unknown(&mut self, name: &str) {
        self.looks.push(RuleProperty::Other(name.to_owned()));
    }

    fn matches(&mut self) {
        if !self.looks.contains(&RuleProperty::Match) {
            self.looks.push(RuleProperty::Match);
        }
    }

    fn load(&mut self, register: Option<u32>, what: LoadedValue) {
        self.loaded = register.map(|register| (register, what));
        self.first_port = None;
    }

    /// Reads the attributes NFTA_META_* of an expression `meta`.
    fn meta(&mut self, data: &[u8]) {
        const LENGTH: u32 = 0;
        const PRIORITY: u32 = 2;
        const SKGID: u32 = 11;
        const SECMARK: u32 = 14;
        const L4PROTO: u32 = 16;
        const CGROUP: u32 = 23;
        const SECPATH: u32 = 25;
        let register = number(attribute(data, 1));
        let key = number(attribute(data, 2));
        // An expression without a target register sets a property of the packet, and does not match it.
        if register.is_none() {
            return;
        }
        match key {
            Some(L4PROTO) => self.load(register, LoadedValue::Protocol),
            Some(SKGID) => self.looks.push(RuleProperty::Group),
            Some(LENGTH) => self.note_unknown("meta length"),
            Some(PRIORITY) => self.note_unknown("meta priority"),
            Some(SECMARK) => self.note_unknown("meta secmark"),
            Some(CGROUP) => self.note_unknown("meta cgroup"),
            Some(SECPATH) => self.note_unknown("meta ipsec"),
            Some(0..=32) => {}
            _ => self.note_unknown("meta"),
        }
    }

    /// Reads the attributes NFTA_PAYLOAD_* of an expression `payload`, which loads bytes of the packet. Only addresses,
    /// ports and TCP flags are known fields; other bytes may differ between packets of a connection.
    fn payload(&mut self, data: &[u8]) {
        const NETWORK: u32 = 1;
        const TRANSPORT: u32 = 2;
        let value = |kind| number(attribute(data, kind));
        let register = value(1);
        if register.is_none() {
            return;
        }
        match (value(2), value(3), value(4)) {
            (Some(TRANSPORT), Some(0 | 2), Some(2)) => self.load(register, LoadedValue::Port),
            (Some(TRANSPORT), Some(0), Some(4)) => {}
            (Some(TRANSPORT), Some(13), Some(1)) => self.looks.push(RuleProperty::Place),
            // All packets of a connection have the same values in these fields of the IP header: the protocol number of
            // IPv4 or IPv6, and the addresses or their prefixes.
            (Some(NETWORK), Some(6 | 9), Some(1)) => self.load(register, LoadedValue::Protocol),
            (Some(NETWORK), Some(12 | 16 | 24), Some(1..=16)) => {}
            (Some(NETWORK), Some(8), Some(2..=32)) => {}
            _ => self.note_unknown("payload"),
        }
    }

    /// Reads the attributes NFTA_CT_* of an expression `ct`.
    fn connection(&mut self, data: &[u8]) {
        const STATE: u32 = 0;
        const EXPIRATION: u32 = 5;
        const HELPER: u32 = 6;
        const COUNTS: RangeInclusive<u32> = 14..=16;
        let register = number(attribute(data, 1));
        let key = number(attribute(data, 2));
        match key.filter(|_| register.is_some()) {
            Some(STATE) => {
                self.looks.push(RuleProperty::Place);
                self.load(register, LoadedValue::State);
            }
            Some(key) if COUNTS.contains(&key) => self.note_unknown("ct bytes, packets"),
            Some(EXPIRATION | HELPER) => self.note_unknown("ct"),
            _ => {}
        }
    }

    /// Reads the attributes NFTA_CMP_* of an expression `cmp`.
    fn compare(&mut self, data: &[u8]) {
        const EQUAL: u32 = 0;
        let register = number(attribute(data, 1));
        let what = self.loaded.filter(|(loaded, _)| register == Some(*loaded)).map(|(_, what)| what);
        let operator = number(attribute(data, 2)).unwrap_or(u32::MAX);
        let value = attribute(data, 3).and_then(|data| attribute(data, DATA_VALUE)).unwrap_or_default();
        match (what, value) {
            (Some(LoadedValue::State | LoadedValue::States), _) => {}
            (Some(LoadedValue::Protocol), [protocol, ..]) if operator == EQUAL => {
                self.looks.push(RuleProperty::Protocol(*protocol));
            }
            (Some(LoadedValue::Port), [high, low, ..]) => {
                self.port(operator, u16::from_be_bytes([*high, *low]))
            }
            _ => self.matches(),
        }
    }

    /// Notes a comparison with a port. A range of ports is two comparisons: with its first port, and then with its
    /// last.
    fn port(&mut self, operator: u32, port: u16) {
        const EQUAL: u32 = 0;
        const AT_MOST: u32 = 3;
        const AT_LEAST: u32 = 5;
        let first = self.first_port.take();
        match operator {
            EQUAL => self.looks.push(RuleProperty::Ports(port..=port)),
            AT_LEAST => {
                self.looks.push(RuleProperty::Ports(port..=u16::MAX));
                self.first_port = Some(port);
            }
            AT_MOST => {
                if first.is_some() {
                    self.looks.pop();
                }
                self.looks.push(RuleProperty::Ports(first.unwrap_or_default()..=port));
            }
            _ => self.matches(),
        }
    }

    /// Reads the attributes NFTA_RANGE_* of an expression `range`.
    fn range(&mut self, data: &[u8]) {
        const EQUAL: u32 = 0;
        let register = number(attribute(data, 1));
        let is_port = register.is_some_and(|register| self.loaded == Some((register, LoadedValue::Port)));
        let is_equal = number(attribute(data, 2)) == Some(EQUAL);
        let port = |kind| {
            let value = attribute(data, kind).and_then(|data| attribute(data, DATA_VALUE))?;
            value.first_chunk().map(|port| u16::from_be_bytes(*port))
        };
        match (is_port && is_equal, port(3), port(4)) {
            (true, Some(first), Some(last)) => self.looks.push(RuleProperty::Ports(first..=last)),
            _ => self.matches(),
        }
    }

    /// Reads the attributes NFTA_BITWISE_* of an expression `bitwise`, which masks a value, such as several connection
    /// states.
    fn mask(&mut self, data: &[u8]) {
        let register = number(attribute(data, 1));
        let mask = attribute(data, 4).and_then(|data| attribute(data, DATA_VALUE));
        let mask = mask.and_then(|mask| mask.first_chunk()).map(|mask| u32::from_ne_bytes(*mask));
        let is_state = register.is_some_and(|register| self.loaded == Some((register, LoadedValue::State)));
        if is_state && mask.is_some_and(|mask| mask & STATE_ESTABLISHED != 0 && mask & STATE_NEW == 0) {
            self.looks.push(RuleProperty::Established);
        }
        self.loaded = None;
        if is_state {
            self.load(number(attribute(data, 2)), LoadedValue::States);
        }
    }

    /// Reads the attributes NFTA_IMMEDIATE_* of an expression `immediate`, which has the rule's verdict.
    fn immediate(&mut self, data: &[u8]) {
        let verdict = attribute(data, 2).and_then(|data| attribute(data, DATA_VERDICT));
        if verdict.and_then(|verdict| number(attribute(verdict, VERDICT_CODE))) == Some(NF_ACCEPT) {
            self.looks.push(RuleProperty::Accepts);
        }
    }

    /// Reads the attributes NFTA_LIMIT_* of an expression `limit`.
    fn limit(&mut self, data: &[u8]) {
        const OF_BYTES: u32 = 1;
        match number(attribute(data, 4)) {
            Some(OF_BYTES) => self.note_unknown("limit of bytes"),
            _ => self.looks.push(RuleProperty::Rate),
        }
    }

    /// Reads the attributes NFTA_OBJREF_* of a reference to a named object, such as a counter or quota. If the object
    /// is looked up in a set, its kind is unknown.
    fn object(&mut self, data: &[u8]) {
        const COUNTER: u32 = 1;
        const QUOTA: u32 = 2;
        const LIMIT: u32 = 4;
        const SECMARK: u32 = 8;
        match number(attribute(data, 1)) {
            Some(COUNTER | SECMARK) => {}
            Some(LIMIT) => self.looks.push(RuleProperty::Rate),
            Some(QUOTA) => self.note_unknown("quota"),
            _ => self.note_unknown("objref"),
        }
    }

    /// Reads the attributes NFTA_SOCKET_* of an expression `socket`.
    fn socket(&mut self, data: &[u8]) {
        const CGROUP: u32 = 3;
        if number(attribute(data, 1)) == Some(CGROUP) {
            self.note_unknown("socket cgroupv2");
        }
    }

    /// Reads NFTA_MATCH_NAME, the name of a match of iptables.
    fn extension(&mut self, data: &[u8]) {
        match text(data, 1).unwrap_or_default().as_str() {
            "conntrack" | "state" => self.looks.push(RuleProperty::Place),
            "owner" => self.looks.push(RuleProperty::Group),
            "limit" | "hashlimit" | "recent" => self.looks.push(RuleProperty::Rate),
            "comment" => {}
            "addrtype" | "connmark" | "iprange" | "mark" | "multiport" | "physdev" | "pkttype"
            | "rpfilter" | "set" | "statistic" | "tcp" | "time" => self.matches(),
            other => self.note_unknown(&format!("match {other}")),
        }
    }

    /// Reads NFTA_TARGET_NAME, the name of a target of iptables.
    fn target(&mut self, data: &[u8]) {
        match text(data, 1).unwrap_or_default().as_str() {
            "CONNMARK" | "CT" | "DNAT" | "LOG" | "MARK" | "MASQUERADE" | "NFLOG" | "NOTRACK" | "REDIRECT"
            | "REJECT" | "SNAT" | "TCPMSS" | "TRACE" => {}
            other => self.note_unknown(&format!("target {other}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Makes rules with nft in a new network namespace, and compares the properties that are read back.
    #[test]
    fn nftables_rules_report_what_they_match() {
        let name = format!("millrace-nft-{}", std::process::id());
        let ip =
            |arguments: &[&str]| Command::new("ip").args(arguments).status().is_ok_and(|it| it.success());
        if !nix::unistd::geteuid().is_root() || Command::new("nft").arg("-v").output().is_err() {
            println!("SKIP nftables_rules_report_what_they_match: needs root and nft");
            return;
        }
        assert!(ip(&["netns", "add", &name]));
        let table: [(&str, Vec<RuleProperty>); 20] = [
            ("ip saddr 192.0.2.1 accept", vec![RuleProperty::Accepts]),
            ("ip6 daddr 2001:db8::1 accept", vec![RuleProperty::Accepts]),
            ("tcp dport 443 drop", vec![RuleProperty::Protocol(6), RuleProperty::Ports(443..=443)]),
            ("udp dport 1000-2000 drop", vec![RuleProperty::Protocol(17), RuleProperty::Ports(1000..=2000)]),
            ("tcp dport { 80, 443 } drop", vec![RuleProperty::Protocol(6)]),
            ("meta skuid 7 counter drop", vec![]),
            ("meta skgid 7 drop", vec![RuleProperty::Group]),
            ("meta mark 7 oifname \"eth*\" reject with icmpx admin-prohibited", vec![]),
            (
                "ct state established,related accept",
                vec![RuleProperty::Place, RuleProperty::Established, RuleProperty::Accepts],
            ),
            (
                "ct state new limit rate 5/second accept",
                vec![RuleProperty::Place, RuleProperty::Rate, RuleProperty::Accepts],
            ),
            (
                "tcp flags syn limit rate 5/second drop",
                vec![RuleProperty::Protocol(6), RuleProperty::Place, RuleProperty::Rate],
            ),
            ("limit rate 5 kbytes/second drop", vec![RuleProperty::Other("limit of bytes".into())]),
            ("quota over 5 kbytes drop", vec![RuleProperty::Other("quota".into())]),
            ("meta length 100 drop", vec![RuleProperty::Other("meta length".into())]),
            ("ip dscp 7 drop", vec![RuleProperty::Other("payload".into())]),
            ("ct count over 5 drop", vec![RuleProperty::Other("connlimit".into())]),
            ("meta cgroup 7 drop", vec![RuleProperty::Other("meta cgroup".into())]),
            ("ct original bytes > 100000 drop", vec![RuleProperty::Other("ct bytes, packets".into())]),
            // The first two bytes of the packet mark, 0x0050, must not be taken for port 80.
            (
                "tcp dport 443 meta mark 0x5000 drop",
                vec![RuleProperty::Protocol(6), RuleProperty::Ports(443..=443)],
            ),
            (
                "tcp dport 443 ct mark 0x5000 drop",
                vec![RuleProperty::Protocol(6), RuleProperty::Ports(443..=443)],
            ),
        ];
        let lines: String = table.iter().map(|(rule, _)| format!("{rule}\n")).collect();
        let head = "type filter hook output priority 0; policy accept;";
        let text =
            format!("table inet t {{\nchain other {{\n}}\nchain out {{\n{head}\n{lines}jump other\n}}\n}}\n");
        let nft = Command::new("ip").args(["netns", "exec", &name, "nft", &text]).output().unwrap();
        let said = String::from_utf8_lossy(&nft.stderr).into_owned();
        let namespace = std::fs::File::open(format!("/run/netns/{name}")).unwrap();
        let found = std::thread::spawn(move || {
            nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            (generation().unwrap(), super::rules().unwrap())
        });
        let (generation, (is_hooked, found)) = found.join().unwrap();
        assert!(ip(&["netns", "del", &name]));
        assert!(nft.status.success(), "{said}");
        assert!(generation.is_some() && is_hooked);
        for ((rule, looks), found) in table.iter().zip(&found) {
            let others = found.looks.iter().filter(|look| **look != RuleProperty::Match).cloned();
            assert_eq!((&others.collect::<Vec<_>>(), found.chain.hook), (looks, Some(3)), "{rule}");
        }
        let narrow = found.iter().map(|rule| rule.looks.contains(&RuleProperty::Match));
        assert_eq!(narrow.take(3).collect::<Vec<_>>(), [true, true, false]);
        assert!(!found[8].looks.contains(&RuleProperty::Match), "{:?}", found[8]);
        assert_eq!((found.len(), found[0].chain.name.as_str()), (table.len() + 1, "out"));
    }

    #[test]
    fn arbitrary_bytes_are_parsed_without_panic() {
        let mut rng = fastrand::Rng::with_seed(3);
        for length in 0..300 {
            let bytes: Vec<u8> = (0..length).map(|_| rng.u8(..20)).collect();
            let _ = (chain(&bytes), rule(&bytes, |_, _, _| None));
        }
    }
}
