//! `[[scope]]` of a policy file.

use std::{net::IpAddr, path::Path, time::Duration};

use millrace_base::settings::{Place, Reader, Section, Shape};

use crate::kernel::{
    Counting, Live, Place as Where, Policy, Rate, Rule,
    rules::{ANSWERING, Mode, REFLECTORS_MAX, Scope, VERSIONS_MAX},
};

use super::{
    prefixes,
    values::{Port, Seconds},
};

/// Bytes; a rate of bytes must let the largest datagram through.
const DATAGRAM_MAX: u64 = 65_535;

pub(super) fn read(reader: &mut Reader<'_>, mut section: Section<'_>, directory: &Path) -> Scope {
    let name: String = reader.take(&mut section, "name").unwrap_or_default();
    if name.is_empty() {
        reader.problem(&section.place, "needs a name: `name = \"web\"`");
    }
    let ports = ports(reader, &mut section, "port").unwrap_or_default();
    let addresses: Option<(Place, Vec<IpAddr>)> = reader.take_at(&mut section, "address");
    if let Some((place, _)) = addresses.as_ref().filter(|(_, all)| all.iter().any(IpAddr::is_unspecified)) {
        reader.problem(place, "no packet is sent to 0.0.0.0 or ::; leave the key out for every address");
    }
    let addresses = addresses.map(|(_, all)| all).unwrap_or_default();
    let mut policy = Policy::default();
    live(reader, &mut section, &mut policy);
    if let Some(section) = reader.section(&mut section, "rules") {
        rules(reader, section, &mut policy);
    }
    let prefixes = prefixes(reader, &mut section, directory);
    reader.finish(section);
    Scope { name, places: places(&addresses, &ports), policy, prefixes }
}

fn ports(reader: &mut Reader<'_>, section: &mut Section<'_>, key: &'static str) -> Option<Vec<u16>> {
    let ports: Vec<Port> = reader.take(section, key)?;
    Some(ports.into_iter().map(|Port(port)| port).collect())
}

/// Each address with each port.
fn places(addresses: &[IpAddr], ports: &[u16]) -> Vec<Where> {
    let addresses = any_of(addresses);
    let ports = any_of(ports);
    let each = |address| ports.iter().map(move |port| Where { address, port: *port });
    addresses.into_iter().flat_map(each).collect()
}

/// None given means any.
fn any_of<T: Copy>(given: &[T]) -> Vec<Option<T>> {
    if given.is_empty() { vec![None] } else { given.iter().copied().map(Some).collect() }
}

/// How live connections are known, and who counts them.
fn live(reader: &mut Reader<'_>, section: &mut Section<'_>, policy: &mut Policy) {
    let idle = reader.take_at(section, "idle_timeout").map(|(place, Seconds(idle))| (place, idle));
    let id_bytes: Option<(Place, u8)> = reader.take_at(section, "id_bytes");
    match reader.take_at::<String>(section, "live") {
        None => tracked(reader, idle, id_bytes, policy),
        Some((place, live)) => match live.as_str() {
            "tracked" => tracked(reader, idle, id_bytes, policy),
            "published" => published(reader, &place, idle, id_bytes, policy),
            "unknown" => unknown(reader, idle, id_bytes, policy),
            _ => reader.problem(&place, "is \"tracked\", \"published\" or \"unknown\""),
        },
    }
    match reader.take_at::<String>(section, "count") {
        None => {}
        Some((place, by)) => match by.as_str() {
            "gate" => policy.counting = Counting::Gate,
            "application" => policy.counting = Counting::Application,
            _ => reader.problem(&place, "is \"gate\" or \"application\""),
        },
    }
}

fn tracked(
    reader: &mut Reader<'_>,
    idle: Option<(Place, Duration)>,
    id_bytes: Option<(Place, u8)>,
    policy: &mut Policy,
) {
    if let Some((place, idle)) = idle {
        policy.live = Live::Tracked { idle };
        if idle.is_zero() {
            reader.problem(&place, "must be more than 0: use the server's idle timeout");
        }
    }
    if let Some((place, _)) = id_bytes {
        reader.problem(&place, "means nothing where the gate tracks; remove it, or set live = \"published\"");
    }
}

fn published(
    reader: &mut Reader<'_>,
    live: &Place,
    idle: Option<(Place, Duration)>,
    id_bytes: Option<(Place, u8)>,
    policy: &mut Policy,
) {
    // Nothing is there for the gate to count.
    policy.counting = Counting::Application;
    match id_bytes {
        None => reader.problem(live, "needs the length of the server's connection IDs: `id_bytes = 8`"),
        Some((place, 0 | 21..)) => reader.problem(&place, "is 1 to 20"),
        Some((_, id_len)) => policy.live = Live::Published { id_len: id_len.into() },
    }
    if let Some((place, _)) = idle {
        reader.problem(&place, "means nothing for published IDs: they are live until they are retired");
    }
}

fn unknown(
    reader: &mut Reader<'_>,
    idle: Option<(Place, Duration)>,
    id_bytes: Option<(Place, u8)>,
    policy: &mut Policy,
) {
    policy.live = Live::Unknown;
    policy.counting = Counting::Application;
    for place in idle.map(|(place, _)| place).into_iter().chain(id_bytes.map(|(place, _)| place)) {
        reader.problem(&place, "means nothing where live connections are not known");
    }
}

