//! Grants: the rights in a token, whatever form it came in.

use std::{fmt, sync::Arc, time::SystemTime};

use bytes::Bytes;
use millrace_moq::Namespace;

use super::keys::AccessKey;

/// An action of a peer. The numbers are those of C4M's actions, but for SUBSCRIBE_TRACKS, which has none.
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
    /// Reports whether a rule's `publish` is about the action. Its `subscribe` is about the others.
    pub fn publishes(self) -> bool {
        matches!(self, Self::Publish | Self::PublishNamespace)
    }

    /// Returns the name for logs and status.
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
    /// C4M's 0 (CLIENT_SETUP) to 8 (TRACK_STATUS).
    pub const LAST: u64 = 8;

    /// Makes the set of these actions.
    pub fn from_actions(actions: &[Action]) -> Self {
        Self(actions.iter().fold(0, |set, action| set | 1 << *action as u8))
    }

    /// Adds C4M's action of this number, at most [`Self::LAST`].
    pub fn add_number(&mut self, number: u64) {
        self.0 |= 1 << number.min(Self::LAST);
    }

    /// Returns C4M's numbers of the actions.
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

/// The object of an action: a track, or a namespace or prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    /// The namespace or prefix.
    pub namespace: Namespace,
    /// The track's name. `None`: the action is about the namespace.
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

    /// Returns the resource of a session as a whole.
    pub fn session() -> Self {
        Self { namespace: Namespace::default(), track: None }
    }
}

/// How one field is compared, byte by byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrantMatch {
    /// The field is this.
    Exact(Bytes),
    /// The field begins with this.
    Prefix(Bytes),
    /// The field ends with this.
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

/// Actions on tracks and namespaces (C4M's `moqt-scope`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantScope {
    /// The actions that are allowed.
    pub actions: Actions,
    /// The first fields of the namespace, in order.
    pub namespace: Vec<GrantMatch>,
    /// The namespace has no further fields.
    pub closed: bool,
    /// Absent: every name.
    pub track: Option<GrantMatch>,
}

impl GrantScope {
    /// Reports whether the scope allows the action on the resource. For CLIENT_SETUP the resource does not matter.
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
            // A request about namespaces: each track of theirs is asked about when it is wanted.
            (Some(_), None) | (None, _) => true,
        };
        enough
            && track
            && self.actions.contain(action)
            && self.namespace.iter().zip(fields).all(|(wanted, field)| wanted.matches(field))
    }
}

/// A token that was found good.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Grant {
    /// The token's ID.
    pub id: Option<String>,
    /// The party that it was made for.
    pub subject: Option<String>,
    /// The party that made it.
    pub issuer: Option<String>,
    /// The relays that it is for. If empty, it names none.
    pub audience: Vec<String>,
    /// The end of its time. `None`: it has none.
    pub expires: Option<SystemTime>,
    /// The beginning of its time.
    pub not_before: Option<SystemTime>,
    /// The actions that it allows, and where.
    pub scopes: Vec<GrantScope>,
    /// The connection's path has to be this, below it or above it: a JWT's `root`.
    pub root: Option<Vec<String>>,
    /// Issuers that the keys which verify it speak for. One entry for each key, `None` if the key is bound to
    /// no issuer.
    pub signers: Vec<Option<Arc<str>>>,
}

/// Returns for each key the only issuer that it speaks for, if it is bound to one.
pub(super) fn list_issuers(keys: &[&AccessKey]) -> Vec<Option<Arc<str>>> {
    keys.iter().map(|key| key.issuer().cloned()).collect()
}

impl Grant {
    /// Reports whether one of its scopes allows the action on the resource.
    pub fn allows(&self, action: Action, resource: &Resource) -> bool {
        self.scopes.iter().any(|scope| scope.allows(action, resource))
    }
}
