//! From a topology to namespaces, devices, addresses, routes and emulated links.

use super::emulator::Wire;
use super::netns::{disable_offloads, ip, sysctl};
use super::registry::Claim;
use super::shape::Shaper;
use super::topology::{Interface, LinkSpec, NodePlan, Topology, plan};
use super::{Link, Net, Node, Result, Wires};

/// The namespace that holds the inner ends of emulated links. Too long for a node's name.
const EMULATOR: &str = "link-emulator";

pub(super) fn build(topology: &Topology) -> Result<Net> {
    let plans = plan(topology);
    let names = plans.iter().map(|plan| plan.name.as_str());
    let claim = Claim::new(&names.chain([EMULATOR]).collect::<Vec<_>>())?;
    let middle = claim.netns(EMULATOR);
    middle.enter(|| sysctl("ipv6/conf/default/disable_ipv6", "1"))??;
    for plan in &plans {
        claim.netns(&plan.name).enter(quiet_ipv6)??;
    }
    ip(&devices(topology, &plans, &claim))?;
    // Before the nodes' ends come up, so that not one frame passes by the emulator.
    let links = middle.enter(|| start_links(topology))??;
    for plan in &plans {
        let netns = claim.netns(&plan.name);
        netns.enter(|| configure(plan, topology.offloads))??;
    }
    let nodes = plans
        .into_iter()
        .map(|plan| Node { netns: claim.netns(&plan.name), name: plan.name, interfaces: plan.interfaces })
        .collect();
    Ok(Net { nodes, links, claim })
}

/// No link-local addresses, router solicitations or duplicate detection: links carry what nodes send, and a
/// multicast listener report or two when they come up. Applies to devices that are made afterwards.
fn quiet_ipv6() -> Result<()> {
    sysctl("ipv6/conf/default/addr_gen_mode", "1")?;
    sysctl("ipv6/conf/default/accept_dad", "0")?;
    sysctl("ipv6/conf/default/accept_ra", "0")?;
    sysctl("ipv6/conf/default/router_solicitations", "0")
}

/// `ip` lines that make the veth pairs of all links.
fn devices(topology: &Topology, plans: &[NodePlan], claim: &Claim) -> Vec<String> {
    let mut lines = Vec::new();
    for (index, link) in topology.links.iter().enumerate() {
        let [a, b] = [0, 1].map(|end| outer_end(plans, claim, link, end));
        let mtu = topology.mtu;
        if topology.is_emulated(link) {
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

/// `DEVICE address MAC netns NAME` of a node's end of a link.
fn outer_end(plans: &[NodePlan], claim: &Claim, link: &LinkSpec, end: usize) -> String {
    let node = &link.ends[end];
    let interfaces = plans.iter().filter(|plan| plan.name == *node).flat_map(|plan| &plan.interfaces);
    let found = interfaces.filter(|interface| interface.link == link.name).map(|interface| {
        let Interface { device, mac, .. } = interface;
        format!("{device} address {mac} netns {}", claim.netns(node).name())
    });
    found.collect()
}

fn inner_ends(index: usize) -> [String; 2] {
    [format!("link{index}a"), format!("link{index}b")]
}

/// Inside the emulator's namespace.
fn start_links(topology: &Topology) -> Result<Vec<Link>> {
    let emulated = |index: usize| topology.links.get(index).is_some_and(|link| topology.is_emulated(link));
    let inner: Vec<String> =
        (0..topology.links.len()).filter(|i| emulated(*i)).flat_map(inner_ends).collect();
    inner.iter().try_for_each(|device| disable_offloads(device))?;
    if !inner.is_empty() {
        ip(&inner.iter().map(|device| format!("link set {device} up")).collect::<Vec<_>>())?;
    }
    let start = |(index, link): (usize, &LinkSpec)| -> Result<Link> {
        let wires = if emulated(index) { Some(start_wires(topology, index, link)?) } else { None };
        Ok(Link { name: link.name.clone(), ends: link.ends.clone(), wires })
    };
    topology.links.iter().enumerate().map(start).collect()
}

fn start_wires(topology: &Topology, index: usize, link: &LinkSpec) -> Result<Wires> {
    let [a, b] = inner_ends(index);
    // Each direction has its own stream of random numbers.
    let seed = |direction: u64| topology.seed.wrapping_add((index as u64) << 1 | direction);
    let wire = |from, to, impairment: &_, seed| {
        Wire::start(from, to, topology.mtu as usize, Shaper::new(Clone::clone(impairment), seed))
    };
    Ok(Wires {
        forward: wire(&a, &b, &link.forward, seed(0))?,
        backward: wire(&b, &a, &link.backward, seed(1))?,
    })
}

/// Inside a node's namespace.
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
        // Known neighbours: neither ARP nor neighbour discovery meets loss, or shows up in the counts.
        for address in [peer.v4.to_string(), peer.v6.to_string()] {
            lines.push(format!("neighbour add {address} lladdr {} dev {device} nud permanent", peer.mac));
        }
    }
    for route in &plan.routes {
        let ((v4, v4_len), (v6, v6_len)) = (route.v4, route.v6);
        lines.push(format!("route add {v4}/{v4_len} via {}", route.via_v4));
        lines.push(format!("route add {v6}/{v6_len} via {}", route.via_v6));
    }
    ip(&lines)
}
