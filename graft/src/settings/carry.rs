//! Settings of carriers, which tunnel TCP connections of applications.

use std::{fmt, net::SocketAddr};

use millrace_graft_proto::carry::{WARM_MAX, WINDOW_MAX};
use serde::Deserialize;

use super::agreement::address;

const CONNECTIONS: usize = 10_000;
const CONNECTIONS_MAX: usize = 60_000;
const WINDOW_KIB: u32 = 4096;
const MEMORY_MIB: u32 = 512;
const WARM_KIB: u32 = 256;
const MEMORY_MAX_MIB: u32 = 1 << 20;
const POOL_WARM: u32 = 4;
const POOL_WARM_MAX: u32 = 64;
const POOL_MOST: u32 = 1000;
/// Longest name of a congestion control in the kernel, in bytes.
const CONGESTION_MAX: usize = 15;

/// The transport of a carrier.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "kebab-case")]
pub enum CarrierKind {
    /// One QUIC connection, with a stream for each tunnelled connection.
    Quic,
    /// A pool of TCP connections. Each carries one application's connection at a time.
    Tcp,
    /// A pool of MPTCP connections. Each uses as many paths as the MPTCP path managers of both hosts set up.
    Mptcp,
    /// A pool of SCTP connections, if the kernel has SCTP.
    Sctp,
}

impl CarrierKind {
    /// All kinds of carriers, in the order in which reports list them.
    pub const ALL: [Self; 4] = [Self::Quic, Self::Tcp, Self::Mptcp, Self::Sctp];

    /// Returns the name of this kind of carrier in settings and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Quic => "quic",
            Self::Tcp => "tcp",
            Self::Mptcp => "mptcp",
            Self::Sctp => "sctp",
        }
    }
}

impl fmt::Display for CarrierKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

/// The congestion control of QUIC carriers.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum QuicCongestion {
    /// BBRv3, which ignores losses that no queue has caused.
    #[default]
    Bbr,
    /// CUBIC as implemented in quinn, which treats each loss as congestion.
    Cubic,
}

/// Tells whether connections that match a rule are tunnelled.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Tier {
    /// Connections are not tunnelled: they go to the peer as plain TCP.
    #[default]
    InPlace,
    /// Connections are redirected to the tunnel broker, which tunnels them.
    Carried,
    /// The model decides for each path whether connections are tunnelled.
    Chosen,
}

impl Tier {
    /// Returns the name that this value of `tier` has in settings.
    pub fn name(self) -> &'static str {
        match self {
            Self::InPlace => "in-place",
            Self::Carried => "carried",
            Self::Chosen => "chosen",
        }
    }
}

/// The time at which `connect()` of a tunnelled connection returns to the application.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Connect {
    /// Immediately. The application's first bytes are sent together with the request to open the connection.
    #[default]
    Early,
    /// The application's `connect()` returns after the server has accepted the connection.
    Strict,
}

/// The settings of tunnelled connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CarrySettings {
    /// Address at which this host accepts carriers that peers open, or `None` if it only opens carriers itself.
    pub listen: Option<SocketAddr>,
    /// Limit of concurrent tunnelled connections.
    pub connections: usize,
    /// Limit in bytes for one tunnelled connection: data in one direction that the other end of the tunnel has not
    /// acknowledged yet.
    pub window: u64,
    /// Limit in bytes for all tunnelled connections together: data that the other ends of the tunnels have not
    /// acknowledged yet.
    pub memory: u64,
    /// Number of padding bytes that are sent on a new carrier so that its congestion window grows before it is used.
    pub warm: u64,
    /// Kinds of carriers that this host opens, in order of preference. It accepts carriers of all kinds from peers.
    pub carriers: Vec<CarrierKind>,
    /// Congestion control of QUIC carriers.
    pub quic: QuicCongestion,
    /// Limits of the pool of TCP, MPTCP or SCTP carriers to each peer.
    pub pool: PoolSettings,
}

/// Limits of the pool of TCP, MPTCP or SCTP connections to one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSettings {
    /// Number of idle connections that the pool keeps ready.
    pub warm: usize,
    /// Largest number of connections in the pool, including those in use.
    pub most: usize,
    /// Name of the congestion control in the kernel. `None` means BBR if the kernel has it.
    pub congestion: Option<String>,
}

