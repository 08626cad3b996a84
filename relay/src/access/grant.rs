//! What a token allows, whatever form it came in.

use std::{fmt, sync::Arc, time::SystemTime};

use bytes::Bytes;
use millrace_moq::Namespace;

use super::keys::Key;

/// What a peer wants to do. The numbers are those of C4M's actions, but for SUBSCRIBE_TRACKS, which has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
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
    /// Of those that a rule's `publish` is about; the others are `subscribe`'s.
    pub fn publishes(self) -> bool {
        matches!(self, Self::Publish | Self::PublishNamespace)
    }

    /// As it is shown.
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

    pub fn of(actions: &[Action]) -> Self {
        Self(actions.iter().fold(0, |set, action| set | 1 << *action as u8))
    }

    /// Adds C4M's action of this number, at most [`Self::LAST`].
    pub fn add_number(&mut self, number: u64) {
        self.0 |= 1 << number.min(Self::LAST);
    }

    /// C4M's numbers.
    pub fn numbers(self) -> impl Iterator<Item = u64> {
        (0..=Self::LAST).filter(move |number| self.0 & (1 << number) != 0)
    }

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

/// What something is done with: a track, or a namespace or prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    pub namespace: Namespace,
    pub track: Option<Bytes>,
}

impl Resource {
    pub fn namespace(namespace: &Namespace) -> Self {
        Self { namespace: namespace.clone(), track: None }
    }

    pub fn track(name: &millrace_moq::TrackName) -> Self {
        Self { namespace: name.namespace().clone(), track: Some(name.name().clone()) }
    }

    /// For a session as a whole.
    pub fn session() -> Self {
        Self { namespace: Namespace::default(), track: None }
    }
}

/// How one field is compared, byte by byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Match {
    Exact(Bytes),
    Prefix(Bytes),
    Suffix(Bytes),
}

impl Match {
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
pub struct Scope {
    pub actions: Actions,
    pub namespace: Vec<Match>,
    /// The namespace has no further fields.
    pub closed: bool,
    /// Absent: every name.
    pub track: Option<Match>,
}

impl Scope {
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
    pub id: Option<String>,
    pub subject: Option<String>,
    pub issuer: Option<String>,
    pub audience: Vec<String>,
    pub expires: Option<SystemTime>,
    pub not_before: Option<SystemTime>,
    pub scopes: Vec<Scope>,
    /// The connection's path has to be this, below it or above it: a JWT's `root`.
    pub root: Option<Vec<String>>,
    /// For each key that verifies it, the only issuer that it speaks for, if it is bound to one.
    pub signers: Vec<Option<Arc<str>>>,
}

/// Returns for each key the only issuer that it speaks for, if it is bound to one.
pub(super) fn of_issuers(keys: &[&Key]) -> Vec<Option<Arc<str>>> {
    keys.iter().map(|key| key.issuer().cloned()).collect()
}

impl Grant {
    pub fn allows(&self, action: Action, resource: &Resource) -> bool {
        self.scopes.iter().any(|scope| scope.allows(action, resource))
    }
}
