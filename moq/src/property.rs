//! Key-Value-Pairs and properties (draft-18, "Key-Value-Pair Structure" and "MOQT Properties").
//!
//! Relays copy properties verbatim, so [`Properties`] keeps the bytes that arrived and reads them on demand.

use std::fmt;

use bytes::Bytes;

use super::wire::put_prefixed;
use super::{DecodeError, GroupOrder, vi64};

const OBJECT_DELIVERY_TIMEOUT: u64 = 0x02;
const MAX_CACHE_DURATION: u64 = 0x04;
const SUBGROUP_DELIVERY_TIMEOUT: u64 = 0x06;
const IMMUTABLE_PROPERTIES: u64 = 0x0b;
const DEFAULT_PUBLISHER_PRIORITY: u64 = 0x0e;
const DEFAULT_PUBLISHER_GROUP_ORDER: u64 = 0x22;
const DYNAMIC_GROUPS: u64 = 0x30;
/// Property types that an endpoint must understand to process the track (draft-18, "Mandatory Track Properties").
const MANDATORY: std::ops::RangeInclusive<u64> = 0x4000..=0x7fff;

/// The longest value of a Key-Value-Pair, in bytes.
const MAX_VALUE: u64 = u16::MAX as u64;

/// One Key-Value-Pair. The field `kind` is the type itself. On the wire, a pair has the difference to the previous
/// pair's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyValuePair<'a> {
    /// The pair's type.
    pub kind: u64,
    /// The pair's value.
    pub value: Value<'a>,
}

/// The value of a Key-Value-Pair: an integer if its type is even, bytes if it is odd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    /// The integer value of an even type.
    Integer(u64),
    /// The byte string value of an odd type.
    Bytes(&'a [u8]),
}

/// An iterator over the Key-Value-Pairs of a block. It ends at the end of the block, or after the first error.
#[derive(Clone, Debug)]
pub struct KeyValuePairs<'a> {
    rest: &'a [u8],
    previous: u64,
}

impl<'a> KeyValuePairs<'a> {
    /// Makes an iterator over the pairs of `block`.
    pub fn new(block: &'a [u8]) -> Self {
        Self { rest: block, previous: 0 }
    }

    fn read(&mut self) -> Result<KeyValuePair<'a>, DecodeError> {
        const TRUNCATED: DecodeError =
            DecodeError::key_value("a key-value pair runs past the end of its block");
        let delta = vi64::decode(&mut self.rest).ok_or(TRUNCATED)?;
        let kind = self
            .previous
            .checked_add(delta)
            .ok_or(DecodeError::violation("the type of a key-value pair is above 2^64 - 1"))?;
        self.previous = kind;
        let number = vi64::decode(&mut self.rest).ok_or(TRUNCATED)?;
        if kind % 2 == 0 {
            return Ok(KeyValuePair { kind, value: Value::Integer(number) });
        }
        if number > MAX_VALUE {
            return Err(DecodeError::violation("the value of a key-value pair is longer than 65535 bytes"));
        }
        let (value, rest) = self.rest.split_at_checked(number as usize).ok_or(TRUNCATED)?;
        self.rest = rest;
        Ok(KeyValuePair { kind, value: Value::Bytes(value) })
    }
}

impl<'a> Iterator for KeyValuePairs<'a> {
    type Item = Result<KeyValuePair<'a>, DecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let pair = self.read();
        // After an error nothing more can be read, because the start of the next pair is unknown.
        if pair.is_err() {
            self.rest = &[];
        }
        Some(pair)
    }
}

/// A writer that appends Key-Value-Pairs. Their types must be in ascending order; equal types are allowed.
#[derive(Debug)]
pub struct PairWriter<'a> {
    out: &'a mut Vec<u8>,
    previous: u64,
}

impl<'a> PairWriter<'a> {
    /// Makes a writer that appends pairs to `out`.
    pub fn new(out: &'a mut Vec<u8>) -> Self {
        Self { out, previous: 0 }
    }

    fn kind(&mut self, kind: u64) {
        debug_assert!(kind >= self.previous, "types ascend");
        vi64::encode(kind - self.previous, self.out);
        self.previous = kind;
    }

