//! Message Parameters (draft-18, section 10.2): what a request asks for, between two neighbours.

use std::fmt;
use std::ops::BitOr;

use bytes::Bytes;

use super::wire::{Reader, put_prefixed};
use super::{DecodeError, Filter, GroupOrder, Location, Namespace, vi64};

/// A set of messages that a parameter may be in. REQUEST_OK and REQUEST_UPDATE count as several messages, by the
/// request that they belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scope(u32);

impl Scope {
    pub const NONE: Self = Self(0);
    pub const SUBSCRIBE: Self = Self(1 << 0);
    pub const SUBSCRIBE_OK: Self = Self(1 << 1);
    pub const PUBLISH: Self = Self(1 << 2);
    pub const PUBLISH_OK: Self = Self(1 << 3);
    pub const FETCH: Self = Self(1 << 4);
    pub const FETCH_OK: Self = Self(1 << 5);
    pub const TRACK_STATUS: Self = Self(1 << 6);
    pub const TRACK_STATUS_OK: Self = Self(1 << 7);
    pub const PUBLISH_NAMESPACE: Self = Self(1 << 8);
    pub const SUBSCRIBE_NAMESPACE: Self = Self(1 << 9);
    pub const SUBSCRIBE_TRACKS: Self = Self(1 << 10);
    /// REQUEST_OK to PUBLISH_NAMESPACE, SUBSCRIBE_NAMESPACE or SUBSCRIBE_TRACKS.
    pub const NAMESPACE_OK: Self = Self(1 << 11);
    /// REQUEST_UPDATE of a SUBSCRIBE or PUBLISH.
    pub const UPDATE_SUBSCRIPTION: Self = Self(1 << 12);
    pub const UPDATE_FETCH: Self = Self(1 << 13);
    /// REQUEST_UPDATE of a SUBSCRIBE_NAMESPACE or SUBSCRIBE_TRACKS.
    pub const UPDATE_PREFIX: Self = Self(1 << 14);
    pub const UPDATE_PUBLISH_NAMESPACE: Self = Self(1 << 15);
    pub const UPDATE_OK: Self = Self(1 << 16);

    /// Any REQUEST_UPDATE.
    pub const UPDATE: Self = Self(
        Self::UPDATE_SUBSCRIPTION.0
            | Self::UPDATE_FETCH.0
            | Self::UPDATE_PREFIX.0
            | Self::UPDATE_PUBLISH_NAMESPACE.0,
    );
    /// Any REQUEST_OK.
    pub const OK: Self =
        Self(Self::PUBLISH_OK.0 | Self::TRACK_STATUS_OK.0 | Self::NAMESPACE_OK.0 | Self::UPDATE_OK.0);

    const fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

impl BitOr for Scope {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// An authorization token as it was sent. It is a credential, so it is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(pub Bytes);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({} bytes)", self.0.len())
    }
}

/// SWITCHING_SET_ASSIGNMENT (draft-wilaw-moq-moqt-ssts): a subscription is to one of several tracks of the same content, of which
/// the sender forwards the one that the path has room for. All but `set` and `threshold` are the set's, as last said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// The session's number for the set.
    pub set: u64,
    /// 0 is the draft's own.
    pub algorithm: u64,
    /// What the track needs, kbit/s.
    pub threshold: u64,
    /// Beside other sets of the rank: 1 to 10.
    pub weight: u64,
    /// From how many tracks on the sender chooses; 0: it changes nothing any more.
    pub activate: u64,
    /// Sets of a lower rank go first.
    pub rank: u8,
}

impl Assignment {
    pub const WEIGHTS: std::ops::RangeInclusive<u64> = 1..=10;
    /// The draft's own algorithm.
    pub const ALGORITHM: u64 = 0;

