//! Two hosts whose daemons tunnel connections between them, and a third host that is no peer of theirs (the stranger).
//! Two routes join the two hosts: a direct link, and one through the third host.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::FaultedCarrier;
use crate::bench::graft::host::{GraftHost, wait};
use crate::bench::process::BenchProcess;
use crate::bench::site::{BenchSite, SUBSCRIBERS_LINK};
use crate::lab::{LabNode, Topology};
use crate::program::product;

pub const CARRIERS: u16 = 9188;
pub const PORT: u16 = 7100;
/// Name of the link that is part of the route through the third host.
pub const DETOUR: &str = "pub-sub1";

/// Returns the topology of a [`FaultPair`]. `offloads` must be on behind a NAT: without offloads the kernel does not
/// repair the checksums of batched datagrams whose ports a NAT has changed.
pub fn topology(offloads: bool) -> Topology {
    let mut topology = Topology::standard(1, 1);
    topology.offloads = offloads;
    topology.connect("pub", "sub1");
    topology
}

pub struct FaultPair<'a> {
    pub client: GraftHost<'a>,
    pub server: GraftHost<'a>,
    pub stranger: &'a LabNode,
    /// Public keys of the client and the server.
    keys: [String; 2],
}

/// Settings of the two hosts' daemons that differ from the fault benchmark's default settings.
pub struct Setting<'a> {
    pub kinds: &'a [FaultedCarrier],
    /// Additional lines of the section `[carry]` in the settings of the client's daemon.
    pub more: &'a str,
    /// Server addresses that the client's tunnel connections (carriers) are made to. If empty, it is the server's
    /// address on the direct link.
    pub carry: Vec<SocketAddr>,
    /// Public key that the client expects of the server; `None`: the server's real key.
    pub key: Option<&'a str>,
    /// Port whose connections are not tunnelled. Both hosts agree on a graft for them by TCP options.
    pub in_place: Option<u16>,
}

impl<'a> Setting<'a> {
    pub fn from_kinds(kinds: &'a [FaultedCarrier]) -> Self {
        Self { kinds, more: "", carry: Vec::new(), key: None, in_place: None }
    }
}

impl<'a> FaultPair<'a> {
    pub fn new(site: &'a BenchSite, setting: &Setting<'_>) -> anyhow::Result<Self> {
        let host = |name, node| GraftHost::new(name, node, &site.directory().join(name));
        let client = host("client", site.subscribers()?)?;
        let server = host("server", site.relay()?)?;
        let keys = [client.key()?, server.key()?];
        let pair = Self { client, server, stranger: site.node("pub")?, keys };
        pair.configure(setting, 0)?;
        Ok(pair)
    }

    /// Returns the server's address on the direct link.
    pub fn address(&self) -> anyhow::Result<IpAddr> {
        address(self.server.node, SUBSCRIBERS_LINK)
    }

    /// Returns the server's address on the route through the third host.
    pub fn other_address(&self) -> anyhow::Result<IpAddr> {
        address(self.server.node, crate::bench::site::PUBLISHER_LINK)
    }

    pub fn at(&self, port: u16) -> anyhow::Result<SocketAddr> {
        Ok(SocketAddr::new(self.address()?, port))
    }

    /// Configures both hosts. The number `turn` becomes a part of the peers' settings. If it differs from the previous
    /// call's, the daemons set up their tunnel again.
    pub fn configure(&self, setting: &Setting<'_>, turn: usize) -> anyhow::Result<()> {
        self.configure_client(setting, turn)?;
        self.configure_server(setting, turn)
    }

    pub fn configure_client(&self, setting: &Setting<'_>, turn: usize) -> anyhow::Result<()> {
        let carry = match setting.carry.as_slice() {
            [] => vec![self.at(CARRIERS)?],
            carry => carry.to_vec(),
        };
        let [_, key] = &self.keys;
        let key = setting.key.unwrap_or(key);
        self.client.configure(&format!(
            "[agreement]\nkey = \"host.key\"\n[carry]\ncarrier = {}\n{}\n[[peer]]\nname = \"server\"\nkey = \"{key}\"\ncarry = {}\n\
             addresses = [\"{}\"]\nmin-cpus = {turn}\n{}",
            list(setting.kinds.iter().map(|kind| kind.name())),
            setting.more,
            list(carry),
            self.address()?,
            rules("client", setting),
        ))
    }

    pub fn configure_server(&self, setting: &Setting<'_>, turn: usize) -> anyhow::Result<()> {
        let [key, _] = &self.keys;
        // The client may connect from any of its addresses, so the server's settings list all of them.
        let addresses = self.client.node.interfaces().iter().map(|interface| interface.v4);
        // The server accepts tunnel connections (carriers) on all of its addresses.
        self.server.configure(&format!(
            "[agreement]\nkey = \"host.key\"\n[carry]\ncarrier = {}\nlisten = \"0.0.0.0:{CARRIERS}\"\n[[peer]]\nname = \"client\"\n\
             key = \"{key}\"\naddresses = {}\nmin-cpus = {turn}\n{}",
            list(setting.kinds.iter().map(|kind| kind.name())),
            list(addresses),
            rules("server", setting),
        ))
    }

    /// Starts the daemons, the server's first, and waits until the tunnel is warm, that is, ready for connections.
    pub fn start(&self) -> anyhow::Result<[BenchProcess; 2]> {
        // The client connects as soon as it starts, so the server's daemon must listen already.
        let far = self.server.start()?;
        let near = self.client.start()?;
        self.wait_warm()?;
        Ok([near, far])
    }

    /// Waits until a tunnel connection (carrier) is warm, that is, ready for connections. Returns how long that took.
    pub fn wait_warm(&self) -> anyhow::Result<Duration> {
        self.wait("a warm carrier", || Ok(self.state()? == "warm"))
    }

