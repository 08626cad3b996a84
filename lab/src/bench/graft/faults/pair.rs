//! Two hosts with daemons, between which connections are carried, and a third that is a stranger to both. There are two ways from the one to the other: a link, and
//! by the stranger.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::Kind;
use crate::bench::graft::host::{Host, wait};
use crate::bench::process::Process;
use crate::bench::site::{SUBSCRIBERS_LINK, Site};
use crate::lab::{Node, Topology};
use crate::program::product;

pub const CARRIERS: u16 = 9188;
pub const PORT: u16 = 7100;
/// Of the other way, which the stranger forwards.
pub const DETOUR: &str = "pub-sub1";

/// What [`Pair`] is made in. Without offloads the kernel does not mend the checksums of datagrams sent at once whose ports a translator has changed.
pub fn topology(offloads: bool) -> Topology {
    let mut topology = Topology::standard(1, 1);
    topology.offloads = offloads;
    topology.connect("pub", "sub1");
    topology
}

pub struct Pair<'a> {
    pub client: Host<'a>,
    pub server: Host<'a>,
    pub stranger: &'a Node,
    /// What the client's and the server's key are known by.
    keys: [String; 2],
}

/// What is not as it usually is.
pub struct Setting<'a> {
    pub kinds: &'a [Kind],
    /// Of `[carry]` at the client's end.
    pub more: &'a str,
    /// Where the server's broker is called; without, at its address on the link.
    pub carry: Vec<SocketAddr>,
    /// What the server's key is said to be, if not what it is.
    pub key: Option<&'a str>,
    /// A port whose connections are not carried, and of which both ends agree by options of TCP.
    pub in_place: Option<u16>,
}

impl<'a> Setting<'a> {
    pub fn of(kinds: &'a [Kind]) -> Self {
        Self { kinds, more: "", carry: Vec::new(), key: None, in_place: None }
    }
}

impl<'a> Pair<'a> {
    pub fn new(site: &'a Site, setting: &Setting<'_>) -> anyhow::Result<Self> {
        let host = |name, node| Host::new(name, node, &site.directory().join(name));
        let (client, server) = (host("client", site.subscribers()?)?, host("server", site.relay()?)?);
        let keys = [client.key()?, server.key()?];
        let pair = Self { client, server, stranger: site.node("pub")?, keys };
        pair.configure(setting, 0)?;
        Ok(pair)
    }

    /// The server's, on the link.
    pub fn address(&self) -> anyhow::Result<IpAddr> {
        address(self.server.node, SUBSCRIBERS_LINK)
    }

    /// The server's other one.
    pub fn other_address(&self) -> anyhow::Result<IpAddr> {
        address(self.server.node, crate::bench::site::PUBLISHER_LINK)
    }

    pub fn at(&self, port: u16) -> anyhow::Result<SocketAddr> {
        Ok(SocketAddr::new(self.address()?, port))
    }

    /// With another `turn`, peers' entries are others, and carriers to them are made anew.
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
        let addresses = self.client.node.interfaces().iter().map(|interface| interface.v4);
        // By any of its addresses.
        self.server.configure(&format!(
            "[agreement]\nkey = \"host.key\"\n[carry]\ncarrier = {}\nlisten = \"0.0.0.0:{CARRIERS}\"\n[[peer]]\nname = \"client\"\n\
             key = \"{key}\"\naddresses = {}\nmin-cpus = {turn}\n{}",
            list(setting.kinds.iter().map(|kind| kind.name())),
            list(addresses),
            rules("server", setting),
        ))
    }

    /// Both daemons, the client's first, with a warm carrier.
    pub fn start(&self) -> anyhow::Result<[Process; 2]> {
        let far = self.server.start()?;
        let near = self.client.start()?;
        self.wait_warm()?;
        Ok([near, far])
    }

    /// How long that took.
    pub fn wait_warm(&self) -> anyhow::Result<Duration> {
        self.wait("a warm carrier", || Ok(self.state()? == "warm"))
    }

    /// Of the carrier that is used.
    pub fn state(&self) -> anyhow::Result<String> {
        self.carrier(0, "state")?.context("no carriers in the status")
    }

    pub fn kind(&self) -> anyhow::Result<String> {
        Ok(self.carrier(0, "carrier")?.unwrap_or_default())
    }

    /// What the client's status says of one of its carriers: that which is used is the first.
    pub fn carrier(&self, at: usize, what: &str) -> anyhow::Result<Option<String>> {
        let status = self.client.status()?;
        let said = status.pointer(&format!("/status/carry/carriers/{at}/{what}")).and_then(Value::as_str);
        Ok(said.map(str::to_owned))
    }

    /// Nothing is carried any more.
    pub fn wait_for_end(&self) -> anyhow::Result<Duration> {
        self.wait("the end", || {
            Ok(count(&self.client, "connections")? + count(&self.server, "connections")? == 0)
        })
    }

    pub fn wait(&self, what: &str, ready: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<Duration> {
        let said = wait(what, ready);
        said.with_context(|| self.client.status().map_or_else(|error| error.to_string(), |it| it.to_string()))
    }
}

/// Of what is carried.
pub fn count(host: &Host<'_>, what: &str) -> anyhow::Result<u64> {
    let status = host.status()?;
    Ok(status.pointer(&format!("/status/carry/{what}")).and_then(Value::as_u64).unwrap_or_default())
}

/// What the client's daemon has read of applications and given to them.
pub fn moved(pair: &Pair<'_>) -> anyhow::Result<u64> {
    Ok(count(&pair.client, "sent_bytes")? + count(&pair.client, "received_bytes")?)
}

/// Until so many more bytes have been carried.
pub fn flowing(pair: &Pair<'_>, bytes: u64) -> anyhow::Result<()> {
    let before = moved(pair)?;
    pair.wait("traffic", || Ok(moved(pair)? >= before + bytes)).map(drop)
}

/// What became of connections, and other things that an operator would look at; nothing that is zero.
pub fn counted(host: &Host<'_>) -> anyhow::Result<BTreeMap<String, u64>> {
    let status = host.status()?;
    let carry = status.pointer("/status/carry").context("no carry in the status")?;
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

pub fn address(node: &Node, link: &str) -> anyhow::Result<IpAddr> {
    let interface = node.interface(link).with_context(|| format!("{} is not on {link}", node.name()))?;
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

/// A program on a host, which has to succeed.
pub fn run(node: &Node, program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let output = node.command(program).args(arguments).output().with_context(|| program.to_owned())?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {}", arguments.join(" "), errors.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Rules of nftables on a host, until it is dropped: what stands between it and others.
pub struct Middlebox<'a>(&'a Node);

impl<'a> Middlebox<'a> {
    /// Of what comes (`prerouting`) or goes (`postrouting`).
    pub fn new(node: &'a Node, rules: &[(&str, String)]) -> anyhow::Result<Self> {
        let nft = |line: &str| run(node, "nft", &[line]);
        nft("add table inet faults")?;
        let it = Self(node);
        for hook in ["prerouting", "postrouting"] {
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

/// The program itself, as another file.
pub fn another_build(directory: &Path) -> anyhow::Result<std::path::PathBuf> {
    let path = directory.join("millrace-other");
    std::fs::copy(product()?, &path)?;
    Ok(path)
}
