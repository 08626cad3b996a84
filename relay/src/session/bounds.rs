//! Limits the work that a peer's control messages can cause.
//!
//! | bound | messages | what holds |
//! | --- | --- | --- |
//! | [`WorkBound::Admission`] | those that open a request | refused once the session, or all of its client's, has sent `session-requests` or `client-requests` in a second |
//! | [`WorkBound::Pace`] | REQUEST_UPDATE, PUBLISH_STATE_NOTIFY | taken from the same budgets, but never refused: the message, and all behind it in its stream, waits until there is room |
//! | [`WorkBound::Once`] | SETUP, GOAWAY, UNSUBSCRIBE, PUBLISH_DONE | a second one on the stream is a protocol violation, or is not read |
//! | [`WorkBound::Answer`] | answers | one for each request and update of the relay's own; another is a violation |
//! | [`WorkBound::Upstream`] | NAMESPACE, NAMESPACE_DONE, PUBLISH_SKIPPED | only relays that this one has connected to are asked for them; of others they are violations |
//!
//! Each authorization token beyond the first counts as one more request, because its signature is checked.
//! SUBSCRIBE_NAMESPACE, SUBSCRIBE_TRACKS and PUBLISH_NAMESPACE also count one more for each further [page](crate::hub)
//! of namespaces or tracks that they cover.

use millrace_moq::{Message, Parameters};

/// How the relay limits the work that a message of a peer causes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkBound {
    Admission,
    Pace,
    Once,
    Answer,
    Upstream,
}

impl WorkBound {
    /// Returns the limit that applies to a message. Every message has one.
    pub fn from_message(message: &Message) -> Self {
        match message {
            Message::Subscribe(_)
            | Message::Publish(_)
            | Message::Fetch(_)
            | Message::TrackStatus(_)
            | Message::PublishNamespace(_)
            | Message::SubscribeNamespace(_)
            | Message::SubscribeTracks(_) => Self::Admission,
            Message::RequestUpdate(_) | Message::PublishStateNotify(_) => Self::Pace,
            Message::Setup(_) | Message::GoAway(_) | Message::Unsubscribe(_) | Message::PublishDone(_) => {
                Self::Once
            }
            Message::SubscribeOk(_)
            | Message::FetchOk(_)
            | Message::RequestOk(_)
            | Message::RequestError(_) => Self::Answer,
            Message::Namespace(_) | Message::NamespaceDone(_) | Message::PublishSkipped(_) => Self::Upstream,
        }
    }
}

/// Returns the parameters of a message that opens a request, and `None` for other messages.
pub fn parameters(message: &Message) -> Option<&Parameters> {
    Some(match message {
        Message::Subscribe(message) => &message.parameters,
        Message::Publish(message) => &message.parameters,
        Message::Fetch(message) => &message.parameters,
        Message::TrackStatus(message) => &message.parameters,
        Message::PublishNamespace(message) => &message.parameters,
        Message::SubscribeNamespace(message) => &message.parameters,
        Message::SubscribeTracks(message) => &message.parameters,
        _ => return None,
    })
}

/// Returns how many requests a message counts as: the number of its authorization tokens, and at least 1.
pub fn cost(message: &Message) -> u64 {
    let tokens = match message {
        Message::RequestUpdate(update) => update.parameters.authorization_tokens.len(),
        other => parameters(other).map_or(0, |parameters| parameters.authorization_tokens.len()),
    };
    tokens.max(1) as u64
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use millrace_moq::{message::RequestUpdate, param::AuthToken};

    use super::*;

    #[test]
    fn each_token_after_the_first_counts_as_a_request_in_the_rate_limit() {
        for (tokens, expected) in [(0, 1), (1, 1), (2, 2), (8, 8)] {
            let authorization_tokens = vec![AuthToken(Bytes::new()); tokens];
            let parameters = Parameters { authorization_tokens, ..Parameters::default() };
            assert_eq!(cost(&RequestUpdate { request_id: 2, parameters }.into()), expected);
        }
    }
}
