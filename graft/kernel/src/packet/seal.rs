//! Sealed (encrypted) sessions: installs keys for the BPF programs that encrypt and decrypt datagrams
//! (`bpf/seal.bpf.c`). The daemons agree on the keys.

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType};
use millrace_kernel::crypto::{QuicKeys, TAG_LEN, TEXT_MAX};
use millrace_kernel::object::{Embedded, LoadedObject, embedded, write};
use std::os::fd::{AsFd, AsRawFd};

use super::super::Error;
use super::intf::{SealKey as Key, generated};
use super::{FunctionSession, PacketHooks, SessionEnds};

/// Bytes that encryption (sealing) adds to a datagram, in addition to its frame.
pub const SEAL_BYTES: usize = TAIL + TAG_LEN;
/// Longest datagram that can be sealed, in bytes, frame included.
pub const SEALED_MAX: usize = TEXT_MAX;

const TAIL: usize = size_of::<generated::SealTail>();
/// Number of entries that each session has in the kernel's map of keys.
const PLACES: u32 = generated::SEAL_PLACES;
const SEALS: u32 = generated::SEAL_SEALS;
/// Maps that the sealing programs share with the dispatcher.
pub(super) const SHARED: [&str; 10] = [
    "works",
    "shared",
    "programs_tx",
    "programs_rx",
    "programs_repair",
    "stages_tx",
    "stages_rx",
    "seal_calls",
    "messages",
    "active",
];
/// Indices in `stages_tx` and `stages_rx`. FIRST is the sealing program; SECOND is the dispatcher's program that runs
/// after it.
const FIRST: u32 = 0;
const SECOND: u32 = 1;

/// Bytes of a key in the kernel's map, with its counters and its replay window.
pub(super) const KEY_BYTES: usize = size_of::<Key>();

/// The key phase, 0 or 1, which each sealed datagram states. While a key is renewed, the old and the new key are both
/// valid, as in QUIC.
pub type KeyPhase = u8;

/// The keys of both directions of a session. They must not be used for any other session or after a restart, since
/// datagram numbers begin at 0 again.
#[derive(Clone)]
pub struct SealKeys {
    /// Key and IV with which outgoing datagrams are encrypted.
    pub seals: QuicKeys,
    /// Key and IV with which incoming datagrams are decrypted.
    pub opens: QuicKeys,
    /// Largest number of datagrams that may be encrypted with the outgoing key.
    pub limit: u64,
}

/// Numbers of datagrams that were processed with a key. The daemon decides by these counts when to replace the key (RFC
/// 9001, section 6.6).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wear {
    /// Number of datagrams that were encrypted with the key.
    pub sealed: u64,
    /// Number of received datagrams that failed authentication with the key.
    pub failures: u64,
}

/// The installed keys of a sealed session.
#[derive(Default)]
pub(super) struct Sealed {
    /// Kernel map of each key, by key phase.
    keys: [Option<MapHandle>; 2],
    /// Key phase of the key that encrypts outgoing datagrams; `None` before [`PacketHooks::seal_with`] is called.
    phase: Option<KeyPhase>,
}

/// The loaded BPF programs that encrypt and decrypt (seal and open) datagrams.
pub(super) struct Stages {
    _object: LoadedObject,
    keys: MapHandle,
}

pub(super) fn object() -> Embedded {
    embedded!("seal.bpf.o")
}

impl PacketHooks {
    /// Opens a session whose datagrams are all sealed. It sends and accepts no datagram until it has keys. The
    /// session's own key ([`FunctionSession::key`]) authenticates only the frames.
    pub fn open_sealed(&mut self, session: FunctionSession) -> Result<(), Error> {
        if self.stages.is_none() {
            self.stages = Some(self.load_stages()?);
        }
        self.open_with(session, Some(Sealed::default()))
    }

    fn load_stages(&mut self) -> Result<Stages, Error> {
        let mut open = object().open()?;
        self.room.fit(open.object_mut())?;
        for name in SHARED {
            let shared = self.object.handle(name)?;
            open.map(name)?.reuse_fd(shared.as_fd()).map_err(Error::Open)?;
        }
        let mut object = open.load()?;
        for (table, entry, program) in
            [("stages_tx", FIRST, "packet_seal"), ("stages_rx", FIRST, "packet_open")]
        {
            let fd = object.program(program)?.as_fd().as_raw_fd().to_ne_bytes();
            write(&self.object.handle(table)?, table, &entry.to_ne_bytes(), &fd)?;
        }
        // The sealing programs and the dispatcher call each other by tail calls. Entry 0 is the sealing program, and
        // entry 1 the dispatcher's program after it.
        for (table, program) in [("stages_tx", "packet_tx_out"), ("stages_rx", "packet_rx_opened")] {
            let fd = self.object.program(program)?.as_fd().as_raw_fd().to_ne_bytes();
            write(&self.object.handle(table)?, table, &SECOND.to_ne_bytes(), &fd)?;
        }
        let keys = object.handle("seal_keys")?;
        Ok(Stages { _object: object, keys })
    }