    fn decode(mut input: Reader) -> Result<Self, DecodeError> {
        let [set, algorithm, threshold, weight, activate] =
            [input.vi64()?, input.vi64()?, input.vi64()?, input.vi64()?, input.vi64()?];
        // Of a rank of 0 it may be left out.
        let rank = if input.is_empty() { 0 } else { input.u8()? };
        input.finish()?;
        if !Self::WEIGHTS.contains(&weight) {
            return Err(DecodeError::violation("a switching set's weight is not from 1 to 10"));
        }
        Ok(Self { set, algorithm, threshold, weight, activate, rank })
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let Self { set, algorithm, threshold, weight, activate, rank } = *self;
        [set, algorithm, threshold, weight, activate].into_iter().for_each(|value| vi64::encode(value, out));
        out.push(rank);
    }
}

/// The parameters of one message. Absent is not the same as the default: in REQUEST_UPDATE it means
/// unchanged. Durations are in milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    /// 0 means no timeout.
    pub object_delivery_timeout: Option<u64>,
    pub authorization_tokens: Vec<Token>,
    pub rendezvous_timeout: Option<u64>,
    /// 0 means no timeout.
    pub subgroup_delivery_timeout: Option<u64>,
    pub expires: Option<u64>,
    pub largest_object: Option<Location>,
    pub fill_timeout: Option<u64>,
    pub forward: Option<bool>,
    /// Lower goes first.
    pub subscriber_priority: Option<u8>,
    pub filter: Option<Filter>,
    pub group_order: Option<GroupOrder>,
    /// The largest group that the subscriber knows plus 1, or 0 if it knows none.
    pub new_group_request: Option<u64>,
    pub track_namespace_prefix: Option<Namespace>,
    /// Where both ends have said in SETUP that they know it.
    pub assignment: Option<Assignment>,
}

const OBJECT_DELIVERY_TIMEOUT: u64 = 0x02;
const AUTHORIZATION_TOKEN: u64 = 0x03;
const RENDEZVOUS_TIMEOUT: u64 = 0x04;
const SUBGROUP_DELIVERY_TIMEOUT: u64 = 0x06;
const EXPIRES: u64 = 0x08;
const LARGEST_OBJECT: u64 = 0x09;
const FILL_TIMEOUT: u64 = 0x0a;
const FORWARD: u64 = 0x10;
const SUBSCRIBER_PRIORITY: u64 = 0x20;
const SUBSCRIPTION_FILTER: u64 = 0x21;
const GROUP_ORDER: u64 = 0x22;
const NEW_GROUP_REQUEST: u64 = 0x32;
const TRACK_NAMESPACE_PREFIX: u64 = 0x34;
/// Provisional; another proposal uses the number for something else.
const SWITCHING_SET_ASSIGNMENT: u64 = 0x41;

/// The messages that a parameter may be in; none for an unknown one.
fn scope(kind: u64) -> Scope {
    let subscription = Scope::PUBLISH_OK | Scope::SUBSCRIBE | Scope::UPDATE_SUBSCRIPTION;
    match kind {
        OBJECT_DELIVERY_TIMEOUT
        | SUBGROUP_DELIVERY_TIMEOUT
        | SUBSCRIPTION_FILTER
        | NEW_GROUP_REQUEST
        | SWITCHING_SET_ASSIGNMENT => subscription,
        AUTHORIZATION_TOKEN => {
            Scope::PUBLISH
                | Scope::SUBSCRIBE
                | Scope::UPDATE
                | Scope::SUBSCRIBE_NAMESPACE
                | Scope::SUBSCRIBE_TRACKS
                | Scope::PUBLISH_NAMESPACE
                | Scope::TRACK_STATUS
                | Scope::FETCH
        }
        RENDEZVOUS_TIMEOUT => Scope::SUBSCRIBE,
        // TRACK_STATUS_OK has the parameters of a SUBSCRIBE_OK.
        EXPIRES => {
            Scope::SUBSCRIBE_OK
                | Scope::PUBLISH
                | Scope::PUBLISH_OK
                | Scope::UPDATE_OK
                | Scope::TRACK_STATUS_OK
        }
        LARGEST_OBJECT => Scope::SUBSCRIBE_OK | Scope::PUBLISH | Scope::UPDATE_OK | Scope::TRACK_STATUS_OK,
        FILL_TIMEOUT => Scope::FETCH,
        FORWARD => subscription | Scope::PUBLISH | Scope::SUBSCRIBE_TRACKS,
        SUBSCRIBER_PRIORITY => subscription | Scope::FETCH | Scope::UPDATE_FETCH,
        GROUP_ORDER => Scope::SUBSCRIBE | Scope::PUBLISH_OK | Scope::FETCH,
        TRACK_NAMESPACE_PREFIX => Scope::UPDATE_PREFIX,
        _ => Scope::NONE,
    }
}

