//! Finds the relays of a cluster: by records in etcd, or by a list in a file or behind a URL.
//!
//! [`Discovery::run`] keeps a [`DiscoveryState`] up to date for ever. While the store does not answer, the relays that
//! were found stay, since an outage of the store says nothing about the relays.
//!
//! [`EtcdDirectory`] has the namespaces of the cluster, for relays that do not announce them in sessions.
//!
//! A record is a hint. Whoever can write to the store can make relays connect to any address, or keep them from
//! connecting to each other. The relay that a record names must still show a certificate for the name in its URL.
#![deny(missing_docs)]

mod directory;
mod etcd;
mod http;
mod list;
mod record;
mod state;
mod store;

pub use millrace_relay_cluster::{LookupLimits, LookupStatus};
use tokio::sync::watch;

pub use self::{
    directory::{EtcdDirectory, LookupError, MAX_REGISTERED},
    etcd::EtcdDiscovery,
    http::{HttpClient, StoreError},
    list::{ListDiscovery, ListPlace},
    record::{MAX_RELAYS, RecordError, RelayRecord, RelayUrlError, check_url},
    state::DiscoveryState,
    store::{EtcdConfig, EtcdUser},
};

/// The source from which the relays of a cluster are found.
#[derive(Debug)]
pub enum Discovery {
    /// Records in etcd, where this relay also keeps its own record.
    Etcd(EtcdDiscovery),
    /// A list of relays that another party maintains.
    List(ListDiscovery),
}

impl Discovery {
    /// Keeps the discovered relays in `found` up to date until all receivers of `found` are dropped, and then removes
    /// this relay's own record.
    pub async fn run(self, found: watch::Sender<DiscoveryState>) {
        match self {
            Self::Etcd(etcd) => etcd.run(&found).await,
            Self::List(list) => list.run(&found).await,
        }
    }
}
