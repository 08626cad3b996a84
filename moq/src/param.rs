//! Message Parameters (draft-22, section 9.20): the options of a request, which apply to one hop.
//!
//! The drafts differ most in which message may have which parameter; the function [`scope`] is that table.

use std::fmt;
use std::ops::BitOr;

use bytes::Bytes;

use super::wire::{WireReader, WireWriter};
use super::{DecodeError, Draft, Filter, GroupOrder, HopPath, Location, Namespace};

/// A set of messages that a parameter may be in. REQUEST_OK and REQUEST_UPDATE count as several messages, by the
/// request that they belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scope(u32);

impl Scope {
    /// An empty set: the parameter is allowed in no message.
    pub const NONE: Self = Self(0);
    /// The message SUBSCRIBE.
    pub const SUBSCRIBE: Self = Self(1 << 0);
    /// The message SUBSCRIBE_OK.
    pub const SUBSCRIBE_OK: Self = Self(1 << 1);
    /// The message PUBLISH.
    pub const PUBLISH: Self = Self(1 << 2);
    /// The message REQUEST_OK in answer to PUBLISH.
    pub const PUBLISH_OK: Self = Self(1 << 3);
    /// The message FETCH.
    pub const FETCH: Self = Self(1 << 4);
    /// The message FETCH_OK.
    pub const FETCH_OK: Self = Self(1 << 5);
    /// The message TRACK_STATUS.
    pub const TRACK_STATUS: Self = Self(1 << 6);
    /// The message REQUEST_OK in answer to TRACK_STATUS.
    pub const TRACK_STATUS_OK: Self = Self(1 << 7);
    /// The message PUBLISH_NAMESPACE.
    pub const PUBLISH_NAMESPACE: Self = Self(1 << 8);
    /// The message SUBSCRIBE_NAMESPACE.
    pub const SUBSCRIBE_NAMESPACE: Self = Self(1 << 9);
    /// The message SUBSCRIBE_TRACKS.
    pub const SUBSCRIBE_TRACKS: Self = Self(1 << 10);
    /// The message REQUEST_OK in answer to PUBLISH_NAMESPACE, SUBSCRIBE_NAMESPACE or SUBSCRIBE_TRACKS.
    pub const NAMESPACE_OK: Self = Self(1 << 11);
    /// The message REQUEST_UPDATE of a SUBSCRIBE or PUBLISH.
    pub const UPDATE_SUBSCRIPTION: Self = Self(1 << 12);
    /// The message REQUEST_UPDATE of a FETCH.
    pub const UPDATE_FETCH: Self = Self(1 << 13);
    /// The message REQUEST_UPDATE of a SUBSCRIBE_NAMESPACE or SUBSCRIBE_TRACKS.
    pub const UPDATE_PREFIX: Self = Self(1 << 14);
    /// The message REQUEST_UPDATE of a PUBLISH_NAMESPACE.
    pub const UPDATE_PUBLISH_NAMESPACE: Self = Self(1 << 15);
    /// The message REQUEST_OK in answer to REQUEST_UPDATE.
    pub const UPDATE_OK: Self = Self(1 << 16);
    /// The message PUBLISH_STATE_NOTIFY.
    pub const STATE_NOTIFY: Self = Self(1 << 17);
    /// The contents of FILL_PARAMETERS, which are not a message.
    pub const FILL: Self = Self(1 << 18);
    /// The message NAMESPACE, which has parameters only between endpoints that negotiated draft-lcurley-moq-cluster.
    pub const NAMESPACE: Self = Self(1 << 19);

    /// The message REQUEST_UPDATE, whatever request it updates.
    pub const UPDATE: Self = Self(
        Self::UPDATE_SUBSCRIPTION.0
            | Self::UPDATE_FETCH.0
            | Self::UPDATE_PREFIX.0
            | Self::UPDATE_PUBLISH_NAMESPACE.0,
    );
    /// The message REQUEST_OK, whatever request it answers.
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

/// An authorization token as it was sent. It is secret, so it is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct AuthToken(pub Bytes);

impl fmt::Debug for AuthToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({} bytes)", self.0.len())
    }
}

/// SWITCHING_SET_ASSIGNMENT (draft-wilaw-moq-moqt-ssts): assigns the subscription to a set of tracks with the same
/// content. The sender forwards the best track for which the path has enough capacity. `set` and `threshold` belong to
/// the subscription. The other fields belong to the whole set, and the values received last apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// The ID of the switching set, unique in the session.
    pub set: u64,
    /// The algorithm for selecting one track of the switching set. 0 is the algorithm that the draft defines.
    pub algorithm: u64,
    /// Throughput that the subscription's track requires, in kbit/s.
    pub threshold: u64,
    /// Weight of the switching set, 1 to 10: switching sets of the same rank share throughput in proportion to their
    /// weights.
    pub weight: u64,
    /// Number of tracks that the switching set must have before the sender selects one of them. 0 turns the selection
    /// off.
    pub activate: u64,
    /// Rank of the switching set. Switching sets with a lower rank are served first.
    pub rank: u8,
}

