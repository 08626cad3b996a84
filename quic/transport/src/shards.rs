//! Shards: the parts of an endpoint that work independently of each other, so that an endpoint uses several CPUs.
//!
//! A connection belongs to the shard that its connection IDs name by their first byte, modulo the number of shards.
//! [`sockets::share`](crate::sockets::share) makes the kernel deliver packets by that rule. It also holds for the ID
//! that a client chooses for its first packets, and [`ShardIds`] issues only IDs that name the same shard. So all
//! packets of a connection reach one shard, whatever address they come from.

use std::{
    io,
    net::UdpSocket,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    sync::{Arc, atomic::Ordering},
};

use quinn::{AsyncUdpSocket, EndpointConfig, Runtime as _, TokioRuntime};
use quinn_proto::{ConnectionId, ConnectionIdGenerator, InvalidCid};

use crate::{
    alarm::Alarm,
    config::Config,
    connection::Connection,
    driver,
    ids::ConnectionIds,
    marking::{Marking, ReceivedCounts},
    offload::{Attached, OffloadEntry},
    registry::Registry,
    send::{BatchSender, SendReport},
    takeover::TakeoverSocket,
};

/// The largest number of shards of an endpoint. The first byte of a connection ID, modulo a larger number, would
/// distribute connections unevenly.
pub const MAX_SHARDS: usize = 64;

/// One shard: a UDP socket, quinn's endpoint on it, and the task and the sender of its connections' data planes.
pub(crate) struct Shard {
    pub quic: quinn::Endpoint,
    pub registry: Arc<Registry<Connection>>,
    pub alarm: Arc<Alarm>,
    pub sender: Arc<BatchSender>,
    /// The function that registers a connection so that it may get a kernel offload.
    pub offloads: Option<OffloadEntry>,
    pub takeover: Arc<TakeoverSocket>,
    /// A descriptor of the socket, for a successor.
    socket: OwnedFd,
    counts: Arc<ReceivedCounts>,
}

/// Counts of one shard of an endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardReport {
    /// Number of the shard's connections that are established.
    pub connections: usize,
    /// Packets that the shard has received.
    pub received: u64,
    /// Packets of other shards' connections that the shard has received and dropped. The kernel delivers none, unless
    /// its rule for selecting a socket was changed.
    pub misdirected: u64,
    /// Packets that the shard's data planes have sent.
    pub sent: SendReport,
}

/// The place of a shard in its endpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShardIndex {
    pub index: usize,
    pub shards: usize,
}

impl ShardIndex {
    /// Reports whether the shard has the connection to which packets with this destination connection ID belong.
    fn owns(self, id: &[u8]) -> bool {
        id.first().map_or(0, |byte| usize::from(*byte) % self.shards) == self.index
    }
}

