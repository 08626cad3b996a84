//! The drafts of MoQ Transport that are spoken, and where they differ.
//!
//! Messages, parameters and locations are one set of values for all drafts, which means what the newest means; a codec is told
//! the draft, and asks it what differs. Nobody compares drafts by their numbers but this file and the codecs' tables.

use std::{fmt, str::FromStr};

/// A draft of MoQ Transport: `draft-ietf-moq-transport-18` to `-22`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Draft {
    D18,
    D19,
    D20,
    /// On the wire the same as draft-20.
    D21,
    D22,
}

impl Draft {
    /// All that are spoken, the newest first: as they are preferred.
    pub const ALL: [Self; 5] = [Self::D22, Self::D21, Self::D20, Self::D19, Self::D18];
    pub const NEWEST: Self = Self::D22;

    /// The draft's name, as WebTransport negotiates it.
    pub const fn protocol(self) -> &'static str {
        match self {
            Self::D18 => "moqt-18",
            Self::D19 => "moqt-19",
            Self::D20 => "moqt-20",
            Self::D21 => "moqt-21",
            Self::D22 => "moqt-22",
        }
    }

    /// The same over QUIC.
    pub const fn alpn(self) -> &'static [u8] {
        self.protocol().as_bytes()
    }

    /// The draft of this name, if it is spoken.
    pub fn of_protocol(name: &str) -> Option<Self> {
        Self::of_alpn(name.as_bytes())
    }

    /// The same for QUIC.
    pub fn of_alpn(name: &[u8]) -> Option<Self> {
        Self::ALL.into_iter().find(|draft| draft.alpn() == name)
    }

    pub const fn number(self) -> u8 {
        match self {
            Self::D18 => 18,
            Self::D19 => 19,
            Self::D20 => 20,
            Self::D21 => 21,
            Self::D22 => 22,
        }
    }

    /// GOAWAY on the control stream names the first request that was not processed.
    pub fn names_unprocessed(self) -> bool {
        self == Self::D18
    }

    /// FIN of who asked takes a request for namespaces or tracks back. Later it says that no update will come.
    pub fn fin_cancels(self) -> bool {
        self == Self::D18
    }

    /// A session may have several subscriptions to a track.
    pub fn repeats_subscriptions(self) -> bool {
        self >= Self::D19
    }

    /// There are filters by ranges of values, and MAX_FILTER_RANGES in SETUP, without which there may be none.
    pub fn has_range_filters(self) -> bool {
        self >= Self::D19
    }

    /// MAX_REQUEST_UPDATES in SETUP limits updates that have no answer.
    pub fn limits_updates(self) -> bool {
        self >= Self::D19
    }

    /// Who subscribes asks for what came before with FILL_PARAMETERS. Until then with a FETCH that joins the subscription.
    pub fn has_fills(self) -> bool {
        self >= Self::D20
    }

    /// FETCH has its range in LOCATION_FILTER, and FETCH_OK its last object. Until then both have the object behind it, or 0 for
    /// a whole group.
    pub fn has_inclusive_ends(self) -> bool {
        self >= Self::D20
    }

    /// A filter may begin any number of groups back, and end within a group.
    pub fn has_relative_filters(self) -> bool {
        self >= Self::D20
    }

    /// LOCATION_FILTER begins with a type instead of a length.
    pub fn has_typed_filters(self) -> bool {
        self >= Self::D22
    }

    /// A subscription ends when its filter has nothing more to let through, and one that has nothing from the beginning is refused.
    pub fn ends_with_its_filter(self) -> bool {
        self < Self::D20
    }

    /// The answer to PUBLISH changes the subscription. Later REQUEST_UPDATE does.
    pub fn accepts_with_parameters(self) -> bool {
        self < Self::D20
    }

    /// A publisher may say with PUBLISH_STATE_NOTIFY what has become of a subscription, and a subscriber with INCLUDE_PROPERTIES
    /// that it wants no properties of the track.
    pub fn has_state_notify(self) -> bool {
        self >= Self::D20
    }

    /// In a FETCH response, objects that were not to be had in time are told from those that nobody knows of.
    pub fn has_timed_out_ranges(self) -> bool {
        self >= Self::D20
    }
}

impl fmt::Display for Draft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "draft-{}", self.number())
    }
}

/// Text that names no draft that is spoken.
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
    fn names() {
        assert!(Draft::ALL.is_sorted_by(|newer, older| newer > older));
        assert_eq!(Draft::ALL[0], Draft::NEWEST);
        for draft in Draft::ALL {
            assert_eq!(draft.protocol(), format!("moqt-{}", draft.number()));
            assert_eq!(Draft::of_protocol(draft.protocol()), Some(draft));
            assert_eq!(Draft::of_alpn(draft.alpn()), Some(draft));
            assert_eq!(draft.number().to_string().parse(), Ok(draft));
            assert_eq!(draft.to_string(), format!("draft-{}", draft.number()));
        }
        for unknown in ["moqt-17", "moqt-23", "moqt-018", "h3", ""] {
            assert_eq!(Draft::of_protocol(unknown), None);
        }
        for unknown in ["17", "23", "moqt-18", "-18", ""] {
            assert_eq!(unknown.parse::<Draft>(), Err(UnknownDraft), "{unknown}");
        }
    }
}
