//! An operator's rules: scopes and their policies. They are plain values, which are checked as a whole and encoded for
//! the BPF program.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use millrace_kernel::prefix::{Prefix, mapped};
use serde::Deserialize;

use super::intf;
use super::reason::Rule;
use super::token;

/// The rules of a gate. They are applied as a whole or not at all.
#[derive(Debug, Clone, PartialEq)]
pub struct GateRules {
    /// The scopes, one for each guarded application.
    pub scopes: Vec<ScopeRules>,
    /// Modes (off, monitor, enforce) of the rules for packets whose scope is unknown: their port cannot be read, and no
    /// scope has their address. These are fragments after the first and packets with too many headers. Only
    /// [`Rule::Fragment`] and [`Rule::Headers`] matter.
    pub interface: Modes,
    /// The block and allow list that applies to all scopes. The longest matching prefix, in this list or a scope's own,
    /// decides. A prefix that is both blocked and allowed is blocked.
    pub prefixes: Vec<(Prefix, ListEntry)>,
}

impl Default for GateRules {
    fn default() -> Self {
        let interface = Modes::OFF.with(Rule::Headers, RuleMode::Enforce);
        Self { scopes: Vec::new(), interface, prefixes: Vec::new() }
    }
}

/// A guarded application (scope): the destinations of its packets, and the rules for them.
#[derive(Debug, Clone, PartialEq)]
pub struct ScopeRules {
    /// The name. A scope that keeps its name when the rules change also keeps its state. "interface" is reserved.
    pub name: String,
    /// The destination addresses and ports of the scope's packets.
    pub places: Vec<RulePlace>,
    /// The rules of the scope.
    pub policy: PolicyRules,
    /// The block and allow lists of the scope.
    pub prefixes: Vec<(Prefix, ListEntry)>,
}

/// An application's address, port or both. If several values of this type match a packet, address and port together win
/// over an address alone, which wins over a port alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RulePlace {
    /// The destination address; `None` for any.
    pub address: Option<IpAddr>,
    /// The destination port; `None` for any.
    pub port: Option<u16>,
}

impl RulePlace {
    /// Creates a [`RulePlace`] that matches one port at any address.
    pub const fn port(port: u16) -> Self {
        Self { address: None, port: Some(port) }
    }
}

/// An entry of a block or allow list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum ListEntry {
    /// Packets from this prefix pass, except those that no server accepts.
    Allow = 1,
    /// Packets from this prefix are refused. `Block` is greater than `Allow`, because a block decides if a prefix is in
    /// both lists.
    Block = 2,
}

/// The effect of a rule on packets that violate it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum RuleMode {
    /// The rule is not checked.
    Off = 0,
    /// The rule counts the packets that it would refuse.
    Monitor = 1,
    /// The rule refuses the packets that violate it.
    Enforce = 2,
}

/// The mode (off, monitor or enforce) of each rule. A rule that limits a network has the mode of the rule that limits a
/// client ([`Rule::client_reason`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Modes([RuleMode; Rule::ALL.len()]);

impl Modes {
    /// Modes with every rule off.
    pub const OFF: Self = Self([RuleMode::Off; Rule::ALL.len()]);

    /// Returns the mode of a rule.
    pub fn get(&self, rule: Rule) -> RuleMode {
        self.0[rule.client_reason().unwrap_or(rule) as usize]
    }

    /// Sets the mode of a rule.
    pub fn set(&mut self, rule: Rule, mode: RuleMode) {
        self.0[rule.client_reason().unwrap_or(rule) as usize] = mode;
    }

    /// Returns the modes with one rule's mode changed.
    #[must_use]
    pub fn with(mut self, rule: Rule, mode: RuleMode) -> Self {
        self.set(rule, mode);
        self
    }

    /// Changes the mode of every enforced rule to monitor, so that its violations are counted but not refused.
    #[must_use]
    pub fn dry_run(mut self) -> Self {
        self.0.iter_mut().for_each(|mode| *mode = (*mode).min(RuleMode::Monitor));
        self
    }
}

