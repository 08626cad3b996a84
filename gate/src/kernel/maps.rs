//! The handles of the gate's maps, and of the programs that change maps for userspace.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};

use libbpf_rs::{ErrorKind, MapCore, MapFlags, MapHandle};
use millrace_kernel::Error;
use millrace_kernel::barrier::Barrier;
use millrace_kernel::crypto::gcm_constants;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::{LoadedObject, write};
use millrace_kernel::prefix::{Prefix, mapped, mask, unmapped};
use millrace_kernel::raw::run;
use nix::libc;

use super::intf;
use super::reason::{Event, Pass, Rule};
use super::rules::ListEntry;
use super::token;
use super::{Config, GateTotals, KernelClient, OBJECT, PacketCounter, ScopeStatistics, TableFill};

pub(super) struct GateMaps {
    active: MapHandle,
    scopes: MapHandle,
    policies: MapHandle,
    prefixes: MapHandle,
    untagged: MapHandle,
    bare: MapHandle,
    counters: MapHandle,
    token_keys: MapHandle,
    connections: MapHandle,
    clients: MapHandle,
    /// Maps whose entries are deleted with their scope: `handshakes`, `openings`, `paths` and `buckets`.
    others: [MapHandle; 4],
    states: MapHandle,
    tracers: MapHandle,
    traced: MapHandle,
    /// Number of entries in each map of [`intf::WALKED`], counted by the latest pass that removed expired entries.
    walked: [AtomicU64; intf::WALKED.len()],
    /// Number of times that each scope index was given to another scope. Read-locked during every operation on a scope,
    /// and write-locked while an index is given to another scope.
    turns: RwLock<[u32; intf::SCOPES as usize]>,
    pub barrier: Barrier,
    count: OwnedFd,
    publish: OwnedFd,
    expire: OwnedFd,
    forget: OwnedFd,
    walk: Mutex<()>,
    masks: [u8; 2],
}

/// Number of a map's entries that one run of `gate_expire` handles. Each run first skips the entries of earlier runs,
/// so with a smaller number each run takes less time, but all runs together take more.
const WALK_PART: u32 = 1 << 15;

const REASONS: u32 = (Rule::ALL.len() + Pass::ALL.len()) as u32;

/// Key and nonce of the Retry integrity tag, for QUIC versions 1 and 2 (RFC 9001, section 5.8, and RFC 9369, section
/// 3.3.3).
const RETRY: [([u8; 16], [u8; 12]); 2] = [
    (
        0xbe0c_690b_9f66_575a_1d76_6b54_e368_c84e_u128.to_be_bytes(),
        [0x46, 0x15, 0x99, 0xd3, 0x5d, 0x63, 0x2b, 0xf2, 0x23, 0x98, 0x25, 0xbb],
    ),
    (
        0x8fb4_b01b_56ac_48e2_60fb_cbce_ad7c_cc92_u128.to_be_bytes(),
        [0xd8, 0x69, 0x69, 0xbc, 0x2d, 0x7c, 0x6d, 0x99, 0x90, 0xef, 0xb0, 0x4a],
    ),
];

impl GateMaps {
    pub fn new(object: &mut LoadedObject, config: &Config) -> Result<Self, Error> {
        let retry_keys = object.handle("retry_keys")?;
        for (index, (key, nonce)) in (0u32..).zip(&RETRY) {
            write(&retry_keys, "retry_keys", &index.to_ne_bytes(), &gcm_constants(key, nonce))?;
        }
        Ok(Self {
            active: object.handle("active")?,
            scopes: object.handle("scopes")?,
            policies: object.handle("policies")?,
            prefixes: object.handle("prefixes")?,
            untagged: object.handle("untagged")?,
            bare: object.handle("bare")?,
            counters: object.handle("counters")?,
            token_keys: object.handle("token_keys")?,
            connections: object.handle("connections")?,
            clients: object.handle("clients")?,
            others: [
                object.handle("handshakes")?,
                object.handle("openings")?,
                object.handle("paths")?,
                object.handle("buckets")?,
            ],
            states: object.handle("states")?,
            tracers: object.handle("tracers")?,
            traced: object.handle("traced")?,
            walked: Default::default(),
            turns: RwLock::new([0; intf::SCOPES as usize]),
            barrier: Barrier::new(object)?,
            count: program(object, "gate_count")?,
            publish: program(object, "gate_publish")?,
            expire: program(object, "gate_expire")?,
            forget: program(object, "gate_forget")?,
            walk: Mutex::default(),
            masks: [96 + narrowest(&config.client_prefix_v4), narrowest(&config.client_prefix_v6)],
        })
    }

