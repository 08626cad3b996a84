//! Finds the relays of a cluster: by records in etcd, or by a list in a file or behind a URL.
//!
//! [`Discovery::run`] keeps a [`DiscoveryState`] up to date for ever. It keeps what it has found while the store does not answer,
//! since a store that is away says nothing about the relays.
//!
//! A record is a hint. Whoever can write the store can make relays connect somewhere, or keep them apart. The relay that a record
//! names must still show a certificate for the name in its URL.
#![deny(missing_docs)]

mod etcd;
mod http;
mod list;
mod record;
mod state;

use tokio::sync::watch;

pub use self::{
    etcd::{EtcdConfig, EtcdDiscovery},
    http::{HttpClient, StoreError},
    list::{ListDiscovery, ListPlace},
    record::{MAX_RELAYS, RecordError, RelayRecord, RelayUrlError, check_url},
    state::DiscoveryState,
};

/// A place where relays are found.
#[derive(Debug)]
pub enum Discovery {
    /// Records in etcd. This relay keeps one of its own there.
    Etcd(EtcdDiscovery),
    /// A list that somebody else keeps.
    List(ListDiscovery),
}

impl Discovery {
    /// Keeps `found` up to date. It ends with the receivers of `found`, and withdraws this relay's own record before.
    pub async fn run(self, found: watch::Sender<DiscoveryState>) {
        match self {
            Self::Etcd(etcd) => etcd.run(&found).await,
            Self::List(list) => list.run(&found).await,
        }
    }
}
