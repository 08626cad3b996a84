//! How many sessions there is room for, and what that takes. All of it is taken when objects are loaded, and nothing more while
//! sessions come and go, but keys of sealed ones.

use libbpf_rs::{MapType, OpenMapMut, OpenObject, num_possible_cpus};
use millrace_kernel::object::Embedded;

use super::super::Error;
use super::intf;

/// Maps so called have a part for each session that may keep packets.
const KEPT: &str = "kept_";
/// What the kernel adds to an entry of a hash.
const HASH_ENTRY: u64 = 48;

/// Bytes of packets that are kept of a session: of what it has sent (`joint_kept.h`), and of what has come, with the parities of two
/// blocks (`function_fec.bpf.c`).
pub const KEPT_BYTES: u64 = (intf::WINDOW as u64 + 128) * 2072 + 2 * (24 + 4 * 2072);
/// Of the keys of a sealed session: two of them, as long as one follows on the other.
pub const SEALED_BYTES: u64 = 2 * super::seal::KEY_BYTES as u64;

/// For so many sessions at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    pub sessions: u32,
    /// Of these, as many may have functions that keep packets: the first that are open.
    pub keepers: u32,
}

impl Default for Room {
    fn default() -> Self {
        Self { sessions: intf::SESSIONS as u32, keepers: intf::KEEPERS as u32 }
    }
}

impl Room {
    /// Entries of a map that was compiled with so many.
    fn entries(&self, name: &str, kind: MapType, compiled: u32) -> u32 {
        const OF_SESSIONS: [MapType; 4] =
            [MapType::Array, MapType::PercpuArray, MapType::Hash, MapType::ArrayOfMaps];
        let (unit, wanted) = match name.starts_with(KEPT) {
            true => (intf::KEEPERS as u32, self.keepers),
            false => (intf::SESSIONS as u32, self.sessions),
        };
        match OF_SESSIONS.contains(&kind) && compiled > 0 && compiled.is_multiple_of(unit) {
            true => compiled / unit * wanted,
            false => compiled,
        }
    }

    /// Makes the maps of an object that is open as long as that takes.
    pub(super) fn fit(&self, object: &mut OpenObject) -> Result<(), Error> {
        for mut map in object.maps_mut() {
            let entries = self.entries(&name(&map), map.map_type(), map.max_entries());
            if entries != map.max_entries() {
                map.set_max_entries(entries.max(1)).map_err(Error::Open)?;
            }
        }
        Ok(())
    }

    /// Bytes of the maps of an object, but for those that it has from others.
    pub(super) fn bytes(&self, object: &mut OpenObject, shared: &[&str]) -> Result<u64, Error> {
        let cpus = num_possible_cpus().map_err(Error::Open)? as u64;
        let own = object.maps_mut().filter(|map| !shared.contains(&name(map).as_str()));
        Ok(own.map(|map| self.bytes_of(&map, cpus)).sum())
    }

    fn bytes_of(&self, map: &OpenMapMut<'_>, cpus: u64) -> u64 {
        let kind = map.map_type();
        let entries = u64::from(self.entries(&name(map), kind, map.max_entries()));
        let value = u64::from(map.value_size()).next_multiple_of(8);
        match kind {
            MapType::RingBuf => entries,
            MapType::PercpuArray => entries * value * cpus,
            MapType::Hash => entries * (u64::from(map.key_size()).next_multiple_of(8) + value + HASH_ENTRY),
            _ => entries * value,
        }
    }
}

/// Bytes of the dispatcher and of sealing, without functions and keys.
pub fn base_bytes(room: &Room, is_sealed: bool) -> Result<u64, Error> {
    let of = |object: Embedded, shared: &[&str]| {
        room.bytes(&mut super::super::object::open(object.image)?, shared)
    };
    let stages = if is_sealed { of(super::seal::object(), &super::seal::SHARED)? } else { 0 };
    Ok(of(super::object(), &[])? + stages)
}

fn name(map: &OpenMapMut<'_>) -> String {
    map.name().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_of_sessions_grows_with_them() {
        let room = Room { sessions: 1000, keepers: 20 };
        let table = [
            ("state", MapType::Array, 64, 1000),
            ("seal_keys", MapType::ArrayOfMaps, 192, 3000),
            ("times", MapType::PercpuArray, 64, 1000),
            ("sessions", MapType::Hash, 64, 1000),
            ("kept_packets", MapType::Array, 16 * 1024, 20 * 1024),
            ("kept_come", MapType::Array, 16 * 128, 20 * 128),
            ("works", MapType::PercpuArray, 3, 3),
            (".rodata.config", MapType::Array, 1, 1),
            ("words", MapType::RingBuf, 65536, 65536),
            ("programs_tx", MapType::ProgArray, 64, 64),
        ];
        for (name, kind, compiled, want) in table {
            assert_eq!(room.entries(name, kind, compiled), want, "{name}");
            assert_eq!(Room::default().entries(name, kind, compiled), compiled, "{name}");
        }
    }

    /// What `KEPT_BYTES` says of a session is what its parts of the maps take.
    #[test]
    fn what_a_session_keeps_is_stated() {
        use crate::{FUNCTIONS, joint::Function};
        let fec = FUNCTIONS.iter().find(|(name, _)| *name == "fec").expect("fec").1;
        let bytes = |keepers| {
            let room = Room { sessions: 64, keepers };
            base_bytes(&room, false).expect("bytes")
                + Function::open(fec).expect("fec").bytes(&room).expect("bytes")
        };
        assert_eq!(bytes(17) - bytes(16), KEPT_BYTES);
    }
}
