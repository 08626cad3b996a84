//! The rules in force. Each map of rules has two halves, and a change is written to the half that is not in use. Then
//! one write switches to that half.

use std::collections::{BTreeMap, BTreeSet};

use millrace_kernel::prefix::Prefix;
use millrace_kernel::{Error, clock};

use super::Listing;
use super::intf;
use super::maps::GateMaps;
use super::reason::Rule;
use super::rules::{GateRules, INTERFACE, ListEntry, PolicyRules, RuleMode};
use super::token;

/// Userspace's copy of the rules in the BPF maps, from which these maps are written.
pub(super) struct Settings {
    rules: GateRules,
    /// Names of scopes by index. A name that no scope has any more keeps its index until another name needs the index.
    names: Vec<String>,
    listed: BTreeMap<(Option<String>, Prefix), ListEntry>,
    active: intf::Active,
    /// UNIX time minus CLOCK_MONOTONIC in ns, as userspace last passed it to the program.
    clock_ns: i64,
    /// Number of passes over the connection maps since the Bloom filter last switched generations (`gate_marks.h`).
    /// Each pass adds the keys of all live entries to the filter.
    walks: u32,
    token_keys: token::Keys,
    halves: [Half; 2],
    /// Interfaces whose frames begin with their IP header.
    bare: BTreeSet<i32>,
}

/// The contents of the maps `scopes` and `prefixes` for one of two versions of the rules: one is in force, and the
/// other is written next.
#[derive(Default)]
struct Half {
    scopes: BTreeMap<intf::ScopeKey, u32>,
    prefixes: BTreeMap<intf::PrefixKey, ListEntry>,
}

/// Largest change of UNIX time minus `CLOCK_MONOTONIC` that is not passed on to the program.
const CLOCK_SLACK_NS: u64 = 500_000_000;
/// Number of passes over the connection maps after which the newer generation of the Bloom filter contains the key of
/// every live entry (`gate_marks.h`). A single pass may miss an entry that moves.
const WALKS_PER_AGE: u32 = 8;
const NS_PER_S: i64 = 1_000_000_000;

impl Settings {
    pub fn new(maps: &GateMaps) -> Result<Self, Error> {
        let mut settings = Self {
            rules: GateRules::default(),
            names: vec![INTERFACE.to_owned()],
            listed: BTreeMap::new(),
            active: intf::Active::default(),
            clock_ns: 0,
            walks: 0,
            token_keys: token::Keys::default(),
            halves: Default::default(),
            bare: BTreeSet::new(),
        };
        settings.apply(maps, &GateRules::default())?;
        Ok(settings)
    }

    pub fn rules(&self) -> &GateRules {
        &self.rules
    }

    pub fn names(&self) -> Vec<String> {
        self.names.clone()
    }

    pub fn token_keys(&self) -> &token::Keys {
        &self.token_keys
    }

    /// Returns the index of a scope's name. The scope "interface" is not found.
    pub fn index(&self, name: &str) -> Option<u32> {
        index(&self.names, name)
    }

    pub fn apply(&mut self, maps: &GateMaps, rules: &GateRules) -> Result<(), Error> {
        rules.check()?;
        let (names, reused) = self.name(rules)?;
        let turn = self.active.turn.wrapping_add(1);
        let half = turn & 1;
        let policies = policies(rules, &names)?;
        let next = Half::new(half, rules, &names, &self.listed);
        let lookups = rules.scopes.iter().flat_map(|scope| &scope.places).fold(0, |all, p| all | p.lookup());
        // Wait for the runs of the BPF program that began before the previous change of the rules. They may still read
        // the half of the maps that is written next, and use scopes that were removed.
        maps.barrier.wait_for_runs()?;
        reused.into_iter().try_for_each(|index| maps.forget_scope(index))?;
        let old = std::mem::take(self.half(half));
        maps.clear(old.scopes.keys(), old.prefixes.keys())?;
        // Userspace's copy of the maps changes first. If writing the maps fails, the next attempt therefore clears the
        // entries that this attempt has written.
        *self.half(half) = next;
        let next = &self.halves[half as usize];
        maps.write(half, &policies, &next.scopes, &next.prefixes)?;
        let since_ns = if self.looks_as(rules) { self.active.since_ns } else { clock::coarse_ns() };
        let lookups = lookups | prefixes_flag(next);
        let fill_ticks = fill_ticks(&policies);
        let active = intf::Active { turn, lookups, since_ns, fill_ticks, ..self.active };
        maps.activate(&active)?;
        (self.active, self.names, self.rules) = (active, names, rules.clone());
        Ok(())
    }