impl Assignment {
    /// The weights that a switching set may have.
    pub const WEIGHTS: std::ops::RangeInclusive<u64> = 1..=10;
    /// The draft's own algorithm for selecting one track of a switching set.
    pub const ALGORITHM: u64 = 0;

    fn decode(mut input: WireReader) -> Result<Self, DecodeError> {
        let [set, algorithm, threshold, weight, activate] =
            [input.vi64()?, input.vi64()?, input.vi64()?, input.vi64()?, input.vi64()?];
        // A SWITCHING_SET_ASSIGNMENT may omit a rank of 0.
        let rank = if input.is_empty() { 0 } else { input.u8()? };
        input.finish()?;
        if !Self::WEIGHTS.contains(&weight) {
            return Err(DecodeError::violation("a switching set's weight is not from 1 to 10"));
        }
        Ok(Self { set, algorithm, threshold, weight, activate, rank })
    }

    fn encode(&self, out: &mut WireWriter<'_>) {
        let Self { set, algorithm, threshold, weight, activate, rank } = *self;
        [set, algorithm, threshold, weight, activate].into_iter().for_each(|value| out.vi64(value));
        out.u8(rank);
    }
}

/// SUBGROUP_FILTER and the other range filters, still encoded: they select objects or tracks whose values are in given
/// ranges. An endpoint may send a range filter only to a peer that sent MAX_FILTER_RANGES.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeFilter {
    /// The parameter's type, one of [`RangeFilter::KINDS`].
    pub kind: u64,
    /// The parameter's value, without its length.
    pub value: Bytes,
}

impl RangeFilter {
    /// The type numbers of SUBGROUP_FILTER, OBJECTID_FILTER, PRIORITY_FILTER, OBJECT_PROPERTY_FILTER and
    /// TRACK_PROPERTY_FILTER.
    pub const KINDS: std::ops::RangeInclusive<u64> = 0x25..=0x29;
}

/// The parameters of one message. An absent parameter differs from its default value: in REQUEST_UPDATE, absent means
/// unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    /// Delivery timeout of each object, in milliseconds; 0 means no timeout.
    pub object_delivery_timeout: Option<u64>,
    /// AUTHORIZATION_TOKEN, any number of times.
    pub authorization_tokens: Vec<AuthToken>,
    /// Time that a subscription waits for a publisher, in milliseconds.
    pub rendezvous_timeout: Option<u64>,
    /// Delivery timeout of each subgroup, in milliseconds; 0 means no timeout.
    pub subgroup_delivery_timeout: Option<u64>,
    /// Time after which the subscription ends, in milliseconds; 0 means never.
    pub expires: Option<u64>,
    /// The track's largest location.
    pub largest_object: Option<Location>,
    /// Time that a FETCH waits for missing objects, in milliseconds; 0 means that it does not wait.
    pub fill_timeout: Option<u64>,
    /// Whether the publisher forwards objects to the subscriber.
    pub forward: Option<bool>,
    /// Priority of the subscription; a lower value is sent first.
    pub subscriber_priority: Option<u8>,
    /// LOCATION_FILTER: the range of objects that the subscription or FETCH returns.
    pub filter: Option<Filter>,
    /// The order in which groups are prioritized or sent.
    pub group_order: Option<GroupOrder>,
    /// FILL_PARAMETERS: requests a fill, the objects from before the subscription. Draft-20 and later.
    pub fill: Option<Box<Parameters>>,
    /// Range filters, each with its type. Draft-19 and later.
    pub range_filters: Vec<RangeFilter>,
    /// NEW_GROUP_REQUEST: asks the publisher to begin a new group. The value is the largest group ID that the
    /// subscriber knows, plus 1, or 0 if it knows none.
    pub new_group_request: Option<u64>,
    /// The new prefix of a subscription to namespaces.
    pub track_namespace_prefix: Option<Namespace>,
    /// Whether the response to the request should include the track's properties. Draft-20 and later.
    pub include_properties: Option<bool>,
    /// The assignment to a switching set. It is sent only if both endpoints announced support in SETUP.
    pub assignment: Option<Assignment>,
    /// The path of an announced namespace. It is sent only if both endpoints sent HOP_ID in SETUP.
    pub hop_path: Option<HopPath>,
    /// The cost of receiving an announced namespace by the path in `hop_path`. Absent means 0, or unchanged in an
    /// update.
    pub route_cost: Option<u64>,
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
/// The type number of LOCATION_FILTER, which draft-18 calls SUBSCRIPTION_FILTER.
const LOCATION_FILTER: u64 = 0x21;
const GROUP_ORDER: u64 = 0x22;
const FILL_PARAMETERS: u64 = 0x23;
const TRACK_PROPERTY_FILTER: u64 = 0x29;
const NEW_GROUP_REQUEST: u64 = 0x32;
const TRACK_NAMESPACE_PREFIX: u64 = 0x34;
const INCLUDE_PROPERTIES: u64 = 0x35;
/// The type number of SWITCHING_SET_ASSIGNMENT is provisional. A different extension of MoQ Transport uses the same
/// number.
const SWITCHING_SET_ASSIGNMENT: u64 = 0x41;
/// HOP_PATH and ROUTE_COST come from draft-lcurley-moq-cluster-01.
const HOP_PATH: u64 = 0x40b57;
const ROUTE_COST: u64 = 0x40b58;