    // --- Rules ---

    /// Deletes these keys from the maps `scopes` and `prefixes`.
    pub fn clear<'a>(
        &self,
        scopes: impl Iterator<Item = &'a intf::ScopeKey>,
        prefixes: impl Iterator<Item = &'a intf::PrefixKey>,
    ) -> Result<(), Error> {
        for key in scopes {
            delete(&self.scopes, "scopes", key.as_bytes())?;
        }
        for key in prefixes {
            delete(&self.prefixes, "prefixes", key.as_bytes())?;
        }
        Ok(())
    }

    /// Writes the rules to one of the two halves of each rules map. The BPF program must not be using that half.
    pub fn write(
        &self,
        half: u32,
        policies: &[intf::Policy],
        scopes: &BTreeMap<intf::ScopeKey, u32>,
        prefixes: &BTreeMap<intf::PrefixKey, ListEntry>,
    ) -> Result<(), Error> {
        for (index, policy) in (half * intf::SCOPES..).zip(policies) {
            write(&self.policies, "policies", &index.to_ne_bytes(), policy.as_bytes())?;
        }
        for (key, index) in scopes {
            write(&self.scopes, "scopes", key.as_bytes(), &index.to_ne_bytes())?;
        }
        prefixes.iter().try_for_each(|(key, entry)| self.put_prefix(key, *entry))
    }

    pub fn put_prefix(&self, key: &intf::PrefixKey, entry: ListEntry) -> Result<(), Error> {
        let rank = key.prefix_bits << intf::ENTRY_BITS | entry as u32;
        write(&self.prefixes, "prefixes", key.as_bytes(), &rank.to_ne_bytes())
    }

    /// Sets whether packets of an interface may have lost their VLAN tags.
    pub fn set_untagged(&self, ifindex: i32, untagged: bool) -> Result<(), Error> {
        let key = ifindex.to_ne_bytes();
        match untagged {
            true => write(&self.untagged, "untagged", &key, &[0; 4]),
            false => delete(&self.untagged, "untagged", &key),
        }
    }

    /// Sets whether frames of an interface begin with their IP header.
    pub fn set_bare(&self, ifindex: i32, bare: bool) -> Result<(), Error> {
        let key = ifindex.to_ne_bytes();
        match bare {
            true => write(&self.bare, "bare", &key, &[0; 4]),
            false => delete(&self.bare, "bare", &key),
        }
    }

    pub fn activate(&self, active: &intf::Active) -> Result<(), Error> {
        write(&self.active, "active", &0u32.to_ne_bytes(), active.as_bytes())
    }

    pub fn put_token_key(&self, index: u32, key: &token::GateKey) -> Result<(), Error> {
        let key = intf::TokenKey { key: key.words(), valid: 1, pad: 0 };
        write(&self.token_keys, "token_keys", &index.to_ne_bytes(), key.as_bytes())
    }

    // --- Tracers ---

    /// Writes the filter of a trace that is not active yet, and clears its counters.
    pub fn put_tracer(&self, index: u32, tracer: &intf::Tracer) -> Result<(), Error> {
        reset::<intf::Traced>(&self.traced, "traced", index)?;
        write(&self.tracers, "tracers", &index.to_ne_bytes(), tracer.as_bytes())
    }

    pub fn traced(&self, index: u32) -> Result<intf::Traced, Error> {
        let values = per_cpu::<intf::Traced>(&self.traced, "traced", index)?;
        Ok(values.into_iter().fold(intf::Traced::default(), |sum, raw| intf::Traced {
            matched: sum.matched + raw.matched,
            left_out: sum.left_out + raw.left_out,
            lost: sum.lost + raw.lost,
        }))
    }

    // --- Scopes ---

    /// Returns how many earlier scopes, now deleted, had this scope's index.
    pub fn turn(&self, scope: u32) -> u32 {
        let turns = self.turns.read().unwrap_or_else(PoisonError::into_inner);
        turns.get(scope as usize).copied().unwrap_or_default()
    }

    /// Runs an operation on a scope. Returns an error if another scope has the index now.
    pub fn in_turn<T>(
        &self,
        scope: u32,
        turn: u32,
        work: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        let turns = self.turns.read().unwrap_or_else(PoisonError::into_inner);
        if turns.get(scope as usize) == Some(&turn) {
            work()
        } else {
            Err(Error::Config("the scope does not exist any more"))
        }
    }

    /// Deletes all state of a scope, so that its index can be reused. The rules in force must not have the scope any
    /// more.
    pub fn forget_scope(&self, scope: u32) -> Result<(), Error> {
        let mut turns = self.turns.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(turn) = turns.get_mut(scope as usize) {
            *turn = turn.wrapping_add(1);
        }
        let [handshakes, openings, paths, buckets] = &self.others;
        let of_id = |key: &[u8]| intf::Id::from_bytes(key).map(|id| id.scope);
        let of_client = |key: &[u8]| intf::Client::from_bytes(key).map(|client| client.scope.into());
        let of_path = |key: &[u8]| intf::Path::from_bytes(key).map(|path| path.scope);
        let of_bucket = |key: &[u8]| intf::BucketKey::from_bytes(key).map(|key| key.scope.into());
        delete_of(&self.connections, "connections", scope, of_id)?;
        delete_of(handshakes, "handshakes", scope, of_id)?;
        delete_of(openings, "openings", scope, of_id)?;
        delete_of(paths, "paths", scope, of_path)?;
        delete_of(&self.clients, "clients", scope, of_client)?;
        delete_of(buckets, "buckets", scope, of_bucket)?;
        let nothing = vec![0; self.states.value_size() as usize];
        write(&self.states, "states", &scope.to_ne_bytes(), &nothing)?;
        (scope * REASONS..(scope + 1) * REASONS)
            .try_for_each(|key| reset::<intf::Counter>(&self.counters, "counters", key))
    }

    // --- Connections ---

    /// Returns the key of the client that has this IP address: the prefix of the address, and the scope.
    fn client(&self, scope: u32, address: std::net::IpAddr) -> intf::Client {
        let address = address.to_canonical();
        let [v4, v6] = self.masks;
        let len = if address.is_ipv4() { v4 } else { v6 };
        intf::Client { address: mask(mapped(address), len), scope: scope as u16, level: 0 }
    }

    /// Changes the client's number of connections atomically, by a program in the kernel, and returns the new number.
    pub fn change_count(&self, scope: u32, address: std::net::IpAddr, change: i32) -> Result<u32, Error> {
        let client = self.client(scope, address);
        // The BPF program returns an error if other CPUs keep changing the client's entry. 64 such errors in a row are
        // practically impossible.
        for _ in 0..64 {
            let mut call = intf::CountCall { client, change, ..Default::default() };
            run(&self.count, &mut call).map_err(|source| Error::Run { program: "gate_count", source })?;
            if call.error == 0 {
                return Ok(call.connections);
            }
        }
        Err(Error::Full { what: "clients" })
    }

    pub fn connections(&self, scope: u32, address: std::net::IpAddr) -> Result<u32, Error> {
        let value = self
            .clients
            .lookup(self.client(scope, address).as_bytes(), MapFlags::ANY)
            .map_err(|source| Error::Read { what: "clients", source })?;
        let count = value.and_then(|bytes| intf::Count::from_bytes(&bytes));
        Ok(count.map_or(0, |count| live(&count)))
    }

    pub fn clients(&self, scope: u32) -> Vec<KernelClient> {
        let keys = self.clients.keys().filter_map(|key| intf::Client::from_bytes(&key));
        keys.filter(|client| u32::from(client.scope) == scope && client.level == 0)
            .filter_map(|client| {
                let value = self.clients.lookup(client.as_bytes(), MapFlags::ANY).ok()??;
                let connections = live(&intf::Count::from_bytes(&value)?);
                let address = unmapped(client.address);
                let [v4, v6] = self.masks;
                let len = if address.is_ipv4() { v4 - 96 } else { v6 };
                (connections > 0).then_some(KernelClient { prefix: Prefix::new(address, len)?, connections })
            })
            .collect()
    }

    pub fn publish(&self, scope: u32, id: &[u8]) -> Result<(), Error> {
        let mut call = intf::PublishCall { id: id_key(scope, id)?, error: 0 };
        run(&self.publish, &mut call).map_err(|source| Error::Run { program: "gate_publish", source })?;
        match -call.error {
            0 => Ok(()),
            libc::E2BIG | libc::ENOMEM => Err(Error::Full { what: "connection IDs" }),
            error => Err(Error::Run { program: "gate_publish", source: io::Error::from_raw_os_error(error) }),
        }
    }

    pub fn retire(&self, scope: u32, id: &[u8]) -> Result<(), Error> {
        delete(&self.connections, "connections", id_key(scope, id)?.as_bytes())
    }

    /// Removes tracked connections that are idle for too long at `now_ns` (CLOCK_MONOTONIC). Returns how many were
    /// removed. Each run of the BPF program handles only a part of a map, because a run keeps its CPU until it ends.
    pub fn expire(&self, now_ns: u64) -> Result<u64, Error> {
        // Two passes at the same time would both find the same connections idle, and count each removed connection
        // twice.
        let _alone = self.walk.lock().unwrap_or_else(PoisonError::into_inner);
        (0..)
            .zip(&self.walked)
            .try_fold(0, |expired, (walk, entries)| Ok(expired + self.expire_in(walk, entries, now_ns)?))
    }

    fn expire_in(&self, walk: u32, entries: &AtomicU64, now_ns: u64) -> Result<u64, Error> {
        let mut from = 0;
        let mut expired = 0;
        loop {
            let to = from + WALK_PART;
            let mut call = intf::ExpireCall { now_ns, walk, from, to, ..Default::default() };
            run(&self.expire, &mut call).map_err(|source| Error::Run { program: "gate_expire", source })?;
            expired += call.expired;
            if call.at < to {
                entries.store(call.at.into(), Ordering::Relaxed);
                return Ok(expired);
            }
            // Each entry that this run of the BPF program removed has moved all later entries of the map forward by one
            // position.
            from = to - call.removed;
        }
    }

    /// Returns how many entries each map had when expired entries were last removed, and how many it may have.
    pub fn tables(&self) -> impl Iterator<Item = TableFill> {
        let [handshakes, openings, paths, _] = &self.others;
        let maps = [&self.connections, paths, &self.clients, handshakes, openings];
        intf::WALKED.into_iter().zip(&self.walked).zip(maps).map(|((name, entries), map)| TableFill {
            name,
            entries: entries.load(Ordering::Relaxed),
            room: map.max_entries().into(),
        })
    }

    /// Clears one of the two generations of bits in the Bloom filter (`gate_marks.h`). Meanwhile, the BPF program must
    /// set bits only in the other generation.
    pub fn forget(&self, age: u32) -> Result<(), Error> {
        let mut call = intf::ForgetCall { age: age.into() };
        run(&self.forget, &mut call).map_err(|source| Error::Run { program: "gate_forget", source })
    }

    // --- Counters ---

    pub fn statistics(&self, names: &[String], events: &[u64]) -> Result<GateTotals, Error> {
        let scopes = (0..).zip(names).map(|(index, name)| self.scope_statistics(index, name));
        let mut all = [0; Event::ALL.len()];
        all.iter_mut().zip(events).for_each(|(to, count)| *to = *count);
        Ok(GateTotals { scopes: scopes.collect::<Result<_, _>>()?, events: all })
    }

    fn scope_statistics(&self, index: u32, name: &str) -> Result<ScopeStatistics, Error> {
        let at = index * REASONS;
        let mut statistics =
            ScopeStatistics { name: name.to_owned(), rules: Default::default(), passes: Default::default() };
        for (key, to) in (at..).zip(statistics.rules.iter_mut().chain(&mut statistics.passes)) {
            *to = self.counter(key)?;
        }
        Ok(statistics)
    }

    /// Returns how many prefixes one half of the map `prefixes` has room for.
    pub fn room_for_prefixes(&self) -> u64 {
        u64::from(self.prefixes.max_entries()) / 2
    }

    fn counter(&self, key: u32) -> Result<PacketCounter, Error> {
        let values = per_cpu::<intf::Counter>(&self.counters, "counters", key)?;
        Ok(values.into_iter().fold(PacketCounter::default(), |sum, raw| PacketCounter {
            packets: sum.packets + raw.packets,
            bytes: sum.bytes + raw.bytes,
            monitored: sum.monitored + raw.monitored,
        }))
    }
}

