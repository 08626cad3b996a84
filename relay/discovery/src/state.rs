//! The state of a discovery: the relays that were found, and the failures of the store.

use std::sync::Arc;

use tokio::sync::watch;
use tracing::{info, warn};

use crate::{
    http::StoreError,
    record::{MAX_RELAYS, RelayRecord},
};

/// The relays that were found, and whether the store works.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiscoveryState {
    /// The relays in the store's last answer, at most [`MAX_RELAYS`], sorted by URL. This relay's own record is not
    /// among them.
    pub relays: Arc<[RelayRecord]>,
    /// The reason why the last reading of the relays failed; `None` if it succeeded.
    pub read_error: Option<String>,
    /// The reason why this relay's record could not be written to the store; `None` if it could.
    pub record_error: Option<String>,
    /// The entries in the store's last answer that are not used, each with the reason, sorted.
    pub unusable: Arc<[String]>,
    /// True if the store has this relay's record, as far as this relay knows.
    pub is_registered: bool,
    /// Number of failed attempts to read the relays or to write the record, since the start.
    pub failures: u64,
}

impl DiscoveryState {
    /// Returns the reason of the present failure to read the relays, or else to write the record.
    pub fn error(&self) -> Option<&str> {
        self.read_error.as_deref().or(self.record_error.as_deref())
    }
}

/// Records an answer of the store: its relays, and the reasons why other entries are not used.
pub fn note_found(
    found: &watch::Sender<DiscoveryState>,
    mut relays: Vec<RelayRecord>,
    mut unusable: Vec<String>,
) {
    // A sorted list without repetitions equals the previous one even if the store changes the order of its entries.
    relays.sort();
    relays.dedup_by(|a, b| a.url == b.url);
    if relays.len() > MAX_RELAYS {
        unusable.push(format!("{} relays are more than the {MAX_RELAYS} that are used", relays.len()));
        relays.truncate(MAX_RELAYS);
    }
    unusable.sort();
    // A faulty store may have any number of entries, so the stored reasons are limited, too.
    unusable.truncate(MAX_RELAYS);
    found.send_if_modified(|state| {
        let recovered = state.read_error.take().is_some();
        if recovered {
            info!("the discovery store answers again");
        }
        let are_new = *state.relays != *relays;
        if are_new {
            info!(relays = relays.len(), before = state.relays.len(), "the discovered relays have changed");
            state.relays = relays.into();
        }
        let are_others = *state.unusable != *unusable;
        if are_others {
            if let Some(first) = unusable.first() {
                warn!(entries = unusable.len(), first, "ignored unusable entries of the discovery store");
            }
            state.unusable = unusable.into();
        }
        recovered || are_new || are_others
    });
}

/// Records that the relays could not be read. The relays that were found stay.
pub fn note_unread(found: &watch::Sender<DiscoveryState>, error: &StoreError) {
    if store_failure(found, error, |state| &mut state.read_error) {
        warn!(%error, "cannot read the discovery store: the relays that it listed before stay in use");
    }
}

/// Records that this relay's record is in the store.
pub fn note_registered(found: &watch::Sender<DiscoveryState>) {
    found.send_if_modified(|state| {
        let recovered = state.record_error.take().is_some();
        !std::mem::replace(&mut state.is_registered, true) || recovered
    });
}

/// Records that this relay's record could not be written to the store.
pub fn note_unregistered(found: &watch::Sender<DiscoveryState>, error: &StoreError) {
    if store_failure(found, error, |state| &mut state.record_error) {
        warn!(%error, "cannot keep this relay's record in the discovery store: trying again");
    }
}

/// Counts and stores a failure. Returns true if its reason is not the one that was stored before.
fn store_failure(
    found: &watch::Sender<DiscoveryState>,
    error: &StoreError,
    stored: fn(&mut DiscoveryState) -> &mut Option<String>,
) -> bool {
    let reason = Some(error.to_string());
    let mut before = None;
    // The number of failures changes each time, so watchers are notified even if the reason stays the same.
    found.send_modify(|state| {
        state.failures += 1;
        before = std::mem::replace(stored(state), reason.clone());
    });
    before != reason
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn discovered_relays_beyond_1000_are_ignored_and_reported() {
        let named =
            |number: usize| RelayRecord::from_url(format!("moqt://a:{number}").parse().unwrap()).unwrap();
        let found = watch::Sender::new(DiscoveryState::default());
        // One relay is in the list twice.
        note_found(&found, (1..MAX_RELAYS + 9).chain([1]).map(named).collect(), Vec::new());
        assert_eq!(found.borrow().relays.len(), MAX_RELAYS);
        assert!(found.borrow().relays.is_sorted());
        assert_eq!(*found.borrow().unusable, ["1008 relays are more than the 1000 that are used"]);
    }

    #[test]
    fn discovery_read_success_keeps_the_registration_error() {
        let found = watch::Sender::new(DiscoveryState::default());
        note_unregistered(&found, &StoreError::LeaseOver);
        note_unread(&found, &StoreError::Late("store".into()));
        assert_eq!(found.borrow().error(), Some("store did not answer within 3 s"));
        note_found(&found, Vec::new(), Vec::new());
        assert_eq!(found.borrow().error(), Some(&*StoreError::LeaseOver.to_string()));
        note_registered(&found);
        assert_eq!((found.borrow().error(), found.borrow().failures), (None, 2));
    }

    #[test]
    fn reordered_unusable_discovery_records_notify_no_watcher() {
        let found = watch::Sender::new(DiscoveryState::default());
        let mut watched = found.subscribe();
        note_found(&found, Vec::new(), vec!["b".into(), "a".into()]);
        assert!(watched.has_changed().unwrap());
        assert_eq!(*watched.borrow_and_update().unusable, ["a", "b"]);
        note_found(&found, Vec::new(), vec!["a".into(), "b".into()]);
        assert!(!watched.has_changed().unwrap());
    }
}