    /// Appends an integer; `kind` must be even.
    pub fn integer(&mut self, kind: u64, value: u64) {
        debug_assert!(kind.is_multiple_of(2));
        self.kind(kind);
        vi64::encode(value, self.out);
    }

    /// Appends bytes; `kind` must be odd, and `value` at most 65535 bytes.
    pub fn bytes(&mut self, kind: u64, value: &[u8]) {
        debug_assert!(kind % 2 == 1);
        self.kind(kind);
        put_prefixed(value, self.out);
    }
}

/// A block of well-formed properties as it arrived, without its length field.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Properties(Bytes);

impl Properties {
    /// Checks that all pairs of the block are well-formed, and wraps the block.
    pub fn new(block: Bytes) -> Result<Self, DecodeError> {
        KeyValuePairs::new(&block).try_for_each(|pair| pair.map(drop))?;
        Ok(Self(block))
    }

    /// Returns the encoded block.
    pub fn as_bytes(&self) -> &Bytes {
        &self.0
    }

    /// Reports whether there are no properties.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the pairs of the block, in order. The IMMUTABLE_PROPERTIES property counts as one pair.
    pub fn iter(&self) -> impl Iterator<Item = KeyValuePair<'_>> {
        KeyValuePairs::new(&self.0).map_while(Result::ok)
    }
}

impl fmt::Debug for Properties {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// The properties of a track that affect its delivery.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrackProperties {
    /// Delivery timeout of each object, in milliseconds; 0 and `None` both mean no timeout.
    pub object_delivery_timeout: Option<u64>,
    /// Delivery timeout of each subgroup, in milliseconds; 0 and `None` both mean no timeout.
    pub subgroup_delivery_timeout: Option<u64>,
    /// Time for which an object may be served from a cache, in milliseconds.
    pub max_cache_duration: Option<u64>,
    /// Publisher priority; a lower value is sent first. Absent means 128.
    pub publisher_priority: Option<u8>,
    /// The order in which the publisher prefers groups to be sent.
    pub group_order: Option<GroupOrder>,
    /// Whether a subscriber may request that the publisher begins a new group.
    pub dynamic_groups: Option<bool>,
    /// The type of the first mandatory property. This implementation supports no mandatory property, so the track must
    /// be neither processed nor forwarded (UNSUPPORTED_EXTENSION).
    pub unsupported: Option<u64>,
}

/// The publisher priority of a track whose properties do not state one.
pub const DEFAULT_PRIORITY: u8 = 128;

impl TrackProperties {
    /// Reads `properties` as those of a track, including the pairs inside IMMUTABLE_PROPERTIES.
    pub fn parse(properties: &Properties) -> Result<Self, DecodeError> {
        let mut track = Self::default();
        for pair in properties.iter() {
            match pair {
                KeyValuePair { kind: IMMUTABLE_PROPERTIES, value: Value::Bytes(block) } => {
                    KeyValuePairs::new(block).try_for_each(|pair| track.take(pair?))?;
                }
                pair => track.take(pair)?,
            }
        }
        Ok(track)
    }

    fn take(&mut self, pair: KeyValuePair<'_>) -> Result<(), DecodeError> {
        if MANDATORY.contains(&pair.kind) {
            self.unsupported.get_or_insert(pair.kind);
        }
        let Value::Integer(value) = pair.value else { return Ok(()) };
        match pair.kind {
            OBJECT_DELIVERY_TIMEOUT => self.object_delivery_timeout = Some(value),
            SUBGROUP_DELIVERY_TIMEOUT => self.subgroup_delivery_timeout = Some(value),
            MAX_CACHE_DURATION => self.max_cache_duration = Some(value),
            DEFAULT_PUBLISHER_PRIORITY => {
                let priority = u8::try_from(value)
                    .map_err(|_| DecodeError::violation("a default publisher priority above 255"))?;
                self.publisher_priority = Some(priority);
            }
            DEFAULT_PUBLISHER_GROUP_ORDER => {
                let order = GroupOrder::from_wire(value)
                    .ok_or(DecodeError::violation("an unknown default publisher group order"))?;
                self.group_order = Some(order);
            }
            DYNAMIC_GROUPS => {
                let dynamic = match value {
                    0 => false,
                    1 => true,
                    _ => return Err(DecodeError::violation("a value of dynamic groups above 1")),
                };
                self.dynamic_groups = Some(dynamic);
            }
            _ => {}
        }
        Ok(())
    }