/// The default enforces the rules on malformed or unusual packets, the block list, and the rule on reflectors' source
/// ports. All other rules are off.
impl Default for Modes {
    fn default() -> Self {
        [
            Rule::Fragment,
            Rule::Headers,
            Rule::Block,
            Rule::Short,
            Rule::Malformed,
            Rule::InitialSize,
            Rule::SourcePort,
        ]
        .into_iter()
        .fold(Self::OFF, |modes, rule| modes.with(rule, RuleMode::Enforce))
    }
}

/// The source of the gate's knowledge of live connections, whose packets pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LiveRule {
    /// The application publishes every connection ID that it issues, all of this length (1 to 20 bytes).
    Published {
        /// Length of the IDs in bytes.
        id_len: usize,
    },
    /// The gate reads the server's handshake packets ([`LoadedGate::watch`](super::LoadedGate::watch)) and tracks
    /// connections.
    Tracked {
        /// The idle time after which a connection is forgotten: use the server's idle time-out.
        idle: Duration,
    },
    /// The gate does not know live connections. Use it only with rules against packets that no live connection sends.
    Unknown,
}

/// The party that counts the connections of clients, for [`Rule::Quota`] and to distinguish known clients from
/// unknown ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counting {
    /// The application counts, with [`KernelScope::inc`](super::KernelScope::inc) and
    /// [`KernelScope::dec`](super::KernelScope::dec).
    Application,
    /// The gate counts the connections that it tracks.
    Gate,
}

/// A rate of `amount` units (connections, packets or bytes) in each interval `per` on average, with bursts of up to
/// `burst` units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RuleRate {
    /// Number of connections, packets or bytes per interval.
    pub amount: u64,
    /// The interval.
    pub per: Duration,
    /// Largest burst, in connections, packets or bytes.
    pub burst: u64,
}

impl RuleRate {
    /// Makes a rate per second.
    pub const fn per_second(amount: u64, burst: u64) -> Self {
        Self { amount, per: Duration::from_secs(1), burst }
    }
}

/// Limits on the rates of new connections, packets and bytes. A rate is `None` if its rule is off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rates {
    /// Rate of new connections.
    pub initials: Option<RuleRate>,
    /// Rate of packets.
    pub packets: Option<RuleRate>,
    /// Rate of UDP payload in bytes. The burst must be at least as large as a packet.
    pub bytes: Option<RuleRate>,
}

/// The rules for the packets of one guarded application (scope).
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyRules {
    /// The mode of each rule.
    pub modes: Modes,
    /// How the gate knows which connections are live.
    pub live: LiveRule,
    /// The party that counts the connections of clients: the application or the gate.
    pub counting: Counting,
    /// Largest number of connections of a client, for [`Rule::Quota`]. [`Rule::NetworkQuota`] uses multiples of this
    /// number.
    pub quota: Option<u32>,
    /// Rate of new connections without a valid Retry token above which they get a Retry ([`Rule::Retry`]). With `None`
    /// all of them get one.
    pub retry_above: Option<RuleRate>,
    /// Lifetime of a Retry token, in whole seconds.
    pub token_lifetime: Duration,
    /// QUIC versions that the server supports, at most 4, for [`Rule::Version`].
    pub versions: Vec<u32>,
    /// Rules among [`ANSWERING`] that answer a refused packet with Version Negotiation instead of dropping it silently.
    /// [`Rule::Version`] names the server's versions. The answers of all other rules name a version that nothing
    /// implements, so that the client gives up at once.
    pub answers: BTreeSet<Rule>,
    /// Source ports that reflectors send from, at most 32, for [`Rule::SourcePort`]. Short headers are exempt while
    /// they may belong to live connections that the gate does not know: with [`LiveRule::Tracked`] until the gate has
    /// been attached for that rule's idle time, with [`LiveRule::Unknown`] always.
    pub reflectors: Vec<u16>,
    /// Rates of a client's live connections, or of a published ID: [`Rule::LivePackets`], [`Rule::LiveBytes`].
    pub live_rates: Rates,
    /// Rates of all unknown clients together: [`Rule::UnknownInitials`], [`Rule::UnknownPackets`],
    /// [`Rule::UnknownBytes`].
    pub unknown_rates: Rates,
    /// Rates of a client: [`Rule::ClientInitials`], [`Rule::ClientPackets`], [`Rule::ClientBytes`]. The rules on
    /// networks that contain the client use multiples: [`Rule::NetworkInitials`], [`Rule::NetworkPackets`],
    /// [`Rule::NetworkBytes`].
    pub client_rates: Rates,
}