fn rules(reader: &mut Reader<'_>, mut section: Section<'_>, policy: &mut Policy) {
    for rule in Rule::ALL.into_iter().filter(|rule| rule.of_client().is_none()) {
        let Some((place, shape)) = reader.shape::<Mode>(&mut section, rule.name()) else { continue };
        match shape {
            Shape::Value(mode) => set_mode(reader, &place, rule, mode, policy),
            Shape::Section(mut section) => {
                let mode = reader.take(&mut section, "mode").unwrap_or(Mode::Enforce);
                policy.modes.set(rule, mode);
                parameters(reader, &mut section, rule, policy);
                reader.finish(section);
            }
        }
    }
    reader.finish(section);
}

/// Just a mode: for rules that need no numbers, or to switch off.
fn set_mode(reader: &mut Reader<'_>, place: &Place, rule: Rule, mode: Mode, policy: &mut Policy) {
    policy.modes.set(rule, mode);
    let example = match rule {
        Rule::Quota => "{ connections = 20 }",
        rule if rate(rule, policy).is_some() => "{ per_second = 10, burst = 20 }",
        _ => return,
    };
    if mode != Mode::Off {
        reader.problem(place, format!("needs numbers: `{} = {example}`", rule.name()));
    }
}

fn parameters(reader: &mut Reader<'_>, section: &mut Section<'_>, rule: Rule, policy: &mut Policy) {
    if ANSWERING.contains(&rule) && reader.take(section, "answer") == Some(true) {
        policy.answers.insert(rule);
    }
    match rule {
        Rule::Quota => quota(reader, section, policy),
        Rule::Retry => retry(reader, section, policy),
        Rule::Version => versions(reader, section, policy),
        Rule::SourcePort => {
            if let Some(ports) = ports(reader, section, "reflectors") {
                at_most(reader, section, "reflectors", ports.len(), REFLECTORS_MAX);
                policy.reflectors = ports;
            }
        }
        _ => rate_of(reader, section, rule, policy),
    }
}

fn at_most(reader: &mut Reader<'_>, section: &Section<'_>, key: &str, count: usize, max: usize) {
    if count > max {
        reader.problem(
            &section.place,
            format!("`{key}` has {count} numbers, of which there is room for {max}"),
        );
    }
}

fn quota(reader: &mut Reader<'_>, section: &mut Section<'_>, policy: &mut Policy) {
    policy.quota = reader.take(section, "connections");
    if policy.quota.is_none() {
        reader.problem(&section.place, "needs `connections`, how many one client may have");
    }
}

fn retry(reader: &mut Reader<'_>, section: &mut Section<'_>, policy: &mut Policy) {
    let above: Option<(Place, u64)> = reader.take_at(section, "above");
    let burst: Option<(Place, u64)> = reader.take_at(section, "burst");
    policy.retry_above = match (above, burst) {
        (Some((_, 0)), None) | (None, None) => None,
        (Some((_, amount)), burst) => {
            Some(Rate::per_second(amount, burst.map_or(amount, |(_, burst)| burst)))
        }
        (None, Some((place, _))) => {
            reader
                .problem(&place, "needs `above`, the new connections per second from which on Retry is sent");
            None
        }
    };
    if let Some((place, Seconds(lifetime))) = reader.take_at(section, "lifetime") {
        policy.token_lifetime = lifetime;
        if lifetime < Duration::from_secs(1) {
            reader.problem(&place, "is at least 1 second: a client needs a round trip");
        }
    }
}

fn versions(reader: &mut Reader<'_>, section: &mut Section<'_>, policy: &mut Policy) {
    if let Some(versions) = reader.take::<Vec<u32>>(section, "speaks") {
        at_most(reader, section, "speaks", versions.len(), VERSIONS_MAX);
        policy.versions = versions;
    }
}

fn rate_of(reader: &mut Reader<'_>, section: &mut Section<'_>, rule: Rule, policy: &mut Policy) {
    let Some(to) = rate(rule, policy) else { return };
    let per_second: Option<(Place, u64)> = reader.take_at(section, "per_second");
    let burst: Option<(Place, u64)> = reader.take_at(section, "burst");
    let least = if measures_bytes(rule) { DATAGRAM_MAX } else { 1 };
    match (per_second, burst) {
        (None, _) => reader.problem(&section.place, "needs `per_second`"),
        (Some((place, 0)), _) => {
            reader.problem(&place, "lets nothing through: block what shall not come in");
        }
        (Some(_), Some((place, burst))) if burst < least => {
            reader.problem(&place, format!("is at least {least}, or a whole datagram would never fit"));
        }
        (Some((_, amount)), burst) => {
            let burst = burst.map_or(amount.max(least), |(_, burst)| burst);
            *to = Some(Rate::per_second(amount, burst));
        }
    }
}

fn measures_bytes(rule: Rule) -> bool {
    matches!(rule, Rule::LiveBytes | Rule::UnknownBytes | Rule::ClientBytes)
}

/// Where the rate that a rule measures is kept.
fn rate(rule: Rule, policy: &mut Policy) -> Option<&mut Option<Rate>> {
    let Policy { live_rates: live, unknown_rates: unknown, client_rates: client, .. } = policy;
    match rule {
        Rule::LivePackets => Some(&mut live.packets),
        Rule::LiveBytes => Some(&mut live.bytes),
        Rule::UnknownInitials => Some(&mut unknown.initials),
        Rule::UnknownPackets => Some(&mut unknown.packets),
        Rule::UnknownBytes => Some(&mut unknown.bytes),
        Rule::ClientInitials => Some(&mut client.initials),
        Rule::ClientPackets => Some(&mut client.packets),
        Rule::ClientBytes => Some(&mut client.bytes),
        _ => None,
    }
}