    /// Returns the state of the tunnel connection (carrier) that the client's daemon uses now.
    pub fn state(&self) -> anyhow::Result<String> {
        self.carrier(0, "state")?.context("the daemon's status has no carriers")
    }

    pub fn kind(&self) -> anyhow::Result<String> {
        Ok(self.carrier(0, "carrier")?.unwrap_or_default())
    }

    /// Returns a field of one of the client daemon's tunnel connections (carriers), from its status. The first of them
    /// is the one in use.
    pub fn carrier(&self, at: usize, what: &str) -> anyhow::Result<Option<String>> {
        let status = self.client.status()?;
        let said = status.pointer(&format!("/status/carry/carriers/{at}/{what}")).and_then(Value::as_str);
        Ok(said.map(str::to_owned))
    }

    /// Waits until no connection is tunnelled any more.
    pub fn wait_for_end(&self) -> anyhow::Result<Duration> {
        self.wait("the end of all connections", || {
            Ok(count(&self.client, "connections")? + count(&self.server, "connections")? == 0)
        })
    }

    pub fn wait(&self, what: &str, ready: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<Duration> {
        let said = wait(what, ready);
        // If the wait ends with a time-out, the error text contains the status of the client's daemon.
        said.with_context(|| self.client.status().map_or_else(|error| error.to_string(), |it| it.to_string()))
    }
}

/// Returns the counter `what` of tunnelled connections from a host's status.
pub fn count(host: &GraftHost<'_>, what: &str) -> anyhow::Result<u64> {
    let status = host.status()?;
    Ok(status.pointer(&format!("/status/carry/{what}")).and_then(Value::as_u64).unwrap_or_default())
}

/// Returns how many bytes the client's daemon has read from and written to applications.
pub fn moved(pair: &FaultPair<'_>) -> anyhow::Result<u64> {
    Ok(count(&pair.client, "sent_bytes")? + count(&pair.client, "received_bytes")?)
}

/// Waits until `bytes` more bytes have been tunnelled.
pub fn flowing(pair: &FaultPair<'_>, bytes: u64) -> anyhow::Result<()> {
    let before = moved(pair)?;
    pair.wait("tunnelled bytes", || Ok(moved(pair)? >= before + bytes)).map(drop)
}

/// Returns the counters of a host that an operator would check, by name, without those that are 0.
pub fn counted(host: &GraftHost<'_>) -> anyhow::Result<BTreeMap<String, u64>> {
    let status = host.status()?;
    let carry = status.pointer("/status/carry").context("the daemon's status has no section `carry`")?;
    let numbers = |value: &Value| {
        let pairs = value.as_object().into_iter().flatten();
        pairs.filter_map(|(name, count)| Some((name.clone(), count.as_u64()?))).collect::<Vec<_>>()
    };
    let mut all: BTreeMap<_, _> =
        numbers(&carry["ended"]).into_iter().chain(numbers(&carry["verdicts"])).collect();
    all.insert("resumed".to_owned(), carry["resumed"].as_u64().unwrap_or_default());
    all.retain(|_, count| *count > 0);
    Ok(all)
}

pub fn address(node: &LabNode, link: &str) -> anyhow::Result<IpAddr> {
    let interface = node
        .interface(link)
        .with_context(|| format!("{} has no interface on the link {link}", node.name()))?;
    Ok(interface.v4.into())
}

fn list(items: impl IntoIterator<Item = impl std::fmt::Display>) -> String {
    let items: Vec<_> = items.into_iter().map(|item| format!("\"{item}\"")).collect();
    format!("[{}]", items.join(", "))
}

fn rules(side: &str, setting: &Setting<'_>) -> String {
    let in_place = setting.in_place.map(|port| {
        format!("[[rule]]\nname = \"in-place\"\nside = \"{side}\"\nport = {port}\nagree = true\ncongestion = \"reno\"\n")
    });
    let carried = format!(
        "[[rule]]\nname = \"{side}\"\nside = \"{side}\"\nport = {PORT}\ntier = \"carried\"\nagree = false\n"
    );
    carried + &in_place.unwrap_or_default()
}

/// Runs a program on a host. Fails if the program fails.
pub fn run(node: &LabNode, program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let output = node.command(program).args(arguments).output().with_context(|| program.to_owned())?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {}", arguments.join(" "), errors.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A middlebox: nftables rules on a host, which are removed when this is dropped.
pub struct Middlebox<'a>(&'a LabNode);

impl<'a> Middlebox<'a> {
    /// Adds rules for incoming (`prerouting`) or outgoing (`postrouting`) packets.
    pub fn new(node: &'a LabNode, rules: &[(&str, String)]) -> anyhow::Result<Self> {
        let nft = |line: &str| run(node, "nft", &[line]);
        nft("add table inet faults")?;
        let it = Self(node);
        for hook in ["prerouting", "postrouting"] {
            // A hook with priority -300 runs before connection tracking and NAT.
            nft(&format!("add chain inet faults {hook} {{ type filter hook {hook} priority -300; }}"))?;
        }
        for (hook, rule) in rules {
            nft(&format!("add rule inet faults {hook} {rule}"))?;
        }
        Ok(it)
    }
}

impl Drop for Middlebox<'_> {
    fn drop(&mut self) {
        let _ = run(self.0, "nft", &["delete table inet faults"]);
    }
}

/// Copies the program to another file, which the test uses as if it were another build.
pub fn another_build(directory: &Path) -> anyhow::Result<std::path::PathBuf> {
    let path = directory.join("millrace-other");
    std::fs::copy(product()?, &path)?;
    Ok(path)
}