    /// Records that the gate was attached to an interface. The gate sees the connections on that interface only from
    /// now on.
    pub fn look_anew(&mut self, maps: &GateMaps) -> Result<(), Error> {
        self.activate(maps, intf::Active { since_ns: clock::coarse_ns(), ..self.active })
    }

    /// Sets whether frames of an interface begin with their IP header. The program looks up an interface in the map
    /// `bare` only if the map has entries.
    pub fn set_bare(&mut self, maps: &GateMaps, ifindex: i32, bare: bool) -> Result<(), Error> {
        if self.bare.contains(&ifindex) == bare {
            return Ok(());
        }
        maps.set_bare(ifindex, bare)?;
        match bare {
            true => self.bare.insert(ifindex),
            false => self.bare.remove(&ifindex),
        };
        self.activate(maps, intf::Active { bare: u32::from(!self.bare.is_empty()), ..self.active })
    }

    /// Reports whether the rules in force already track live connections in the same way as `rules` require.
    fn looks_as(&self, rules: &GateRules) -> bool {
        rules.scopes.iter().all(|scope| {
            self.rules.scopes.iter().any(|now| {
                now.name == scope.name && now.places == scope.places && now.policy.live == scope.policy.live
            })
        })
    }

    pub fn list(
        &mut self,
        maps: &GateMaps,
        scope: Option<&str>,
        prefix: Prefix,
        entry: Option<ListEntry>,
    ) -> Result<(), Error> {
        let index = self.list_index(scope)?;
        let active_half = self.active.turn & 1;
        let key = prefix_key(active_half, index, prefix);
        let wanted = entry.or_else(|| self.rules_entry(scope, prefix));
        match wanted {
            Some(wanted) => maps.put_prefix(&key, wanted)?,
            None => maps.clear([].iter(), [key].iter())?,
        }
        let half = self.half(active_half);
        match wanted {
            Some(wanted) => half.prefixes.insert(key, wanted),
            None => half.prefixes.remove(&key),
        };
        let name = (scope.map(str::to_owned), prefix);
        match entry {
            Some(entry) => self.listed.insert(name, entry),
            None => self.listed.remove(&name),
        };
        let flag = prefixes_flag(self.half(active_half));
        let lookups = self.active.lookups & !intf::LOOKUP_PREFIXES | flag;
        self.activate(maps, intf::Active { lookups, ..self.active })
    }

    pub fn listed(&self) -> Vec<Listing> {
        let listed = self.listed.iter();
        listed.map(|((scope, prefix), entry)| (scope.clone(), *prefix, *entry)).collect()
    }

    fn in_force(&self) -> &Half {
        &self.halves[(self.active.turn & 1) as usize]
    }

    /// Returns the number of prefixes in the block and allow lists in force.
    pub fn prefixes(&self) -> u64 {
        self.in_force().prefixes.len() as u64
    }

    /// Returns the block or allow entries of other prefixes that override `entry` for a part of `prefixes` or for all
    /// of them. Only the lists that apply to the same packets are searched.
    pub fn exceptions(
        &self,
        scope: Option<&str>,
        prefixes: &[Prefix],
        entry: ListEntry,
    ) -> Result<Vec<Listing>, Error> {
        let index = self.list_index(scope)?;
        let others = self.in_force().prefixes.iter().filter(|(_, other)| **other != entry);
        let others =
            others.map(|(key, other)| (u32::from(u16::from_be_bytes(key.scope)), prefix_of(key), *other));
        let counts = |list| index == 0 || list == 0 || list == index;
        let mine: BTreeSet<Prefix> = prefixes.iter().copied().collect();
        // An allow entry does not override a block entry of the same prefix.
        let from = if entry == ListEntry::Block { 1 } else { 0 };
        let wins = |other: &Prefix| other.and_shorter().skip(from).any(|prefix| mine.contains(&prefix));
        let exceptions = others.filter(|(list, other, _)| counts(*list) && wins(other));
        let name = |list| self.names.get(list as usize).filter(|_| list > 0).cloned();
        Ok(exceptions.map(|(list, other, entry)| (name(list), other, entry)).collect())
    }

