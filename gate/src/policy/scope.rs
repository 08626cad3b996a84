//! The section `[[scope]]` of a policy file.

use std::{net::IpAddr, path::Path, time::Duration};

use millrace_base::settings::{Section, SettingPlace, SettingsReader, ValueOrTable};

use crate::kernel::{
    Counting, LiveRule, PolicyRules, Rule, RulePlace as Where, RuleRate,
    rules::{ANSWERING, REFLECTORS_MAX, RuleMode, ScopeRules, VERSIONS_MAX},
};

use super::{
    prefixes,
    values::{PolicySeconds, UdpPort},
};

/// Length of the largest datagram in bytes. A rate of bytes must allow a burst of this size, or such a datagram would
/// never pass.
const DATAGRAM_MAX: u64 = 65_535;

pub(super) fn read(reader: &mut SettingsReader, mut section: Section<'_>, directory: &Path) -> ScopeRules {
    let name: String = reader.take(&mut section, "name").unwrap_or_default();
    if name.is_empty() {
        reader.problem(&section.place, "needs a name: `name = \"web\"`");
    }
    let ports = ports(reader, &mut section, "port").unwrap_or_default();
    let addresses: Option<(SettingPlace, Vec<IpAddr>)> = reader.take_at(&mut section, "address");
    if let Some((place, _)) = addresses.as_ref().filter(|(_, all)| all.iter().any(IpAddr::is_unspecified)) {
        reader.problem(place, "packets cannot be sent to 0.0.0.0 or ::; omit the key for every address");
    }
    let addresses = addresses.map(|(_, all)| all).unwrap_or_default();
    let mut policy = PolicyRules::default();
    live(reader, &mut section, &mut policy);
    if let Some(section) = reader.section(&mut section, "rules") {
        rules(reader, section, &mut policy);
    }
    let prefixes = prefixes(reader, &mut section, directory);
    reader.finish(section);
    ScopeRules { name, places: places(&addresses, &ports), policy, prefixes }
}

fn ports(reader: &mut SettingsReader, section: &mut Section<'_>, key: &'static str) -> Option<Vec<u16>> {
    let ports: Vec<UdpPort> = reader.take(section, key)?;
    Some(ports.into_iter().map(|UdpPort(port)| port).collect())
}

/// Returns every combination of one of the addresses and one of the ports. An empty list stands for any address or any
/// port.
fn places(addresses: &[IpAddr], ports: &[u16]) -> Vec<Where> {
    let addresses = any_of(addresses);
    let ports = any_of(ports);
    let each = |address| ports.iter().map(move |port| Where { address, port: *port });
    addresses.into_iter().flat_map(each).collect()
}

/// Wraps each value in `Some`. If no values are given, returns a single `None`, which stands for any value.
fn any_of<T: Copy>(given: &[T]) -> Vec<Option<T>> {
    if given.is_empty() { vec![None] } else { given.iter().copied().map(Some).collect() }
}

/// Reads the keys about live connections: how the gate knows them, and which party counts them.
fn live(reader: &mut SettingsReader, section: &mut Section<'_>, policy: &mut PolicyRules) {
    let idle = reader.take_at(section, "idle_timeout").map(|(place, PolicySeconds(idle))| (place, idle));
    let id_bytes: Option<(SettingPlace, u8)> = reader.take_at(section, "id_bytes");
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
    reader: &mut SettingsReader,
    idle: Option<(SettingPlace, Duration)>,
    id_bytes: Option<(SettingPlace, u8)>,
    policy: &mut PolicyRules,
) {
    if let Some((place, idle)) = idle {
        policy.live = LiveRule::Tracked { idle };
        if idle.is_zero() {
            reader.problem(&place, "must be more than 0: use the server's idle timeout");
        }
    }
    if let Some((place, _)) = id_bytes {
        reader.problem(&place, "has no effect if the gate tracks; remove it, or set live = \"published\"");
    }
}

fn published(
    reader: &mut SettingsReader,
    live: &SettingPlace,
    idle: Option<(SettingPlace, Duration)>,
    id_bytes: Option<(SettingPlace, u8)>,
    policy: &mut PolicyRules,
) {
    // With published connection IDs the gate tracks no connections, and it counts only tracked ones. The application
    // has to count them.
    policy.counting = Counting::Application;
    match id_bytes {
        None => reader.problem(live, "needs the length of the server's connection IDs: `id_bytes = 8`"),
        Some((place, 0 | 21..)) => reader.problem(&place, "is 1 to 20"),
        Some((_, id_len)) => policy.live = LiveRule::Published { id_len: id_len.into() },
    }
    if let Some((place, _)) = idle {
        reader.problem(&place, "has no effect for published IDs, which are live until they are retired");
    }
}

fn unknown(
    reader: &mut SettingsReader,
    idle: Option<(SettingPlace, Duration)>,
    id_bytes: Option<(SettingPlace, u8)>,
    policy: &mut PolicyRules,
) {
    policy.live = LiveRule::Unknown;
    policy.counting = Counting::Application;
    for place in idle.map(|(place, _)| place).into_iter().chain(id_bytes.map(|(place, _)| place)) {
        reader.problem(&place, "has no effect with live = \"unknown\"; remove it");
    }
}

