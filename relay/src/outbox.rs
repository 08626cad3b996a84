//! Packets that are about to be sent, collected from connections of all endpoints.

use std::{sync::Arc, time::Instant};

use millrace_transport::{Connection, send::PacketBatch};

/// One batch of packets for each socket, so that an object for many subscribers is sent in few system calls.
#[derive(Default)]
pub struct Outbox {
    batches: Vec<(Arc<Connection>, PacketBatch)>,
}

impl Outbox {
    /// Adds the packets that `connection` may send now to the batch of its socket.
    pub fn transmit(&mut self, connection: &Arc<Connection>, now: Instant) {
        let same = |(other, _): &(Arc<Connection>, PacketBatch)| other.shares_socket(connection);
        let index = self.batches.iter().position(same).unwrap_or_else(|| {
            self.batches.push((Arc::clone(connection), connection.batch()));
            self.batches.len() - 1
        });
        connection.transmit(now, &mut self.batches[index].1);
    }

    /// Sends the collected packets of all sockets.
    pub fn flush(&mut self) {
        for (connection, batch) in &mut self.batches {
            connection.flush(batch);
        }
    }
}
