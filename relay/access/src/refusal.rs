//! The reasons for which tokens are not accepted, and for which sessions and requests are refused or ended.

use millrace_moq::code;

/// The reason why a token is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum TokenError {
    #[error("the token is malformed: {0}")]
    Malformed(&'static str),
    #[error("the token's type is not supported")]
    Kind,
    #[error("the token's algorithm is not supported")]
    Algorithm,
    #[error("no key fits the token's signature")]
    Signature,
    #[error("the token asks for what is not enforced here: {0}")]
    Unsupported(&'static str),
    #[error("the token has expired")]
    Expired,
    #[error("the token is not valid yet")]
    NotYet,
    #[error("the token was revoked")]
    Revoked,
    #[error("the token is from another issuer")]
    Issuer,
    #[error("the token is for another audience")]
    Audience,
}

/// The reason why a session or request is refused, or why its right has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum AccessRefusal {
    #[error("not allowed")]
    NotAllowed,
    #[error(transparent)]
    Token(#[from] TokenError),
    #[error("a token is repeated")]
    Repeated,
    #[error("too many tokens")]
    Many,
    #[error("too many tokens were not good")]
    Hopeless,
    #[error("no request that is allowed came in time: show a token in SETUP, or with a request")]
    Unproven,
    #[error("too many sessions without a right: the oldest has to go")]
    Displaced,
    #[error("too many sessions without a right come from this network: the oldest has to go")]
    NetworkDisplaced,
    #[error("another publisher has this track")]
    Taken,
    #[error("too many requests")]
    Rate,
    #[error("too many requests come from this network")]
    NetworkRate,
    #[error("too many tracks")]
    Tracks,
    #[error("requests from this network hold too many tracks")]
    NetworkTracks,
    #[error("the session has as many subscriptions to this track as it may have (session-same-track)")]
    SameTrack,
}

impl AccessRefusal {
    /// Returns the name that the metrics count the refusal under.
    pub fn name(self) -> &'static str {
        match self {
            Self::NotAllowed => "not_allowed",
            Self::Taken => "track_taken",
            Self::Rate => "request_rate",
            Self::NetworkRate => "network_request_rate",
            Self::Tracks => "tracks",
            Self::NetworkTracks => "network_tracks",
            Self::SameTrack => "same_track",
            Self::Repeated | Self::Many => "token_malformed",
            Self::Hopeless => "bad_tokens",
            Self::Unproven => "unproven",
            Self::Displaced => "unproven_displaced",
            Self::NetworkDisplaced => "unproven_network_displaced",
            Self::Token(error) => match error {
                TokenError::Malformed(_) => "token_malformed",
                TokenError::Kind | TokenError::Algorithm | TokenError::Unsupported(_) => "token_unsupported",
                TokenError::Signature => "token_signature",
                TokenError::Expired => "token_expired",
                TokenError::NotYet => "token_not_yet",
                TokenError::Revoked => "token_revoked",
                TokenError::Issuer => "token_issuer",
                TokenError::Audience => "token_audience",
            },
        }
    }

    /// Returns the code of the REQUEST_ERROR that refuses a request.
    pub fn request_code(self) -> code::Request {
        match self {
            Self::Token(TokenError::Malformed(_)) | Self::Repeated | Self::Many => {
                code::Request::MALFORMED_AUTH_TOKEN
            }
            Self::Token(TokenError::Expired) => code::Request::EXPIRED_AUTH_TOKEN,
            Self::Rate | Self::NetworkRate | Self::Tracks | Self::NetworkTracks | Self::SameTrack => {
                code::Request::EXCESSIVE_LOAD
            }
            _ => code::Request::UNAUTHORIZED,
        }
    }

    /// Returns the code that the session is closed with.
    pub fn session_code(self) -> code::Session {
        match self {
            Self::Token(TokenError::Malformed(_)) | Self::Repeated | Self::Many => {
                code::Session::MALFORMED_AUTH_TOKEN
            }
            Self::Token(TokenError::Expired) => code::Session::EXPIRED_AUTH_TOKEN,
            _ => code::Session::UNAUTHORIZED,
        }
    }

    /// Returns the code that a request's stream is reset with when the right of the request has ended.
    pub fn reset_code(self) -> code::Reset {
        match self {
            Self::Token(TokenError::Expired) => code::Reset::EXPIRED_AUTH_TOKEN,
            _ => code::Reset::CANCELLED,
        }
    }
}
