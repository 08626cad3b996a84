//! Builds the network of a topology: namespaces, devices, addresses, routes and emulated links.

use std::cell::LazyCell;

use super::emulator::EmulatedWire;
use super::impair::Impairment;
use super::netem::{self, NetemQdisc};
use super::netns::{disable_offloads, ip, sysctl};
use super::registry::LabClaim;
use super::shape::Shaper;
use super::topology::{LinkDirection, LinkSpec, NodeInterface, NodePlan, Topology, plan};
use super::{Driver, LabLink, LabNetwork, LabNode, Result, Wires};

/// Name of the namespace with the emulator's ends of emulated links (inner ends). It is longer than a node's name may
/// be, so it is unique.
const EMULATOR: &str = "link-emulator";

pub(super) fn build(topology: &Topology) -> Result<LabNetwork> {
    let plans = plan(topology);
    let names = plans.iter().map(|plan| plan.name.as_str());
    let claim = LabClaim::new(&names.chain([EMULATOR]).collect::<Vec<_>>())?;
    let middle = claim.netns(EMULATOR);
    middle.enter(|| sysctl("ipv6/conf/default/disable_ipv6", "1"))??;
    let kinds = middle.enter(|| kinds(topology))?;
    for plan in &plans {
        claim.netns(&plan.name).enter(quiet_ipv6)??;
    }
    ip(&devices(topology, &kinds, &plans, &claim))?;
    // The emulator's ends of links are brought up first, so that the nodes' devices have a carrier.
    middle.enter(|| raise_inner_ends(&kinds))??;
    for plan in &plans {
        let netns = claim.netns(&plan.name);
        netns.enter(|| configure(plan, topology.offloads))??;
    }
    // The links are started last, so that no frame arrives before the receiving device is up.
    let links = middle.enter(|| start_links(topology, &kinds, &plans, &claim))??;
    let nodes = plans
        .into_iter()
        .map(|plan| LabNode { netns: claim.netns(&plan.name), name: plan.name, interfaces: plan.interfaces })
        .collect();
    Ok(LabNetwork { nodes, links, claim })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum BuildKind {
    /// A veth pair.
    Plain,
    /// A veth pair with a queueing discipline at each end.
    Netem,
    /// Two veth pairs that end at the emulator.
    Emulated,
}

/// Returns how each link is built. It must be called in the emulator's namespace, where netem is tried out.
fn kinds(topology: &Topology) -> Vec<BuildKind> {
    let has_netem = LazyCell::new(netem::is_available);
    let kind = |link| match topology.is_emulated(link) {
        false => BuildKind::Plain,
        true if topology.is_for_netem(link) && *has_netem => BuildKind::Netem,
        true => BuildKind::Emulated,
    };
    topology.links.iter().map(kind).collect()
}

/// Turns off link-local addresses, router solicitations and duplicate address detection. Links then carry only what
/// nodes send, and a few multicast listener reports when they come up. The change affects only devices that are created
/// afterwards.
fn quiet_ipv6() -> Result<()> {
    sysctl("ipv6/conf/default/addr_gen_mode", "1")?;
    sysctl("ipv6/conf/default/accept_dad", "0")?;
    sysctl("ipv6/conf/default/accept_ra", "0")?;
    sysctl("ipv6/conf/default/router_solicitations", "0")
}

/// Returns the lines for `ip -batch` that create the veth pairs of all links.
fn devices(topology: &Topology, kinds: &[BuildKind], plans: &[NodePlan], claim: &LabClaim) -> Vec<String> {
    let mut lines = Vec::new();
    for (index, (link, kind)) in topology.links.iter().zip(kinds).enumerate() {
        let [a, b] = [0, 1].map(|end| outer_end(plans, claim, link, end));
        let mtu = topology.mtu;
        if *kind == BuildKind::Emulated {
            for (outer, inner) in [a, b].iter().zip(inner_ends(index)) {
                let inner = format!("{inner} mtu {mtu} netns {}", claim.netns(EMULATOR).name());
                lines.push(format!("link add {outer} mtu {mtu} type veth peer name {inner}"));
            }
        } else {
            lines.push(format!("link add {a} mtu {mtu} type veth peer name {b} mtu {mtu}"));
        }
    }
    lines
}

/// Returns the arguments `DEVICE address MAC netns NAME` for a node's end of a link.
fn outer_end(plans: &[NodePlan], claim: &LabClaim, link: &LinkSpec, end: usize) -> String {
    let node = &link.ends[end];
    let describe = |NodeInterface { device, mac, .. }: &NodeInterface| {
        format!("{device} address {mac} netns {}", claim.netns(node).name())
    };
    end_of(plans, link, end).map(describe).unwrap_or_default()
}

fn end_of<'a>(plans: &'a [NodePlan], link: &LinkSpec, end: usize) -> Option<&'a NodeInterface> {
    let plan = plans.iter().find(|plan| plan.name == link.ends[end])?;
    plan.interfaces.iter().find(|interface| interface.link == link.name)
}

