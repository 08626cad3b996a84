//! Sealed sessions: keys in the kernel, and words about them (`bpf/seal.bpf.c`). On which keys both ends agree is not known here.

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType};
use millrace_kernel::crypto::{QuicKeys, TAG_LEN, TEXT_MAX};
use millrace_kernel::object::{Embedded, Loaded, embedded, write};
use millrace_kernel::siphash::siphash128;
use std::os::fd::{AsFd, AsRawFd};

use super::super::Error;
pub(super) use super::intf::SealHeard as Heard;
use super::intf::{SealKey as Key, generated};
use super::{Ends, Joints, Session, word};

/// Bytes that sealing adds to a datagram, beside its frame.
pub const SEAL_BYTES: usize = TAIL + TAG_LEN;
/// Of a datagram that is sealed, with its frame.
pub const SEALED_MAX: usize = TEXT_MAX;

const TAIL: usize = size_of::<generated::SealTail>();
const MAGIC: u8 = generated::SEAL_MAGIC as u8;
const VERSION: u8 = generated::SEAL_VERSION as u8;
const WORD: u8 = generated::SEAL_WORD as u8;
/// Of a session in the map of keys.
const PLACES: u32 = generated::SEAL_PLACES;
const SEALS: u32 = generated::SEAL_SEALS;
/// Maps of the dispatcher that the stages share.
pub(super) const SHARED: [&str; 10] = [
    "works",
    "shared",
    "programs_tx",
    "programs_rx",
    "programs_repair",
    "stages_tx",
    "stages_rx",
    "seal_calls",
    "words",
    "active",
];
/// Entries of `stages_tx` and `stages_rx`.
const FIRST: u32 = 0;
const SECOND: u32 = 1;

/// Of a key with its numbers.
pub(super) const KEY_BYTES: usize = size_of::<Key>();

/// One of two keys that may be under way at the same time.
pub type Phase = u8;

/// Both directions of a session. Who has used them once does not use them again, in no other process either.
#[derive(Clone)]
pub struct Keys {
    pub seals: QuicKeys,
    pub opens: QuicKeys,
    /// Datagrams that may be sealed with it.
    pub limit: u64,
}

/// What ends say to each other about keys. It is authentic, and may be an old one that somebody sends again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyWord {
    pub kind: u8,
    /// Which AEAD, as both ends number them.
    pub suite: u8,
    pub phase: Phase,
    pub nonces: [[u8; 16]; 2],
}

/// How much of a key is used up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wear {
    /// Datagrams that were sealed with it.
    pub sealed: u64,
    /// Datagrams that should have opened with it.
    pub failures: u64,
}

/// Of a sealed session.
pub(super) struct Sealed {
    word_key: [u64; 2],
    /// By phase.
    keys: [Option<MapHandle>; 2],
    /// That is sealed with.
    phase: Option<Phase>,
}

/// The stages, loaded.
pub(super) struct Stages {
    _object: Loaded,
    keys: MapHandle,
    sessions: MapHandle,
}

pub(super) fn object() -> Embedded {
    embedded!("seal.bpf.o")
}

impl Joints {
    /// As [`open`](Self::open), of a session of which nothing leaves or comes in but sealed: until it has keys, nothing does.
    /// Its key, and the one of its words about keys, prove nothing else.
    pub fn open_sealed(&mut self, session: Session, word_key: [u8; 16]) -> Result<(), Error> {
        if self.stages.is_none() {
            self.stages = Some(self.load_stages()?);
        }
        self.open_with(session, Some(Sealed::new(word_key)))
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
            [("stages_tx", FIRST, "joint_seal"), ("stages_rx", FIRST, "joint_open")]
        {
            let fd = object.program(program)?.as_fd().as_raw_fd().to_ne_bytes();
            write(&self.object.handle(table)?, table, &entry.to_ne_bytes(), &fd)?;
        }
        for (table, program) in [("stages_tx", "joint_tx_out"), ("stages_rx", "joint_rx_opened")] {
            let fd = self.object.program(program)?.as_fd().as_raw_fd().to_ne_bytes();
            write(&self.object.handle(table)?, table, &SECOND.to_ne_bytes(), &fd)?;
        }
        let (keys, sessions) = (object.handle("seal_keys")?, object.handle("seal_sessions")?);
        Ok(Stages { _object: object, keys, sessions })
    }

    fn stages(&self) -> Result<&Stages, Error> {
        self.stages.as_ref().ok_or(Error::Clear)
    }

    /// Opens with these keys, too, from now on, instead of those of the same phase.
    pub fn install(&mut self, ends: &Ends, phase: Phase, keys: &Keys) -> Result<(), Error> {
        let phase = phase & 1;
        let map = make(phase, keys)?;
        self.put_key(ends, u32::from(phase), &map)?;
        self.sealed_mut(ends)?.keys[usize::from(phase)] = Some(map);
        Ok(())
    }