/// Rules that can be set to answer with Version Negotiation. [`Rule::Retry`] always answers, with a Retry.
pub const ANSWERING: [Rule; 4] = [Rule::Version, Rule::Quota, Rule::UnknownInitials, Rule::ClientInitials];

/// QUIC version 1 (RFC 9000).
pub const VERSION_1: u32 = 0x0000_0001;
/// QUIC version 2 (RFC 9369).
pub const VERSION_2: u32 = 0x6b33_43cf;

/// UDP services that amplification attacks use: chargen, DNS, TFTP, portmap, NTP, NetBIOS, SNMP, CLDAP, RIP, MS SQL,
/// L2TP, SSDP, WS-Discovery, mDNS, memcached.
const REFLECTORS: [u16; 17] =
    [17, 19, 53, 69, 111, 123, 137, 161, 389, 520, 1434, 1701, 1900, 3702, 5353, 10001, 11211];

impl Default for PolicyRules {
    fn default() -> Self {
        Self {
            modes: Modes::default(),
            live: LiveRule::Tracked { idle: Duration::from_secs(30) },
            counting: Counting::Gate,
            quota: None,
            retry_above: None,
            token_lifetime: Duration::from_secs(10),
            versions: vec![VERSION_1, VERSION_2],
            answers: BTreeSet::new(),
            reflectors: REFLECTORS.to_vec(),
            live_rates: Rates::default(),
            unknown_rates: Rates::default(),
            client_rates: Rates::default(),
        }
    }
}

