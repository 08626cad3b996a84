//! Collects what connections of all endpoints may send, so that it is sent in few system calls.

use std::{sync::Arc, time::Instant};

use crate::{
    connection::Connection,
    send::{PacketBatch, SendingConnection, send_all},
};

/// Least number of connections of a shard for which its thread is woken. For fewer, waking it takes longer than sending.
const WORTH_WAKING: usize = 8;

/// Packets for each socket, and connections that may send more, such as those of an object's subscribers.
#[derive(Default)]
pub struct Outbox(Vec<SocketOutbox>);

struct SocketOutbox {
    batch: PacketBatch,
    /// The connection that was added first.
    first: Arc<Connection>,
    /// Connections that have something to send which is not in the batch.
    postponed: Vec<Arc<Connection>>,
}

impl Outbox {
    fn socket(&mut self, connection: &Arc<Connection>) -> &mut SocketOutbox {
        let same = |other: &SocketOutbox| other.first.shares_socket(connection);
        let index = self.0.iter().position(same).unwrap_or_else(|| {
            let first = Arc::clone(connection);
            self.0.push(SocketOutbox { batch: connection.batch(), first, postponed: Vec::new() });
            self.0.len() - 1
        });
        &mut self.0[index]
    }

    /// Adds the packets that `connection` may send now to the batch of its socket.
    pub fn transmit(&mut self, connection: &Arc<Connection>, now: Instant) {
        connection.transmit(now, &mut self.socket(connection).batch);
    }

    /// Notes that `connection` may have something to send. The packets are made by [`Self::flush`], in the threads of
    /// several shards if there are many.
    pub fn postpone(&mut self, connection: &Arc<Connection>) {
        self.socket(connection).postponed.push(Arc::clone(connection));
    }

    /// Sends the collected packets of all sockets. This thread sends for the connections of one shard, and those of the
    /// other shards with many connections send at the same time.
    pub fn flush(&mut self) {
        let mut wide = self.0.iter_mut().filter(|socket| socket.postponed.len() >= WORTH_WAKING);
        let _own = wide.next();
        wide.for_each(|socket| Connection::hand_over(&mut socket.postponed));
        for SocketOutbox { batch, first, postponed } in &mut self.0 {
            send_all(postponed.iter().map(|connection| &*connection.shared as &dyn SendingConnection), batch);
            first.flush(batch); // if no connection was postponed
            postponed.clear();
        }
    }
}