    /// Seals with the keys of this phase from now on: one write.
    pub fn seal_with(&mut self, ends: &Ends, phase: Phase) -> Result<(), Error> {
        let phase = phase & 1;
        let sealed = self.sealed(ends)?;
        let map = sealed.keys[usize::from(phase)].as_ref().ok_or(Error::NoKeys)?;
        self.put_key(ends, SEALS, map)?;
        self.sealed_mut(ends)?.phase = Some(phase);
        Ok(())
    }

    /// Opens with the keys of this phase no longer.
    pub fn discard(&mut self, ends: &Ends, phase: Phase) -> Result<(), Error> {
        let phase = phase & 1;
        if self.sealed_mut(ends)?.keys[usize::from(phase)].take().is_some() {
            let place = self.find(ends)?.raw.index * PLACES + u32::from(phase);
            self.stages()?.keys.delete(&place.to_ne_bytes()).map_err(Error::State)?;
        }
        Ok(())
    }

    /// Of the keys that are sealed with, if there are any.
    pub fn wear(&self, ends: &Ends) -> Result<Option<Wear>, Error> {
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

    /// The payload of a datagram that says something about keys.
    pub fn key_word(&self, ends: &Ends, said: &KeyWord) -> Result<Vec<u8>, Error> {
        let KeyWord { kind, suite, phase, nonces } = *said;
        let tail = [MAGIC, VERSION << 4 | WORD, 0, 0, 0, 0, 0, 0];
        let fields = [&[kind, suite, phase, 0, 0, 0, 0, 0][..], &nonces[0], &nonces[1]].concat();
        let tag = siphash128(self.sealed(ends)?.word_key, &[&tail, &fields[..]].concat());
        Ok([&fields[..], &tag, &tail].concat())
    }

    /// Says it, from the network namespace of the calling thread.
    pub fn say_key_word(&self, ends: &Ends, said: &KeyWord) -> Result<(), Error> {
        let (paths, payload) = (self.find(ends)?.raw.paths, self.key_word(ends, said)?);
        word::send_by_all(ends, paths, word::clear_mark(self.mark), &payload).map_err(Error::Say)
    }

    /// What other ends have said about keys, as of the latest [`words`](Self::words).
    pub fn key_words(&mut self) -> Vec<(Ends, KeyWord)> {
        let raws = std::mem::take(&mut self.key_words);
        let heard = |raw: Heard| {
            let Heard { kind, suite, phase, first, second, .. } = raw;
            Some((self.ends_of(raw.session)?, KeyWord { kind, suite, phase, nonces: [first, second] }))
        };
        raws.into_iter().filter_map(heard).collect()
    }

    /// Before its first datagram.
    pub(super) fn begin_sealed(&self, index: u32, sealed: &Sealed) -> Result<(), Error> {
        let stages = self.stages()?;
        let bytes = sealed.word_key.map(u64::to_ne_bytes).concat();
        Ok(write(&stages.sessions, "seal_sessions", &index.to_ne_bytes(), &bytes)?)
    }

    /// Another session may have the index next.
    pub(super) fn end_sealed(&self, index: u32) {
        let Some(stages) = &self.stages else { return };
        for place in 0..PLACES {
            // There may be none.
            let _ = stages.keys.delete(&(index * PLACES + place).to_ne_bytes());
        }
    }

    fn put_key(&self, ends: &Ends, place: u32, map: &MapHandle) -> Result<(), Error> {
        let place = self.find(ends)?.raw.index * PLACES + place;
        let fd = map.as_fd().as_raw_fd().to_ne_bytes();
        Ok(write(&self.stages()?.keys, "seal_keys", &place.to_ne_bytes(), &fd)?)
    }

    fn sealed(&self, ends: &Ends) -> Result<&Sealed, Error> {
        self.find(ends)?.sealed.as_ref().ok_or(Error::Clear)
    }

    fn sealed_mut(&mut self, ends: &Ends) -> Result<&mut Sealed, Error> {
        let missing = Error::NoSession { local: ends.local, remote: ends.remote };
        self.sessions.get_mut(ends).ok_or(missing)?.sealed.as_mut().ok_or(Error::Clear)
    }
}

impl Sealed {
    fn new(word_key: [u8; 16]) -> Self {
        let halves = word_key.as_chunks::<8>().0;
        let word_key = [u64::from_le_bytes(halves[0]), u64::from_le_bytes(halves[1])];
        Self { word_key, keys: [None, None], phase: None }
    }
}

/// A map of one key, whose numbers begin: it is never written again from here.
fn make(phase: Phase, keys: &Keys) -> Result<MapHandle, Error> {
    let options = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    let (key, value) = (size_of::<u32>() as u32, size_of::<Key>() as u32);
    let map =
        MapHandle::create(MapType::Array, Some("seal_key"), key, value, 1, &options).map_err(Error::State)?;
    let numbers = [0, keys.limit, 0, u64::from(phase)].map(u64::to_ne_bytes).concat();
    let mut bytes = [&numbers[..], keys.seals.as_bytes(), keys.opens.as_bytes()].concat();
    bytes.resize(size_of::<Key>(), 0);
    map.update(&0u32.to_ne_bytes(), &bytes, MapFlags::ANY).map_err(Error::State)?;
    Ok(map)
}