    /// Returns the index of a scope's block and allow list. Index 0 is the list that applies to all scopes.
    fn list_index(&self, scope: Option<&str>) -> Result<u32, Error> {
        scope.map_or(Ok(0), |name| self.index(name).ok_or(Error::Config("there is no scope of that name")))
    }

    /// Updates the offset between the clocks. Tokens contain UNIX time, but the program can only read CLOCK_MONOTONIC.
    pub fn follow_clock(&mut self, maps: &GateMaps) -> Result<(), Error> {
        let clock_ns = clock::unix_ns() - clock::monotonic_ns() as i64;
        if clock_ns.abs_diff(self.clock_ns) < CLOCK_SLACK_NS {
            return Ok(());
        }
        self.clock_ns = clock_ns;
        self.activate(maps, intf::Active { unix_seconds: clock_ns.div_euclid(NS_PER_S), ..self.active })
    }

    /// Switches the Bloom filter to its other generation after every [`WALKS_PER_AGE`] passes over the connection maps.
    /// Call it after each pass (`gate_marks.h`).
    pub fn age_marks(&mut self, maps: &GateMaps) -> Result<(), Error> {
        self.walks += 1;
        if self.walks < WALKS_PER_AGE {
            return Ok(());
        }
        let age = 1 - self.active.age;
        maps.forget(age)?;
        self.activate(maps, intf::Active { age, ..self.active })?;
        self.walks = 0;
        Ok(())
    }

    /// Returns the lowest index that no trace uses.
    pub fn free_tracer(&self) -> Option<u32> {
        Some(self.active.tracers.trailing_ones()).filter(|index| *index < intf::TRACERS as u32)
    }

    /// Switches the trace with this index on or off.
    pub fn set_tracer(&mut self, maps: &GateMaps, index: u32, on: bool) -> Result<(), Error> {
        let tracers = self.active.tracers & !(1 << index) | u32::from(on) << index;
        self.activate(maps, intf::Active { tracers, ..self.active })
    }

    pub fn rotate_token_key(&mut self, maps: &GateMaps, key: token::GateKey) -> Result<(), Error> {
        let index = 1 - self.active.token_key;
        maps.put_token_key(index, &key)?;
        self.token_keys.set(index as usize, key);
        self.activate(maps, intf::Active { token_key: index, ..self.active })
    }

    fn activate(&mut self, maps: &GateMaps, active: intf::Active) -> Result<(), Error> {
        if active != self.active {
            maps.activate(&active)?;
            self.active = active;
        }
        Ok(())
    }

    fn half(&mut self, half: u32) -> &mut Half {
        &mut self.halves[(half & 1) as usize]
    }

    /// Returns the scopes' names by index, with the names of new scopes added, and the indexes whose name changed. A
    /// name is only replaced if neither the rules in force nor the new ones have it. So no packet uses the state of a
    /// scope whose name was replaced, once earlier runs of the BPF program have ended.
    fn name(&self, rules: &GateRules) -> Result<(Vec<String>, Vec<u32>), Error> {
        let mut names = self.names.clone();
        let mut reused = Vec::new();
        let is_used =
            |name: &str| self.rules.scopes.iter().chain(&rules.scopes).any(|scope| scope.name == name);
        for scope in &rules.scopes {
            if index(&names, &scope.name).is_some() {
                continue;
            }
            if names.len() < intf::SCOPES as usize {
                names.push(scope.name.clone());
                continue;
            }
            let free = (1..).zip(names.iter_mut().skip(1)).find(|(_, name)| !is_used(name));
            let (index, name) =
                free.ok_or(Error::Full { what: "scopes while the previous ones are still in use" })?;
            name.clone_from(&scope.name);
            reused.push(index);
        }
        Ok((names, reused))
    }