const MISPLACED: DecodeError = DecodeError::violation("a parameter that this message does not allow");

impl Parameters {
    /// Reads the count and the parameters of a message of `scope`.
    pub(super) fn decode(input: &mut Reader, allowed: Scope) -> Result<Self, DecodeError> {
        let mut parameters = Self::default();
        let mut previous = None;
        for _ in 0..input.vi64()? {
            let delta = input.vi64()?;
            let kind = previous
                .unwrap_or(0u64)
                .checked_add(delta)
                .ok_or(DecodeError::violation("a parameter type is above 2^64 - 1"))?;
            if !scope(kind).meets(allowed) {
                return Err(MISPLACED);
            }
            if previous == Some(kind) && kind != AUTHORIZATION_TOKEN {
                return Err(DecodeError::violation("a parameter is repeated"));
            }
            previous = Some(kind);
            parameters.read(kind, input)?;
        }
        Ok(parameters)
    }

    fn read(&mut self, kind: u64, input: &mut Reader) -> Result<(), DecodeError> {
        match kind {
            OBJECT_DELIVERY_TIMEOUT => self.object_delivery_timeout = Some(input.vi64()?),
            AUTHORIZATION_TOKEN => {
                // Copied: a token that is kept must not keep the whole message alive.
                let token = Bytes::copy_from_slice(&input.prefixed()?);
                self.authorization_tokens.push(Token(token));
            }
            RENDEZVOUS_TIMEOUT => self.rendezvous_timeout = Some(input.vi64()?),
            SUBGROUP_DELIVERY_TIMEOUT => self.subgroup_delivery_timeout = Some(input.vi64()?),
            EXPIRES => self.expires = Some(input.vi64()?),
            LARGEST_OBJECT => self.largest_object = Some(Location::decode(input)?),
            FILL_TIMEOUT => self.fill_timeout = Some(input.vi64()?),
            FORWARD => {
                self.forward = Some(match input.u8()? {
                    0 => false,
                    1 => true,
                    _ => return Err(DecodeError::violation("a forward state other than 0 or 1")),
                });
            }
            SUBSCRIBER_PRIORITY => self.subscriber_priority = Some(input.u8()?),
            SUBSCRIPTION_FILTER => {
                let mut value = Reader::new(input.prefixed()?);
                self.filter = Some(Filter::decode(&mut value)?);
                value.finish()?;
            }
            GROUP_ORDER => {
                let order = GroupOrder::from_wire(input.u8()?.into());
                self.group_order = Some(order.ok_or(DecodeError::violation("an unknown group order"))?);
            }
            NEW_GROUP_REQUEST => self.new_group_request = Some(input.vi64()?),
            TRACK_NAMESPACE_PREFIX => self.track_namespace_prefix = Some(Namespace::decode(input)?),
            SWITCHING_SET_ASSIGNMENT => {
                self.assignment = Some(Assignment::decode(Reader::new(input.prefixed()?))?);
            }
            _ => return Err(MISPLACED),
        }
        Ok(())
    }

    /// Whether every parameter may be in a message of `allowed`. To be called for REQUEST_OK and REQUEST_UPDATE, once
    /// it is known which request they belong to.
    pub fn check(&self, allowed: Scope) -> Result<(), DecodeError> {
        let mut result = Ok(());
        self.for_each(|kind, _| {
            if !scope(kind).meets(allowed) {
                result = Err(MISPLACED);
            }
        });
        result
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let mut count = 0;
        self.for_each(|_, _| count += 1);
        vi64::encode(count, out);
        let mut previous = 0;
        self.for_each(|kind, value| {
            vi64::encode(kind - previous, out);
            previous = kind;
            value.encode(out);
        });
    }