/// Returns the set of messages that may contain a parameter. The set is empty if the draft does not define the
/// parameter.
fn scope(kind: u64, draft: Draft) -> Scope {
    // Draft-19 allows in SUBSCRIBE_TRACKS all parameters of SUBSCRIBE. Draft-22 allows only some of them.
    let tracks = match draft {
        Draft::D18 | Draft::D22 => Scope::NONE,
        Draft::D19 | Draft::D20 | Draft::D21 => Scope::SUBSCRIBE_TRACKS,
    };
    // In draft-20 and later, PUBLISH carries the subscription's initial parameters, and REQUEST_UPDATE changes them.
    let publish = match draft {
        Draft::D18 | Draft::D19 => Scope::PUBLISH_OK,
        Draft::D20 | Draft::D21 | Draft::D22 => Scope::PUBLISH,
    };
    let asked = Scope::SUBSCRIBE | Scope::UPDATE_SUBSCRIPTION;
    let only = |known: bool, scope: Scope| if known { scope } else { Scope::NONE };
    match kind {
        OBJECT_DELIVERY_TIMEOUT | SUBGROUP_DELIVERY_TIMEOUT => asked | publish | tracks,
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
        // REQUEST_OK for TRACK_STATUS has the same parameters as SUBSCRIBE_OK.
        EXPIRES => {
            Scope::SUBSCRIBE_OK
                | Scope::PUBLISH
                | Scope::PUBLISH_OK
                | Scope::UPDATE_OK
                | Scope::TRACK_STATUS_OK
                | only(draft > Draft::D18, Scope::NAMESPACE_OK)
        }
        LARGEST_OBJECT => {
            Scope::SUBSCRIBE_OK
                | Scope::PUBLISH
                | Scope::UPDATE_OK
                | Scope::TRACK_STATUS_OK
                | only(draft.has_state_notify(), Scope::STATE_NOTIFY)
        }
        FILL_TIMEOUT => Scope::FETCH | Scope::FILL,
        FORWARD => {
            let later = Scope::UPDATE_PREFIX | Scope::STATE_NOTIFY;
            asked | publish | Scope::PUBLISH | Scope::SUBSCRIBE_TRACKS | only(draft.has_state_notify(), later)
        }
        SUBSCRIBER_PRIORITY => asked | publish | tracks | Scope::FETCH | Scope::UPDATE_FETCH | Scope::FILL,
        LOCATION_FILTER => {
            let later = Scope::FETCH | Scope::FILL | Scope::STATE_NOTIFY | Scope::SUBSCRIBE_TRACKS;
            asked | publish | tracks | only(draft.has_fills(), later)
        }
        GROUP_ORDER => {
            Scope::SUBSCRIBE
                | Scope::FETCH
                | Scope::FILL
                | match draft {
                    Draft::D18 => Scope::PUBLISH_OK,
                    Draft::D19 => Scope::SUBSCRIBE_TRACKS,
                    Draft::D20 | Draft::D21 | Draft::D22 => Scope::PUBLISH | Scope::SUBSCRIBE_TRACKS,
                }
        }
        FILL_PARAMETERS => only(draft.has_fills(), asked | Scope::SUBSCRIBE_TRACKS),
        TRACK_PROPERTY_FILTER => {
            only(draft.has_range_filters(), Scope::SUBSCRIBE_TRACKS | Scope::UPDATE_PREFIX)
        }
        kind if RangeFilter::KINDS.contains(&kind) => {
            let requests = asked | Scope::FETCH | Scope::SUBSCRIBE_TRACKS | Scope::UPDATE_PREFIX;
            let answer = only(draft.accepts_with_parameters(), Scope::PUBLISH_OK);
            only(draft.has_range_filters(), requests | answer | Scope::FILL)
        }
        NEW_GROUP_REQUEST => asked | tracks | only(draft.accepts_with_parameters(), Scope::PUBLISH_OK),
        TRACK_NAMESPACE_PREFIX => Scope::UPDATE_PREFIX,
        INCLUDE_PROPERTIES => {
            let requests = Scope::SUBSCRIBE | Scope::TRACK_STATUS | Scope::FETCH | Scope::SUBSCRIBE_TRACKS;
            only(draft.has_state_notify(), requests)
        }
        SWITCHING_SET_ASSIGNMENT => asked | Scope::PUBLISH_OK,
        HOP_PATH | ROUTE_COST => {
            Scope::PUBLISH_NAMESPACE | Scope::UPDATE_PUBLISH_NAMESPACE | Scope::NAMESPACE
        }
        _ => Scope::NONE,
    }
}

