//! Paths of namespace announcements (draft-lcurley-moq-cluster). A path lists the publisher and the relays that
//! forwarded the announcement.

use std::fmt;

use super::wire::{WireReader, WireWriter};
use super::{DecodeError, vi64};

/// The identity of a relay or publisher in a path. [`HopId::UNNAMED`] means an endpoint without an identity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HopId(pub u64);

impl HopId {
    /// The ID of all endpoints without an identity. It may appear several times in a path.
    pub const UNNAMED: Self = Self(0);
    /// The largest ID. Relays choose their IDs at random up to this value, because moq-net does not accept larger ones.
    pub const MAX: Self = Self((1 << 62) - 1);

    /// Reports whether this ID identifies an endpoint. It is false for [`HopId::UNNAMED`].
    pub fn is_named(self) -> bool {
        self != Self::UNNAMED
    }
}

impl fmt::Display for HopId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The hops of an announcement: first the publisher, last the endpoint from which the announcement was received. A path
/// has 1 to [`HopPath::MAX`] entries, and no named hop appears twice.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HopPath(Vec<HopId>);

/// The reason why a hop cannot be added to a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HopError {
    /// The path contains the hop already, so the announcement was forwarded in a loop.
    #[error("a path passes a relay twice")]
    Loop,
    /// The path already has [`HopPath::MAX`] hops.
    #[error("a path has more than 32 hops")]
    TooLong,
}

impl HopPath {
    /// Largest number of hops of a path.
    pub const MAX: usize = 32;

    /// Makes the path of an announcement by `publisher`.
    pub fn new(publisher: HopId) -> Self {
        Self(vec![publisher])
    }

    /// Returns the path with `hop` appended.
    ///
    /// # Errors
    /// Fails if the path is full, or has the hop already.
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

    /// Returns the path with `sender` as the ID of the endpoint that sends the announcement.
    pub fn sent_by(mut self, sender: HopId) -> Self {
        self.0.pop();
        self.0.push(sender);
        self
    }

    /// Reports whether `hop` is on the path. It returns false for [`HopId::UNNAMED`].
    pub fn passes(&self, hop: HopId) -> bool {
        hop.is_named() && self.0.contains(&hop)
    }

    /// Reports whether the path contains [`HopId::UNNAMED`], the ID of endpoints without an identity.
    pub fn has_unnamed(&self) -> bool {
        self.0.contains(&HopId::UNNAMED)
    }

    /// Returns the hops, the publisher first.
    pub fn hops(&self) -> &[HopId] {
        &self.0
    }

    /// Returns the publisher's ID. If two announcements have the same publisher ID other than [`HopId::UNNAMED`], they
    /// come from the same publisher.
    pub fn publisher(&self) -> HopId {
        self.0.first().copied().unwrap_or_default()
    }

    /// Returns the ID of the endpoint that sent the announcement.
    pub fn sender(&self) -> HopId {
        self.0.last().copied().unwrap_or_default()
    }

    /// Reads the value of HOP_PATH: hops up to the end of `value`, without a count.
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

    /// Writes the value of HOP_PATH, preceded by its length.
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
    fn path_refuses_a_repeated_hop_and_a_33rd_hop() {
        let own = HopId(7);
        assert_eq!(path(&[1, 0, 0]).then(own), Ok(path(&[1, 0, 0, 7])));
        assert_eq!(path(&[7, 1]).then(own), Err(HopError::Loop));
        assert_eq!(path(&[0]).then(HopId::UNNAMED), Ok(path(&[0, 0])));
        let full: Vec<_> = (100..132).collect();
        assert_eq!(path(&full).then(own), Err(HopError::TooLong));
        assert!(path(&[1, 7]).passes(own) && !path(&[1, 0]).passes(HopId::UNNAMED));
    }

    #[test]
    fn hop_path_is_encoded_without_a_count() {
        let mut out = Vec::new();
        path(&[1, 2, 3]).encode(&mut WireWriter::new(Draft::NEWEST, &mut out));
        assert_eq!(out, [3, 1, 2, 3]);
        assert_eq!(decode(&out[1..]), Ok(path(&[1, 2, 3])));
        assert_eq!(decode(&[0, 5, 0]), Ok(path(&[0, 5, 0])));
    }

    #[test]
    fn malformed_hop_path_is_refused() {
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
