//! The thread of a shard that sends for its connections, so that the fan-out of one track uses several CPUs.

use std::{
    io,
    sync::{
        Arc,
        mpsc::{SyncSender, sync_channel},
    },
    thread,
    time::Instant,
};

use super::PacketBatch;

/// Largest number of requests that wait for the thread. Whoever finds the queue full sends by itself.
const QUEUE: usize = 16;

/// A connection that may have something to send.
pub trait SendingConnection: Send + Sync {
    /// Adds the packets that may be sent now to `batch`.
    fn add_packets(&self, now: Instant, batch: &mut PacketBatch);

    /// Sends a batch of the connection's shard.
    fn flush(&self, batch: &mut PacketBatch);
}

/// Connections of one shard.
pub type ShardConnections = Vec<Arc<dyn SendingConnection>>;

/// The thread of a shard. It ends when this is dropped.
#[derive(Debug)]
pub struct SendingThread(SyncSender<ShardConnections>);

impl SendingThread {
    /// Starts the thread of the shard with this index.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(index: usize) -> io::Result<Self> {
        let (asks, asked) = sync_channel::<ShardConnections>(QUEUE);
        let send = move || {
            let mut batch = PacketBatch::default();
            for connections in asked {
                send_all(connections.iter().map(|connection| &**connection), &mut batch);
            }
        };
        thread::Builder::new().name(format!("send-{index}")).spawn(send)?;
        Ok(Self(asks))
    }

    /// Makes the thread send what these connections may send. Returns false if the thread has too much to do.
    pub fn ask(&self, connections: ShardConnections) -> bool {
        self.0.try_send(connections).is_ok()
    }
}

/// Sends what these connections of one shard may send now, and what `batch` has already.
pub fn send_all<'a>(
    connections: impl IntoIterator<Item = &'a dyn SendingConnection>,
    batch: &mut PacketBatch,
) {
    let now = Instant::now();
    let mut last = None;
    for connection in connections {
        connection.add_packets(now, batch);
        if batch.is_large() {
            connection.flush(batch);
        }
        last = Some(connection);
    }
    if let Some(connection) = last {
        connection.flush(batch);
    }
}
