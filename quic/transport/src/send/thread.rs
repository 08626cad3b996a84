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
pub trait PacketSource: Send + Sync {
    /// Adds the packets that may be sent now to `batch`.
    fn add_packets(&self, now: Instant, batch: &mut PacketBatch);

    /// Sends a batch of the connection's shard.
    fn flush(&self, batch: &mut PacketBatch);
}

/// Connections of one shard.
pub type PacketSources = Vec<Arc<dyn PacketSource>>;

/// The thread of a shard. It ends when this is dropped.
#[derive(Debug)]
pub struct SendingThread(SyncSender<PacketSources>);

impl SendingThread {
    /// Starts the thread of the shard with this index.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn start(index: usize) -> io::Result<Self> {
        let (asks, asked) = sync_channel::<PacketSources>(QUEUE);
        let send = move || {
            let mut batch = PacketBatch::default();
            asked.into_iter().for_each(|sources| send_all(&sources, &mut batch));
        };
        thread::Builder::new().name(format!("send-{index}")).spawn(send)?;
        Ok(Self(asks))
    }

    /// Makes the thread send what these connections may send. Returns false if the thread has too much to do.
    pub fn ask(&self, sources: PacketSources) -> bool {
        self.0.try_send(sources).is_ok()
    }
}

fn send_all(sources: &PacketSources, batch: &mut PacketBatch) {
    let now = Instant::now();
    for source in sources {
        source.add_packets(now, batch);
        if batch.is_large() {
            source.flush(batch);
        }
    }
    if let Some(source) = sources.first() {
        source.flush(batch);
    }
}
