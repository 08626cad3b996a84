//! Routes that relays of the cluster announce. Each is withdrawn when its guard is dropped.

use std::{
    sync::{Arc, Weak},
    time::Instant,
};

use millrace_moq::Namespace;
use millrace_relay_cluster::{Announcement, AnnouncementKey, AnnouncementRefusal};

use super::namespaces::PublisherNamespaces;

/// A route that another relay announces to us. Dropping it withdraws the route.
pub struct RoutePublication {
    namespaces: Weak<PublisherNamespaces>,
    namespace: Namespace,
    key: AnnouncementKey,
    link_cost: u64,
}

impl RoutePublication {
    /// Makes a guard for a route. The route is announced by the first [`Self::update`].
    pub(super) fn new(
        namespaces: &Arc<PublisherNamespaces>,
        namespace: Namespace,
        key: AnnouncementKey,
        link_cost: u64,
    ) -> Self {
        Self { namespaces: Arc::downgrade(namespaces), namespace, key, link_cost }
    }

    pub(super) fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Replaces the hop path and the cost that the other relay announces for this route.
    ///
    /// # Errors
    /// If the route table refuses the announcement, withdraws the earlier one and returns an error.
    pub fn update(&self, announcement: Announcement) -> Result<(), AnnouncementRefusal> {
        let Some(namespaces) = self.namespaces.upgrade() else { return Ok(()) };
        let mut state = namespaces.0.lock();
        let Some(table) = &mut state.table else { return Ok(()) };
        let taken = table.announce(self.key, &self.namespace, announcement, self.link_cost, Instant::now());
        state.spread(&self.namespace);
        taken
    }
}

impl Drop for RoutePublication {
    fn drop(&mut self) {
        let Some(namespaces) = self.namespaces.upgrade() else { return };
        let mut state = namespaces.0.lock();
        if let Some(table) = &mut state.table {
            table.withdraw(self.key, &self.namespace, Instant::now());
        }
        state.spread(&self.namespace);
    }
}

/// Registers the session of a relay of the cluster, which may announce routes. Dropping it removes the session.
pub struct RelayRegistration {
    namespaces: Weak<PublisherNamespaces>,
    session: u64,
}

impl RelayRegistration {
    pub(super) fn new(namespaces: &Arc<PublisherNamespaces>, session: u64) -> Self {
        Self { namespaces: Arc::downgrade(namespaces), session }
    }
}

impl Drop for RelayRegistration {
    fn drop(&mut self) {
        if let Some(namespaces) = self.namespaces.upgrade() {
            let mut state = namespaces.0.lock();
            state.relays.remove(&self.session);
        }
    }
}