    fn stages(&self) -> Result<&Stages, Error> {
        self.stages.as_ref().ok_or(Error::Clear)
    }

    /// Installs the keys of a key phase, which decrypt incoming datagrams from now on. Earlier keys of this phase are
    /// replaced; keys of the other phase stay.
    pub fn install(&mut self, ends: &SessionEnds, phase: KeyPhase, keys: &SealKeys) -> Result<(), Error> {
        let phase = phase & 1;
        let map = make(phase, keys)?;
        self.put_key(ends, u32::from(phase), &map)?;
        self.sealed_mut(ends)?.keys[usize::from(phase)] = Some(map);
        Ok(())
    }

    /// Encrypts outgoing datagrams with the keys of this key phase from now on. The change is one map write.
    pub fn seal_with(&mut self, ends: &SessionEnds, phase: KeyPhase) -> Result<(), Error> {
        let phase = phase & 1;
        let sealed = self.sealed(ends)?;
        let map = sealed.keys[usize::from(phase)].as_ref().ok_or(Error::NoKeys)?;
        // The entries for sealing and for opening refer to the same map of the key, so that sealing and opening update
        // the same counters.
        self.put_key(ends, SEALS, map)?;
        self.sealed_mut(ends)?.phase = Some(phase);
        Ok(())
    }

    /// Removes the keys of this key phase, which then decrypt no more datagrams.
    pub fn discard(&mut self, ends: &SessionEnds, phase: KeyPhase) -> Result<(), Error> {
        let phase = phase & 1;
        if self.sealed_mut(ends)?.keys[usize::from(phase)].take().is_some() {
            let place = self.find(ends)?.raw.index * PLACES + u32::from(phase);
            self.stages()?.keys.delete(&place.to_ne_bytes()).map_err(Error::State)?;
        }
        Ok(())
    }

    /// Returns how much the key for outgoing datagrams was used; `None` if no key was selected by [`Self::seal_with`].
    pub fn wear(&self, ends: &SessionEnds) -> Result<Option<Wear>, Error> {
        let sealed = self.sealed(ends)?;
        let map = sealed.phase.and_then(|phase| sealed.keys[usize::from(phase)].as_ref());
        let Some(map) = map else { return Ok(None) };
        let value = map.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).map_err(Error::State)?.unwrap_or_default();
        let word = |at: usize| {
            value
                .get(8 * at..8 * at + 8)
                .and_then(|bytes| bytes.try_into().ok())
                .map_or(0, u64::from_ne_bytes)
        };
        Ok(Some(Wear { sealed: word(0), failures: word(2) }))
    }

    /// Removes a session's keys from the kernel, since another session may get the same index.
    pub(super) fn end_sealed(&self, index: u32) {
        let Some(stages) = &self.stages else { return };
        for place in 0..PLACES {
            // Deleting fails if the session has no key of this phase, which is no error here.
            let _ = stages.keys.delete(&(index * PLACES + place).to_ne_bytes());
        }
    }

    fn put_key(&self, ends: &SessionEnds, place: u32, map: &MapHandle) -> Result<(), Error> {
        let place = self.find(ends)?.raw.index * PLACES + place;
        let fd = map.as_fd().as_raw_fd().to_ne_bytes();
        Ok(write(&self.stages()?.keys, "seal_keys", &place.to_ne_bytes(), &fd)?)
    }

    fn sealed(&self, ends: &SessionEnds) -> Result<&Sealed, Error> {
        self.find(ends)?.sealed.as_ref().ok_or(Error::Clear)
    }

    fn sealed_mut(&mut self, ends: &SessionEnds) -> Result<&mut Sealed, Error> {
        let missing = Error::NoSession { local: ends.local, remote: ends.remote };
        self.sessions.get_mut(ends).ok_or(missing)?.sealed.as_mut().ok_or(Error::Clear)
    }
}

/// Creates a map with one key, whose datagram numbers begin at 0. Userspace never writes the map again, so no number is
/// used twice.
fn make(phase: KeyPhase, keys: &SealKeys) -> Result<MapHandle, Error> {
    let options = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    let key = size_of::<u32>() as u32;
    let value = size_of::<Key>() as u32;
    let map =
        MapHandle::create(MapType::Array, Some("seal_key"), key, value, 1, &options).map_err(Error::State)?;
    // `struct seal_key` begins with the next datagram number, the limit of datagrams, the number of failed
    // authentications and the key phase.
    let numbers = [0, keys.limit, 0, u64::from(phase)].map(u64::to_ne_bytes).concat();
    let mut bytes = [&numbers[..], keys.seals.as_bytes(), keys.opens.as_bytes()].concat();
    // In `struct seal_key`, the replay window follows the keys. It is empty at first.
    bytes.resize(size_of::<Key>(), 0);
    map.update(&0u32.to_ne_bytes(), &bytes, MapFlags::ANY).map_err(Error::State)?;
    Ok(map)
}
