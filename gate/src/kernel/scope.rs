//! The handle with which an application reports its connections to the gate.

use std::net::IpAddr;
use std::sync::Arc;

use millrace_kernel::Error;

use super::KernelClient;
use super::maps::GateMaps;

/// The handle with which a guarded application (scope) reports its connections, from
/// [`LoadedGate::scope`](super::LoadedGate::scope). Clones belong to the same application. The handle may be used from
/// many threads at once. Each call is one system call.
#[derive(Clone)]
pub struct KernelScope {
    maps: Arc<GateMaps>,
    index: u32,
    /// The number of scopes that had `index` before this one. A call fails if this number has changed.
    turn: u32,
}

impl KernelScope {
    pub(super) fn new(maps: Arc<GateMaps>, index: u32) -> Self {
        let turn = maps.turn(index);
        Self { maps, index, turn }
    }

    /// Adds one connection of a client and returns the client's number of connections. Use it with
    /// [`Counting::Application`](super::Counting).
    pub fn inc(&self, client: IpAddr) -> Result<u32, Error> {
        self.with(|maps| maps.change_count(self.index, client, 1))
    }

    /// Removes one connection of a client, if it has one, and returns the client's number of connections.
    pub fn dec(&self, client: IpAddr) -> Result<u32, Error> {
        self.with(|maps| maps.change_count(self.index, client, -1))
    }

    /// Returns the number of connections of the client that the address belongs to.
    pub fn connections(&self, client: IpAddr) -> Result<u32, Error> {
        self.with(|maps| maps.connections(self.index, client))
    }

    /// Tells the gate a connection ID of the server. Call it before the peer learns the ID. Use it with
    /// [`LiveRule::Published`](super::LiveRule).
    pub fn publish(&self, id: &[u8]) -> Result<(), Error> {
        self.with(|maps| maps.publish(self.index, id))
    }

    /// Forgets a published connection ID. An unknown ID is no error.
    pub fn retire(&self, id: &[u8]) -> Result<(), Error> {
        self.with(|maps| maps.retire(self.index, id))
    }

    pub(super) fn clients(&self) -> Result<Vec<KernelClient>, Error> {
        self.with(|maps| Ok(maps.clients(self.index)))
    }

    fn with<T>(&self, work: impl FnOnce(&GateMaps) -> Result<T, Error>) -> Result<T, Error> {
        self.maps.in_turn(self.index, self.turn, || work(&self.maps))
    }
}
