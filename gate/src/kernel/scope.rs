//! What an application tells the gate about itself.

use std::net::IpAddr;
use std::sync::Arc;

use millrace_kernel::Error;

use super::Client;
use super::maps::Maps;

/// An application's side of its scope; see [`Gate::scope`](super::Gate::scope). Clones share it; calls from many threads
/// at once are fine, each is one system call.
#[derive(Clone)]
pub struct Scope {
    maps: Arc<Maps>,
    index: u32,
    /// Which of the scopes that have this index.
    turn: u32,
}

impl Scope {
    pub(super) fn new(maps: Arc<Maps>, index: u32) -> Self {
        let turn = maps.turn(index);
        Self { maps, index, turn }
    }

    /// A client has one connection more. Returns how many it has. For [`Counting::Application`](super::Counting).
    pub fn inc(&self, client: IpAddr) -> Result<u32, Error> {
        self.with(|maps| maps.change_count(self.index, client, 1))
    }

    /// A client has one connection less. Never less than none.
    pub fn dec(&self, client: IpAddr) -> Result<u32, Error> {
        self.with(|maps| maps.change_count(self.index, client, -1))
    }

    /// How many connections the client has to whom the address belongs.
    pub fn connections(&self, client: IpAddr) -> Result<u32, Error> {
        self.with(|maps| maps.connections(self.index, client))
    }

    /// Makes a connection ID known, before it is given to a peer. For [`Live::Published`](super::Live).
    pub fn publish(&self, id: &[u8]) -> Result<(), Error> {
        self.with(|maps| maps.publish(self.index, id))
    }

    /// Forgets a connection ID, also one that was not known.
    pub fn retire(&self, id: &[u8]) -> Result<(), Error> {
        self.with(|maps| maps.retire(self.index, id))
    }

    pub(super) fn clients(&self) -> Result<Vec<Client>, Error> {
        self.with(|maps| Ok(maps.clients(self.index)))
    }

    fn with<T>(&self, work: impl FnOnce(&Maps) -> Result<T, Error>) -> Result<T, Error> {
        self.maps.in_turn(self.index, self.turn, || work(&self.maps))
    }
}
