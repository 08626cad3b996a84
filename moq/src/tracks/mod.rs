//! The state that a relay keeps and serves: tracks, their cache, and the bytes of each subscriber's streams.
//!
//! A [`track::Track`] holds its recent groups, and in them each [`subgroup::SubgroupStream`] as the raw bytes that
//! arrived. The [`cache::TrackCache`] bounds the memory of all tracks. A [`view::SubgroupView`] is a subgroup as it is
//! sent to one subscriber, and a [`fetch::FetchResponse`] answers a FETCH. Both are
//! [sources](millrace_quic::plane::source::Source) for the data plane. A [`filter::LocationWindow`] is the range of a
//! subscription, [`malformed`] detects malformed tracks, a
//! [`gap::GapState`] says what a track has missed, [`catalog`] keeps catalogs as they were read, and [`adapt`] selects a
//! subscriber's rendition.

pub mod account;
pub mod adapt;
pub mod cache;
pub mod catalog;
pub mod fetch;
pub mod filter;
pub mod gap;
pub mod malformed;
pub mod subgroup;
pub mod track;
pub mod view;

use millrace_quic::plane::downstream::ResetCodes;

use crate::code;

/// The reset codes of draft-18 with which the data plane itself resets streams.
pub const RESET_CODES: ResetCodes = ResetCodes {
    late: code::Reset::DELIVERY_TIMEOUT.0,
    behind: code::Reset::TOO_FAR_BEHIND.0,
    gone: code::Reset::CANCELLED.0,
};

#[cfg(test)]
mod tests;
