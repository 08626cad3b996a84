//! What this host carries for applications.

use std::net::SocketAddr;

use millrace_proto::graft::carry::{WARM_MAX, WINDOW_MAX};
use serde::Deserialize;

use super::agreement::address;

const CONNECTIONS: usize = 10_000;
const CONNECTIONS_MAX: usize = 60_000;
const WINDOW_KIB: u32 = 4096;
const MEMORY_MIB: u32 = 512;
const WARM_KIB: u32 = 256;
const MEMORY_MAX_MIB: u32 = 1 << 20;

/// Whether a rule's connections are carried where they can be.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Tier {
    #[default]
    InPlace,
    Carried,
}

/// When an application hears that its carried connection is there.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Connect {
    /// At once: its first bytes travel with the opening.
    #[default]
    Early,
    /// When the server has said so.
    Strict,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carry {
    /// Where peers' carriers come in; `None`: this host only calls.
    pub listen: Option<SocketAddr>,
    /// At once.
    pub connections: usize,
    /// Unconfirmed bytes of one connection, in one direction.
    pub window: u64,
    /// For the unconfirmed bytes of all of them.
    pub memory: u64,
    /// Bytes of no connection, with which a new carrier's window is opened.
    pub warm: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Raw {
    listen: Option<String>,
    connections: Option<usize>,
    window_kib: Option<u32>,
    memory_mib: Option<u32>,
    warm_kib: Option<u32>,
}

impl Raw {
    pub fn checked(self) -> Result<Carry, String> {
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
        Ok(Carry { listen, connections, window, memory, warm })
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        Settings,
        settings::{Connect, Tier},
    };

    const OURS: &str = "[agreement]\nkey = \"host.key\"\n[carry]\nlisten = \"0.0.0.0:9188\"\n";
    const RULE: &str = "[[rule]]\nname = \"web\"\nside = \"server\"\nport = 443\ntier = \"carried\"\n";

    fn peer(rest: &str) -> String {
        format!("[[peer]]\nname = \"b\"\nkey = \"{}\"\n{rest}\n", "ab".repeat(32))
    }

    #[test]
    fn what_is_carried_is_read() {
        let more = peer("carry = \"192.0.2.1:9188\"\naddresses = [\"2001:db8::1\"]");
        let settings = Settings::parse(&format!("{OURS}{RULE}{more}")).expect("settings");
        assert_eq!((settings.rules[0].tier, settings.rules[0].connect), (Tier::Carried, Connect::Early));
        let peer = settings.agreement.as_ref().and_then(|it| it.peer("b")).expect("a peer");
        let addresses: Vec<_> = peer.all_addresses().map(|it| it.to_string()).collect();
        assert_eq!(addresses, ["192.0.2.1", "2001:db8::1"]);
        let carry = settings.carry.expect("it carries");
        assert_eq!((carry.connections, carry.window, carry.memory), (10_000, 4 << 20, 512 << 20));
        assert_eq!(carry.warm, 256 << 10);
        let strict = format!("{OURS}{}connect = \"strict\"\n", RULE.replace("\"server\"", "\"client\""));
        let rule = &Settings::parse(&strict).expect("settings").rules[0];
        assert!(rule.connect == Connect::Strict && rule.leads().all(|lead| lead.strict));
    }

    #[test]
    fn what_is_wrong_is_said() {
        let table = [
            (RULE.to_owned(), "rule web: tier = \"carried\" wants [carry]"),
            ("[carry]\n".to_owned(), "[carry] wants an [agreement]"),
            (format!("{OURS}connections = 0\n"), "carry: connections is from 1"),
            (format!("{OURS}window-kib = 1\n"), "carry: window-kib is from 64"),
            (format!("{OURS}memory-mib = 0\n"), "carry: memory-mib is from 1"),
            (format!("{OURS}warm-kib = 2000\n"), "carry: warm-kib is from 0 to 1024"),
            (OURS.replace("9188", "0"), "carry: listen \"0.0.0.0:0\" is an address and a port"),
            (format!("{OURS}{}", peer("carry = \"b\"")), "peer b: carry \"b\" is an address"),
            (format!("{OURS}{}", peer("addresses = [\"b\"]")), "invalid IP address"),
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
                "peer b: carry wants [carry]",
            ),
            (
                format!("{OURS}[[rule]]\nname = \"a\"\nside = \"client\"\nport = 1\ntier = \"high\"\n"),
                "unknown variant `high`",
            ),
            (
                format!("{OURS}{RULE}connect = \"strict\"\n"),
                "rule web: connect wants side = \"client\" and tier",
            ),
            (
                "[[rule]]\nname = \"a\"\nside = \"client\"\nport = 1\nconnect = \"early\"\n".to_owned(),
                "rule a: connect wants",
            ),
        ];
        for (text, wanted) in table {
            let error = Settings::parse(&text).expect_err(wanted).to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}
