//! Packets of one connection leave in the order of their numbers.
//!
//! Several threads seal packets of a connection, one after the other, but send them without the connection's lock. Who is
//! interrupted in between would be overtaken, and receivers take what comes late for lost. So whoever has sealed packets while
//! others of the connection wait in somebody's batch hands them to that batch's sender, and goes on.

use parking_lot::Mutex;

use super::packets::Packets;

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
    /// Packets from `from` on were sealed and added to batch `id`. If others wait elsewhere that were sealed before, they are taken
    /// out again, and wait behind those. Returns whether the batch has become the one that has packets of the connection.
    ///
    /// To be called under the connection's lock, so that nobody seals meanwhile.
    pub(super) fn settle(&self, id: u64, packets: &mut Packets, from: usize) -> bool {
        let mut turn = self.0.lock();
        match turn.batch {
            None => {
                turn.batch = Some(id);
                true
            }
            Some(batch) if batch == id && turn.packets.is_empty() => false,
            Some(_) => {
                packets.move_to(from, &mut turn.packets);
                false
            }
        }
    }

    /// The batch was sent. Adds what was handed over to its packets; returns whether there was anything, and the batch still has
    /// packets of the connection.
    pub(super) fn take(&self, packets: &mut Packets) -> bool {
        let mut turn = self.0.lock();
        if turn.packets.is_empty() {
            turn.batch = None;
            return false;
        }
        turn.packets.move_to(0, packets);
        true
    }

    /// The same, but for good: `send` takes what was handed over while nobody can hand over more.
    pub(super) fn finish(&self, send: impl FnOnce(&mut Packets)) {
        let mut turn = self.0.lock();
        turn.batch = None;
        send(&mut turn.packets);
    }

    /// The batch is not sent: what was handed over is lost, like what is in it.
    pub(super) fn give_up(&self) {
        *self.0.lock() = Turn::default();
    }
}
