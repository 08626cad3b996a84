//! Error codes of MoQ Transport (draft-22, section 16.11), for every supported draft.
//!
//! The types are newtypes and not enums: an unknown code is legal in all four registries and means the same as an
//! internal error ("Grease"). A relay must therefore be able to keep an unknown code and pass it on.

use std::fmt;

use super::Draft;

macro_rules! codes {
    ($(#[$doc:meta])* $name:ident { $($constant:ident = $value:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u64);

        #[allow(missing_docs, reason = "the names are those of the drafts")]
        impl $name {
            $(pub const $constant: Self = Self($value);)*

            /// Returns the code's name in its registry, or `None` for an unknown code.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($constant)),)*
                    _ => None,
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, "{:#x}", self.0),
                }
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }
    };
}

codes! {
    /// The reason why a session is closed: the application error code of CONNECTION_CLOSE.
    Session {
        NO_ERROR = 0x0,
        INTERNAL_ERROR = 0x1,
        UNAUTHORIZED = 0x2,
        PROTOCOL_VIOLATION = 0x3,
        INVALID_REQUEST_ID = 0x4,
        DUPLICATE_TRACK_ALIAS = 0x5,
        KEY_VALUE_FORMATTING_ERROR = 0x6,
        INVALID_PATH = 0x8,
        MALFORMED_PATH = 0x9,
        GOAWAY_TIMEOUT = 0x10,
        CONTROL_MESSAGE_TIMEOUT = 0x11,
        DATA_STREAM_TIMEOUT = 0x12,
        AUTH_TOKEN_CACHE_OVERFLOW = 0x13,
        DUPLICATE_AUTH_TOKEN_ALIAS = 0x14,
        VERSION_NEGOTIATION_FAILED = 0x15,
        MALFORMED_AUTH_TOKEN = 0x16,
        UNKNOWN_AUTH_TOKEN_ALIAS = 0x17,
        EXPIRED_AUTH_TOKEN = 0x18,
        INVALID_AUTHORITY = 0x19,
        MALFORMED_AUTHORITY = 0x1a,
        TOO_MANY_REQUEST_UPDATES = 0x1b,
    }
}

codes! {
    /// The reason why a request failed: the code of REQUEST_ERROR.
    Request {
        INTERNAL_ERROR = 0x0,
        UNAUTHORIZED = 0x1,
        TIMEOUT = 0x2,
        NOT_SUPPORTED = 0x3,
        MALFORMED_AUTH_TOKEN = 0x4,
        EXPIRED_AUTH_TOKEN = 0x5,
        GOING_AWAY = 0x6,
        EXCESSIVE_LOAD = 0x9,
        DOES_NOT_EXIST = 0x10,
        INVALID_RANGE = 0x11,
        MALFORMED_TRACK = 0x12,
        DUPLICATE_SUBSCRIPTION = 0x19,
        UNINTERESTED = 0x20,
        PREFIX_OVERLAP = 0x30,
        NAMESPACE_TOO_LARGE = 0x31,
        INVALID_JOINING_REQUEST_ID = 0x32,
        UNSUPPORTED_EXTENSION = 0x33,
        REDIRECT = 0x34,
        CONFLICTING_FILTERS = 0x35,
        INVALID_FILTER = 0x36,
    }
}

impl Request {
    /// Returns the code to send in `draft`: an internal error if the draft does not define this code.
    pub(super) fn in_draft(self, draft: Draft) -> Self {
        let known = match self {
            Self::DUPLICATE_SUBSCRIPTION => !draft.repeats_subscriptions(),
            Self::INVALID_JOINING_REQUEST_ID => !draft.has_fills(),
            Self::CONFLICTING_FILTERS | Self::INVALID_FILTER => draft.has_range_filters(),
            _ => true,
        };
        if known { self } else { Self::INTERNAL_ERROR }
    }
}

codes! {
    /// The reason why a subscription ended: the status code of PUBLISH_DONE.
    Done {
        INTERNAL_ERROR = 0x0,
        UNAUTHORIZED = 0x1,
        TRACK_ENDED = 0x2,
        SUBSCRIPTION_ENDED = 0x3,
        GOING_AWAY = 0x4,
        TOO_FAR_BEHIND = 0x5,
        EXPIRED = 0x6,
        UPDATE_FAILED = 0x8,
        EXCESSIVE_LOAD = 0x9,
        MALFORMED_TRACK = 0x12,
    }
}

impl Done {
    /// Returns the code as received in `draft`: an internal error if the draft does not define this code.
    pub(super) fn in_draft(self, draft: Draft) -> Self {
        match self {
            Self::SUBSCRIPTION_ENDED if !draft.ends_with_its_filter() => Self::INTERNAL_ERROR,
            code => code,
        }
    }

    /// Returns the code to send in `draft`. In drafts without the code "subscription ended", a subscription that ends
    /// at the end of its filter's range is reported as "track ended".
    pub(super) fn for_draft(self, draft: Draft) -> Self {
        match self {
            Self::SUBSCRIPTION_ENDED if !draft.ends_with_its_filter() => Self::TRACK_ENDED,
            code => code,
        }
    }
}

codes! {
    /// The reason why a stream was abandoned: the application error code of RESET_STREAM and STOP_SENDING.
    Reset {
        INTERNAL_ERROR = 0x0,
        CANCELLED = 0x1,
        DELIVERY_TIMEOUT = 0x2,
        SESSION_CLOSED = 0x3,
        GOING_AWAY = 0x4,
        TOO_FAR_BEHIND = 0x5,
        UNKNOWN_OBJECT_STATUS = 0x6,
        EXPIRED_AUTH_TOKEN = 0x7,
        EXCESSIVE_LOAD = 0x9,
        MALFORMED_TRACK = 0x12,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_codes_print_by_name_and_unknown_ones_by_number() {
        assert_eq!(Session::INVALID_AUTHORITY.to_string(), "INVALID_AUTHORITY");
        assert_eq!(Request(0x9d).to_string(), "0x9d");
        assert_eq!(format!("{:?}", Done::TRACK_ENDED), "TRACK_ENDED");
        assert_eq!(Reset(0x2).name(), Some("DELIVERY_TIMEOUT"));
    }
}
