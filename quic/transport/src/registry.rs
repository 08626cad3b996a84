//! The connections of an endpoint, by number.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;

/// Connections of type `C` by number. The registry holds only weak references to them.
pub(crate) struct Registry<C>(Mutex<HashMap<u64, Weak<C>>>);

/// The registration of a connection in a [`Registry`]. Dropping it removes the connection from the registry.
pub(crate) struct RegisteredConnection {
    registry: Weak<dyn ForgetNumber>,
    number: u64,
}

trait ForgetNumber: Send + Sync {
    fn forget(&self, number: u64);
}

impl<C> Default for Registry<C> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<C: Send + Sync + 'static> Registry<C> {
    /// Returns the entry for the connection with this number.
    pub fn place(self: &Arc<Self>, number: u64) -> RegisteredConnection {
        let registry: Weak<Self> = Arc::downgrade(self);
        RegisteredConnection { registry, number }
    }

    pub fn add(&self, number: u64, connection: &Arc<C>) {
        self.0.lock().insert(number, Arc::downgrade(connection));
    }

    pub fn len(&self) -> usize {
        self.0.lock().len()
    }

    pub fn get(&self, number: u64) -> Option<Arc<C>> {
        self.0.lock().get(&number)?.upgrade()
    }
}

impl<C: Send + Sync> ForgetNumber for Registry<C> {
    fn forget(&self, number: u64) {
        self.0.lock().remove(&number);
    }
}

impl Drop for RegisteredConnection {
    fn drop(&mut self) {
        self.registry.upgrade().into_iter().for_each(|registry| registry.forget(self.number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_removed_from_the_registry_is_not_found() {
        let registry = Arc::new(Registry::default());
        let connection = Arc::new(7);
        let place = registry.place(1);
        registry.add(1, &connection);
        assert_eq!(registry.get(1).as_deref(), Some(&7));
        assert_eq!(registry.get(2), None);
        drop(place);
        assert_eq!(registry.get(1), None);
    }
}
