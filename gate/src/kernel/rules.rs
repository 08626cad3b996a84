//! What an operator wants: scopes and their policies. Plain values, checked as a whole and encoded for the program.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use millrace_kernel::prefix::{Prefix, mapped};
use serde::Deserialize;

use super::intf;
use super::reason::Rule;
use super::token;

/// Everything that is decided by. Applied as a whole or not at all.
#[derive(Debug, Clone, PartialEq)]
pub struct Rules {
    pub scopes: Vec<Scope>,
    /// For what cannot be told apart: fragments after the first and packets with more headers than are followed, if they
    /// are for no scope's address. Only [`Rule::Fragment`] and [`Rule::Headers`] matter.
    pub interface: Modes,
    /// For all scopes. Of this list and a scope's own the longest prefix that matches decides; a prefix that is both
    /// blocked and allowed is blocked.
    pub prefixes: Vec<(Prefix, Entry)>,
}

impl Default for Rules {
    fn default() -> Self {
        let interface = Modes::OFF.with(Rule::Headers, Mode::Enforce);
        Self { scopes: Vec::new(), interface, prefixes: Vec::new() }
    }
}

/// One application.
#[derive(Debug, Clone, PartialEq)]
pub struct Scope {
    /// Its state survives changes under the same name. "interface" is taken.
    pub name: String,
    /// What it is found by.
    pub places: Vec<Place>,
    pub policy: Policy,
    pub prefixes: Vec<(Prefix, Entry)>,
}

/// Where an application listens: address, port or both. Both go before the address, the address before the port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub address: Option<IpAddr>,
    pub port: Option<u16>,
}

impl Place {
    pub const fn port(port: u16) -> Self {
        Self { address: None, port: Some(port) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Entry {
    /// Passes, unless it is something that no server wants.
    Allow = 1,
    /// The greater: decides where a prefix is in both lists.
    Block = 2,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Mode {
    Off = 0,
    /// Counts what it would refuse.
    Monitor = 1,
    Enforce = 2,
}

/// A mode for each rule. A rule on networks has that of the rule on clients ([`Rule::of_client`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Modes([Mode; Rule::ALL.len()]);

impl Modes {
    pub const OFF: Self = Self([Mode::Off; Rule::ALL.len()]);

    pub fn get(&self, rule: Rule) -> Mode {
        self.0[rule.of_client().unwrap_or(rule) as usize]
    }

    pub fn set(&mut self, rule: Rule, mode: Mode) {
        self.0[rule.of_client().unwrap_or(rule) as usize] = mode;
    }

    #[must_use]
    pub fn with(mut self, rule: Rule, mode: Mode) -> Self {
        self.set(rule, mode);
        self
    }

    /// What is enforced is only watched.
    #[must_use]
    pub fn dry_run(mut self) -> Self {
        self.0.iter_mut().for_each(|mode| *mode = (*mode).min(Mode::Monitor));
        self
    }
}

/// Enforced is what needs no measure: forms that no server wants, and the lists.
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
        .fold(Self::OFF, |modes, rule| modes.with(rule, Mode::Enforce))
    }
}

/// How the gate knows live connections, which it lets pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Live {
    /// The application publishes every connection ID that it issues, all of this length (1 to 20 bytes).
    Published { id_len: usize },
    /// The gate watches what the server answers ([`Gate::watch`](super::Gate::watch)) and forgets a connection that has
    /// been idle for so long, which should be the server's idle time-out.
    Tracked { idle: Duration },
    /// It does not, and looks at no answers: only for rules that object to what no live connection sends.
    Unknown,
}

/// Who counts the connections of clients, for [`Rule::Quota`] and to tell known clients from unknown ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counting {
    /// The application: [`Scope::inc`](super::Scope::inc), [`Scope::dec`](super::Scope::dec).
    Application,
    /// The gate, those that it tracks.
    Gate,
}

/// `amount` each `per`, on average; as much as `burst` at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    pub amount: u64,
    pub per: Duration,
    pub burst: u64,
}

impl Rate {
    pub const fn per_second(amount: u64, burst: u64) -> Self {
        Self { amount, per: Duration::from_secs(1), burst }
    }
}

/// What each of three rules measures. `None` where the rule is off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rates {
    /// New connections.
    pub initials: Option<Rate>,
    pub packets: Option<Rate>,
    /// Of UDP payload. The burst must be that of a packet at least.
    pub bytes: Option<Rate>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    pub modes: Modes,
    pub live: Live,
    pub counting: Counting,
    /// Connections that a client may have; [`Rule::Quota`], and [`Rule::NetworkQuota`] for multiples of it.
    pub quota: Option<u32>,
    /// Rate of new connections without a valid token from which on they are sent a Retry; [`Rule::Retry`]. `None`:
    /// all are.
    pub retry_above: Option<Rate>,
    /// For which a token is good, in whole seconds.
    pub token_lifetime: Duration,
    /// QUIC versions that the server speaks, at most 4; [`Rule::Version`].
    pub versions: Vec<u32>,
    /// Which of [`ANSWERING`] refuse by a Version Negotiation packet in place of silence: [`Rule::Version`] says what the
    /// server speaks, the others name no version that anybody speaks, so that the client gives up at once.
    pub answers: BTreeSet<Rule>,
    /// Source ports that reflectors answer from, at most 32; [`Rule::SourcePort`]. They are not held against short
    /// headers while those may be of live connections that the gate does not know: with [`Live::Tracked`] until it
    /// has been attached for the idle time, with [`Live::Unknown`] ever.
    pub reflectors: Vec<u16>,
    /// [`Rule::LivePackets`], [`Rule::LiveBytes`]; of a client, or of a published ID.
    pub live_rates: Rates,
    /// [`Rule::UnknownInitials`], [`Rule::UnknownPackets`], [`Rule::UnknownBytes`]; of all unknown clients together.
    pub unknown_rates: Rates,
    /// [`Rule::ClientInitials`], [`Rule::ClientPackets`], [`Rule::ClientBytes`]; of a client. Multiples of them are for the networks that it
    /// is in: [`Rule::NetworkInitials`], [`Rule::NetworkPackets`], [`Rule::NetworkBytes`].
    pub client_rates: Rates,
}