fn inner_ends(index: usize) -> [String; 2] {
    [format!("link{index}a"), format!("link{index}b")]
}

/// Brings up the emulator's ends of emulated links. It must be called in the emulator's namespace.
fn raise_inner_ends(kinds: &[BuildKind]) -> Result<()> {
    let emulated = kinds.iter().enumerate().filter(|(_, kind)| **kind == BuildKind::Emulated);
    let inner: Vec<String> = emulated.flat_map(|(index, _)| inner_ends(index)).collect();
    inner.iter().try_for_each(|device| disable_offloads(device))?;
    ip(&inner.iter().map(|device| format!("link set {device} up")).collect::<Vec<_>>())
}

/// Starts all links. It must be called in the emulator's namespace.
fn start_links(
    topology: &Topology,
    kinds: &[BuildKind],
    plans: &[NodePlan],
    claim: &LabClaim,
) -> Result<Vec<LabLink>> {
    let start = |(index, (link, kind)): (usize, (&LinkSpec, &BuildKind))| -> Result<LabLink> {
        let wires = match kind {
            BuildKind::Plain => None,
            BuildKind::Netem => Some(attach_netem(link, plans, claim)?),
            BuildKind::Emulated => Some(start_wires(topology, index, link)?),
        };
        Ok(LabLink { name: link.name.clone(), ends: link.ends.clone(), wires })
    };
    topology.links.iter().zip(kinds).enumerate().map(start).collect()
}

fn attach_netem(link: &LinkSpec, plans: &[NodePlan], claim: &LabClaim) -> Result<Wires> {
    let attach = |end, direction| {
        let device = end_of(plans, link, end).map(|interface| interface.device.as_str()).unwrap_or_default();
        let settings = link.impairment(direction).clone();
        NetemQdisc::attach(&link.name, claim.netns(&link.ends[end]), device, settings).map(Driver::Netem)
    };
    Ok(Wires { forward: attach(0, LinkDirection::Forward)?, backward: attach(1, LinkDirection::Backward)? })
}

fn start_wires(topology: &Topology, index: usize, link: &LinkSpec) -> Result<Wires> {
    let [a, b] = inner_ends(index);
    // Each direction of the link has its own seed for random losses and delays.
    let seed = |direction: u64| topology.seed.wrapping_add((index as u64) << 1 | direction);
    let wire = |from, to, impairment: &Impairment, seed| {
        let shaper = Shaper::new(impairment.clone(), seed);
        EmulatedWire::start(from, to, topology.mtu as usize, shaper).map(Driver::Emulator)
    };
    Ok(Wires {
        forward: wire(&a, &b, &link.forward, seed(0))?,
        backward: wire(&b, &a, &link.backward, seed(1))?,
    })
}

/// Configures a node's devices and routes. It must be called in the node's namespace.
fn configure(plan: &NodePlan, offloads: bool) -> Result<()> {
    sysctl("ipv4/ip_forward", "1")?;
    sysctl("ipv6/conf/all/forwarding", "1")?;
    let mut lines = vec!["link set lo up".to_owned()];
    for (own, peer) in plan.interfaces.iter().zip(&plan.peers) {
        let device = &own.device;
        if !offloads {
            disable_offloads(device)?;
        }
        lines.push(format!("address add {}/24 dev {device}", own.v4));
        lines.push(format!("address add {}/64 dev {device} nodad", own.v6));
        lines.push(format!("link set {device} up"));
        // Static neighbour entries: ARP and neighbour discovery would suffer from losses, and would be counted as
        // frames.
        for address in [peer.v4.to_string(), peer.v6.to_string()] {
            lines.push(format!("neighbour add {address} lladdr {} dev {device} nud permanent", peer.mac));
        }
    }
    for route in &plan.routes {
        let (v4, v4_len) = route.v4;
        let (v6, v6_len) = route.v6;
        lines.push(format!("route add {v4}/{v4_len} via {}", route.via_v4));
        lines.push(format!("route add {v6}/{v6_len} via {}", route.via_v6));
    }
    ip(&lines)
}