/// A fault in [`GateRules`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error("there are more than {max} {what}")]
    TooMany { what: &'static str, max: usize },
    #[error("the scope name \"{0}\" is used twice, or is empty, or is \"interface\": choose another one")]
    Name(String),
    #[error("scope {0} needs a port, an address, or both")]
    NoPlace(String),
    #[error("scopes {0} and {1} have the same address and port")]
    SamePlace(String, String),
    #[error("scope {scope}: rule {} is on, but {what} is not set", rule.name())]
    Unset { scope: String, rule: Rule, what: &'static str },
    #[error("scope {scope}: {what}")]
    Value { scope: String, what: &'static str },
}

impl From<Error> for millrace_kernel::Error {
    fn from(error: Error) -> Self {
        Self::Rules(error.to_string())
    }
}

/// Largest number of guarded applications (scopes) of a gate at one time. While rules are replaced, the limit applies
/// to the sum of old and new scopes.
pub const MAX_SCOPES: usize = intf::SCOPES as usize - 1;
/// Largest number of QUIC versions in a policy.
pub const VERSIONS_MAX: usize = intf::VERSIONS;
/// Largest number of reflectors' ports in a policy.
pub const REFLECTORS_MAX: usize = intf::PORTS;
/// Largest number of [`RulePlace`]s of all scopes together.
pub const MAX_PLACES: usize = 256;
/// Name of the scope that belongs to no application, for packets whose scope is unknown.
pub const INTERFACE: &str = "interface";

impl GateRules {
    /// Checks the rules. [`LoadedGate::apply`](super::LoadedGate::apply) does this first.
    pub fn check(&self) -> Result<(), Error> {
        limit("scopes", self.scopes.len(), MAX_SCOPES)?;
        limit("places", self.scopes.iter().map(|scope| scope.places.len()).sum(), MAX_PLACES)?;
        let mut names = BTreeSet::from([INTERFACE, ""]);
        let mut places: Vec<(RulePlace, &str)> = Vec::new();
        for scope in &self.scopes {
            if !names.insert(&scope.name) {
                return Err(Error::Name(scope.name.clone()));
            }
            if scope.places.is_empty() || scope.places.iter().any(|p| p.port.is_none() && p.address.is_none())
            {
                return Err(Error::NoPlace(scope.name.clone()));
            }
            for place in &scope.places {
                if place.port == Some(0) || place.address.is_some_and(|address| address.is_unspecified()) {
                    let what = "packets cannot be sent to port 0, 0.0.0.0 or ::";
                    return Err(Error::Value { scope: scope.name.clone(), what });
                }
                if let Some((_, other)) = places.iter().find(|(taken, _)| taken == place) {
                    return Err(Error::SamePlace((*other).to_owned(), scope.name.clone()));
                }
                places.push((*place, &scope.name));
            }
            scope.policy.encode(&scope.name)?;
        }
        Ok(())
    }

    /// Changes the mode of every enforced rule to monitor, so that its violations are counted but not refused.
    #[must_use]
    pub fn dry_run(mut self) -> Self {
        self.interface = self.interface.dry_run();
        self.scopes.iter_mut().for_each(|scope| scope.policy.modes = scope.policy.modes.dry_run());
        self
    }
}

fn limit(what: &'static str, count: usize, max: usize) -> Result<(), Error> {
    if count > max { Err(Error::TooMany { what, max }) } else { Ok(()) }
}

impl RulePlace {
    pub(super) fn key(&self, half: u32) -> intf::ScopeKey {
        intf::ScopeKey {
            address: self.address.map_or([0; 16], mapped),
            port: self.port.unwrap_or(0).to_be_bytes(),
            half: half as u16,
        }
    }

    /// Returns which fields of a packet the BPF program looks up to find this rule: address, port or both.
    pub(super) fn lookup(&self) -> u32 {
        match (self.address, self.port) {
            (Some(_), Some(_)) => intf::LOOKUP_BOTH,
            (Some(_), None) => intf::LOOKUP_ADDRESS,
            (None, _) => intf::LOOKUP_PORT,
        }
    }
}

impl Modes {
    pub(super) fn encode(&self) -> [u8; intf::MODES] {
        let mut modes = [0; intf::MODES];
        modes.iter_mut().zip(Rule::ALL).for_each(|(to, rule)| *to = self.get(rule) as u8);
        modes
    }
}

impl PolicyRules {
    pub(super) fn encode(&self, scope: &str) -> Result<intf::Policy, Error> {
        use Rule::{ClientBytes, ClientInitials, ClientPackets, LiveBytes, LivePackets};
        use Rule::{UnknownBytes, UnknownInitials, UnknownPackets};
        let value = |what| Error::Value { scope: scope.to_owned(), what };
        let is_on = |rule| self.modes.get(rule) != RuleMode::Off;
        let unset = |rule, what| Error::Unset { scope: scope.to_owned(), rule, what };
        if is_on(Rule::Quota) && self.quota.is_none() {
            return Err(unset(Rule::Quota, "the quota"));
        }
        let rates = |rates: &Rates, rules: [Option<Rule>; 3]| -> Result<[intf::Rate; 3], Error> {
            let mut raw = [intf::Rate::default(); 3];
            for ((to, rate), rule) in
                raw.iter_mut().zip([rates.initials, rates.packets, rates.bytes]).zip(rules)
            {
                match (rate, rule.filter(|rule| is_on(*rule))) {
                    (Some(rate), _) => *to = rate.encode().map_err(value)?,
                    (None, Some(rule)) => return Err(unset(rule, "its rate")),
                    (None, None) => {}
                }
            }
            Ok(raw)
        };
        let (tracks, id_bytes, idle, unsure) = match self.live {
            LiveRule::Published { id_len } if (1..=intf::ID_MAX).contains(&id_len) => {
                (0, id_len, Duration::ZERO, Duration::ZERO)
            }
            LiveRule::Published { .. } => {
                return Err(value("published connection IDs must have 1 to 20 bytes"));
            }
            LiveRule::Tracked { idle } if idle.is_zero() => return Err(value("the idle time is zero")),
            LiveRule::Tracked { idle } => (intf::TRACK, 0, idle, idle),
            LiveRule::Unknown => (0, 0, Duration::ZERO, Duration::MAX),
        };
        const TOUCH_LIVE: [Rule; 6] =
            [LivePackets, LiveBytes, UnknownPackets, UnknownBytes, ClientPackets, ClientBytes];
        if self.live == LiveRule::Unknown && TOUCH_LIVE.into_iter().any(is_on) {
            return Err(value("rules on packets and bytes need `live` to be tracked or published"));
        }
        let counts = match (self.counting, tracks) {
            (Counting::Application, _) => 0,
            (Counting::Gate, 0) => {
                return Err(value("the gate counts only connections that it tracks"));
            }
            (Counting::Gate, _) => intf::COUNT,
        };
        if is_on(Rule::UnknownId) && id_bytes == 0 {
            return Err(value("rule unknown_id needs published connection IDs"));
        }
        if is_on(Rule::Version) && self.versions.is_empty() {
            return Err(unset(Rule::Version, "the list of versions"));
        }
        if !self.answers.iter().all(|rule| ANSWERING.contains(rule)) {
            return Err(value(
                "only the rules version, quota, unknown_initials and client_initials can answer",
            ));
        }
        let mut versions = [[0; 4]; intf::VERSIONS];
        let mut ports = [[0; 2]; intf::PORTS];
        limit("versions", self.versions.len(), versions.len())?;
        limit("reflectors", self.reflectors.len(), ports.len())?;
        versions.iter_mut().zip(&self.versions).for_each(|(to, version)| *to = version.to_be_bytes());
        ports.iter_mut().zip(&self.reflectors).for_each(|(to, port)| *to = port.to_be_bytes());
        Ok(intf::Policy {
            modes: self.modes.encode(),
            flags: tracks | counts,
            id_bytes: id_bytes as u32,
            quota: self.quota.unwrap_or(u32::MAX),
            token_seconds: u32::try_from(self.token_lifetime.as_secs()).unwrap_or(u32::MAX),
            idle_ns: nanoseconds(idle),
            unsure_ns: nanoseconds(unsure),
            token_scope: token::scope_word(scope),
            retry_above: self.retry_above.map_or(Ok(NONE), |rate| rate.encode()).map_err(value)?,
            live: rates(&self.live_rates, [None, Some(LivePackets), Some(LiveBytes)])?,
            unknown: rates(
                &self.unknown_rates,
                [Some(UnknownInitials), Some(UnknownPackets), Some(UnknownBytes)],
            )?,
            client: rates(
                &self.client_rates,
                [Some(ClientInitials), Some(ClientPackets), Some(ClientBytes)],
            )?,
            versions,
            ports,
            answers: Rule::ALL
                .into_iter()
                .filter(|rule| self.answers.contains(&rule.client_reason().unwrap_or(*rule)))
                .fold(0, |bits, rule| bits | 1 << rule as u32),
            pad: 0,
        })
    }
}

/// Converts a time to ns. The limit of 2^62 keeps a sum with the present time from overflowing.
fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).min(1 << 62)
}

/// The encoded rate of a token bucket that never has tokens, so that every packet exceeds the rate.
const NONE: intf::Rate = intf::Rate { cost: 1, burst: 0 };
/// Largest cost of a byte in ticks of a token bucket. The cost of a datagram of 65,535 bytes stays below 2^62.
const COST_MAX: u128 = 1 << 46;

impl RuleRate {
    /// Encodes the rate for the BPF program: the cost of one packet, byte or new connection, and the size of the token
    /// bucket, both in ticks.
    fn encode(&self) -> Result<intf::Rate, &'static str> {
        if self.amount == 0 || self.burst == 0 {
            return Err("a rate of zero lets nothing through: enforce a list instead");
        }
        let period = self.per.as_nanos() * u128::from(intf::TICKS);
        let cost = (period / u128::from(self.amount)).max(1);
        if cost > COST_MAX {
            return Err("a rate is lower than one per 18 minutes");
        }
        let burst = (cost * u128::from(self.burst)).min(1 << 62);
        Ok(intf::Rate { cost: cost as u64, burst: burst as u64 })
    }
}