    /// Visits the parameters that are present, in ascending order of type.
    fn for_each<'a>(&'a self, mut visit: impl FnMut(u64, Value<'a>)) {
        let mut see = |kind, value: Option<Value<'a>>| {
            if let Some(value) = value {
                visit(kind, value);
            }
        };
        see(OBJECT_DELIVERY_TIMEOUT, self.object_delivery_timeout.map(Value::Integer));
        for token in &self.authorization_tokens {
            see(AUTHORIZATION_TOKEN, Some(Value::Bytes(&token.0)));
        }
        see(RENDEZVOUS_TIMEOUT, self.rendezvous_timeout.map(Value::Integer));
        see(SUBGROUP_DELIVERY_TIMEOUT, self.subgroup_delivery_timeout.map(Value::Integer));
        see(EXPIRES, self.expires.map(Value::Integer));
        see(LARGEST_OBJECT, self.largest_object.map(Value::Location));
        see(FILL_TIMEOUT, self.fill_timeout.map(Value::Integer));
        see(FORWARD, self.forward.map(|forward| Value::Byte(forward.into())));
        see(SUBSCRIBER_PRIORITY, self.subscriber_priority.map(Value::Byte));
        see(SUBSCRIPTION_FILTER, self.filter.map(Value::Filter));
        see(GROUP_ORDER, self.group_order.map(|order| Value::Byte(order.to_wire())));
        see(NEW_GROUP_REQUEST, self.new_group_request.map(Value::Integer));
        see(TRACK_NAMESPACE_PREFIX, self.track_namespace_prefix.as_ref().map(Value::Namespace));
        see(SWITCHING_SET_ASSIGNMENT, self.assignment.map(Value::Assignment));
    }
}

