//! Settings of the gateway: carriers for connections of hosts behind this host.

use millrace_graft_kernel::{covers, gateway::PREFIXES};
use millrace_kernel::prefix::Prefix;
use serde::Deserialize;

/// Limit of interfaces of a gateway.
const INTERFACES_MAX: usize = 64;
/// Longest name of an interface in the kernel, in bytes.
const NAME_MAX: usize = 15;

/// The settings for connections of hosts behind this gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewaySettings {
    /// Interfaces through which hosts behind the gateway are reached. The command line may name more.
    pub interfaces: Vec<String>,
    /// Networks of the hosts behind the gateway.
    pub networks: Vec<Prefix>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct RawGateway {
    /// Interfaces through which hosts behind this gateway are reached. A bridge or VLAN is named by its own interface,
    /// and not by its ports.
    #[serde(default)]
    interface: Vec<String>,
    /// Networks of the hosts behind this gateway. Connections of their clients are tunnelled, and peers may connect to
    /// their servers on the ports of rules with `side = "server"`.
    #[serde(default)]
    networks: Vec<String>,
}

impl RawGateway {
    pub(super) fn checked(self) -> Result<GatewaySettings, String> {
        let networks = networks(&self.networks).map_err(|error| format!("gateway: {error}"))?;
        if networks.is_empty() {
            return Err(
                "gateway: networks has to name the networks behind it, such as [\"192.0.2.0/24\"]".to_owned()
            );
        }
        let mut gateway = GatewaySettings { interfaces: Vec::new(), networks };
        gateway.add(&self.interface)?;
        Ok(gateway)
    }
}

impl GatewaySettings {
    pub(super) fn add(&mut self, interfaces: &[String]) -> Result<(), String> {
        for name in interfaces {
            if name.is_empty() || name.len() > NAME_MAX || name == "lo" {
                return Err(format!("gateway: {name:?} is no interface that other hosts are reached by"));
            }
            if !self.interfaces.contains(name) {
                self.interfaces.push(name.clone());
            }
        }
        match self.interfaces.len() > INTERFACES_MAX {
            true => Err(format!("gateway: interface names more than {INTERFACES_MAX} interfaces")),
            false => Ok(()),
        }
    }
}

pub(super) fn networks(texts: &[String]) -> Result<Vec<Prefix>, String> {
    let mut all: Vec<Prefix> = Vec::new();
    for text in texts {
        let network: Prefix = text.parse().map_err(|error| format!("networks: {error}"))?;
        if network.bits() == 0 {
            return Err(format!("networks: {network} is everybody: name the networks that are behind it"));
        }
        if let Some(other) = all.iter().find(|other| overlap(**other, network)) {
            return Err(format!("networks: {network} and {other} have addresses in common"));
        }
        all.push(network);
    }
    match all.len() > PREFIXES / 2 {
        true => Err(format!("networks: there are more than {}", PREFIXES / 2)),
        false => Ok(all),
    }
}

pub(super) fn overlap(one: Prefix, other: Prefix) -> bool {
    one.address().is_ipv4() == other.address().is_ipv4()
        && (covers(one, other.address()) || covers(other, one.address()))
}

#[cfg(test)]
mod tests {
    use crate::Settings;

    const CARRY: &str = "[agreement]\nkey = \"host.key\"\n[carry]\nlisten = \"0.0.0.0:9188\"\n";
    const GATEWAY: &str = "[gateway]\ninterface = \"lan0\"\nnetworks = [\"10.1.0.0/16\", \"fd01::/64\"]\n";

    fn peer(name: char, rest: &str) -> String {
        format!("[[peer]]\nname = \"{name}\"\nkey = \"{}\"\n{rest}\n", format!("{name}0").repeat(32))
    }

    #[test]
    fn gateway_settings_are_read() {
        let text = format!("{CARRY}{GATEWAY}{}", peer('a', "networks = [\"198.51.100.7/24\"]"));
        let mut settings = Settings::parse(&text).expect("settings");
        settings.add_gateway_interfaces(&["wifi0".to_owned(), "lan0".to_owned()]).expect("interfaces");
        let gateway = settings.gateway.expect("a gateway");
        assert_eq!(gateway.interfaces, ["lan0", "wifi0"]);
        let all: Vec<_> = gateway.networks.iter().map(ToString::to_string).collect();
        assert_eq!(all, ["10.1.0.0/16", "fd01::/64"]);
        let peer = &settings.agreement.expect("an agreement").peers[0];
        assert!(peer.has_behind("198.51.100.200".parse().expect("an address")));
        assert!(!peer.has_behind("198.51.101.1".parse().expect("an address")));
    }

    #[test]
    fn invalid_gateways_are_refused() {
        let all = |more: &str| format!("{CARRY}{GATEWAY}{more}");
        let table = [
            (GATEWAY.to_owned(), "[gateway] needs [carry]"),
            (
                all("").replace("\"10.1.0.0/16\", \"fd01::/64\"", ""),
                "gateway: networks has to name the networks behind",
            ),
            (
                all("").replace("10.1.0.0/16", "10.1.0.0/33"),
                "gateway: networks: \"10.1.0.0/33\" is no address",
            ),
            (
                all("").replace("fd01::/64", "10.0.0.0/8"),
                "10.0.0.0/8 and 10.1.0.0/16 have addresses in common",
            ),
            (all("").replace("10.1.0.0/16", "0.0.0.0/0"), "0.0.0.0/0 is everybody"),
            (all("").replace("lan0", "lo"), "\"lo\" is no interface that other hosts"),
            (all("").replace("lan0", "an-interface-that-is-long"), "is no interface"),
            (
                all("").replace("interface", "interfaces"),
                "gateway.interfaces: unknown key; did you mean `interface`?",
            ),
            (all(&peer('a', "networks = [\"10.1.2.0/24\"]")), "peer a: 10.1.2.0/24 is also behind this host"),
            (
                all(&(peer('a', "networks = [\"10.2.0.0/16\"]") + &peer('b', "networks = [\"10.2.2.0/24\"]"))),
                "peer b: 10.2.2.0/24 is also behind peer a",
            ),
            (all(&peer('a', "networks = [\"::/0\"]")), "peer a: networks: ::/0 is everybody"),
        ];
        for (text, wanted) in table {
            let error = Settings::parse(&text).expect_err(wanted).to_string();
            assert!(error.contains(wanted), "{text}: {error}");
        }
        let mut without = Settings::parse(CARRY).expect("settings");
        let error = without.add_gateway_interfaces(&["lan0".to_owned()]).expect_err("no gateway").to_string();
        assert!(error.contains("needs [gateway] with networks"), "{error}");
        let nowhere = GATEWAY.replace("interface = \"lan0\"\n", "");
        let mut nowhere = Settings::parse(&format!("{CARRY}{nowhere}")).expect("settings");
        let error = nowhere.add_gateway_interfaces(&[]).expect_err("no interface").to_string();
        assert!(error.contains("gateway: neither interface nor --interface"), "{error}");
    }
}
