//! Packets on their way out, of connections on any of the relay's endpoints.

use std::{sync::Arc, time::Instant};

use millrace_transport::{Connection, send::Batch};

/// One batch per endpoint, so that a packet for many subscribers leaves in as few system calls as can be.
#[derive(Default)]
pub struct Outbox {
    batches: Vec<(Arc<Connection>, Batch)>,
}

impl Outbox {
    /// Takes what `connection` may send now.
    pub fn transmit(&mut self, connection: &Arc<Connection>, now: Instant) {
        let same = |(other, _): &(Arc<Connection>, Batch)| other.shares_socket(connection);
        let index = self.batches.iter().position(same).unwrap_or_else(|| {
            self.batches.push((Arc::clone(connection), connection.batch()));
            self.batches.len() - 1
        });
        connection.transmit(now, &mut self.batches[index].1);
    }

    /// Hands everything to the network.
    pub fn flush(&mut self) {
        for (connection, batch) in &mut self.batches {
            connection.flush(batch);
        }
    }
}