/// Reports whether a message may have a parameter several times.
fn repeats(kind: u64) -> bool {
    kind == AUTHORIZATION_TOKEN || RangeFilter::KINDS.contains(&kind)
}

const MISPLACED: DecodeError = DecodeError::violation("a parameter that this message does not allow");

impl Parameters {
    /// Reads the number of parameters and the parameters. The message is one of `allowed`.
    pub(super) fn decode(input: &mut WireReader, allowed: Scope) -> Result<Self, DecodeError> {
        let mut parameters = Self::default();
        let mut previous = None;
        // No memory is allocated for the stated number of parameters. If the number is too large, reading fails at the
        // end of the message.
        for _ in 0..input.vi64()? {
            let delta = input.vi64()?;
            let kind = previous
                .unwrap_or(0u64)
                .checked_add(delta)
                .ok_or(DecodeError::violation("a parameter type is above 2^64 - 1"))?;
            if !scope(kind, input.draft()).meets(allowed) {
                return Err(MISPLACED);
            }
            if previous == Some(kind) && !repeats(kind) {
                return Err(DecodeError::violation("a parameter is repeated"));
            }
            previous = Some(kind);
            parameters.read(kind, input)?;
        }
        Ok(parameters)
    }

    fn read(&mut self, kind: u64, input: &mut WireReader) -> Result<(), DecodeError> {
        match kind {
            OBJECT_DELIVERY_TIMEOUT => self.object_delivery_timeout = Some(input.vi64()?),
            AUTHORIZATION_TOKEN => {
                // The token is copied, so that it does not keep the whole message's memory alive.
                let token = Bytes::copy_from_slice(&input.prefixed()?);
                self.authorization_tokens.push(AuthToken(token));
            }
            RENDEZVOUS_TIMEOUT => self.rendezvous_timeout = Some(input.vi64()?),
            SUBGROUP_DELIVERY_TIMEOUT => self.subgroup_delivery_timeout = Some(input.vi64()?),
            EXPIRES => self.expires = Some(input.vi64()?),
            LARGEST_OBJECT => self.largest_object = Some(Location::decode(input)?),
            FILL_TIMEOUT => self.fill_timeout = Some(input.vi64()?),
            FORWARD => self.forward = Some(flag(input, "a forward state other than 0 or 1")?),
            SUBSCRIBER_PRIORITY => self.subscriber_priority = Some(input.u8()?),
            LOCATION_FILTER => self.filter = Some(Filter::decode(input)?),
            GROUP_ORDER => {
                let order = GroupOrder::from_wire(input.u8()?.into());
                self.group_order = Some(order.ok_or(DecodeError::violation("an unknown group order"))?);
            }
            FILL_PARAMETERS => {
                let mut value = input.nested()?;
                // FILL_PARAMETERS contains a list of parameters, in which FILL_PARAMETERS itself is not allowed.
                self.fill = Some(Box::new(Self::decode(&mut value, Scope::FILL)?));
                value.finish()?;
            }
            NEW_GROUP_REQUEST => self.new_group_request = Some(input.vi64()?),
            TRACK_NAMESPACE_PREFIX => self.track_namespace_prefix = Some(Namespace::decode(input)?),
            INCLUDE_PROPERTIES => {
                self.include_properties = Some(flag(input, "including properties is neither 0 nor 1")?);
            }
            SWITCHING_SET_ASSIGNMENT => self.assignment = Some(Assignment::decode(input.nested()?)?),
            HOP_PATH => self.hop_path = Some(HopPath::decode(input.nested()?)?),
            ROUTE_COST => self.route_cost = Some(input.vi64()?),
            kind if RangeFilter::KINDS.contains(&kind) => {
                self.range_filters
                    .push(RangeFilter { kind, value: Bytes::copy_from_slice(&input.prefixed()?) });
            }
            _ => return Err(MISPLACED),
        }
        Ok(())
    }

