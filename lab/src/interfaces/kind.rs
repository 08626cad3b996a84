//! The kinds of interfaces that the relay is tested with, and how each is created.

use std::os::fd::OwnedFd;
use std::process::Command;

use anyhow::{Context as _, anyhow};

use super::shuttle::{self, Shuttle};
use crate::bench::device;
use crate::lab::{Lab, LabNode};

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum InterfaceKind {
    /// veth, as containers use it
    Veth,
    /// veth with an MTU of 9,000
    Jumbo,
    /// Bridge with a veth port
    Bridge,
    /// macvlan on a veth
    Macvlan,
    /// TAP device, as virtual machines use it
    Tap,
    /// TUN device, which has no link-layer header
    Tun,
    /// VLAN
    Vlan,
    /// VLAN in a VLAN (802.1ad)
    Qinq,
    /// Bond with one link
    Bond,
}

/// The two links of the relay: the lab's name of the link, the node at its other end, and the final name of the relay's
/// interface.
const LINKS: [(&str, &str, &str); 2] = [("pub-relay", "pub", "if-pub"), ("relay-sub1", "sub1", "if-sub")];

/// The interfaces that were created in a lab.
pub struct LabInterfaces {
    /// Names of the relay's interfaces.
    pub interfaces: Vec<String>,
    /// Threads that pass frames between TAP devices.
    _shuttles: Vec<Shuttle>,
}

impl InterfaceKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Veth => "veth",
            Self::Jumbo => "veth, MTU 9000",
            Self::Bridge => "bridge",
            Self::Macvlan => "macvlan",
            Self::Tap => "tap",
            Self::Tun => "tun",
            Self::Vlan => "vlan",
            Self::Qinq => "qinq",
            Self::Bond => "bond",
        }
    }

    pub fn mtu(self) -> u32 {
        if self == Self::Jumbo { 9000 } else { 1500 }
    }

    /// Returns what the running kernel lacks for this kind, if anything. To find out, a device is created in `node` and
    /// removed again.
    pub fn missing(self, node: &LabNode) -> Option<String> {
        let probe = match self {
            Self::Veth | Self::Jumbo | Self::Tap | Self::Tun => return None,
            Self::Bridge => "link add probe type bridge",
            Self::Macvlan => "link add link lo name probe type macvlan",
            Self::Vlan => "link add link lo name probe type vlan id 7",
            Self::Qinq => "link add link lo name probe type vlan proto 802.1ad id 7",
            Self::Bond => "link add probe type bond",
        };
        let missing = ip(node, probe).err().map(|error| error.to_string());
        let _ = ip(node, "link del probe"); // fails if the device was not created
        // The loopback interface accepts no macvlan and no VLAN. The kernel reports that with another error than an
        // unknown type.
        missing.filter(|error| error.contains("Unknown device type"))
    }

    /// Replaces a lab's veth links by interfaces of this kind.
    pub fn make(self, lab: &Lab, offloads: bool) -> anyhow::Result<LabInterfaces> {
        let relay = lab.node("relay")?;
        let mut made = LabInterfaces::new();
        for (link, far, name) in LINKS {
            let far = lab.node(far)?;
            let own = device(relay, link)?;
            let other = device(far, link)?;
            if !matches!(self, Self::Veth | Self::Jumbo) {
                // The lab's permanent neighbour entries have the link-layer addresses of the replaced interfaces, so
                // they are removed.
                ip(relay, &format!("neighbour flush dev {own} nud permanent"))?;
                ip(far, &format!("neighbour flush dev {other} nud permanent"))?;
            }
            match self {
                Self::Veth | Self::Jumbo => {}
                Self::Bridge | Self::Bond => {
                    let options = if self == Self::Bond { " mode active-backup miimon 50" } else { "" };
                    ip(relay, &format!("link add {name} type {self}{options}"))?;
                    ip(relay, &format!("link set {own} down"))?;
                    ip(relay, &format!("link set {own} master {name}"))?;
                    ip(relay, &format!("link set {own} up"))?;
                    take_over(relay, link, &own, name)?;
                }
                Self::Macvlan => {
                    // Without this sysctl, the interface below the macvlan would also answer ARP requests for the
                    // address, and get its packets.
                    run(relay, "sysctl", "-qw net.ipv4.conf.all.arp_ignore=1")?;
                    ip(relay, &format!("link add link {own} name {name} type macvlan mode bridge"))?;
                    take_over(relay, link, &own, name)?;
                }
                Self::Vlan | Self::Qinq => {
                    for (node, device) in [(relay, &own), (far, &other)] {
                        let lower = if self == Self::Qinq { "outer" } else { device.as_str() };
                        let outer = format!("{lower}-{name}");
                        if self == Self::Qinq {
                            ip(
                                node,
                                &format!("link add link {device} name {outer} type vlan proto 802.1ad id 7"),
                            )?;
                            ip(node, &format!("link set {outer} up"))?;
                        }
                        let lower = if self == Self::Qinq { &outer } else { device };
                        ip(node, &format!("link add link {lower} name {name} type vlan id 8"))?;
                        take_over(node, link, device, name)?;
                    }
                }
                Self::Tap | Self::Tun => {
                    let open = |node: &LabNode| -> anyhow::Result<OwnedFd> {
                        Ok(node.enter(|| shuttle::open(name, self == Self::Tun, offloads))??)
                    };
                    made._shuttles.push(Shuttle::start(open(relay)?, open(far)?)?);
                    take_over(relay, link, &own, name)?;
                    take_over(far, link, &other, name)?;
                }
            }
            made.interfaces.push(if matches!(self, Self::Veth | Self::Jumbo) { own } else { name.into() });
        }
        self.route(lab)?;
        Ok(made)
    }

    /// Restores the routes that the kernel removed when the relay's addresses moved to the created interfaces.
    fn route(self, lab: &Lab) -> anyhow::Result<()> {
        let relay = lab.node("relay")?;
        let via = relay.interface("relay-sub1").context("the relay has its links")?.v4;
        ip(lab.node("sub1")?, &format!("route replace {}/32 via {via}", relay.addr_v4()))
    }
}

impl std::fmt::Display for InterfaceKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl LabInterfaces {
    fn new() -> Self {
        Self { interfaces: Vec::new(), _shuttles: Vec::new() }
    }
}

/// Moves a link's addresses from one device to another one.
fn take_over(node: &LabNode, link: &str, from: &str, to: &str) -> anyhow::Result<()> {
    let own = node.interface(link).ok_or_else(|| anyhow!("{} has no link {link}", node.name()))?;
    ip(node, &format!("address flush dev {from}"))?;
    ip(node, &format!("link set {to} up"))?;
    ip(node, &format!("address add {}/24 dev {to}", own.v4))?;
    ip(node, &format!("address add {}/64 dev {to} nodad", own.v6))
}

fn ip(node: &LabNode, arguments: &str) -> anyhow::Result<()> {
    run(node, "ip", arguments)
}

fn run(node: &LabNode, program: &str, arguments: &str) -> anyhow::Result<()> {
    let mut command: Command = node.command(program);
    let output = command.args(arguments.split_whitespace()).output();
    let output = output.with_context(|| format!("cannot run {program}"))?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    output.status.success().then_some(()).ok_or_else(|| anyhow!("{program} {arguments}: {said}"))
}
