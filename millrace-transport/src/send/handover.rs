//! Packets of one connection leave in the order of their numbers.
//!
//! Several threads seal packets of a connection, one after the other, but send them without the connection's lock. Who is
//! interrupted in between would be overtaken, and receivers take what comes late for lost. So whoever has sealed packets while
//! others of the connection wait in somebody's batch hands them to that batch's sender, and goes on.

use parking_lot::Mutex;

use super::{Batch, batch::Packets};

/// Of one connection.
#[derive(Debug, Default)]
pub(crate) struct Handover(Mutex<Turn>);

#[derive(Debug, Default)]
struct Turn {
    /// The batch that has packets of the connection.
    batch: Option<u64>,
    /// Packets that were handed to whoever sends it.
    packets: Packets,
}

impl Handover {
    /// Packets from `from` on were sealed and added to a batch. If others wait elsewhere that were sealed before, they are taken out
    /// again, and wait behind those. Returns whether the batch has become the one that has packets of the connection.
    ///
    /// To be called under the connection's lock, so that nobody seals meanwhile.
    pub fn settle(&self, batch: &mut Batch, from: usize) -> bool {
        let mut turn = self.0.lock();
        match turn.batch {
            None => {
                turn.batch = Some(batch.id());
                true
            }
            Some(id) if id == batch.id() && turn.packets.is_empty() => false,
            Some(_) => {
                batch.take_from(from, &mut turn.packets);
                false
            }
        }
    }

    /// The batch was sent. Adds what was handed over to it; returns whether there was anything, and the batch still has packets of
    /// the connection.
    pub fn take(&self, batch: &mut Batch) -> bool {
        let mut turn = self.0.lock();
        if turn.packets.is_empty() {
            turn.batch = None;
            return false;
        }
        batch.add(&mut turn.packets);
        true
    }

    /// The same, but for good: `send` is given what was handed over while nobody can hand over more.
    pub fn finish(&self, batch: &mut Batch, send: impl FnOnce(&mut Batch)) {
        let mut turn = self.0.lock();
        turn.batch = None;
        batch.add(&mut turn.packets);
        send(batch);
    }

    /// The batch is not sent: what was handed over is lost, like what is in it.
    pub fn give_up(&self) {
        *self.0.lock() = Turn::default();
    }
}
