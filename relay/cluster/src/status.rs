//! The part of a relay's status about the namespaces in its store.

use serde::{Deserialize, Serialize};

/// The namespaces that this relay registers in the discovery store, and its lookups there since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LookupStatus {
    /// True while the store reports changes of registrations. Otherwise, a namespace that memory does not have has to
    /// be looked up each time.
    pub followed: bool,
    /// Number of namespaces of this relay's publishers that are registered.
    pub registered: u64,
    /// Number of namespaces whose registration is not written or not removed yet.
    pub unwritten: u64,
    /// Number of namespaces that were not registered, because the relay has too many.
    pub refused: u64,
    /// Number of failed attempts to write registrations.
    pub failed_writes: u64,
    /// Number of namespaces in memory that another relay has registered.
    pub known: u64,
    /// Number of namespaces in memory that no other relay has registered.
    pub known_absent: u64,
    /// Number of namespaces that were removed from memory for lack of room.
    pub evicted: u64,
    /// Number of lookups that memory answered: a relay has the namespace.
    pub hits: u64,
    /// Number of lookups that memory answered: no relay has the namespace.
    pub negatives: u64,
    /// Number of lookups that the store answered: a relay has the namespace.
    pub found: u64,
    /// Number of lookups that the store answered: no relay has the namespace.
    pub absent: u64,
    /// Number of lookups without an answer, because the store gave none.
    pub failed: u64,
    /// Number of lookups that were refused, because of `lookup-rate`.
    pub limited: u64,
}