/// The encodings that parameters have.
enum Value<'a> {
    Byte(u8),
    Integer(u64),
    Location(Location),
    Bytes(&'a [u8]),
    Filter(Filter),
    Namespace(&'a Namespace),
    Assignment(Assignment),
}

impl Value<'_> {
    fn encode(self, out: &mut Vec<u8>) {
        match self {
            Self::Byte(byte) => out.push(byte),
            Self::Integer(value) => vi64::encode(value, out),
            Self::Location(location) => location.encode(out),
            Self::Bytes(bytes) => put_prefixed(bytes, out),
            Self::Filter(filter) => {
                let mut value = Vec::new();
                filter.encode(&mut value);
                put_prefixed(&value, out);
            }
            Self::Assignment(assignment) => {
                let mut value = Vec::new();
                assignment.encode(&mut value);
                put_prefixed(&value, out);
            }
            Self::Namespace(namespace) => namespace.encode(out),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moq::code::Session;

    fn decode(bytes: &[u8], allowed: Scope) -> Result<Parameters, DecodeError> {
        let mut input = Reader::new(Bytes::copy_from_slice(bytes));
        let parameters = Parameters::decode(&mut input, allowed)?;
        input.finish()?;
        Ok(parameters)
    }

    #[test]
    fn the_default_priority_is_one_byte() {
        // A varint of 128 would take two.
        let parameters = Parameters { subscriber_priority: Some(128), ..Parameters::default() };
        let mut out = Vec::new();
        parameters.encode(&mut out);
        assert_eq!(out, [1, 0x20, 0x80]);
        assert_eq!(decode(&out, Scope::SUBSCRIBE), Ok(parameters));
    }

    #[test]
    fn types_are_deltas() {
        let bytes = [3, 0x10, 1, 0x10, 7, 0x01, 1, 0x02];
        let parameters = decode(&bytes, Scope::SUBSCRIBE).unwrap();
        let expected = Parameters {
            forward: Some(true),
            subscriber_priority: Some(7),
            filter: Some(Filter::LargestObject),
            ..Parameters::default()
        };
        assert_eq!(parameters, expected);
    }

    #[test]
    fn tracks_are_assigned_to_switching_sets() {
        let assignment =
            Assignment { set: 7, algorithm: 0, threshold: 3000, weight: 5, activate: 3, rank: 1 };
        let parameters = Parameters { assignment: Some(assignment), ..Parameters::default() };
        let mut out = Vec::new();
        parameters.encode(&mut out);
        assert_eq!(out, [1, 0x41, 7, 7, 0, 0x8b, 0xb8, 5, 3, 1]);
        assert_eq!(decode(&out, Scope::SUBSCRIBE), Ok(parameters));
        // A rank of 0 may be left out.
        let short =
            decode(&[1, 0x41, 5, 7, 0, 0, 5, 3], Scope::UPDATE_SUBSCRIPTION).unwrap().assignment.unwrap();
        assert_eq!((short.rank, short.threshold), (0, 0));
        let bad: [&[u8]; 4] = [
            &[1, 0x41, 5, 7, 0, 0, 0, 3],       // a weight of 0
            &[1, 0x41, 5, 7, 0, 0, 11, 3],      // and of 11
            &[1, 0x41, 4, 7, 0, 0, 5],          // too short
            &[1, 0x41, 7, 7, 0, 0, 5, 3, 0, 0], // too long
        ];
        for bytes in bad {
            assert_eq!(
                decode(bytes, Scope::SUBSCRIBE).unwrap_err().code,
                Session::PROTOCOL_VIOLATION,
                "{bytes:x?}"
            );
        }
        assert!(decode(&out, Scope::FETCH).is_err());
    }

    #[test]
    fn tokens_repeat_and_nothing_else_does() {
        let twice = decode(&[2, 3, 1, 0xaa, 0, 1, 0xbb], Scope::SUBSCRIBE).unwrap();
        assert_eq!(twice.authorization_tokens.len(), 2);
        assert_eq!(format!("{:?}", twice.authorization_tokens[0]), "Token(1 bytes)");
        assert!(decode(&[2, 0x10, 1, 0, 1], Scope::SUBSCRIBE).is_err());
    }

    #[test]
    fn what_a_message_does_not_allow_closes_the_session() {
        let table: [(&[u8], Scope); 9] = [
            (&[1, 0x04, 5], Scope::PUBLISH),          // rendezvous timeout: SUBSCRIBE only
            (&[1, 0x09, 1, 2], Scope::SUBSCRIBE),     // largest object: answers only
            (&[1, 0x20, 1], Scope::SUBSCRIBE_TRACKS), // priority: not for namespaces
            (&[1, 0x0b, 1, 0], Scope::SUBSCRIBE),     // unknown
            (&[1, 0x00, 1], Scope::SUBSCRIBE),        // unknown
            (&[1, 0x10, 2], Scope::SUBSCRIBE),        // forward is 0 or 1
            (&[1, 0x22, 3], Scope::SUBSCRIBE),        // group order is 1 or 2
            (&[1, 0x21, 2, 0x02, 0], Scope::SUBSCRIBE), // bytes behind the filter
            (&[1, 0x21, 1, 0x05], Scope::SUBSCRIBE),  // unknown filter
        ];
        for (bytes, allowed) in table {
            let error = decode(bytes, allowed).unwrap_err();
            assert_eq!(error.code, Session::PROTOCOL_VIOLATION, "{bytes:x?}");
        }
        let mut overflow = vec![2, 0x32, 0];
        vi64::encode(u64::MAX, &mut overflow);
        assert!(decode(&overflow, Scope::SUBSCRIBE).is_err());
    }

    #[test]
    fn a_count_without_parameters_fails_without_allocating_for_it() {
        let mut bytes = Vec::new();
        vi64::encode(u64::MAX, &mut bytes);
        assert!(decode(&bytes, Scope::SUBSCRIBE).is_err());
    }
}
