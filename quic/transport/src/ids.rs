//! Connection IDs that name the process that issued them, so that a process which takes over an endpoint's socket
//! recognizes the packets of its predecessor's connections ([`takeover`](crate::takeover)).
//!
//! An ID has [`ID_LEN`] bytes: a random byte, the generation of the process, a random number of three bytes, and a tag
//! of three bytes that only processes with the endpoint's key can compute.

use std::{
    hash::{BuildHasher as _, Hasher as _, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
};

use quinn_proto::{ConnectionId, ConnectionIdGenerator, InvalidCid};
use ring::hmac;

/// Length of the connection IDs of endpoints, bytes.
pub const ID_LEN: usize = 8;

/// Place of the generation in an ID.
const GENERATION: usize = 1;
/// Place of the tag in an ID. It covers the bytes before it.
const TAG: usize = 5;

/// The number of another process at the same endpoint that means there is none.
const NOBODY: u16 = u16::MAX;

/// The connection IDs of one process at one endpoint.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionIds {
    key: hmac::Key,
    pub generation: u8,
    /// The generation of another process at the endpoint that is alive, or [`NOBODY`].
    other: Arc<AtomicU16>,
    /// The IDs of the process whose socket this one has taken over. Its key may be another one.
    predecessor: Option<Box<ConnectionIds>>,
}

impl ConnectionIds {
    /// Makes the IDs of the process with this generation. `key` is the endpoint's.
    pub fn new(key: &[u8], generation: u8) -> Self {
        let key = hmac::Key::new(hmac::HMAC_SHA256, key);
        Self { key, generation, other: Arc::new(NOBODY.into()), predecessor: None }
    }

    /// Makes IDs of the predecessor valid, too.
    pub fn after(self, predecessor: Option<&Self>) -> Self {
        Self { predecessor: predecessor.cloned().map(Box::new), ..self }
    }

    /// Sets the generation of the other process at the endpoint, as long as it is alive. IDs of that generation are not
    /// valid here, so that quinn never ends the other process's connections by a stateless reset.
    pub fn set_other(&self, other: Option<u8>) {
        self.other.store(other.map_or(NOBODY, u16::from), Ordering::Relaxed);
    }

    /// Reports whether the process of these IDs has issued `id`.
    pub fn has_issued(&self, id: &[u8]) -> bool {
        // Packets of other generations are told apart without cryptography.
        id.len() == ID_LEN && id.get(GENERATION) == Some(&self.generation) && self.is_authentic(id)
    }

    fn is_authentic(&self, id: &[u8]) -> bool {
        id.split_at_checked(TAG).is_some_and(|(start, tag)| tag == self.tag(start))
    }

    fn tag(&self, start: &[u8]) -> [u8; ID_LEN - TAG] {
        let mut tag = [0; ID_LEN - TAG];
        tag.iter_mut().zip(hmac::sign(&self.key, start).as_ref()).for_each(|(to, from)| *to = *from);
        tag
    }
}

impl ConnectionIdGenerator for ConnectionIds {
    fn generate_cid(&mut self) -> ConnectionId {
        let mut id = RandomState::new().build_hasher().finish().to_ne_bytes();
        id[GENERATION] = self.generation;
        let tag = self.tag(&id[..TAG]);
        id[TAG..].copy_from_slice(&tag);
        ConnectionId::new(&id)
    }

    /// Checks the ID of a packet that belongs to no connection. quinn answers only valid IDs by a stateless reset. An ID
    /// of an earlier process that has ended is valid.
    fn validate(&self, id: &ConnectionId) -> Result<(), InvalidCid> {
        let other = self.other.load(Ordering::Relaxed);
        let is_of_other = id.get(GENERATION).is_some_and(|generation| u16::from(*generation) == other);
        let is_authentic = || {
            let is_earlier = || self.predecessor.as_ref().is_some_and(|earlier| earlier.has_issued(id));
            id.len() == ID_LEN && (self.is_authentic(id) || is_earlier())
        };
        if !is_of_other && is_authentic() { Ok(()) } else { Err(InvalidCid) }
    }

    fn cid_len(&self) -> usize {
        ID_LEN
    }

    fn cid_lifetime(&self) -> Option<std::time::Duration> {
        None
    }
}

/// Returns the destination connection ID of a UDP payload (RFC 8999, section 5). An ID of a packet with a short header
/// has [`ID_LEN`] bytes.
pub(crate) fn destination(packet: &[u8]) -> Option<&[u8]> {
    const LONG_HEADER: u8 = 0x80;
    match packet {
        [first, rest @ ..] if first & LONG_HEADER == 0 => rest.get(..ID_LEN),
        [_, _, _, _, _, len, rest @ ..] => rest.get(..usize::from(*len)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_names_the_process_that_issued_it() {
        let [mut first, mut second] = [0, 1].map(|generation| ConnectionIds::new(b"key", generation));
        let stranger = ConnectionIds::new(b"another key", 0);
        for _ in 0..100 {
            let id = first.generate_cid();
            assert_eq!(id.len(), ID_LEN);
            assert!(first.has_issued(&id) && !second.has_issued(&id) && !stranger.has_issued(&id), "{id}");
            assert!(second.has_issued(&second.clone().generate_cid()));
            for at in 0..ID_LEN {
                let mut forged = id.to_vec();
                forged[at] ^= 1;
                assert!(!first.has_issued(&forged), "{forged:?}");
            }
        }
        assert!(second.generate_cid() != second.generate_cid());
    }

    #[test]
    fn id_of_another_process_is_valid_only_after_that_process_has_ended() {
        let mut first = ConnectionIds::new(b"key", 255);
        let second = ConnectionIds::new(b"key", 0);
        let id = first.generate_cid();
        let is_valid = || second.validate(&id).is_ok();
        assert!(is_valid(), "a restarted process resets connections of the one before it");
        second.set_other(Some(255));
        assert!(!is_valid());
        second.set_other(None);
        assert!(is_valid());
        let stranger = ConnectionIds::new(b"another key", 0);
        assert!(stranger.validate(&id).is_err());
        assert!(stranger.after(Some(&first)).validate(&id).is_ok(), "its successor knows its key");
    }

    #[test]
    fn destination_id_is_read_from_short_and_long_headers() {
        assert_eq!(destination(&[0x40, 1, 2, 3, 4, 5, 6, 7, 8, 9]), Some(&[1, 2, 3, 4, 5, 6, 7, 8][..]));
        assert_eq!(destination(&[0xc0, 0, 0, 0, 1, 2, 7, 8, 9]), Some(&[7, 8][..]));
        for short in [&[][..], &[0x40, 1, 2], &[0xc0, 0, 0, 0, 1], &[0xc0, 0, 0, 0, 1, 9, 1]] {
            assert_eq!(destination(short), None);
        }
    }
}