    /// Encodes the properties as the publisher of the track sends them.
    pub fn encode(&self) -> Properties {
        let mut out = Vec::new();
        let mut pairs = PairWriter::new(&mut out);
        let fields = [
            (OBJECT_DELIVERY_TIMEOUT, self.object_delivery_timeout),
            (MAX_CACHE_DURATION, self.max_cache_duration),
            (SUBGROUP_DELIVERY_TIMEOUT, self.subgroup_delivery_timeout),
            (DEFAULT_PUBLISHER_PRIORITY, self.publisher_priority.map(u64::from)),
            (DEFAULT_PUBLISHER_GROUP_ORDER, self.group_order.map(|order| order.to_wire().into())),
            (DYNAMIC_GROUPS, self.dynamic_groups.map(u64::from)),
        ];
        for (kind, value) in fields {
            if let Some(value) = value {
                pairs.integer(kind, value);
            }
        }
        Properties(out.into())
    }
}

/// Returns the delivery timeouts for each object and for the subgroup, in milliseconds, from the properties of a
/// subgroup's first object (draft-22, "Delivery Timeouts"). They override the timeouts of the track. If the properties
/// are malformed, no timeout is returned.
pub fn subgroup_timeouts(block: &[u8]) -> (Option<u64>, Option<u64>) {
    let mut object = None;
    let mut subgroup = None;
    let mut note = |pair: KeyValuePair<'_>| match pair {
        KeyValuePair { kind: OBJECT_DELIVERY_TIMEOUT, value: Value::Integer(value) } => object = Some(value),
        KeyValuePair { kind: SUBGROUP_DELIVERY_TIMEOUT, value: Value::Integer(value) } => {
            subgroup = Some(value)
        }
        _ => {}
    };
    for pair in KeyValuePairs::new(block).map_while(Result::ok) {
        match pair {
            KeyValuePair { kind: IMMUTABLE_PROPERTIES, value: Value::Bytes(block) } => {
                KeyValuePairs::new(block).map_while(Result::ok).for_each(&mut note);
            }
            pair => note(pair),
        }
    }
    (object, subgroup)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::Session;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// Generates Key-Value-Pairs with ascending types: each tuple has the difference to the previous type, and a value
    /// for even and for odd types.
    pub(crate) fn block() -> impl Strategy<Value = Vec<u8>> {
        vec((0..5000u64, any::<u64>(), vec(any::<u8>(), 0..30)), 0..8).prop_map(|pairs| {
            let mut out = Vec::new();
            let mut writer = PairWriter::new(&mut out);
            let mut kind = 0;
            for (delta, integer, bytes) in pairs {
                kind += delta;
                match kind % 2 {
                    0 => writer.integer(kind, integer),
                    _ => writer.bytes(kind, &bytes),
                }
            }
            out
        })
    }

    #[test]
    fn object_properties_example_of_the_draft_is_decoded() {
        // The block has the types 4 and 77. The value of 77 is the text in the draft's example.
        let mut out = Vec::new();
        let mut pairs = PairWriter::new(&mut out);
        pairs.integer(4, 2_186_796_243);
        pairs.bytes(77, b"traceID:123456");
        let properties = Properties::new(out.into()).unwrap();
        let read: Vec<_> = properties.iter().collect();
        assert_eq!(read[0], KeyValuePair { kind: 4, value: Value::Integer(2_186_796_243) });
        assert_eq!(read[1], KeyValuePair { kind: 77, value: Value::Bytes(b"traceID:123456") });
        assert_eq!(read.len(), 2);
    }

    #[test]
    fn malformed_property_pair_is_a_formatting_error_or_protocol_violation() {
        let mut overflow = Vec::new();
        PairWriter::new(&mut overflow).integer(u64::MAX - 1, 0);
        overflow.extend_from_slice(&[2, 0]);
        let table: [(&[u8], Session); 5] = [
            (&[2], Session::KEY_VALUE_FORMATTING_ERROR),
            (&[2, 0x80], Session::KEY_VALUE_FORMATTING_ERROR),
            (&[3, 2, 0], Session::KEY_VALUE_FORMATTING_ERROR),
            (&[3, 0xc1, 0, 0], Session::PROTOCOL_VIOLATION),
            (&overflow, Session::PROTOCOL_VIOLATION),
        ];
        for (block, code) in table {
            let error = Properties::new(Bytes::copy_from_slice(block)).unwrap_err();
            assert_eq!(error.code, code, "{block:x?}");
        }
    }

    #[test]
    fn track_properties_are_found_inside_immutable_properties() {
        let mut inner = Vec::new();
        PairWriter::new(&mut inner).integer(DEFAULT_PUBLISHER_PRIORITY, 7);
        let mut out = Vec::new();
        let mut pairs = PairWriter::new(&mut out);
        pairs.integer(OBJECT_DELIVERY_TIMEOUT, 250);
        pairs.bytes(IMMUTABLE_PROPERTIES, &inner);
        pairs.integer(0x4002, 1);
        pairs.bytes(0x4003, b"");
        let track = TrackProperties::parse(&Properties::new(out.into()).unwrap()).unwrap();
        let expected = TrackProperties {
            object_delivery_timeout: Some(250),
            publisher_priority: Some(7),
            unsupported: Some(0x4002),
            ..TrackProperties::default()
        };
        assert_eq!(track, expected);
    }

    #[test]
    fn track_property_values_out_of_range_are_protocol_violations() {
        for (kind, value) in
            [(DEFAULT_PUBLISHER_PRIORITY, 256), (DEFAULT_PUBLISHER_GROUP_ORDER, 0), (DYNAMIC_GROUPS, 2)]
        {
            let mut out = Vec::new();
            PairWriter::new(&mut out).integer(kind, value);
            let error = TrackProperties::parse(&Properties::new(out.into()).unwrap()).unwrap_err();
            assert_eq!(error.code, Session::PROTOCOL_VIOLATION);
        }
    }

    #[test]
    fn track_properties_round_trip() {
        let track = TrackProperties {
            object_delivery_timeout: Some(1),
            subgroup_delivery_timeout: Some(2),
            max_cache_duration: Some(3),
            publisher_priority: Some(4),
            group_order: Some(GroupOrder::Descending),
            dynamic_groups: Some(true),
            unsupported: None,
        };
        assert_eq!(TrackProperties::parse(&track.encode()), Ok(track));
    }

    #[test]
    fn subgroup_timeouts_are_read_from_its_first_objects_properties() {
        let mut inner = Vec::new();
        PairWriter::new(&mut inner).integer(SUBGROUP_DELIVERY_TIMEOUT, 900);
        let mut out = Vec::new();
        let mut pairs = PairWriter::new(&mut out);
        pairs.integer(OBJECT_DELIVERY_TIMEOUT, 250);
        pairs.bytes(IMMUTABLE_PROPERTIES, &inner);
        assert_eq!(subgroup_timeouts(&out), (Some(250), Some(900)));
        assert_eq!(subgroup_timeouts(&inner), (None, Some(900)));
        assert_eq!(subgroup_timeouts(b""), (None, None));
        out.truncate(out.len() - 1);
        assert_eq!(subgroup_timeouts(&out), (Some(250), None), "the rest is malformed");
    }

    proptest! {
        #[test]
        fn encoded_property_blocks_are_decoded_unchanged(block in block()) {
            let properties = Properties::new(block.clone().into()).unwrap();
            prop_assert_eq!(&properties.as_bytes()[..], &block[..]);
        }

        #[test]
        fn arbitrary_property_blocks_never_panic(block in vec(any::<u8>(), 0..80)) {
            if let Ok(properties) = Properties::new(block.into()) {
                let _ = TrackProperties::parse(&properties);
                let _ = subgroup_timeouts(properties.as_bytes());
            }
        }
    }
}