    /// Checks that every parameter is allowed in a message of the set `allowed`. REQUEST_OK and REQUEST_UPDATE are
    /// checked once it is known which request they belong to.
    pub fn check(&self, draft: Draft, allowed: Scope) -> Result<(), DecodeError> {
        let mut result = Ok(());
        self.for_each(|kind, _| {
            if !scope(kind, draft).meets(allowed) {
                result = Err(MISPLACED);
            }
        });
        result
    }

    /// Reports whether there are range filters, including those inside FILL_PARAMETERS. An empty filter does not count,
    /// because it removes an earlier filter in a REQUEST_UPDATE.
    pub fn has_range_filters(&self) -> bool {
        let fill = self.fill.as_deref().is_some_and(Self::has_range_filters);
        fill || self.range_filters.iter().any(|filter| !filter.value.is_empty())
    }

    /// Writes the number of parameters and the parameters. It fails if the draft does not define a parameter.
    pub(super) fn encode(&self, out: &mut WireWriter<'_>) {
        let mut count = 0;
        self.for_each(|_, _| count += 1);
        out.vi64(count);
        let mut previous = 0;
        self.for_each(|kind, value| {
            if scope(kind, out.draft()) == Scope::NONE {
                out.cannot_express(match kind {
                    FILL_PARAMETERS => "FILL_PARAMETERS",
                    INCLUDE_PROPERTIES => "INCLUDE_PROPERTIES",
                    _ => "range filters",
                });
            }
            out.vi64(kind - previous);
            previous = kind;
            value.encode(out);
        });
    }

    /// Calls a function for each parameter that is present, in ascending order of type.
    fn for_each<'a>(&'a self, mut visit: impl FnMut(u64, ParamEncoding<'a>)) {
        let mut see = |kind, value: Option<ParamEncoding<'a>>| {
            if let Some(value) = value {
                visit(kind, value);
            }
        };
        see(OBJECT_DELIVERY_TIMEOUT, self.object_delivery_timeout.map(ParamEncoding::Integer));
        for token in &self.authorization_tokens {
            see(AUTHORIZATION_TOKEN, Some(ParamEncoding::Bytes(&token.0)));
        }
        see(RENDEZVOUS_TIMEOUT, self.rendezvous_timeout.map(ParamEncoding::Integer));
        see(SUBGROUP_DELIVERY_TIMEOUT, self.subgroup_delivery_timeout.map(ParamEncoding::Integer));
        see(EXPIRES, self.expires.map(ParamEncoding::Integer));
        see(LARGEST_OBJECT, self.largest_object.map(ParamEncoding::Location));
        see(FILL_TIMEOUT, self.fill_timeout.map(ParamEncoding::Integer));
        see(FORWARD, self.forward.map(|forward| ParamEncoding::Byte(forward.into())));
        see(SUBSCRIBER_PRIORITY, self.subscriber_priority.map(ParamEncoding::Byte));
        see(LOCATION_FILTER, self.filter.map(ParamEncoding::Filter));
        see(GROUP_ORDER, self.group_order.map(|order| ParamEncoding::Byte(order.to_wire())));
        see(FILL_PARAMETERS, self.fill.as_deref().map(ParamEncoding::Parameters));
        for RangeFilter { kind, value } in &self.range_filters {
            see(*kind, Some(ParamEncoding::Bytes(value)));
        }
        see(NEW_GROUP_REQUEST, self.new_group_request.map(ParamEncoding::Integer));
        see(TRACK_NAMESPACE_PREFIX, self.track_namespace_prefix.as_ref().map(ParamEncoding::Namespace));
        see(INCLUDE_PROPERTIES, self.include_properties.map(|include| ParamEncoding::Byte(include.into())));
        see(SWITCHING_SET_ASSIGNMENT, self.assignment.map(ParamEncoding::Assignment));
        see(HOP_PATH, self.hop_path.as_ref().map(ParamEncoding::HopPath));
        see(ROUTE_COST, self.route_cost.map(ParamEncoding::Integer));
    }
}

/// Reads a byte that must be 0 or 1.
fn flag(input: &mut WireReader, other: &'static str) -> Result<bool, DecodeError> {
    match input.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(DecodeError::violation(other)),
    }
}

