//! The number of sessions that the kernel's maps have space for, and the memory of these maps. The kernel allocates the
//! memory when objects are loaded, except for the keys of sealed sessions.

use libbpf_rs::{MapType, OpenMapMut, OpenObject, num_possible_cpus};
use millrace_kernel::object::Embedded;

use super::super::Error;
use super::intf;

/// Prefix of the names of maps that have entries only for sessions whose functions may store packets.
const KEPT: &str = "kept_";
/// Bytes that the kernel adds to each entry of a hash map.
const HASH_ENTRY: u64 = 48;

/// Bytes of packets stored for one session: sent packets (`packet_kept.h`), and received packets with the parity
/// packets of two blocks (`function_fec.bpf.c`).
pub const KEPT_BYTES: u64 = (intf::WINDOW as u64 + 128) * 2072 + 2 * (24 + 4 * 2072);
/// Bytes of the keys of a sealed session. While a key is renewed, the session has two keys.
pub const SEALED_BYTES: u64 = 2 * super::seal::KEY_BYTES as u64;

/// The numbers of sessions that maps are sized for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionRoom {
    /// Largest number of sessions that may be open at the same time.
    pub sessions: u32,
    /// Largest number of sessions whose functions may store packets. They are the sessions with the lowest indices.
    pub storing_sessions: u32,
}

impl Default for SessionRoom {
    fn default() -> Self {
        Self { sessions: intf::SESSIONS as u32, storing_sessions: intf::STORING_SESSIONS as u32 }
    }
}

impl SessionRoom {
    /// Returns the number of entries that a map needs, given that it was compiled with `compiled` entries.
    fn entries(&self, name: &str, kind: MapType, compiled: u32) -> u32 {
        // Program arrays and ring buffers do not depend on the number of sessions.
        const OF_SESSIONS: [MapType; 4] =
            [MapType::Array, MapType::PercpuArray, MapType::Hash, MapType::ArrayOfMaps];
        let (unit, wanted) = match name.starts_with(KEPT) {
            true => (intf::STORING_SESSIONS as u32, self.storing_sessions),
            false => (intf::SESSIONS as u32, self.sessions),
        };
        // Maps of sessions were compiled with a number of entries that is a multiple of the default number of sessions.
        // They are resized to the same multiple of the configured number of sessions.
        match OF_SESSIONS.contains(&kind) && compiled > 0 && compiled.is_multiple_of(unit) {
            true => compiled / unit * wanted,
            false => compiled,
        }
    }

    /// Resizes the maps of an opened object to these numbers of sessions.
    pub(super) fn fit(&self, object: &mut OpenObject) -> Result<(), Error> {
        for mut map in object.maps_mut() {
            let entries = self.entries(&name(&map), map.map_type(), map.max_entries());
            if entries != map.max_entries() {
                map.set_max_entries(entries.max(1)).map_err(Error::Open)?;
            }
        }
        Ok(())
    }

    /// Returns the bytes of an object's maps, except those in `shared`, which belong to other objects.
    pub(super) fn bytes(&self, object: &mut OpenObject, shared: &[&str]) -> Result<u64, Error> {
        let cpus = num_possible_cpus().map_err(Error::Open)? as u64;
        let own = object.maps_mut().filter(|map| !shared.contains(&name(map).as_str()));
        Ok(own.map(|map| self.bytes_of(&map, cpus)).sum())
    }

    fn bytes_of(&self, map: &OpenMapMut<'_>, cpus: u64) -> u64 {
        let kind = map.map_type();
        let entries = u64::from(self.entries(&name(map), kind, map.max_entries()));
        // The kernel rounds the size of each value in a map up to a multiple of 8 bytes.
        let value = u64::from(map.value_size()).next_multiple_of(8);
        match kind {
            MapType::RingBuf => entries,
            MapType::PercpuArray => entries * value * cpus,
            MapType::Hash => entries * (u64::from(map.key_size()).next_multiple_of(8) + value + HASH_ENTRY),
            _ => entries * value,
        }
    }
}

/// Returns the bytes of the dispatcher's maps, and of the maps for sealing if `is_sealed`. Maps of functions and keys
/// are not included.
pub fn base_bytes(room: &SessionRoom, is_sealed: bool) -> Result<u64, Error> {
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
    fn bpf_map_sizes_grow_with_the_configured_number_of_sessions() {
        let room = SessionRoom { sessions: 1000, storing_sessions: 20 };
        let table = [
            ("state", MapType::Array, 64, 1000),
            ("seal_keys", MapType::ArrayOfMaps, 192, 3000),
            ("times", MapType::PercpuArray, 64, 1000),
            ("sessions", MapType::Hash, 64, 1000),
            ("kept_packets", MapType::Array, 16 * 1024, 20 * 1024),
            ("kept_come", MapType::Array, 16 * 128, 20 * 128),
            ("works", MapType::PercpuArray, 3, 3),
            (".rodata.config", MapType::Array, 1, 1),
            ("messages", MapType::RingBuf, 65536, 65536),
            ("programs_tx", MapType::ProgArray, 64, 64),
        ];
        for (name, kind, compiled, want) in table {
            assert_eq!(room.entries(name, kind, compiled), want, "{name}");
            assert_eq!(SessionRoom::default().entries(name, kind, compiled), compiled, "{name}");
        }
    }

    /// `KEPT_BYTES` is the memory that one more session with stored packets takes in the maps.
    #[test]
    fn bytes_reserved_for_a_session_match_its_maps() {
        use crate::{FUNCTIONS, packet::OpenedFunction};
        let fec = FUNCTIONS.iter().find(|it| it.name == "fec").expect("fec").image;
        let bytes = |storing_sessions| {
            let room = SessionRoom { sessions: 64, storing_sessions };
            base_bytes(&room, false).expect("bytes")
                + OpenedFunction::open(fec).expect("fec").bytes(&room).expect("bytes")
        };
        assert_eq!(bytes(17) - bytes(16), KEPT_BYTES);
    }
}