fn rules(reader: &mut SettingsReader, mut section: Section<'_>, policy: &mut PolicyRules) {
    for rule in Rule::ALL.into_iter().filter(|rule| rule.client_reason().is_none()) {
        let Some((place, shape)) = reader.shape::<RuleMode>(&mut section, rule.name()) else { continue };
        match shape {
            ValueOrTable::Value(mode) => set_mode(reader, &place, rule, mode, policy),
            ValueOrTable::Section(mut section) => {
                let mode = reader.take(&mut section, "mode").unwrap_or(RuleMode::Enforce);
                policy.modes.set(rule, mode);
                parameters(reader, &mut section, rule, policy);
                reader.finish(section);
            }
        }
    }
    reader.finish(section);
}

/// Sets the mode of a rule that the policy gives without limits, such as `retry = "off"`. A rule that needs a limit or
/// a rate may only have the mode `off` here.
fn set_mode(
    reader: &mut SettingsReader,
    place: &SettingPlace,
    rule: Rule,
    mode: RuleMode,
    policy: &mut PolicyRules,
) {
    policy.modes.set(rule, mode);
    let example = match rule {
        Rule::Quota => "{ connections = 20 }",
        rule if rate(rule, policy).is_some() => "{ per_second = 10, burst = 20 }",
        _ => return,
    };
    if mode != RuleMode::Off {
        reader.problem(place, format!("needs numbers: `{} = {example}`", rule.name()));
    }
}

fn parameters(reader: &mut SettingsReader, section: &mut Section<'_>, rule: Rule, policy: &mut PolicyRules) {
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

fn at_most(reader: &mut SettingsReader, section: &Section<'_>, key: &str, count: usize, max: usize) {
    if count > max {
        reader.problem(&section.place, format!("`{key}` has {count} numbers; at most {max} are allowed"));
    }
}

fn quota(reader: &mut SettingsReader, section: &mut Section<'_>, policy: &mut PolicyRules) {
    policy.quota = reader.take(section, "connections");
    if policy.quota.is_none() {
        reader.problem(&section.place, "needs `connections`, the largest number of one client");
    }
}

fn retry(reader: &mut SettingsReader, section: &mut Section<'_>, policy: &mut PolicyRules) {
    let above: Option<(SettingPlace, u64)> = reader.take_at(section, "above");
    let burst: Option<(SettingPlace, u64)> = reader.take_at(section, "burst");
    policy.retry_above = match (above, burst) {
        (Some((_, 0)), None) | (None, None) => None,
        (Some((_, amount)), burst) => {
            Some(RuleRate::per_second(amount, burst.map_or(amount, |(_, burst)| burst)))
        }
        (None, Some((place, _))) => {
            reader.problem(&place, "needs `above`, the rate of new connections above which Retry is sent");
            None
        }
    };
    if let Some((place, PolicySeconds(lifetime))) = reader.take_at(section, "lifetime") {
        policy.token_lifetime = lifetime;
        if lifetime < Duration::from_secs(1) {
            reader.problem(&place, "must be at least 1 second: a client needs a round trip");
        }
    }
}

fn versions(reader: &mut SettingsReader, section: &mut Section<'_>, policy: &mut PolicyRules) {
    if let Some(versions) = reader.take::<Vec<u32>>(section, "speaks") {
        at_most(reader, section, "speaks", versions.len(), VERSIONS_MAX);
        policy.versions = versions;
    }
}

fn rate_of(reader: &mut SettingsReader, section: &mut Section<'_>, rule: Rule, policy: &mut PolicyRules) {
    let Some(to) = rate(rule, policy) else { return };
    let per_second: Option<(SettingPlace, u64)> = reader.take_at(section, "per_second");
    let burst: Option<(SettingPlace, u64)> = reader.take_at(section, "burst");
    let least = if measures_bytes(rule) { DATAGRAM_MAX } else { 1 };
    match (per_second, burst) {
        (None, _) => reader.problem(&section.place, "needs `per_second`"),
        (Some((place, 0)), _) => {
            reader.problem(&place, "lets nothing through: use `block` to refuse packets");
        }
        (Some(_), Some((place, burst))) if burst < least => {
            reader.problem(&place, format!("must be at least {least}, or a whole datagram would never fit"));
        }
        (Some((_, amount)), burst) => {
            let burst = burst.map_or(amount.max(least), |(_, burst)| burst);
            *to = Some(RuleRate::per_second(amount, burst));
        }
    }
}

fn measures_bytes(rule: Rule) -> bool {
    matches!(rule, Rule::LiveBytes | Rule::UnknownBytes | Rule::ClientBytes)
}

/// Returns the field of the policy that holds the rule's rate.
fn rate(rule: Rule, policy: &mut PolicyRules) -> Option<&mut Option<RuleRate>> {
    let PolicyRules { live_rates: live, unknown_rates: unknown, client_rates: client, .. } = policy;
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