fn narrowest(prefixes: &[u8]) -> u8 {
    prefixes.first().copied().unwrap_or(0)
}

/// Returns the number of connections in a client's entry, or 0 if the entry is being removed.
fn live(count: &intf::Count) -> u32 {
    if count.all == u64::MAX { 0 } else { (count.all & intf::CONNECTIONS) as u32 }
}

fn id_key(scope: u32, id: &[u8]) -> Result<intf::Id, Error> {
    const ERROR: Error = Error::Config("connection IDs have 1 to 20 bytes");
    let mut key = intf::Id { scope, len: id.len() as u32, ..Default::default() };
    if id.is_empty() {
        return Err(ERROR);
    }
    key.bytes.get_mut(..id.len()).ok_or(ERROR)?.copy_from_slice(id);
    Ok(key)
}

fn program(object: &LoadedObject, name: &'static str) -> Result<OwnedFd, Error> {
    let program = object.program(name)?;
    program.as_fd().try_clone_to_owned().map_err(|source| Error::Run { program: OBJECT, source })
}

/// Reads an entry of a per-CPU array: a value for each CPU.
fn per_cpu<T: Plain>(map: &MapHandle, what: &'static str, key: u32) -> Result<Vec<T>, Error> {
    let values = map.lookup_percpu(&key.to_ne_bytes(), MapFlags::ANY);
    let values = values.map_err(|source| Error::Read { what, source })?;
    Ok(values.iter().flatten().filter_map(|bytes| T::from_bytes(bytes)).collect())
}