/// Rules that can answer, if they are told to; [`Rule::Retry`] always does.
pub const ANSWERING: [Rule; 4] = [Rule::Version, Rule::Quota, Rule::UnknownInitials, Rule::ClientInitials];

pub const VERSION_1: u32 = 0x0000_0001;
pub const VERSION_2: u32 = 0x6b33_43cf;

/// UDP services that amplification attacks use: chargen, DNS, TFTP, portmap, NTP, NetBIOS, SNMP, CLDAP, RIP, MS SQL,
/// L2TP, SSDP, WS-Discovery, mDNS, memcached.
const REFLECTORS: [u16; 17] =
    [17, 19, 53, 69, 111, 123, 137, 161, 389, 520, 1434, 1701, 1900, 3702, 5353, 10001, 11211];

impl Default for Policy {
    fn default() -> Self {
        Self {
            modes: Modes::default(),
            live: Live::Tracked { idle: Duration::from_secs(30) },
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

/// What is wrong with [`Rules`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("there are more than {max} {what}")]
    TooMany { what: &'static str, max: usize },
    #[error("the name \"{0}\" is used twice, or is empty, or is \"interface\"")]
    Name(String),
    #[error("scope {0} is found by nothing: it needs a port, an address, or both")]
    NoPlace(String),
    #[error("scopes {0} and {1} are found by the same address and port")]
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

/// All scopes of a gate at one time; while rules are replaced, of those before and after together.
pub const MAX_SCOPES: usize = intf::SCOPES as usize - 1;
/// Of a policy.
pub const VERSIONS_MAX: usize = intf::VERSIONS;
/// Of a policy.
pub const REFLECTORS_MAX: usize = intf::PORTS;
/// Places of all scopes together.
pub const MAX_PLACES: usize = 256;
/// What is not any application's: packets whose scope cannot be told.
pub const INTERFACE: &str = "interface";

impl Rules {
    /// Whether the rules make sense. [`Gate::apply`](super::Gate::apply) does that first.
    pub fn check(&self) -> Result<(), Error> {
        limit("scopes", self.scopes.len(), MAX_SCOPES)?;
        limit("places", self.scopes.iter().map(|scope| scope.places.len()).sum(), MAX_PLACES)?;
        let mut names = BTreeSet::from([INTERFACE, ""]);
        let mut places: Vec<(Place, &str)> = Vec::new();
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
                    let what = "no packet is sent to port 0, 0.0.0.0 or ::";
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

    /// What is enforced is only watched.
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

impl Place {
    pub(super) fn key(&self, half: u32) -> intf::ScopeKey {
        intf::ScopeKey {
            address: self.address.map_or([0; 16], mapped),
            port: self.port.unwrap_or(0).to_be_bytes(),
            half: half as u16,
        }
    }

    /// The look-up that finds it.
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

impl Policy {
    pub(super) fn encode(&self, scope: &str) -> Result<intf::Policy, Error> {
        use Rule::{ClientBytes, ClientInitials, ClientPackets, LiveBytes, LivePackets};
        use Rule::{UnknownBytes, UnknownInitials, UnknownPackets};
        let value = |what| Error::Value { scope: scope.to_owned(), what };
        let is_on = |rule| self.modes.get(rule) != Mode::Off;
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
            Live::Published { id_len } if (1..=intf::ID_MAX).contains(&id_len) => {
                (0, id_len, Duration::ZERO, Duration::ZERO)
            }
            Live::Published { .. } => return Err(value("published connection IDs have 1 to 20 bytes")),
            Live::Tracked { idle } if idle.is_zero() => return Err(value("the idle time is zero")),
            Live::Tracked { idle } => (intf::TRACK, 0, idle, idle),
            Live::Unknown => (0, 0, Duration::ZERO, Duration::MAX),
        };
        const TOUCH_LIVE: [Rule; 6] =
            [LivePackets, LiveBytes, UnknownPackets, UnknownBytes, ClientPackets, ClientBytes];
        if self.live == Live::Unknown && TOUCH_LIVE.into_iter().any(is_on) {
            return Err(value("rules on packets and bytes need live connections to be known"));
        }
        let counts = match (self.counting, tracks) {
            (Counting::Application, _) => 0,
            (Counting::Gate, 0) => {
                return Err(value("the gate only counts connections that it tracks"));
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
                .filter(|rule| self.answers.contains(&rule.of_client().unwrap_or(*rule)))
                .fold(0, |bits, rule| bits | 1 << rule as u32),
            pad: 0,
        })
    }
}

/// So few that a sum does not overflow.
fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).min(1 << 62)
}

/// Nothing fits.
const NONE: intf::Rate = intf::Rate { cost: 1, burst: 0 };
/// A whole datagram at this cost per byte is still far from overflowing.
const COST_MAX: u128 = 1 << 46;

impl Rate {
    /// The program's terms: what a unit costs, and how much may be owed.
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