/// The value of a parameter, in one of the possible encodings.
enum ParamEncoding<'a> {
    Byte(u8),
    Integer(u64),
    Location(Location),
    Bytes(&'a [u8]),
    Filter(Filter),
    Parameters(&'a Parameters),
    Namespace(&'a Namespace),
    Assignment(Assignment),
    HopPath(&'a HopPath),
}

impl ParamEncoding<'_> {
    fn encode(self, out: &mut WireWriter<'_>) {
        match self {
            Self::Byte(byte) => out.u8(byte),
            Self::Integer(value) => out.vi64(value),
            Self::Location(location) => location.encode(out.out),
            Self::Bytes(bytes) => out.prefixed(bytes),
            Self::Filter(filter) => filter.encode(out),
            Self::Parameters(parameters) => out.nested(|out| parameters.encode(out)),
            Self::Assignment(assignment) => out.nested(|out| assignment.encode(out)),
            Self::Namespace(namespace) => namespace.encode(out.out),
            Self::HopPath(path) => path.encode(out),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::Session;

    fn decode(bytes: &[u8], allowed: Scope) -> Result<Parameters, DecodeError> {
        decode_in(Draft::D18, bytes, allowed)
    }

    fn decode_in(draft: Draft, bytes: &[u8], allowed: Scope) -> Result<Parameters, DecodeError> {
        let mut input = WireReader::new(draft, Bytes::copy_from_slice(bytes));
        let parameters = Parameters::decode(&mut input, allowed)?;
        input.finish()?;
        Ok(parameters)
    }

    fn encode_in(draft: Draft, parameters: &Parameters) -> Result<Vec<u8>, crate::EncodeError> {
        let mut bytes = Vec::new();
        let mut out = WireWriter::new(draft, &mut bytes);
        parameters.encode(&mut out);
        out.finish().map(|()| bytes)
    }

    #[test]
    fn subscriber_priority_is_encoded_in_one_byte() {
        // The default priority of 128 is encoded as one byte. As a varint it would take two bytes.
        let parameters = Parameters { subscriber_priority: Some(128), ..Parameters::default() };
        let out = encode_in(Draft::D18, &parameters).unwrap();
        assert_eq!(out, [1, 0x20, 0x80]);
        assert_eq!(decode(&out, Scope::SUBSCRIBE), Ok(parameters));
    }

    #[test]
    fn parameter_types_are_encoded_as_deltas() {
        let bytes = [3, 0x10, 1, 0x10, 7, 0x01, 1, 0x02];
        let parameters = decode(&bytes, Scope::SUBSCRIBE).unwrap();
        let expected = Parameters {
            forward: Some(true),
            subscriber_priority: Some(7),
            filter: Some(Filter::NextObject),
            ..Parameters::default()
        };
        assert_eq!(parameters, expected);
    }

    #[test]
    fn switching_set_assignment_round_trips() {
        let assignment =
            Assignment { set: 7, algorithm: 0, threshold: 3000, weight: 5, activate: 3, rank: 1 };
        let parameters = Parameters { assignment: Some(assignment), ..Parameters::default() };
        let out = encode_in(Draft::D18, &parameters).unwrap();
        assert_eq!(out, [1, 0x41, 7, 7, 0, 0x8b, 0xb8, 5, 3, 1]);
        assert_eq!(decode(&out, Scope::SUBSCRIBE), Ok(parameters));
        // A SWITCHING_SET_ASSIGNMENT may omit a rank of 0.
        let short =
            decode(&[1, 0x41, 5, 7, 0, 0, 5, 3], Scope::UPDATE_SUBSCRIPTION).unwrap().assignment.unwrap();
        assert_eq!((short.rank, short.threshold), (0, 0));
        let bad: [&[u8]; 4] = [
            &[1, 0x41, 5, 7, 0, 0, 0, 3],       // a weight of 0 is not allowed
            &[1, 0x41, 5, 7, 0, 0, 11, 3],      // a weight of 11 is too large
            &[1, 0x41, 4, 7, 0, 0, 5],          // the value of SWITCHING_SET_ASSIGNMENT is too short
            &[1, 0x41, 7, 7, 0, 0, 5, 3, 0, 0], // the value of SWITCHING_SET_ASSIGNMENT is too long
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

    /// Each row lists the drafts in which a message may have a parameter.
    #[test]
    fn allowed_parameters_depend_on_the_draft() {
        use Draft::{D18, D19, D20, D21, D22};
        // Each row has a parameter, its encoding, a message, and the drafts that allow the parameter in that message.
        let table: [(&str, &[u8], Scope, &[Draft]); 22] = [
            ("timeout", &[1, 0x02, 5], Scope::PUBLISH_OK, &[D18, D19]),
            ("timeout", &[1, 0x06, 5], Scope::PUBLISH, &[D20, D21, D22]),
            ("timeout", &[1, 0x02, 5], Scope::SUBSCRIBE_TRACKS, &[D19, D20, D21]),
            ("expires", &[1, 0x08, 5], Scope::NAMESPACE_OK, &[D19, D20, D21, D22]),
            ("expires", &[1, 0x08, 5], Scope::PUBLISH_OK, &[D18, D19, D20, D21, D22]),
            ("largest object", &[1, 0x09, 1, 2], Scope::STATE_NOTIFY, &[D20, D21, D22]),
            ("forward", &[1, 0x10, 1], Scope::PUBLISH_OK, &[D18, D19]),
            ("forward", &[1, 0x10, 1], Scope::PUBLISH, &[D18, D19, D20, D21, D22]),
            ("forward", &[1, 0x10, 1], Scope::UPDATE_PREFIX, &[D20, D21, D22]),
            ("priority", &[1, 0x20, 1], Scope::PUBLISH, &[D20, D21, D22]),
            ("priority", &[1, 0x20, 1], Scope::SUBSCRIBE_TRACKS, &[D19, D20, D21]),
            ("order", &[1, 0x22, 1], Scope::PUBLISH_OK, &[D18]),
            ("order", &[1, 0x22, 1], Scope::SUBSCRIBE_TRACKS, &[D19, D20, D21, D22]),
            ("order", &[1, 0x22, 1], Scope::PUBLISH, &[D20, D21, D22]),
            ("fill", &[1, 0x23, 1, 0], Scope::SUBSCRIBE, &[D20, D21, D22]),
            ("fill", &[1, 0x23, 1, 0], Scope::FETCH, &[]),
            ("subgroup filter", &[1, 0x25, 2, 0, 1], Scope::SUBSCRIBE, &[D19, D20, D21, D22]),
            ("subgroup filter", &[1, 0x25, 2, 0, 1], Scope::PUBLISH_OK, &[D19]),
            ("track filter", &[1, 0x29, 3, 0, 2, 1], Scope::SUBSCRIBE, &[]),
            ("track filter", &[1, 0x29, 3, 0, 2, 1], Scope::SUBSCRIBE_TRACKS, &[D19, D20, D21, D22]),
            ("new group", &[1, 0x32, 0], Scope::PUBLISH_OK, &[D18, D19]),
            ("properties", &[1, 0x35, 0], Scope::TRACK_STATUS, &[D20, D21, D22]),
        ];
        for (name, bytes, scope, known) in table {
            for draft in Draft::ALL {
                let read = decode_in(draft, bytes, scope);
                assert_eq!(read.is_ok(), known.contains(&draft), "{name} in {draft}: {read:?}");
            }
        }
    }

    #[test]
    fn fill_parameter_contains_nested_parameters() {
        let fill = Parameters {
            subscriber_priority: Some(200),
            filter: Some(Filter::Relative(1)),
            ..Parameters::default()
        };
        let parameters = Parameters {
            filter: Some(Filter::NextObject),
            fill: Some(Box::new(fill)),
            new_group_request: Some(7),
            ..Parameters::default()
        };
        let written: [(Draft, &[u8]); 2] = [
            (Draft::D20, &[3, 0x21, 2, 0, 0, 2, 6, 2, 0x20, 200, 1, 1, 1, 0x0f, 7]),
            (Draft::D22, &[3, 0x21, 5, 2, 6, 2, 0x20, 200, 1, 1, 1, 0x0f, 7]),
        ];
        for (draft, bytes) in written {
            assert_eq!(encode_in(draft, &parameters).as_deref(), Ok(bytes));
            assert_eq!(decode_in(draft, bytes, Scope::SUBSCRIBE), Ok(parameters.clone()));
        }
        let bad: [&[u8]; 5] = [
            &[1, 0x23, 0],                // the parameter count inside FILL_PARAMETERS is missing
            &[1, 0x23, 2, 0, 0],          // bytes follow the last parameter inside FILL_PARAMETERS
            &[1, 0x23, 3, 1, 0x10, 1],    // FORWARD is not allowed in FILL_PARAMETERS
            &[1, 0x23, 4, 1, 0x23, 1, 0], // FILL_PARAMETERS contains FILL_PARAMETERS
            &[2, 0x23, 1, 0, 0, 1, 0],    // FILL_PARAMETERS is repeated
        ];
        for bytes in bad {
            let error = decode_in(Draft::D22, bytes, Scope::SUBSCRIBE).unwrap_err();
            assert_eq!(error.code, Session::PROTOCOL_VIOLATION, "{bytes:x?}");
        }
        let unknown = encode_in(Draft::D19, &Parameters { filter: None, ..parameters }).unwrap_err();
        assert_eq!(unknown.to_string(), "draft-19 cannot express: FILL_PARAMETERS");
    }

    #[test]
    fn range_filter_parameters_are_decoded_and_encoded_unchanged() {
        let bytes = [4, 0x25, 2, 0, 1, 0, 2, 1, 5, 1, 0, 2, 3, 0, 2, 7];
        let read = decode_in(Draft::D19, &bytes, Scope::SUBSCRIBE).unwrap();
        let kinds: Vec<_> = read.range_filters.iter().map(|filter| filter.kind).collect();
        assert_eq!(kinds, [0x25, 0x25, 0x26, 0x28]);
        assert!(read.has_range_filters());
        assert_eq!(encode_in(Draft::D19, &read).as_deref(), Ok(&bytes[..]));
    }

    #[test]
    fn only_authorization_token_parameters_may_repeat() {
        let twice = decode(&[2, 3, 1, 0xaa, 0, 1, 0xbb], Scope::SUBSCRIBE).unwrap();
        assert_eq!(twice.authorization_tokens.len(), 2);
        assert_eq!(format!("{:?}", twice.authorization_tokens[0]), "Token(1 bytes)");
        assert!(decode(&[2, 0x10, 1, 0, 1], Scope::SUBSCRIBE).is_err());
    }

    #[test]
    fn parameter_in_a_wrong_message_or_out_of_range_closes_the_session() {
        let table: [(&[u8], Scope); 9] = [
            (&[1, 0x04, 5], Scope::PUBLISH), // RENDEZVOUS_TIMEOUT is allowed in SUBSCRIBE only
            (&[1, 0x09, 1, 2], Scope::SUBSCRIBE), // LARGEST_OBJECT is allowed in responses only
            (&[1, 0x20, 1], Scope::SUBSCRIBE_TRACKS), // a priority is not allowed in namespace requests
            (&[1, 0x0b, 1, 0], Scope::SUBSCRIBE), // parameter type 0x0b is undefined
            (&[1, 0x00, 1], Scope::SUBSCRIBE), // parameter type 0 is undefined
            (&[1, 0x10, 2], Scope::SUBSCRIBE), // FORWARD must be 0 or 1
            (&[1, 0x22, 3], Scope::SUBSCRIBE), // GROUP_ORDER must be 1 or 2
            (&[1, 0x21, 2, 0x02, 0], Scope::SUBSCRIBE), // bytes follow the filter in LOCATION_FILTER
            (&[1, 0x21, 1, 0x05], Scope::SUBSCRIBE), // the filter type in LOCATION_FILTER is undefined
        ];
        for (bytes, allowed) in table {
            let error = decode(bytes, allowed).unwrap_err();
            assert_eq!(error.code, Session::PROTOCOL_VIOLATION, "{bytes:x?}");
        }
        let mut overflow = vec![2, 0x32, 0];
        crate::vi64::encode(u64::MAX, &mut overflow);
        assert!(decode(&overflow, Scope::SUBSCRIBE).is_err());
    }

    /// The expected bytes are those that moq-net 0.3.18 sends.
    #[test]
    fn announcement_path_and_cost_round_trip() {
        let bytes = [2, 0xc4, 0x0b, 0x57, 3, 1, 0, 9, 1, 4];
        let parameters = decode(&bytes, Scope::NAMESPACE).unwrap();
        let path = parameters.hop_path.clone().unwrap();
        assert_eq!((path.to_string().as_str(), parameters.route_cost), ("1 > 0 > 9", Some(4)));
        let mut out = Vec::new();
        parameters.encode(&mut WireWriter::new(Draft::D18, &mut out));
        assert_eq!(out, bytes);
        assert!(decode(&bytes, Scope::PUBLISH_NAMESPACE).is_ok());
        assert_eq!(decode(&bytes, Scope::SUBSCRIBE), Err(MISPLACED));
        assert_eq!(parameters.check(Draft::D18, Scope::UPDATE_PREFIX), Err(MISPLACED));
    }

    #[test]
    fn parameter_count_without_parameters_is_refused() {
        let mut bytes = Vec::new();
        crate::vi64::encode(u64::MAX, &mut bytes);
        assert!(decode(&bytes, Scope::SUBSCRIBE).is_err());
    }
}