/// Sets an entry of a per-CPU array to zeroes.
fn reset<T: Plain + Default>(map: &MapHandle, what: &'static str, key: u32) -> Result<(), Error> {
    let error = |source| Error::Write { what, source };
    let cpus = libbpf_rs::num_possible_cpus().map_err(error)?;
    let nothing = vec![T::default().as_bytes().to_vec(); cpus];
    map.update_percpu(&key.to_ne_bytes(), &nothing, MapFlags::ANY).map_err(error)
}

/// Deletes all entries of a scope. Meanwhile no BPF program may add entries of this scope.
fn delete_of(
    map: &MapHandle,
    what: &'static str,
    scope: u32,
    scope_of: impl Fn(&[u8]) -> Option<u32>,
) -> Result<(), Error> {
    // The keys are collected first: if the current key of an iteration is deleted, the kernel starts at the beginning.
    let keys: Vec<_> = map.keys().filter(|key| scope_of(key) == Some(scope)).collect();
    keys.into_iter().try_for_each(|key| delete(map, what, &key))
}

/// Deletes an entry of a map. A missing entry is no error.
fn delete(map: &MapHandle, what: &'static str, key: &[u8]) -> Result<(), Error> {
    match map.delete(key) {
        Err(source) if source.kind() == ErrorKind::NotFound => Ok(()),
        result => result.map_err(|source| Error::Write { what, source }),
    }
}
