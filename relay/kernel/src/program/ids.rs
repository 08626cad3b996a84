//! The map from connection IDs to connections.

use std::sync::{Arc, Mutex};

use libbpf_rs::MapCore;
use millrace_kernel::Error;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::write;

use super::intf;
use super::shared::{RelayMaps, lock};

/// The connection IDs of one connection. They are in the map until this is dropped.
pub(super) struct Ids {
    shared: Arc<RelayMaps>,
    /// The value in the map for each ID, which identifies the connection.
    connection: u32,
    ids: Mutex<Vec<intf::Id>>,
}

impl Ids {
    pub fn new(shared: Arc<RelayMaps>, connection: u32) -> Self {
        Self { shared, connection, ids: Mutex::default() }
    }

    pub fn add(&self, id: &[u8]) -> Result<(), Error> {
        let id = raw(id)?;
        let mut ids = lock(&self.ids);
        write(&self.shared.ids, "ids", id.as_bytes(), &self.connection.to_ne_bytes())?;
        if !ids.contains(&id) {
            ids.push(id);
        }
        Ok(())
    }

    pub fn remove(&self, id: &[u8]) -> Result<(), Error> {
        let id = raw(id)?;
        let mut ids = lock(&self.ids);
        if let Some(at) = ids.iter().position(|known| *known == id) {
            ids.swap_remove(at);
            self.forget(&id);
        }
        Ok(())
    }

    pub fn is_empty(&self) -> bool {
        lock(&self.ids).is_empty()
    }

    pub fn clear(&self) {
        lock(&self.ids).drain(..).for_each(|id| self.forget(&id));
    }

    /// Removes a connection ID from the map of connection IDs. The ID is in the map, so this cannot fail.
    fn forget(&self, id: &intf::Id) {
        let _ = self.shared.ids.delete(id.as_bytes());
    }
}

impl Drop for Ids {
    fn drop(&mut self) {
        self.clear();
    }
}

fn raw(id: &[u8]) -> Result<intf::Id, Error> {
    let mut raw = intf::Id::default();
    raw.bytes
        .get_mut(..id.len())
        .ok_or(Error::Config("connection IDs have 20 bytes at most"))?
        .copy_from_slice(id);
    Ok(raw)
}
