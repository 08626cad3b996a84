//! Grants: the rights in a token, in the same form for CATs and JWTs.

use std::{fmt, sync::Arc, time::SystemTime};

use bytes::Bytes;
use millrace_moq::Namespace;

use super::keys::AccessKey;

/// An action of a peer. The numbers are those of C4M's actions. SUBSCRIBE_TRACKS has none there, so its number is
/// private.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs, reason = "the names are those of C4M and of the drafts' messages")]
pub enum Action {
    ClientSetup = 0,
    PublishNamespace = 2,
    SubscribeNamespace = 3,
    Subscribe = 4,
    RequestUpdate = 5,
    Publish = 6,
    Fetch = 7,
    TrackStatus = 8,
    SubscribeTracks = 9,
}

impl Action {
    /// Reports whether the `publish` list of an access rule decides on this action. The rule's `subscribe` list decides
    /// on all other actions.
    pub fn publishes(self) -> bool {
        matches!(self, Self::Publish | Self::PublishNamespace)
    }

    /// Returns the name of the action for logs and status.
    pub fn name(self) -> &'static str {
        match self {
            Self::ClientSetup => "SETUP",
            Self::PublishNamespace => "PUBLISH_NAMESPACE",
            Self::SubscribeNamespace => "SUBSCRIBE_NAMESPACE",
            Self::Subscribe => "SUBSCRIBE",
            Self::RequestUpdate => "REQUEST_UPDATE",
            Self::Publish => "PUBLISH",
            Self::Fetch => "FETCH",
            Self::TrackStatus => "TRACK_STATUS",
            Self::SubscribeTracks => "SUBSCRIBE_TRACKS",
        }
    }
}

/// A set of actions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Actions(u16);

impl Actions {
    /// The highest number of an action in C4M: 8, TRACK_STATUS.
    pub const LAST: u64 = 8;

    /// Makes the set of these actions.
    pub fn from_actions(actions: &[Action]) -> Self {
        Self(actions.iter().fold(0, |set, action| set | 1 << *action as u8))
    }

    /// Adds the action that has this number in C4M. The number is at most [`Self::LAST`].
    pub fn add_number(&mut self, number: u64) {
        self.0 |= 1 << number.min(Self::LAST);
    }

    /// Returns the numbers that the actions have in C4M.
    pub fn numbers(self) -> impl Iterator<Item = u64> {
        (0..=Self::LAST).filter(move |number| self.0 & (1 << number) != 0)
    }

    /// Reports whether the set has the action. SUBSCRIBE_TRACKS counts as SUBSCRIBE_NAMESPACE.
    pub fn contain(self, action: Action) -> bool {
        let action = match action {
            Action::SubscribeTracks => Action::SubscribeNamespace,
            other => other,
        };
        self.0 & (1 << action as u8) != 0
    }
}

impl fmt::Display for Actions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = [
            Action::ClientSetup,
            Action::PublishNamespace,
            Action::SubscribeNamespace,
            Action::Subscribe,
            Action::RequestUpdate,
            Action::Publish,
            Action::Fetch,
            Action::TrackStatus,
        ];
        let names: Vec<_> =
            all.iter().filter(|action| self.contain(**action)).map(|action| action.name()).collect();
        f.write_str(&names.join(", "))
    }
}

/// The track, or the namespace or prefix, that an action applies to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    /// The namespace or prefix.
    pub namespace: Namespace,
    /// The track's name. `None`: the action is on the namespace.
    pub track: Option<Bytes>,
}

impl Resource {
    /// Makes the resource of an action on a namespace.
    pub fn namespace(namespace: &Namespace) -> Self {
        Self { namespace: namespace.clone(), track: None }
    }

    /// Makes the resource of an action on a track.
    pub fn track(name: &millrace_moq::TrackName) -> Self {
        Self { namespace: name.namespace().clone(), track: Some(name.name().clone()) }
    }

    /// Returns the resource for actions on the session as a whole, such as CLIENT_SETUP: no namespace and no track.
    pub fn session() -> Self {
        Self { namespace: Namespace::default(), track: None }
    }
}

/// The comparison of one field of a namespace, or of a track's name, with the bytes in a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrantMatch {
    /// The field is equal to these bytes.
    Exact(Bytes),
    /// The field begins with these bytes.
    Prefix(Bytes),
    /// The field ends with these bytes.
    Suffix(Bytes),
}

impl GrantMatch {
    fn matches(&self, field: &[u8]) -> bool {
        match self {
            Self::Exact(wanted) => wanted == field,
            Self::Prefix(wanted) => field.starts_with(wanted),
            Self::Suffix(wanted) => field.ends_with(wanted),
        }
    }
}

/// Actions that a token allows on some tracks and namespaces (C4M's `moqt-scope`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantScope {
    /// The actions that are allowed.
    pub actions: Actions,
    /// The comparisons that the first fields of the namespace have to pass, in order.
    pub namespace: Vec<GrantMatch>,
    /// True if the namespace must have no further fields.
    pub closed: bool,
    /// The comparison that the track's name has to pass. `None` allows every name.
    pub track: Option<GrantMatch>,
}

impl GrantScope {
    /// Reports whether this scope of a token allows the action on a namespace or track. For CLIENT_SETUP the namespace
    /// does not matter.
    pub fn allows(&self, action: Action, resource: &Resource) -> bool {
        if action == Action::ClientSetup {
            return self.actions.contain(action);
        }
        let fields = resource.namespace.fields();
        let enough = if self.closed {
            fields.len() == self.namespace.len()
        } else {
            fields.len() >= self.namespace.len()
        };
        let track = match (&self.track, &resource.track) {
            (Some(wanted), Some(name)) => wanted.matches(name),
            // A request about a namespace names no track. Each track is checked when it is requested.
            (Some(_), None) | (None, _) => true,
        };
        enough
            && track
            && self.actions.contain(action)
            && self.namespace.iter().zip(fields).all(|(wanted, field)| wanted.matches(field))
    }
}

/// The content of a token whose signature was verified.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Grant {
    /// The token's ID.
    pub id: Option<String>,
    /// The subject of the token (`sub`): the peer that presents it.
    pub subject: Option<String>,
    /// The issuer of the token (`iss`).
    pub issuer: Option<String>,
    /// The audiences of the token (`aud`): the relays that may accept it. The list is empty if the token names none.
    pub audience: Vec<String>,
    /// The time at which the token expires. `None`: it does not expire.
    pub expires: Option<SystemTime>,
    /// The time from which on the token is valid. `None`: it is valid from the start.
    pub not_before: Option<SystemTime>,
    /// The actions that the token allows, each with its namespaces and tracks.
    pub scopes: Vec<GrantScope>,
    /// The claim `root` of a JWT, a URL path. The path of the connection's URL must be equal to it, below it or above
    /// it.
    pub root: Option<Vec<String>>,
    /// One element for each key that verifies the token: the only issuer that may use the key. `None`: every issuer
    /// that has no key of its own may use it.
    pub signers: Vec<Option<Arc<str>>>,
}

/// Returns, for each key, the only issuer that may use it. `None`: every issuer that has no key of its own may use it.
pub(super) fn list_issuers(keys: &[&AccessKey]) -> Vec<Option<Arc<str>>> {
    keys.iter().map(|key| key.issuer().cloned()).collect()
}

impl Grant {
    /// Reports whether one of the token's scopes allows the action on the resource.
    pub fn allows(&self, action: Action, resource: &Resource) -> bool {
        self.scopes.iter().any(|scope| scope.allows(action, resource))
    }
}