impl Shard {
    /// Starts a shard on `socket`, within a tokio runtime. `ids` are the connection IDs of the endpoint. `predecessor` has
    /// those of the process that still reads the socket, and the channel to it.
    pub fn start(
        socket: UdpSocket,
        at: ShardIndex,
        ids: ConnectionIds,
        predecessor: Option<(ConnectionIds, OwnedFd)>,
        config: &Config,
        mut endpoint: EndpointConfig,
        accepting: Option<quinn::ServerConfig>,
    ) -> io::Result<Self> {
        let counts = Arc::<ReceivedCounts>::default();
        let counted = Arc::clone(&counts);
        let issued = ShardIds { ids: ids.clone(), at, counts: counted };
        endpoint.cid_generator(move || Box::new(issued.clone()));
        let shared = socket.as_fd().try_clone_to_owned()?;
        let sender = Arc::new(BatchSender::new(&socket, config.gso)?);
        let runtime = Arc::new(TokioRuntime);
        let (socket, offloads, is_left) = match config.offload.clone() {
            Some(offload) => {
                let Attached { socket, enter, is_left } = offload.attach(socket)?;
                (socket, Some(enter), is_left)
            }
            None => (runtime.wrap_udp_socket(socket)?, None, None),
        };
        let takeover = Arc::new(TakeoverSocket::new(socket, is_left, ids, predecessor));
        let socket = Arc::clone(&takeover) as Arc<dyn AsyncUdpSocket>;
        let marking =
            Marking { socket, sender: Arc::clone(&sender), dscp: config.dscp, counts: Arc::clone(&counts) };
        let quic =
            quinn::Endpoint::new_with_abstract_socket(endpoint, accepting, Arc::new(marking), runtime)?;
        // The kernel merges packets from one address to one socket, which may be of several shards' connections.
        if offloads.is_some() || at.shards > 1 {
            sender.refuse_merged()?;
        }
        if at.shards > 1 {
            sender.start_thread(at.index)?;
        }
        let registry = Arc::new(Registry::default());
        let alarm = Arc::new(Alarm::new());
        tokio::spawn(driver::run(Arc::clone(&alarm), Arc::downgrade(&registry), Arc::clone(&sender)));
        Ok(Self { quic, registry, alarm, sender, offloads, takeover, socket: shared, counts })
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub fn report(&self) -> ShardReport {
        ShardReport {
            connections: self.registry.len(),
            received: self.counts.received.load(Ordering::Relaxed),
            misdirected: self.counts.misdirected.load(Ordering::Relaxed),
            sent: self.sender.totals(),
        }
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        // The notification wakes the driver task, which ends because the shard's registry of connections was dropped.
        self.registry = Arc::default();
        self.alarm.ring();
    }
}

/// A generator of connection IDs that name one shard. Every process with the same key recognizes them, also with another
/// number of shards.
#[derive(Clone)]
struct ShardIds {
    ids: ConnectionIds,
    at: ShardIndex,
    counts: Arc<ReceivedCounts>,
}

impl ConnectionIdGenerator for ShardIds {
    fn generate_cid(&mut self) -> ConnectionId {
        // The first byte is random, so this takes as many draws as there are shards, on average.
        loop {
            let id = self.ids.generate_cid();
            if self.at.owns(&id) {
                return id;
            }
        }
    }

    /// Checks the ID of a packet that belongs to no connection of the shard. quinn answers a packet with a valid ID by a
    /// stateless reset, which must not end a connection that another shard has.
    fn validate(&self, id: &ConnectionId) -> Result<(), InvalidCid> {
        self.ids.validate(id)?;
        if self.at.owns(id) {
            return Ok(());
        }
        self.counts.misdirected.fetch_add(1, Ordering::Relaxed);
        Err(InvalidCid)
    }

    fn cid_len(&self) -> usize {
        self.ids.cid_len()
    }

    fn cid_lifetime(&self) -> Option<std::time::Duration> {
        self.ids.cid_lifetime()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(key: u8, index: usize, shards: usize) -> (ShardIds, Arc<ReceivedCounts>) {
        let counts = Arc::<ReceivedCounts>::default();
        let ids = ConnectionIds::new(&[key], 0);
        (ShardIds { ids, at: ShardIndex { index, shards }, counts: Arc::clone(&counts) }, counts)
    }

    #[test]
    fn issued_ids_are_valid_at_their_own_shard_of_any_process_and_at_no_other() {
        for shards in [1, 2, 3, 16, MAX_SHARDS] {
            for index in 0..shards {
                let id = ids(1, index, shards).0.generate_cid();
                assert_eq!((id.len(), usize::from(id[0]) % shards), (crate::ID_LEN, index));
                for others in [1, 2, 5, 16] {
                    let valid = |other: &usize| ids(1, *other, others).0.validate(&id).is_ok();
                    let shard = usize::from(id[0]) % others;
                    assert_eq!((0..others).filter(valid).collect::<Vec<_>>(), [shard], "{id}");
                    assert!(ids(2, shard, others).0.validate(&id).is_err(), "another key");
                }
            }
        }
    }

    #[test]
    fn only_valid_ids_of_other_shards_count_as_misdirected() {
        let (shard, counts) = ids(1, 0, 2);
        let misdirected = || counts.misdirected.load(Ordering::Relaxed);
        assert!(shard.validate(&ids(2, 1, 2).0.generate_cid()).is_err());
        assert!(shard.validate(&ids(1, 0, 2).0.generate_cid()).is_ok());
        assert_eq!(misdirected(), 0);
        assert!(shard.validate(&ids(1, 1, 2).0.generate_cid()).is_err());
        assert_eq!(misdirected(), 1);
    }
}