impl CarrySettings {
    /// Reports whether this host makes or accepts carriers of this kind.
    pub fn has(&self, kind: CarrierKind) -> bool {
        self.carriers.contains(&kind)
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct RawCarry {
    /// Address and port at which this host accepts carriers that peers open, by UDP and TCP. Without it this host only
    /// opens carriers itself.
    listen: Option<String>,
    /// Largest number of tunnelled connections, 10,000 by default. Further connections are not tunnelled.
    connections: Option<usize>,
    /// Limit in KiB of a connection's data in one direction that the tunnel's other end has not acknowledged: 64 to
    /// 16384, and 4096 by default. A connection whose receiver reads slowly occupies this much memory.
    window_kib: Option<u32>,
    /// Memory in MiB for the data of all connections that the other ends of the tunnels have not acknowledged, 512 by
    /// default. With many connections, each may have less unacknowledged data, but at least 16 KiB.
    memory_mib: Option<u32>,
    /// KiB of padding that each end sends on a new carrier, so that its congestion window grows: 0 to 1024, and 256 by
    /// default.
    warm_kib: Option<u32>,
    /// Kinds of carrier in order of preference: `"quic"`, the default, `"tcp"`, `"mptcp"`, `"sctp"`.
    carrier: Option<Vec<CarrierKind>>,
    /// Number of idle connections that are kept ready for each peer, for carriers by TCP, MPTCP or SCTP: 4 by default.
    pool_warm: Option<u32>,
    /// Largest number of connections to one peer, for carriers by TCP, MPTCP or SCTP: 1000 by default.
    pool_most: Option<u32>,
    /// Congestion control of carriers by TCP, MPTCP or SCTP, by its name in the kernel. Default: BBR if the kernel has
    /// it.
    congestion: Option<String>,
    /// Congestion control of carriers by QUIC: `"bbr"`, the default, or `"cubic"`.
    quic_congestion: Option<QuicCongestion>,
}

impl RawCarry {
    pub fn checked(self) -> Result<CarrySettings, String> {
        const WINDOW_MAX_KIB: u32 = (WINDOW_MAX >> 10) as u32;
        const WARM_MAX_KIB: u32 = (WARM_MAX >> 10) as u32;
        let connections = self.connections.unwrap_or(CONNECTIONS);
        if !(1..=CONNECTIONS_MAX).contains(&connections) {
            return Err(format!("carry: connections is from 1 to {CONNECTIONS_MAX}"));
        }
        let within = |what: &str, value: u32, least: u32, most: u32| match value {
            value if (least..=most).contains(&value) => Ok(u64::from(value)),
            _ => Err(format!("carry: {what} is from {least} to {most}")),
        };
        let window = within("window-kib", self.window_kib.unwrap_or(WINDOW_KIB), 64, WINDOW_MAX_KIB)? << 10;
        let memory = within("memory-mib", self.memory_mib.unwrap_or(MEMORY_MIB), 1, MEMORY_MAX_MIB)? << 20;
        let warm = within("warm-kib", self.warm_kib.unwrap_or(WARM_KIB), 0, WARM_MAX_KIB)? << 10;
        let listen = self.listen.map(|text| address("carry: listen", &text)).transpose()?;
        let pool_warm = within("pool-warm", self.pool_warm.unwrap_or(POOL_WARM), 1, POOL_WARM_MAX)? as usize;
        let most = self.pool_most.unwrap_or(POOL_MOST);
        let most = within("pool-most", most, pool_warm as u32, CONNECTIONS_MAX as u32)? as usize;
        let carriers = carriers(self.carrier.unwrap_or_else(|| vec![CarrierKind::Quic]))?;
        let has_pools = carriers.iter().any(|kind| *kind != CarrierKind::Quic);
        if !has_pools && (self.pool_warm.is_some() || self.pool_most.is_some() || self.congestion.is_some()) {
            return Err(
                "carry: pool-warm, pool-most and congestion need carrier = \"tcp\", \"mptcp\" or \"sctp\""
                    .into(),
            );
        }
        if self.quic_congestion.is_some() && !carriers.contains(&CarrierKind::Quic) {
            return Err("carry: quic-congestion needs \"quic\" among the kinds of carrier".into());
        }
        if self.congestion.as_ref().is_some_and(|name| name.is_empty() || name.len() > CONGESTION_MAX) {
            return Err(format!("carry: congestion is a name of 1 to {CONGESTION_MAX} bytes"));
        }
        let pool = PoolSettings { warm: pool_warm, most, congestion: self.congestion };
        let quic = self.quic_congestion.unwrap_or_default();
        Ok(CarrySettings { listen, connections, window, memory, warm, carriers, quic, pool })
    }
}

fn carriers(kinds: Vec<CarrierKind>) -> Result<Vec<CarrierKind>, String> {
    if kinds.is_empty() {
        return Err("carry: carrier is empty: name \"quic\", \"tcp\", \"mptcp\", \"sctp\", or some of them"
            .to_owned());
    }
    let twice = |kind: &&CarrierKind| kinds.iter().filter(|it| it == kind).count() > 1;
    match kinds.iter().find(twice) {
        Some(kind) => Err(format!("carry: carrier names {kind} twice")),
        None => Ok(kinds),
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        Settings,
        settings::{CarrierKind, Connect, QuicCongestion, Tier},
    };

    const OURS: &str = "[agreement]\nkey = \"host.key\"\n[carry]\nlisten = \"0.0.0.0:9188\"\n";
    const RULE: &str = "[[rule]]\nname = \"web\"\nside = \"server\"\nport = 443\ntier = \"carried\"\n";

    fn peer(rest: &str) -> String {
        format!("[[peer]]\nname = \"b\"\nkey = \"{}\"\n{rest}\n", "ab".repeat(32))
    }

    #[test]
    fn carrier_settings_are_parsed() {
        let more = peer("carry = \"192.0.2.1:9188\"\naddresses = [\"2001:db8::1\"]");
        let settings = Settings::parse(&format!("{OURS}{RULE}{more}")).expect("settings");
        assert_eq!((settings.rules[0].tier, settings.rules[0].connect), (Tier::Carried, Connect::Early));
        let peer = settings.agreement.as_ref().and_then(|it| it.peer("b")).expect("a peer");
        let addresses: Vec<_> = peer.all_addresses().map(|it| it.to_string()).collect();
        assert_eq!(addresses, ["192.0.2.1", "2001:db8::1"]);
        let carry = settings.carry.expect("it carries");
        assert_eq!((carry.connections, carry.window, carry.memory), (10_000, 4 << 20, 512 << 20));
        assert_eq!((carry.warm, carry.carriers), (256 << 10, vec![CarrierKind::Quic]));
        assert_eq!(carry.quic, QuicCongestion::Bbr);
        let cubic = Settings::parse(&format!("{OURS}quic-congestion = \"cubic\"\n")).expect("settings");
        assert_eq!(cubic.carry.map(|it| it.quic), Some(QuicCongestion::Cubic));
        let named = Settings::parse(&format!("{OURS}{RULE}addresses = [\"127.0.0.1\"]\n")).expect("settings");
        assert_eq!(named.rules[0].addresses, ["127.0.0.1".parse::<std::net::IpAddr>().expect("an address")]);
        let strict = format!("{OURS}{}connect = \"strict\"\n", RULE.replace("\"server\"", "\"client\""));
        let settings = Settings::parse(&strict).expect("settings");
        assert!(settings.rules[0].connect == Connect::Strict);
        assert!(matches!(&settings.redirect_rules()[..], [rule] if rule.strict && !rule.in_place));
    }

    #[test]
    fn carrier_order_and_peer_addresses_are_read() {
        let more = "carrier = [\"mptcp\", \"quic\"]\npool-warm = 2\npool-most = 9\ncongestion = \"reno\"\n";
        let both = peer("carry = [\"192.0.2.1:9188\", \"[2001:db8::1]:9188\"]\naddresses = [\"192.0.2.1\"]");
        let settings = Settings::parse(&format!("{OURS}{more}{both}")).expect("settings");
        let carry = settings.carry.expect("it carries");
        assert_eq!(carry.carriers, [CarrierKind::Mptcp, CarrierKind::Quic]);
        assert!(carry.has(CarrierKind::Quic) && !carry.has(CarrierKind::Tcp));
        assert_eq!((carry.pool.warm, carry.pool.most), (2, 9));
        assert_eq!(carry.pool.congestion.as_deref(), Some("reno"));
        let peer = settings.agreement.as_ref().and_then(|it| it.peer("b")).expect("a peer");
        let addresses: Vec<_> = peer.all_addresses().map(|it| it.to_string()).collect();
        assert_eq!(
            (peer.carry.len(), addresses),
            (2, vec!["192.0.2.1".to_owned(), "2001:db8::1".to_owned()])
        );
        let one = Settings::parse(&format!("{OURS}carrier = \"tcp\"\n")).expect("settings").carry;
        assert_eq!(one.map(|it| (it.carriers, it.pool.warm)), Some((vec![CarrierKind::Tcp], 4)));
    }

    #[test]
    fn invalid_carriers_are_refused() {
        let table = [
            (RULE.to_owned(), "rule web: tier = \"carried\" needs [carry]"),
            ("[carry]\n".to_owned(), "[carry] needs an [agreement]"),
            (format!("{OURS}connections = 0\n"), "carry: connections is from 1"),
            (format!("{OURS}window-kib = 1\n"), "carry: window-kib is from 64"),
            (format!("{OURS}memory-mib = 0\n"), "carry: memory-mib is from 1"),
            (format!("{OURS}warm-kib = 2000\n"), "carry: warm-kib is from 0 to 1024"),
            (format!("{OURS}carrier = []\n"), "carry: carrier is empty"),
            (format!("{OURS}carrier = [\"tcp\", \"tcp\"]\n"), "carry: carrier names tcp twice"),
            (format!("{OURS}carrier = \"dccp\"\n"), "carrier"),
            (
                format!("{OURS}loopback = \"sockmap\"\n"),
                "loopback left Millrace: remove it, applications and the broker speak by TCP",
            ),
            (format!("{OURS}carrier = \"tcp\"\npool-warm = 0\n"), "carry: pool-warm is from 1 to 64"),
            (format!("{OURS}carrier = \"tcp\"\npool-most = 2\n"), "carry: pool-most is from 4"),
            (format!("{OURS}carrier = \"tcp\"\ncongestion = \"\"\n"), "carry: congestion is a name"),
            (format!("{OURS}congestion = \"bbr\"\n"), "congestion need carrier ="),
            (
                format!("{OURS}quic-congestion = \"reno\"\n"),
                "carry.quic-congestion: is \"bbr\" or \"cubic\", not \"reno\"",
            ),
            (format!("{OURS}carrier = \"tcp\"\nquic-congestion = \"bbr\"\n"), "quic-congestion needs"),
            (
                format!("{OURS}{}", peer("carry = [\"192.0.2.1:1\", \"192.0.2.1:1\"]")),
                "peer b: carry names 192.0.2.1:1 twice",
            ),
            (OURS.replace("9188", "0"), "carry: listen \"0.0.0.0:0\" is an address and a port"),
            (format!("{OURS}{}", peer("carry = \"b\"")), "peer b: carry \"b\" is an address"),
            (format!("{OURS}{}", peer("addresses = [\"b\"]")), "peer[0].addresses[0]: is an address"),
            (
                format!(
                    "{OURS}{}{}",
                    peer("addresses = [\"192.0.2.1\"]"),
                    peer("addresses = [\"192.0.2.1\"]").replace("\"b\"", "\"c\"").replace("ab", "cd")
                ),
                "peer c: another peer has the address 192.0.2.1",
            ),
            (
                format!("[agreement]\nkey = \"k\"\n{}", peer("carry = \"192.0.2.1:1\"")),
                "peer b: carry needs [carry]",
            ),
            (
                format!("{OURS}[[rule]]\nname = \"a\"\nside = \"client\"\nport = 1\ntier = \"high\"\n"),
                "not \"high\"",
            ),
            (
                format!("{OURS}{RULE}connect = \"strict\"\n"),
                "rule web: connect needs side = \"client\" and tier",
            ),
            (
                format!("{OURS}{}addresses = [\"127.0.0.1\"]\n", RULE.replace("\"server\"", "\"client\"")),
                "rule web: addresses needs side = \"server\" and tier",
            ),
            (format!("{OURS}{RULE}addresses = [\"lo\"]\n"), "rule[0].addresses[0]: is an address"),
            (
                "[[rule]]\nname = \"a\"\nside = \"client\"\nport = 1\nconnect = \"early\"\n".to_owned(),
                "rule a: connect needs",
            ),
        ];
        let said =
            table.map(|(text, wanted)| (wanted, Settings::parse(&text).expect_err(wanted).to_string()));
        let others: Vec<_> = said.iter().filter(|(wanted, error)| !error.contains(wanted)).collect();
        assert!(others.is_empty(), "{others:#?}");
    }
}
