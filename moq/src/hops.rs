//! Paths of announcements through relays (draft-lcurley-moq-cluster): which relays have passed a namespace on, from its
//! publisher to the sender.

use std::fmt;

use super::wire::{WireReader, WireWriter};
use super::{DecodeError, vi64};

/// The identity of a relay or publisher in a path. [`HopId::UNNAMED`] stands for an endpoint that gives none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HopId(pub u64);

impl HopId {
    /// An endpoint without an identity. It may appear in a path several times.
    pub const UNNAMED: Self = Self(0);
    /// The largest identity that is drawn. moq-net reads no larger ones.
    pub const MAX: Self = Self((1 << 62) - 1);

    /// Whether it identifies an endpoint.
    pub fn is_named(self) -> bool {
        self != Self::UNNAMED
    }
}

impl fmt::Display for HopId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The hops of an announcement, the publisher first and the sender last. It has 1 to [`HopPath::MAX`] entries, and no
/// named one twice.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HopPath(Vec<HopId>);

/// Why a hop cannot be added to a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HopError {
    /// The path has the hop already, so it is a loop.
    #[error("a path passes a relay twice")]
    Loop,
    /// The path has [`HopPath::MAX`] hops.
    #[error("a path has more than 32 hops")]
    TooLong,
}

impl HopPath {
    /// Largest number of hops of a path.
    pub const MAX: usize = 32;

    /// Makes the path of what `publisher` announces.
    pub fn new(publisher: HopId) -> Self {
        Self(vec![publisher])
    }

    /// Returns the path with `hop` behind it.
    ///
    /// # Errors
    /// The path is full, or has the hop already.
    pub fn then(&self, hop: HopId) -> Result<Self, HopError> {
        if self.0.len() >= Self::MAX {
            return Err(HopError::TooLong);
        }
        if self.passes(hop) {
            return Err(HopError::Loop);
        }
        let mut hops = Vec::with_capacity(self.0.len() + 1);
        hops.extend_from_slice(&self.0);
        hops.push(hop);
        Ok(Self(hops))
    }

    /// Whether a named `hop` is on the path.
    pub fn passes(&self, hop: HopId) -> bool {
        hop.is_named() && self.0.contains(&hop)
    }

    /// Whether an endpoint on the path gave no identity.
    pub fn has_unnamed(&self) -> bool {
        self.0.contains(&HopId::UNNAMED)
    }

    /// The hops, the publisher first.
    pub fn hops(&self) -> &[HopId] {
        &self.0
    }

    /// The publisher. Announcements with the same named one are of the same publisher.
    pub fn publisher(&self) -> HopId {
        self.0.first().copied().unwrap_or_default()
    }

    /// The endpoint that sent the announcement.
    pub fn sender(&self) -> HopId {
        self.0.last().copied().unwrap_or_default()
    }

    /// Reads the value of HOP_PATH: hops that fill it.
    pub(super) fn decode(mut value: WireReader) -> Result<Self, DecodeError> {
        let mut path = Self(Vec::new());
        while !value.is_empty() {
            let hop = HopId(value.vi64()?);
            if path.0.len() >= Self::MAX {
                return Err(DecodeError::violation("a path has more than 32 hops"));
            }
            if path.passes(hop) {
                return Err(DecodeError::violation("a path passes a hop twice"));
            }
            path.0.push(hop);
        }
        match path.0.is_empty() {
            true => Err(DecodeError::violation("a path without hops")),
            false => Ok(path),
        }
    }

    /// Writes the value of HOP_PATH, with its length in front.
    pub(super) fn encode(&self, out: &mut WireWriter<'_>) {
        let mut value = Vec::new();
        self.0.iter().for_each(|hop| vi64::encode(hop.0, &mut value));
        out.prefixed(&value);
    }
}

impl fmt::Display for HopPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().enumerate().try_for_each(|(at, hop)| match at {
            0 => write!(f, "{hop}"),
            _ => write!(f, " > {hop}"),
        })
    }
}

impl fmt::Debug for HopPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{self}]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Draft;
    use bytes::Bytes;

    fn path(hops: &[u64]) -> HopPath {
        HopPath(hops.iter().copied().map(HopId).collect())
    }

    fn decode(bytes: &[u8]) -> Result<HopPath, DecodeError> {
        HopPath::decode(WireReader::new(Draft::NEWEST, Bytes::copy_from_slice(bytes)))
    }

    #[test]
    fn path_has_neither_a_hop_twice_nor_more_than_its_bound() {
        let own = HopId(7);
        assert_eq!(path(&[1, 0, 0]).then(own), Ok(path(&[1, 0, 0, 7])));
        assert_eq!(path(&[7, 1]).then(own), Err(HopError::Loop));
        assert_eq!(path(&[0]).then(HopId::UNNAMED), Ok(path(&[0, 0])));
        let full: Vec<_> = (100..132).collect();
        assert_eq!(path(&full).then(own), Err(HopError::TooLong));
        assert!(path(&[1, 7]).passes(own) && !path(&[1, 0]).passes(HopId::UNNAMED));
    }

    #[test]
    fn value_is_hops_without_a_count() {
        let mut out = Vec::new();
        path(&[1, 2, 3]).encode(&mut WireWriter::new(Draft::NEWEST, &mut out));
        assert_eq!(out, [3, 1, 2, 3]);
        assert_eq!(decode(&out[1..]), Ok(path(&[1, 2, 3])));
        assert_eq!(decode(&[0, 5, 0]), Ok(path(&[0, 5, 0])));
    }

    #[test]
    fn value_of_a_hostile_peer_is_refused() {
        let long: Vec<u8> = (1..=33).collect();
        for (bytes, why) in [
            (&[][..], "without hops"),
            (&[4, 8, 4], "twice"),
            (&[1, 0x80], "past the end"),
            (&long, "more than 32"),
        ] {
            let refused = decode(bytes).unwrap_err();
            assert!(refused.reason.contains(why), "{bytes:?}: {refused:?}");
        }
    }
}
