//! The supported drafts of MoQ Transport, and where they differ.
//!
//! Messages, parameters and locations are one set of types for all drafts, with the meaning that the newest draft gives
//! them. A codec gets the draft as an argument and asks it where the wire format differs. Only this file and the
//! codecs' tables compare drafts by number.

use std::{fmt, str::FromStr};

/// A draft of MoQ Transport: `draft-ietf-moq-transport-18` to `-22`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Draft {
    /// Draft-18.
    D18,
    /// Draft-19.
    D19,
    /// Draft-20.
    D20,
    /// Draft-21, whose wire format is the same as draft-20's.
    D21,
    /// Draft-22.
    D22,
}

impl Draft {
    /// Supported drafts, the most preferred (the newest) first.
    pub const ALL: [Self; 5] = [Self::D22, Self::D21, Self::D20, Self::D19, Self::D18];
    /// The newest supported draft.
    pub const NEWEST: Self = Self::D22;

    /// Returns the draft's name in the protocol negotiation of WebTransport.
    pub const fn protocol(self) -> &'static str {
        match self {
            Self::D18 => "moqt-18",
            Self::D19 => "moqt-19",
            Self::D20 => "moqt-20",
            Self::D21 => "moqt-21",
            Self::D22 => "moqt-22",
        }
    }

    /// Returns the draft's ALPN, which negotiates it over QUIC without WebTransport.
    pub const fn alpn(self) -> &'static [u8] {
        self.protocol().as_bytes()
    }

    /// Returns the supported draft that WebTransport names `name`.
    pub fn from_protocol(name: &str) -> Option<Self> {
        Self::from_alpn(name.as_bytes())
    }

    /// Returns the supported draft with the ALPN `name`.
    pub fn from_alpn(name: &[u8]) -> Option<Self> {
        Self::ALL.into_iter().find(|draft| draft.alpn() == name)
    }

    /// Returns the draft's number.
    pub const fn number(self) -> u8 {
        match self {
            Self::D18 => 18,
            Self::D19 => 19,
            Self::D20 => 20,
            Self::D21 => 21,
            Self::D22 => 22,
        }
    }

    /// Reports whether GOAWAY on the control stream names the first request that was not processed.
    pub fn names_unprocessed(self) -> bool {
        self == Self::D18
    }

    /// Reports whether FIN from the requester cancels a request for namespaces or tracks. In later drafts FIN only says
    /// that no update will follow.
    pub fn fin_cancels(self) -> bool {
        self == Self::D18
    }

    /// Reports whether a session may have several subscriptions to one track at the same time.
    pub fn repeats_subscriptions(self) -> bool {
        self >= Self::D19
    }

    /// Reports whether range filters exist. Peers may send them only after MAX_FILTER_RANGES in SETUP.
    pub fn has_range_filters(self) -> bool {
        self >= Self::D19
    }

    /// Reports whether MAX_REQUEST_UPDATES in SETUP limits the number of unanswered updates.
    pub fn limits_updates(self) -> bool {
        self >= Self::D19
    }

    /// Reports whether a subscriber asks for the objects from before its subscription with FILL_PARAMETERS. Earlier
    /// drafts use a FETCH that joins the subscription.
    pub fn has_fills(self) -> bool {
        self >= Self::D20
    }

    /// Reports whether FETCH has its range in LOCATION_FILTER and FETCH_OK names the last object. In earlier drafts,
    /// FETCH and FETCH_OK both state the location after the last object, with object ID 0 for a whole group.
    pub fn has_inclusive_ends(self) -> bool {
        self >= Self::D20
    }

    /// Reports whether a location filter may begin any number of groups before the current one, and end within a group.
    pub fn has_relative_filters(self) -> bool {
        self >= Self::D20
    }

    /// Reports whether LOCATION_FILTER begins with a type instead of a length.
    pub fn has_typed_filters(self) -> bool {
        self >= Self::D22
    }

    /// Reports whether a subscription ends as soon as no further object can match its filter. A subscription whose
    /// filter can never match an object is refused.
    pub fn ends_with_its_filter(self) -> bool {
        self < Self::D20
    }

    /// Reports whether the positive response to PUBLISH carries the subscription's parameters. In later drafts, the
    /// subscriber sends them in a REQUEST_UPDATE.
    pub fn accepts_with_parameters(self) -> bool {
        self < Self::D20
    }

    /// Reports whether a publisher may report changes of a subscription with PUBLISH_STATE_NOTIFY, and a subscriber may
    /// decline the track's properties with INCLUDE_PROPERTIES.
    pub fn has_state_notify(self) -> bool {
        self >= Self::D20
    }

    /// Reports whether a FETCH response distinguishes objects that timed out from objects that are unknown.
    pub fn has_timed_out_ranges(self) -> bool {
        self >= Self::D20
    }
}

impl fmt::Display for Draft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "draft-{}", self.number())
    }
}

/// The error for a text that names no supported draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a draft of MoQ Transport is a number from 18 to 22")]
pub struct UnknownDraft;

impl FromStr for Draft {
    type Err = UnknownDraft;

    fn from_str(text: &str) -> Result<Self, UnknownDraft> {
        let number: u8 = text.parse().map_err(|_| UnknownDraft)?;
        Self::ALL.into_iter().find(|draft| draft.number() == number).ok_or(UnknownDraft)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draft_numbers_and_alpn_names_are_parsed_and_unknown_ones_refused() {
        assert!(Draft::ALL.is_sorted_by(|newer, older| newer > older));
        assert_eq!(Draft::ALL[0], Draft::NEWEST);
        for draft in Draft::ALL {
            assert_eq!(draft.protocol(), format!("moqt-{}", draft.number()));
            assert_eq!(Draft::from_protocol(draft.protocol()), Some(draft));
            assert_eq!(Draft::from_alpn(draft.alpn()), Some(draft));
            assert_eq!(draft.number().to_string().parse(), Ok(draft));
            assert_eq!(draft.to_string(), format!("draft-{}", draft.number()));
        }
        for unknown in ["moqt-17", "moqt-23", "moqt-018", "h3", ""] {
            assert_eq!(Draft::from_protocol(unknown), None);
        }
        for unknown in ["17", "23", "moqt-18", "-18", ""] {
            assert_eq!(unknown.parse::<Draft>(), Err(UnknownDraft), "{unknown}");
        }
    }
}