    /// Returns whether the rules in force block or allow a prefix; `None` if they do not list it.
    fn rules_entry(&self, scope: Option<&str>, prefix: Prefix) -> Option<ListEntry> {
        let prefixes = match scope {
            None => &self.rules.prefixes,
            Some(name) => &self.rules.scopes.iter().find(|scope| scope.name == name)?.prefixes,
        };
        prefixes.iter().filter(|(listed, _)| *listed == prefix).map(|(_, entry)| *entry).max()
    }
}

impl Half {
    fn new(
        half: u32,
        rules: &GateRules,
        names: &[String],
        listed: &BTreeMap<(Option<String>, Prefix), ListEntry>,
    ) -> Self {
        let mut scopes = BTreeMap::new();
        let mut prefixes = BTreeMap::new();
        let mut put = |scope, list: &[(Prefix, ListEntry)]| {
            for (prefix, entry) in list {
                let taken = prefixes.entry(prefix_key(half, scope, *prefix)).or_insert(*entry);
                *taken = (*taken).max(*entry);
            }
        };
        put(0, &rules.prefixes);
        for scope in &rules.scopes {
            let Some(index) = index(names, &scope.name) else { continue };
            scopes.extend(scope.places.iter().map(|place| (place.key(half), index)));
            put(index, &scope.prefixes);
        }
        for ((scope, prefix), entry) in listed {
            let scope = scope.as_ref().map_or(0, |name| index(names, name).unwrap_or(intf::SCOPES));
            prefixes.insert(prefix_key(half, scope, *prefix), *entry);
        }
        Self { scopes, prefixes }
    }
}

fn prefixes_flag(half: &Half) -> u32 {
    if half.prefixes.is_empty() { 0 } else { intf::LOOKUP_PREFIXES }
}

fn index(names: &[String], name: &str) -> Option<u32> {
    let index = names.iter().position(|known| known == name).filter(|index| *index > 0)?;
    u32::try_from(index).ok()
}

/// Returns the longest time, in ticks, in which a token bucket of a client fills, over all buckets and policies.
fn fill_ticks(policies: &[intf::Policy]) -> u64 {
    let rules = [Rule::ClientInitials, Rule::ClientPackets, Rule::ClientBytes];
    let of_policy = |policy: &intf::Policy| {
        let is_on =
            |rule: Rule| policy.modes.get(rule as usize).is_some_and(|mode| *mode != RuleMode::Off as u8);
        let rates = rules.into_iter().zip(policy.client).filter(|(rule, _)| is_on(*rule));
        rates.map(|(_, rate)| rate.burst).max()
    };
    policies.iter().filter_map(of_policy).max().unwrap_or(0)
}

/// Returns the policies by index. An index whose scope is not in the rules has an empty policy.
fn policies(rules: &GateRules, names: &[String]) -> Result<Vec<intf::Policy>, Error> {
    let mut policies = vec![intf::Policy::default(); intf::SCOPES as usize];
    if let Some(interface) = policies.first_mut() {
        let modes = rules.interface;
        *interface = intf::Policy { modes: modes.encode(), ..PolicyRules::default().encode(INTERFACE)? };
    }
    for scope in &rules.scopes {
        let index = index(names, &scope.name).and_then(|index| policies.get_mut(index as usize));
        if let Some(policy) = index {
            *policy = scope.policy.encode(&scope.name)?;
        }
    }
    Ok(policies)
}

fn prefix_key(half: u32, scope: u32, prefix: Prefix) -> intf::PrefixKey {
    let (address, bits) = prefix.raw();
    let family = if prefix.address().is_ipv4() { 0 } else { intf::TABLE_V6 };
    intf::PrefixKey {
        prefix_bits: 32 + u32::from(bits),
        table: (half as u16 | family).to_be_bytes(),
        scope: (scope as u16).to_be_bytes(),
        address,
    }
}

fn prefix_of(key: &intf::PrefixKey) -> Prefix {
    let is_v6 = u16::from_be_bytes(key.table) & intf::TABLE_V6 != 0;
    Prefix::from_raw(key.address, (key.prefix_bits - 32) as u8, is_v6)
}
